"""Identifies the KV of a pool: model, weights, shapes and rank, and the name of its file.

SGLang's page hashes name tokens (with LoRA and cache salt), but neither model nor layout nor
parallelism. All of that is in the fingerprint of the layout, which is in every ObjectKey, in the
pool's superblock and in the name of its folder.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from tutti import __version__
from tutti.errors import TuttiError
from tutti.integration.sglang.options import is_agents, store_config
from tutti.integration.sglang.rank_members import share
from tutti.integration.sglang.scheduler_trace import traced
from tutti.interface import Store
from tutti.medium.layout import ITEMSIZE_NBYTES, KVLayout
from tutti.node.connect import connect, speeds_of
from tutti.pool.places import exists, is_device, make_folder_of, pool_file
from tutti.profiles.at_open import AUTO, OFF
from tutti.scheduler.dispatcher import Schedule
from tutti.store import ObjectStore
from tutti.store import open as open_pool

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model")
_CONFIGS = ("config.json", "adapter_config.json")
_NAME_MAX = 60

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """What SGLang's arguments say about the model, as far as KV depends on it."""

    path: str = ""
    revision: str = ""
    weight_version: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    load_format: str = ""
    overrides: str = ""
    adapters: tuple[tuple[str, str], ...] = ()  # (name, path) of those whose LoRA ids are lasting
    dp_size: int = 1
    dp_rank: int = 0
    nodes: int = 1


