"""Serves the agent's clients on one pool: look-ups, plans, and the end of each plan.

Nothing here knows sockets.  Plans may wait for the medium or for space, on the thread that calls.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import astuple
from functools import partial

import numpy as np

from tutti.base.arrays import Keys
from tutti.base.threads import start_thread
from tutti.cluster.remote_store import RemoteConfig
from tutti.cluster.second_tier import Tier
from tutti.errors import ConfigError, DeviceTimeout, KeySizeError, TuttiError, Unsupported
from tutti.gio_uring import shared_file
from tutti.gio_uring.controller_file import FileController
from tutti.medium.keys import KEY_NBYTES
from tutti.native import NativePutRequest
from tutti.node.listener import is_out_of_files, out_of_files
from tutti.node.messages import (
    FILES_MAX,
    FRAME_NBYTES_MAX,
    VERSION,
    Match,
    Moved,
    MoveJob,
    Plan,
    PlanLoad,
    PlanPut,
    Present,
    Welcome,
    Written,
    keys_of,
    packed_status,
)
from tutti.node.remote_transfers import JobTable, PlacedPut, PlannedLoad, PlannedMemory, RemoteJob
from tutti.placement.load_plan import LoadPlan
from tutti.store import ObjectStore
from tutti.transfers.put_request import PutPart, PutRequest
from tutti.transfers.tickets import Outcome, PutProgress

_log = logging.getLogger(__name__)

#: Bytes per page of a plan, without digests; and bytes of a message, without its pages.
_PAGE_NBYTES = 64
_REST_NBYTES = 64 << 10
_PROVE_OBJECTS = 64
_PROVE_PAUSE_S = 0.5
_STOP_S = 5.0


class PoolService:
    """One open pool, served to any number of sessions.

    remote: its second tier.
    Raises Unsupported for a pool whose members are not files or block devices.
    """

    def __init__(self, store: ObjectStore, remote: RemoteConfig | None = None) -> None:
        controller = store.controller
        if not isinstance(controller, FileController):
            raise Unsupported(
                "the agent serves pools on files and block devices; a drive bound to vfio-pci is"
                " opened exclusively and cannot be shared"
            )
        self.store = store
        self.core = store._core
        self.files = [member.name for member in controller.members]
        self._fds = [member.fd for member in controller.members]
        if len(self._fds) > FILES_MAX:
            raise Unsupported(f"{len(self._fds)} members; an agent serves at most {FILES_MAX}")
        shared_file.check_files(self._fds)
        page_nbytes = 8 * self.core.layers + _PAGE_NBYTES
        fitting = (FRAME_NBYTES_MAX - _REST_NBYTES) // page_nbytes
        self.batch_pages = max(1, min(store._writer.batch_pages, fitting))
        self.sessions: dict[bytes, ClientSession] = {}
        #: Reports are handled one at a time; each may wait for staging of records or the medium.
        self.reporting = threading.Lock()
        if remote is not None:  # a page that the pool refuses could be neither fetched nor copied
            self.core.history.chooses = False
        self.tier = None if remote is None else Tier(store, remote)
        self._stopping = threading.Event()
        self._prover = threading.Thread(target=self._prove, daemon=True)
        give_up = (lambda: None) if self.tier is None else self.tier.close
        start_thread(self._prover, "tutti-agent-prove", give_up)

    def open_session(self, pid: int, report: Callable[[Written], None]) -> ClientSession:
        """Opens a session for a process.  report: sends a put's outcome, from any thread."""
        session = ClientSession(self, pid, report)
        self.sessions[session.id] = session
        self._share_lookups()
        return session

    def forget(self, session: ClientSession) -> None:
        """Forgets a session that has ended, and whose transfers have ended."""
        self.sessions.pop(session.id, None)
        self._share_lookups()

    def _share_lookups(self) -> None:
        """Scales the life of pins, given in look-ups of one process, by the number of sessions."""
        with self.core.lock:
            lookups = self.core.config.pin_lookups * max(1, len(self.sessions))
            self.core.lookup_pins.set_lookups(lookups)

    def close(self) -> None:
        """Closes the pool; it is not marked clean unless all sessions have ended."""
        self._stopping.set()
        self._prover.join(_STOP_S)
        if self.tier is not None:
            self.tier.close()
        self.store.close()

    def _prove(self) -> None:
        """Verifies the objects that an unclean close left unproven, in the background."""
        pause_s = 0.0
        while not self._stopping.wait(pause_s):  # bounded by close()
            try:
                self.store.wait_recovered(_PROVE_PAUSE_S)
                if not self.store.prove(_PROVE_OBJECTS):
                    return
                pause_s = 0.0
            except DeviceTimeout:
                pause_s = _PROVE_PAUSE_S
            except TuttiError as error:
                if not self._stopping.is_set():
                    _log.warning("verification after an unclean close stopped: %s", error)
                return


