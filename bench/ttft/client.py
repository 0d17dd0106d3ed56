"""The builtin client: sends requests when they are due and times every piece of every answer.

Requests are sent on an absolute schedule without a limit (open loop), so that a slow server does
not reduce its own load.  Latencies count from a request's due time; the delay until it was sent is
recorded separately, because the client causes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tutti.bench.ttft.http import Endpoint, NotStreaming, ServerError, stream_events
from tutti.bench.ttft.protocol import ServerApi

#: After this many broken connections in a row the server counts as ended.
LOST_AFTER = 5
_LEAD_S = 0.05


@dataclass(frozen=True)
class TimedCall:
    """A request: its number, when it is due, and its body.  Times are in seconds of the run."""

    number: int
    due_s: float
    task: str
    output_tokens: int
    body: Callable[[], bytes]


@dataclass
class Record:
    """Result of a call.  tokens: (time, output tokens so far) of each event with new ones.

    error: empty for success.  cached: cached prompt tokens by source, as the server reports.
    """

    number: int
    task: str
    due_s: float
    sent_s: float = 0.0
    tokens: list[tuple[float, int]] = field(default_factory=list)
    done_s: float = 0.0
    input_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    error: str = ""

    def see_cached(self, cached: dict[str, int] | None) -> None:
        """Keeps the latest report of an event; a total does not replace counts by source."""
        knows_places = bool(self.cached) and "unknown" not in self.cached
        if cached is not None and not ("unknown" in cached and knows_places):
            self.cached = cached

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
        return {
            "number": self.number,
            "task": self.task,
            "due_ms": round(1e3 * self.due_s, 3),
            "sent_ms": round(1e3 * self.sent_s, 3),
            "tokens": [[round(1e3 * at, 3), count] for at, count in self.tokens],
            "done_ms": round(1e3 * self.done_s, 3),
            "input_tokens": self.input_tokens,
            "cached": self.cached,
            "error": self.error,
        }


@dataclass
class Run:
    """Records of calls that ended.  stopped: why the run ended early; empty otherwise."""

    records: list[Record] = field(default_factory=list)
    stopped: str = ""
    _broken_in_a_row: int = 0

    def take(self, record: Record, *, broken: bool) -> None:
        """Adds the record of a call that ended; broken: its connection failed."""
        self.records.append(record)
        self._broken_in_a_row = self._broken_in_a_row + 1 if broken else 0
        if self._broken_in_a_row >= LOST_AFTER:
            self.stopped = f"the server is gone: {record.error}"


def drive(
    endpoint: Endpoint,
    protocol: ServerApi,
    calls: Sequence[TimedCall],
    run: Run,
    *,
    timeout_s: float,
    concurrency: int | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> None:
    """Sends the calls and fills `run`, which keeps its records if this is interrupted.

    concurrency: limit of calls at once; None for a measured run, which must not be limited.
    timeout_s: of each request.  Raises NotStreaming for a server that does not stream.
    """
    asyncio.run(_drive(endpoint, protocol, calls, run, timeout_s, concurrency, advance))


async def _drive(
    endpoint: Endpoint,
    protocol: ServerApi,
    calls: Sequence[TimedCall],
    run: Run,
    timeout_s: float,
    concurrency: int | None,
    advance: Callable[[int], None],
) -> None:
    clock = asyncio.get_running_loop().time
    begin_s = clock() + _LEAD_S
    gate = asyncio.Semaphore(concurrency or max(1, len(calls)))
    not_streaming: list[NotStreaming] = []
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def one(call: TimedCall) -> None:
        async with gate:
            record = Record(call.number, call.task, call.due_s, sent_s=clock() - begin_s)
            broken = False
            try:
                async with asyncio.timeout(timeout_s):
                    await _ask(endpoint, protocol, call, record, lambda: clock() - begin_s)
            except NotStreaming as error:
                record.error = str(error)
                not_streaming.append(error)
            except TimeoutError:
                record.error = f"no end of the answer within {timeout_s:g} s"
            except (OSError, ServerError) as error:
                record.error = f"{type(error).__name__}: {error}"
                broken = isinstance(error, OSError)
            record.done_s = clock() - begin_s
            run.take(record, broken=broken)
            if (run.stopped or not_streaming) and not over.done():
                over.set_result(None)
            advance(1)

    tasks: list[asyncio.Task[None]] = []
    try:
        for call in calls:
            await asyncio.wait({over}, timeout=max(0.0, begin_s + call.due_s - clock()))
            if over.done():
                break
            tasks.append(asyncio.create_task(one(call)))
        pending = set(tasks)
        while pending and not over.done():
            done, pending = await asyncio.wait(pending, timeout=0.2)
            for failure in filter(None, (task.exception() for task in done)):
                raise failure
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not_streaming:
        raise not_streaming[0]


async def _ask(
    endpoint: Endpoint,
    protocol: ServerApi,
    call: TimedCall,
    record: Record,
    now_s: Callable[[], float],
) -> None:
    """Sends one request and fills the record."""
    count = 0
    events = stream_events(endpoint, protocol.path, protocol.body(call.body(), call.output_tokens))
    async with contextlib.aclosing(events):
        async for data in events:
            at_s = now_s()
            told = protocol.progress(data)
            if told is None:
                continue
            new = count + 1 if told.output_tokens is None else told.output_tokens
            if new > count:
                count = new
                record.tokens.append((at_s, count))
            record.input_tokens = told.input_tokens or record.input_tokens
            record.see_cached(told.cached)
    if not record.tokens:
        raise ServerError("the answer has no token")
    if call.output_tokens > 1 and len(record.tokens) == 1 and count == call.output_tokens:
        raise NotStreaming(
            f"{protocol.path} sends all {count} tokens in one event, so that nothing can be timed; "
            "turn streaming on, or SGLang's --stream-interval down"
        )
