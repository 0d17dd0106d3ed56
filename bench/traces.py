"""Request traces: a reader of Mooncake's format and a seeded generator of the same shape.

A line is {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]};
hash id i names the content of block i of the prompt and of all blocks before it, 512 tokens each,
the last block perhaps shorter (kvcache-ai/Mooncake, FAST25-release/traces).
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.base.checks import open_regular
from tutti.errors import ConfigError
from tutti.medium.keys import object_keys

BLOCK_TOKENS = 512
SYNTHETIC = "synthetic"
_HASH_ID_MAX = 2**64 - 1
_TOKENS_MAX = 2**40
_REQUESTS_MAX = 10**6  # of a synthetic trace, which is in memory as a whole: about 1 KB each
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True)
class TraceRequest:
    """One request: its arrival (ms), its tokens, and the hash ids of its prompt's blocks."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    def to_json(self) -> str:
        """A line of Mooncake's format."""
        values = (self.timestamp_ms, self.input_tokens, self.output_tokens, self.hash_ids)
        return json.dumps(dict(zip(_FIELDS, values, strict=True)))


@dataclass(frozen=True)
class Synthetic:
    """Conversations of several turns behind shared system prompts.

    A request starts a conversation or, with chance `continue_chance`, continues one of the last
    `open_conversations` (recent ones more often): its prompt is everything said before, the
    answer included, and a new message. Lengths in tokens are log-normal, given by median and sigma
    (natural logarithm). System prompts are drawn by Zipf's law. With the defaults 34 to 40 % of the
    blocks are reusable, more in longer traces, and a request has about 24; in Mooncake's
    conversation trace of 12,031 requests these are 36.6 % and 24.
    """

    requests: int = 400
    seed: int = 1
    system_prompts: int = 16
    zipf_exponent: float = 1.1
    system_median: int = 900
    system_sigma: float = 0.6
    message_median: int = 3300
    message_sigma: float = 1.2
    answer_median: int = 350
    answer_sigma: float = 0.9
    continue_chance: float = 0.37
    open_conversations: int = 64
    tokens_max: int = 120_000
    gap_ms: float = 300.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for name, value in asdict(self).items():
            if value < 0 or (value == 0 and name not in ("seed", "continue_chance")):
                raise ConfigError(f"{name} is {value}; it must be positive")
        if self.requests > _REQUESTS_MAX:
            raise ConfigError(
                f"{self.requests} requests are too many for a trace in memory; give at most"
                f" {_REQUESTS_MAX}"
            )
        if self.continue_chance >= 1:
            raise ConfigError(f"continue_chance is {self.continue_chance}; it is below 1")


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a file in Mooncake's format.

    Raises ConfigError with the number of the line that is not such a request.
    """
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as lines:
            return parse_trace(lines, limit)
    except (OSError, UnicodeDecodeError) as error:
        name = os.path.basename(path)
        raise ConfigError(f"cannot read the trace {name}: {error}; give a .jsonl file") from error


def requests_of(trace: str, limit: int | None, seed: int = 1) -> list[TraceRequest]:
    """The first requests of a file, or of the trace generated from `seed`."""
    if trace != SYNTHETIC:
        return read_trace(trace, limit)
    return generate(Synthetic(seed=seed, requests=limit or Synthetic.requests))


def parse_trace(lines: Iterable[str], limit: int | None = None) -> list[TraceRequest]:
    """Does the same as `read_trace` for lines; empty ones are skipped."""
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(requests) >= limit:
            break
        if line.strip():
            requests.append(_parse_line(line, number))
    if not requests:
        raise ConfigError("the trace has no requests; give one in Mooncake's jsonl format")
    return requests


def generate(config: Synthetic) -> list[TraceRequest]:
    """Generates requests, which depend only on the config and its seed."""
    return _Generator(config).requests()


def reach(request: TraceRequest, blocks: int) -> int:
    """Number of prompt tokens in the first `blocks` blocks of a request."""
    return min(blocks * BLOCK_TOKENS, request.input_tokens)


def block_keys(
    fingerprint: bytes, hash_ids: Sequence[int], pages_per_block: int = 1
) -> npt.NDArray[np.uint8]:
    """Keys of the pages of a request, uint8 (len(hash_ids) * pages_per_block, 16).

    XXH3-128(fingerprint || hash id as little-endian u64), and for page j > 0 of a block also || j
    as little-endian u32. Hash ids are prefix hashes already, so nothing is chained.
    """
    hashes = []
    for hash_id in hash_ids:
        name = hash_id.to_bytes(8, "little")
        hashes.append(name)
        hashes += [name + j.to_bytes(4, "little") for j in range(1, pages_per_block)]
    return object_keys(fingerprint, hashes)


def _parse_line(line: str, number: int) -> TraceRequest:
    try:
        content: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number} of the trace is not JSON ({error}); repair it") from error
    if not isinstance(content, dict) or any(name not in content for name in _FIELDS):
        raise ConfigError(f"line {number} of the trace lacks one of {', '.join(_FIELDS)}")
    timestamp, inputs, outputs, ids = (content[name] for name in _FIELDS)
    for name, value in zip(_FIELDS[:3], (timestamp, inputs, outputs), strict=True):
        if type(value) is not int or not 0 <= value <= _TOKENS_MAX:
            raise ConfigError(f"line {number} of the trace: {name} is {value!r}, no count")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= _HASH_ID_MAX for i in ids):
        raise ConfigError(f"line {number} of the trace: hash_ids is not a list of ids below 2^64")
    if len(ids) != -(-inputs // BLOCK_TOKENS):
        raise ConfigError(
            f"line {number} of the trace: {len(ids)} hash_ids for {inputs} tokens, there is one "
            f"for every {BLOCK_TOKENS}"
        )
    return TraceRequest(timestamp, inputs, outputs, tuple(ids))


@dataclass
class _Conversation:
    """Number of tokens so far, and the ids of the full blocks among them."""

    tokens: int
    ids: list[int]


class _Generator:
    def __init__(self, config: Synthetic) -> None:
        self._config = config
        self._rng = np.random.default_rng(config.seed)
        self._next_id = 0
        self._open: list[_Conversation] = []
        ranks = np.arange(1, config.system_prompts + 1, dtype=float)
        weights = ranks**-config.zipf_exponent
        self._popularity = weights / weights.sum()
        self._systems = [self._system() for _ in range(config.system_prompts)]

    def requests(self) -> list[TraceRequest]:
        out: list[TraceRequest] = []
        time_ms = 0.0
        for _ in range(self._config.requests):
            conversation = self._choose()
            message = self._length(self._config.message_median, self._config.message_sigma)
            tokens = min(conversation.tokens + message, self._config.tokens_max)
            answer = self._length(self._config.answer_median, self._config.answer_sigma)
            self._grow(conversation, tokens)
            partial = [self._new_id()] if tokens % BLOCK_TOKENS else []
            ids = (*conversation.ids, *partial)
            out.append(TraceRequest(int(time_ms), tokens, answer, ids))
            self._grow(conversation, tokens + answer)
            time_ms += self._rng.exponential(self._config.gap_ms)
        return out

    def _choose(self) -> _Conversation:
        """A conversation to continue, the most recent ones first, or a new one."""
        config = self._config
        if self._open and self._rng.random() < config.continue_chance:
            back = min(
                int(self._rng.geometric(min(1.0, 4 / config.open_conversations))), len(self._open)
            )
            conversation = self._open.pop(-back)
            if conversation.tokens < config.tokens_max:
                self._open.append(conversation)
                return conversation
        system = self._systems[int(self._rng.choice(len(self._systems), p=self._popularity))]
        conversation = _Conversation(system.tokens, list(system.ids))
        self._open.append(conversation)
        del self._open[: -config.open_conversations]
        return conversation

    def _system(self) -> _Conversation:
        prompt = _Conversation(0, [])
        self._grow(prompt, self._length(self._config.system_median, self._config.system_sigma))
        return prompt

    def _grow(self, conversation: _Conversation, tokens: int) -> None:
        """Adds tokens; each block that becomes full gets a new id."""
        conversation.tokens = tokens
        missing = tokens // BLOCK_TOKENS - len(conversation.ids)
        conversation.ids += [self._new_id() for _ in range(missing)]

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _length(self, median: int, sigma: float) -> int:
        return max(1, round(float(self._rng.lognormal(np.log(median), sigma))))
