"""The printed launch command against the parser of the SGLang that is installed."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import host_pools
import pytest
from linker_engine import Rig
from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.environ import envs
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.runtime_context import (
    ParallelContext,
    RuntimeContext,
    SpawnRanks,
    create_context,
    use_context,
)
from sglang.srt.server_args import ServerArgs

from tutti.integration.sglang import adapter, launch
from tutti.integration.sglang.hicache import TuttiHiCacheStorage
from tutti.integration.sglang.identity import ServedModel, version_at_start
from tutti.integration.sglang.options import HICACHE, LINKER

OPTIONS = {"path": "/pools", "capacity": "1GiB"}


@pytest.mark.parametrize("layout", launch.IO_BACKENDS)
def test_sglang_takes_the_command_of_hicache(layout: str) -> None:
    arguments = launch.server_arguments(HICACHE, "m", OPTIONS, page_size=64, layout=layout)
    assert launch.refused_arguments(arguments) == ""


def test_sglang_takes_the_command_of_the_linker() -> None:
    arguments = launch.server_arguments(LINKER, "m", OPTIONS, page_size=64)
    assert launch.refused_arguments(arguments) == ""


def test_a_wrong_argument_is_refused() -> None:
    assert "no-such" in launch.refused_arguments(["--model-path", "m", "--no-such-argument"])
    adapters = ["--model-path", "m", "--lora-paths", '{"lora_name": "a"}']
    assert "'lora_path' keys" in launch.refused_arguments(adapters), "an assertion of SGLang's"


def test_the_version_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.check_version()
    monkeypatch.setattr(adapter, "VERSIONS", ("9.9.9",))
    with pytest.raises(adapter.Unsupported, match=r"9\.9\.9"):
        adapter.check_version()


@pytest.mark.parametrize("mode", [HICACHE, LINKER])
def test_page_hashes_are_loaded_before_a_server_serves(
    mode: str, make: host_pools.Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flush would end a server that compiles them in a thread of HiCache."""
    caplog.set_level(logging.INFO)
    load = native_hash._load_native_hash_module
    load.cache_clear()
    if mode == LINKER:
        Rig(tmp_path).linker.close()
    else:
        make(host_pools.mha_pool("page_first"))
    assert load.cache_info().currsize == 1
    assert "page hashes loaded in" in caplog.text


