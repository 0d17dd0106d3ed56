"""A remote store in a folder, whose faults a test chooses while it runs."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from node.agents import LAYOUT

from tutti.cluster.remote_store import RemoteConfig, ValueStatus
from tutti.cluster.worker import HEAD, trailer_nbytes
from tutti.errors import RemoteFailed

HANG_S = 3600.0
SLOW_START_S = 4.0


class FaultyStore:
    """Values are files of the folder, those of a tenant begin with its name; its file `fault` names
    the fault to inject, `calls` what was asked."""

    def __init__(self, options: Mapping[str, str], address: int, nbytes: int) -> None:
        self._folder = Path(options["folder"])
        self._tenant = options.get("tenant_id", "")
        self._memory = (ctypes.c_char * nbytes).from_address(address)
        self._base = address
        if self._fault() == "unreachable":
            raise RemoteFailed("the master is away")
        if self._fault() == "slow-start" and self._tenant:
            time.sleep(SLOW_START_S)

    def _fault(self) -> str:
        path = self._folder / "fault"
        return path.read_text() if path.exists() else ""

    def _begin(self, op: str, names: Sequence[str]) -> None:
        with open(self._folder / "calls", "a") as calls:
            calls.write(f"{op} {len(names)} {self._tenant}".rstrip() + "\n")
        fault = self._fault()
        if fault == "hang" or fault == f"hang-{op}":
            time.sleep(HANG_S)
        elif fault == "die":
            os.abort()
        elif fault in ("raise", f"raise-{op}"):
            raise RemoteFailed("refused")
        elif fault == "slow":
            time.sleep(0.5)

    def _path(self, name: str) -> Path:
        return self._folder / (self._tenant + name.replace("/", "_"))

    def exists(self, names: Sequence[str]) -> list[ValueStatus]:
        self._begin("exists", names)
        return [ValueStatus.DONE if self._path(n).exists() else ValueStatus.ABSENT for n in names]

    def get(self, names: Sequence[str], addresses: Sequence[int], nbytes: int) -> list[ValueStatus]:
        self._begin("get", names)
        answers = []
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            if self._fault() == "fail" or not self._path(name).exists():
                answers.append(
                    ValueStatus.FAILED if self._fault() == "fail" else ValueStatus.ABSENT
                )
                continue
            raw = bytearray(self._path(name).read_bytes())
            if self._fault() == "flip" and number == 1:
                raw[len(raw) // 2] ^= 1
            if self._fault() == "flip-digest" and number == 1:
                raw[HEAD.itemsize - trailer_nbytes(LAYOUT.layers)] ^= 1
            if self._fault() == "swap" and number < 2:
                raw = bytearray(self._path(names[1 - number]).read_bytes())
            start = address - self._base
            self._memory[start : start + nbytes] = bytes(raw)
            answers.append(ValueStatus.DONE)
        return answers

    def put(self, names: Sequence[str], addresses: Sequence[int], nbytes: int) -> list[ValueStatus]:
        self._begin("put", names)
        if self._fault() == "full" and self._tenant:
            return [ValueStatus.ABSENT] * len(names)
        for name, address in zip(names, addresses, strict=True):
            start = address - self._base
            self._path(name).write_bytes(self._memory[start : start + nbytes])
        return [ValueStatus.DONE] * len(names)

    def remove(self, names: Sequence[str]) -> list[ValueStatus]:
        self._begin("remove", names)
        gone = [self._path(name).exists() for name in names]
        for name in names:
            self._path(name).unlink(missing_ok=True)
        return [ValueStatus.DONE if there else ValueStatus.ABSENT for there in gone]


class Faults:
    """The folder of a FaultyStore, and what goes wrong in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def set(self, fault: str) -> None:
        """One of "", flip, flip-digest, swap, fail, hang, hang-OPERATION, die, raise,
        raise-OPERATION, slow, unreachable, slow-start (each tenant's), full (only tenants)."""
        (self.folder / "next").write_text(fault)
        os.replace(self.folder / "next", self.folder / "fault")

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def config(self, **settings: object) -> RemoteConfig:
        # A process may take long to start on a busy machine, and to answer.
        given = {"timeout_s": 30.0, "connect_s": 60.0, "client_ttl_s": 0.3, **settings}
        options = {"folder": str(self.folder)}
        return RemoteConfig("cluster.faulty:FaultyStore", options, **given)  # type: ignore[arg-type]
