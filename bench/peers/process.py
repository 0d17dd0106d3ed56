"""The process in which one peer is measured.

    python -m tutti.bench.peers.process PLAN NAME

Each peer has a process, so that CPU time and memory are its own. It takes one command per line
(`store 3`, `load 3`, `ways 3 0 1`, `exists 0 1 2`, `pages`, `quit`) and answers with JSON.
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
from random import Random
from tempfile import TemporaryFile
from typing import IO, Any

from tutti.base.interrupts import uninterrupted
from tutti.bench.peers.hicache import COLLAPSE_S, HiCachePeer
from tutti.bench.peers.lmcache import LMCachePeer
from tutti.bench.peers.peer import BATCH_PAGES, Peer, PeerPlan
from tutti.bench.peers.plain import FilesPeer, StorePeer
from tutti.bench.peers.same_memory import HASHED, STORE, WAYS, Call, discard, ways_of
from tutti.errors import ConfigError, TuttiError
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


_COMMANDS = ("store", "load", "ways", "exists", "pages")
_OTHER_BATCH = 1 << 32  # is stored, and discarded, to compare stores

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
        self._files: list[IO[bytes]] = []  # without names, and overwritten: see same_memory.FILES
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
        if command not in _COMMANDS:
            raise ConfigError(f"{command} is not a command; give {', '.join(_COMMANDS)} or quit")
        answer: dict[str, Any] = getattr(self, f"_{command}")(*batches)
        return answer

    def _store(self, batch: int, *, write: Call | None = None) -> dict[str, Any]:
        self._peer.prepare_store(batch)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        digest_cpu_s = (write or partial(self._peer.store, batch))()
        os.sync()
        return self._measured(cpu_s, wall_s, digest_cpu_s)

    def _load(self, batch: int, *, read: Call | None = None) -> dict[str, Any]:
        self._peer.prepare_load(batch)
        self._forget_cached()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        digest_cpu_s = (read or partial(self._peer.load, batch))()
        measured = self._measured(cpu_s, wall_s, digest_cpu_s)
        self._peer.check(batch)
        return measured

    def _ways(self, batch: int, *turns: int) -> dict[str, Any]:
        """Loads a batch and stores another in all ways, in a random order of each turn."""
        peer, answers = self._peer, []
        load, store = partial(peer.load, batch), partial(peer.store, _OTHER_BATCH)
        store()  # evicts, so that the timed stores find free slots
        discard(peer.kept(_OTHER_BATCH))
        peer.prepare_store(batch)
        while len(self._files) < BATCH_PAGES:
            file = TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - used until exit
            self._files.append(file)
        ways = ways_of(peer.kept(batch), load, store, self._files)
        for turn in turns:
            answers.append(answer := dict[str, Any]())
            for name in Random(turn).sample([*ways], len(ways)):
                if name == HASHED[STORE]:
                    answer[name] = self._store(batch, write=ways[name])
                elif WAYS[name] == STORE:
                    answer[name] = self._store(_OTHER_BATCH, write=ways[name])
                    discard(peer.kept(_OTHER_BATCH))
                else:
                    answer[name] = self._load(batch, read=ways[name])
        return {"turns": answers}

    def _exists(self, *batches: int) -> dict[str, Any]:
        wall_s = time.perf_counter()
        found = self._peer.exists([*batches])
        return {"pages": found, "wall_s": time.perf_counter() - wall_s}

    def _pages(self) -> dict[str, Any]:
        _, nbytes = memory = self._peer.memory()
        return {"nbytes": nbytes, "hugepage_nbytes": hugepage_nbytes([memory])}

    def _measured(self, cpu_s: float, wall_s: float, digest_cpu_s: float | None) -> dict[str, Any]:
        return {
            "wall_s": time.perf_counter() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
            "nbytes": self._plan.batch_nbytes,
            "extra_memory_nbytes": max(0, _memory("VmHWM") - self._base_nbytes),
            "digest_cpu_s": digest_cpu_s,
        }

    def _forget_cached(self) -> None:
        """Drops the files from the page cache; removes the oldest if the peer keeps all files."""
        files = [path for path in self._directory.rglob("*") if path.is_file()]
        nbytes = 0
        for path in sorted(files, key=lambda path: -path.stat().st_mtime_ns):
            nbytes += path.stat().st_size
            if nbytes > self._plan.kept_nbytes and len(files) > 1:
                path.unlink()
                continue
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _memory(name: str) -> int:
    """Bytes that proc(5) calls VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


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
