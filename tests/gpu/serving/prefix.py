"""TTFT against the length of a stored prefix: all systems in turns, medians, every value kept."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu.serving.server import REQUEST_S, Fleet, GpuServer

from tutti.base.terminal import progress
from tutti.bench.ttft import run as ttft
from tutti.bench.ttft.client import Record
from tutti.bench.ttft.http import ServerError
from tutti.bench.ttft.metrics import latencies_ms, mean_interval
from tutti.bench.ttft.session import BenchSession, open_session
from tutti.bench.ttft.workloads.prompt import Prompt, PromptPart

Sessions = dict[str, BenchSession]


def run(fleet: Fleet, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each length and system.  The prefix is stored once; every repeat has another end.

    A longer prefix begins with the shorter ones, so that the storage holds the longest alone.
    """
    sessions = fleet.each(partial(_session, vocabulary=args.vocabulary))
    ends = [0]
    for tokens in sorted(args.lengths):
        ends.append(tokens)
        parts = [PromptPart(f"prefix-{b}", b - a) for a, b in pairwise(ends)]
        fills = fleet.each(partial(_fill, sessions=sessions, parts=parts))
        servers = [server for server in fleet.servers if server.system in fills]
        records: dict[str, list[Record]] = {system: [] for system in fills}
        for repeat in range(args.repeats):
            end = PromptPart(f"end-{tokens}-{repeat}", args.tail_tokens)
            ask = partial(
                _ask, sessions=sessions, parts=[*parts, end], cold=not args.keep_page_cache
            )
            for server in servers:
                records[server.system] += fleet.each(ask, [server]).values()
            servers = servers[1:] + servers[:1]
        for system, found in records.items():
            row = {"system": system, "prefix_tokens": tokens, "tail_tokens": args.tail_tokens}
            yield {**row, **_times(found), **fills[system]}


def drop_page_cache() -> None:
    """Without it files come from memory.  Needs root (Linux, admin-guide/sysctl/vm.rst)."""
    subprocess.run(["sync"], timeout=60, check=True)
    Path("/proc/sys/vm/drop_caches").write_text("1\n")


def _session(server: GpuServer, vocabulary: int) -> BenchSession:
    parser = argparse.ArgumentParser()
    ttft.add_arguments(parser)
    words = f"--url {server.url} --system {server.system} --timeout-s {REQUEST_S:g} "
    words += f"--workload leval-synthetic --requests 1 --scale 0.02 --vocabulary {vocabulary}"
    return open_session(parser.parse_args(words.split()), [], progress)


def _request(session: BenchSession, parts: Sequence[PromptPart], new_tokens: int) -> Record:
    record = session.ask(Prompt("prefix", "prefix", tuple(parts), new_tokens), 0).records[0]
    if record.error:
        raise ServerError(record.error)
    return record


def _fill(server: GpuServer, sessions: Sessions, parts: list[PromptPart]) -> dict[str, Any]:
    """Has the last part computed and stored; those before it are."""
    before, began_s = server.stored(), time.monotonic()
    _request(sessions[server.system], parts, 1)
    computed_s = time.monotonic() - began_s
    pages = parts[-1].tokens // server.page_tokens if server.stores else 0
    stored = server.wait_stored(before, pages)
    times = {"computed_s": computed_s, "stored_s": time.monotonic() - began_s}
    return {"fill": {**times, "pages": pages, "stored_pages": stored}}


def _ask(server: GpuServer, sessions: Sessions, parts: list[PromptPart], cold: bool) -> Record:
    server.flush()
    if cold:
        drop_page_cache()
    return _request(sessions[server.system], parts, 8)


def _times(records: Sequence[Record]) -> dict[str, Any]:
    values = [latencies_ms(record)["ttft_sent"] for record in records]
    return {
        "ttft_ms": mean_interval(values) if values else None,
        "median_ms": statistics.median(values) if values else None,
        "all_ms": values,
        "places": [record.cached for record in records],
    }
