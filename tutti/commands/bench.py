"""`tutti bench`, `profile`, `simulate` and `replay`: the benches' own modules as commands."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from tutti.base.checks import open_regular
from tutti.base.terminal import progress, table
from tutti.commands.outcome import EXIT_FAILED, EXIT_OK, CommandResult
from tutti.errors import ConfigError, Unsupported, system_message
from tutti.pool.places import is_device
from tutti.pool.pool_format import check_unlabelled

_PATHS_EXAMPLE = """\
  tutti bench paths --dir /mnt/nvme
  tutti bench paths --path /dev/ng0n1 --blocks 4KiB 128KiB --depths 1 32"""
_SHORT_EXAMPLE = """\
  tutti bench short --dir /mnt/nvme
  tutti bench short --dir /dev/nvme1n1"""
_SECOND_TIER_EXAMPLE = """\
  tutti bench second-tier --dir /mnt/nvme
  tutti bench second-tier --remote mooncake://10.0.0.1:50051 --dir /mnt/nvme"""
_PLACEMENT_EXAMPLE = """\
  python tests/qemu/placement.py traces
  tutti bench placement traces/trace --out placement"""
_PEERS_EXAMPLE = """\
  tutti bench peers --dir /mnt/nvme
  tutti bench peers --dir /mnt/nvme --page-tokens 64 --peers hicache-tutti hicache-nixl fio

SGLang's peers need sglang in the same environment; peers that cannot run are listed as skipped."""
_SIMULATE_EXAMPLE = """\
  tutti simulate --workload mooncake --data trace.jsonl --servers 16
  tutti simulate --workload leval-synthetic --rates 0.5 1 1.5 --warm 2600 --csv ttft.csv
  tutti simulate --validate"""
_REPLAY_EXAMPLE = """\
  tutti replay --trace synthetic --requests 500
  tutti replay --trace requests.jsonl --json

The exit code is 1 when a byte was wrong."""
_EVICTION_EXAMPLE = """\
  tutti bench eviction
  tutti bench eviction --trace conversation_trace.jsonl --capacity 0.05 0.2 --json

The exit code is 1 when a policy misses its required hit rate."""
_PROFILE_EXAMPLE = """\
  tutti profile --medium /mnt/nvme --model llama-3.1-8b --gpu H100 --out profile.json"""
_RESIDENCY_EXAMPLE = """\
  tutti bench residency --dir /mnt/nvme --working-set 2GiB"""

_SYNTHETIC = "synthetic"  # instead of the file of a trace
_READ = ("trace", "recorded", "calibration", "data")


def bench_module(name: str) -> ModuleType:
    """`tutti.bench.NAME`.  Raises Unsupported where the benches are not installed."""
    try:
        return import_module(f"tutti.bench.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("tutti.bench"):
            raise
        raise Unsupported(
            f"{error.name} is missing: benches are part of the installed package; run it from the "
            "environment that `make install` creates"
        ) from error


def _wrong_bytes(result: dict[str, Any]) -> int:
    return EXIT_FAILED if result.get("wrong") else EXIT_OK


def _check_places(args: argparse.Namespace, *, makes_dir: bool) -> None:
    """Raises ConfigError for places that cannot be written or read, before anything is measured.

    Raises PoolExists for devices that are labelled for a server: they would be blank afterwards.
    """
    for option in ("path", "medium", "dir"):
        places = list(dict.fromkeys(map(str, _given(args, option))))
        check_unlabelled([p for p in places if is_device(p)], getattr(args, "force", []))
    folders = [] if getattr(args, "workload", "") == "mooncake" else _given(args, "data")
    try:
        for place in () if makes_dir else places:
            if not is_device(place):
                tempfile.TemporaryFile(dir=place).close()
        for place in [p for option in _READ for p in _given(args, option)]:
            if place != _SYNTHETIC and not (place in folders and os.path.isdir(place)):
                open_regular(place).close()
    except OSError as error:
        error.filename = place
        raise ConfigError(f"cannot use {system_message(error)}") from error


def report_of(module: ModuleType, result: dict[str, Any]) -> str:
    """Text of a bench's result: its own report, or its table and the notes below."""
    if hasattr(module, "report"):
        return str(module.report(result))
    return "\n".join([table(module.HEAD, module.rows_of(result)), *module.notes_of(result)])


def _given(args: argparse.Namespace, option: str) -> list[Any]:
    given = getattr(args, option, None)
    return given if isinstance(given, list) else [] if given is None else [given]


def bench_command(
    name: str,
    example: str,
    exit_code: Callable[[dict[str, Any]], int] = _wrong_bytes,
    *,
    makes_dir: bool = False,
) -> Callable[[argparse.ArgumentParser], None]:
    """Returns a function that adds the command of `tutti.bench.NAME` to a parser.

    The module's docstring is the command's help.  It has `add_arguments` and `run`, which returns
    the result for JSON.  Text of it is made by `report`, or from HEAD, `rows_of` and `notes_of`.
    example: commands, each after two blanks.  exit_code: of a result; by default wrong bytes fail
    the command.  makes_dir: --dir need not exist.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        module = bench_module(name)
        parser.description, parser.epilog = module.__doc__, f"example:\n{example}"
        module.add_arguments(parser)

        def run(args: argparse.Namespace) -> CommandResult:
            _check_places(args, makes_dir=makes_dir)
            result = module.run(args, progress)
            return CommandResult(result, report_of(module, result), exit_code(result))

        parser.set_defaults(run=run)

    return add


add_bandwidth = bench_command("bandwidth", "  tutti bench bandwidth --dir /mnt/nvme")
add_paths = bench_command("paths", _PATHS_EXAMPLE)
add_peers = bench_command("peers.run", _PEERS_EXAMPLE)
add_ring = bench_command("ring", "  tutti bench ring")
add_window = bench_command("window", "  tutti bench window --dir /mnt/nvme0 /mnt/nvme1")
add_short = bench_command("short", _SHORT_EXAMPLE)
add_threads = bench_command("threads", "  tutti bench threads")
add_agent = bench_command("agent", "  tutti bench agent --dir /mnt/nvme")
add_second_tier = bench_command("second_tier", _SECOND_TIER_EXAMPLE)
add_submit = bench_command("submit", "  tutti bench submit --pages 128 16384")
add_slack = bench_command(
    "slack.run",
    "  tutti bench slack --workloads chat agents --gpus H100 --seeds 3",
    lambda result: EXIT_OK,  # its "wrong" names profiles
)
add_decisions = bench_command("slack.decisions", "  tutti bench decisions --dir /mnt/nvme")
add_placement = bench_command("placement", _PLACEMENT_EXAMPLE)
add_replay = bench_command("replay", _REPLAY_EXAMPLE)
add_eviction = bench_command(
    "eviction",
    _EVICTION_EXAMPLE,
    lambda result: EXIT_FAILED if result["missed"] else EXIT_OK,
)
add_simulate = bench_command("simulate.run", _SIMULATE_EXAMPLE)
add_profile = bench_command("profile.run", _PROFILE_EXAMPLE)
add_residency = bench_command("residency.run", _RESIDENCY_EXAMPLE)
