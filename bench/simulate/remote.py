"""The second tier: a store that all nodes share, through a link of each node.

As with the agent, look-ups never wait for it: missing blocks are fetched into the node's own store,
where a later look-up finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tutti.bench.simulate.cached_blocks import Blocks
from tutti.bench.simulate.device import READ, WRITE, Device, Line, Timeline
from tutti.errors import ConfigError

FIRST, SECOND = "first", "second"
_DEADLINE_NS = 5_000_000_000  # of a chain, as the tier's own default


@dataclass(frozen=True)
class Remote:
    """bytes_per_s: of a node's link, per direction.  latency_us: per block.  nbytes: capacity.

    replicate: whether blocks are copied when they are stored ("first") or first loaded ("second").
    """

    bytes_per_s: float
    latency_us: float
    nbytes: int
    replicate: str = SECOND

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if min(self.bytes_per_s, self.nbytes) <= 0 or self.latency_us < 0:
            raise ConfigError("a second tier has a bandwidth and a capacity, and a latency from 0")


class RemoteLink:
    """A node's link to the shared store.  own: the node's store; medium: its drives."""

    def __init__(
        self,
        timeline: Timeline,
        remote: Remote,
        shared: Blocks,
        own: Blocks,
        medium: Device,
        block_nbytes: int,
    ) -> None:
        self.remote = remote
        self._timeline, self._medium = timeline, medium
        self._shared, self._own = shared, own
        self._block_nbytes = block_nbytes
        self._block_ns = round(block_nbytes / remote.bytes_per_s * 1e9)
        self._latency_ns = round(remote.latency_us * 1000)
        self._ways = {READ: Line(), WRITE: Line()}
        self._fetching: set[int] = set()
        self._copying: set[int] = set()
        self.fetched_blocks = self.copied_blocks = self.late_blocks = 0

    def missed(self, ids: Sequence[int]) -> None:
        """Fetches the leading blocks of a chain that the shared store has."""
        now_ns, found = self._timeline.now_ns, ids[: self._shared.match(ids)]
        self._shared.touch(found)
        new = self._own.absent(found, self._fetching)
        for place, block in enumerate(new):
            if self._ways[READ].free_ns - now_ns > _DEADLINE_NS:
                self.late_blocks += len(new) - place
                return
            self._fetching.add(block)
            came_ns = self._ways[READ].take(now_ns, self._block_ns) + self._latency_ns
            self._timeline.at(came_ns, partial(self._came, block))

    def _came(self, block: int) -> None:
        self._medium.start(WRITE, self._block_nbytes, partial(self._written_here, block))

    def _written_here(self, block: int) -> None:
        self._fetching.discard(block)
        self.fetched_blocks += 1
        self._own.add([block])

    def used(self, ids: Sequence[int], when: str) -> None:
        """Copies blocks that were stored ("first") or loaded ("second"), unless already copied."""
        if when != self.remote.replicate:
            return
        for block in self._shared.absent(ids, self._copying):
            self._copying.add(block)
            self._medium.start(READ, self._block_nbytes, partial(self._send, block))

    def _send(self, block: int) -> None:
        gone_ns = self._ways[WRITE].take(self._timeline.now_ns, self._block_ns)
        self._timeline.at(gone_ns + self._latency_ns, partial(self._copied, block))

    def _copied(self, block: int) -> None:
        self._copying.discard(block)
        self.copied_blocks += 1
        self._shared.add([block])
