"""SGLang's own clients on the CPU server: Tutti keeps every page that they come back to."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
from sglang_server import HERE, take_turn
from tiny_model import make_tokenizer

from tutti.base.terminal import progress
from tutti.bench.yardsticks import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ON_CPU = (
    "--device cpu --attention-backend torch_native --context-length 4096 --max-total-tokens 4096 "
    "--mem-fraction-static 0.3"
)


@pytest.mark.parametrize("system", ["tutti-hicache", "tutti-linker"])
def test_all_that_was_stored_is_found_again(
    system: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tokenizer(str(tiny_model))
    monkeypatch.setenv("PYTHONPATH", str(HERE / "stand_in"), prepend=":")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser()
    serving.add_arguments(parser)
    words = ["--model", str(tiny_model), "--dir", str(tmp_path), "--systems", system]
    words += ["--passes", "1", "--small-capacity", "8MiB"]
    turn = take_turn()
    try:
        result = serving.run(parser.parse_args([*words, f"--more={ON_CPU}"]), progress)
    finally:
        os.close(turn)
    cell = result["systems"][system]
    assert cell["first"]["completed"] == cell["again"]["completed"] == 36
    # After a flush nothing is in the server's own caches, but prompts of a group share their pages.
    assert cell["again"]["host_tokens"] + cell["again"]["storage_tokens"] >= 12 * 512
    assert cell["turns"]["passed"], cell["turns"]
    assert serving.hit_notes(result) == [f"found all that is possible: {system}"]
    for turns in ("sharegpt", "multiturn"):
        assert cell[turns]["completed"] == cell[turns]["requests"] == 24
    small = result["systems"][f"{system}, 8MiB"]
    assert small["server"]["evicted_objects"] > 0
    assert small["again"]["completed"] == 36
    assert small["again"]["hit_rate"] < cell["again"]["hit_rate"]
