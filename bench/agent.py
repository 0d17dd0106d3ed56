"""Measures the cost of the agent's socket: look-ups and plans through it, and within one process.

The agent is a separate process, as users start it.  Both pools have the same pages; if the agent's
is on a device, this process's is in a temporary file.  No pages are moved: a plan is requested and
given up; the latter is not timed.  The calls of a round are in random order.  The parts of a plan's
time are measured, too: an empty request, and the socket alone, between processes on one core and on
two, after a pause in which both sleep and again at once.  At the end many clients, one process
each, send requests at the same time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tutti import arguments
from tutti.base.arrays import Keys
from tutti.base.checks import whole
from tutti.base.terminal import ProgressFactory, table
from tutti.base.units import MiB
from tutti.bench.environment import describe
from tutti.bench.members import beside, refuse, removed
from tutti.bench.pool_file import add_place_arguments, medium_of, pool_paths, temporary_pool
from tutti.bench.statistics import bootstrap_median, interval_text, percentile, ratios
from tutti.bench.writable import options
from tutti.errors import DeviceTimeout, Unsupported
from tutti.gio_uring.named_drive import is_drive
from tutti.gio_uring.nvme_spec import STATUS_CANCELLED
from tutti.interface import Store
from tutti.medium.layout import KVLayout
from tutti.node.client import NodeStore
from tutti.node.messages import (
    HEADER,
    Message,
    Moved,
    Plan,
    PlanLoad,
    PlanPut,
    Written,
    frame,
    packed_status,
    read_reply,
)
from tutti.node.pool_service import PoolService
from tutti.pool.places import is_device
from tutti.store import format as format_pool

HEAD = ("call", "agent us", "p99", "in process us", "p99", "agent over process", "bar us", "")
_LAYOUT = KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="bfloat16", model="bench"
)
_WAIT_S = 30.0
_START_S = 120.0
_CROWD_S = 5.0
_PAUSE_S = 0.002
_EMPTY, _SOCKET = "look-up of no key", "echo"
_ONE_CORE, _TWO_CORES = f"{_SOCKET} on one core", f"{_SOCKET} on two cores"
_ECHOES = (_SOCKET, _ONE_CORE, _TWO_CORES)
_STATES = ("after a pause", "again")
_BARS_US: dict[str, float | None] = {
    "look-up": 500.0,
    "load plan": 150.0,
    "put plan": 150.0,
    _EMPTY: None,
    **{f"{echo}, {state}": None for echo in _ECHOES for state in _STATES},
}
# A process that answers requests of a plan's size with answers of a plan's size.
_ECHO = """
import os, socket, sys
peer, request_nbytes, answer = socket.socket(fileno=0), int(sys.argv[1]), bytes(int(sys.argv[2]))
os.sched_setaffinity(0, map(int, sys.argv[3].split(",")))
have = 0
while part := peer.recv(65536):
    have += len(part)
    if have >= request_nbytes:
        have -= request_nbytes
        peer.sendall(answer)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    option = options(parser)
    option("--rounds", 400, "calls of each kind per side")
    option("--pages", 1024, "pages per look-up")
    option("--batch", 128, "pages per plan")
    option("--clients", 64, "processes that ask at the same time; 0 for none")
    option("--capacity", 256 * MiB, "size of each of the two pools", arguments.nbytes)
    option("--seed", 1, "seed of the keys")


