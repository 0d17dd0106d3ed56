"""The device code as NVRTC compiles it: cubins, and the instructions that carry the order.

No GPU is needed; what the instructions do on one is not shown here.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
from native import cubin
from native.nvrtc import DEVICE, HEADERS, NEEDED, compile_ptx

# Each takes a compilation of many seconds.
ARCHITECTURES = [
    "sm_90",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "sm_100")),
]

KERNELS = """
#include "kernels.cu"
#include "gio_uring/controller_queue.h"
extern "C" __global__ void controller_half(gio::ControllerQueue* q, gio::Sqe* out) {
  if (gio::sq_fetch(q, out)) gio::cq_post(q, gio::sqe_cid(*out), gio::kOk);
}
extern "C" __global__ void ring_word(gio::QueuePair* q) { gio::sq_ring<gio::WordDoorbell>(q); }
extern "C" __global__ void ring_mmio(gio::QueuePair* q) { gio::sq_ring<gio::MmioDoorbell>(q); }
extern "C" __global__ void reap(gio::QueuePair* q) { gio::cq_reap<gio::WordDoorbell>(q, 32); }
extern "C" __global__ void warp_reap(gio::QueuePair* q) { gio::warp_reap<gio::WordDoorbell>(q); }
extern "C" __global__ void enqueue(gio::QueuePair* q, gio::Sqe* s) { gio::sq_enqueue(q, *s); }
extern "C" __global__ void look(gio::QueuePair* q, unsigned* out) { *out = gio::completion(q, 0); }
"""


def everything() -> str:
    """A source with every header that claims to compile for a device."""
    names = sorted(p.relative_to(HEADERS).as_posix() for p in HEADERS.rglob("*.h"))
    return "".join(f'#include "{name}"\n' for name in names) + KERNELS


# Registers a thread may have.  Warps that work a queue alone stay small, so that they fit beside
# whatever runs; blocks of 256 threads that move slices fit an SM of 65536 registers, those of a
# kernel that does nothing else twice.
REGISTERS_MAX = {"submit": 64, "drain": 64, "move": 128, "verify": 128}
REGISTERS_MAX |= {"resident": 224, "persistent": 224}
RINGING = ["submit", "drain", "resident", "persistent"]
ENTRY_POINTS = ["gio_move", "gio_verify"]
ENTRY_POINTS += [f"gio_{name}_{bell}" for name in RINGING for bell in ("word", "mmio")]


@cache
def machine_code(architecture: str) -> bytes:
    """A cubin of everything."""
    core = pytest.importorskip("cuda.core", reason=f"needs {NEEDED}")
    include = [str(HEADERS), str(DEVICE)]
    options = core.ProgramOptions(std="c++17", arch=architecture, include_path=include)
    return bytes(core.Program(everything(), "c++", options).compile("cubin").code)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_keep_to_their_registers_and_spill_nothing(architecture: str) -> None:
    found = cubin.kernels(machine_code(architecture))
    for name in ENTRY_POINTS:
        kernel = found[name]
        assert 0 < kernel.registers <= REGISTERS_MAX[name.split("_")[1]], name
        assert (kernel.frame_nbytes, kernel.stack_nbytes) == (0, 0), f"{name} uses local memory"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["gio_move", "gio_verify", "gio_resident_word"])
def test_a_digest_loads_a_tile_at_once_and_sums_without_constant_memory(
    architecture: str, kernel: str
) -> None:
    code = cubin.opcodes(machine_code(architecture), kernel)
    loads = [i for i, opcode in enumerate(code) if opcode == cubin.LDG]
    sums = [i for i, opcode in enumerate(code) if opcode == cubin.SHFL_BFLY]
    # The tile's eight loads, close behind one another, and the shuffles of its four blocks, of
    # which each adds up three times four words.
    bursts = [first for first, last in zip(loads, loads[7:], strict=False) if last - first < 128]
    tiles = [at for at in bursts if sum(at < i < at + 1000 for i in sums) >= 48]
    assert len(tiles) == 1
    end = [i for i in sums if i > tiles[0]][47]
    assert cubin.LDC not in code[tiles[0] : end]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["gio_move", "gio_resident_word"])
def test_a_copy_has_several_loads_under_way_whatever_the_alignment(
    architecture: str, kernel: str
) -> None:
    code = [s for s in instructions(architecture, kernel) if re.match(r"(@%p\d+ )?(ld|st)\.", s)]
    kinds = "".join("L" if ".u8" in s and "ld." in s else "S" if ".u8" in s else "-" for s in code)
    assert "LLLLLLLL" in kinds.replace("-", "")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_look_in_vain_meets_no_fence(architecture: str) -> None:
    code = instructions(architecture, "warp_reap")
    first = next(i for i, s in enumerate(code) if s.startswith("ld.acquire.sys"))
    assert not any("fence" in s or s.startswith(("atom", "red")) for s in code[:first])


def test_a_kernel_with_an_array_of_its_own_is_seen_to_use_local_memory() -> None:
    core = pytest.importorskip("cuda.core", reason=f"needs {NEEDED}")
    source = """extern "C" __global__ void spills(const int* from, int* to) {
      int own[64];
      for (int i = 0; i < 64; ++i) own[from[i] & 63] = i;
      for (int i = 0; i < 64; ++i) to[i] = own[from[i + 64] & 63];
    }"""
    options = core.ProgramOptions(std="c++17", arch="sm_90")
    code = bytes(core.Program(source, "c++", options).compile("cubin").code)
    assert cubin.kernels(code)["spills"].frame_nbytes > 0


@cache
def ptx(architecture: str) -> str:
    """PTX text of KERNELS."""
    return compile_ptx(KERNELS, architecture)


def instructions(architecture: str, kernel: str) -> list[str]:
    """One kernel's PTX statements."""
    text = ptx(architecture)
    body = text.split(f".entry {kernel}(")[1].split("\n{\n")[1].split("\n}\n")[0]
    return [s.strip() for s in re.split(r"[;\n]", body) if s.strip()]


