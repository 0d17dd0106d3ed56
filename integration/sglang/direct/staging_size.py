"""Computes the size of pinned staging for a pool in GPU memory, from the longest context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.base.memory_pressure import read_memory
from tutti.base.units import MiB, format_nbytes
from tutti.gio_uring.gpu.stream_queue import Needed
from tutti.integration.sglang.direct.kv_pools import KvPoolGroup
from tutti.integration.sglang.identity import ParallelRank

#: Layers of a transfer that have a place: two move while two are read.
_LAYERS = 4
_FLOOR_NBYTES = 64 * MiB
_CEILING_NBYTES = 4096 * MiB
#: Of the node's free memory, for one direction of all pools of all ranks.
_FREE_SHARE = 1 / 16
_LBA_NBYTES = 4096


@dataclass(frozen=True)
class StagingSize:
    """Bytes for loads and as many for stores, and the reason for their number.

    pages: of the longest load.
    """

    nbytes: int
    pages: int
    reason: str


def staging_sizes(
    options: Mapping[str, Any], group: KvPoolGroup, parallel_rank: ParallelRank
) -> dict[str, StagingSize]:
    """Sizes for every pool.  Pools of states and windows have few pages per context, so they get
    the minimum.  The ranks of a node share its memory.
    """
    asked = options["gpu_staging"]
    by_page = [pool for pool in group.pools.values() if not pool.trailing]
    free_nbytes = (
        read_memory().free_nbytes * _FREE_SHARE / parallel_rank.place_on_node[1] / len(by_page)
    )
    ceiling = int(min(_CEILING_NBYTES, free_nbytes))
    sizes = {}
    for pool in group.pools.values():
        pages = min(pool.pages, -(-group.context_tokens // group.page_size))
        stride = -(-sum(span.nbytes for span in pool.spans[0]) // _LBA_NBYTES) * _LBA_NBYTES
        needed = Needed(len(pool.spans), 1 if pool.trailing else pages, stride, _LBA_NBYTES)
        wanted = needed.staging_nbytes(_LAYERS)
        nbytes = asked or max(_FLOOR_NBYTES, min(ceiling, wanted))
        sizes[pool.name] = StagingSize(
            nbytes,
            needed.pages,
            f"{format_nbytes(nbytes)} for loads and for stores each, "
            f"{'as given' if asked else 'by context length and free memory'}; "
            f"{'enough' if nbytes >= wanted else 'not enough'} for {_LAYERS} layers of two "
            f"transfers of {needed.pages * pool.slots} tokens",
        )
    return sizes
