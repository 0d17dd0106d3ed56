"""A Mooncake cluster on this machine for benchmarks, and the CPU time of a running one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tutti.cluster.remote_store import RemoteConfig
from tutti.errors import DeviceTimeout, Unsupported

#: CPU time is counted of: the process of the pool, the thread that calls Mooncake and busy-waits,
#: the other threads of its process, and the cluster's processes.
CPU = ("pool", "caller", "client", "servers")
_HERE = "127.0.0.1"
_SEGMENTS = 2
_WAIT_S = 30.0
_POLL_S = 0.05


@contextlib.contextmanager
def own_cluster(nbytes: int) -> Iterator[str]:
    """Runs a master and two segment servers with ``nbytes`` each; yields the URL for ``--remote``.

    Raises Unsupported without Mooncake.
    """
    port = _free_port()
    master = f"{_HERE}:{port}"
    serves = (f"--rpc_address={_HERE}", f"--rpc_port={port}", f"--metrics_port={_free_port()}")
    with contextlib.ExitStack() as running:
        running.enter_context(_started("mooncake_master", *serves, "--client_ttl=5"))
        deadline_s = time.monotonic() + _WAIT_S
        while not _answers(port):
            if time.monotonic() > deadline_s:
                raise DeviceTimeout("Mooncake's master does not listen; start it to see why")
            time.sleep(_POLL_S)
        for _ in range(_SEGMENTS):
            at = (f"--host={_HERE}", f"--port={_free_port()}", f"--master_server_address={master}")
            memory = f"--global_segment_size={nbytes}"
            metadata = "--metadata_server=P2PHANDSHAKE"
            running.enter_context(_started("mooncake_client", *at, metadata, memory))
        yield f"mooncake://{master}?client_ttl=1"  # the segments join after a moment


@contextlib.contextmanager
def _started(name: str, *options: str) -> Iterator[None]:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise Unsupported(
            "this bench needs Mooncake's client; in a clone of this project:"
            " pip install -e '.[cluster]'"
        )
    # The program itself: pip's script starts it as a child, which a kill would not reach.
    command = [str(Path(spec.origin).parent / name), *options]
    quiet = {"GLOG_minloglevel": "2", **os.environ}
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=nowhere, stderr=nowhere, env=quiet) as process:
        try:
            yield
        finally:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HERE, 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((_HERE, port), 1):
        return True
    return False


class CpuTime:
    """CPU seconds of the processes in CPU.

    client: the process whose first thread calls Mooncake.
    """

    def __init__(self, config: RemoteConfig, client: int) -> None:
        port = config.options["master_server_address"].rpartition(":")[2]
        found = [path for path in Path("/proc").glob("[0-9]*") if _serves(path, port)]
        self._servers = [int(path.name) for path in found]
        self._client = client

    def read(self) -> NDArray[np.float64]:
        """In the order of CPU."""
        threads = _thread_seconds(self._client)
        caller = threads.pop(self._client, 0.0)
        servers = sum(sum(_thread_seconds(pid).values()) for pid in self._servers)
        return np.array([time.process_time(), caller, sum(threads.values()), servers])


def _serves(process: Path, port: str) -> bool:
    """Whether this is a master of this port, or a segment server of it."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False  # it has ended
    ends = (f":{port}", f"--rpc_port={port}")
    return Path(words[0]).name.startswith("mooncake_") and any(w.endswith(ends) for w in words)


def _thread_seconds(pid: int) -> dict[int, float]:
    seconds = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds
