"""The printed launch command against the parser of the SGLang that is installed."""

from __future__ import annotations

from typing import Any

import host_pools
import pytest
from sglang.srt.runtime_context import (
    ParallelContext,
    RuntimeContext,
    SpawnRanks,
    create_context,
    use_context,
)
from sglang.srt.server_args import ServerArgs

from tutti.integration.sglang import adapter, launch
from tutti.integration.sglang.identity import ServedModel
from tutti.integration.sglang.options import HICACHE, LINKER, LINKER_OPTIONS

OPTIONS = {"path": "/pools", "capacity": "1GiB"}


@pytest.mark.parametrize("layout", launch.IO_BACKENDS)
def test_sglang_takes_the_command_of_hicache(layout: str) -> None:
    arguments = launch.server_arguments(HICACHE, "m", OPTIONS, page_size=64, layout=layout)
    assert launch.refused_arguments(arguments) == ""


def test_sglang_takes_the_command_of_the_linker() -> None:
    arguments = launch.server_arguments(LINKER, "m", OPTIONS, page_size=64, own=LINKER_OPTIONS)
    assert launch.refused_arguments(arguments) == ""


def test_a_wrong_argument_is_refused() -> None:
    assert "no-such" in launch.refused_arguments(["--model-path", "m", "--no-such-argument"])


def test_the_version_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.check_version()
    monkeypatch.setattr(adapter, "VERSIONS", ("9.9.9",))
    with pytest.raises(adapter.Unsupported, match=r"9\.9\.9"):
        adapter.check_version()


def test_a_process_without_a_server_has_an_empty_model() -> None:
    with use_context(RuntimeContext(parallel=ParallelContext())):  # another test may have one
        assert adapter.served_model() == ServedModel()


def _context(world_rank: int, dp_rank: int | None, **widths: int) -> Any:
    args = ServerArgs(model_path="dummy", device="cpu", **widths)
    ranks = SpawnRanks(world_rank=world_rank, dp_rank=dp_rank)
    return use_context(create_context(args, role="test", ranks=ranks))


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
