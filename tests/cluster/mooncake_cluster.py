"""A Mooncake master and segment servers on this machine, for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

WAIT_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _program(name: str) -> str:
    """The program itself; what pip installs on PATH is a wrapper that a kill would not pass on."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        pytest.skip("mooncake-transfer-engine-non-cuda is not installed")
    return str(Path(spec.origin).with_name(name))


class Cluster:
    """One master and its segment servers, over TCP on 127.0.0.1."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.port = free_port()
        self.segments: list[subprocess.Popen[bytes]] = []
        self.master = self._start("mooncake_master", *self._master_options())

    def url(self, **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"mooncake://127.0.0.1:{self.port}?{query}"

    def add_segment(self, size: str = "64MB") -> subprocess.Popen[bytes]:
        segment = self._start(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={free_port()}",
            f"--master_server_address=127.0.0.1:{self.port}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--global_segment_size={size}",
        )
        self.segments.append(segment)
        return segment

    def restart_master(self) -> None:
        self.master = self._start("mooncake_master", *self._master_options())

    def _master_options(self) -> list[str]:
        return [
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={free_port()}",
            "--client_ttl=5",
        ]

    def _start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        with open(self._logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen([_program(name), *options], stdout=log, stderr=log)
        if name == "mooncake_master":
            deadline_s = time.monotonic() + WAIT_S
            while not self._answers():
                assert process.poll() is None, f"{name} ended, see {self._logs}"
                assert time.monotonic() < deadline_s, f"{name} does not listen"
                time.sleep(0.05)
        return process

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def stop(self) -> None:
        for process in (*self.segments, self.master):
            process.kill()
            process.wait(WAIT_S)


@contextlib.contextmanager
def running(folder: Path, segments: int = 1) -> Iterator[Cluster]:
    os.environ.setdefault("GLOG_minloglevel", "2")
    folder.mkdir()
    cluster = Cluster(folder)
    try:
        for _ in range(segments):
            cluster.add_segment()
        yield cluster
    finally:
        cluster.stop()
