"""The order in which questions arrive.  It determines the hit rate of a cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tutti.bench.ttft.workloads.prompt import Prompt
from tutti.errors import ConfigError

SHUFFLED, ROUND_ROBIN, DOCUMENTS = "shuffled", "round-robin", "documents"
AS_GIVEN = "as-given"
ORDERS = (SHUFFLED, ROUND_ROBIN, DOCUMENTS, AS_GIVEN)


def arrange(prompts: Sequence[Prompt], order: str, requests: int, seed: int) -> list[Prompt]:
    """Returns `requests` prompts; if there are fewer, they repeat, each time in a new order.

    shuffled: all questions in random order.  round-robin: one of each task in turn, random within
    a task; an exhausted task starts again.  documents: one of each task in turn, and within a task
    all questions of a document before the next one.  as-given: in the order of the source.
    Raises ConfigError for no prompts.
    """
    if not prompts or requests < 1:
        raise ConfigError("no prompts are left; allow a longer context or name other tasks")
    rng = np.random.default_rng([seed, 2])
    if order == AS_GIVEN:
        return [prompts[i % len(prompts)] for i in range(requests)]
    if order == SHUFFLED:
        endless = _shuffled(list(prompts), rng)
        return [next(endless) for _ in range(requests)]
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    pass_of = _shuffled if order == ROUND_ROBIN else _by_document
    queues = [pass_of(of_task, rng) for of_task in by_task.values()]
    return [next(queues[i % len(queues)]) for i in range(requests)]


def _shuffled(prompts: list[Prompt], rng: np.random.Generator) -> Iterator[Prompt]:
    """Endless passes; the caller takes a bounded number."""
    for _ in itertools.count():
        yield from (prompts[i] for i in rng.permutation(len(prompts)))


def _by_document(prompts: list[Prompt], rng: np.random.Generator) -> Iterator[Prompt]:
    """Endless passes over the documents in random order, all questions of each together."""
    documents: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        documents.setdefault(prompt.document, []).append(prompt)
    listed = list(documents.values())
    for _ in itertools.count():
        for i in rng.permutation(len(listed)):
            yield from listed[i]