@pytest.mark.parametrize("mode", [HICACHE, LINKER])
def test_one_line_of_the_log_says_by_what_a_pool_is_scheduled(
    mode: str, make: host_pools.Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    if mode == LINKER:
        Rig(tmp_path).linker.close()
    else:
        make(host_pools.mha_pool("page_first"))
    (line,) = [one for one in caplog.messages if "scheduling with" in one]
    assert line.startswith(
        ("scheduling with a profile: the medium is ", "scheduling with an estimated")
    )


def test_page_hashes_that_cannot_be_compiled_are_an_error_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> None:
        raise RuntimeError("Failed to load") from OSError("no g++")

    monkeypatch.setattr(native_hash, "_load_native_hash_module", fail)
    storage = TuttiHiCacheStorage(host_pools.config(tmp_path), {})
    with pytest.raises(adapter.Unsupported, match=r"no g\+\+.*install g\+\+"):
        storage.register_mem_pool_host(host_pools.mha_pool("page_first"))


def test_a_process_without_a_server_has_an_empty_model() -> None:
    with use_context(RuntimeContext(parallel=ParallelContext())):  # another test may have one
        assert adapter.served_model() == ServedModel()


def _context(world_rank: int = 0, dp_rank: int | None = None, **arguments: Any) -> Any:
    args = ServerArgs(model_path="dummy", device="cpu", **arguments)
    ranks = SpawnRanks(world_rank=world_rank, dp_rank=dp_rank)
    return use_context(create_context(args, role="test", ranks=ranks))


def test_adapters_with_lasting_ids_are_part_of_the_model() -> None:
    """Through SGLang's own parsing of --lora-paths."""
    plain = {"lora_name": "b", "lora_path": "org/b"}
    cases: tuple[tuple[Any, Any], ...] = (
        (["a=/adapters/a", plain], (("a", "/adapters/a"), ("b", "org/b"))),
        (["/adapters/a"], (("/adapters/a", "/adapters/a"),)),
        (None, ()),
    )
    for given, adapters in cases:
        args = ServerArgs(model_path="dummy", device="cpu", lora_paths=given)
        check_lora_server_args(args)
        with use_context(create_context(args, role="test", ranks=SpawnRanks(world_rank=0))):
            assert adapter.served_model().adapters == adapters
    with _context(lora_paths=["a=/adapters/a"], enable_lora=False):
        assert adapter.served_model().adapters == (), "ignored by SGLang"


def test_what_changes_kv_under_one_checkpoint_is_part_of_the_model(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    with _context():
        assert adapter.served_model().overrides == "{}", "as before these were counted"
    seen = set()
    for given in (
        {"quantization_param_path": str(scales)},
        {"quantization_param_path": str(tmp_path / "other.json")},
        {"modelopt_checkpoint_restore_path": str(scales)},
        {"modelopt_checkpoint_restore_path": str(tmp_path / "other.json")},
        {"modelopt_quant": "fp8"},
        {"modelopt_quant": {"quant_algo": "fp8"}},
        {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "org/q"}'},
        {"enable_decoder_swa_bounded_replay": True},
        {"enable_dsa_fused_indexer": False},
        {"lora_target_modules": ["q_proj"]},
        {"kt_weight_path": str(scales)},
        {"decrypted_config_file": str(scales)},
        {"model_impl": "transformers"},
        {"forward_hooks": [{"hook_factory": "steer:make", "config": {"strength": 1}}]},
        {"forward_hooks": [{"hook_factory": "steer:make", "config": {"strength": 2}}]},
    ):
        with _context(**given):
            seen.add(adapter.served_model().overrides)
    assert len(seen) == 15
    with _context(enable_decoder_swa_bounded_replay=False):
        assert adapter.served_model().overrides == "{}"
    with _context(lora_target_modules={"v_proj", "k_proj", "q_proj"}):
        overrides = adapter.served_model().overrides
        assert '["k_proj", "q_proj", "v_proj"]' in overrides, "a set has no order"
    scales.write_text("{ }")
    version_at_start.cache_clear()
    for name in adapter._FILES:
        with _context(**{name: str(scales)}):
            assert adapter.served_model().overrides not in seen, name


def test_what_a_pages_bytes_mean_is_part_of_the_model() -> None:
    with _context():
        plain = adapter.served_model().overrides
        seen = {plain}
        for variable, value in (
            (envs.SGLANG_USE_HND_KVCACHE, True),
            (envs.SGLANG_AITER_KV_CACHE_LAYOUT, "vectorized_5d"),
            (envs.SGLANG_DSV4_KV_LAYOUT, "v41"),
            (envs.SGLANG_DSV4_KV_LAYOUT, "v41_new"),
            (envs.SGLANG_DISABLE_DSA_INDEXER_FUSION, True),
            (envs.SGLANG_DISABLE_AITER_FUSED_FP8_DSA_INDEXER, True),
            (envs.SGLANG_EXTERNAL_MODEL_PACKAGE, "models_of_mine"),
            (envs.SGLANG_HUMMING_ONLINE_QUANT_CONFIG, '{"dtype": "int4"}'),
        ):
            with variable.override(variable.default):
                assert adapter.served_model().overrides == plain
            with variable.override(value):
                seen.add(adapter.served_model().overrides)
    assert len(seen) == 9


def test_a_presharded_copy_of_the_weights_is_part_of_the_model(tmp_path: Path) -> None:
    """SGLang loads it also after the weights were replaced."""
    copy = tmp_path / "TP-1-sig-a" / "model-00000-common.safetensor"
    copy.parent.mkdir()
    seen = set()
    for size in (1, 2, 1):
        copy.write_bytes(bytes(size))
        os.utime(copy, (1, 1))
        version_at_start.cache_clear()
        where = json.dumps({"presharded_path": str(tmp_path)})
        with _context(load_format="presharded", model_loader_extra_config=where):
            seen.add(adapter.served_model().overrides)
    assert len(seen) == 2


def test_weights_that_another_process_gives_are_known_as_such() -> None:
    for name, value in (("load_format", "remote_instance"), ("weight_cache_mode", "client")):
        with _context(**{name: value}):
            assert adapter.served_model().weights_from == f"--{name.replace('_', '-')} {value}"
    for name, value in (("load_format", "dummy"), ("weight_cache_mode", "daemon")):
        with _context(**{name: value}):
            assert adapter.served_model().weights_from == ""


def test_kv_of_another_version_or_build_of_sglang_is_never_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have another layout, or other code of the model."""
    with _context():
        seen = {adapter.served_model().overrides}
        for version in ("0.5.23+patched", "0.5.24"):
            monkeypatch.setattr(adapter, "installed_version", lambda name=version: name)
            seen.add(adapter.served_model().overrides)
    assert len(seen) == 3


def test_a_draft_model_is_part_of_the_model_unless_it_is_the_same(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    seen = set()
    for size in (1, 2, 1):
        weights.write_bytes(bytes(size))
        os.utime(weights, (1, 1))
        version_at_start.cache_clear()
        with _context(speculative_draft_model_path=str(tmp_path)):
            seen.add(adapter.served_model().overrides)
    assert len(seen) == 2, "trained again, and back"
    for given in ({"path": "org/draft"}, {"path": "org/draft", "revision": "v2"}):
        with _context(**{f"speculative_draft_model_{name}": to for name, to in given.items()}):
            seen.add(adapter.served_model().overrides)
    assert len(seen) == 4
    for revision in (None, "main"):  # SGLang writes "main" where there is none
        with _context(
            speculative_draft_model_path="dummy", speculative_draft_model_revision=revision
        ):
            assert adapter.served_model().overrides == "{}", "the served model's own layers"


def test_code_that_sglang_runs_is_part_of_the_model(tmp_path: Path) -> None:
    code = tmp_path / "modeling_mine.py"
    for trusted in (False, True):
        seen = set()
        for size in (1, 2):
            code.write_bytes(b"#" * size)
            version_at_start.cache_clear()
            given = {"trust_remote_code": trusted, "speculative_draft_model_path": str(tmp_path)}
            with _context(**given):
                model = adapter.served_model()
            assert model.runs_code is trusted
            seen.add(model.overrides)
        assert len(seen) == 1 + trusted, "of a draft model"


def test_replicas_and_groups_of_dp_attention_share_the_capacity() -> None:
    for widths in ({"dp_size": 2}, {"tp_size": 2, "attn_dp_size": 2}):
        with _context(widths.get("tp_size", 1) - 1, 1, **widths):
            model = adapter.served_model()
        assert (model.dp_rank, model.dp_size) == (1, 2), widths


def test_ranks_of_context_parallelism_are_not_counted_as_tensor_parallel_ones_too() -> None:
    config = host_pools.config("/pools", tp_rank=3, tp_size=4, attn_cp_rank=1, attn_cp_size=2)
    with _context(3, None, tp_size=4, attn_cp_size=2):
        assert adapter.attention_tp(config) == (1, 2)
    config = host_pools.config("/pools", tp_rank=1, tp_size=2)
    assert adapter.attention_tp(config) == (1, 2)
