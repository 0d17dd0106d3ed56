"""Opens a pool of the node's agent.  Needs the extra `tutti-kv[node]` only when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutti.base.checks import instance, one_of, optional, path_text, seconds, takes, text
from tutti.gio_uring.controller_file import EXECUTORS
from tutti.medium.layout import KVLayout

if TYPE_CHECKING:
    from tutti.node.client import NodeStore

#: How a path begins that is the socket of an agent.
AGENT = "unix:"


@takes(
    path=path_text,
    layout=optional(instance(KVLayout)),
    pool=text,
    lookup_timeout_s=seconds,
    executor=one_of(*EXECUTORS),
)
def connect(
    path: str,
    layout: KVLayout | None = None,
    capacity: int | str | None = None,
    *,
    pool: str = "",
    lookup_timeout_s: float = 1.0,
    executor: str = "auto",
) -> NodeStore:
    """Connects to the node's agent (`tutti serve`), whose pools all processes share.

    path: the agent's socket, with or without "unix:".  layout: of the pool; left out, the agent's
    only one.  capacity: of a pool that the agent is to make when it has none of this layout.
    pool: instead of the layout, how the pool's name begins, of those that ``pools`` returns.
    lookup_timeout_s: after which a look-up misses and the agent counts as lost.
    Raises AgentLost when no agent answers, AgentRefused, PoolNotFound, PoolMismatch, Unsupported
    without the extra `tutti-kv[node]`, and others.
    """
    from tutti.node.client import NodeStore

    return NodeStore(
        path.removeprefix(AGENT),
        layout,
        capacity,
        pool=pool,
        lookup_timeout_s=lookup_timeout_s,
        executor=executor,
    )


@takes(path=path_text, timeout_s=seconds)
def pools(path: str, *, timeout_s: float = 30.0) -> list[str]:
    """Names of the agent's pools, open or not.  Raises AgentLost, AgentRefused, Unsupported."""
    from tutti.node.connection import Connection
    from tutti.node.messages import Pools

    connection = Connection(path.removeprefix(AGENT), timeout_s)
    try:
        return list(connection.request(Pools(), timeout_s).value)
    finally:
        connection.close()