@dataclass(frozen=True)
class ParallelRank:
    """Which rank this is.  Replicated KV (MLA) is the same on every TP rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    replicated: bool = False
    nodes: int = 1

    @property
    def ranks(self) -> int:
        """Pools of one kind below one path: one for each process that has KV."""
        return self.tp_size * self.pp_size * self.cp_size * self.dp_size

    @property
    def place_on_node(self) -> tuple[int, int]:
        """(place of this rank, ranks) on its node; SGLang's nodes have consecutive ranks."""
        group = self.pp_rank * self.dp_size + self.dp_rank
        index = (group * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank
        ranks = max(1, self.ranks // self.nodes)
        return index % ranks, ranks

    @property
    def share(self) -> tuple[int, int]:
        """(rank, world) of this rank's share of the KV; the same for all that hold the same KV."""
        tp_rank, tp_size = (0, 1) if self.replicated else (self.tp_rank, self.tp_size)
        rank = (self.pp_rank * self.cp_size + self.cp_rank) * tp_size + tp_rank
        return rank, self.pp_size * self.cp_size * tp_size

    @property
    def name(self) -> str:
        """For file names: "tp0-pp0-cp0-dp0"."""
        return f"tp{self.tp_rank}-pp{self.pp_rank}-cp{self.cp_rank}-dp{self.dp_rank}"


@dataclass(frozen=True)
class PageShape:
    """How a page of one KV pool lies in memory, and what its bytes mean.

    segments: bytes of the fragments of a page in one layer.  layers: 1 where all layers of a page
    are one fragment each for K and V.  order: SGLang's name of the memory layout.
    """

    pool: str
    kind: str
    layers: int
    model_layers: int
    first_layer: int
    segments: Sequence[int]
    page_size: int
    dtype: str
    order: str
    dims: Sequence[int] = ()


@dataclass(frozen=True)
class ModelIdentity:
    """The model and its weights, as far as KV depends on them."""

    model: str
    weights: str
    quantization: str = ""
    kv_cache_dtype: str = ""
    overrides: str = ""


def layout_of(shape: PageShape, identity: ModelIdentity, parallel_rank: ParallelRank) -> KVLayout:
    """The layout whose fingerprint says all of it."""
    rank, world = parallel_rank.share
    details = {
        **asdict(identity),
        "first_layer": shape.first_layer,
        "tp": 1 if parallel_rank.replicated else parallel_rank.tp_size,
        "pp": parallel_rank.pp_size,
        "cp": parallel_rank.cp_size,
    }
    digest = xxhash.xxh3_128_hexdigest(json.dumps(details, sort_keys=True).encode())
    return KVLayout(
        layers=shape.layers,
        segments=tuple(shape.segments),
        page_size=shape.page_size,
        dtype=shape.dtype if shape.dtype in ITEMSIZE_NBYTES else "uint8",
        kind=f"{shape.kind}:{shape.pool}",
        model_layers=shape.model_layers,
        dims=tuple(shape.dims),
        order=shape.order,
        model=identity.model[-_NAME_MAX:],
        weights=digest,
        rank=rank,
        world=world,
    )


def identity_of(options: Mapping[str, Any], model: ServedModel, name: str = "") -> ModelIdentity:
    """The identity of a served model; options `model` and `weights` override it.

    Adapters belong to it even with `weights`: their ids, and so the page hashes, stay the same
    when they are trained again.  name: of a model whose path is not known.
    """
    source = model.path, model.revision
    weights = options["weights"] or "|".join(
        (version_at_start(*source), model.revision, model.weight_version, model.load_format)
    )
    if model.adapters:
        versions = [(name, version_at_start(path)) for name, path in sorted(model.adapters)]
        weights += f"|{json.dumps(versions)}"
    return ModelIdentity(
        model=options["model"] or model.path or name,
        weights=weights,
        quantization=model.quantization,
        kv_cache_dtype=model.kv_cache_dtype,
        overrides=model.overrides,
    )


@cache
def version_at_start(path: str, revision: str = "") -> str:
    """The version as of the first pool that this process opened, soon after the weights were
    loaded: when another is opened, the files may not be any more what is served.
    """
    version = weights_version(path, revision)
    if path and not version:
        _log.warning(
            "Tutti: %s has no version (it is no local file or folder, nor in the cache of the hub):"
            ' KV of old weights is served unless you change the option "weights" with them',
            path,
        )
    return version


def weights_version(path: str, revision: str = "") -> str:
    """What tells this checkpoint, adapter or file from another under the same name; "": unknown.

    A local folder: names, sizes and modification times of its weights and configuration; a file:
    its own, and those of the config.json beside it. A name on a hub: the commit of the snapshot in
    the local cache, if there is one.
    """
    if os.path.isdir(path):
        files = [Path(entry) for entry in os.scandir(path) if entry.name.endswith(_WEIGHT_FILES)]
    elif os.path.isfile(path):
        files = [Path(path), Path(path).with_name(_CONFIGS[0])]
    else:
        return _snapshot(path, revision or None) if path else ""
    digest = xxhash.xxh3_128()
    for file in sorted(files):
        if file.is_file():
            stat = file.stat()
            digest.update(f"{file.name}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _snapshot(repository: str, revision: str | None) -> str:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = [try_to_load_from_cache(repository, name, revision=revision) for name in _CONFIGS]
    except Exception:  # no cache, no such library, or no valid name: the name alone has to do
        return ""
    return next((Path(file).parent.name for file in found if isinstance(file, str)), "")


def uses_agent(options: Mapping[str, Any]) -> bool:
    """Whether the pools are an agent's."""
    return is_agents(options["path"])


def open_store(
    layout: KVLayout,
    pool: str,
    capacity: int,
    options: Mapping[str, Any],
    parallel_rank: ParallelRank,
    schedule: Schedule | None = None,
    *,
    is_kv: bool = True,
) -> tuple[Store, str]:
    """A pool of one rank, made when it is not there, and where it is.

    Raises TuttiError, also logged: SGLang ends with a traceback, below which its reason is lost.

    pool: its name in the file's.  capacity: bytes of all ranks' pools together.  schedule: when its
    puts and loads are issued; None for what the option ``profile`` says.  is_kv: see
    `rank_members`.
    """
    try:
        return _open(layout, pool, capacity, options, parallel_rank, schedule, is_kv)
    except (TuttiError, OSError) as error:
        _log.critical("Tutti cannot open its %s pool: %s", pool, error)
        raise


def _open(
    layout: KVLayout,
    pool: str,
    capacity: int,
    options: Mapping[str, Any],
    parallel_rank: ParallelRank,
    schedule: Schedule | None,
    is_kv: bool,
) -> tuple[Store, str]:
    if uses_agent(options):
        # One pool for all ranks and replicas whose KV is the same.
        where = options["path"][0]
        capacity //= layout.world
        if schedule is None and options["scheduler_trace"]:
            schedule = traced(options, speeds_of(where), layout, f"{pool}-{parallel_rank.name}")
        profile = options["profile"] if schedule is None else schedule
        executor = options["executor"]
        return connect(where, layout, capacity, executor=executor, profile=profile), where
    place, ranks = parallel_rank.place_on_node
    file = pool_file(layout, f"{pool}-{parallel_rank.name}")
    members = share(options["path"], ranks).of(place, file, is_kv=is_kv)
    if schedule is None and options["scheduler_trace"]:
        schedule = traced(options, members, layout, f"{pool}-{parallel_rank.name}")
    store = _open_members(members, layout, capacity // parallel_rank.ranks, options, schedule)
    return store, ", ".join(members)


def facts_of(store: Store, path: str) -> dict[str, str]:
    """What an open pool was opened with; executor "agent" where another process has it open."""
    executor, missing, config = "agent", 0, store.config
    if isinstance(store, ObjectStore):
        executor = getattr(store.controller, "executor_name", type(store.controller).__name__)
        missing = store.members.count - len(store.members.present)
    return {
        "version": __version__,
        "path": path,
        "executor": executor,
        "verify": config.verify,
        "durability": config.durability,
        "profile": OFF if config.schedule is None else config.schedule.source,
        "missing_members": str(missing),
        "write_budget_bytes": str(config.write_budget_nbytes or 0),
    }


def _open_members(
    members: list[str],
    layout: KVLayout,
    capacity: int,
    options: Mapping[str, Any],
    schedule: Schedule | None,
) -> Store:
    there = [member for member in members if exists(member)]
    if not there:
        files = [member for member in members if not is_device(member)]
        if new := ", ".join(file for file in files if not exists(os.path.dirname(file) or ".")):
            advice = "if a drive should be mounted there, remove its folder and mount it first"
            _log.warning("Tutti makes a new folder for %s; %s", new, advice)
        for file in files:
            make_folder_of(file)
    lost = [member for member in members if member not in there] if there else []
    if lost and options["degraded"]:
        _log.warning("Tutti: without %s: what is stored there misses", ", ".join(lost))
        members = there
    config = store_config(options, schedule)
    profile, executor = options["profile"] if schedule is None else AUTO, options["executor"]
    return open_pool(members, layout, capacity, executor=executor, config=config, profile=profile)
