"""The model of PTX's memory against verdicts on well-known programs.

Most are in the PTX ISA or in the paper that `ptx_model` names; the others follow from one axiom.
"""

from __future__ import annotations

import pytest
from native.ptx_model import Outcome, is_allowed


def both(first: str, second: str) -> dict[str, str]:
    return {"b0.0": first, "b1.0": second}


STALE: Outcome = lambda v: v["r"] == 1 and v["s"] == 0  # noqa: E731
ZEROS: Outcome = lambda v: v["r"] == 0 and v["s"] == 0  # noqa: E731
ONES: Outcome = lambda v: v["r"] == 1 and v["s"] == 1  # noqa: E731
CLASSICS: dict[str, tuple[dict[str, str], Outcome, bool]] = {
    "MP with release and acquire": (
        both("st.weak x 1\nst.release.gpu y 1", "ld.acquire.gpu y -> r\nld.weak x -> s"),
        STALE,
        False,
    ),
    "MP relaxed": (
        both("st.weak x 1\nst.relaxed.gpu y 1", "ld.relaxed.gpu y -> r\nld.weak x -> s"),
        STALE,
        True,
    ),
    "MP with fences": (
        both(
            "st.weak x 1\nfence.acq_rel.gpu\nst.relaxed.gpu y 1",
            "ld.relaxed.gpu y -> r\nfence.acq_rel.gpu\nld.weak x -> s",
        ),
        STALE,
        False,
    ),
    "MP in a scope without the reader": (
        both("st.weak x 1\nst.release.cta y 1", "ld.acquire.gpu y -> r\nld.weak x -> s"),
        STALE,
        True,
    ),
    "MP through an atomic of another thread": (
        {
            "b0.0": "st.weak x 1\nst.release.gpu y 1",
            "b1.0": "atom.relaxed.gpu y 2 -> t",
            "b2.0": "ld.acquire.gpu y -> r\nld.weak x -> s",
        },
        lambda v: v["t"] == 1 and v["r"] == 2 and v["s"] == 0,
        False,
    ),
    "SB with fence.sc": (
        both(
            "st.relaxed.gpu x 1\nfence.sc.gpu\nld.relaxed.gpu y -> r",
            "st.relaxed.gpu y 1\nfence.sc.gpu\nld.relaxed.gpu x -> s",
        ),
        ZEROS,
        False,
    ),
    "SB with fence.acq_rel": (
        both(
            "st.relaxed.gpu x 1\nfence.acq_rel.gpu\nld.relaxed.gpu y -> r",
            "st.relaxed.gpu y 1\nfence.acq_rel.gpu\nld.relaxed.gpu x -> s",
        ),
        ZEROS,
        True,
    ),
    "CoRR strong": (
        both("st.relaxed.gpu x 1", "ld.relaxed.gpu x -> r\nld.relaxed.gpu x -> s"),
        STALE,
        False,
    ),
    "CoRR weak": (both("st.weak x 1", "ld.weak x -> r\nld.weak x -> s"), STALE, True),
    "LB": (
        both(
            "ld.relaxed.gpu x -> r\nst.relaxed.gpu y 1", "ld.relaxed.gpu y -> s\nst.relaxed.gpu x 1"
        ),
        ONES,
        True,
    ),
    "LB out of thin air": (
        both(
            "ld.relaxed.gpu x -> r\nvote a\nst.relaxed.gpu y 1",
            "ld.relaxed.gpu y -> s\nvote b\nst.relaxed.gpu x 1",
        ),
        ONES,
        False,
    ),
    "IRIW with acquires": (
        {
            "b0.0": "st.relaxed.gpu x 1",
            "b1.0": "st.relaxed.gpu y 1",
            "b2.0": "ld.acquire.gpu x -> a\nld.acquire.gpu y -> b",
            "b3.0": "ld.acquire.gpu y -> c\nld.acquire.gpu x -> d",
        },
        lambda v: (v["a"], v["b"], v["c"], v["d"]) == (1, 0, 1, 0),
        True,
    ),
    "IRIW with fence.sc": (
        {
            "b0.0": "st.relaxed.gpu x 1",
            "b1.0": "st.relaxed.gpu y 1",
            "b2.0": "ld.relaxed.gpu x -> a\nfence.sc.gpu\nld.relaxed.gpu y -> b",
            "b3.0": "ld.relaxed.gpu y -> c\nfence.sc.gpu\nld.relaxed.gpu x -> d",
        },
        lambda v: (v["a"], v["b"], v["c"], v["d"]) == (1, 0, 1, 0),
        False,
    ),
    "two atomics that read the same": (
        both("atom.relaxed.gpu x 1 -> r", "atom.relaxed.gpu x 1 -> s"),
        ZEROS,
        False,
    ),
    "two atomics in scopes without each other": (
        both("atom.relaxed.cta x 1 -> r", "atom.relaxed.cta x 1 -> s"),
        ZEROS,
        True,
    ),
    "MP behind a barrier": (
        {"b0.0": "st.weak x 1\nbar b", "b0.1": "bar b\nld.weak x -> s"},
        lambda v: v["s"] == 0,
        False,
    ),
}


@pytest.mark.parametrize("name", CLASSICS)
def test_the_model_gives_the_published_verdicts(name: str) -> None:
    program, outcome, verdict = CLASSICS[name]
    assert is_allowed(program, outcome) == verdict
