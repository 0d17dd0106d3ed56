"""A client's session with the agent: its connections, and the engine that moves its pages.

A session ends once, by the client or because the agent is lost, and is never opened again; its
plans are void then.  Its files stay open until its own transfers have ended: as long as they are
open, the agent does not reuse the slots of these transfers.
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
#: Limit for sending or receiving a message, added to the agent's own waits before it reads.
_SEND_S = 5.0

WrittenCallback = Callable[[Written | None], None]


class AgentSession:
    """One session.  Thread-safe.

    path: the agent's socket.  hello: names the pool.  on_lost: called once, from any thread, when
    the session ends.  pool_stats: the pool's statistics at the opening.
    Raises AgentLost, AgentRefused and what opening a pool raises.
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
        # The agent reads no report while another one waits for staging or for the medium.
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
        self._regions: dict[int, list[DmaRegion]] = {}  # by id() of a memory or a GPU engine
        self.lost = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        start_thread(self._reader, "tutti-client", self._undo_opening)

    def request(self, message: Message, timeout_s: float) -> Any:
        """The agent's answer.  Raises the error that it answers; AgentLost ends the session."""
        return self._calls.request(message, timeout_s)

    def call(self, name: str, timeout_s: float, **arguments: Any) -> Any:
        """The result of an operation by name; the agent handles all earlier reports first."""
        self._settle_reports(timeout_s)
        answer = self.request(Call(name, arguments), timeout_s)
        if not isinstance(answer, Answer):
            error = AgentRefused(
                "the agent's answer is of another request; use one version on both sides"
            )
            self.fail(error)
            raise error
        return answer.value

    def register(self, memory: HostMemory) -> None:
        """Makes memory known to the session's own controller, with the staging of its GPU engine.

        Raises Unsupported for a GPU engine other than HostEngine, CapacityError for staging that
        is smaller than a page.
        """
        gpu = memory.memory.path
        if gpu is not None and id(gpu) not in self._regions:
            if not isinstance(gpu, HostEngine):
                raise Unsupported(
                    "an agent's pools support only the GPU engine host; use HostEngine (SGLang's"
                    " linker: gpu_engine host)"
                )
            gpu.check_page(memory.memory, self.geometry.slice_nlb)
            self._regions[id(gpu)] = gpu.lend_staging(self.controller)
        self._regions[id(memory)] = self.controller.register_all(memory.buffers)
        self.controller.read_page_sizes()

    def unregister(self, memory: HostMemory) -> None:
        """Unregisters memory.  No transfer may use it."""
        for region in self._regions.pop(id(memory), []):
            region.close()
        self.controller.read_page_sizes()

    def plan(self, message: PlanPut | PlanLoad, timeout_s: float) -> Any:
        """Asks the agent for a plan.  The caller must submit or give up each of its jobs."""
        try:
            plan = self.request(message, timeout_s)
            with self._lock:
                self._moving += len(plan.jobs)
        except BaseException as error:
            if not isinstance(error, TuttiError):
                self.fail()  # the agent may have made a plan: it ends with the session
            raise
        return plan

    def await_written(self, number: int, callback: WrittenCallback) -> None:
        """Calls ``callback`` with the outcome of a put, or with None once the agent is lost."""
        with self._lock:
            written = self._early.pop(number, None)
            if written is None and not self.lost:
                self._puts[number] = callback
                return
        callback(written)

    def write(
        self, job: MoveJob, pages: U32, memory: PagedMemory, timeout_s: float, *, held: bool = False
    ) -> Transfer:
        """Writes the job's part of ``pages`` (all pages of the plan), and reports its end.

        held: layers wait for Job.grant, here and in ``read``.
        Raises AgentRefused for an invalid job, which is reported as failed.
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
        """Reads the job's part of ``pages`` (all pages of the plan), and reports its end.

        Also returns the rows of the plan that it reads.  See ``write``.
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

    def give_up(self, jobs: Sequence[MoveJob], status: int = STATUS_CANCELLED) -> None:
        """Reports jobs that will not be submitted."""
        for job in jobs:
            pages = max(1, len(job.slots) // 8)  # an empty report would mean success
            self._report(Moved(job.job, packed_status(np.full(pages, status, np.uint32))))

    @uninterrupted()
    def fail(self, error: BaseException | None = None) -> None:
        """Ends the session: nothing is planned any more, and waiting puts get None.

        error: the cause, unless the session was closed; logged once.
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
            with contextlib.suppress(Exception):  # a logging handler of the user's
                _log.warning("%s; look-ups miss and puts are dropped until it answers", error)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Waits until no transfer is under way and every put has its outcome."""
        with self._lock:
            return self._quiet.wait_for(lambda: self._moving == 0 and not self._puts, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Waits for transfers, closes the files, and ends the session.  Raises DeviceTimeout.

        A call after an error continues; memory stays registered while the engine does not stop.
        """
        if not self._closing.acquire(timeout=timeout_s):
            raise DeviceTimeout("the session is still being closed; close it again")
        try:
            with self._lock:
                is_quiet = self._quiet.wait_for(lambda: self._moving == 0, timeout_s)
            if not is_quiet:  # closing the engine now would keep the files open permanently
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
        """Which of the plan's pages a job moves, and where to; native code checks the slots."""
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
                self._settles.append(done)  # answers come in this order
            with contextlib.suppress(TuttiError):  # the reader notices it, and ends the wait
                self._reports.send(Call("settle"), self._send_s)
        finally:
            self._send_lock.release()
        done.wait(timeout_s)

    def _read(self) -> None:
        """Receives outcomes of puts, until the session has ended."""
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
        """Detects an agent that hangs while puts wait, by a request that it answers at once.

        asked_s: when an unanswered request was sent, or 0; returns the new value.
        Raises AgentLost.
        """
        now_s = time.monotonic()
        if asked_s:
            if now_s - asked_s > self._send_s:
                raise AgentLost(f"the agent did not answer within {self._send_s:g} s")
            return asked_s
        if not self._puts or not self._send_lock.acquire(blocking=False):
            return 0.0  # a thread that sends notices it, too
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
                self._early[written.number] = written  # await_written comes later
            if not self._puts:
                self._quiet.notify_all()
        if callback is not None:
            callback(written)
