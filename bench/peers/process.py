"""The process in which one peer is measured.

    python -m tutti.bench.peers.process PLAN NAME

Each peer has a process, so that CPU time and memory are its own. It takes one command per line
(`store 3`, `load 3`, `ways 3 0`, `exists 0 1 2`, `pages`, `quit`) and answers with a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tutti.base.interrupts import uninterrupted
from tutti.bench.peers.hicache import COLLAPSE_S, HiCachePeer
from tutti.bench.peers.lmcache import LMCachePeer
from tutti.bench.peers.peer import Peer, PeerPlan
from tutti.bench.peers.plain import FilesPeer, StorePeer
from tutti.bench.peers.same_memory import WAYS, ways_of
from tutti.errors import ConfigError, MediumError, TuttiError
from tutti.gio_uring.memory import hugepage_nbytes
from tutti.integration.sglang.host.host_pools import advise_hugepages

_PLAIN: dict[str, Callable[[PeerPlan], Peer]] = {
    "store": StorePeer,
    "file-per-page": FilesPeer,
    "lmcache-fs-native": LMCachePeer,
}


def make_peer(name: str, plan: PeerPlan) -> Peer:
    """A peer by its name.  Raises ConfigError for an unknown one."""
    if name in _PLAIN:
        return _PLAIN[name](plan)
    backend, options = _sglang_backend(name, plan)
    return HiCachePeer(plan, backend, **options)


def _sglang_backend(name: str, plan: PeerPlan) -> tuple[str, dict[str, Any]]:
    tutti_options = {
        "backend_name": "tutti",
        "module_path": "tutti.integration.sglang.hicache",
        "class_name": "TuttiHiCacheStorage",
        "interface_v1": 1,
        "allow_unwatched_weights": True,
        "path": [plan.directory, *plan.others] if plan.others else plan.directory,
        "capacity": plan.capacity_nbytes,
        "eviction": "lru",
    }
    if plan.host_pages:
        tutti_options["hugepages"] = "off"  # the bench has done it for all peers
    posix = {"posix": {"active": True, "use_uring": "true"}}
    backends: dict[str, tuple[str, dict[str, Any]]] = {
        "hicache-tutti": ("dynamic", tutti_options),
        "hicache-tutti-unverified": ("dynamic", tutti_options | {"verify": "off"}),
        "hicache-file": ("file", {"file_storage_path": plan.directory}),
        "hicache-nixl": (
            "nixl",
            {"plugin": posix, "use_direct_io": True, "l3_cleaner_enabled": False},
        ),
    }
    if name not in backends:
        raise ConfigError(f"{name} is not a peer; choose from {', '.join(PEERS)}")
    return backends[name]


#: The SGLang backend or the package that each peer needs; empty if it needs neither.
PEERS: dict[str, str] = {
    "hicache-tutti": "dynamic",
    "hicache-tutti-unverified": "dynamic",
    "hicache-file": "file",
    "hicache-nixl": "nixl",
    "lmcache-fs-native": "lmcache",
    "store": "",
    "file-per-page": "",
}


class PeerProcess:
    """Runs one peer and measures it.

    A store ends when the bytes are on the medium (the timed part syncs the file system), and a load
    begins without any of the files' bytes in the page cache.
    """

    def __init__(self, peer: Peer, plan: PeerPlan) -> None:
        self._peer = peer
        self._plan = plan
        self._directory = Path(plan.directory)
        if plan.host_pages in ("advise", "collapse"):
            stop = threading.Event()
            timer = threading.Timer(COLLAPSE_S, stop.set)
            timer.start()
            advise_hugepages([peer.memory()], plan.host_pages, stop)
            timer.cancel()
        self._base_nbytes = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
        peer.open()

    def answer(self, command: str, batches: list[int]) -> dict[str, Any]:
        """Carries out one command."""
        if command in ("store", "load", "ways"):
            answer: dict[str, Any] = getattr(self, f"_{command}")(*batches)
            return answer
        if command == "exists":
            return self._exists(batches)
        if command == "pages":
            _, nbytes = memory = self._peer.memory()
            return {"nbytes": nbytes, "hugepage_nbytes": hugepage_nbytes([memory])}
        raise ConfigError(
            f"{command} is not a command; give store, load, ways, exists, pages or quit"
        )

    def _store(self, batch: int) -> dict[str, Any]:
        self._peer.prepare_store(batch)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        self._peer.store(batch)
        os.sync()
        return self._measured(cpu_s, wall_s)

    def _load(self, batch: int, *, read: Callable[[], None] | None = None) -> dict[str, Any]:
        self._peer.prepare_load(batch)
        self._forget_cached()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        (read or partial(self._peer.load, batch))()
        measured = self._measured(cpu_s, wall_s)
        self._peer.check(batch)
        return measured

    def _ways(self, batch: int, turn: int) -> dict[str, Any]:
        """Reads a batch in all ways, in cyclic order from the one with number ``turn``."""
        ways = ways_of(self._peer.kept(batch), partial(self._peer.load, batch))
        names = (WAYS[(turn + i) % len(WAYS)] for i in range(len(WAYS)))
        return {name: self._load(batch, read=ways[name]) for name in names}

    def _exists(self, batches: list[int]) -> dict[str, Any]:
        wall_s = time.perf_counter()
        found = self._peer.exists(batches)
        return {"pages": found, "wall_s": time.perf_counter() - wall_s}

    def _measured(self, cpu_s: float, wall_s: float) -> dict[str, Any]:
        return {
            "wall_s": time.perf_counter() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
            "nbytes": self._plan.batch_nbytes,
            "extra_memory_nbytes": max(0, _memory("VmHWM") - self._base_nbytes),
        }

    def _forget_cached(self) -> None:
        """Drops the files from the page cache; removes the oldest if the peer keeps all files."""
        files = sorted(
            (path for path in self._directory.rglob("*") if path.is_file()),
            key=lambda path: path.stat().st_mtime_ns,
        )
        kept, nbytes = [], 0
        for path in reversed(files):
            nbytes += path.stat().st_size
            if nbytes > self._plan.kept_nbytes and len(files) > 1:
                path.unlink()
            else:
                kept.append(path)
        for path in kept:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _memory(name: str) -> int:
    """Bytes that proc(5) calls VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise MediumError(f"/proc/self/status says no {name}; run this on Linux")


@uninterrupted()  # on one thread, as SGLang calls its backends
def main(argv: Sequence[str] | None = None) -> int:
    """Answers commands until `quit` or the end of the input."""
    plan_text, name = sys.argv[1:] if argv is None else argv
    plan = PeerPlan(**json.loads(plan_text))
    # Output of the peer goes elsewhere: standard output is only for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        peer = make_peer(name, plan)
        process = PeerProcess(peer, plan)
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            command, *batches = line.split()
            if command == "quit":
                break
            answer = process.answer(command, [int(batch) for batch in batches])
            answers.write(json.dumps(answer) + "\n")
        peer.close()
    except TuttiError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
