"""What the tests on SGLang share: its stand-ins on the path, a tiny model, and skips by name."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MISSING = "SGLang is not installed here (make test-sglang installs it where packages can be had)"

for folder in (HERE, HERE / "stand_in"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def has_sglang() -> bool:
    """Asks for a module of it: the name alone would find the folder of these tests."""
    try:
        return importlib.util.find_spec("sglang.srt") is not None
    except ModuleNotFoundError:
        return False


class Absent(pytest.File):
    """In the place of a module of these tests, which cannot be imported without SGLang."""

    def collect(self) -> Iterator[pytest.Item]:
        yield Skipped.from_parent(self, name="needs_sglang")


class Skipped(pytest.Item):
    """An item and no skip of the whole module: suites that do not select it do not report it."""

    def runtest(self) -> None:
        pytest.skip(MISSING)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    return None if has_sglang() else Absent.from_parent(parent, path=module_path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The kit loads plugins and publishes settings for the whole process: tests that need a process
    # without them comes first.
    items.sort(key=lambda item: item.path == HERE / "test_hicache_kit.py")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of multi-head attention; made in another process, which imports transformers."""
    return make_model(tmp_path_factory.mktemp("model"), "mha")


def make_model(folder: Path, kind: str = "mha", seed: int = 0) -> Path:
    command = [sys.executable, str(HERE / "tiny_model.py"), str(folder), str(seed), kind]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder
