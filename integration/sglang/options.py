"""The table and the parser of Tutti's options in SGLang's extra config.

An option that is not in the table is an error, so that a misspelt one is never silently ignored.
The server and `tutti sglang command` both use this parser, so that they refuse the same options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from tutti.base.checks import SECONDS_MAX, socket_path, text
from tutti.base.units import MiB, parse_nbytes
from tutti.errors import ConfigError
from tutti.node.connect import AGENT
from tutti.profiles.at_open import is_off
from tutti.scheduler.dispatcher import Schedule
from tutti.transfers.store_config import StoreConfig

HICACHE, LINKER = "hicache", "linker"


@dataclass(frozen=True)
class Option:
    """One option: its name, type (`kind`) and default.  What it means is on docs/sglang.md, of the
    linker's own on docs/sglang-linker.md.

    kind: "str", "size", "int", "float", "bool", or "paths" (a string or a list of strings).
    choices: the allowed values.  minimum: the smallest allowed number, or bytes.  required: what to
    give, of an option without a default.
    """

    name: str
    kind: str
    default: Any = None
    modes: Sequence[str] = (HICACHE, LINKER)
    choices: Sequence[str] = ()
    minimum: float | None = None
    required: str = ""


_PATH = (
    "folder of the pools, on the SSD, made when missing; or a list of folders, files and "
    "devices, which the ranks share; or unix:SOCKET of the node's agent"
)
_CAPACITY = "size of all KV pools below the path, shared by the ranks; used when one is made"
_ENGINES = ("auto", "host", "launch", "resident", "persistent")
OPTIONS: tuple[Option, ...] = (
    Option("path", "paths", required=_PATH),
    Option("capacity", "size", required=_CAPACITY),
    Option("sidecar_capacity", "size", minimum=1),
    Option("degraded", "bool", False),
    Option("verify", "str", "always"),
    Option("durability", "str", "process"),
    Option("eviction", "str", "mq"),
    Option("write_budget", "size"),
    Option("page_cache_share", "float", 0.0),
    Option("residency", "str", "dynamic"),
    Option("executor", "str", "auto", choices=("auto", "uring", "threads")),
    Option("timeout_s", "float", 30.0, minimum=0.001),
    Option("model", "str"),
    Option("weights", "str"),
    Option("allow_unwatched_weights", "bool", False),
    Option("kv_events", "bool", False),
    Option("profile", "str", "auto"),
    Option("scheduler_trace", "str"),
    Option("service_threads", "int"),
    Option("second_touch", "bool", False),
    Option("namespace", "str", ""),
    Option("hugepages", "str", "collapse", (HICACHE,), ("advise", "collapse", "off")),
    Option("min_tokens", "int", 0, (LINKER,), minimum=0),
    Option("recompute_us_per_token", "float", 0.0, (LINKER,), minimum=0),
    Option("max_load_tokens", "int", 0, (LINKER,), minimum=0),
    Option("max_load_ms", "float", 0.0, (LINKER,), minimum=0),
    Option("read_ahead_share", "float", 0.5, (LINKER,), minimum=0),
    Option("backlog_share", "float", 0.25, (LINKER,), minimum=0),
    Option("load_staging", "size", 256 * MiB, (LINKER,)),
    Option("store_staging", "size", 256 * MiB, (LINKER,)),
    Option("gpu_staging", "size", None, (LINKER,)),
    Option("pin_lookups", "int", 256, (LINKER,)),
    Option("pin_share", "float", 0.5, (LINKER,), minimum=0.001),
    Option("load_timeout_s", "float", 60.0, (LINKER,), minimum=0.001),
    Option("breaker_failures", "int", 3, (LINKER,), minimum=1),
    Option("breaker_pause_s", "float", 5.0, (LINKER,), minimum=0.001),
    Option("crawl_mbs", "float", 20.0, (LINKER,), minimum=0),
    Option("gpu_mover", "str", "auto", (LINKER,), ("auto", "copy-batch", "copy", "kernel")),
    Option("gpu_engine", "str", "auto", (LINKER,), _ENGINES),
)

#: Keys of the same JSON object that SGLang itself reads, with their types (`Option.kind`).
SGLANG_KEYS: Mapping[str, Mapping[str, str]] = {
    HICACHE: {
        "backend_name": "str",
        "module_path": "str",
        "class_name": "str",
        "interface_v1": "int",
        "allocator": "str",
        "prefetch_threshold": "int",
        "prefetch_timeout_base": "float",
        "prefetch_timeout_per_ki_token": "float",
        "hicache_storage_pass_prefix_keys": "bool",
        "file_storage_path": "str",  # from --file-storage-path, put into every backend's object
    },
    LINKER: {},
}


def option_table(mode: str) -> tuple[Option, ...]:
    """The options of a mode."""
    return tuple(option for option in OPTIONS if mode in option.modes)


def parse_options(config: Mapping[str, Any] | None, mode: str) -> dict[str, Any]:
    """All options of the mode with their validated values; sizes in bytes.

    Raises ConfigError for options that are unknown, missing, of the wrong type, or contradictory.
    """
    config = dict(config or {})
    table = {option.name: option for option in option_table(mode)}
    for name in config:
        if name not in table and name not in SGLANG_KEYS[mode]:
            near = get_close_matches(name, table, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(table)}"
            if name in {option.name for option in OPTIONS}:
                hint = f"it needs --mode {LINKER if mode == HICACHE else HICACHE}"
            raise ConfigError(f"unknown option {name!r} for Tutti's {mode}: {hint}")
    values = {}
    for name, option in table.items():
        value = config.get(name)
        if value is None:
            if option.required:
                raise ConfigError(f"option {name!r} is missing ({option.required}); set it")
            values[name] = option.default
        else:
            values[name] = _checked(option, value)
    store_config(values)
    if values["scheduler_trace"] and is_off(values["profile"]):
        raise ConfigError(
            "scheduler_trace needs a scheduler, which profile=off disables; remove one of them"
        )
    given = [name for name in table if name in _OF_A_POOL and values[name] != table[name].default]
    if is_agents(values["path"]) and given:
        raise ConfigError(
            f"{', '.join(given)}: the agent at {values['path'][0]} has settings of its own for its"
            " pools; leave this out, and see `tutti serve --help` for what can be set there"
        )
    threads, places = values["service_threads"], len(values["path"])
    if threads is not None and threads > places:
        raise ConfigError(
            f"option 'service_threads' is {threads}, and each of them serves a file of its own: "
            f"there is one in each place of 'path', so give {places} at most, or more places"
        )
    return values


def named_options(given: Sequence[str], mode: str) -> dict[str, Any]:
    """Parses NAME=VALUE pairs by the types of the table.  Raises ConfigError."""
    kinds = {**SGLANG_KEYS[mode], **{one.name: one.kind for one in option_table(mode)}}
    options: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--option {pair!r} has no value; write NAME=VALUE")
        if name in ("path", "capacity"):
            raise ConfigError(f"--option {pair!r}: give --{name} instead")
        try:
            options[name] = _typed(kinds.get(name, "str"), value)
        except ConfigError as error:
            raise ConfigError(f"--option {pair!r}: {error}") from error
    return options


def _typed(kind: str, value: str) -> Any:
    if kind == "bool":
        if value not in ("true", "false"):
            raise ConfigError("write true or false")
        return value == "true"
    try:
        return {"int": int, "float": float}.get(kind, str)(value)
    except ValueError as error:
        raise ConfigError(f"write {'a whole' if kind == 'int' else 'a'} number") from error


def check_limits(options: Mapping[str, Any], page_size: int) -> None:
    """Raises ConfigError for limits below a page, with which nothing would be loaded."""
    if 0 < options.get("max_load_tokens", 0) < page_size:
        raise ConfigError(
            f"option 'max_load_tokens' is {options['max_load_tokens']}, and a page has {page_size} "
            "tokens; set at least as many, or 0 for no limit"
        )


def is_agents(paths: Sequence[str]) -> bool:
    """Whether an agent owns the pools.  Raises ConfigError for a socket with other paths."""
    sockets = [path for path in paths if path.startswith(AGENT)]
    for path in sockets:
        socket_path("option 'path'", path)
    if sockets and len(paths) > 1:
        raise ConfigError(f"{sockets[0]} is an agent's socket; give it alone, as the only path")
    return bool(sockets)


#: Options that are the agent's for an agent's pools.
_OF_A_POOL = frozenset(field.name for field in fields(StoreConfig))


def store_config(options: Mapping[str, Any], schedule: Schedule | None = None) -> StoreConfig:
    """The settings of a pool from options.  Raises ConfigError."""
    settings = {name: options[name] for name in options if name in _OF_A_POOL}
    return StoreConfig(**settings, schedule=schedule)


def _checked(option: Option, value: Any) -> Any:
    if option.kind == "size":
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise _wrong(option, value, 'a size such as "64GiB"')
        nbytes = parse_nbytes(value)
        _check_range(option, value, nbytes)
        return nbytes
    if option.kind == "paths":
        paths = [value] if isinstance(value, str) else value
        known = isinstance(paths, (list, tuple)) and paths
        if not known or not all(isinstance(path, str) and path for path in paths):
            raise _wrong(option, value, "a string, or a list of strings, none of them empty")
        return tuple(paths)
    if option.kind == "bool":
        if not isinstance(value, bool):
            raise _wrong(option, value, "true or false")
        return value
    if option.kind in ("int", "float"):
        wanted = (int,) if option.kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise _wrong(option, value, f"a number ({option.kind})")
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(option, value, "a finite number")
        _check_range(option, value, value)
        return value
    if not isinstance(value, str) or not value:
        raise _wrong(option, value, "a string")
    text(f"option {option.name!r}", value)
    if option.choices and value not in option.choices:
        raise _wrong(option, value, f"one of {', '.join(option.choices)}")
    return value


def _check_range(option: Option, value: Any, number: float) -> None:
    if option.minimum is not None and number < option.minimum:
        raise _wrong(option, value, f"at least {option.minimum:g}")
    if option.name.endswith("_s") and number > SECONDS_MAX:
        raise _wrong(option, value, f"at most {SECONDS_MAX:g} seconds, a day")


def _wrong(option: Option, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"option {option.name!r} is {value!r}; give {wanted}")