class _Side:
    """One access to a pool.  plan: plans a load of keys, and returns a call that gives it up."""

    def __init__(self, store: Store, plan: Callable[[Any], Callable[[], None]]) -> None:
        self.store, self._plan = store, plan
        self.times_us: dict[str, list[float]] = {name: [] for name in _BARS_US}

    def fill(self, keys: Keys) -> None:
        """Stores the pages for the look-ups."""
        memory = self.store.allocate_memory(len(keys))
        self.store.put(keys, range(len(keys)), memory=memory).wait(_WAIT_S)
        self.store.load(keys, range(len(keys)), memory=memory).wait(_WAIT_S)  # caches digests
        self.store.unregister(memory)

    def measure(self, keys: Keys, new: Keys, batch: int, rng: np.random.Generator) -> None:
        """Times one call of each kind, in random order.  new: keys that no pool has."""
        first = int(new[0, 0]) % (len(keys) - batch + 1)
        calls: dict[str, tuple[Callable[[Any], Callable[[], None]], Any]] = {
            _EMPTY: (self._look_up, keys[:0]),
            "look-up": (self._look_up, keys),
            "load plan": (self._plan, PlanLoad(keys[first : first + batch].tobytes())),
            "put plan": (self._plan, PlanPut(new.tobytes())),
        }
        for name in rng.permutation(list(calls)):
            call, argument = calls[name]
            start_ns = time.perf_counter_ns()
            give_up = call(argument)
            self.times_us[name].append((time.perf_counter_ns() - start_ns) / 1000)
            give_up()

    def _look_up(self, keys: Keys) -> Callable[[], None]:
        assert self.store.match(keys) == len(keys), "the pages are there"
        return lambda: None


def _through_socket(store: NodeStore) -> Callable[[Any], Callable[[], None]]:
    session = store._kept.need()

    def plan(message: PlanLoad | PlanPut) -> Callable[[], None]:
        made: Plan = session.plan(message, _WAIT_S)

        def give_up() -> None:
            over = threading.Event()
            if isinstance(message, PlanPut):
                session.await_written(made.number, lambda _: over.set())
            else:
                over.set()
            session.give_up(made.jobs)
            if not over.wait(_WAIT_S):
                raise DeviceTimeout("the agent does not end a put; look at its log")
            store.call("stats")  # after all reports

        return give_up

    return plan


