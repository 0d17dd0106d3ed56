"""The rings' patterns under the PTX memory model: each outcome that would be a fault is forbidden.

The patterns are written in the verbs of atomics.h, whose inline PTX is read from that header, so a
weaker instruction there is seen here.  Every pattern has controls: the same program with one order
taken away, for which the model must allow the fault.  This is a proof about small programs and the
published axioms; it is not a run on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from native.ptx_model import Outcome, Program, is_allowed

KERNELS = Path(__file__).parents[2] / "kernels"
ATOMICS = (KERNELS / "include/gio_uring/atomics.h").read_text()

#: Where the code uses the verb that a pattern uses for the same word.
USES = {
    "include/gio_uring/queue_pair.h": [
        "own_store_release(&at<u32>(qp->marks)",
        "own_load_acquire(&at<u32>(qp->marks)",
        "own_store_release(&at<u32>(qp->completions)",
        "own_load_acquire(&at<u32>(qp->completions)",
        "own_store(&at<u32>(qp->completions)[cid], 0)",
        "load_acquire(&at<Cqe>(qp->cq)",
        "fetch_and(&free_bits[w], ~bit)",
        "fetch_or(&at<u32>(qp->cid_free)",
        "fetch_add(&qp->ticket, 1)",
        "exchange(&qp->tail_lock, 1)",
        "exchange(&qp->tail_lock, 0)",
        "own_store(&qp->tail, tail)",
    ],
    "include/gio_uring/atomics.h": [
        "    store_release(doorbell, value);  // pairs with load_acquire in controller_queue.h",
        "    store_relaxed(doorbell, value);  // pairs with load_acquire in controller_queue.h",
    ],
    "device": [
        "Doorbell::ring_head(at<u32>(qp->cq_doorbell)",
        "fetch_add(&tally->arrived, 1)",
        "set_if_zero(&tally->status, status)",
        "store_relaxed(&flag->status, own_load(&tally->status))",
        "store_release(&flag->ready, batch->ready)",
        "load_acquire(at<u32>(box.posted))",
        "store_release(consumed, next)",
    ],
}


@cache
def verbs() -> dict[str, list[str]]:
    """PTX of each verb: what its function has for the device, without operands."""
    found: dict[str, list[str]] = {}
    for name, body in re.findall(r"GIO_HD \w+ (\w+)\([^)]*\) \{\n(.*?)\n\}", ATOMICS, re.DOTALL):
        text = re.search(r'asm volatile\(\s*"([^"]+)"', body)
        if text is not None and "%globaltimer" not in text[1]:
            found[name] = [_short(part) for part in re.split(r";\\n\\t|;", text[1]) if part]
    mmio = re.findall(r'"((?:fence[^"]+)?st\.mmio[^"]+)"', ATOMICS)
    assert len(mmio) == 2, "the doorbells of a drive"
    for name, text in zip(("ring_mmio", "ring_head_mmio"), mmio, strict=True):
        found[name] = [_short(part) for part in re.split(r";\\n\\t|;", text) if part]
    found["ring_word"] = found["store_release"]
    found["ring_head_word"] = found["store_relaxed"]
    return found


def _short(instruction: str) -> str:
    """Kind, order and scope: "st.mmio.relaxed.sys.global.u32 [%0], %1" is st.relaxed.sys."""
    words = instruction.split()[0].split(".")
    orders = [w for w in words if w in ("relaxed", "acquire", "release", "acq_rel", "sc")]
    scopes = [w for w in words if w in ("cta", "gpu", "sys")]
    return ".".join([words[0], orders[0], scopes[0]])


#: What a CPU's thread does for a verb, and a drive, which fetches only after it saw the doorbell.
OUTSIDE = {
    "load_acquire": ["ld.acquire.sys"],
    "store_release": ["st.release.sys"],
    "store_relaxed": ["st.relaxed.sys"],
}


def spell(program: Program, changed: Mapping[str, str]) -> dict[str, str]:
    """The program in PTX.  changed: verbs, at "verb word" or everywhere, spelled otherwise."""

    def line(text: str, thread: str) -> str:
        verb, *operands = text.split()
        if verb in ("bar", "vote", "ld.weak", "st.weak"):
            return "" if f"{verb} {operands[0]}" in changed else text
        known = verbs() if thread.startswith("b") else OUTSIDE
        key = f"{verb} {operands[0]}"
        parts = [changed[key]] if key in changed else known[verb]
        lines = [p if p.startswith("fence") else " ".join([p, *operands]) for p in parts]
        return "\n".join(lines)

    return {
        thread: "\n".join(line(part.strip(), thread) for part in text.splitlines() if part.strip())
        for thread, text in program.items()
    }


@dataclass(frozen=True)
class Pattern:
    """A program, the outcome that would be a fault, and what makes that outcome possible.

    controls: {"verb word": other PTX}, or {"bar name": ""}; each alone must allow the fault.
    """

    program: Program
    fault: Outcome
    controls: list[dict[str, str]]
    initial: dict[str, int] = field(default_factory=dict)


PATTERNS = {
    "a mark behind a failed try of the lock is seen by the holder after its unlock": Pattern(
        {
            "b0.0": """
                own_store_release mark 1
                exchange lock 1 -> tried""",
            "b1.0": """
                exchange lock 0 -> held
                own_load_acquire mark -> seen""",
        },
        lambda v: v["tried"] == 1 and v["held"] == 1 and v["lock"] == 0 and v["seen"] == 0,
        [{"exchange lock": "atom.relaxed.gpu"}, {"exchange lock": "atom.acq_rel.cta"}],
        {"lock": 1},
    ),
    "the next holder of the lock sees the tail of the one before": Pattern(
        {
            "b0.0": """
                own_store tail 5
                exchange lock 0 -> held""",
            "b1.0": """
                exchange lock 1 -> free
                own_load tail -> seen""",
        },
        lambda v: v["free"] == 0 and v["held"] == 1 and v["seen"] == 0,
        [{"exchange lock": "atom.relaxed.gpu"}],
        {"lock": 1},
    ),
    "a doorbell covers the entry of another submitter": Pattern(
        {
            "b0.0": """
                st.weak entry 1
                own_store_release mark 1""",
            "b1.0": """
                own_load_acquire mark -> marked
                ring_word doorbell 1""",
            "cpu": """
                load_acquire doorbell -> rung
                ld.weak entry -> fetched""",
        },
        lambda v: v["marked"] == 1 and v["rung"] == 1 and v["fetched"] == 0,
        [
            {"own_store_release mark": "st.relaxed.gpu"},
            {"own_load_acquire mark": "ld.relaxed.gpu"},
            {"own_store_release mark": "st.release.cta"},
            {"ring_word doorbell": "st.relaxed.sys"},
            {"ring_word doorbell": "st.release.gpu"},
            {"load_acquire doorbell": "ld.relaxed.sys"},
        ],
    ),
    "a doorbell of a drive covers the entry of another submitter": Pattern(
        {
            "b0.0": """
                st.weak entry 1
                own_store_release mark 1""",
            "b1.0": """
                own_load_acquire mark -> marked
                ring_mmio doorbell 1""",
            "drive": """
                load_acquire doorbell -> rung
                ld.weak entry -> fetched""",
        },
        lambda v: v["marked"] == 1 and v["rung"] == 1 and v["fetched"] == 0,
        [
            {"own_store_release mark": "st.relaxed.gpu"},
            {"ring_mmio doorbell": "st.relaxed.sys"},
        ],
    ),
    "a warp's doorbell covers what its lanes acquired": Pattern(
        {
            "b0.0": """
                st.weak entry 1
                own_store_release mark 1""",
            "b1.7": """
                own_load_acquire mark -> marked
                bar warp""",
            "b1.0": """
                bar warp
                ring_word doorbell 1""",
            "cpu": """
                load_acquire doorbell -> rung
                ld.weak entry -> fetched""",
        },
        lambda v: v["marked"] == 1 and v["rung"] == 1 and v["fetched"] == 0,
        [{"bar warp": ""}, {"own_load_acquire mark": "ld.relaxed.gpu"}],
    ),
    "a lane's mark comes before its warp's failed try of the lock": Pattern(
        {
            "b0.7": """
                own_store_release mark 1
                bar warp""",
            "b0.0": """
                bar warp
                exchange lock 1 -> tried""",
            "b1.0": """
                exchange lock 0 -> held
                own_load_acquire mark -> seen""",
        },
        lambda v: v["tried"] == 1 and v["held"] == 1 and v["lock"] == 0 and v["seen"] == 0,
        [{"bar warp": ""}, {"exchange lock": "atom.relaxed.gpu"}],
        {"lock": 1},
    ),
    "the owner of a command sees its data": Pattern(
        {
            "cpu": """
                st.weak data 1
                store_release cqe 1""",
            "b0.0": """
                load_acquire cqe -> reaped
                own_store_release completion 1""",
            "b1.0": """
                own_load_acquire completion -> done
                ld.weak data -> seen""",
        },
        lambda v: v["reaped"] == 1 and v["done"] == 1 and v["seen"] == 0,
        [
            {"store_release cqe": "st.relaxed.sys"},
            {"load_acquire cqe": "ld.relaxed.sys"},
            {"load_acquire cqe": "ld.acquire.gpu"},
            {"own_store_release completion": "st.relaxed.gpu"},
            {"own_load_acquire completion": "ld.relaxed.gpu"},
        ],
    ),
    "a completion is not lost to the clearing by the CID's new owner": Pattern(
        {
            "b0.0": """
                own_store completion 0
                own_store_release mark 1""",
            "b1.0": """
                own_load_acquire mark -> marked
                ring_word doorbell 1""",
            "cpu": """
                load_acquire doorbell -> rung
                store_release cqe 1""",
            "b2.0": """
                load_acquire cqe -> reaped
                own_store_release completion 2""",
        },
        lambda v: v["marked"] == v["rung"] == v["reaped"] == 1 and v["completion"] == 0,
        [{"ring_word doorbell": "st.relaxed.sys"}, {"load_acquire cqe": "ld.relaxed.sys"}],
        {"completion": 9},
    ),
    "a CQE is read before its place is written again": Pattern(
        {
            "b0.0": """
                load_acquire cqe -> reaped
                ring_head_word head 1""",
            "cpu": """
                load_acquire head -> rung
                store_release cqe 7""",
        },
        lambda v: v["rung"] == 1 and v["reaped"] == 7,
        [{"load_acquire cqe": "ld.relaxed.sys"}],
    ),
    "a controller that fetches a command finds room for its completion": Pattern(
        {
            "b0.0": """
                ring_head_word head 1
                own_store_release completion 1""",
            "b1.0": """
                own_load_acquire completion -> done
                ring_word doorbell 1""",
            "cpu": """
                load_acquire doorbell -> rung
                load_acquire head -> room""",
        },
        lambda v: v["done"] == v["rung"] == 1 and v["room"] == 0,
        [
            {"own_store_release completion": "st.relaxed.gpu"},
            {"own_load_acquire completion": "ld.relaxed.gpu"},
        ],
    ),
    "a CQE that another lane read is read before its place is written again": Pattern(
        {
            "b0.7": """
                load_acquire cqe -> reaped
                vote reaped""",
            "b0.0": """
                vote reaped
                ring_head_word head 1""",
            "cpu": """
                load_acquire head -> rung
                vote next
                store_release cqe 7""",
        },
        lambda v: v["rung"] == 1 and v["reaped"] == 7,
        [{"vote reaped": ""}],
    ),
    "an entry is fetched before the slot's next ticket writes it": Pattern(
        {
            "cpu": """
                ld.weak entry -> fetched
                store_release cqe 1""",
            "b0.0": """
                load_acquire cqe -> reaped
                own_store_release completion 1""",
            "b1.0": """
                own_load_acquire completion -> done
                fetch_or free 1 -> before""",
            "b2.0": """
                fetch_and free 2 -> taken
                fetch_add ticket 1 -> first""",
            "b3.0": """
                fetch_add ticket 2 -> second
                st.weak entry 9""",
        },
        lambda v: (
            v["fetched"] == 9
            and v["reaped"] == v["done"] == v["taken"] == v["second"] == 1
            and v["before"] == v["first"] == 0
        ),
        [
            {"fetch_or free": "atom.relaxed.gpu"},
            {"fetch_and free": "atom.relaxed.gpu"},
            {"fetch_add ticket": "atom.relaxed.gpu"},
            {"own_load_acquire completion": "ld.relaxed.gpu"},
        ],
    ),
    "the memory of a CID is read before its next owner's command writes it": Pattern(
        {
            "b0.0": """
                ld.weak data -> used
                fetch_or free 1 -> before""",
            "b1.0": """
                fetch_and free 2 -> taken
                ring_word doorbell 1""",
            "cpu": """
                load_acquire doorbell -> rung
                st.weak data 9""",
        },
        lambda v: v["taken"] == v["rung"] == 1 and v["before"] == 0 and v["used"] == 9,
        [{"fetch_or free": "atom.relaxed.gpu"}, {"fetch_and free": "atom.relaxed.gpu"}],
    ),
    "who sees a layer's flag sees what every thread of every block moved": Pattern(
        {
            "b0.7": """
                st.weak page 1
                bar block0""",
            "b0.0": """
                bar block0
                fetch_add arrived 1 -> earlier""",
            "b1.0": """
                fetch_add arrived 2 -> last
                store_release ready 1""",
            "cpu": """
                load_acquire ready -> released
                ld.weak page -> seen""",
        },
        lambda v: v["earlier"] == 0 and v["last"] == v["released"] == 1 and v["seen"] == 0,
        [
            {"bar block0": ""},
            {"fetch_add arrived": "atom.relaxed.gpu"},
            {"store_release ready": "st.relaxed.sys"},
            {"store_release ready": "st.release.gpu"},
        ],
    ),
    "who sees a layer's flag sees the error that another block met": Pattern(
        {
            "b0.0": """
                set_if_zero error 1 -> was
                fetch_add arrived 1 -> earlier""",
            "b1.0": """
                fetch_add arrived 2 -> last
                own_load error -> known
                store_release ready 1""",
        },
        lambda v: v["was"] == v["earlier"] == 0 and v["last"] == 1 and v["known"] == 0,
        [{"fetch_add arrived": "atom.relaxed.gpu"}],
    ),
    "every thread of a resident block sees the staging whose completion one lane acquired": Pattern(
        {
            "drive": """
                st.weak staging 1
                store_release cqe 1""",
            "b0.0": """
                load_acquire cqe -> released
                bar block""",
            "b0.9": """
                bar block
                ld.weak staging -> seen""",
        },
        lambda v: v["released"] == 1 and v["seen"] == 0,
        [
            {"bar block": ""},
            {"load_acquire cqe": "ld.relaxed.sys"},
            {"load_acquire cqe": "ld.acquire.gpu"},
        ],
    ),
    "a write's doorbell covers what the block gathered": Pattern(
        {
            "b0.9": """
                st.weak staging 1
                bar block""",
            "b0.0": """
                bar block
                ring_mmio doorbell 1""",
            "drive": """
                load_acquire doorbell -> rung
                ld.weak staging -> fetched""",
        },
        lambda v: v["rung"] == 1 and v["fetched"] == 0,
        [{"bar block": ""}, {"ring_mmio doorbell": "st.relaxed.sys"}],
    ),
    "a post is read before the host writes its place again": Pattern(
        {
            "b0.0": """
                ld.weak post -> used
                store_release consumed 1""",
            "cpu": """
                load_acquire consumed -> free
                st.weak post 9""",
        },
        lambda v: v["free"] == 1 and v["used"] == 9,
        [
            {"store_release consumed": "st.relaxed.sys"},
            {"store_release consumed": "st.release.gpu"},
        ],
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_fault_is_forbidden_and_each_order_is_needed(name: str) -> None:
    pattern = PATTERNS[name]
    assert not is_allowed(spell(pattern.program, {}), pattern.fault, pattern.initial)
    for control in pattern.controls:
        program = spell(pattern.program, control)
        assert program != spell(pattern.program, {}), f"{control} changes nothing"
        assert is_allowed(program, pattern.fault, pattern.initial), f"allowed with {control}"


@pytest.mark.parametrize("name", PATTERNS)
def test_an_outcome_without_the_fault_is_possible(name: str) -> None:
    pattern = PATTERNS[name]
    assert is_allowed(
        spell(pattern.program, {}), lambda values: not pattern.fault(values), pattern.initial
    )


def test_the_patterns_use_the_verbs_that_the_code_uses() -> None:
    device = "".join(
        path.read_text() for path in sorted((KERNELS / "device").iterdir()) if path.is_file()
    )
    for name, uses in USES.items():
        text = device if name == "device" else (KERNELS / name).read_text()
        for use in uses:
            assert use in text, f"{name} no longer says {use}: change the patterns with it"


def test_every_device_verb_is_in_a_pattern() -> None:
    used = {"store_relaxed", "ring_head_mmio"} | {  # the same as ring_head_word
        line.split()[0]
        for pattern in PATTERNS.values()
        for text in pattern.program.values()
        for line in filter(None, map(str.strip, text.splitlines()))
    }
    # A relaxed load of another processor's word orders nothing: no pattern can need it.
    assert set(verbs()) - used == {"load_relaxed"}
