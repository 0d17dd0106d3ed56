"""Operations of a store that clients ask for by name, beside look-ups and transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tutti.errors import ConfigError, TuttiError
from tutti.node.pool_service import Session


def _settle(session: Session, arguments: Mapping[str, Any]) -> Any:
    """Nothing: what came before it on the same connection has been done."""


def _stats(session: Session, arguments: Mapping[str, Any]) -> Any:
    stats = session.service.store.stats()
    return {**stats, "sessions": len(session.service.sessions)}


def _clear(session: Session, arguments: Mapping[str, Any]) -> Any:
    session.service.store.clear(deallocate=bool(arguments.get("deallocate", True)))


def _recovered(session: Session, arguments: Mapping[str, Any]) -> Any:
    timeout_s = min(float(arguments.get("seconds", 0.0)), session.service.core.config.timeout_s)
    session.service.store.wait_recovered(timeout_s)
    return True


def _quarantine(session: Session, arguments: Mapping[str, Any]) -> Any:
    return session.service.store.quarantine(_keys(arguments))


def _keys(arguments: Mapping[str, Any]) -> list[bytes]:
    raw = arguments.get("keys", b"")
    return [raw[i : i + 16] for i in range(0, len(raw), 16)]


OPERATIONS: Mapping[str, Callable[[Session, Mapping[str, Any]], Any]] = {
    "settle": _settle,
    "stats": _stats,
    "clear": _clear,
    "wait_recovered": _recovered,
    "quarantine": _quarantine,
}


def run(session: Session, name: str, arguments: Mapping[str, Any]) -> Any:
    """The result of one operation.  Raises ConfigError for one that there is not."""
    operation = OPERATIONS.get(name)
    if operation is None:
        raise ConfigError(f"the agent has no operation {name!r}; use the same version of tutti")
    try:
        return operation(session, arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, TuttiError):
            raise
        raise ConfigError(f"the arguments of {name} are not acceptable: {error}") from error
