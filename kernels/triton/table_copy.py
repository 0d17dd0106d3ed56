"""Gather and scatter of segments whose places come from a table.

The kernels of ``kernels/device`` find a segment by arithmetic: a base and a stride. Where an engine
gives one address per segment instead, these copy between contiguous staging and such memory. Unlike
those they check nothing and digest nothing.

Segment ``s`` lies at ``paged[places[s]]`` and is staged at ``staged[s * words]``; all numbers count
32-bit words. Launch with `grid`; both tensors are int32, ``places`` is int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_WORDS = 4096


def grid(n_segments: int, words: int) -> tuple[int, int]:
    """Programs for ``n_segments`` segments of ``words`` 32-bit words."""
    return n_segments, -(-words // BLOCK_WORDS)


@triton.jit
def scatter(staged, paged, places, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Staging to the places of the table."""
    segment = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    block = tl.load(staged + segment * words + at, mask=inside)
    tl.store(paged + tl.load(places + segment) + at, block, mask=inside)


@triton.jit
def gather(staged, paged, places, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The places of the table to staging."""
    segment = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    block = tl.load(paged + tl.load(places + segment) + at, mask=inside)
    tl.store(staged + segment * words + at, block, mask=inside)
