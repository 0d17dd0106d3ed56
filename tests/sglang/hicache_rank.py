"""Two ranks of HiCache, for test_hicache_requests.py: `hicache_rank.py FOLDER`, where each writes
what it was answered.

The ranks find each other as SGLang's do; the second one's pool cannot be opened at first, nor its
page hashes be compiled, its `clear` fails once, and its device holds a load.  They are forks of a
process that has imported SGLang for both.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_pools as hp
import torch
from server_nursery import die_with_parent
from sglang.srt.managers.io_struct import ClearHiCacheReqOutput
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tutti.errors import DeviceTimeout, TuttiError
from tutti.integration.sglang import storages, weights
from tutti.integration.sglang.direct import control_requests
from tutti.integration.sglang.hicache import TuttiHiCacheStorage

RANKS = 2


def main(folder: Path) -> int:
    """The exit code: 0 when both ranks came to their end."""
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            code = 1
            try:
                live(folder, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    return int(any(statuses))


def live(folder: Path, rank: int) -> None:
    """One rank."""
    meeting = f"file://{folder / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    said = {
        "kv": _attach(folder, rank, {"capacity": "4KiB"} if rank else {}, None),
        "sidecar": _attach(folder, rank, {}, "page_head" if rank else "page_first"),
    }
    load = native_hash._load_native_hash_module
    if rank:
        native_hash._load_native_hash_module = _no_compiler
    said["hashes"] = _attach(folder, rank, {}, None)
    native_hash._load_native_hash_module = load
    storage = _storage(folder, rank, {})
    storage.register_mem_pool_host(hp.mha_pool("page_first"))
    storage.on_host_pools_registered()
    scheduler = _scheduler()

    def clear() -> bool:
        answer = control_requests._clear(_clearing(storage), scheduler, None)
        return bool(answer.success)

    said["clear"] = [clear()]
    kept = storage._stores["kv"]
    if rank:
        real = kept.store.clear
        kept.store.clear = _late
    said["clear"] += [clear()]
    if rank:
        kept.store.clear = real
        kept._moving.add(0)
    said["clear"] += [clear()]
    storages._LET_GO_S = 0.1
    said["update"] = [_update(scheduler, fails=bool(rank))]
    said["flush"] = [weights._around_flush(lambda _: True, scheduler)]
    kept._moving.clear()
    said["update"] += [_update(scheduler, fails=bool(rank))]
    said["flush"] += [weights._around_flush(lambda _: True, scheduler)]
    storage.close()
    (folder / f"said{rank}.json").write_text(json.dumps(said))
    torch.distributed.barrier()


def _storage(folder: Path, rank: int, options: dict[str, Any]) -> TuttiHiCacheStorage:
    config = hp.config(folder, tp_rank=rank, tp_size=RANKS, options=options)
    return TuttiHiCacheStorage(config, {})


def _attach(folder: Path, rank: int, options: dict[str, Any], sidecar: str | None) -> list[Any]:
    """What SGLang's controller does: the error, and how many pools are open after it."""
    storage = _storage(folder, rank, options)
    try:
        storage.register_mem_pool_host(hp.mha_pool("page_first"))
        if sidecar:
            storage.register_mem_host_pool_v2(hp.mha_pool(sidecar), PoolName.DRAFT)
        storage.on_host_pools_registered()
    except TuttiError as error:
        return [str(error), len(storage.counters())]
    return ["", len(storage.counters())]


def _update(scheduler: Any, *, fails: bool) -> bool | None:
    """Of weights, and whether the flush at its end was done; None without one."""

    def load(manager: Any) -> bool | None:
        return None if fails else weights._around_flush(lambda _: True, manager.scheduler)

    return weights._around_loading(load, SimpleNamespace(scheduler=scheduler))


def _clearing(storage: TuttiHiCacheStorage) -> Any:
    """As SGLang's handler: it does not look at the answer."""

    def clear(scheduler: Any, request: Any) -> ClearHiCacheReqOutput:
        storage.clear()
        return ClearHiCacheReqOutput(success=True)

    return clear


def _no_compiler() -> None:
    raise RuntimeError("made up") from OSError("no g++")


def _late() -> None:
    raise DeviceTimeout("made up")


def _scheduler() -> Any:
    """An idle one, with SGLang's way of asking the other ranks."""
    tree: Any = object.__new__(UnifiedRadixCache)
    tree.attn_cp_group = tree.attn_tp_group = None
    tree.tp_group, tree.tp_world_size, tree.pp_size = None, RANKS, 1
    return SimpleNamespace(
        tree_cache=tree, is_fully_idle=lambda ignore_waiting: True, _engine_paused=False
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
