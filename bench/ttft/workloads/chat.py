"""Conversations: each turn's prompt holds all turns before it, questions and answers.

Turns of many conversations are mixed; those of one stay in order.  Answers within prompts are
generated here, so a server's own answers are not hit: only earlier prompts are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tutti.bench.ttft.workloads.prompt import Prompt, PromptPart
from tutti.errors import ConfigError


@dataclass(frozen=True)
class Conversation:
    """A kind of conversation; tokens and turns are means.

    spread: sigma of the logarithm of tokens, 0 for fixed lengths; turns vary with it as well.
    users: number of concurrent conversations.  system: tokens of the common system prompt.
    """

    turns: float
    question: float
    answer: float
    spread: float
    users: int
    system: int


#: sharegpt: lengths of a turn as the vLLM paper has them (arXiv 2309.06180, section 6.1); turns,
#: spread and users are assumed.  multiturn: long fixed turns, as clients of an agent send them.
CHATS = {
    "sharegpt": Conversation(turns=3.5, question=161, answer=338, spread=1.0, users=64, system=32),
    "multiturn": Conversation(turns=8, question=1024, answer=128, spread=0.0, users=64, system=512),
}
REQUESTS = 3000


def generate_chats(
    name: str, requests: int, seed: int, *, scale: float = 1.0, users: int | None = None
) -> list[Prompt]:
    """Generates `requests` turns in order of arrival; a user starts a new conversation after one.

    scale: factor on the lengths of questions.  users: overrides the kind's number.  Raises
    ConfigError for no requests.
    """
    if requests < 1:
        raise ConfigError("no requests of a conversation; give a positive number")
    chat, rng = CHATS[name], np.random.default_rng([seed, 4])
    chat = replace(chat, users=users or chat.users)
    numbers = itertools.count()
    talks = [_turns(chat, name, next(numbers), rng, scale) for _ in range(chat.users)]
    prompts = []
    for _ in range(requests):
        user = int(rng.integers(chat.users))
        prompt = next(talks[user], None)
        if prompt is None:
            talks[user] = _turns(chat, name, next(numbers), rng, scale)
            prompt = next(talks[user])
        prompts.append(prompt)
    return prompts


def _turns(
    chat: Conversation, name: str, number: int, rng: np.random.Generator, scale: float
) -> Iterator[Prompt]:
    """The turns of one conversation; at least one."""
    parts = [PromptPart(f"{name}-system", chat.system)]
    turns = int(rng.geometric(1 / chat.turns)) if chat.spread else round(chat.turns)
    for turn in range(turns):
        parts.append(
            PromptPart(f"{name}-{number}-q{turn}", _tokens(chat.question * scale, chat, rng))
        )
        answer = _tokens(chat.answer, chat, rng)
        yield Prompt(name, f"{name}-{number}", tuple(parts), answer)
        parts.append(PromptPart(f"{name}-{number}-a{turn}", answer))


def _tokens(mean: float, chat: Conversation, rng: np.random.Generator) -> int:
    """A log-normal number of tokens with this mean."""
    mu = np.log(mean) - chat.spread**2 / 2
    return max(1, round(float(rng.lognormal(mu, chat.spread))))
