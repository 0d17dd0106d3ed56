"""Copies pages between two places by tables: staging and paged memory, or pages among themselves.

The kernels of ``kernels/device`` know one stride and a staging without gaps.  Here each segment
has strides of its own on both sides, and the pages of both sides come in any order.  Nothing is
checked or digested.

A table has 64-bit words: for each segment (target, its stride, source, its stride, bytes), then the
pages' numbers there, then those here.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_pages(  # type: ignore[no-untyped-def]
    table,
    segments,
    pages,
    programs,
    UNIT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Pages of segments in turn, by so many programs.

    table: its address.  UNIT: divides all addresses, strides and sizes; 1, 4 or 16 bytes.
    BLOCK: bytes that a program moves at once.
    """
    kind: tl.constexpr = tl.int8 if UNIT == 1 else tl.int32
    size: tl.constexpr = 1 if UNIT == 1 else 4
    words = table.to(tl.pointer_type(tl.int64))
    for number in range(tl.program_id(0), pages * segments, programs):
        span = words + 5 * (number // pages)
        place = words + 5 * segments + number % pages
        there = tl.load(span) + tl.load(place) * tl.load(span + 1)
        here = tl.load(span + 2) + tl.load(place + pages) * tl.load(span + 3)
        to = tl.multiple_of(there.to(tl.pointer_type(kind)), UNIT)
        of = tl.multiple_of(here.to(tl.pointer_type(kind)), UNIT)
        count = tl.multiple_of(tl.load(span + 4) // size, UNIT // size)
        for start in range(0, count, BLOCK // size):
            at = start + tl.arange(0, BLOCK // size)
            tl.store(to + at, tl.load(of + at, mask=at < count), mask=at < count)
