"""What every test shares: a printed seed, hypothesis profiles, and GPU tests that skip by name."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Keep in step with the suites of the Makefile; tests/<marker>/ carries its marker by itself.
MARKERS = {
    "crash": "kills processes or cuts the medium's writes, then recovers",
    "gpu": "needs a CUDA device",
    "native": "builds C++ with the sanitizers and runs it",
    "nvme": "needs QEMU, and boots a guest with an emulated NVMe drive",
    "sglang": "needs SGLang, and starts its server",
    "slow": "longer than a minute; not part of `make test`",
}
#: Where the Makefile looks for the tests of a suite.
FOLDERS = {
    "crash": ("crash", "soak"),
    "native": ("native",),
    "nvme": ("qemu",),
    "sglang": ("sglang",),
}

# No deadlines: times are never asserted. A failure prints a blob that repeats it.
with suppress(ImportError):  # as on a GPU machine without a network
    from hypothesis import settings

    settings.register_profile("tutti", deadline=None, print_blob=True)
    settings.register_profile("ci", deadline=None, print_blob=True, max_examples=50)
    settings.load_profile("tutti")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--seed", type=int, default=None, help="repeat a run's random choices")
    if not pluginmanager.hasplugin("timeout"):  # as there
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "pytest-timeout's; without it a test has no deadline")


def pytest_configure(config: pytest.Config) -> None:
    for module in Path(__file__).parents[1].glob("tutti/scheduler/*.so"):
        source = module.with_name(f"{module.name.split('.')[0]}.py")
        if source.exists() and source.stat().st_mtime > module.stat().st_mtime:
            pytest.exit(f"{source} is newer than what was compiled of it: make install", 2)
    # Pools are opened by the default door: the first one measures the medium, the others, in every
    # process of the run, take what it cached.
    if "XDG_CACHE_HOME" not in os.environ or not hasattr(config, "workerinput"):
        # QEMU's guest and what torch has compiled stay where they are.
        usual = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        os.environ.setdefault("TUTTI_GUEST_CACHE", usual)
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(usual) / "torch_extensions"))
        folder = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="tutti-cache-")
        # Cubins are named by all that they were compiled from: one compilation serves every run.
        with suppress(OSError):
            (Path(usual) / "tutti/cubins").mkdir(parents=True, exist_ok=True)
            (Path(folder) / "tutti").mkdir()
            (Path(folder) / "tutti/cubins").symlink_to(Path(usual).resolve() / "tutti/cubins")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # A shell without job control starts what it runs in the background deaf to SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "timeout(seconds): pytest-timeout's")
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.option.seed is None:
        given = getattr(config, "workerinput", {})
        config.option.seed = given.get("seed", random.SystemRandom().randrange(2**32))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hands the seed to a parallel worker; without it every worker would draw its own."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    terminalreporter.write_line(f"seed {config.option.seed} (repeat with --seed)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Tests with a longer limit come first: at the end of a suite one would run alone.
    items.sort(key=limit_s, reverse=True)
    for item in items:
        folder = item.path.relative_to(config.rootpath).parts[1]
        if folder in MARKERS:
            item.add_marker(folder)
        for name, folders in FOLDERS.items():
            if item.get_closest_marker(name) is not None and folder not in folders:
                raise pytest.UsageError(f"{item.nodeid} is found only below tests/{folders[0]}")
        # Keywords also hold the names of folders, such as that of a clone.
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skipif(not cuda_devices(), reason="no CUDA device"))


def limit_s(item: pytest.Item) -> float:
    """The limit that a test or its module sets; 0 for the default."""
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else float(marker.args[0])


@functools.cache
def cuda_devices() -> int:
    """Number of CUDA devices the driver reports; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed: every random choice of a test derives from it."""
    return int(request.config.option.seed)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(params=["uring", "threads"])
def executor(request: pytest.FixtureRequest) -> str:
    """Each of the file controller's executors that this machine has."""
    from tutti.gio_uring.controller_file import uring_refusal

    if request.param == "uring" and (reason := uring_refusal()):
        pytest.skip(f"io_uring is refused here: {reason}")
    return str(request.param)
