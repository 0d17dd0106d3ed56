"""The verdict on a server's answers: what makes it fail, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu.serving.correctness import compare, verdict

Answers = dict[str, list[dict[str, Any]]]


def answer(cached: int, place: str, logprob: float = -1.0) -> dict[str, Any]:
    places = {"device": 0, "host": 0, "storage": 0, place: cached}
    return {"tokens": [5, 6], "logprobs": [-0.5, logprob], "cached": cached, "places": places}


def answers(*, stores: bool) -> Answers:
    logprob, cached = (-1.0, 64) if stores else (-1.25, 0)
    return {
        "cold": [answer(0, "device", -1.25)],
        "device": [answer(64, "device")],
        "storage": [answer(cached, "storage", logprob)],
        "together": [answer(cached, "storage", logprob)],
        "other_beginning": [answer(0, "device", -3.0)],
    }


def one_bit_off(found: Answers) -> None:
    found["storage"][0]["logprobs"][1] -= 2**-20


def fewer_cached(found: Answers) -> None:
    found["storage"][0]["cached"] -= 1


def from_gpu_memory(found: Answers) -> None:
    found["storage"][0]["places"] = {"device": 64}


def never_cached(found: Answers) -> None:
    for name in ("device", "storage"):
        found[name][0]["cached"] = 0


def deaf_to_the_beginning(found: Answers) -> None:
    found["other_beginning"] = found["cold"]


@pytest.mark.parametrize("stores", [True, False])
def test_equal_answers_pass(stores: bool) -> None:
    assert verdict(answers(stores=stores), stores=stores)["passed"]


@pytest.mark.parametrize(
    "spoil", [one_bit_off, fewer_cached, from_gpu_memory, never_cached, deaf_to_the_beginning]
)
def test_each_fault_fails(spoil: Callable[[Answers], None]) -> None:
    found = answers(stores=True)
    spoil(found)
    assert not verdict(found, stores=True)["passed"]


def test_a_flush_that_leaves_something_fails() -> None:
    found = answers(stores=True)
    assert not verdict(found, stores=False)["passed"]


def test_answers_in_a_batch_are_told_and_not_judged() -> None:
    found = answers(stores=True)
    found["together"][0]["logprobs"][0] -= 0.25
    told = verdict(found, stores=True)
    assert told["passed"]
    assert told["together_against_device"][0]["max_logprob_difference"] == 0.25


def test_texts_are_compared_up_to_the_first_other_token() -> None:
    one = {"tokens": [1, 2, 3, 4], "logprobs": [-1.0, -1.0, -1.0, -1.0]}
    other = {"tokens": [1, 9, 3, 4], "logprobs": [-1.0, -1.5, -9.0, -9.0]}
    assert compare(one, other) == {
        "same_tokens": 1,
        "max_logprob_difference": 0.5,
        "bit_equal": False,
    }
