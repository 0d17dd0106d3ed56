"""A stand-in for a model, so that the examples need numpy alone: KV is a function of the tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import tutti

LAYOUT = tutti.KVLayout.mha(
    layers=4, kv_heads=2, head_dim=64, page_size=16, dtype="float16", model="tiny", weights="v1"
)


def prompt(seed: int, pages: int) -> npt.NDArray[np.int64]:
    """Tokens of a prompt of so many whole pages."""
    return np.random.default_rng(seed).integers(0, 50_000, pages * LAYOUT.page_size)


def keys_of(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """One key for each whole page; a page's key depends on all tokens before it."""
    return tutti.chain_keys(LAYOUT.fingerprint, tokens, LAYOUT.page_size)


def compute_page(key: npt.NDArray[np.uint8]) -> bytes:
    """What a prefill would compute for the page of this key."""
    seed = int.from_bytes(key.tobytes()[:8], "little")
    return np.random.default_rng(seed).bytes(LAYOUT.object_nbytes)
