"""`tutti serve`: the node's agent, which owns pools and serves them to other processes."""

from __future__ import annotations

import argparse
import contextlib
import grp
import importlib.util
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from tutti.arguments import named_nbytes, nbytes, options, say_capacity
from tutti.base.checks import socket_path
from tutti.base.terminal import facts
from tutti.base.units import format_nbytes
from tutti.cluster.remote_store import RemoteConfig
from tutti.commands.members import existing_members
from tutti.commands.outcome import CommandResult
from tutti.errors import ConfigError, Unsupported
from tutti.node.agent import Agent
from tutti.node.agent_pools import AgentPools
from tutti.node.connect import AGENT
from tutti.node.served_connection import AgentConfig
from tutti.placement.eviction import POLICIES
from tutti.pool.pool_format import warn_of_capacity
from tutti.transfers.put_limits import Quota
from tutti.transfers.store_config import DURABILITY, VERIFY, StoreConfig

_DESCRIPTION = """\
Runs the agent: opens pools and serves them to other processes on this machine, until Ctrl-C or
SIGTERM. Clients find pages through the agent and read and write the data themselves."""
_EXAMPLE = """\
example:
  tutti serve /mnt/nvme/pool.tutti --socket /run/user/1000/tutti.sock
  tutti serve --folder /mnt/nvme/tutti --capacity 2TiB --socket /run/user/1000/tutti.sock

With --folder pools are created as servers ask for them; in SGLang, set the option
"path": "unix:/run/user/1000/tutti.sock"."""


def _yes_or_no(text: str) -> bool:
    """An argparse type; TOML's true and false are taken, too."""
    known = {"yes": True, "true": True, "no": False, "false": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return known[text.lower()]


_DEFAULTS = StoreConfig()


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="all members of one pool, always in the same order"
    )
    option = options(parser)
    option("--folder DIR", None, "folder of pools, one per layout")
    what = "total size of the pools in the folder, 0: make none; PATH keeps its own size"
    option("--capacity SIZE", 0, what, nbytes)
    option("--socket PATH", None, "Unix socket to listen on (mode 0600)", required=True)
    what = "serve Prometheus metrics at http://HOST:PORT/metrics (default host 127.0.0.1)"
    option("--metrics [HOST:]PORT", None, what)
    option("--group NAME", None, "let members of this group connect, too")
    _add_pool_options(parser)
    option("--executor", "auto", "how files are read and written", ("auto", "uring", "threads"))
    what = "share pages with other nodes through a Mooncake Store; with ?tenants=A,B pages of"
    what += " these namespaces go to its tenants A and B; other options: docs/cluster.md"
    option("--remote mooncake://HOST:PORT", None, what)
    parser.set_defaults(run=run)


def _add_pool_options(parser: argparse.ArgumentParser) -> None:
    """Adds options for fields of StoreConfig, which checks the values; none for those of the
    engine, because clients have engines of their own.
    """
    option = options(parser.add_argument_group("settings of every pool"))

    def of(field: str, name: str, kind: Callable[[str], Any] | Sequence[str], meaning: str) -> None:
        meaning += f" (default: {_shown(field)})"
        option(name, getattr(_DEFAULTS, field), meaning, kind, dest=field)

    of("verify", "--verify", VERIFY, "which loads to verify")
    what = "stored pages survive a crash of the process, or also a power loss"
    of("durability", "--durability", DURABILITY, what)
    what = "policy that chooses the objects to evict when a pool is full"
    of("eviction", "--eviction", sorted(POLICIES), what)
    what = "deadline of a command to the drive, of clients' as well"
    of("timeout_s", "--timeout SECONDS", float, what)
    what = "later look-ups of a client during which a page it found is not evicted"
    of("pin_lookups", "--pin-lookups N", int, what)
    what = "share of a pool, 0 to 1, that all pins together may protect"
    of("pin_share", "--pin-share SHARE", float, what)
    what = "memory of each pool for digests of recent objects"
    of("digest_cache_nbytes", "--digest-cache SIZE", nbytes, what)
    of("write_budget", "--write-budget SIZE", nbytes, "limit on bytes written to each pool per day")
    what = "open a pool without its missing members; their objects miss"
    of("degraded", "--degraded yes|no", _yes_or_no, what)
    what = "accept files that other users can change, and what they serve"
    of("any_owner", "--any-owner yes|no", _yes_or_no, what)
    for name, what in (
        ("--quota", "limit on a namespace's bytes per pool; over it, its own objects are evicted"),
        ("--write-quota", "limit on bytes that a namespace writes to each pool per day"),
    ):
        what += " (may be repeated)"
        option(f"{name} NAME=SIZE", [], what, named_nbytes, action="append")


