"""PTX text by NVRTC, which needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HEADERS = Path(__file__).parents[2] / "kernels" / "include"
DEVICE = HEADERS.parent / "device"
NEEDED = "cuda-core, cuda-bindings and nvidia-cuda-nvrtc==13.0.88 (tutti-kv[device-check])"


def compile_ptx(source: str, architecture: str, folders: Sequence[Path] = (HEADERS, DEVICE)) -> str:
    """PTX of a program that includes from `folders`; cuda.core would ask for the driver's library.

    Skips without NVRTC.
    """
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason=f"needs {NEEDED}")

    def call(function: Any, *arguments: object) -> tuple[Any, Any]:
        error, *rest = function(*arguments)
        return error, rest[0] if rest else None

    _, program = call(nvrtc.nvrtcCreateProgram, source.encode(), b"checked.cu", 0, [], [])
    words = [f"--gpu-architecture={architecture.replace('sm', 'compute')}", "-std=c++17"]
    options = [word.encode() for word in [*words, *(f"-I{folder}" for folder in folders)]]
    error, _ = call(nvrtc.nvrtcCompileProgram, program, len(options), options)
    _, nbytes = call(nvrtc.nvrtcGetProgramLogSize, program)
    log = bytes(nbytes)
    call(nvrtc.nvrtcGetProgramLog, program, log)
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, nbytes = call(nvrtc.nvrtcGetPTXSize, program)
    text = bytes(int(nbytes))
    call(nvrtc.nvrtcGetPTX, program, text)
    return text.rstrip(b"\0").decode()
