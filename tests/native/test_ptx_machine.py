"""Executes the PTX that NVRTC emits for each kernel, behind the stand-in's cuLaunchKernel.

It shows that the inline assembly does what the C++ beside it does, not how a GPU orders it, and
nothing of what ptxas makes of it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
from native.nvrtc import compile_ptx
from native.programs import KERNELS
from native.ptx_text import Decoder, PtxError
from native.stand_in import TESTS, TIMEOUT_S, attempt, run_tests

from tutti.gio_uring.gpu.device_code import DeviceSource

pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)
ROUND = str(TESTS / "native/ptx_round.py")
EVERY = [(kind, bell) for bell in ("word", "mmio") for kind in ("launch", "resident", "persistent")]
#: Those for a GPU that take seconds, and how many pass.
SMALL = (
    "test_driver or travel and kernel or come_back and launch or own[host] or damage and resident"
)
SMALL_FILES = ("test_driver.py", "test_host_engine.py", "test_store_engines.py")
SMALL_COUNT = 18
#: What the engine `launch` runs with doorbells that are words.
SHORT = ("submit_word", "drain_word", "move", "verify")


def compiled(folder: Path, kernels: tuple[str, ...] = ()) -> str:
    """PTX of the kernels in `folder`, of these entry points or of all."""
    text = (folder / "device/kernels.cu").read_text()
    if kernels:
        head, body = text.split('extern "C" {')
        every = re.findall(r"__global__.*?\n}\n", body, re.DOTALL)
        chosen = [e for e in every if re.search(rf"gio_({'|'.join(kernels)})\(", e)]
        text = "\n".join([head, 'extern "C" {', *chosen, "}"])
    return compile_ptx(text, "sm_90", [folder / "include", folder / "device"])


@pytest.fixture
def decoded(environment: dict[str, str]) -> Path:
    """The project's kernels as the machine reads them, kept by what they were made from."""
    made_from = DeviceSource(KERNELS).digest() + (TESTS / "native/ptx_text.py").read_bytes()
    name = hashlib.sha256(made_from).hexdigest()[:16]
    path = Path(environment["XDG_CACHE_HOME"]) / f"ptx-{name}"
    if not path.exists():
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(Decoder(compiled(KERNELS)).text())
        fresh.replace(path)
    return path


def rounds(environment: dict[str, str], path: Path, *pairs: tuple[str, str]) -> tuple[int, str]:
    """Transfers by the kernels of a module; the exit code and what was printed."""
    words = [word for pair in pairs for word in pair]
    return attempt([ROUND, *words], {**environment, "STAND_IN_PTX": str(path)})


def test_every_kernel_moves_and_digests(environment: dict[str, str], decoded: Path) -> None:
    code, out = rounds(environment, decoded, *EVERY)
    assert code == 0, out
    assert out.splitlines() == [f"{kind} {bell} right" for kind, bell in EVERY]


def test_small_tests_for_a_gpu_pass(environment: dict[str, str], decoded: Path, seed: int) -> None:
    files = [f"tests/gpu/{name}" for name in SMALL_FILES]
    out = run_tests({**environment, "STAND_IN_PTX": str(decoded)}, seed, *files, "-k", SMALL)
    assert f"{SMALL_COUNT} passed" in out, out


Edit = Callable[[str], str]


def planted(folder: Path, edit: Edit) -> str:
    """PTX with a mistake in the inline assembly of the atomics."""
    copytree(KERNELS / "include", folder / "include")
    copytree(KERNELS / "device", folder / "device")
    path = folder / "include/gio_uring/atomics.h"
    changed = edit(path.read_text())
    assert changed != path.read_text() or edit is unchanged
    path.write_text(changed)
    return compiled(folder, SHORT)


def unchanged(text: str) -> str:
    return text


def narrow(text: str) -> str:
    """An acquire of 16 bits into a register of 32, which PTX allows: the phase bit is lost."""
    return text.replace("ld.acquire.sys.global.u32", "ld.acquire.sys.global.u16")


def unguarded(text: str) -> str:
    """An exchange that the compiler takes for arithmetic, as it is neither volatile nor has a
    clobber: where its result is not used, as in unlocking, it goes."""
    return re.sub(
        r'asm volatile\(("atom.exch[^)]*"=r"\(old\)\s*:[^:]*): "memory"\)', r"asm(\1)", text
    )


def swapped(text: str) -> str:
    """A compare-and-swap that compares with what it should store."""
    return text.replace("b32 %0, [%1], 0, %2;", "b32 %0, [%1], %2, 0;")


@pytest.mark.parametrize(
    ("edit", "is_right"), [(unchanged, True), (narrow, False), (unguarded, False), (swapped, False)]
)
def test_mistakes_of_inline_assembly_are_caught(
    edit: Edit, is_right: bool, environment: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "kernels"
    path.write_text(Decoder(planted(tmp_path / "source", edit)).text())
    code, out = rounds(environment, path, ("launch", "word"))
    assert (code == 0 and out == "launch word right\n") == is_right, out


WRONG = {
    "a 32-bit address": (
        "st.release.sys.global.u32 [%rd1], %r1;",
        "st.release.sys.global.u32 [%r1], %r1;",
    ),
    "a register too narrow": ("ld.u32 %r1, [%rd1];", "ld.u64 %r1, [%rd1];"),
    "an opcode that is not known": ("ld.u32 %r1, [%rd1];", "ld.volatile.u32 %r1, [%rd1];"),
    "an order that stores do not have": (
        "st.u32 [%rd1], %r1;",
        "st.acquire.sys.global.u32 [%rd1], %r1;",
    ),
    "a register that is not declared": ("add.s32 %r1, %r1, %r2;", "add.s32 %r1, %r1, %x2;"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_statement_that_is_not_valid_is_an_error(name: str) -> None:
    module = """.version 9.0
    .visible .entry wrong(.param .u64 wrong_param_0)
    { .reg .b32 %r<3>; .reg .b64 %rd<2>;
      ld.param.u64 %rd1, [wrong_param_0];
      STATEMENT
      ret;
    }"""
    right, wrong = WRONG[name]
    assert " ret " in Decoder(module.replace("STATEMENT", right)).text()
    with pytest.raises(PtxError, match="line 5"):
        Decoder(module.replace("STATEMENT", wrong))
