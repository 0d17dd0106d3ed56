"""`tutti stat`: the counters of an agent's pool."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from tutti.arguments import above_zero, options, positive
from tutti.base.checks import seconds
from tutti.base.histogram import BOUNDS_S, quantile_s
from tutti.base.terminal import facts
from tutti.base.units import format_duration, format_nbytes
from tutti.commands.catalogue import ANSWER_S, add_pool_name, of_each_pool
from tutti.commands.outcome import CommandResult
from tutti.errors import AgentLost, ConfigError
from tutti.node.connect import AGENT, connect

_DESCRIPTION = """\
Shows the counters of an agent's pools (`tutti serve`) since they were opened. With --watch, prints
one line per interval for one pool, until Ctrl-C; with --json on stderr. A line says "away"
while the agent does not answer; without --watch the command fails then."""
_EXAMPLE = """\
example:
  tutti stat unix:/run/user/1000/tutti.sock --watch 5

`tutti info` shows the pool of a file that is not open."""
_HEADINGS = (
    *("time", "used", "hits", "read GB/s", "write GB/s", "load p99", "store p99"),
    *("dropped", "evicted", "errors", "clients"),
)
_COUNTERS = (
    *("looked_up", "hits", "bytes_read", "bytes_written"),
    *("dropped", "evicted", "load_errors", "store_errors"),
)
_WIDTH = 9
_TIER_STATES = {"closed": "works", "open": "paused", "half-open": "being tried", "off": "off"}


def add_stat(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument("pool", metavar="unix:SOCKET", help="socket of an agent")
    add_pool_name(parser)
    option = options(parser)
    option("--watch SECONDS", None, "length of an interval", above_zero)
    option("--count N", None, "stop after N intervals (default: never)", positive)
    parser.set_defaults(run=stat)


def stat(args: argparse.Namespace) -> CommandResult:
    """Shows totals, or intervals."""
    if not args.pool.startswith(AGENT):
        raise ConfigError(f"{args.pool} is not the socket of an agent; pass unix:SOCKET")
    if args.count is not None and args.watch is None:
        raise ConfigError("--count needs --watch; pass the length of an interval")
    if args.watch is None:
        return of_each_pool(args, lambda name: _totals(args.pool, name))
    seconds("--watch", args.watch)
    with connect(args.pool, pool=args.name, profile=None, lookup_timeout_s=ANSWER_S) as store:
        lines = _watch(store.stats, args.watch, args.count, sys.stderr if args.json else sys.stdout)
    return CommandResult({"intervals": lines}, f"{lines} intervals")


def _totals(path: str, name: str) -> CommandResult:
    with connect(path, pool=name, profile=None, lookup_timeout_s=ANSWER_S) as store:
        stats = store.stats()
    if not stats["connected"]:  # the numbers are old
        raise AgentLost(f"the agent at {path} is away: it did not answer in time; see its log")
    lines = list(zip(_HEADINGS, _row(_nothing(stats), stats, 0.0), strict=True))
    written = format_nbytes(stats["written_today_nbytes"])
    lines.append(("written today", f"{written} since midnight UTC, or since the opening"))
    if amplification := stats["bytes_written_per_byte_stored"]:
        lines.append(("amplification", f"{amplification:.3f} bytes written per byte"))
    for namespace, of in stats.get("namespaces", {}).items():
        limit = of["quota_nbytes"]
        size = format_nbytes(of["used_nbytes"]) + (f" of {format_nbytes(limit)}" if limit else "")
        dropped = of["over_quota"] + of["over_budget"]
        lines.append(
            (f"namespace {namespace}", f"{size}, {of['evicted']} evicted, {dropped} dropped")
        )
    if remote := stats.get("remote"):
        counts = (f"{remote[name]} {name}" for name in ("fetched", "replicated", "failures"))
        reads, writes = (_TIER_STATES[remote[name]] for name in ("state", "write_state"))
        lines.append(("second tier", f"{reads} (copies: {writes}), {', '.join(counts)}"))
    return CommandResult(stats, facts(lines))


def _watch(read: Any, interval_s: float, count: int | None, stream: TextIO) -> int:
    before, before_s, lines = read(), time.monotonic(), 0
    with contextlib.suppress(BrokenPipeError):  # after `| head -3` the result is not read either
        print(_line(_HEADINGS), file=stream, flush=True)
        while count is None or lines < count:
            time.sleep(interval_s)
            now, now_s = read(), time.monotonic()
            print(_line(_row(before, now, now_s - before_s)), file=stream, flush=True)
            lines += 1
            if now["connected"]:
                before, before_s = now, now_s
    return lines


def _nothing(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Counters of zero, as at the opening."""
    empty = {"counts": [0] * len(stats["load_latency"]["counts"])}
    return {**dict.fromkeys(_COUNTERS, 0), "load_latency": empty, "store_latency": empty}


def _row(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> list[str]:
    """One line; bandwidths only where an interval has a length."""
    if not now["connected"]:
        return [time.strftime("%H:%M:%S"), "away", *[""] * (len(_HEADINGS) - 2)]
    if any(now[name] < before[name] for name in _COUNTERS):
        before = _nothing(now)  # the agent was started again

    def since(*names: str) -> int:
        return sum(int(now[name]) - int(before[name]) for name in names)

    looked_up, capacity = since("looked_up"), max(1, int(now["capacity_objects"]))
    return [
        time.strftime("%H:%M:%S"),
        f"{1 - int(now['free_objects']) / capacity:.1%}",
        f"{since('hits') / looked_up:.1%}" if looked_up else "-",
        *(
            f"{since(name) / seconds / 1e9:.2f}" if seconds else "-"
            for name in ("bytes_read", "bytes_written")
        ),
        *(_p99(before, now, name) for name in ("load_latency", "store_latency")),
        str(since("dropped")),
        str(since("evicted")),
        str(since("load_errors", "store_errors")),
        str(now["sessions"]),
    ]


def _p99(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> str:
    pairs = zip(before[name]["counts"], now[name]["counts"], strict=True)
    bound_s = quantile_s([later - earlier for earlier, later in pairs], 0.99)
    if bound_s is None:
        return "-"
    return f">{BOUNDS_S[-1]:g} s" if math.isinf(bound_s) else f"<{format_duration(bound_s)}"


def _line(cells: Any) -> str:
    return "  ".join(str(cell).rjust(_WIDTH) for cell in cells)
