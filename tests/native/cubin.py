"""What a cubin says about its kernels: registers, stack and instructions, from the ELF sections.

CUDA's `.nv.info` holds records of (format, attribute, size, words); the names and numbers of the
attributes are those that NVIDIA's cuobjdump prints with -elf. An instruction of compute capability
7.0 and later is 16 bytes, its opcode the low 12 bits, as `nvdisasm -hex` shows for 8.0, 9.0 and
10.0. No GPU and no CUDA tool is needed.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SIZED_VALUE = 4  # EIFMT_SVAL: the size and that many bytes follow
_REGISTERS = 0x2F  # EIATTR_REGCOUNT
_FRAME = 0x11  # EIATTR_FRAME_SIZE
_STACK = 0x12  # EIATTR_MIN_STACK_SIZE
_INSTRUCTION = struct.Struct("<QQ")

LDG = 0x981  # a load of global memory
LDC = 0xB82  # a load of constant memory, at an address of the lane's own
SHFL_BFLY = 0xF89  # a shuffle whose distance and mask are constants
MEMBAR = 0x992  # waits until the thread's earlier accesses are visible in a scope
#: Four bits of a MEMBAR's upper half, as compiling each fence of PTX alone shows them.
_MEMBARS = {0x3: "sc.sys", 0xB: "acq_rel.sys", 0x2: "sc.gpu", 0xA: "acq_rel.gpu", 0x8: "cta"}


@dataclass
class Kernel:
    """One function: registers of a thread, bytes of local memory for frames and for the stack."""

    registers: int = -1
    frame_nbytes: int = -1
    stack_nbytes: int = -1


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _sections(cubin: bytes) -> dict[str, bytes]:
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    headers = [_SECTION.unpack_from(cubin, offset + i * _SECTION.size) for i in range(count)]
    table = cubin[headers[names][4] :][: headers[names][5]]
    return {_text(table, h[0]): cubin[h[4] :][: h[5]] for h in headers}


def kernels(cubin: bytes) -> dict[str, Kernel]:
    """The functions of a cubin by name."""
    sections = _sections(cubin)
    symbols = sections[".symtab"]
    names = [
        _text(sections[".strtab"], _SYMBOL.unpack_from(symbols, at)[0])
        for at in range(0, len(symbols), _SYMBOL.size)
    ]
    fields = {_REGISTERS: "registers", _FRAME: "frame_nbytes", _STACK: "stack_nbytes"}
    found: dict[str, Kernel] = {}
    info = sections[".nv.info"]
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form == _SIZED_VALUE and attribute in fields:
            symbol, value = struct.unpack_from("<II", info, at + 4)
            setattr(found.setdefault(names[symbol], Kernel()), fields[attribute], value)
        at += 4 + (size if form == _SIZED_VALUE else 0)
    return found


def opcodes(cubin: bytes, kernel: str) -> list[int]:
    """The instructions of one kernel, in the order they lie in."""
    code = _sections(cubin)[f".text.{kernel}"]
    return [low & 0xFFF for low, _ in _INSTRUCTION.iter_unpack(code)]


def fences(cubin: bytes, kernel: str) -> Counter[str]:
    """How many memory barriers of each order and scope one kernel has."""
    code = _sections(cubin)[f".text.{kernel}"]
    found = (high for low, high in _INSTRUCTION.iter_unpack(code) if low & 0xFFF == MEMBAR)
    return Counter(_MEMBARS[high >> 12 & 0xF] for high in found)
