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

_BANDWIDTH = """\
Measures store and retrieve bandwidth in GB/s (10^9 bytes) of payload, and its CPU time, for objects
of several shapes. The pools are files, which are removed at the end."""
_PATHS = """\
Measures one drive by every path to it: threads, io_uring, the page cache, NVMe passthrough or vfio.
Reports bandwidth by block size and depth, latencies to p99.99, CPU time, and the bytes of SGL and
PRP lists."""
_PATHS_EXAMPLE = """\
  tutti bench paths --dir /mnt/nvme
  tutti bench paths --path /dev/ng0n1 --blocks 4KiB 128KiB --depths 1 32"""
_RING = """\
Measures commands per second of the rings alone, with a memory controller that moves no data. This
is the upper bound of the protocol on this machine."""
_WINDOW = """\
Compares pools that load and verify the same pages in turns. One adapts its window (the bytes in
flight) while it runs; two always have 32 commands in flight, and so show the noise. Reports when
the first layer arrives, the bandwidth of the whole load, and how long a computation waits for its
layers."""
_SHORT = """\
Measures transfers of a few pages. In a pool in memory: the CPU time of a put, and of a look-up with
a load, until the call returns. On a file or a block device: how long one page of 8 MiB takes until
it is acknowledged, against plain writes of the same bytes and one record. A device holds one pool,
so there the kinds of puts are measured one after the other instead of in turns."""
_SHORT_EXAMPLE = """\
  tutti bench short --dir /mnt/nvme
  tutti bench short --dir /dev/nvme1n1"""
_THREADS = """\
Measures the engine without a disk: its drives are simulated in memory, so the numbers are the
engine's own limit on this machine. Runs commands without data, unverified loads and verified loads,
with one drive, with one drive and a digest worker, and with two drives (one thread per drive)."""
_AGENT = """\
Measures the cost of the agent's socket. Look-ups and plans of loads and puts are timed through an
agent and, in turns, inside this process; the difference is the cost. No pages are moved."""
_SECOND_TIER = """\
Compares fetching from a Mooncake cluster through the agent's second tier with Mooncake's own batch
get of the same values, in turns. Then measures the rate of the master's look-ups, and local loads
beside the tier's work. Starts a cluster on this machine, or takes one that runs; every run stores
new pages in it."""
_SECOND_TIER_EXAMPLE = """\
  tutti bench second-tier --dir /mnt/nvme
  tutti bench second-tier --remote mooncake://10.0.0.1:50051 --dir /mnt/nvme"""
_SUBMIT = """\
Measures the CPU's work to submit a load to GPU memory, for each engine and mover. Needs neither a
GPU nor a drive: a stand-in for the CUDA driver does nothing but count. Reports microseconds of CPU,
driver calls and argument bytes, per batch and per layer, for a growing number of pages."""
_PLACEMENT = """\
Shows the drive addresses of commands in the order of submission, from the trace of an emulated NVMe
drive. Compares a pool with one file per page, for stored and for loaded prompts. Writes JSON, CSV
and a figure."""
_PLACEMENT_EXAMPLE = """\
  python tests/qemu/placement.py traces
  tutti bench placement traces/trace --out placement"""
_SLACK = """\
Compares policies of the scheduler on a simulated server; all results are simulated. The scheduler's
code is real, the drive runs on a virtual clock, and times of drives and GPUs are published ones.
Reports how long layers waited for their loads under each policy, and which bars each case misses.
A missed bar does not change the exit code."""
_DECISIONS = """\
Measures the CPU time of the scheduler's decisions, in a pool on a file and on a simulated server.
The decisions of the pool are recorded, then replayed for timing. Reports the CPU time of a decision
and of a request, and the limit of each."""
_DECISIONS_EXAMPLE = """\
  tutti bench decisions --dir /mnt/nvme"""
_PEERS = """\
Compares ways to keep KV pages on an SSD: SGLang's controller over Tutti, over files and over NIXL,
LMCache's client, the store without SGLang, one file per page, and fio. Each peer that can run here
stores and loads batches of 128 pages of Llama-3-8B's shape, in a process of its own and in rounds
that alternate with hicache-tutti's."""
_PEERS_EXAMPLE = """\
  tutti bench peers --dir /mnt/nvme
  tutti bench peers --dir /mnt/nvme --page-tokens 64 --peers hicache-tutti hicache-nixl fio

SGLang's peers need sglang in the same environment; peers that cannot run are listed as skipped."""
_SIMULATE = """\
Serves a workload on simulated servers and drives using the real scheduler, and reports latencies.
Times come from a calibration, or from a profile of this machine. `--validate` compares the model
with published points. All results are simulated."""
_SIMULATE_EXAMPLE = """\
  tutti simulate --workload mooncake --data trace.jsonl --servers 16
  tutti simulate --workload leval-synthetic --rates 0.5 1 1.5 --warm 2600 --csv ttft.csv
  tutti simulate --validate"""
