"""`tutti bench bandwidth --gpu` by every engine; nothing here looks at a speed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from tutti.base.terminal import progress
from tutti.bench import bandwidth
from tutti.bench.gpu_memory import ENGINES
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.driver import CudaDriver

SMALL = "--shapes 2x16KiB --capacity 4MiB --batch 64KiB --memory 256KiB --inflight 2 --gib 0.0001"


def result_of(words: str, folder: Path) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    bandwidth.add_arguments(parser)
    given = [*SMALL.split(), *words.split(), "--dir", str(folder)]
    return bandwidth.run(parser.parse_args(given), progress)


@pytest.mark.parametrize("engine", ENGINES)
def test_pages_in_gpu_memory(
    engine: str, tmp_path: Path, driver: CudaDriver, modules: Modules
) -> None:
    result = result_of(f"--gpu {engine} --phases store retrieve", tmp_path)
    rows = [(row["phase"], row["backing"]) for row in result["rows"]]
    assert rows == [("store", "gpu"), ("retrieve", "gpu")]
    assert result["gpu"]["engine"] == engine
    assert result["wrong"] == 0


def test_prompts_in_gpu_memory(tmp_path: Path, driver: CudaDriver, modules: Modules) -> None:
    result = result_of("--gpu host --phases retrieve --contexts 64 128", tmp_path)
    assert [row["context_tokens"] for row in result["rows"]] == [64, 128]
    assert result["wrong"] == 0
