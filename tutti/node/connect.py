"""Opens a pool of the node's agent.  Needs the extra `tutti-kv[node]` only when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutti.base.checks import instance, one_of, optional, seconds, socket_path, takes, text
from tutti.gio_uring.controller_file import EXECUTORS
from tutti.medium.layout import KVLayout
from tutti.profiles.at_open import AUTO, ProfileChoice, Speeds, check_choice
from tutti.scheduler.dispatcher import Schedule

if TYPE_CHECKING:
    from tutti.node.client import NodeStore

#: Prefix of a path that names an agent's socket.
AGENT = "unix:"


@takes(
    path=socket_path,
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
    profile: ProfileChoice | Schedule = AUTO,
) -> NodeStore:
    """Connects to the node's agent (`tutti serve`), whose pools all processes share.

    path: the agent's socket, with or without "unix:".  layout: of the pool (default: the agent's
    only pool).  capacity: bytes of the pool that the agent makes if it has none of this layout.
    pool: instead of the layout, the start of a name that ``pools`` returns.
    lookup_timeout_s: after this time a look-up misses, and the agent counts as lost.
    profile: schedules this process's puts around its loads; "auto" uses the speeds that the agent
    measured, else see tutti.open.  Or a Schedule.
    Raises AgentLost when no agent answers, AgentRefused, PoolNotFound, PoolMismatch, Unsupported
    without the extra `tutti-kv[node]`, and what tutti.open raises.
    """
    from tutti.node.client import NodeStore

    if not isinstance(profile, Schedule):
        check_choice(profile)
    return NodeStore(
        path.removeprefix(AGENT),
        layout,
        capacity,
        pool=pool,
        lookup_timeout_s=lookup_timeout_s,
        executor=executor,
        profile=profile,
    )


@takes(path=socket_path, timeout_s=seconds)
def pools(path: str, *, timeout_s: float = 30.0) -> list[str]:
    """Names of the agent's pools, open or not.  Raises AgentLost, AgentRefused, Unsupported."""
    from tutti.node.connection import ask
    from tutti.node.messages import Pools

    return list(ask(path.removeprefix(AGENT), Pools(), timeout_s))


@takes(path=socket_path)
def speeds_of(path: str) -> Speeds:
    """Speeds of the agent's media.  Raises AgentLost, AgentRefused, Unsupported."""
    from tutti.node import connection

    return connection.speeds_of(path.removeprefix(AGENT))
