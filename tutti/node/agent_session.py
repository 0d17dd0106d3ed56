"""A client's session with the agent: its connections, and the engine that moves its pages.

A session ends once, by the client or because the agent is lost, and is never opened again: what
it had planned is void then.  Its files stay open until its own transfers have ended, which keeps
every slot that they name from being used again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np

from tutti.base.arrays import U32, Rows
from tutti.base.interrupts import uninterrupted
from tutti.base.threads import start_thread
from tutti.errors import AgentLost, AgentRefused, DeviceTimeout, TuttiError, Unsupported
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.engine import PRIORITY_LOAD, PRIORITY_STORE, Engine
from tutti.gio_uring.gpu.host_engine import HostEngine
from tutti.gio_uring.iocb import Extents, PagedMemory
from tutti.gio_uring.memory import DmaRegion
from tutti.gio_uring.nvme_spec import OPCODE_READ, OPCODE_WRITE, STATUS_CANCELLED
from tutti.gio_uring.transfer import Submitter, Transfer
from tutti.medium.geometry import Geometry
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.node.connection import Connection, Connections
from tutti.node.messages import (
    Answer,
    Call,
    Hello,
    Message,
    Moved,
    MoveJob,
    PlanLoad,
    PlanPut,
    Written,
    digests_of,
    packed_status,
    rows_of,
)
from tutti.pool.slot_extents import SlotExtents, object_places
from tutti.transfers.starters import Order

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
#: To send or receive the rest of a message, beyond what the agent may wait before it reads.
_SEND_S = 5.0

WrittenCallback = Callable[[Written | None], None]


class AgentSession:
    """One session.  Thread-safe.

    path: the agent's socket.  hello: which pool.  on_lost: called once when the agent is lost, from
    any thread.  pool_stats: at the opening.  Raises AgentLost, AgentRefused and what opening a pool
    raises.
    """

    def __init__(
        self,
        path: str,
        hello: Hello,
        *,
        open_timeout_s: float,
        executor: str,
        on_lost: Callable[[], None],
    ) -> None:
        self._on_lost = on_lost
        self._reports = Connection(path, open_timeout_s)
        self.welcome, files = self._reports.open(hello, open_timeout_s)
        welcome = self.welcome
        try:
            self.layout = KVLayout.from_json(welcome.layout)
            layers, segments, lba_nbytes, group_slots, groups = welcome.geometry
            self.geometry = Geometry(layers, tuple(segments), lba_nbytes, group_slots, groups)
            self.pool_stats = self._reports.request(Call("stats"), open_timeout_s).value
            self.controller = FileController(files, lba_nbytes=lba_nbytes, executor=executor)
        except BaseException:
            self._reports.close()
            raise
        finally:
            for fd in files:
                os.close(fd)
        for member, name in zip(self.controller.members, welcome.files, strict=True):
            member.name = name
        try:
            self.engine = Engine(self.controller)
        except BaseException:
            self.controller.close()
            self._reports.close()
            raise
        self._nsids = np.array(welcome.nsids, np.uint32)
        self._places = object_places(self.geometry, self._nsids)
        self._calls = Connections(path, welcome.session, self.fail)
        # The agent reads no report while it waits for staging or the medium on behalf of another.
        self._send_s = welcome.timeout_s + _SEND_S
        self._closing = threading.Lock()
        self._is_stuck = False
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._send_lock = threading.Lock()
        self._puts: dict[int, WrittenCallback] = {}
        self._early: dict[int, Written] = {}
        self._settles: list[threading.Event] = []
        self._moving = 0
        self._ids = itertools.count(1)
        self._regions: dict[int, list[DmaRegion]] = {}  # by memory, and by GPU engine
        self.lost = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        start_thread(self._reader, "tutti-client", self._undo_opening)

    def request(self, message: Message, timeout_s: float) -> Any:
        """The agent's answer.  Raises what it says; AgentLost ends the session."""
        return self._calls.request(message, timeout_s)

    def call(self, name: str, timeout_s: float, **arguments: Any) -> Any:
        """The result of an operation by name, after all reports so far have been counted."""
        self._settle_reports(timeout_s)
        answer = self.request(Call(name, arguments), timeout_s)
        if not isinstance(answer, Answer):
            error = AgentRefused("the agent's answer is not one to this request")
            self.fail(error)
            raise error
        return answer.value

    def register(self, memory: HostMemory) -> None:
        """Makes memory known to the session's own controller, with the staging of its GPU engine.

        Raises Unsupported for an engine that needs drives of its own, CapacityError for staging
        without room for a page.
        """
        gpu = memory.memory.path
        if gpu is not None and id(gpu) not in self._regions:
            if not isinstance(gpu, HostEngine):
                raise Unsupported(
                    "pages in GPU memory are moved by the engine host where an agent has the pool;"
                    " use HostEngine (SGLang's linker: gpu_engine host)"
                )
            gpu.check_page(memory.memory, self.geometry.slice_nlb)
            self._regions[id(gpu)] = gpu.lend_staging(self.controller)
        self._regions[id(memory)] = self.controller.register_all(memory.buffers)
        self.controller.read_page_sizes()

    def unregister(self, memory: HostMemory) -> None:
        """Forgets memory."""
        for region in self._regions.pop(id(memory), []):
            region.close()
        self.controller.read_page_sizes()

    def plan(self, message: PlanPut | PlanLoad, timeout_s: float) -> Any:
        """Asks the agent for a plan; the caller then submits or gives up each of its jobs."""
        try:
            plan = self.request(message, timeout_s)
            with self._lock:
                self._moving += len(plan.jobs)
        except BaseException as error:
            if not isinstance(error, TuttiError):
                self.fail()  # the agent may have planned: its claims end with the session
            raise
        return plan

    def await_written(self, number: int, callback: WrittenCallback) -> None:
        """Calls back with the outcome of a put, or with None once the agent is lost."""
        with self._lock:
            written = self._early.pop(number, None)
            if written is None and not self.lost:
                self._puts[number] = callback
                return
        callback(written)

    def write(
        self, job: MoveJob, pages: U32, memory: PagedMemory, timeout_s: float, *, held: bool = False
    ) -> Transfer:
        """Writes pages (of the whole plan) where a job says, and reports it.

        held: layers are moved as Job.grant allows, here and in ``read``.
        Raises AgentRefused for a job that makes no sense; it is reported as well.
        """
        with self._reporting_failure(job):
            rows, extents = self._extents(job, pages.size)
            digests = None
            if self.welcome.verify != "off":
                digests = np.zeros((rows.size, self.geometry.layers), np.uint64)

            def over(transfer: Transfer) -> None:
                raw = b"" if digests is None else digests.tobytes()
                self._report(Moved(job.job, packed_status(transfer.page_status), raw))

            return self._submitter(memory).submit(
                OPCODE_WRITE,
                extents,
                np.ascontiguousarray(pages[rows]),
                memory,
                digests=digests,
                held=held,
                priority=PRIORITY_STORE,
                timeout_s=timeout_s,
                on_released=over,
            )

    def read(
        self,
        job: MoveJob,
        pages: U32,
        memory: PagedMemory,
        timeout_s: float,
        on_released: Callable[[Any], None],
        **order: Unpack[Order],
    ) -> tuple[Transfer, Rows]:
        """Reads pages (of the whole plan) from where a job says, and reports it.  Also which.

        Raises AgentRefused for a job that makes no sense; it is reported as well.
        """
        with self._reporting_failure(job):
            rows, extents = self._extents(job, pages.size)
            digests = None
            if job.compare:
                digests = digests_of(job, rows.size, self.geometry.layers)

            def over(transfer: Transfer) -> None:
                on_released(transfer)
                self._report(Moved(job.job, packed_status(transfer.page_status)))

            transfer = self._submitter(memory).submit(
                OPCODE_READ,
                extents,
                np.ascontiguousarray(pages[rows]),
                memory,
                digests=digests,
                compare=job.compare,
                **order,
                priority=PRIORITY_LOAD,
                timeout_s=timeout_s,
                on_released=over,
            )
            return transfer, rows

    def give_up(self, jobs: Sequence[MoveJob]) -> None:
        """Reports jobs that will not be submitted."""
        for job in jobs:
            pages = max(1, len(job.slots) // 8)  # a report without any status is one of success
            status = np.full(pages, STATUS_CANCELLED, np.uint32)
            self._report(Moved(job.job, packed_status(status)))

    @uninterrupted()
    def fail(self, error: BaseException | None = None) -> None:
        """The agent is lost: nothing is planned any more, and waiting puts hear of it.

        error: why, if the session was not closed; logged once.
        """
        with self._lock:
            if self.lost:
                return
            self.lost = True
            callbacks, self._puts = list(self._puts.values()), {}
            settles, self._settles = self._settles, []
            self._quiet.notify_all()
        self._calls.close()
        self._reports.shut_down()
        for event in settles:
            event.set()
        for callback in callbacks:
            callback(None)
        self._on_lost()
        if error is not None and not self._closing.locked():
            with contextlib.suppress(Exception):  # a handler of the user's
                _log.warning("%s; look-ups miss and puts are dropped until it answers", error)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Waits until no transfer is under way and every put has its outcome."""
        with self._lock:
            return self._quiet.wait_for(lambda: self._moving == 0 and not self._puts, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Ends transfers, the files' openings, and with them the session.  Raises DeviceTimeout.

        A call after an error goes on from there; memory stays registered with an engine that does
        not stop.
        """
        if not self._closing.acquire(timeout=timeout_s):
            raise DeviceTimeout("the session is still being closed; close it again")
        try:
            with self._lock:
                is_quiet = self._quiet.wait_for(lambda: self._moving == 0, timeout_s)
            if not is_quiet:  # an engine that is closed now would keep the files open permanently
                raise DeviceTimeout(f"transfers take longer than {timeout_s:g} s; close it again")
            self._release(timeout_s)
        finally:
            self.fail()
            if threading.current_thread() is not self._reader:
                self._reader.join(timeout_s)
            self._reports.close()
            self._closing.release()

    def _release(self, timeout_s: float) -> None:
        if self._is_stuck:  # the device may still use the memory
            return
        self._is_stuck = True
        self.engine.close(timeout_s)
        self._is_stuck = False
        for regions in self._regions.values():
            for region in regions:
                region.close()
        self._regions.clear()
        self.controller.close()
        with contextlib.suppress(TuttiError), self._send_lock:
            if not self.lost:
                self._reports.send(Call("leave"), self._send_s)

    def _undo_opening(self) -> None:
        self.engine.close()
        self.controller.close()
        self._reports.close()

    @contextlib.contextmanager
    def _reporting_failure(self, job: MoveJob) -> Any:
        try:
            yield
        except BaseException:
            self.give_up([job])
            raise

    def _submitter(self, memory: PagedMemory) -> Submitter:
        return self.engine if memory.path is None else memory.path.through(self.engine)

    def _extents(self, job: MoveJob, pages: int) -> tuple[Rows, Extents]:
        """Which of the plan's pages a job moves, and where; native code checks the slots."""
        geometry, rows = self.geometry, rows_of(job, pages)
        slots = np.frombuffer(job.slots, "<i8")
        return rows, SlotExtents(self._places, slots, geometry.slice_nlb, geometry.layer_stride_nlb)

    def _report(self, moved: Moved) -> None:
        """On the engine's thread.  A report that cannot be sent ends the session."""
        try:
            if not self.lost:
                with self._send_lock:
                    self._reports.send(moved, self._send_s)
        except TuttiError as error:
            self.fail(error)
        finally:
            with self._lock:
                self._moving -= 1
                if self._moving == 0:
                    self._quiet.notify_all()

    def _settle_reports(self, timeout_s: float) -> None:
        done = threading.Event()
        if not self._send_lock.acquire(timeout=timeout_s):
            return  # a report waits for the agent
        try:
            with self._lock:
                if self.lost:
                    return
                self._settles.append(done)  # in the order of the answers
            with contextlib.suppress(TuttiError):  # the reader finds out, and ends the wait
                self._reports.send(Call("settle"), self._send_s)
        finally:
            self._send_lock.release()
        done.wait(timeout_s)

    def _read(self) -> None:
        """Outcomes of puts, until the session has ended."""
        asked_s = 0.0
        try:
            while not self.lost:
                if not self._reports.wait_readable(_LOOK_S):
                    asked_s = self._ask_again(asked_s)
                    continue
                reply, asked_s = self._reports.receive(self._send_s), 0.0
                if isinstance(reply, Written):
                    self._written(reply)
                elif isinstance(reply, Answer):
                    with self._lock:
                        event = self._settles.pop(0) if self._settles else threading.Event()
                    event.set()
        except TuttiError as error:
            self.fail(error)
        finally:
            self.fail()

    def _ask_again(self, asked_s: float) -> float:
        """Finds an agent that hangs while puts wait for their outcome, which may be due later.

        asked_s: when it was asked and has not answered, or 0; returns the same.  Raises AgentLost.
        """
        now_s = time.monotonic()
        if asked_s:
            if now_s - asked_s > self._send_s:
                raise AgentLost(f"the agent did not answer within {self._send_s:g} s")
            return asked_s
        if not self._puts or not self._send_lock.acquire(blocking=False):
            return 0.0  # who sends finds out as well
        try:
            with self._lock:
                self._settles.append(threading.Event())
            self._reports.send(Call("settle"), self._send_s)
        finally:
            self._send_lock.release()
        return now_s

    def _written(self, written: Written) -> None:
        with self._lock:
            callback = self._puts.pop(written.number, None)
            if callback is None:
                self._early[written.number] = written  # the plan's answer is on its way
            if not self._puts:
                self._quiet.notify_all()
        if callback is not None:
            callback(written)
