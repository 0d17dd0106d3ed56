"""What the fuzzers found stays found: the corpus, and changes of it drawn from the seed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz import targets

pytest.importorskip("msgspec", reason="the agent's messages need msgspec")

CORPUS = Path(__file__).parent / "corpus"
CASES = 150
SLOW_CASES = 15  # of those that open a pool


def changed(rng: random.Random, seeds: list[bytes]) -> bytes:
    """A few cuts, copies and other bytes in one of the seeds."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        piece = rng.choice(seeds)
        start = rng.randrange(len(piece) + 1)
        length = rng.randint(0, 16)
        data[at : at + rng.randint(0, 16)] = rng.choice(
            [piece[start : start + length], rng.randbytes(length), b"\xff" * length]
        )
    return bytes(data)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_nothing_but_typed_errors(name: str, seed: int) -> None:
    seeds = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    for data in seeds:
        targets.run(name, data)
    rng = random.Random(f"{seed} {name}")
    for _ in range(SLOW_CASES if name == "pool" else CASES):
        data = changed(rng, seeds)
        try:
            targets.run(name, data)
        except Exception as error:
            pytest.fail(f"{name}: {data.hex()}: {error!r}")


def test_an_untyped_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def untyped(data: bytes) -> None:
        raise KeyError(data)

    monkeypatch.setitem(targets.TARGETS, "layout", untyped)
    with pytest.raises(KeyError):
        targets.run("layout", b"{}")
