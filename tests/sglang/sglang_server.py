"""A real SGLang server on CPU, for tests: start, ask, flush, stop or kill; only one at a time.

Its log goes into a file; what went wrong is quoted from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
ADMIN_KEY = "admin"
_LOCK = Path("/tmp/tutti-sglang-server.lock")
_LOCK_S = 900.0
_START_S = 180.0
_REQUEST_S = 60.0


@dataclass(frozen=True)
class Reply:
    """What a prompt gave: token ids, their logprobs, and where the prompt's KV came from.

    prompt: logprobs of the prompt's tokens that were computed.  cached: tokens that were not.
    storage: how many of these came from storage.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int
    storage: int
    meta: dict[str, Any] = field(compare=False, repr=False)


class ServerFailed(RuntimeError):
    """The server did not start, or died."""


class Server:
    """One server process group.  Use it as a context manager."""

    def __init__(
        self,
        model: Path,
        log: Path,
        arguments: Sequence[str],
        *,
        page_size: int = 16,
        overlap: bool = True,
        env: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        self.port = _free_port()
        self._lock = _take_turn()
        command = [sys.executable, "-m", "sglang.launch_server"]
        command += ["--model-path", str(model), "--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--skip-tokenizer-init", "--page-size", str(page_size)]
        command += ["--max-total-tokens", "4096", "--context-length", "2048"]
        command += ["--mem-fraction-static", "0.3", "--enable-cache-report"]
        command += ["--admin-api-key", ADMIN_KEY, "--random-seed", "7"]
        command += [] if overlap else ["--disable-overlap-schedule"]
        command += arguments
        places = [str(HERE / "stand_in"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
            **(env or {}),
        }
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                cwd=log.parent,
            )

    def __enter__(self) -> Server:
        try:
            self.wait_up()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def wait_up(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(
                    f"the server ended with {self.process.returncode}:\n{self.tail()}"
                )
            try:
                self.call("GET", "/health", timeout_s=5)
                return
            except (OSError, ServerFailed):
                time.sleep(0.3)
        raise ServerFailed(f"the server is not up after {_START_S:g} s:\n{self.tail()}")

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float = _REQUEST_S
    ) -> tuple[int, str]:
        """Status and text; an HTTP error is an answer, no answer is an OSError."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={
                "Content-Type": "application/json",
                "Authorization": f"Bearer {ADMIN_KEY}",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            if path == "/health":
                raise ServerFailed(str(error)) from error
            return error.code, error.read().decode()

    def ask(self, prompt: Sequence[int], new_tokens: int = 8) -> Reply:
        """Greedy decoding with logprobs of what it generates.  Raises ServerFailed."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": new_tokens,
                "ignore_eos": True,
            },
            "return_logprob": True,
        }
        status, text = self.call("POST", "/generate", body)
        if status != 200:
            raise ServerFailed(f"status {status}: {text}")
        meta = json.loads(text)["meta_info"]
        output = meta["output_token_logprobs"]
        details = meta.get("cached_tokens_details") or {}
        return Reply(
            tokens=[int(token) for _, token, *_ in output],
            logprobs=[float(logprob) for logprob, *_ in output],
            cached=int(meta["cached_tokens"]),
            storage=int(details.get("storage", 0)),
            meta=meta,
        )

    def flush(self) -> None:
        """Empties device and host cache.  SGLang refuses while a request counts as running."""
        deadline = time.monotonic() + _REQUEST_S
        text = ""
        while time.monotonic() < deadline:
            status, text = self.call("POST", "/flush_cache")
            if status == 200:
                return
            time.sleep(0.1)
        raise ServerFailed(f"flush refused for {_REQUEST_S:g} s: {text}")

    def settle(self, seconds: float = 1.0) -> None:
        """Gives the write-through of the last request time to reach the storage."""
        time.sleep(seconds)

    def kill(self) -> None:
        """SIGKILL to every process of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self._give_turn()

    def stop(self) -> None:
        """SIGTERM, as an operator would stop it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.kill()

    def _give_turn(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _die_with_parent() -> None:
    """A test that is cut off takes its server along (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _take_turn() -> int:
    """Waits until no other test on this machine runs a server."""
    fd = os.open(os.environ.get("TUTTI_SERVER_LOCK", _LOCK), os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + _LOCK_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            time.sleep(0.2)
    os.close(fd)
    raise ServerFailed(f"another server has been running for {_LOCK_S:g} s; end it first")
