"""`make docs` writes the reference of the Python interface without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parent / "reference.py"


def test_the_reference_is_generated_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="pdoc makes the reference: `make docs` installs it")
    done = subprocess.run(
        [sys.executable, str(REFERENCE), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "LoadTicket" in (tmp_path / "tutti" / "transfers" / "tickets.html").read_text()
