"""In the guest: benches by the command line on drives that they erase; emulated, so times say
nothing and none is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tutti import cli

_POOL = ["--capacity=32MiB", "--json"]
BENCHES = {
    "bandwidth": [
        *("bench", "bandwidth", "--shapes=2x16KiB", "--seconds=0.2", "--batch=128KiB"),
        *("--inflight=2", "--memory=2MiB", "--prefix-pages=8", *_POOL),
    ],
    "replay": ["replay", "--requests=8", "--shape=1x32KiB", "--pages=32", *_POOL],
    "profile": [
        *("profile", "--sizes", "256KiB", "1MiB", "--slices", "64KiB", "--repeats=1"),
        *("--file-size=8MiB", "--json"),
    ],
}


def check_bench(
    name: str,
    paths: Sequence[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    force: Sequence[str] = (),
) -> None:
    """One of BENCHES ends well, finds no wrong byte, and leaves the drives blank for another, which
    `bandwidth` does by the code of `replay`.
    """
    words = [*BENCHES[name], *(f"--force={serial}" for serial in force)]
    words += ["--medium" if name == "profile" else "--path", *paths]
    words += ["--out", str(folder / "profile.json")] if name == "profile" else []
    for _ in range(1 if name == "bandwidth" else 2):
        # Drawn by an emulated processor, the picture of a profile takes longer than all the rest.
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "matplotlib", None)
            code = cli.main(words)
        out, err = capsys.readouterr()
        assert code == 0, err
        assert json.loads(out).get("wrong", 0) == 0
        words = [word for word in words if not word.startswith("--force")]
