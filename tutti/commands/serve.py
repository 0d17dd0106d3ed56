"""`tutti serve`: the node's agent, which owns pools and serves them to other processes."""

from __future__ import annotations

import argparse
import contextlib
import grp
import importlib.util
import signal
import sys

from tutti.arguments import named_nbytes, nbytes, say_capacity
from tutti.base.terminal import facts
from tutti.cluster.remote_store import RemoteConfig
from tutti.commands.outcome import CommandResult
from tutti.errors import ConfigError, Unsupported
from tutti.node.agent import Agent
from tutti.node.agent_pools import AgentPools
from tutti.node.served_connection import AgentConfig
from tutti.placement.eviction import POLICIES
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


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Describes `tutti serve`."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLE
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="all members of one pool, always in the same order"
    )
    parser.add_argument("--folder", metavar="DIR", help="folder of pools, one per layout")
    parser.add_argument(
        "--capacity",
        type=nbytes,
        default=0,
        metavar="SIZE",
        help="limit on the total size of the pools that clients create in the folder",
    )
    parser.add_argument(
        "--socket", required=True, metavar="PATH", help="Unix socket to listen on (mode 0600)"
    )
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help="serve Prometheus metrics at http://HOST:PORT/metrics (default host 127.0.0.1)",
    )
    parser.add_argument("--group", metavar="NAME", help="let members of this group connect, too")
    parser.add_argument("--verify", choices=VERIFY, default="always", help="loads to verify")
    parser.add_argument(
        "--durability",
        choices=DURABILITY,
        default="process",
        help="stored pages survive a crash of the process, or also a power loss",
    )
    parser.add_argument(
        "--eviction",
        choices=sorted(POLICIES),
        default=StoreConfig().eviction,
        help="policy that chooses the objects to evict when a pool is full",
    )
    parser.add_argument(
        "--write-budget",
        type=nbytes,
        metavar="SIZE",
        help="limit on bytes written to each pool per day (default: no limit)",
    )
    for option, meaning in (
        ("--quota", "limit on a namespace's bytes per pool; over it, its own objects are evicted"),
        ("--write-quota", "limit on bytes that a namespace writes to each pool per day"),
    ):
        parser.add_argument(
            option,
            type=named_nbytes,
            action="append",
            default=[],
            metavar="NAME=SIZE",
            help=f"{meaning} (may be repeated)",
        )
    parser.add_argument(
        "--executor",
        choices=("auto", "uring", "threads"),
        default="auto",
        help="how files are read and written",
    )
    parser.add_argument(
        "--remote",
        metavar="mooncake://HOST:PORT",
        help="share pages with other nodes through a Mooncake Store; with ?tenants=A,B pages of"
        " these namespaces go to its tenants A and B; other options: docs/cluster.md",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> CommandResult:
    """Serves until a signal."""
    if args.capacity:
        say_capacity(args.capacity)
    pools = AgentPools(
        args.paths,
        folder=args.folder,
        capacity=args.capacity,
        config=StoreConfig(
            verify=args.verify,
            durability=args.durability,
            eviction=args.eviction,
            write_budget=args.write_budget,
            quotas=_quotas(args.quota, args.write_quota),
        ),
        executor=args.executor,
        remote=_remote(args.remote),
    )
    agent = Agent(AgentConfig(args.socket, group=_group(args.group)), pools)
    try:
        with contextlib.ExitStack() as stack:
            if args.metrics is not None:
                from tutti.metrics import AgentCollector, StoreCollector, published

                collectors = (StoreCollector(pools.stores), AgentCollector(agent))
                stack.enter_context(published(args.metrics, *collectors))
            pools.open_given()
            _serve(agent, args.socket)
    finally:
        pools.close()
    result = dict(vars(agent.counters))
    return CommandResult(result, facts(list(result.items())))


def _remote(url: str | None) -> RemoteConfig | None:
    if url is None:
        return None
    config = RemoteConfig.parse(url)
    if importlib.util.find_spec("mooncake") is None:
        raise Unsupported("--remote needs Mooncake's client; install tutti-kv[cluster]")
    return config


def _quotas(sizes: list[tuple[str, int]], budgets: list[tuple[str, int]]) -> tuple[Quota, ...]:
    nbytes, written = dict(sizes), dict(budgets)
    if len(nbytes) < len(sizes) or len(written) < len(budgets):
        raise ConfigError("a namespace has two quotas of one kind; give each once")
    return tuple(Quota(name, nbytes.get(name), written.get(name)) for name in {**nbytes, **written})


def _serve(agent: Agent, path: str) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, lambda *_: agent.stop()) for number in numbers]
    try:
        agent.serve(lambda: print(f"serving on {path}", file=sys.stderr, flush=True))
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _group(name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(
            f"the group {name!r} does not exist; name one of `getent group`"
        ) from error
