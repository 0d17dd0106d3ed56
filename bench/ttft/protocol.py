"""Encodes requests and decodes events of a server: SGLang's own API, and OpenAI's chat API."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from tutti.bench.ttft.http import Refused, ServerError


@dataclass
class StreamProgress:
    """Counts that an event reports for its request so far; None if it does not report one.

    cached: cached prompt tokens by source.
    """

    output_tokens: int | None = None
    input_tokens: int | None = None
    cached: dict[str, int] | None = None


class ServerApi(Protocol):
    """One API of a server."""

    path: str

    def body(self, prompt: bytes, output_tokens: int) -> bytes:
        """The request's JSON.  prompt: a JSON value."""

    def progress(self, data: bytes) -> StreamProgress | None:
        """Decodes an event; None for an empty one.  Raises ServerError."""


class Generate:
    """SGLang's /generate: every event repeats the counts so far (`meta_info`)."""

    path = "/generate"

    def __init__(self, form: str) -> None:
        self._field = b"input_ids" if form == "ids" else b"text"

    def body(self, prompt: bytes, output_tokens: int) -> bytes:
        """Greedy decoding, of exactly `output_tokens`."""
        sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
        return b'{"%s":%s,"sampling_params":%s,"stream":true}' % (
            self._field,
            prompt,
            json.dumps(sampling).encode(),
        )

    def progress(self, data: bytes) -> StreamProgress | None:
        """Counts from `meta_info`."""
        event = _event(data)
        if event is None:
            return None
        meta = event.get("meta_info") or {}
        details = meta.get("cached_tokens_details")
        cached = meta.get("cached_tokens")
        return StreamProgress(
            _count(meta.get("completion_tokens")),
            _count(meta.get("prompt_tokens")),
            _cached(cached, details),
        )


class ChatProtocol:
    """OpenAI's /v1/chat/completions, with usage in the stream."""

    path = "/v1/chat/completions"

    def __init__(self, model: str) -> None:
        self._model = json.dumps(model).encode()

    def body(self, prompt: bytes, output_tokens: int) -> bytes:
        """Greedy decoding, of exactly `output_tokens` if the server supports `ignore_eos`."""
        options = {
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_cached_tokens_details": True,
        }
        tail = json.dumps(options)[1:].encode()
        messages = b'[{"role":"user","content":%s}]' % prompt
        return b'{"model":%s,"messages":%s,%s' % (self._model, messages, tail)

    def progress(self, data: bytes) -> StreamProgress | None:
        """Counts from `usage`; an event without it counts as one token if it carries text."""
        event = _event(data)
        if event is None:
            return None
        usage = event.get("usage") or {}
        details = (event.get("sglext") or {}).get("cached_tokens_details")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        output = _count(usage.get("completion_tokens"))
        if output is None and not _has_text(event):
            output = 0
        return StreamProgress(output, _count(usage.get("prompt_tokens")), _cached(cached, details))


def _event(data: bytes) -> dict[str, Any] | None:
    if data == b"[DONE]":
        return None
    try:
        event = json.loads(data)
    except ValueError as error:
        raise ServerError(f"an event of the stream is not JSON ({error})") from error
    if not isinstance(event, dict):
        raise ServerError("an event of the stream is not a JSON object")
    if "error" in event:
        raise Refused(f"the server gave up: {json.dumps(event['error'])[:500]}")
    reason = (event.get("meta_info") or {}).get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise Refused(f"the server aborted: {str(reason.get('message'))[:500]}")
    return event


def _has_text(event: dict[str, Any]) -> bool:
    deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
    return any(delta.get("content") or delta.get("reasoning_content") for delta in deltas)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _cached(total: Any, details: Any) -> dict[str, int] | None:
    """Cached tokens by source; all of them "unknown" if the server reports only a total."""
    if isinstance(details, dict):
        found = {name: _count(details.get(name)) or 0 for name in ("device", "host", "storage")}
        if any(found.values()) or not total:
            return found
    count = _count(total)
    return None if count is None else {"unknown": count}
