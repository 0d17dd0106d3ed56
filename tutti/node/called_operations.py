"""Operations of a store that clients call by name, other than look-ups and transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from tutti.base.arrays import Keys
from tutti.errors import ConfigError, TuttiError
from tutti.medium.slot_record import tenant_of
from tutti.node.messages import DESCRIBED_MAX, LISTED_MAX, keys_of
from tutti.node.pool_service import ClientSession

_DELETE_MAX_S = 600.0


def _leave(session: ClientSession, arguments: Mapping[str, Any]) -> Any:
    """The client closes the session: the end of its connection does not count as lost."""
    session.has_left = True


def _recovered(session: ClientSession, arguments: Mapping[str, Any]) -> Any:
    timeout_s = min(float(arguments.get("seconds", 0.0)), session.service.core.config.timeout_s)
    session.service.store.wait_recovered(timeout_s)
    return True


def _drop(session: ClientSession, arguments: Mapping[str, Any]) -> Any:
    """See InFlight.dropped.  Not a look-up, so the second tier does not fetch these keys."""
    core = session.service.core
    with core.lock:
        core.check_open()
        return core.dropped(_keys(arguments)).tobytes()


def _list(session: ClientSession, arguments: Mapping[str, Any]) -> Any:
    """Keys from a slot on, as many as fit into an answer, and the slot to continue from.  Listed
    by slot, because objects come and go between two answers.
    """
    core, namespace = session.service.core, arguments.get("namespace")
    start = max(0, int(arguments.get("start", 0)))
    with core.lock:
        core.check_open()
        held = core.index.resident()
        if namespace is not None:
            held &= core.index.tenant == tenant_of(namespace)
        slots = start + np.flatnonzero(held[start:])[:LISTED_MAX]
        end = int(slots[-1]) + 1 if slots.size else start
        return [core.index.key[slots].tobytes(), end]


def _objects(session: ClientSession, arguments: Mapping[str, Any]) -> Any:
    found = session.service.store.catalogue.objects(_keys(arguments)[:DESCRIBED_MAX])
    return [asdict(info) for info in found]


def _delete(session: ClientSession, arguments: Mapping[str, Any]) -> Any:
    timeout_s, keys = min(float(arguments.get("seconds", 30.0)), _DELETE_MAX_S), _keys(arguments)
    if session.service.tier is not None:
        session.service.tier.removing(keys)  # first, so that no look-up fetches them again
    return session.service.store.catalogue.delete(keys, timeout_s=timeout_s)


def _keys(arguments: Mapping[str, Any]) -> Keys:
    return keys_of(arguments.get("keys", b""))


OPERATIONS: Mapping[str, Callable[[ClientSession, Mapping[str, Any]], Any]] = {
    "settle": lambda session, given: None,  # earlier messages are handled when it is answered
    "leave": _leave,
    "stats": lambda session, given: {
        **session.service.store.stats(),
        "sessions": len(session.service.sessions),
    },
    "clear": lambda session, given: session.service.store.clear(
        deallocate=bool(given.get("deallocate", True))
    ),
    "list": _list,
    "drop": _drop,
    "objects": _objects,
    "delete": _delete,
    "pin": lambda session, given: session.service.store.catalogue.pin(_keys(given)),
    "unpin": lambda session, given: session.service.store.catalogue.unpin(_keys(given)),
    "expire": lambda session, given: session.service.store.catalogue.expire(
        _keys(given), given.get("ttl_s")
    ),
    "wait_recovered": _recovered,
    "quarantine": lambda session, given: session.service.store.quarantine(_keys(given)),
}


def run(session: ClientSession, name: str, arguments: Mapping[str, Any]) -> Any:
    """The result of one operation.  Raises ConfigError for an unknown name."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise ConfigError(f"the agent has no operation {name!r}; use the same version of tutti")
    try:
        return operation(session, arguments)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, TuttiError):
            raise
        raise ConfigError(f"the arguments of {name} are not acceptable: {error}") from error
