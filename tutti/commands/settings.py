"""Settings of commands from the environment and from a file, below the command line.

export TUTTI_CONFIG=/etc/tutti.toml      # [serve] folder = "/mnt/nvme/tutti", capacity = "2TiB"
export TUTTI_SERVE_CAPACITY=1TiB         # wins over the file; an argument wins over both
export TUTTI_SERVE_QUOTA=a=1TiB,b=2TiB   # an option that may be repeated: arguments are added
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tutti.errors import ConfigError

CONFIG = "TUTTI_CONFIG"


def configure(
    parser: argparse.ArgumentParser, table: str, environment: Mapping[str, str], other: set[str]
) -> None:
    """Makes settings the defaults of a command's options.

    table: of the file, and the middle of the variables' names (TUTTI_SERVE_CAPACITY).  other: keys
    of the table that belong to another command.  Raises ConfigError for keys that no option has.
    """
    options = {
        action.option_strings[-1].removeprefix("--"): action
        for action in parser._actions
        if action.option_strings and action.nargs in (None, "+")
    }
    for name, value in _settings(table, environment, set(options), other).items():
        action = options[name]
        action.required = False
        # Text passes through the option's own type, and its choices, as an argument does.
        if action.nargs == "+" or isinstance(action, argparse._AppendAction):
            parts = value if isinstance(value, list) else str(value).split(",")
            parts = [part for part in map(str.strip, map(str, parts)) if part]
            if action.nargs == "+" and not parts:
                raise ConfigError(f"setting {name} = {value!r}: pass at least one value")
            action.default = [_checked(parser, action, name, part) for part in parts]
        else:
            action.default = _checked(parser, action, name, str(value))


def _settings(
    table: str, environment: Mapping[str, str], options: set[str], other: set[str]
) -> dict[str, Any]:
    """The file's settings with those of the environment over them, by name of the option."""
    found: dict[str, Any] = {}
    path = environment.get(CONFIG)
    if path:
        for name, value in _table(Path(path), table).items():
            if name in options:
                found[name] = value
            elif name not in other:
                near = get_close_matches(name, options, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(options)}"
                raise ConfigError(f"{path}: unknown key {name!r} in [{table}]: {hint}")
    for name in options:
        variable = f"TUTTI_{table}_{name}".upper().replace("-", "_")
        if environment.get(variable):
            found[name] = environment[variable]
    return found


def _table(path: Path, table: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{CONFIG}={path}: {error.strerror}; set it to a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{CONFIG}={path} is not TOML: {error}") from error
    found = document.get(table, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {table} is not a table; write [{table}]")
    return {str(name): value for name, value in found.items()}


def _checked(parser: argparse.ArgumentParser, action: argparse.Action, name: str, text: str) -> Any:
    try:
        value = parser._get_value(action, text)
        parser._check_value(action, value)
    except argparse.ArgumentError as error:
        raise ConfigError(f"setting {name} = {text!r}: {error.message}") from error
    return value
