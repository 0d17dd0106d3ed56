"""Triton's gather and scatter: in its interpreter on a CPU, and compiled for GPUs that are absent.

The interpreter shows what the program computes, not how a GPU runs it.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest

# The environment of SGLang's tests is the one that has triton and torch.
pytestmark = pytest.mark.sglang
NEEDED = "needs torch and triton (pip install '.[cuda]')"


@pytest.fixture
def interpreted() -> Any:
    """The module as the interpreter runs it."""
    pytest.importorskip("triton", reason=NEEDED)
    pytest.importorskip("torch", reason=NEEDED)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        module = importlib.import_module("tutti.kernels.triton.table_copy")
        yield importlib.reload(module)
    finally:
        del os.environ["TRITON_INTERPRET"]


def draw(seed: int, words: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Places of nine segments that do not overlap, in an order of their own, and paged memory."""
    random = np.random.default_rng(seed)
    places = random.permutation(12)[:9] * (words + 5) + 3
    memory = random.integers(-(2**31), 2**31, 12 * (words + 5) + 8, dtype=np.int64)
    return places.astype(np.int64), memory.astype(np.int32)


@pytest.mark.parametrize("words", [1, 100, 4096, 5000])
def test_scatter_and_gather(
    interpreted: ModuleType, words: int, pytestconfig: pytest.Config
) -> None:
    torch = pytest.importorskip("torch")
    places, memory = draw(pytestconfig.option.seed, words)
    right = memory.copy()
    staged = np.arange(9 * words, dtype=np.int32)
    for segment, place in enumerate(places):
        right[place : place + words] = staged[segment * words :][:words]
    paged = torch.from_numpy(memory)
    table = torch.from_numpy(places)
    launch = interpreted.grid(9, words)
    interpreted.scatter[launch](
        torch.from_numpy(staged), paged, table, words, BLOCK=interpreted.BLOCK_WORDS
    )
    assert np.array_equal(paged.numpy(), right)
    back = torch.zeros(9 * words, dtype=torch.int32)
    interpreted.gather[launch](back, paged, table, words, BLOCK=interpreted.BLOCK_WORDS)
    assert np.array_equal(back.numpy(), staged)


@pytest.mark.parametrize("name", ["scatter", "gather"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_for_a_gpu_that_is_absent(name: str, capability: int) -> None:
    triton = pytest.importorskip("triton", reason=NEEDED)
    compiler = pytest.importorskip("triton.compiler")
    backends = pytest.importorskip("triton.backends.compiler")
    jit = pytest.importorskip("triton.runtime.jit")
    module = importlib.import_module("tutti.kernels.triton.table_copy")
    kernel = jit.JITFunction(getattr(module, name).fn)
    signature = {"staged": "*i32", "paged": "*i32", "places": "*i64", "words": "i32"}
    source = compiler.ASTSource(
        fn=kernel,
        signature={**signature, "BLOCK": "constexpr"},
        constexprs={"BLOCK": module.BLOCK_WORDS},
    )
    target = backends.GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"num_warps": 4})
    assert made.asm["cubin"][:4] == b"\x7fELF"
