"""A real SGLang server on CPU, for tests: start, ask, flush, stop or kill; two at a time.

Its log goes into a file; what went wrong is quoted from there.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import re
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
_LOCK = "/tmp/tutti-sglang-server.lock"
_SERVERS = 2  # at a time: each takes 2 GiB and less than one core
_LOCK_S = 900.0
_START_S = 180.0
_REQUEST_S = 60.0
_COUNTED_S = 30.0  # what the medium counts is read every ten seconds


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
        self.port = free_port()
        self._lock = take_turn()
        command = ["--model-path", str(model), "--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--skip-tokenizer-init", "--page-size", str(page_size)]
        command += ["--max-total-tokens", "4096", "--context-length", "2048"]
        command += ["--mem-fraction-static", "0.3", "--enable-cache-report", "--enable-metrics"]
        command += ["--admin-api-key", ADMIN_KEY, "--random-seed", "7"]
        command += [] if overlap else ["--disable-overlap-schedule"]
        command += arguments
        log.touch()
        self.pid = _nursery().start(command, log, {**_health_of(arguments), **(env or {})})

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
            if not self.alive():
                raise ServerFailed(f"the server has ended:\n{self.tail()}")
            try:
                self.call("GET", "/health", timeout_s=5)
                return
            except (OSError, ServerFailed):
                time.sleep(0.3)
        raise ServerFailed(f"the server is not up after {_START_S:g} s:\n{self.tail()}")

    def alive(self) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 0)
            return True
        return False

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

    def ask(self, prompt: Sequence[int], new_tokens: int = 8, **more: Any) -> Reply:
        """Greedy decoding with logprobs of what it generates.  Raises ServerFailed."""
        meta = self._generate(prompt, new_tokens, **more)
        output = meta["output_token_logprobs"]
        details = meta.get("cached_tokens_details") or {}
        return Reply(
            tokens=[int(token) for _, token, *_ in output],
            logprobs=[float(logprob) for logprob, *_ in output],
            cached=int(meta["cached_tokens"]),
            storage=int(details.get("storage", 0)),
            meta=meta,
        )

    def judge(self, tokens: Sequence[int]) -> list[float]:
        """The logprob of every token but the first, all computed here and now."""
        salt = os.urandom(8).hex()  # another salt, other page hashes: nothing is found
        meta = self._generate(tokens, 1, logprob_start_len=0, cache_salt=salt)
        assert meta["cached_tokens"] == 0
        return [float(logprob) for logprob, *_ in meta["input_token_logprobs"][1:]]

    def _generate(self, prompt: Sequence[int], new_tokens: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {
            "input_ids": list(prompt),
            "sampling_params": sampling,
            "return_logprob": True,
            **more,
        }
        status, text = self.call("POST", "/generate", body)
        if status != 200:
            raise ServerFailed(f"status {status}: {text}")
        meta: dict[str, Any] = json.loads(text)["meta_info"]
        return meta

    def metrics(self) -> dict[str, float]:
        """Tutti's metrics as Prometheus would read them; those by direction as "name/direction"."""
        status, text = self.call("GET", "/metrics")
        assert status == 200, text
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("tutti:"):
                name, _, rest = line.removeprefix("tutti:").partition("{")
                labels, _, value = rest.partition("} ")
                direction = re.search('direction="([a-z]+)"', labels)
                key = f"{name}/{direction[1]}" if direction else name
                found[key] = found.get(key, 0.0) + float(value)
        return found

    def counted(self, name: str) -> float:
        """A counter of Tutti's, once it has counted something."""
        deadline = time.monotonic() + _COUNTED_S
        while not (count := self.metrics().get(name, 0.0)):
            if time.monotonic() > deadline:
                raise ServerFailed(f"nothing was counted as {name}")
            time.sleep(0.2)
        return count

    def held(self) -> tuple[int, int]:
        """Threads and open files of the schedulers, where Tutti lives."""
        threads = files = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                group = os.getpgid(int(folder.name))
                name = (folder / "cmdline").read_bytes()
                if group == self.pid and name.startswith(b"sglang::scheduler"):
                    threads += len(list((folder / "task").iterdir()))
                    files += len(list((folder / "fd").iterdir()))
        return threads, files

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

    def settle(self, quiet_s: float = 0.5) -> None:
        """Waits until nothing has been stored for a while, so that the last request's KV is."""
        deadline = time.monotonic() + _REQUEST_S
        before: dict[str, float] = {}
        while time.monotonic() < deadline:
            time.sleep(quiet_s)
            now = {name: n for name, n in self.metrics().items() if name.endswith("/store")}
            if now == before:
                return
            before = now

    def kill(self) -> None:
        """SIGKILL to every process of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._wait_gone(30)
        self._give_turn()

    def stop(self) -> None:
        """SIGTERM, as an operator would stop it."""
        os.kill(self.pid, signal.SIGTERM)
        try:
            self._wait_gone(60)
        finally:
            self.kill()

    def _wait_gone(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server is still there after {timeout_s:g} s")
            time.sleep(0.02)

    def _give_turn(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _health_of(arguments: Sequence[str]) -> dict[str, str]:
    """Turns off the request that /health makes, which takes a second: SGLang's warm-up has made one
    before.  That of a prefill or decode server may fail, so there the request decides.
    """
    is_of_a_pair = "--disaggregation-mode" in arguments
    return {} if is_of_a_pair else {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}


class _Nursery:
    """The process that servers are forked from; see `server_nursery.py`."""

    def __init__(self) -> None:
        places = [str(HERE / "stand_in"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server_nursery.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        atexit.register(self._process.kill)
        self._answer()

    def start(self, arguments: Sequence[str], log: Path, env: dict[str, str]) -> int:
        """The process id of a new server, which is the leader of a group."""
        request = {"arguments": list(arguments), "log": str(log), "env": env}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._answer()["pid"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerFailed("SGLang cannot be imported: run server_nursery.py to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


@functools.cache
def _nursery() -> _Nursery:
    return _Nursery()


def make_model(folder: Path, kind: str = "mha") -> Path:
    """Returns the folder, with a tiny model; made in another process, which imports transformers.

    kind: of its attention, mha or mla.
    """
    command = [sys.executable, str(HERE / "tiny_model.py"), str(folder), "0", kind]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def take_turn() -> int:
    """Waits until fewer than _SERVERS tests on this machine run a server."""
    deadline = time.monotonic() + _LOCK_S
    while time.monotonic() < deadline:
        for place in range(_SERVERS):
            fd = os.open(f"{_LOCK}.{place}", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                os.close(fd)
        time.sleep(0.2)
    raise ServerFailed(f"other servers have been running for {_LOCK_S:g} s; end them first")
