"""Takes one memory order out of the headers at a time: TSan must miss each of them.

This shows that the stress test sees what docs/ring-memory-model.md says is needed. Three orders are
not listed. Nothing that these tests observe hangs on the acquire of the CQ doorbell or on the order
of the ticket while the others hold; that of taking a CID is not missed in every run.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from native.programs import ENVIRONMENT, HEADERS, SANITIZER_EXIT, compile_program

QUEUE_PAIR, CONTROLLER, ATOMICS = "queue_pair.h", "controller_queue.h", "atomics.h"
MARK = "(&at<u32>(qp->marks)"
COMPLETION = "(&at<u32>(qp->completions)"
CQE = "(&at<Cqe>(qp->cq)"
# Name of the order, header, what stands there, what takes the order away.
RUNS_MAX = 25
ORDERS = [
    ("mark release", QUEUE_PAIR, f"own_store_release{MARK}", f"own_store{MARK}"),
    ("mark acquire", QUEUE_PAIR, f"own_load_acquire{MARK}", f"own_load{MARK}"),
    ("completion release", QUEUE_PAIR, f"own_store_release{COMPLETION}", f"own_store{COMPLETION}"),
    ("completion acquire", QUEUE_PAIR, f"own_load_acquire{COMPLETION}", f"own_load{COMPLETION}"),
    ("CQE release", CONTROLLER, "store_release(&cqe->status", "store_relaxed(&cqe->status"),
    ("CQE acquire", QUEUE_PAIR, f"load_acquire{CQE}", f"load_relaxed{CQE}"),
    (
        "SQ doorbell acquire",
        CONTROLLER,
        "load_acquire(at<u32>(q->sq_doorbell))",
        "load_relaxed(at<u32>(q->sq_doorbell))",
    ),
    (
        "CID release",
        ATOMICS,
        "__atomic_fetch_or(p, v, __ATOMIC_ACQ_REL)",
        "__atomic_fetch_or(p, v, __ATOMIC_RELAXED)",
    ),
    (
        "lock order",
        ATOMICS,
        "__atomic_exchange_n(p, v, __ATOMIC_ACQ_REL)",
        "__atomic_exchange_n(p, v, __ATOMIC_RELAXED)",
    ),
]


@pytest.mark.timeout(600)  # of up to RUNS_MAX runs
@pytest.mark.parametrize(
    ("header", "order", "without"), [o[1:] for o in ORDERS], ids=[o[0] for o in ORDERS]
)
def test_tsan_misses_the_order(tmp_path: Path, header: str, order: str, without: str) -> None:
    shutil.copytree(HEADERS, tmp_path / "include")
    patched = tmp_path / "include" / "gio_uring" / header
    text = patched.read_text()
    assert order in text, f"{header} no longer says {order}: name here what took its place"
    patched.write_text(text.replace(order, without))
    program = compile_program(tmp_path, "ring_stress", "tsan", tmp_path / "include")
    # A run sees the race only if its threads happen to meet; on a busy machine many may not.
    for run in range(RUNS_MAX):
        words = [str(program), "8", "8", "10000", str(4 + run), "0", "1"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=ENVIRONMENT)
        if done.returncode == SANITIZER_EXIT:
            break
    assert done.returncode == SANITIZER_EXIT, done.stdout
    assert "data race" in done.stderr