_REPLAY = """\
Replays a trace of requests against a pool with real bytes: loads the cached prefix, checks every
byte of it, and stores the rest. Reports the hit rate next to that of the optimal policy."""
_REPLAY_EXAMPLE = """\
  tutti replay --trace synthetic --requests 500
  tutti replay --trace requests.jsonl --json

The exit code is 1 when a byte was wrong."""

_EVICTION = """\
Compares the hit rates of the eviction policies with plain LRU and with the optimum. Replays request
traces against the index and the allocator; no data is stored."""
_EVICTION_EXAMPLE = """\
  tutti bench eviction
  tutti bench eviction --trace conversation_trace.jsonl --capacity 0.05 0.2 --json

The exit code is 1 when a policy misses its required hit rate."""

_PROFILE = """\
Measures read and write times of a drive, separately and concurrently, and writes a profile for the
scheduler. Compute times are measured on a GPU; without one they are estimated by a roofline and
marked as estimates. An interrupted run resumes."""
_PROFILE_EXAMPLE = """\
  tutti profile --medium /mnt/nvme --model llama-3.1-8b --gpu H100 --out profile.json"""
_RESIDENCY = """\
Compares four ways to read a pool when memory is short: through the page cache, through the page
cache with fadvise, with O_DIRECT, and with both paths in use. Reads a working set repeatedly while
a control group limits memory. Reports page cache hit rates, bandwidth and p99 latency.
Needs root."""
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
    description: str,
    example: str,
    exit_code: Callable[[dict[str, Any]], int] = _wrong_bytes,
    *,
    makes_dir: bool = False,
) -> Callable[[argparse.ArgumentParser], None]:
    """Returns a function that adds the command of `tutti.bench.NAME` to a parser.

    The module has `add_arguments` and `run`, which returns the result for JSON.  Text of it is made
    by `report`, or from HEAD, `rows_of` and `notes_of`.  example: commands, each after two blanks.
    exit_code: of a result; by default wrong bytes fail the command.  makes_dir: --dir need not
    exist.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        parser.description, parser.epilog = description, f"example:\n{example}"
        module = bench_module(name)
        module.add_arguments(parser)

        def run(args: argparse.Namespace) -> CommandResult:
            _check_places(args, makes_dir=makes_dir)
            result = module.run(args, progress)
            return CommandResult(result, report_of(module, result), exit_code(result))

        parser.set_defaults(run=run)

    return add


add_bandwidth = bench_command("bandwidth", _BANDWIDTH, "  tutti bench bandwidth --dir /mnt/nvme")
add_paths = bench_command("paths", _PATHS, _PATHS_EXAMPLE)
add_peers = bench_command("peers.run", _PEERS, _PEERS_EXAMPLE)
add_ring = bench_command("ring", _RING, "  tutti bench ring")
add_window = bench_command("window", _WINDOW, "  tutti bench window --dir /mnt/nvme0 /mnt/nvme1")
add_short = bench_command("short", _SHORT, _SHORT_EXAMPLE)
add_threads = bench_command("threads", _THREADS, "  tutti bench threads")
add_agent = bench_command("agent", _AGENT, "  tutti bench agent --dir /mnt/nvme")
add_second_tier = bench_command("second_tier", _SECOND_TIER, _SECOND_TIER_EXAMPLE)
add_submit = bench_command("submit", _SUBMIT, "  tutti bench submit --pages 128 16384")
add_slack = bench_command(
    "slack.run",
    _SLACK,
    "  tutti bench slack --workloads chat agents --gpus H100 --seeds 3",
    lambda result: EXIT_OK,  # its "wrong" names profiles
)
add_decisions = bench_command("slack.decisions", _DECISIONS, _DECISIONS_EXAMPLE)
add_placement = bench_command("placement", _PLACEMENT, _PLACEMENT_EXAMPLE)
add_replay = bench_command("replay", _REPLAY, _REPLAY_EXAMPLE)
add_eviction = bench_command(
    "eviction",
    _EVICTION,
    _EVICTION_EXAMPLE,
    lambda result: EXIT_FAILED if result["missed"] else EXIT_OK,
)
add_simulate = bench_command("simulate.run", _SIMULATE, _SIMULATE_EXAMPLE)
add_profile = bench_command("profile.run", _PROFILE, _PROFILE_EXAMPLE)
add_residency = bench_command("residency.run", _RESIDENCY, _RESIDENCY_EXAMPLE)
