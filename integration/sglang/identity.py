"""Identifies the KV of a pool: model, weights, shapes and rank, and the name of its file.

SGLang's page hashes identify tokens (with LoRA and cache salt), but neither model nor layout nor
parallelism. These are in the layout's fingerprint, which is part of every ObjectKey, of the pool's
superblock and of the name of its folder.
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
from tutti.integration.sglang.launch import check_weights
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
#: Files seem older than 2001 if a tool that builds images or archives gave all of them one time.
_REAL_TIMES_NS = 10**18
_SAMPLE_NBYTES = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """Properties of the model in SGLang's arguments on which KV depends."""

    path: str = ""
    revision: str = ""
    weight_version: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    load_format: str = ""
    weights_from: str = ""  # see WEIGHTS_FROM
    overrides: str = ""
    adapters: tuple[tuple[str, str], ...] = ()  # (name, path), with permanent LoRA ids
    dp_size: int = 1
    dp_rank: int = 0
    nodes: int = 1
    runs_code: bool = False  # of its folder (--trust-remote-code)


@dataclass(frozen=True)
class ParallelRank:
    """The rank of this process.  Replicated KV (MLA) is the same on every TP rank."""

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
        """Number of pools of one kind at one path: one per process with KV."""
        return self.tp_size * self.pp_size * self.cp_size * self.dp_size

    @property
    def place_on_node(self) -> tuple[int, int]:
        """(index of this rank, number of ranks) on its node; a node has consecutive ranks."""
        group = self.pp_rank * self.dp_size + self.dp_rank
        index = (group * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank
        ranks = max(1, self.ranks // self.nodes)
        return index % ranks, ranks

    @property
    def share(self) -> tuple[int, int]:
        """(rank, world) of this rank's share of the KV; equal for ranks with the same KV."""
        tp_rank, tp_size = (0, 1) if self.replicated else (self.tp_rank, self.tp_size)
        rank = (self.pp_rank * self.cp_size + self.cp_rank) * tp_size + tp_rank
        return rank, self.pp_size * self.cp_size * tp_size

    @property
    def name(self) -> str:
        """For file names: "tp0-pp0-cp0-dp0"."""
        return f"tp{self.tp_rank}-pp{self.pp_rank}-cp{self.cp_rank}-dp{self.dp_rank}"


@dataclass(frozen=True)
class PageShape:
    """The memory layout of a page of one KV pool, and the kind of its bytes.

    segments: bytes of the fragments of a page in one layer.  layers: 1 if a page has one fragment
    of all layers for K and one for V.  order: SGLang's name of the memory layout.
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
    """The properties of a model and its weights on which KV depends."""

    model: str
    weights: str
    quantization: str = ""
    kv_cache_dtype: str = ""
    overrides: str = ""


def layout_of(shape: PageShape, identity: ModelIdentity, parallel_rank: ParallelRank) -> KVLayout:
    """The layout, whose fingerprint covers all of these."""
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
    """The identity of a served model; options `model` and `weights` (not of dummies) override it.

    Adapters are included even if `weights` is given: their ids, and so the page hashes, do not
    change if they are trained again.  name: of a model without a known path.  Raises ConfigError
    for weights of another process without a version.
    """
    check_weights(model.weights_from, model.path, options["weights"])
    source = model.path, model.revision, model.runs_code
    weights = (model.load_format != "dummy" and options["weights"]) or "|".join(
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
def version_at_start(path: str, revision: str = "", runs_code: bool = False) -> str:
    """The version when this process opened its first pool, soon after the weights were loaded:
    later the files may differ from the weights that are served.
    """
    version = weights_version(path, revision, runs_code)
    if path and not version:
        _log.warning(
            "Tutti: %s has no version (it is no local file or folder, nor in the cache of the hub):"
            ' KV of old weights is served unless you change the option "weights" with them',
            path,
        )
    return version


def weights_version(path: str, revision: str = "", runs_code: bool = False) -> str:
    """Distinguishes versions of a checkpoint, adapter or file with the same name; "": unknown.

    Of a local folder: names, sizes and modification times of its weights and configuration (and
    code, if SGLang runs it), or of weights in its folders; of files with a constant time also 256
    samples of their bytes. Of a file: its own, and those of the config.json next to it. Of a name
    on a hub: the commit of the snapshot in the local cache, if there is one.
    """
    if os.path.isdir(path):
        ends = (*_WEIGHT_FILES, ".py") if runs_code else _WEIGHT_FILES
        files = [Path(entry) for entry in os.scandir(path) if entry.name.endswith(ends)]
        if not any(file.name.endswith(_WEIGHT_FILES[:-2]) for file in files):
            files += Path(path).glob("*/*.safetensor*")
    elif os.path.isfile(path):
        files = [Path(path), Path(path).with_name(_CONFIGS[0])]
    else:
        return _snapshot(path, revision or None) if path else ""
    digest = xxhash.xxh3_128()
    for file in sorted(files):
        if file.is_file():
            stat = file.stat()
            digest.update(f"{file.name}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
            if stat.st_mtime_ns < _REAL_TIMES_NS:
                with file.open("rb") as opened:
                    for at in range(0, stat.st_size, max(_SAMPLE_NBYTES, stat.st_size >> 8)):
                        digest.update(os.pread(opened.fileno(), _SAMPLE_NBYTES, at))
    return digest.hexdigest()


def _snapshot(repository: str, revision: str | None) -> str:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = [try_to_load_from_cache(repository, name, revision=revision) for name in _CONFIGS]
    except Exception:  # no cache, no library, or no valid name: only the name identifies it
        return ""
    return next((Path(file).parent.name for file in found if isinstance(file, str)), "")


def uses_agent(options: Mapping[str, Any]) -> bool:
    """Whether an agent owns the pools."""
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
    """Opens a pool of one rank, or makes it; returns it and its location.

    Raises TuttiError, and logs it: SGLang ends with a traceback that hides the reason.

    pool: part of the file's name.  capacity: bytes of all ranks' pools together.  schedule: of its
    puts and loads; None: by the option ``profile``.  is_kv: see `rank_members`.
    """
    name = f"{pool}-{parallel_rank.name}"
    try:
        if uses_agent(options):
            # One pool for all ranks and replicas with the same KV.
            where = options["path"][0]
            capacity //= layout.world
            if schedule is None and options["scheduler_trace"]:
                schedule = traced(options, speeds_of(where), layout, name)
            profile = options["profile"] if schedule is None else schedule
            executor = options["executor"]
            return connect(where, layout, capacity, executor=executor, profile=profile), where
        place, ranks = parallel_rank.place_on_node
        members = share(options["path"], ranks).of(place, pool_file(layout, name), is_kv=is_kv)
        if schedule is None and options["scheduler_trace"]:
            schedule = traced(options, members, layout, name)
        store = _open_members(members, layout, capacity // parallel_rank.ranks, options, schedule)
        return store, ", ".join(members)
    except (TuttiError, OSError) as error:
        _log.critical("Tutti cannot open its %s pool: %s", pool, error)
        raise


def facts_of(store: Store, path: str) -> dict[str, str]:
    """Settings of an open pool; executor "agent" if an agent has it open."""
    executor, config = "agent", store.config
    if isinstance(store, ObjectStore):
        executor = getattr(store.controller, "executor_name", type(store.controller).__name__)
    return {
        "version": __version__,
        "path": path,
        "executor": executor,
        "verify": config.verify,
        "durability": config.durability,
        "profile": OFF if config.schedule is None else config.schedule.source,
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
        _log.warning("Tutti: not using %s: pages stored there are not found", ", ".join(lost))
        members = there
    config = store_config(options, schedule)
    profile, executor = options["profile"] if schedule is None else AUTO, options["executor"]
    return open_pool(members, layout, capacity, executor=executor, config=config, profile=profile)
