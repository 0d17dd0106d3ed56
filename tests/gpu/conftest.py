"""A real GPU: the driver, the device code, and memory.  Skipped by name where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from absent import Absent

from tutti.errors import Unsupported
from tutti.gio_uring.gpu.device_code import Modules
from tutti.gio_uring.gpu.driver import CudaDriver

#: What these need beside the driver.
NEEDS = {"test_torch.py": "torch", "test_linker.py": "sgl_kernel"}


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    package = NEEDS.get(module_path.name)
    if package is None or find_spec(package) is not None:
        return None
    return Absent.of(f"{package} is not installed", module_path, parent)


@pytest.fixture(scope="session")
def driver() -> Iterator[CudaDriver]:
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra cuda)")
    try:
        made = CudaDriver()
    except Unsupported as error:  # no driver; one that fails is a failure
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture(scope="session")
def modules(driver: CudaDriver) -> Iterator[Modules]:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC (extra cuda)")
    made = Modules(driver)
    yield made
    made.close()


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
