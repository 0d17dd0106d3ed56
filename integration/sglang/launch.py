"""Builds the arguments that start SGLang with Tutti; does not import SGLang."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from typing import Any

from tutti.errors import ConfigError
from tutti.integration.sglang.options import HICACHE, LINKER, check_limits, parse_options

#: Versions of SGLang that the adapters support.
VERSIONS = ("0.5.23",)
PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "tutti"

_PACKAGE = "tutti.integration.sglang"
#: The storage's names in HiCache's extra config.
STORAGE_CLASS = {"module_path": f"{_PACKAGE}.hicache", "class_name": "TuttiHiCacheStorage"}
_PARALLEL_ALLOCATION = "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS"
_PAGE_SIZE = "SGLANG_HUGEPAGE_SIZE"
#: The I/O backend that each of SGLang's memory layouts needs.
IO_BACKENDS = {"page_first": "kernel", "page_first_direct": "direct", "layer_first": "kernel"}


def extra_config(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object for SGLang's extra config.  Raises ConfigError for invalid options."""
    parse_options(options, mode)
    if mode == HICACHE:
        return {
            "backend_name": "tutti",
            **STORAGE_CLASS,
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            **options,
        }
    return {
        "linker": "TuttiLinker",
        "linker_module_path": f"{_PACKAGE}.linker",
        "linker_extra_config": dict(options),
    }


def server_arguments(
    mode: str,
    model: str,
    options: Mapping[str, Any],
    *,
    page_size: int,
    layout: str = "page_first",
) -> list[str]:
    """Arguments of `python -m sglang.launch_server`.  Raises ConfigError for invalid options."""
    arguments = ["--model-path", model, "--page-size", str(page_size)]
    arguments += ["--enable-metrics", "--enable-cache-report"]
    config = json.dumps(extra_config(mode, options))
    check_limits(options, page_size)
    if mode == HICACHE:
        return [
            *arguments,
            "--enable-hierarchical-cache",
            *("--hicache-mem-layout", layout),
            *("--hicache-io-backend", IO_BACKENDS[layout]),
            *("--hicache-storage-prefetch-policy", "timeout"),
            *("--hicache-storage-backend", "dynamic"),
            *("--hicache-storage-backend-extra-config", config),
        ]
    return [
        *arguments,
        "--enable-unified-cache-external-linker",
        *("--unified-cache-external-linker-backend", "dynamic"),
        *("--unified-cache-external-linker-config", config),
    ]


def server_environment(mode: str) -> dict[str, str]:
    """Environment variables that make SGLang allocate its host pool on large pages.

    With the plugin they are not needed.  Empty for a mode without a host pool, and if the
    environment has such a setting already.
    """
    if mode != HICACHE or any(name in os.environ for name in (_PARALLEL_ALLOCATION, _PAGE_SIZE)):
        return {}
    return {_PARALLEL_ALLOCATION: "2"}