class ClientSession:
    """One client of one pool: what it has pinned and what it moves.

    id: 16 random bytes; further connections of the client join the session by them.
    has_left: the client closed the session, so its end does not count as lost.
    """

    def __init__(self, service: PoolService, pid: int, report: Callable[[Written], None]) -> None:
        self.service = service
        self.id = secrets.token_bytes(16)
        self.jobs = JobTable()
        self.has_left = False
        self._core = service.core
        #: Numbers of the files that it gets: one of a lost member may not be opened again.
        self._numbers = self._core.members.nsids()
        self._fds = [service._fds[number - 1] for number in self._numbers]
        self._loader, self._writer = service.store._loader, service.store._writer
        self._put_layers = self._core.layers if self._core.config.verify != "off" else 0
        self._tier = service.tier
        self._report = report
        self._place = shared_file.lock_place(pid)
        self._prefix = self.id.hex()
        self._nameless = itertools.count(1)

    def share_files(self) -> list[int]:
        """New descriptors of the members, for the client; the caller closes them once sent."""
        try:
            return shared_file.reopen(self._fds, self._place)
        except Unsupported as error:
            if is_out_of_files(error.__cause__):
                raise out_of_files() from error
            raise

    def welcome(self) -> Welcome:
        """The answer that opens the session."""
        core, geometry, given = self._core, self._core.geometry, self._numbers
        nsids = [core.members.nsid(member) for member in range(core.members.count)]
        return Welcome(
            VERSION,
            self.id,
            self.service.store.layout.to_json(),
            list(astuple(geometry)),
            [self.service.files[number - 1] for number in given],
            [given.index(nsid) + 1 if nsid in given else 0 for nsid in nsids],
            core.config.verify,
            core.config.durability,
            core.config.timeout_s,
            self.service.batch_pages,
        )

    def match(self, message: Match) -> int:
        """See ObjectStore.match."""
        pin, keys = self._pin(message.pin), keys_of(message.keys)
        hits = self._core.match(keys, pin=pin, proven=message.proven)
        if self._tier is not None and hits < len(keys):
            self._tier.missed(keys[hits:])
        return hits

    def present(self, message: Present) -> bytes:
        """See ObjectStore.present: one byte per key."""
        pin, keys = self._pin(message.pin), keys_of(message.keys)
        there = self._core.present(keys, pin=pin, proven=message.proven)
        if self._tier is not None and not there.all():
            self._tier.missed(keys[~there])
        return there.tobytes()

    def unpin(self, name: str) -> None:
        """See ObjectStore.unpin; other sessions keep theirs."""
        if name:
            self._core.unpin(f"{self._prefix}:{name}")
        else:
            with self._core.lock:
                self._core.lookup_pins.release_all(f"{self._prefix}:")

    def _pin(self, name: str) -> str | bool:
        if not name:
            return False
        if name == "*":
            return f"{self._prefix}:*{next(self._nameless)}"
        return f"{self._prefix}:{name}"

    def plan_put(self, message: PlanPut) -> Plan | memoryview:
        """Plans a put: slots for the keys that are absent.  Returns the plan or its frame.

        Raises what ObjectStore.put raises.
        """
        self._check_batch(message.keys)
        if message.parent and len(message.parent) != KEY_NBYTES:
            raise KeySizeError(f"the parent key has {len(message.parent)} bytes, not {KEY_NBYTES}")
        if not 0 <= message.depth < 2**31:
            raise ConfigError(f"depth is {message.depth}; it counts the pages before the first key")
        number = self.jobs.number()
        if message.tenant or message.expiry_64s:
            return self._plan_any_put(number, message)
        request = NativePutRequest(
            parent=message.parent or None,
            number=number,
            job=number,
            depth=message.depth,
            has_digests=self._put_layers > 0,
        )
        put = self._writer.plan(message.keys, request)
        if put is None:
            return self._plan_any_put(number, message)
        chain = put.chain
        if not chain.count:
            outcome = np.full(len(chain.keys), Outcome.PRESENT, np.uint8)
            if self._tier is not None:
                self._tier.put_over(chain.keys, outcome)
            return Plan(number, [], outcome.tobytes())
        over = partial(self._put_over, number, message.keys)
        self.jobs.add(number, PlacedPut(self._writer, put, self._put_layers, over))
        return chain.answer

    def _plan_any_put(self, number: int, message: PlanPut) -> Plan:
        """Plans a put that waits for space, or has a namespace or an expiry."""
        core, keys = self._core, keys_of(message.keys)
        planned = PlannedMemory(core.geometry)
        pages, memory = planned.of_rows(len(keys))
        own = message.depth, message.tenant, message.expiry_64s
        request = PutRequest.chain(keys, pages, memory, message.parent or None, *own)
        self.service.store.catalogue.expiry.watch(message.expiry_64s > 0)
        progress = PutProgress(len(keys), core.guard, core.store_latency)
        with core.admitted(core.config.timeout_s):
            part = PutPart(request, np.arange(len(keys)), progress, lambda *_: progress.end_part())
            error = self._writer.put([part])
        if error is not None:
            raise error
        if not planned.jobs:
            if self._tier is not None:
                self._tier.put_over(keys, progress.outcome)
            return Plan(number, [], progress.outcome.tobytes(), packed_status(progress.status))
        jobs = [self._told(job) for job in planned.jobs]
        known = progress.outcome.tobytes()
        progress.on_done(partial(self._put_over, number, message.keys))
        return Plan(number, jobs, known)

    def _told(self, job: RemoteJob, *, whole: bool = False) -> MoveJob:
        """Registers a job, which is under way then; returns the message for the client."""
        number = self.jobs.number()
        self.jobs.add(number, job)
        return job.message(number, whole)

    def _put_over(self, number: int, keys: bytes, progress: PutProgress) -> None:
        if self._tier is not None:
            self._tier.put_over(keys_of(keys), progress.outcome)
        self._report(Written(number, progress.outcome.tobytes(), packed_status(progress.status)))

    def plan_load(self, message: PlanLoad) -> Plan | memoryview:
        """Plans a load: the objects keep their slots until the client reports the jobs.

        Returns the plan or its frame.  Raises what ObjectStore.load raises.
        """
        raw, loader, number = message.keys, self._loader, self.jobs.number()
        self._check_batch(raw)
        plan, every = loader.plan(raw, number)
        answer = plan.answer
        if answer is not None:
            self.jobs.add(number, PlannedLoad(loader, plan))
        if self._tier is not None:
            self._tier.used(keys_of(raw))
        return answer or self._plan_any_load(keys_of(raw), plan, every=every)

    def _plan_any_load(self, keys: Keys, plan: LoadPlan, *, every: bool) -> Plan:
        """Plans a load that needs several jobs, or whose digests must be read first."""
        planned = PlannedMemory(self._core.geometry)
        pages, memory = planned.of_rows(len(keys))
        progress = self._loader.load_planned((keys, plan, pages, memory), every=every)
        whole = [part.whole for part in progress.parts]
        jobs = [self._told(job, whole=whole[i]) for i, job in enumerate(planned.jobs)]
        return Plan(0, jobs, status=packed_status(progress.record_status))

    def moved(self, message: Moved) -> None:
        """Handles the client's report of a job.  May wait for staging of records."""
        job = self.jobs.take(message.job)
        try:
            with self.service.reporting:
                job.finish(message.status, message.digests)
        except ConfigError:
            self.jobs.add(message.job, job)
            raise

    def _check_batch(self, keys: bytes) -> None:
        """Raises ConfigError for a part of a key, or too many."""
        n, rest = divmod(len(keys), KEY_NBYTES)
        if rest:
            raise ConfigError(f"{len(keys)} bytes are not whole keys of {KEY_NBYTES}")
        if n > self.service.batch_pages:
            raise ConfigError(
                f"{n} keys in one plan, at most {self.service.batch_pages} are taken; ask for less"
                " at a time"
            )

    def disconnect(self) -> None:
        """Releases the pins of a client that is gone."""
        self.unpin("")

    def is_using_files(self) -> bool:
        """Whether transfers of the client may still be under way."""
        return shared_file.is_open_elsewhere(self._fds, self._place)

    def end(self) -> None:
        """Ends the session once no request and no transfer of the client is under way: its jobs
        that were not reported fail.
        """
        self.disconnect()  # again: a last request may have pinned
        self.jobs.end()
        self.service.forget(self)
