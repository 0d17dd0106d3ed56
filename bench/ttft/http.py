"""HTTP/1.1 requests whose answer is a stream of server-sent events, with asyncio alone.

One connection per request (RFC 9112: chunked bodies, bodies of a given length, or up to the end of
the connection; WHATWG HTML 9.2: events are blocks of lines, "data:" lines carry the payload).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tutti.errors import ConfigError, TuttiError

_LINE_NBYTES_MAX = 1 << 24
_REFUSAL_NBYTES = 2000
_HEADERS_MAX = 200


class ServerError(TuttiError):
    """A server cannot be reached, ended, or sends an answer that cannot be measured."""


class Refused(ServerError):
    """The server answered one request with an error status."""


class NotStreaming(ServerError):
    """The answer came in one piece, so the first token cannot be timed."""


@dataclass(frozen=True)
class Endpoint:
    """Address of a server.  headers: sent with every request."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def url(self) -> str:
        """The base URL, without a slash at the end."""
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}{self.prefix}"


def parse_endpoint(url: str, api_key: str | None = None) -> Endpoint:
    """An endpoint from "http://host:port".  Raises ConfigError."""
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL ({error}); write http://host:port") from error
    if split.scheme not in ("http", "https") or not split.hostname:
        raise ConfigError(f"{url!r} is not the address of a server; write http://host:port")
    tls = split.scheme == "https"
    headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
    return Endpoint(
        split.hostname, port or (443 if tls else 80), tls, split.path.rstrip("/"), headers
    )


async def stream_events(endpoint: Endpoint, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
    """Posts JSON and yields the data of each event as it arrives.

    Raises Refused for another status than 200, NotStreaming for anything but an event stream,
    ServerError for a broken answer, OSError for a broken connection. The caller sets the deadline.
    """
    reader, writer = await asyncio.open_connection(
        endpoint.host, endpoint.port, ssl=endpoint.tls or None, limit=_LINE_NBYTES_MAX
    )
    try:
        writer.write(_head(endpoint, path, len(body)) + body)
        await writer.drain()
        status, headers = await _answer_head(reader)
        pieces = _pieces(reader, headers)
        if status != 200:
            raise Refused(f"status {status}: {await _beginning(pieces)}")
        if not headers.get("content-type", "").startswith("text/event-stream"):
            raise NotStreaming(
                f"{path} answers without streaming ({headers.get('content-type', 'no type')}); "
                "use a server that streams server-sent events"
            )
        async for data in _events(pieces):
            yield data
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the answer broke off") from error
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise ServerError(f"the answer is not HTTP/1.1 ({error})") from error
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            writer.transport.abort()


def _head(endpoint: Endpoint, path: str, nbytes: int) -> bytes:
    lines = [
        f"POST {endpoint.prefix}{path} HTTP/1.1",
        f"Host: {endpoint.host}:{endpoint.port}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Connection: close",
        f"Content-Length: {nbytes}",
        *(f"{name}: {value}" for name, value in endpoint.headers),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _answer_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers with names in lower case."""
    version, _, rest = (await reader.readuntil(b"\n")).decode("latin-1").partition(" ")
    if not version.startswith("HTTP/1."):
        raise ServerError(f"the server does not speak HTTP/1.1 (it says {version[:20]!r})")
    headers: dict[str, str] = {}
    for _ in range(_HEADERS_MAX):
        line = (await reader.readuntil(b"\n")).decode("latin-1").strip()
        if not line:
            return int(rest[:3]), headers
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip().lower()
    raise ServerError(f"the server sends more than {_HEADERS_MAX} headers")


async def _pieces(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body as it arrives."""
    if headers.get("transfer-encoding", "") == "chunked":
        size = int((await reader.readuntil(b"\n")).split(b";")[0], 16)
        while size > 0:
            yield await reader.readexactly(size)
            await reader.readuntil(b"\n")
            size = int((await reader.readuntil(b"\n")).split(b";")[0], 16)
        return
    left = int(headers["content-length"]) if "content-length" in headers else None
    piece = b" "
    while piece and left != 0:
        piece = await reader.read(65536 if left is None else min(65536, left))
        left = None if left is None else left - len(piece)
        yield piece
    if left:
        raise ConnectionError(f"the answer broke off, {left} bytes early")


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Data of every whole event.  An incomplete last one is dropped (WHATWG HTML 9.2)."""
    rest = b""
    async for piece in pieces:
        rest = (rest + piece).replace(b"\r\n", b"\n")
        *blocks, rest = rest.split(b"\n\n")
        for block in blocks:
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)


async def _beginning(pieces: AsyncIterator[bytes]) -> str:
    text = b""
    async for piece in pieces:
        text += piece
        if len(text) >= _REFUSAL_NBYTES:
            break
    return text[:_REFUSAL_NBYTES].decode(errors="replace").strip()
