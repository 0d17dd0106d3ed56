"""Assigns files and devices to the pools of each rank, by one rule that every rank computes.

* A folder serves all ranks: each of a rank's pools has one file in every folder.
* A file or a device has one KV pool of one rank; the other pools are in the folders. Files and
devices are sorted by NUMA node, unknown nodes first; within a node in the given order. A missing
device counts as one of the node of the device before it. They are dealt in equal shares to the
ranks of the machine, the first share to rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import ConfigError
from tutti.pool.places import Place, PlaceKind, check_distinct, exists, place_of


@dataclass(frozen=True)
class Shares:
    """folders: for every rank.  dealt: files and devices by rank of this node, in order."""

    folders: Sequence[str]
    dealt: Sequence[Sequence[Place]]

    def of(self, rank: int, file: str, *, is_kv: bool) -> list[str]:
        """The members of one pool of a rank of this node.

        file: the pool's path within each folder.  Raises ConfigError if there is no place for it.
        """
        if is_kv and self.dealt[rank]:
            return [place.path for place in self.dealt[rank]]
        if not self.folders:
            raise ConfigError(
                f"the pool of {os.path.basename(file)} has no place: files and devices hold the KV"
                " pool only; add a folder to the path for the additional pools"
            )
        return [os.path.join(folder, file) for folder in self.folders]


def share(paths: Sequence[str], ranks: int) -> Shares:
    """Deals the paths of a node to its ranks.

    Raises ConfigError for files and devices that cannot be dealt equally, MemberSwapped for a path
    that is given twice.
    """
    places = [place_of(path) for path in paths]
    folders = [place.path for place in places if place.kind is PlaceKind.FOLDER]
    single = [place for place in places if place.kind is not PlaceKind.FOLDER]
    check_distinct(paths)
    if len(single) % ranks:
        raise ConfigError(
            f"{len(single)} files and devices for {ranks} ranks of this node, and each holds one"
            f" pool of one rank: give {ranks} or a multiple, make partitions or namespaces, name a"
            " folder, or use the node's agent (unix:SOCKET)"
        )
    single, each = _by_node(single), len(single) // ranks
    return Shares(folders, [single[rank * each : (rank + 1) * each] for rank in range(ranks)])


def _by_node(places: Sequence[Place]) -> list[Place]:
    """Sorted by NUMA node.  A missing device, whose node is unknown, stays behind the one that was
    given before it: where they are given in the order of their nodes, no other one moves.
    """
    known = {
        place.path: -1 if place.numa_node is None else place.numa_node
        for place in places
        if place.numa_node is not None or place.kind is PlaceKind.FILE or exists(place.path)
    }
    nodes, node = {}, next(iter(known.values()), -1)
    for place in places:
        nodes[place.path] = node = known.get(place.path, node)
    return sorted(places, key=lambda place: nodes[place.path])
