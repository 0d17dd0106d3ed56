"""One round of MLPerf Storage's KV-cache benchmark on one backend, in a process of its own.

    python -m tutti.bench.yardsticks.round < plan.json

The benchmark runs with its own command line; only its storage class is replaced.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tutti.bench.yardsticks.backends import Counted, DirectEntries, PoolEntries

#: `tutti-at-once` issues puts at once; by default they yield to loads.
SYSTEMS = ("tutti", "tutti-at-once", "shipped", "direct")
_ROOM = 1.25  # for padding, and for entries that the benchmark admits above its limit


@dataclass(frozen=True)
class RoundPlan:
    """checkout: folder that contains the package kv_cache.  arguments: of the benchmark's command.

    members_file: cgroup.procs of the control group that limits memory; empty for none.
    """

    system: str
    checkout: str
    folder: str
    durability: str
    capacity_nbytes: int
    arguments: list[str]
    members_file: str = ""


def make_backend(plan: RoundPlan, backends: Any) -> Counted:
    """A subclass of the benchmark's interface.  backends: its module kv_cache.backends."""
    timing = backends.StorageBackend.IOTiming
    entries = str(Path(plan.folder) / "entries")
    Path(entries).mkdir()
    inner: Any
    if plan.system.startswith("tutti"):
        inner = PoolEntries(
            timing,
            entries,
            int(plan.capacity_nbytes * _ROOM),
            durability=plan.durability,
            profile=None if plan.system == "tutti-at-once" else "auto",
        )
    elif plan.system == "direct":
        inner = DirectEntries(timing, entries, plan.durability)
    else:
        inner = backends.NVMeBackend(base_path=entries)
    kind = type("CountedBackend", (Counted, backends.StorageBackend), {})
    backend: Counted = kind(inner, entries)
    return backend


def run_round(plan: RoundPlan) -> dict[str, Any]:
    """Runs the benchmark: returns its summary, the backend's counts, and used resources."""
    if plan.members_file:
        Path(plan.members_file).write_text(str(os.getpid()))
    sys.path.insert(0, plan.checkout)
    backends, cache, cli = (
        importlib.import_module(f"kv_cache.{name}") for name in ("backends", "cache", "cli")
    )
    backend = make_backend(plan, backends)
    vars(cache)["NVMeBackend"] = lambda base_path=None: backend
    output = Path(plan.folder) / "result.json"
    sys.argv = ["kv-cache.py", *plan.arguments, "--output", str(output)]
    begin_s = time.perf_counter()
    cli.main()
    wall_s = time.perf_counter() - begin_s
    counts = backend.finish()
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "summary": json.loads(output.read_text()).get("summary", {}),
        "counts": asdict(counts),
        "wall_s": wall_s,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_memory_nbytes": used.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    plan_given = RoundPlan(**json.load(sys.stdin))
    Path(plan_given.folder, "round.json").write_text(json.dumps(run_round(plan_given)))
