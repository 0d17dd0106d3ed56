"""State of the HiCache storages of this process, and of other ranks, for SGLang's requests."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

_log = logging.getLogger(__name__)

_LET_GO_S = 5.0  # SGLang itself waits 10 s for a thread, then its scheduler ends
_PAUSE_S = 0.02

#: The storages of this process that are open.
STORAGES: weakref.WeakSet[Any] = weakref.WeakSet()


def held(scheduler: Any) -> bool:
    """Whether a storage thread of any rank of this stage waits for a device, after a short wait.

    SGLang drops a prefetch whose time is over while its thread still waits for the device, and
    counts as idle then; ending the thread would end the scheduler. With pipeline stages the answer
    is False: it would be worse if one stage flushed and another did not.
    """
    if not STORAGES or scheduler is None or scheduler.tree_cache.pp_size > 1:
        return False
    idle = scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused)
    answer = on_any_rank(scheduler, idle and not _let_go())
    if answer:
        _log.warning(
            "Tutti: the device still holds host pages of a load that SGLang gave up; nothing is"
            " flushed or detached until it has answered"
        )
    return answer


def clear_failed(scheduler: Any) -> bool:
    """Whether the last `clear` of a storage failed on any rank of this stage."""
    return bool(STORAGES) and on_any_rank(
        scheduler, any(not storage.cleared for storage in list(STORAGES))
    )


def on_any_rank(scheduler: Any, yes: bool) -> bool:
    """Whether ``yes`` is true on any rank that SGLang synchronizes; all of them must call this."""
    import torch

    answer = torch.tensor(int(yes))
    scheduler.tree_cache._all_reduce_attn_groups(answer, torch.distributed.ReduceOp.MAX)
    return bool(answer)


def _let_go() -> bool:
    deadline_s = time.monotonic() + _LET_GO_S
    while any(storage.moving for storage in list(STORAGES)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True
