"""The device headers as NVRTC compiles them: cubins, and the instructions that carry the order.

No GPU is needed; what the instructions do on one is not shown here.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HEADERS = HERE.parents[1] / "kernels" / "include"
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
NEEDED = "cuda-core, cuda-bindings and nvidia-cuda-nvrtc==13.0.88 (tutti-kv[device-check])"

KERNELS = """
#include "warp_kernel.cuh"
#include "gio_uring/controller_queue.h"
extern "C" __global__ void controller_half(gio::ControllerQueue* q, gio::Sqe* out) {
  if (gio::sq_fetch(q, out)) gio::cq_post(q, gio::sqe_cid(*out), gio::kOk);
}
extern "C" __global__ void ring_word(gio::QueuePair* q) { gio::sq_ring<gio::WordDoorbell>(q); }
extern "C" __global__ void ring_mmio(gio::QueuePair* q) { gio::sq_ring<gio::MmioDoorbell>(q); }
extern "C" __global__ void reap(gio::QueuePair* q) { gio::cq_reap<gio::WordDoorbell>(q, 32); }
extern "C" __global__ void enqueue(gio::QueuePair* q, gio::Sqe* s) { gio::sq_enqueue(q, *s); }
extern "C" __global__ void look(gio::QueuePair* q, unsigned* out) { *out = gio::completion(q, 0); }
"""


def everything() -> str:
    """A source with every header that claims to compile for a device."""
    names = sorted(p.relative_to(HEADERS).as_posix() for p in HEADERS.rglob("*.h"))
    return "".join(f'#include "{name}"\n' for name in names) + KERNELS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_headers_compile_to_a_cubin(architecture: str) -> None:
    core = pytest.importorskip("cuda.core", reason=f"needs {NEEDED}")
    options = core.ProgramOptions(
        std="c++17", arch=architecture, include_path=[str(HEADERS), str(HERE)]
    )
    cubin = core.Program(everything(), "c++", options).compile("cubin").code
    assert cubin[:4] == b"\x7fELF"
    assert b"gio_warp_word" in cubin
    assert b"gio_warp_mmio" in cubin


@cache
def ptx(architecture: str) -> str:
    """PTX text of KERNELS; cuda.core would ask for the driver's library."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason=f"needs {NEEDED}")

    def call(function: Any, *arguments: object) -> tuple[Any, Any]:
        error, *rest = function(*arguments)
        return error, rest[0] if rest else None

    _, program = call(nvrtc.nvrtcCreateProgram, KERNELS.encode(), b"kernels.cu", 0, [], [])
    options = [
        f"--gpu-architecture={architecture.replace('sm', 'compute')}".encode(),
        b"-std=c++17",
        f"-I{HEADERS}".encode(),
        f"-I{HERE}".encode(),
    ]
    error, _ = call(nvrtc.nvrtcCompileProgram, program, len(options), options)
    _, nbytes = call(nvrtc.nvrtcGetProgramLogSize, program)
    log = bytes(nbytes)
    call(nvrtc.nvrtcGetProgramLog, program, log)
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, nbytes = call(nvrtc.nvrtcGetPTXSize, program)
    text = bytes(int(nbytes))
    call(nvrtc.nvrtcGetPTX, program, text)
    return text.rstrip(b"\0").decode()


def instructions(architecture: str, kernel: str) -> list[str]:
    """One kernel's PTX statements."""
    text = ptx(architecture)
    body = text.split(f".entry {kernel}(")[1].split("\n{\n")[1].split("\n}\n")[0]
    return [s.strip() for s in re.split(r"[;\n]", body) if s.strip()]


def named(architecture: str, kernel: str, *prefixes: str) -> list[str]:
    return [s for s in instructions(architecture, kernel) if s.startswith(prefixes)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["ring_mmio", "gio_warp_mmio"])
def test_an_mmio_doorbell_follows_a_system_fence(architecture: str, kernel: str) -> None:
    code = [s for s in instructions(architecture, kernel) if not s.startswith(("//", "."))]
    bells = [i for i, s in enumerate(code) if s.startswith("st.mmio")]
    assert bells
    for i in bells:
        assert code[i].startswith("st.mmio.relaxed.sys.global.u32")
        assert code[i - 1] == "fence.acq_rel.sys"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_word_doorbell_is_a_system_release(architecture: str) -> None:
    assert named(architecture, "ring_word", "st.release.sys.global.u32")
    assert not named(architecture, "ring_word", "st.mmio")
    assert not named(architecture, "gio_warp_word", "st.mmio")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["reap", "look", "ring_word", "controller_half"])
def test_the_other_side_is_read_by_system_acquires(architecture: str, kernel: str) -> None:
    assert named(architecture, kernel, "ld.acquire.sys.global.u32")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_controller_never_reads_modifies_and_writes(architecture: str) -> None:
    assert not named(architecture, "controller_half", "atom", "red")
    assert named(architecture, "controller_half", "st.release.sys.global.u32")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_read_modify_write_is_of_the_submitters_own_words(architecture: str) -> None:
    # enqueue: the ticket.  ring: lock and unlock.  reap: lock and unlock.
    assert named(architecture, "enqueue", "atom", "red")
    for statement in named(architecture, "enqueue", "atom", "red"):
        assert statement.startswith("atom.add.acq_rel.sys.global.u32")
    for kernel in ("ring_word", "ring_mmio", "reap"):
        for statement in named(architecture, kernel, "atom", "red"):
            assert statement.startswith("atom.exch.acq_rel.sys.global.b32")
    assert not named(architecture, "look", "atom", "red")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_lock_is_fenced_on_both_sides(architecture: str) -> None:
    code = [s for s in instructions(architecture, "ring_word") if not s.startswith("//")]
    locks = [i for i, s in enumerate(code) if s.startswith("atom.exch")]
    assert locks
    for i in locks:
        assert code[i - 1] == code[i + 1] == "fence.sc.sys"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_narrower_than_the_system_or_not_coherent(architecture: str) -> None:
    text = ptx(architecture)
    assert not re.search(r"\b(atom|red|fence|ld|st)\.[a-z_.0-9]*\.(cta|gpu|cluster)\b", text)
    assert not re.search(r"\bfence\.[a-z_]+\.(cta|gpu|cluster)\b", text)
    assert ".nc." not in text
    assert "ld.volatile" not in text
