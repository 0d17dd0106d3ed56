"""Whether KV from storage gives the answers that KV from GPU memory gives, bit by bit.

A prompt that is computed as a whole gives other roundings than one whose beginning is cached, so
that answers are compared at the same number of cached tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu.serving.server import Fleet, GpuServer

Answer = dict[str, Any]


def run(fleet: Fleet, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All systems at the same time; the same prompts for all."""
    prompts = [random_prompt(n, n, args.vocabulary) for n in args.prompts]
    other = random_prompt(0, args.prompts[-1] // 4, args.vocabulary)
    changed = [*other, *prompts[-1][len(other) :]]
    found = fleet.each(partial(measure, prompts=prompts, changed=changed))
    for system, row in found.items():
        print(f"{system}: {'passed' if row['verdict']['passed'] else 'FAILED'}", flush=True)
        first = next(iter(found.values()))["answers"]["cold"]
        against = compared(row["answers"]["cold"], first)
        yield {"system": system, "cold_against_first_system": against, **row}


def random_prompt(seed: int, tokens: int, vocabulary: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(tokens)]


def ask(server: GpuServer, prompt: Sequence[int]) -> Answer:
    began_s = time.monotonic()
    reply = server.ask(prompt)
    return {
        "tokens": reply.tokens,
        "logprobs": reply.logprobs,
        "cached": reply.cached,
        "places": reply.meta.get("cached_tokens_details") or {},
        "elapsed_s": time.monotonic() - began_s,
    }


def measure(server: GpuServer, prompts: list[list[int]], changed: list[int]) -> dict[str, Any]:
    """All answers of a server.  changed: the last prompt with another beginning."""
    before = server.stored()
    answers = {"cold": [ask(server, prompt) for prompt in prompts]}
    answers["device"] = [ask(server, prompt) for prompt in prompts]
    pages = sum(answer["cached"] for answer in answers["device"]) // server.page_tokens
    stored = server.wait_stored(before, pages)
    server.flush()
    answers["storage"] = [ask(server, prompt) for prompt in prompts]
    server.flush()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers["together"] = list(pool.map(partial(ask, server), prompts))
    answers["other_beginning"] = [ask(server, changed)]
    found = {"verdict": verdict(answers, stores=server.stores), "answers": answers}
    lengths = [len(prompt) for prompt in prompts]
    return {"prompt_tokens": lengths, "pages": pages, "stored_pages": stored, **found}


def verdict(answers: dict[str, list[Answer]], *, stores: bool) -> dict[str, Any]:
    """passed: answers from storage equal those from GPU memory, with as many cached tokens, none
    of them from GPU memory; and the same end behind another beginning gives another answer.

    Without storage the flush must have left nothing.  Several at once share a batch, which rounds
    otherwise: how far they are off is told, and not judged.
    """
    cold, device, storage = answers["cold"], answers["device"], answers["storage"]
    wanted = device if stores else cold
    other = compared(answers["other_beginning"], cold[-1:])
    facts = {
        "cached_in_gpu_memory": all(answer["cached"] > 0 for answer in device),
        "cached_as_expected": [a["cached"] for a in storage] == [a["cached"] for a in wanted],
        "nothing_from_gpu_memory": not any(a["places"].get("device", 0) for a in storage),
        "bit_equal": all(row["bit_equal"] for row in compared(storage, wanted)),
        "another_beginning_differs": not any(row["bit_equal"] for row in other),
    }
    return {
        "passed": all(facts.values()),
        **facts,
        "storage_against_device": compared(storage, device),
        "together_against_device": compared(answers["together"], device),
        "device_against_cold": compared(device, cold),
        "other_beginning_against_cold": other,
    }


def compared(ones: list[Answer], others: list[Answer]) -> list[dict[str, Any]]:
    return [compare(one, other) for one, other in zip(ones, others, strict=True)]


def compare(one: Answer, other: Answer) -> dict[str, Any]:
    """How many tokens agree, and the largest difference of logprobs up to the first that does not:
    behind it the texts are different ones.
    """
    agreed = [a == b for a, b in zip(one["tokens"], other["tokens"], strict=True)]
    gaps = [abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True)]
    same = [*agreed, False].index(False)
    return {
        "same_tokens": same,
        "max_logprob_difference": max(gaps[: same + 1]),
        "bit_equal": all(agreed) and not any(gaps),
    }
