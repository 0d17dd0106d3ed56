"""A prompt as a list of parts with names, and its two forms on the wire: token ids or text.

Equal names mean equal content, so that two prompts share exactly their equal leading parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

#: Estimated characters of English text per token of a large vocabulary.  Lengths of real texts
#: are estimated with it; results use the server's own counts instead.
CHARACTERS_PER_TOKEN = 4.2
IDS, TEXT = "ids", "text"
FORMS = (IDS, TEXT)

_SALT_TOKENS = 16
_PARTS_KEPT = 16_384
#: Common words that are one token, with the space before, in large vocabularies.
_COMMON_WORDS = """
time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work
government number night point home water room mother area money story fact month lot
right study book eye job word business issue side kind head house service friend
father power hour game line
"""
_WORDS = _COMMON_WORDS.split()


@dataclass(frozen=True)
class PromptPart:
    """A piece of a prompt.  tokens: exact if generated, estimated if given as text."""

    name: str
    tokens: int
    text: str | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Prompt:
    """One request of a workload.

    task: the data set's subset.  document: name of the part that it shares with other prompts.
    arrival_ms: time of arrival in a trace.
    """

    task: str
    document: str
    parts: tuple[PromptPart, ...]
    output_tokens: int
    arrival_ms: int | None = None

    @property
    def input_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.tokens for part in self.parts)


def text_part(text: str) -> PromptPart:
    """A part of given text, named by its content."""
    tokens = max(1, round(len(text) / CHARACTERS_PER_TOKEN))
    return PromptPart(hashlib.sha1(text.encode("utf-8", "surrogatepass")).hexdigest(), tokens, text)


def salted(prompt: Prompt, salt: str) -> tuple[PromptPart, ...]:
    """The prompt's parts after one that is unique to this salt, so that no stored KV can hit.

    An empty salt changes nothing.
    """
    if not salt:
        return prompt.parts
    tag = hashlib.sha1(salt.encode()).hexdigest()
    return (PromptPart(f"salt-{tag}", _SALT_TOKENS, f"[{tag}]\n"), *prompt.parts)


class Renderer:
    """Makes the JSON value of prompts: a list of token ids below `vocabulary`, or a string.

    Parts are encoded once and joined, so that sending a long prompt costs only a copy.
    """

    def __init__(self, form: str, vocabulary: int = 32_000) -> None:
        assert form in FORMS, form
        self.form = form
        self._vocabulary = vocabulary
        self._encode = lru_cache(maxsize=_PARTS_KEPT)(self._ids if form == IDS else _text)

    def prepare(self, prompts: Iterable[Prompt]) -> None:
        """Encodes the longest parts in advance, so that encoding does not delay requests."""
        parts = {part for prompt in prompts for part in prompt.parts}
        for part in sorted(parts, key=lambda part: -part.tokens)[:_PARTS_KEPT]:
            self._encode(part)

    def json_value(self, parts: Iterable[PromptPart]) -> bytes:
        """The parts as one JSON array of numbers, or one JSON string."""
        pieces = [self._encode(part) for part in parts]
        if self.form == IDS:
            return b"[" + b",".join(filter(None, pieces)) + b"]"
        return b'"' + b"".join(pieces) + b'"'

    def _ids(self, part: PromptPart) -> bytes:
        """Ids that depend only on the name; the first eighth is avoided, for special ids."""
        seed = int.from_bytes(hashlib.sha1(part.name.encode()).digest()[:8], "little")
        rng = np.random.default_rng(seed)
        ids = rng.integers(self._vocabulary // 8, self._vocabulary, part.tokens)
        return ",".join(map(str, ids.tolist())).encode()


def plain_text(parts: Iterable[PromptPart]) -> str:
    """The parts as text; generated ones are common words, about one token each."""
    return "".join(_words(part) if part.text is None else part.text for part in parts)


def block_ids(prompts: Sequence[Prompt], block_tokens: int) -> list[list[int]]:
    """For each prompt the ids of its blocks; equal ids mean equal content up to the block's end.

    The last block may be shorter.  Ids count up from 0 in order of appearance.
    """
    known: dict[tuple[int, tuple[tuple[str, int, int], ...]], int] = {}
    blocks = []
    for prompt in prompts:
        ids, before = [], -1
        for spans in _blocks(prompt.parts, block_tokens):
            before = known.setdefault((before, spans), len(known))
            ids.append(before)
        blocks.append(ids)
    return blocks


def _blocks(
    parts: Iterable[PromptPart], block_tokens: int
) -> Iterable[tuple[tuple[str, int, int], ...]]:
    """Yields each block as (name, first token, end) of the parts' pieces in it."""
    spans: list[tuple[str, int, int]] = []
    room = block_tokens
    for part in parts:
        at = 0
        while at < part.tokens:
            n = min(room, part.tokens - at)
            spans.append((part.name, at, at + n))
            at, room = at + n, room - n
            if room == 0:
                yield tuple(spans)
                spans, room = [], block_tokens
    if spans:
        yield tuple(spans)


def _text(part: PromptPart) -> bytes:
    return json.dumps(_words(part) if part.text is None else part.text)[1:-1].encode()


def _words(part: PromptPart) -> str:
    seed = int.from_bytes(hashlib.sha1(part.name.encode()).digest()[:8], "little")
    picked = np.random.default_rng(seed).integers(0, len(_WORDS), part.tokens)
    return "".join(" " + _WORDS[i] for i in picked.tolist())