def run(args: argparse.Namespace) -> CommandResult:
    """Serves until a signal."""
    socket_path("--socket", args.socket)
    if args.paths and args.folder is not None:
        raise ConfigError("pass either PATH... or --folder DIR, not both")
    if not args.paths and args.folder is None:
        raise ConfigError("nothing to serve; pass PATH... or --folder DIR")
    if args.capacity:
        say_capacity(args.capacity)
    pools = AgentPools(
        existing_members(args.paths) if args.paths else (),
        folder=args.folder,
        capacity=args.capacity,
        config=_config(args),
        executor=args.executor,
        remote=_remote(args.remote),
    )
    path = args.socket.removeprefix(AGENT)
    agent = Agent(AgentConfig(path, group=_group(args.group)), pools)
    _raise_files_limit()
    with contextlib.closing(pools), contextlib.ExitStack() as stack:
        if args.metrics is not None:
            from tutti.metrics import AgentCollector, StoreCollector, published

            collectors = (StoreCollector(pools.stores), AgentCollector(agent))
            stack.enter_context(published(args.metrics, *collectors))
        pools.open_given()
        for name, store in pools.stores().items() if args.capacity else ():
            warn_of_capacity(name, args.capacity, store.members.count, store.geometry)
        _serve(agent, path)
    result = dict(vars(agent.counters))
    return CommandResult(result, facts(list(result.items())))


def _remote(url: str | None) -> RemoteConfig | None:
    if url is None:
        return None
    config = RemoteConfig.parse(url)
    if importlib.util.find_spec("mooncake") is None:
        raise Unsupported(
            "--remote needs Mooncake's client; in a clone of Tutti: pip install -e '.[cluster]'"
        )
    return config


def _config(args: argparse.Namespace) -> StoreConfig:
    given = {f.name: getattr(args, f.name) for f in fields(StoreConfig) if f.name in args}
    return StoreConfig(**given, quotas=_quotas(args.quota, args.write_quota))


def _shown(field: str) -> str:
    value = getattr(_DEFAULTS, field)
    if value is None:
        return "no limit"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.endswith("_nbytes"):
        return format_nbytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _quotas(sizes: list[tuple[str, int]], budgets: list[tuple[str, int]]) -> tuple[Quota, ...]:
    nbytes, written = dict(sizes), dict(budgets)
    if len(nbytes) < len(sizes) or len(written) < len(budgets):
        raise ConfigError("a namespace is given twice with --quota or --write-quota; pass it once")
    return tuple(Quota(name, nbytes.get(name), written.get(name)) for name in {**nbytes, **written})


def _serve(agent: Agent, path: str) -> None:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # One that is ignored stays so: SIGHUP under nohup, SIGINT in the background of a script.
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, lambda *_: agent.stop()) for number in numbers]
    try:
        agent.serve(lambda: print(f"serving on {path}", file=sys.stderr, flush=True))
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _raise_files_limit() -> None:
    """Raises the limit of open files: each connection is one, and the usual limit is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a connection that does not fit is logged
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _group(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(f"no group is called {name!r}; see `getent group`") from error