def _in_process(service: PoolService) -> Callable[[Any], Callable[[], None]]:
    """The agent's work for a request, without the socket and its messages."""
    ended: list[Written] = []
    session = service.open_session(os.getpid(), ended.append)

    def plan(message: PlanLoad | PlanPut) -> Callable[[], None]:
        is_put = isinstance(message, PlanPut)
        made = session.plan_put(message) if is_put else session.plan_load(message)  # type: ignore[arg-type]

        def give_up() -> None:
            jobs = made.jobs if isinstance(made, Plan) else read_reply(made[HEADER.size :]).jobs
            for job in jobs:
                cancelled = np.full(len(job.slots) // 8, STATUS_CANCELLED, np.uint32)
                session.moved(Moved(job.job, packed_status(cancelled)))

        return give_up

    return plan


@contextmanager
def _echo(
    request: Message, answer: Message, own: set[int], its: set[int]
) -> Iterator[Callable[[], float]]:
    """Times calls, in microseconds, to a process that only answers as many bytes as ``answer`` has.

    own, its: processors of the caller's thread, and of the process.
    """
    sent, wanted, every = frame(request), len(frame(answer)), os.sched_getaffinity(0)
    near, far = socket.socketpair()
    command = [sys.executable, "-c", _ECHO, str(len(sent)), str(wanted), ",".join(map(str, its))]
    with near, subprocess.Popen(command, stdin=far.fileno()) as process:
        far.close()
        near.settimeout(_WAIT_S)

        def ask() -> float:
            os.sched_setaffinity(0, own)
            try:
                start_ns = time.perf_counter_ns()
                near.sendall(sent)
                left = wanted
                while left > 0:  # bounded by the socket's timeout
                    part = len(near.recv(1 << 16))
                    if not part:
                        raise DeviceTimeout("the process at the other end of the socket has ended")
                    left -= part
                return (time.perf_counter_ns() - start_ns) / 1000
            finally:
                os.sched_setaffinity(0, every)

        try:
            yield ask
        finally:
            process.terminate()


@contextmanager
def _agent(pool: list[str], capacity_nbytes: int, force: list[str]) -> Iterator[str]:
    """Starts `tutti serve` with a pool that is removed at the end; yields its socket's path."""
    with ExitStack() as undo:
        folder = undo.enter_context(TemporaryDirectory())
        path = str(Path(folder, "s"))
        format_pool(pool, _LAYOUT, capacity_nbytes, force=force)
        undo.enter_context(removed(pool))
        command = [sys.executable, "-m", "tutti.cli", "serve", *pool, "--socket", path]
        process = undo.enter_context(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
        try:
            assert process.stderr is not None
            if not any(line.startswith("serving on") for line in process.stderr):
                raise Unsupported("the agent did not start; run `tutti serve` to see why")
            yield path
        finally:
            process.terminate()
            process.wait(_WAIT_S)


def _ask(
    path: str, size: int, keys: Keys, batch: int, ready: Any, until_s: Any, results: Any
) -> None:
    """One of many clients: alternates look-ups and load plans once all are connected."""
    with NodeStore(path, _LAYOUT, size, profile=None) as store:
        plan = _through_socket(store)
        times_us: dict[str, list[float]] = {"look-up": [], "load plan": []}
        ready.wait(_START_S)
        while time.monotonic() < until_s.value:
            start_ns = time.perf_counter_ns()
            store.match(keys)
            middle_ns = time.perf_counter_ns()
            give_up = plan(PlanLoad(keys[:batch].tobytes()))
            times_us["load plan"].append((time.perf_counter_ns() - middle_ns) / 1000)
            times_us["look-up"].append((middle_ns - start_ns) / 1000)
            give_up()
        results.put(times_us)


def _crowd(path: str, capacity_nbytes: int, keys: Keys, batch: int, clients: int) -> dict[str, Any]:
    """Measures one agent with many clients at a time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, for all of them
    ready, until_s = context.Barrier(clients + 1), context.Value("d", 0.0)
    results = context.Queue()
    arguments = (path, capacity_nbytes, keys, batch, ready, until_s, results)
    processes = [context.Process(target=_ask, args=arguments) for _ in range(clients)]
    for process in processes:
        process.start()
    until_s.value = time.monotonic() + 3600.0
    ready.wait(_START_S)
    until_s.value = time.monotonic() + _CROWD_S
    found = [results.get(timeout=_CROWD_S + _WAIT_S) for _ in processes]
    for process in processes:
        process.join(_WAIT_S)
    return {
        "clients": clients,
        "seconds": _CROWD_S,
        "calls": {
            name: {
                "per_s": sum(len(each[name]) for each in found) / _CROWD_S,
                "p50_us": percentile([us for each in found for us in each[name]], 50),
                "p99_us": percentile([us for each in found for us in each[name]], 99),
            }
            for name in found[0]
        },
    }


def run(args: argparse.Namespace, progress: ProgressFactory) -> dict[str, Any]:
    """Alternates calls on both sides.  Raises ConfigError, Unsupported for drives, PoolExists."""
    rounds, pages = whole("--rounds", args.rounds, 3, 10**6), whole("--pages", args.pages, 1, 4096)
    batch = whole("--batch", args.batch, 1, pages)
    clients = whole("--clients", args.clients, 0, 256)
    pool, size = pool_paths(args, "agent"), args.capacity
    refuse(pool, "an agent cannot share a drive that it takes for itself", is_drive)
    rng = np.random.default_rng(args.seed)
    keys = rng.integers(0, 256, (pages, 16), np.uint8)
    with ExitStack() as stack, progress("agent", rounds) as bar:
        path = stack.enter_context(_agent(pool, size, args.force))
        remote = stack.enter_context(NodeStore(path, _LAYOUT, size, profile=None))
        if any(map(is_device, pool)):
            own_pool = [str(Path(stack.enter_context(TemporaryDirectory()), "own.tutti"))]
        else:
            own_pool = beside(pool, "own")
        local = stack.enter_context(temporary_pool(own_pool, _LAYOUT, size))
        service = PoolService(local)
        sides = (_Side(remote, _through_socket(remote)), _Side(local, _in_process(service)))
        for side in sides:
            side.fill(keys)
        sample, cores = _sample(remote, keys[:batch]), sorted(os.sched_getaffinity(0))
        one, other = {cores[0]}, {cores[-1]}
        echoes = {
            name: stack.enter_context(_echo(*sample, own, its))
            for name, own, its in (
                (_SOCKET, set(cores), set(cores)),
                (_ONE_CORE, one, one),
                (_TWO_CORES, one, other),
            )
            if name != _TWO_CORES or one != other
        }
        for ask in echoes.values():
            ask()  # it has started
        for number in range(rounds):
            new = rng.integers(0, 256, (batch, 16), np.uint8)
            for side in sides if number % 2 else reversed(sides):
                side.measure(keys, new, batch, rng)
            for name, ask in echoes.items():
                time.sleep(_PAUSE_S)
                for state in _STATES:
                    sides[0].times_us[f"{name}, {state}"].append(ask())
            bar.advance(1)
        crowd = [_crowd(path, size, keys, batch, clients)] if clients else []
        measured = (name for name, times_us in sides[0].times_us.items() if times_us)
        rows = [_row(name, *(side.times_us[name] for side in sides)) for name in measured]
    return {
        "benchmark": "agent",
        "rows": rows,
        "crowd": crowd,
        "pages": pages,
        "batch": batch,
        "rounds": rounds,
        "members": len(pool),
        "machine": describe(medium_of(args)),
    }


def _sample(store: NodeStore, keys: Keys) -> tuple[Message, Message]:
    """A request for a load plan, and its answer."""
    session, request = store._kept.need(), PlanLoad(keys.tobytes())
    plan: Plan = session.plan(request, _WAIT_S)
    session.give_up(plan.jobs)
    return request, plan


def _row(name: str, agent_us: Sequence[float], own_us: Sequence[float]) -> dict[str, Any]:
    found, bar_us = bootstrap_median(agent_us), _BARS_US[name]
    row: dict[str, Any] = {
        "call": name,
        "agent_us": found.to_dict(),
        "agent_p99_us": percentile(agent_us, 99),
    }
    if own_us:
        row["in_process_us"] = bootstrap_median(own_us).to_dict()
        row["in_process_p99_us"] = percentile(own_us, 99)
        row["ratio"] = bootstrap_median(ratios(agent_us, own_us)).to_dict()
    if bar_us is not None:
        row["bar_us"], row["reached"] = bar_us, found.median <= bar_us
    return row


def rows_of(result: dict[str, Any]) -> list[list[object]]:
    return [
        [
            row["call"],
            interval_text(row["agent_us"], 0),
            f"{row['agent_p99_us']:.0f}",
            interval_text(row["in_process_us"], 0) if "ratio" in row else "",
            f"{row['in_process_p99_us']:.0f}" if "ratio" in row else "",
            interval_text(row["ratio"], 2) if "ratio" in row else "",
            f"{row['bar_us']:.0f}" if "bar_us" in row else "",
            "" if row.get("reached", True) else "not reached",
        ]
        for row in result["rows"]
    ]


def notes_of(result: dict[str, Any]) -> list[str]:
    return [
        f"look-ups of {result['pages']} pages, plans of {result['batch']} pages,"
        f" {result['rounds']} rounds",
        *(
            f"{crowd['clients']} clients at a time, a process each on the same cores: "
            + "; ".join(
                f"{name} {found['per_s']:.0f} a second, p50 {found['p50_us']:.0f} us,"
                f" p99 {found['p99_us']:.0f} us"
                for name, found in crowd["calls"].items()
            )
            for crowd in result.get("crowd", ())
        ),
        f"{_SOCKET}: a process that answers a load plan's bytes with as many, and does no more,"
        " where the kernel puts both, then with both on one core, and on two; after a pause both"
        f" have to wake up; {_EMPTY}: with the agent's threads and its messages",
    ]


def report(result: dict[str, Any]) -> str:
    return "\n\n".join([table(HEAD, rows_of(result)), *notes_of(result)])