def ranks_and_nodes(arguments: Sequence[str]) -> tuple[int, int]:
    """(ranks per node, nodes) from SGLang's arguments.  Raises ConfigError for invalid ones."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in (_TENSOR, _STAGES, _REPLICAS, _NODES):
        parser.add_argument(*names, type=int, default=1)
    parser.add_argument("--enable-dp-attention", action="store_true")
    try:
        found, _ = parser.parse_known_args(_words(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"SGLang would refuse its arguments: {error}") from error
    replicas = 1 if found.enable_dp_attention else found.dp_size
    ranks, nodes = int(found.tp_size * found.pp_size * replicas), max(1, int(found.nnodes))
    return max(1, ranks // nodes), nodes


_TENSOR = ("--tp-size", "--tp", "--tensor-parallel-size")
_STAGES = ("--pp-size", "--pp", "--pipeline-parallel-size")
_REPLICAS = ("--dp-size", "--dp", "--data-parallel-size")
_NODES = ("--nnodes",)
#: Arguments that change the loop of SGLang's scheduler, and what it then omits for a linker.
OMISSIONS = {
    "--enable-pdmux": "abort a prefill whose load failed",
    "--disaggregation-mode decode": "release what a decode server offloaded",
    "--enable-pd-role-switch": "release what a decode server offloaded",
    "--dllm-algorithm": "start the loads of a diffusion model",
}
#: Arguments by which another process gives the weights.
WEIGHTS_FROM = ("--load-format remote_instance", "--weight-cache-mode client")
#: Flags that `tutti sglang command` sets, with its own option for each.
_OWN = {
    "--model-path": "--model",
    "--model": "--model",
    "--page-size": "--page-size",
    "--hicache-mem-layout": "--layout",
    "--hicache-io-backend": "--layout",
    "--hicache-storage-backend": "",
    "--hicache-storage-backend-extra-config": "--option",
    "--unified-cache-external-linker-backend": "",
    "--unified-cache-external-linker-config": "--option",
}
#: The flags that start each mode.
_STARTS = {
    HICACHE: ("--enable-hierarchical-cache", "--enable-hicache"),
    LINKER: ("--enable-unified-cache-external-linker",),
}
#: All flags that are looked for here.
_FLAGS = (
    *(*_TENSOR, *_STAGES, *_REPLICAS, *_NODES, *_OWN, *_STARTS[HICACHE], *_STARTS[LINKER]),
    *(argument.split()[0] for argument in (*OMISSIONS, *WEIGHTS_FROM)),
)


def _words(arguments: Sequence[str]) -> list[str]:
    """The words of SGLang's arguments, with values after "=" apart.

    Flags of which only the beginning is given, as SGLang's parser accepts them, are whole.
    """
    words = []
    for argument in arguments:
        for word in argument.split("=", 1):
            meant = [flag for flag in _FLAGS if word.startswith("--") and flag.startswith(word)]
            words.append(meant[0] if len(meant) == 1 else word)
    return words


def check_together(mode: str, arguments: Sequence[str], more: Sequence[str]) -> None:
    """Raises ConfigError for additional arguments that do not fit the mode, or contradict those of
    `server_arguments`: SGLang would use the last value.
    """
    given = _words(more)
    for other, flags in _STARTS.items():
        if other != mode and (flag := next(filter(given.__contains__, flags), "")):
            raise ConfigError(
                f"{flag} starts the mode {other}, and one server runs one of them; "
                f"leave it out, or pass --mode {other}"
            )
    refusal = linker_refusal([*given, *map(" ".join, pairwise(given))])
    if mode == LINKER and refusal:
        raise ConfigError(refusal)
    wanted = dict(pairwise(arguments))
    wanted["--model"] = wanted["--model-path"]
    for flag, value in pairwise(given):
        if mode == LINKER and flag in _STAGES and value != "1":
            raise ConfigError(
                f"{flag} {value}: SGLang 0.5.23 does not synchronize pipeline stages that use a "
                "linker; leave it out, or use --mode hicache"
            )
        if flag in _OWN and wanted.get(flag, value) != value:
            own = f", and use {_OWN[flag]} before the `--`" if _OWN[flag] else ""
            raise ConfigError(f"{flag} contradicts what this command sets; leave it out{own}")


def linker_refusal(given: Collection[str]) -> str:
    """Why SGLang serves no linker with these arguments, written as in OMISSIONS; "" if it does."""
    for argument in filter(given.__contains__, OMISSIONS):
        return (
            f"with a linker and {argument} SGLang 0.5.23 does not {OMISSIONS[argument]}; start "
            "without the linker, or use Tutti behind HiCache if SGLang has HiCache for this server"
        )
    return ""


def weights_from(arguments: Sequence[str]) -> str:
    """Which of WEIGHTS_FROM is among SGLang's arguments; "" if SGLang reads the weights itself."""
    last = set(map(" ".join, dict(pairwise(_words(arguments))).items()))
    return next(filter(last.__contains__, WEIGHTS_FROM), "")


def check_weights(given_by: str, model: str, version: str | None) -> None:
    """Raises ConfigError for weights of another process without a version.

    given_by: one of WEIGHTS_FROM, or "".  version: the option `weights`.
    """
    if given_by and not version:
        raise ConfigError(
            f"with {given_by} another process gives the weights, and the files of {model} do not "
            'identify them; set the option "weights" to their version'
        )


def installed_version() -> str:
    """The version of SGLang in this environment; "" if it is not installed."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def refused_arguments(arguments: Sequence[str]) -> str:
    """The reason why the installed SGLang's parser refuses the arguments; "" if it accepts them.

    Raises ImportError if SGLang cannot be imported.
    """
    from sglang.srt.server_args import ServerArgs

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(message)

    parser = Parser(add_help=False)
    ServerArgs.add_cli_args(parser)
    try:
        parser.parse_args(list(arguments))
    except (ValueError, AssertionError) as error:
        return str(error)
    return ""
