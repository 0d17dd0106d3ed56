"""A stand-in for a server that streams: no model, no SGLang.  It does what its script says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """How the server behaves.

    first_s, gap_s: until the first token, and between two.  workers: requests served at once.
    mode: "stream", "plain" (no stream), "lump" (all tokens in one event), "refuse", "garbage" (no
    JSON), "break" (ends within a chunk), "abort" (SGLang's error within a stream), "silent".
    dies_after: so many requests are served, then connections are refused.
    model_tokens: the context that /v1/models tells.
    statuses: of the paths that do not answer with 200.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    workers: int = 1000
    mode: str = "stream"
    dies_after: int | None = None
    cached: dict[str, int] | None = None
    info: dict[str, Any] = field(default_factory=lambda: {"context_length": 100_000})
    model_tokens: int | None = None
    statuses: dict[str, int] = field(default_factory=dict)
    on_request: Callable[[int], None] = lambda number: None
    requests: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


class StandIn:
    """The server in a thread of its own."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._gate = asyncio.Semaphore(self.script.workers)
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._answer, "127.0.0.1", 0)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._up.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                self._loop.run_until_complete(task)
        self._loop.close()

    def _stop(self) -> None:
        self._server.close()
        self._loop.stop()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            lengths = [line for line in head.split("\r\n") if line.lower().startswith("content-l")]
            nbytes = int(lengths[0].split(":")[1]) if lengths else 0
            body = await reader.readexactly(nbytes)
            self.script.calls.append(f"{method} {path}")
            if path in ("/generate", "/v1/chat/completions"):
                await self._generate(path, json.loads(body), writer)
            else:
                _plain(writer, self.script.statuses.get(path, 200), self._fact(path))
            await writer.drain()
        writer.close()

    def _fact(self, path: str) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "some/model", "max_model_len": self.script.model_tokens}]}
        return self.script.info if path == "/server_info" else {}

    async def _generate(
        self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        script = self.script
        number = len(script.requests)
        script.requests.append(body)
        script.on_request(number)
        if script.dies_after is not None and number >= script.dies_after:
            self._server.close()
            writer.transport.abort()
            return
        if script.mode == "refuse":
            _plain(writer, 400, {"error": {"message": "longer than the context"}})
            return
        if script.mode == "plain":
            _plain(writer, 200, {"text": "all at once"})
            return
        _stream_head(writer)
        async with self._gate:
            await asyncio.sleep(script.first_s)
            for data in _events(path, body, script):
                _chunk(writer, b"data: " + data + b"\n\n")
                await writer.drain()
                await asyncio.sleep(script.gap_s)
        if script.mode == "break":
            writer.write(b"ff\r\ndata: {")
            return
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _events(path: str, body: dict[str, Any], script: Script) -> Iterator[bytes]:
    chat = path != "/generate"
    wanted = body["max_tokens"] if chat else body["sampling_params"]["max_new_tokens"]
    prompt = body["messages"] if chat else body.get("input_ids", body.get("text"))
    if script.mode == "silent":
        return
    if script.mode == "garbage":
        yield b"{no json"
        return
    for count in [wanted] if script.mode == "lump" else range(1, wanted + 1):
        if chat:
            usage = {"prompt_tokens": len(str(prompt)), "completion_tokens": count}
            usage |= {"prompt_tokens_details": {"cached_tokens": 7}}
            event: dict[str, Any] = {"choices": [{"delta": {"content": "a"}}], "usage": usage}
            if script.cached is not None and count == wanted - 1:
                event["sglext"] = {"cached_tokens_details": script.cached}
            yield json.dumps(event).encode()
            continue
        meta: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": count}
        if script.cached is not None:
            meta |= {"cached_tokens": sum(script.cached.values())}
            meta |= {"cached_tokens_details": script.cached}
        if script.mode == "abort" and count == 2:
            meta["finish_reason"] = {"type": "abort", "message": "the pool is gone"}
        yield json.dumps({"text": "a" * count, "meta_info": meta}).encode()


def _plain(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)


def _stream_head(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One event in two chunks: where chunks end says nothing."""
    for piece in (data[:9], data[9:]):
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")


@contextlib.contextmanager
def standing_in(**options: Any) -> Iterator[StandIn]:
    server = StandIn(Script(**options))
    try:
        yield server
    finally:
        server.stop()
