"""Puts and loads of an agent's client, as its TransferQueue starts them: the agent plans each when
its turn comes, and this process moves the pages.

A put that waits for its turn claims nothing in the pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import Keys, Mask, Rows
from tutti.base.callbacks import Guard
from tutti.errors import AgentLost, AgentRefused, KeyMissing, PoolClosed, TuttiError
from tutti.gio_uring.iocb import PagedMemory, Pages
from tutti.gio_uring.job import Job
from tutti.medium.geometry import Geometry
from tutti.node.agent_session import AgentSession
from tutti.node.kept_session import KeptSession
from tutti.node.messages import LISTED_MAX, Call, MoveJob, PlanLoad, PlanPut, Written, statuses_of
from tutti.transfers.in_flight import Countdown, InFlight
from tutti.transfers.loader import STATUS_NOT_BEGUN
from tutti.transfers.put_request import PutPart
from tutti.transfers.starters import Order
from tutti.transfers.store_config import StoreConfig
from tutti.transfers.tickets import LoadPart, LoadProgress, Outcome, PutProgress

#: Seconds that a plan may take in addition to the store's own time-out for space and records.
PLAN_S = 5.0


class ClientState(InFlight):
    """What a client has in flight.  Waits for recovery and for clears happen in the agent."""

    def __init__(self, geometry: Geometry, config: StoreConfig) -> None:
        super().__init__(geometry, config, Guard())
        self.ready = True
        self.plan_timeout_s = 2 * config.timeout_s + PLAN_S

    def absent(self, keys: Keys) -> Mask | None:
        """See InFlight: None (all may be absent), since asking the agent would cost a request."""
        return None


class ClientWriter:
    """Starts parts of puts.  See Writer; each part is planned and written separately."""

    def __init__(self, kept: KeptSession, state: ClientState) -> None:
        self._kept, self._state = kept, state
        self.batch_pages = kept.need().welcome.batch_pages
        self.active = self.finished = 0
        self.lost_pages = 0  # of puts whose outcome is unknown, as the agent was lost
        self.batch_ended: Callable[[], object] = lambda: None

    def put(self, parts: Sequence[PutPart]) -> BaseException | None:
        """See Writer; drops everything while the agent is away."""
        errors = [self._put(part) for part in parts]
        return errors[0]

    def _put(self, part: PutPart) -> BaseException | None:
        rows, progress, session = part.rows, part.progress, self._kept.session
        left = Countdown(lambda: part.ended(part, None if part.grant is None else part.grant.error))
        most = self.batch_pages if session is None else session.welcome.batch_pages
        step = self._state.write_pages_max(part.request.memory, most)
        for start in range(0, rows.size, step):
            try:
                # Nothing of a chain is stored after a dropped part.
                if session is None or progress.is_cut or part.is_dropped:
                    self._drop(session, part, rows[start:])
                    break
                self._put_rows(session, part, rows[start : start + step], left)
            except BaseException as error:
                progress.refuse(rows[start:], error)
                if not start:
                    part.ended(part, error)
                    return error
                break  # earlier rows are under way
        left.end()
        return None

    def _drop(self, session: AgentSession | None, part: PutPart, rows: Rows) -> None:
        """Drops rows that no other client has stored.  session: None if the agent is lost."""
        progress, outcome = part.progress, part.progress.outcome
        outcome[rows] = Outcome.DROPPED
        is_unknown = session is None and not part.is_dropped  # whether they were stored
        if is_unknown or progress.is_lost:
            progress.is_lost = progress.is_cut = True
            with self._state.lock:
                self.lost_pages += rows.size
            return
        for start in range(0, rows.size, LISTED_MAX):
            some, lost = rows[start : start + LISTED_MAX], None
            asked = Call("drop", {"keys": part.request.keys[some].tobytes()})
            with contextlib.suppress(TuttiError):
                if session is not None:
                    lost = session.request(asked, self._state.plan_timeout_s).value
            if isinstance(lost, bytes) and len(lost) == some.size:
                outcome[some[np.frombuffer(lost, np.uint8) == 0]] = Outcome.PRESENT
            else:
                with self._state.lock:
                    self._state.counters.dropped += some.size

    def _put_rows(self, session: AgentSession, part: PutPart, rows: Rows, left: Countdown) -> None:
        """Puts the keys of one plan; the put is cut when the agent is away or drops some."""
        some, progress = part.request.take(rows), part.progress
        parent, depth = some.parents[0].tobytes(), int(some.depths[0])
        message = PlanPut(some.keys.tobytes(), parent, depth, some.tenant, some.expiry_64s)
        plan = None
        with contextlib.suppress(AgentLost, AgentRefused):
            plan = session.plan(message, self._state.plan_timeout_s)
        if plan is None:
            self._drop(None, part, rows)
            return
        progress.is_cut |= Outcome.DROPPED in plan.outcome
        if not plan.jobs:
            _fill(progress, rows, Written(plan.number, plan.outcome, plan.status))
            return
        left.add()
        held: list[Job] = []

        def over(written: Written | None) -> None:
            n = rows.size
            if written and (len(written.outcome) != n or len(written.status) not in (0, 4 * n)):
                what = "the agent's answer is of other pages; use one version on both sides"
                session.fail(AgentRefused(what))
                written = None
            if written is None:  # the plan is void: jobs that wait for a grant must not write
                self._drop(None, part, rows)
                for job in held:
                    job.cancel()
            else:
                _fill(progress, rows, written)
            left.end()

        session.await_written(plan.number, over)
        jobs = list(plan.jobs)
        while jobs:  # bounded: each turn takes one
            try:
                transfer = session.write(
                    jobs.pop(0),
                    some.pages,
                    some.memory,
                    self._state.config.timeout_s,
                    held=part.grant is not None,
                )
            except BaseException as error:
                session.give_up(jobs)  # the agent then reports the outcome of all
                if not isinstance(error, TuttiError):
                    raise
                break
            if part.grant is not None and isinstance(transfer, Job):
                part.grant.begin(transfer)
                held.append(transfer)
                if session.lost:
                    transfer.cancel()


class ClientLoader:
    """Starts loads.  See Loader."""

    def __init__(self, kept: KeptSession, state: ClientState) -> None:
        self._kept, self._state = kept, state

    def load(
        self,
        keys: Keys,
        pages: Pages,
        memory: PagedMemory,
        *,
        admit: bool = False,
        waits: bool = True,
        **order: Unpack[Order],
    ) -> LoadProgress:
        """See Loader; raises KeyMissing while the agent is away."""
        state, progress = self._state, LoadProgress(len(keys), self._state.layers)
        numbers = memory.check_pages(pages, once=state.config.verify != "off")
        session = self._kept.session
        if session is None:
            raise KeyMissing("the agent is not connected, so look-ups miss; compute the pages")
        with state.lock:
            state.begin(memory)
        try:
            parts = self._plan(session, keys, progress)
        except BaseException:
            state.end(memory)
            raise

        def over() -> None:
            progress.settle()
            state.end(memory)

        left = Countdown(over, sum(len(jobs) for _, jobs in parts))
        timeout_s = state.config.timeout_s
        read = partial(session.read, memory=memory, timeout_s=timeout_s, **order)
        try:
            for start, jobs in parts:
                while jobs:  # bounded: each turn takes one
                    job = jobs.pop(0)
                    try:
                        transfer, rows = read(job, numbers[start:], on_released=left.end)
                    except BaseException:
                        left.end()
                        raise
                    progress.parts.append(LoadPart(transfer, rows + start, job.whole))
        except BaseException as error:
            for _, jobs in parts:
                session.give_up(jobs)
                for _ in jobs:
                    left.end()
            progress.cancel(timeout_s)
            if isinstance(error, AgentRefused | PoolClosed):  # the session may end at any moment
                raise KeyMissing(f"{error}; compute the pages") from error
            raise
        finally:
            left.end()
        return progress

    def _plan(
        self, session: AgentSession, keys: Keys, progress: LoadProgress
    ) -> list[tuple[int, list[MoveJob]]]:
        """Requests all plans of a load before anything is read; (first row, jobs) of each."""
        parts: list[tuple[int, list[MoveJob]]] = []
        step = session.welcome.batch_pages
        progress.record_status = np.zeros(len(keys), np.uint32)
        try:
            for start in range(0, len(keys), step):
                some = keys[start : start + step]
                plan = session.plan(PlanLoad(some.tobytes()), self._state.plan_timeout_s)
                parts.append((start, list(plan.jobs)))
                status = statuses_of(plan.status, len(some))
                progress.record_status[start : start + len(some)] = status
        except BaseException as error:
            for _, jobs in parts:
                session.give_up(jobs, STATUS_NOT_BEGUN)
            if isinstance(error, AgentLost | AgentRefused):
                raise KeyMissing(f"{error}; compute the pages") from error
            raise
        return parts


def _fill(progress: PutProgress, rows: npt.NDArray[Any], written: Written) -> None:
    """Copies the outcomes of some keys into a put's progress."""
    progress.outcome[rows] = np.frombuffer(written.outcome, np.uint8)
    progress.status[rows] = statuses_of(written.status, rows.size)