def named(architecture: str, kernel: str, *prefixes: str) -> list[str]:
    return [s for s in instructions(architecture, kernel) if s.startswith(prefixes)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["ring_mmio", *(f"gio_{name}_mmio" for name in RINGING)])
def test_a_drives_tail_doorbell_follows_a_system_fence(architecture: str, kernel: str) -> None:
    code = [s for s in instructions(architecture, kernel) if not s.startswith(("//", "."))]
    bells = [i for i, s in enumerate(code) if s.startswith("st.mmio")]
    assert bells
    assert all(code[i].startswith("st.mmio.relaxed.sys.global.u32") for i in bells)
    # The tail's; the head of a completion queue gives back what an acquire has read.
    fences = [i for i, s in enumerate(code) if s == "fence.acq_rel.sys"]
    assert fences
    assert all(i + 1 in bells for i in fences)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_word_doorbell_is_a_system_release(architecture: str) -> None:
    assert named(architecture, "ring_word", "st.release.sys.global.u32")
    assert not named(architecture, "ring_word", "st.mmio")
    for name in RINGING:
        assert not named(architecture, f"gio_{name}_word", "st.mmio"), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["reap", "controller_half", "gio_persistent_word"])
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
        assert statement.startswith("atom.add.acq_rel.gpu.global.u32")
    for kernel in ("ring_word", "ring_mmio", "reap"):
        for statement in named(architecture, kernel, "atom", "red"):
            assert statement.startswith("atom.exch.acq_rel.gpu.global.b32")
    assert not named(architecture, "look", "atom", "red")


#: Barriers of system scope that a kernel needs: the doorbell, the flag of a layer, and the place
#: of a post that was read.  Each waits until the GPU's writes have crossed PCIe.
SYSTEM_BARRIERS = {"submit": 1, "drain": 2, "resident": 2, "persistent": 3, "move": 1}
SYSTEM_BARRIERS |= {"verify": 1}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ENTRY_POINTS)
def test_only_what_another_processor_waits_for_has_a_system_barrier(
    architecture: str, kernel: str
) -> None:
    found = cubin.fences(machine_code(architecture), kernel)
    assert set(found) <= {"acq_rel.gpu", "acq_rel.sys"}, "no fence of sequential consistency"
    assert found["acq_rel.sys"] == SYSTEM_BARRIERS[kernel.split("_")[1]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("fence", ["sc.sys", "acq_rel.sys", "sc.gpu", "acq_rel.gpu"])
def test_each_fence_is_seen_as_what_it_is(architecture: str, fence: str) -> None:
    core = pytest.importorskip("cuda.core", reason=f"needs {NEEDED}")
    source = """extern "C" __global__ void fenced(int* p) {
      *p = 1;
      asm volatile("fence.FENCE;" ::: "memory");
    }""".replace("FENCE", fence)
    options = core.ProgramOptions(std="c++17", arch=architecture)
    code = bytes(core.Program(source, "c++", options).compile("cubin").code)
    assert cubin.fences(code, "fenced") == {fence: 1}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_is_narrower_than_the_gpu_or_not_coherent(architecture: str) -> None:
    text = ptx(architecture)
    assert not re.search(r"\b(atom|red|fence|ld|st)\.[a-z_.0-9]*\.(cta|cluster)\b", text)
    assert not re.search(r"\bfence\.[a-z_]+\.(cta|cluster)\b", text)
    assert ".nc." not in text
    assert "ld.volatile" not in text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["gio_move", "gio_verify"])
def test_a_layer_is_published_by_a_system_release(architecture: str, kernel: str) -> None:
    assert named(architecture, kernel, "st.release.sys.global.u32")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["gio_move", "gio_verify", "gio_resident_word"])
def test_slices_are_read_16_bytes_a_lane(architecture: str, kernel: str) -> None:
    assert named(architecture, kernel, "ld.global.L1::no_allocate.v4.u32")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", ["gio_drain_word", "gio_resident_word", "gio_persistent_word"])
def test_polls_have_a_clock_and_stand_aside(architecture: str, kernel: str) -> None:
    assert any("%globaltimer" in s for s in instructions(architecture, kernel))
    assert named(architecture, kernel, "nanosleep")
