"""Measures the commands per second of a queue pair, which is the limit of the protocol.

A memory controller checks and completes every command without moving a byte, so only the cost of
submission, doorbells and completions is measured. One thread submits, one executes.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from typing import Any

from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import MiB, format_nbytes, parse_nbytes
from tutti.bench.controller_memory import MemoryController
from tutti.bench.environment import describe
from tutti.bench.statistics import bootstrap_median, interval_text, median
from tutti.bench.writable import options
from tutti.errors import ConfigError, DeviceTimeout
from tutti.gio_uring import _native
from tutti.gio_uring.memory import HostBuffer

_NAMESPACE_NBYTES = 64 * MiB
_BUFFER_NBYTES = 4 * MiB
_CLOSE_TIMEOUT_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = options(parser)
    option("--depths", [64, 1024], "entries of the queue pair, powers of two")
    option("--batches", [1, 32], "commands per doorbell")
    option("--block", "4KiB", "bytes per command")
    option("--commands", 1_000_000, "commands per run")
    option("--repeats", 5, "runs per row")


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Runs every depth with every batch.

    Raises ConfigError for invalid numbers, DeviceTimeout if the controller stops answering.
    """
    if min(args.commands, args.repeats, *args.batches) < 1:
        raise ConfigError("--commands, --repeats and --batches count from 1")
    block_nbytes = parse_nbytes(args.block)
    pairs = [(depth, batch) for depth in args.depths for batch in args.batches]
    rows = []
    with progress("ring", len(pairs) * args.repeats) as bar:
        for depth, batch in pairs:
            runs = []
            for _ in range(args.repeats):
                runs.append(read_commands(depth, batch, block_nbytes, args.commands))
                bar.advance(1)
            rows.append(_row(depth, batch, args.commands, runs))
    return {
        "benchmark": "ring",
        "source": "emulated",
        "controller": "memory, zero-copy",
        "rows": rows,
        "block_nbytes": block_nbytes,
        "commands": args.commands,
        "machine": describe(),
    }


HEAD = ("depth", "commands a doorbell", "million commands/s", "CPU ns a command")


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    return [
        [
            *(row["depth"], row["batch"]),
            interval_text({name: value / 1e6 for name, value in row["commands_per_s"].items()}),
            f"{row['cpu_ns_per_command']:.0f}",
        ]
        for row in result["rows"]
    ]


def report(result: dict[str, Any]) -> str:
    block = format_nbytes(result["block_nbytes"])
    what = f"{result['source']}: reads of {block} from a controller in memory"
    return f"{table(HEAD, rows_of(result))}\n{what}; no bytes are moved: the rings alone"


def read_commands(depth: int, batch: int, block_nbytes: int, commands: int) -> tuple[float, float]:
    """(wall s, CPU s) of reads through a new queue pair."""
    controller = MemoryController([_NAMESPACE_NBYTES], mode="zero_copy")
    buffer = HostBuffer(max(_BUFFER_NBYTES, block_nbytes))
    region = controller.register(buffer)
    queue_pair = controller.create_queue_pair(depth)
    seconds = ctypes.c_double()
    cpu_s = time.process_time()
    try:
        result = _native.lib().gio_ring_bench(
            controller.handle,
            queue_pair.struct_address,
            commands,
            batch,
            region.address,
            region.nbytes,
            block_nbytes // controller.info.lba_nbytes,
            ctypes.addressof(seconds),
        )
        cpu_s = time.process_time() - cpu_s
        remedy = "use a block of whole 4096-byte blocks up to 1 MiB"
        _native.check(result, "the ring benchmark failed", remedy, ConfigError)
    finally:
        controller.reset(_CLOSE_TIMEOUT_S)
        queue_pair.close()
        region.close()
        controller.close()
    if not seconds.value > 0:
        raise DeviceTimeout("the ring benchmark took no time; repeat it with more --commands")
    return seconds.value, cpu_s


def _row(depth: int, batch: int, commands: int, runs: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "depth": depth,
        "batch": batch,
        "commands_per_s": bootstrap_median([commands / wall_s for wall_s, _ in runs]).to_dict(),
        "cpu_ns_per_command": median([cpu_s / commands * 1e9 for _, cpu_s in runs]),
    }
