"""What the tests of a second tier share: a remote store with faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.faulty import Faults


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    return Faults(tmp_path / "remote")
