"""The library as it is shipped, engine, controllers and executors, under the sanitizers.

It is driven by traffic of eight threads through the Python API; io_uring's own threads and what the
kernel does are beyond the sanitizers' sight.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from native.instrumented import build_library, leaks_of, run_program, runtimes

from tutti.gio_uring.controller_file import uring_refusal

ROUNDS = 3
SANITIZERS = ["tsan", "asan"]
#: Hands a job to the engine's thread without the lock that orders it.
RACE = {
    "engine.cpp": (
        "    std::lock_guard<std::mutex> lock(mutex_);\n    if (exited_ || stop_)",
        "    if (exited_ || stop_)",
    )
}

Library = Callable[..., Path]

# The library is compiled when a source has changed, by the first test that needs it.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """`library(sanitizer)`: the built library, from pytest's cache where it is fresh."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("native-library") if cache else tmp_path_factory.mktemp("library")

    def build(sanitizer: str, edits: dict[str, tuple[str, str]] | None = None) -> Path:
        runtimes(sanitizer)
        return build_library(Path(folder), sanitizer, edits or {})

    return build


@pytest.mark.parametrize("kind", ["uring", "threads", "vfio"])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_traffic_of_eight_threads(
    library: Library, tmp_path: Path, seed: int, sanitizer: str, kind: str
) -> None:
    if kind == "uring" and (reason := uring_refusal()):
        pytest.skip(f"io_uring is refused here: {reason}")
    built = library(sanitizer)
    done = run_program("traffic", (kind, tmp_path, seed, ROUNDS), built, sanitizer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not leaks_of(built, done.stderr)


def test_threads_that_hash_the_same_command(library: Library, tmp_path: Path, seed: int) -> None:
    """Two service threads and the digest workers, which take pieces of it from one queue."""
    done = run_program("traffic", ("vfio", tmp_path, seed, 1, 512), library("tsan"), "tsan")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_planted_race_is_seen(library: Library, tmp_path: Path, seed: int) -> None:
    done = run_program("traffic", ("threads", tmp_path, seed, 1), library("tsan", RACE), "tsan")
    assert done.returncode != 0
    assert "data race" in done.stderr
    assert "Engine::submit" in done.stderr


@pytest.mark.parametrize(
    ("mistake", "found"), [("use", "heap-use-after-free"), ("leak", "Direct leak")]
)
def test_mistakes_with_memory_are_seen(
    library: Library, tmp_path: Path, mistake: str, found: str
) -> None:
    built = library("asan")
    done = run_program("misuse", (mistake, tmp_path), built, "asan")
    assert (done.returncode == 0) == (mistake == "leak"), done.stderr
    assert found in done.stderr
    assert "gio::" in done.stderr
    assert bool(leaks_of(built, done.stderr)) == (mistake == "leak")
