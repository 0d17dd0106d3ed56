"""SGLang's pools, allocator and linker in one process, over a faulty drive.

    python -m soak.linker SEED FOLDER

is the part that needs SGLang; it prints what it counted as a line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

from soak.oracle import Finding

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
RIGS = 6  # of one process, which takes long to start
EPISODE_MAX_S = 390


def is_there() -> bool:
    """Whether SGLang is installed where `make test-sglang` puts it."""
    return (PYTHON.parents[1] / ".installed").exists() and (ROOT / "build/view/tutti").exists()


def run(seed: int, folder: Path, tally: Counter[str]) -> None:
    """Some engines after one another, each with its linker, faults and requests."""
    if not is_there():
        tally["linkers skipped, SGLang is not installed"] += 1
        return
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "build/view", ROOT / "tests"))),
    }
    done = subprocess.run(
        [str(PYTHON), "-m", "soak.linker", str(seed), str(folder)],
        capture_output=True,
        text=True,
        timeout=EPISODE_MAX_S,
        env=environment,
    )
    if done.returncode:
        raise Finding(f"{done.stdout[-500:]}{done.stderr[-2500:]}")
    tally.update(json.loads(done.stdout.splitlines()[-1]))


def engines(seed: int, folder: Path) -> Counter[str]:
    """In SGLang's environment."""
    sys.path.insert(0, str(ROOT / "tests" / "sglang"))
    import conftest  # noqa: F401  the stand-ins' places, and SGLang on the CPU
    import test_linker_stress as stress
    from memory_controller import Faults

    from tutti.integration.sglang.direct import open_pools as stored_pools

    tally: Counter[str] = Counter()
    for number in range(RIGS):
        rng = random.Random(f"{seed}/{number}")
        kind, share = rng.choice(list(stress.FAULTS)), rng.choice([0.0, 0.6])
        controls: list[object] = []
        stored_pools.open_store = stress.stores_in_memory(controls)
        place = folder / str(number)
        place.mkdir()
        with stress.Rig(place, read_ahead_share=share, **stress.OPTIONS) as rig:
            model = stress.Model(rig, rng)
            controls[0](Faults(seed=rng.getrandbits(60), **stress.FAULTS[kind]))
            stress.serve(model, rng)
            if kind in ("none", "delays") and model.failed:
                raise Finding("a load fails on a sound drive")
            controls[0](Faults())
            faults = rig.stored_pool.store.controller.stats().faults
            stress.nothing_leaks(rig)
            tally["linker pages verified"] += model.loaded
            tally["linker loads failed"] += model.failed
            tally["linker loads refused"] += model.refused
            tally[f"faults linker {kind}"] += int(faults)
            tally["linkers"] += 1
    return tally


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(engines(int(sys.argv[1]), Path(sys.argv[2]))))
