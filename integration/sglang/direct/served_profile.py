"""The profile by which the linker's writes yield to reads: a file's, if it is of this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tutti.errors import ConfigError, ProfileError
from tutti.integration.sglang.direct.kv_pools import KvPoolGroup
from tutti.integration.sglang.identity import ParallelRank
from tutti.machine import machine_facts
from tutti.scheduler.profile import TableProfile, load_or_estimate, load_profile
from tutti.scheduler.roofline import GPUS, ModelShape


def served_profile(
    file: str, folder: str, group: KvPoolGroup, parallel_rank: ParallelRank
) -> TableProfile:
    """What ``file`` says, or estimates and a logged warning when it is of another machine or of a
    model whose KV has another shape.

    folder: of the pools, whose disk counts.  Raises ProfileError when there is no profile at all.
    """
    profile = load_profile(file)
    try:
        model = ModelShape(**profile.document["model"])
    except (ConfigError, KeyError, TypeError) as error:
        raise ProfileError(
            f"{Path(file).name} says nothing of its model ({error}); run `tutti profile` again"
        ) from error
    layers, nbytes = _kv_shape(group, parallel_rank)
    if (model.layers, model.kv_nbytes_per_token) != (layers, nbytes):
        model = replace(model, name="the served model", layers=layers, kv_nbytes_per_token=nbytes)
    there = Path(folder).absolute()
    there = next(path for path in (there, *there.parents) if path.exists())
    gpu = GPUS.get(str(profile.document.get("gpu")), GPUS["H100"])
    return load_or_estimate(file, machine=machine_facts(there), model=model, gpu=gpu)


def _kv_shape(group: KvPoolGroup, parallel_rank: ParallelRank) -> tuple[int, int]:
    """Layers, and bytes of a token's KV, of the whole model as its ranks share it."""
    own = sum(pool.nbytes // pool.slots for pool in group.pools.values() if not pool.trailing)
    heads = 1 if parallel_rank.replicated else parallel_rank.tp_size
    return group.layers * parallel_rank.pp_size, own * heads * parallel_rank.pp_size
