"""`tutti bench ttft` on a trace in Mooncake's format: one system and one rate at a time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from gpu.serving.server import Fleet, GpuServer
from sglang_server import ServerFailed


def run(fleet: Fleet, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each rate and system."""
    for rate in args.rates if args.trace else ():
        for server in fleet.servers:
            yield from fleet.each(partial(measure, rate=rate, args=args), [server]).values()


def measure(server: GpuServer, rate: float, args: argparse.Namespace) -> dict[str, Any]:
    """The bench's point.  Raises CalledProcessError or TimeoutExpired when it gave none."""
    server.flush()
    if server.stores:
        status, text = server.call("POST", "/hicache/storage-backend/clear")
        if status != 200:
            raise ServerFailed(f"the storage is not cleared: {status} {text}")
    folder = args.out / f"rate-{server.system}-{rate:g}"
    words = f"--url {server.url} --system {server.system} --rates {rate} --seeds 1 --warmup 0 "
    words += f"--workload mooncake --start populated --vocabulary {args.vocabulary} "
    words += f"--timeout-s 120 --requests {args.requests}"
    command = [sys.executable, "-m", "tutti.cli", "bench", "ttft", *words.split()]
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(
            [*command, "--data", str(args.trace), "--out", str(folder)],
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=max(1.0, server.until_s - time.monotonic()),
            check=True,
        )
    result = json.loads((folder / "result.json").read_text())
    row = {name: result[name] for name in ("system", "start", "workload", "partial")}
    return row | {"rate": rate, "point": result["points"][0]}
