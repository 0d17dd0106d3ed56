"""SGLang's servers, as `tutti bench serve` starts them, and what their storage has taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from server_nursery import die_with_parent
from sglang_server import Server, ServerFailed, free_port

from tutti.bench.ttft.recipes import RECIPES, RecipeOptions
from tutti.bench.ttft.server_control import public
from tutti.integration.sglang.launch import server_environment
from tutti.integration.sglang.options import HICACHE

#: Of one request; the first ones wait until kernels are compiled.
REQUEST_S = 180.0
_STORED_S = 60.0
#: For a page whose file is there already to be written as a whole.
_WRITTEN_S = 0.5
_POLL_S = 0.2
T = TypeVar("T")


class GpuServer(Server):
    """A server of one system.  until_s: when requests are given up; each phase has its own."""

    page_tokens = 64

    def __init__(
        self, system: str, options: RecipeOptions, arguments: Sequence[str], out: Path
    ) -> None:
        self.system, self.until_s = system, time.monotonic()
        self.stores = RECIPES[system].uses_storage
        self.log, self._counts, self._pool = out / f"{system}.log", out / system, options.storage
        self._counts.mkdir()
        for folder in (self._pool, *options.more_storage):
            folder.mkdir()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._lock = -1  # these servers take no turns
        launch = RECIPES[system].make(options)
        command = [sys.executable, "-m", "sglang.launch_server", *launch.arguments, *arguments]
        command += ["--port", str(self.port)]
        if "--enable-cache-report" not in command:
            command.append("--enable-cache-report")
        env = server_environment(HICACHE) | launch.env
        #: Without places of this machine.
        self.facts = {"command": public(command), "env": {k: public(v) for k, v in env.items()}}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **env, "TUTTI_TEST_COUNTS": str(self._counts)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.pid = self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, until_s: float) -> None:
        """Raises ServerFailed, with the end of its log, when it does not answer in time."""
        while time.monotonic() < until_s and self.alive():
            try:
                self.call("GET", "/health", timeout_s=5)
                return
            except (OSError, ServerFailed):
                time.sleep(_POLL_S)
        ended = "is not up in time" if self.alive() else f"ended with {self._process.returncode}"
        raise ServerFailed(f"it {ended}; its log ends:\n{self.tail()}")

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = REQUEST_S
    ) -> tuple[int, str]:
        left_s = max(0.1, self.until_s - time.monotonic())
        return super().call(method, path, body, timeout_s=min(timeout_s, left_s))

    def counts(self) -> list[dict[str, Any]]:
        """What each of its stores has counted, less than a second ago."""
        return [json.loads(path.read_text()) for path in sorted(self._counts.glob("*.json"))]

    def stored(self) -> int:
        """Pages that the storage has taken so far."""
        if self.system.startswith("tutti-"):
            return sum(counts["stored"] for counts in self.counts())
        return sum(1 for _ in self._pool.iterdir())

    def wait_stored(self, before: int, pages: int) -> int:
        """Pages stored since `before`, once they are as many or the time is over."""
        until_s = min(self.until_s, time.monotonic() + _STORED_S)
        while self.stores and time.monotonic() < until_s and self.stored() - before < pages:
            time.sleep(_POLL_S)
        time.sleep(_WRITTEN_S)
        return self.stored() - before


class Fleet:
    """All servers that are up, and what went wrong with one, which stops no other."""

    def __init__(self, servers: list[GpuServer]) -> None:
        self.servers, self.errors, self.phase = servers, list[dict[str, str]](), ""

    def each(
        self, call: Callable[[GpuServer], T], servers: Sequence[GpuServer] | None = None
    ) -> dict[str, T]:
        """What the call returns for these servers (default: all), at the same time."""

        def timed(server: GpuServer) -> T:
            if time.monotonic() > server.until_s:
                raise ServerFailed("no time was left")
            return call(server)

        found: dict[str, T] = {}
        asked = self.servers if servers is None else servers
        with ThreadPoolExecutor(max(1, len(asked))) as pool:
            for server, future in [(server, pool.submit(timed, server)) for server in asked]:
                try:
                    found[server.system] = future.result()
                except Exception as error:  # whatever it is belongs into the result
                    told = f"{type(error).__name__}: {error}"
                    one = {"phase": self.phase, "system": server.system, "error": told}
                    self.errors.append(one)
                    print(*one.values(), sep=": ", flush=True)
        return found

    def until(self, until_s: float) -> None:
        for server in self.servers:
            server.until_s = until_s

    def kill(self) -> None:
        for server in self.servers:
            server.kill()
