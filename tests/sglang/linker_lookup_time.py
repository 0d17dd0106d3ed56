"""How long a look-up takes, in microseconds a page: a helper to be run by hand, not a test.

    PYTHONPATH=... python tests/sglang/linker_lookup_time.py FOLDER

Prints JSON.  All pages hit; the linker reads ahead meanwhile, as it does by default.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "stand_in")]

import linker_engine as engine  # noqa: E402
from linker_engine import Rig, names, transfer  # noqa: E402

PAGES = (1024, 8192)
ROUNDS = 50


def main(folder: Path) -> None:
    engine.PAGES = max(PAGES)
    everything = names(max(PAGES))
    options = {"capacity": "330MiB", "pin_share": 1.0, "backlog_share": 1.0}
    with Rig(folder, **options) as rig:
        assert rig.store(everything, range(max(PAGES)))
        results = {}
        for pages in PAGES:
            look = [transfer(everything[:pages])]
            times = []
            for _ in range(ROUNDS):
                began_s = time.perf_counter()
                found = rig.linker.lookup("r", look)
                times.append(time.perf_counter() - began_s)
                assert len(found) == pages
            times.sort()
            results[pages] = {
                "median_us_per_page": times[ROUNDS // 2] / pages * 1e6,
                "p90_us_per_page": times[ROUNDS * 9 // 10] / pages * 1e6,
            }
        print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
