"""Computes the size of pinned staging for a pool in GPU memory, from the longest context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.base.memory_pressure import total_nbytes
from tutti.base.units import MiB, format_nbytes
from tutti.gio_uring.gpu.stream_queue import Needed
from tutti.integration.sglang.direct.kv_pools import KvPoolGroup
from tutti.integration.sglang.identity import ParallelRank

#: Layers of a transfer with a place in staging: two are copied while two are read.
_LAYERS = 4
_FLOOR_NBYTES = 64 * MiB
_CEILING_NBYTES = 4096 * MiB
#: Share of the node's memory for one direction of all pools of all ranks.  Not of free memory: a
#: device engine loads only what fits, and all ranks must give the same answer to a load.
_NODE_SHARE = 1 / 16
_LBA_NBYTES = 4096


@dataclass(frozen=True)
class StagingSize:
    """Bytes of staging for loads, and as many for stores, and the reason for the size.

    pages: of the longest load.
    """

    nbytes: int
    pages: int
    reason: str


def staging_sizes(
    options: Mapping[str, Any], group: KvPoolGroup, parallel_rank: ParallelRank
) -> dict[str, StagingSize]:
    """Sizes by pool.  Pools of states and windows have few pages per context, so they get the
    minimum.  The ranks of a node share its memory, and get equal sizes.
    """
    asked = options["gpu_staging"]
    by_page = [pool for pool in group.pools.values() if not pool.trailing]
    share = total_nbytes() * _NODE_SHARE / parallel_rank.place_on_node[1] / len(by_page)
    ceiling = int(min(_CEILING_NBYTES, share))
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
            f"{'as given' if asked else 'by context length and memory of the node'}; "
            f"{'enough' if nbytes >= wanted else 'not enough'} for {_LAYERS} layers of two "
            f"transfers of {needed.pages * pool.slots} tokens",
        )
    return sizes
