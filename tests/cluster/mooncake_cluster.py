"""A Mooncake master and segment servers on this machine, for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cluster.cable import Cable
from free_ports import free_port

WAIT_S = 30.0
_HERE = "127.0.0.1"
_ROOT = Path(__file__).resolve().parents[2]


def _folder() -> Path:
    """Where Mooncake is: in this environment, or in the project's own (`make mooncake`)."""
    spec = importlib.util.find_spec("mooncake")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    found = next(_ROOT.glob(".venv/lib/python*/site-packages/mooncake"), None)
    if found is None:
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed")
    return found


def python() -> str:
    """An interpreter that can import Mooncake, for `tutti serve --remote`."""
    folder = _folder()
    if folder.is_relative_to(sys.prefix):
        return sys.executable
    return str(folder.parents[3] / "bin" / "python")


class Cluster:
    """One master and its segment servers, over TCP on 127.0.0.1, or some of them far away."""

    def __init__(self, logs: Path, address: str = _HERE, tenants: Sequence[str] = ()) -> None:
        self._logs = logs
        self._address = address
        self._tenants = tenants
        self.port = free_port()
        self.segments: list[subprocess.Popen[bytes]] = []
        self.master = self._start("mooncake_master", *self._master_options())

    def url(self, **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"mooncake://{self._address}:{self.port}?{query}"

    def add_segment(self, size: str = "64MB", far: Cable | None = None) -> subprocess.Popen[bytes]:
        segment = self._start(
            "mooncake_client",
            f"--host={self._address if far is None else far.address}",
            f"--port={free_port()}",
            f"--master_server_address={self._address}:{self.port}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--global_segment_size={size}",
            enter=() if far is None else far.enter,
        )
        self.segments.append(segment)
        return segment

    def restart_master(self) -> None:
        self.master = self._start("mooncake_master", *self._master_options())

    def _master_options(self) -> list[str]:
        return [
            f"--rpc_address={self._address}",
            f"--rpc_port={self.port}",
            f"--metrics_host={_HERE}",
            f"--metrics_port={free_port()}",
            "--client_ttl=5",
            *self._quotas(),
        ]

    def _quotas(self) -> list[str]:
        """Options of a master that admits these tenants only, each with a quota."""
        if not self._tenants:
            return []
        policy = self._logs / "tenants.yaml"
        lines = [f"  - name: {name}\n    quota: 16MB\n" for name in self._tenants]
        policy.write_text("".join(["version: 1\ntenants:\n", *lines]))
        return ["--enable_multi_tenants", f"--tenant_quota_connector_uri={policy}"]

    def has(self, tenant: str, names: Sequence[str]) -> list[bool]:
        """Which keys a plain client of Mooncake finds as this tenant."""
        asks = (
            "import os, sys; from mooncake.store import MooncakeDistributedStore as Store\n"
            "store = Store(); master, tenant, *names = sys.argv[1:]; own = master.split(':')[0]\n"
            "made = (own, 'P2PHANDSHAKE', 0, 0, 'tcp', '', master)\n"
            "assert store.setup(*made, tenant_id=tenant) == 0\n"
            "print(*store.batch_is_exist(names), flush=True); os._exit(0)"
        )
        command = [python(), "-c", asks, f"{self._address}:{self.port}", tenant, *names]
        answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=WAIT_S)
        return [word == b"1" for word in answer.stdout.split()]

    def _start(
        self, name: str, *options: str, enter: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        # The program itself; what pip installs on PATH is a wrapper that a kill would not pass on.
        command = [*enter, str(_folder() / name), *options]
        with open(self._logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        if name == "mooncake_master":
            deadline_s = time.monotonic() + WAIT_S
            while not self._answers():
                assert process.poll() is None, f"{name} ended, see {self._logs}"
                assert time.monotonic() < deadline_s, f"{name} does not listen"
                time.sleep(0.05)
        return process

    def _answers(self) -> bool:
        address = (self._address, self.port)
        with contextlib.suppress(OSError), socket.create_connection(address, 1):
            return True
        return False

    def stop(self) -> None:
        for process in (*self.segments, self.master):
            process.kill()
            process.wait(WAIT_S)


@contextlib.contextmanager
def running(
    folder: Path, segments: int = 1, address: str = _HERE, tenants: Sequence[str] = ()
) -> Iterator[Cluster]:
    os.environ.setdefault("GLOG_minloglevel", "2")
    folder.mkdir()
    cluster = Cluster(folder, address, tenants)
    try:
        for _ in range(segments):
            cluster.add_segment()
        yield cluster
    finally:
        cluster.stop()
