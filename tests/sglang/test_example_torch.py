"""The example with torch, where torch is: a prefix that was loaded gives the same numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_model.py"


def test_a_torch_model_saves_and_restores_its_kv(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path / "pool")],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stdout == "2 of 4 pages were loaded; the numbers are the same\n", done.stderr
