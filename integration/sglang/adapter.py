"""Everything that Tutti takes from SGLang 0.5.23, in one place.

Another version of SGLang needs changes only here or in a sibling of this file: no other module of
the integration imports SGLang's modules, except the linker's own adapter.  What other modules take
from here is imported `as` itself.  Page hashes become keys in `linker.py` and `host/host_store.py`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolution_result
from sglang.srt.disaggregation.kv_events import AllBlocksCleared as AllBlocksCleared
from sglang.srt.disaggregation.kv_events import BlockRemoved as BlockRemoved
from sglang.srt.disaggregation.kv_events import BlockStored as BlockStored
from sglang.srt.disaggregation.kv_events import StorageMedium as StorageMedium
from sglang.srt.disaggregation.kv_events import is_kv_publisher_rank
from sglang.srt.environ import EnvField, envs
from sglang.srt.mem_cache.events import KVCacheEventRecorder as KVCacheEventRecorder
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as HiCacheStorage
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig as HiCacheStorageConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo as HiCacheStorageExtraInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy as PoolHitPolicy
from sglang.srt.mem_cache.hicache_storage import PoolName as PoolName
from sglang.srt.mem_cache.hicache_storage import PoolTransfer as PoolTransfer
from sglang.srt.mem_cache.hicache_storage import PoolTransferResult as PoolTransferResult
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64
from sglang.srt.observability.metrics_collector import StorageMetrics as StorageMetrics
from sglang.srt.runtime_context import get_parallel, get_server_args

from tutti.errors import ConfigError, Unsupported
from tutti.integration.sglang.identity import ServedModel, version_at_start
from tutti.integration.sglang.launch import VERSIONS, WEIGHTS_FROM, installed_version

block_hash = hash_str_to_int64
_log = logging.getLogger(__name__)


def check_version() -> None:
    """Raises Unsupported unless this adapter supports the installed SGLang."""
    found = installed_version()
    if found.split("+")[0] not in VERSIONS:
        raise Unsupported(
            f"SGLang {found} is installed, this version of Tutti works with "
            f"{', '.join(VERSIONS)}; install one of them"
        )


def load_page_hashes() -> None:
    """Compiles and loads SGLang's page hashes.  Raises Unsupported if that fails.

    Otherwise their first call would compile them: in a thread of HiCache, for which `flush_cache`
    waits only ten seconds, after which the server ends.
    """
    _log.info("Tutti: loads SGLang's page hashes; the first time this compiles for up to a minute")
    begin_s = time.monotonic()
    try:
        get_hash_str([1], None)
    except RuntimeError as error:
        raise Unsupported(
            f"SGLang cannot compile its page hashes ({error.__cause__ or error}); install g++, "
            "ninja and OpenSSL's headers, then start the server again"
        ) from error
    _log.info("Tutti: SGLang's page hashes loaded in %.1f s", time.monotonic() - begin_s)


def served_model() -> ServedModel:
    """The model of this process; empty if no server has published its arguments."""
    try:
        args = get_server_args()
    except (ValueError, AttributeError):
        args = None
    if args is None:
        return ServedModel()
    parallel = get_parallel()
    dp_rank = 0
    with suppress(RuntimeError):  # no replicas are configured: there is one
        dp_rank = parallel.dp_rank or 0

    def text(name: str) -> str:
        return str(getattr(args, name, None) or "")

    return ServedModel(
        # The path as SGLang has resolved it, for a file on a hub or a folder.
        path=str(resolution_result(args, "model_path", "") or ""),
        revision=text("revision"),
        weight_version=text("weight_version"),
        quantization=text("quantization"),
        kv_cache_dtype=text("kv_cache_dtype"),
        load_format=text("load_format"),
        weights_from=_weights_from(args),
        overrides=text("json_model_override_args") + _more_overrides(args),
        adapters=_adapters(args),
        dp_size=int(parallel.num_dp_ranks),  # replicas, or groups of DP attention
        dp_rank=int(dp_rank),
        nodes=int(getattr(args, "nnodes", None) or 1),
        runs_code=bool(args.trust_remote_code),
    )


def _weights_from(args: Any) -> str:
    """Which of WEIGHTS_FROM SGLang has; "" if it reads files."""
    for given in WEIGHTS_FROM:
        name, value = given.removeprefix("--").replace("-", "_").split()
        if resolution_result(args, name) == value:
            return given
    return ""


#: The SGLang whose KV has no version in its identity; KV of any other version or build has one.
_UNNAMED = "0.5.23"
#: The revision that SGLang sets for a draft model if none is given.
_MAIN = "main"
#: Arguments that name files which change the KV of the same checkpoint, and what their versions are
#: called in the identity.
_FILES = {
    "quantization_param_path": "scales",
    "modelopt_checkpoint_restore_path": "restored",
    "kt_weight_path": "experts",
    "decrypted_config_file": "config",
}
#: All arguments that change it.
_MORE_OVERRIDES = (
    *(*_FILES, "modelopt_quant", "model_loader_extra_config", "model_impl", "forward_hooks"),
    *("enable_dsa_fused_indexer", "lora_target_modules"),  # rotated index keys; parts of adapters
)
#: Makes the late layers write the windows of only the last tokens of a prefill (DeepSeek-V4.1).
_REPLAY = "enable_decoder_swa_bounded_replay"
#: Environment variables that change the bytes of a page of the same shape: the model's code, how
#: its weights are quantised, their order, or whether a sparse attention's index keys are rotated.
_FORMS = (
    *("SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT", "SGLANG_DSV4_KV_LAYOUT"),
    *("SGLANG_DISABLE_DSA_INDEXER_FUSION", "SGLANG_DISABLE_AITER_FUSED_FP8_DSA_INDEXER"),
    *("SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_HUMMING_ONLINE_QUANT_CONFIG"),
)


def _more_overrides(args: Any) -> str:
    """The overrides that are set; empty without any, so that existing pools keep their identity."""
    given = {name: getattr(args, name, None) for name in _MORE_OVERRIDES}
    given = {name: to for name, to in given.items() if to not in (None, "", "{}", {}, "auto")}
    given = {name: sorted(to) if isinstance(to, set) else to for name, to in given.items()}
    given |= {_FILES[n]: version_at_start(str(given[n])) for n in _FILES if n in given}
    forms = {name: EnvField.get(getattr(envs, name)) for name in _FORMS}
    given |= {name: to for name, to in forms.items() if to != getattr(envs, name).default}
    if resolution_result(args, _REPLAY, None):
        given[_REPLAY] = True
    if resolution_result(args, "load_format") == "presharded":  # a copy, maybe of old weights
        folder = os.path.join(str(resolution_result(args, "model_path")), "presharded")
        folder = json.loads(args.model_loader_extra_config or "{}").get("presharded_path") or folder
        given["presharded"] = version_at_start(folder)
    if (version := installed_version()) != _UNNAMED:
        given["sglang"] = version
    given |= _draft(args)
    return json.dumps(given, sort_keys=True, default=str) if given else ""


def _draft(args: Any) -> dict[str, Any]:
    """Identity of a separate draft model: pools of any name may contain its KV.

    Its path is left out if its files tell its version.
    """
    names = ("path", "revision", "quantization")
    path, revision, quantization = (
        str(resolution_result(args, f"speculative_draft_model_{name}", "") or "") for name in names
    )
    served = str(resolution_result(args, "model_path", "") or "")
    served_revision = str(getattr(args, "revision", None) or _MAIN)
    if not path or (path, revision or _MAIN) == (served, served_revision):
        return {}
    version = version_at_start(path, revision, bool(args.trust_remote_code))
    return {"draft": [version or path, revision, quantization]}


def _adapters(args: Any) -> tuple[tuple[str, str], ...]:
    """(name, path) of the adapters of --lora-paths; adapters loaded later have random ids."""
    given = resolution_result(args, "enable_lora") and resolution_result(args, "lora_paths")
    return tuple((str(ref.lora_name), str(ref.lora_path)) for ref in given or ())


def attention_tp(config: HiCacheStorageConfig) -> tuple[int, int]:
    """(rank, size) among the ranks that share the heads of a page.

    With context parallelism the config counts the CP ranks as TP ranks, too.
    """
    if config.attn_cp_size > 1:
        with suppress(RuntimeError):  # no server has published its ranks: only the config is left
            parallel = get_parallel()
            return int(parallel.attn_tp_rank), int(parallel.attn_tp_size)
    return config.tp_rank, config.tp_size


def of_all_ranks(config: HiCacheStorageConfig, text: str | None) -> list[str | None]:
    """Gathers a text from each rank of the server; all of them must call this.

    Uses the ranks over which SGLang's controller gathers when a storage is attached, if several
    share a sequence; replicas do not wait for each other.
    """
    together = config.tp_size * config.pp_size * config.attn_cp_size > 1
    if not (together and torch.distributed.is_initialized()):
        return [text]
    answers: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(answers, text)
    return answers


def let_every_rank_write(config: HiCacheStorageConfig) -> bool:
    """Whether KV is replicated over the TP ranks; if so, makes each of them write its copy.

    SGLang lets only one rank write replicated KV (MLA), for storage that all ranks can read. A
    Tutti pool belongs to one process, so the other ranks would find nothing and, because SGLang
    takes the minimum over the ranks, there would never be a hit.
    """
    replicated = bool(config.is_mla_model)
    if replicated and config.tp_size > 1:
        config.is_mla_model = False
    return replicated


def publishes_kv_events() -> bool:
    """Whether this rank publishes KV events.  Raises ConfigError if no rank does."""
    config = get_server_args().kv_events_config
    if not config:
        raise ConfigError(
            "the option kv_events adds to the events that SGLang publishes; start the server with"
            " --kv-events-config"
        )
    return bool(is_kv_publisher_rank(config))
