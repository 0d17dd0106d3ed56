"""PTX text as the list of instructions that ptx_machine.h executes.

Decodes what NVRTC emits for the kernels, by the PTX ISA 9.0; any other statement is a `PtxError`,
as is a register whose width is not the one that the instruction's type takes.  One line each:

    function NAME THREADS SLOTS RESULTS PARAMETERS      THREADS is 0 where it is only called
    constant SLOT VALUE | special SLOT NAME | data SLOT OFFSET
    i LINE KEY BITS SIGNED SPACE GUARD NEGATED TARGET OFFSET SLOTS...

A slot is a register, a parameter or a constant of the function; results and parameters come first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Widths of operands: t as the type, w twice as wide, 4 for 32 bits, p a predicate.
_ARITHMETIC = {
    **dict.fromkeys(("add", "sub", "and", "or", "xor", "min", "max", "div", "rem"), "ttt"),
    **dict.fromkeys(("mul.lo", "mul.hi"), "ttt"),
    **dict.fromkeys(("not", "neg", "brev"), "tt"),
    **dict.fromkeys(("shl", "shr"), "tt4"),
    **dict.fromkeys(("popc", "bfind.shiftamt"), "4t"),
    **{f"setp.{how}": "ptt" for how in ("eq", "ne", "lt", "le", "gt", "ge")},
    "mul.wide": "wtt",
    "mad.lo": "tttt",
    "prmt": "tttt",
    "bfi": "ttt44",
    "selp": "tttp",
}
_SPECIAL = {"%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x"}
_SPACES = {"": 0, "global": 1, "shared": 2, "const": 3}
_ORDERED = {"ld": ("relaxed", "acquire"), "st": ("relaxed", "release", "mmio.relaxed")}
_TYPE = r"([busp])(8|16|32|64|red)"
_MEMORY = re.compile(
    r"(ld|st)(?:\.(relaxed|acquire|release|mmio\.relaxed)\.(?:sys|gpu))?"
    rf"(?:\.(global|shared|const|param))?(?:\.L1::no_allocate)?(?:\.v([24]))?\.{_TYPE}"
)
_ATOMIC = re.compile(r"atom\.(exch|add|or|and|cas)\.(?:acq_rel|relaxed)\.gpu\.global\.(b32|u32)")
_STATEMENT = re.compile(
    r"\s*(?:\.(?:target|version|address_size)\s+\S+\s*\n"
    r"|(?P<scope>[{}])|(?P<label>\$?\w+):(?!:)"
    r"|(?P<head>(?:\.visible\s+)?\.(?:entry|func)\b[^{;]*)|(?P<plain>[^;]*);)"
)


class PtxError(Exception):
    """A statement that is not valid or not known, with its line."""


def _bits(letter: str, size: str) -> int:
    return 1 if letter + size == "pred" else int(size)


@dataclass
class _Function:
    name: str
    threads: int
    n_results: int
    n_parameters: int
    widths: list[int] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    families: dict[str, int] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    code: list[list[int | str]] = field(default_factory=list)

    def slot(self, name: str, width: int) -> int:
        self.names[name] = len(self.widths)
        self.widths.append(width)
        return self.names[name]


class Decoder:
    """Reads a whole module; `text()` is what the machine reads."""

    def __init__(self, source: str) -> None:
        self._functions: list[_Function] = []
        self._shared: dict[str, int] = {}
        self._shared_nbytes = 0
        self._data = b""
        self._places: dict[str, int] = {}
        self._now: _Function | None = None
        self._declared: dict[str, _Function] = {}
        self._line = 1
        for statement in self._statements(re.sub(r"//[^\n]*", "", source)):
            try:
                self._take(statement)
            except (ValueError, KeyError, IndexError, PtxError) as error:
                raise PtxError(f"line {self._line}: {statement!r}: {error}") from error

    def _statements(self, source: str) -> Iterator[str]:
        """Declarations, labels, instructions and heads of functions."""
        at, depth = 0, 0
        while found := _STATEMENT.match(source, at):
            self._line += source.count("\n", at, found.end())
            at = found.end()
            depth += {"{": 1, "}": -1}.get(found["scope"] or "", 0)
            if found["scope"] == "}" and depth == 0:
                self._now = None
            if found["head"] and source[at] == ";":  # defined later
                function = self._head(found["head"])
                self._declared[function.name] = function
            elif (
                text := (found["label"] and found["label"] + ":") or found["head"] or found["plain"]
            ):
                yield text.strip()
        if source[at:].strip():
            raise PtxError(f"line {self._line}: not understood: {source[at : at + 80]!r}")

    def _take(self, text: str) -> None:
        if re.match(r"(\.visible\s+)?\.(entry|func)\b", text):
            self._now = self._head(text)
            self._declared[self._now.name] = self._now
            self._functions.append(self._now)
        elif text.startswith("."):
            self._declare(text)
        elif self._now is not None and text.endswith(":"):
            self._now.labels[text[:-1]] = len(self._now.code)
        else:
            self._instruction(text)

    def _head(self, text: str) -> _Function:
        found = re.match(
            r"(?:\.visible\s+)?\.(entry|func)\s*(\([^)]*\))?\s*(\w+)\s*\(([^)]*)\)(.*)", text, re.S
        )
        if found is None:
            raise PtxError("not a function")
        kind, results, name, parameters, rest = found.groups()
        form = r"\.param\s+\.[bu](32|64)\s+(\w+)"
        every = [re.findall(form, part or "") for part in (results, parameters)]
        limit = re.search(r"\.maxntid\s+(\d+), 1, 1", rest)
        threads = int(limit[1]) if limit else 1024
        function = _Function(name, threads if kind == "entry" else 0, *map(len, every))
        for width, parameter in every[0] + every[1]:
            function.slot(parameter, int(width))
        return function

    def _declare(self, text: str) -> None:
        if text.startswith(".pragma"):
            return
        register = re.fullmatch(rf"\.(reg|param)\s+\.{_TYPE}\s+(%?\w+)(<\d+>)?", text)
        memory = re.fullmatch(
            rf"\.(shared|const|global)\s+\.align\s+(\d+)\s+\.{_TYPE}\s+([\w$]+)(?:\[(\d+)\])?(?:\s*=\s*(.*))?",
            text,
        )
        if register and self._now:
            _, letter, size, name, family = register.groups()
            if family:
                self._now.families[name] = _bits(letter, size)
            else:
                self._now.slot(name, _bits(letter, size))
        elif memory:
            space, align, letter, size, name, count, content = memory.groups()
            nbytes = _bits(letter, size) // 8 * int(count or 1)
            if space == "shared":
                self._shared[name] = -(-self._shared_nbytes // int(align)) * int(align)
                self._shared_nbytes = self._shared[name] + nbytes
            elif space == "const" and size == "8":
                values = bytes(int(n) for n in content.strip("{}").split(","))
                self._data += b"\0" * (-len(self._data) % int(align))
                self._places[name] = len(self._data)
                self._data += values.ljust(nbytes, b"\0")
        else:
            raise PtxError("not known")

    # -- instructions

    def _operand(self, text: str, width: int, *, wider: bool = False) -> int:
        """The slot of an operand that must have a width."""
        now = self._now
        assert now is not None
        if text in now.names:
            slot = now.names[text]
        elif text.rstrip("0123456789") in now.families and text not in _SPECIAL:
            slot = now.slot(text, now.families[text.rstrip("0123456789")])
        else:
            return self._constant(text, width)
        has = now.widths[slot]
        if has != width and not (wider and has > width > 1):
            raise PtxError(f"{text} has {has} bits, not {width}")
        return slot

    def _constant(self, text: str, width: int) -> int:
        assert self._now is not None
        if text in _SPECIAL and width == 32:
            line = f"special {{}} {text[1:]}"
        elif text in self._shared and width == 64:
            line = f"constant {{}} {self._shared[text]}"
        elif text in self._places and width == 64:
            line = f"data {{}} {self._places[text]}"
        elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            line = f"constant {{}} {int(text.rstrip('U'), 0) % (1 << width)}"
        else:
            raise PtxError(f"{text} is not known")
        if line not in self._now.constants:
            self._now.constants[line] = len(self._now.widths)
            self._now.widths.append(width)
        return self._now.constants[line]

    def _instruction(self, text: str) -> None:
        found = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*)", text, re.S)
        if found is None or self._now is None:
            raise PtxError("not an instruction")
        negated, guard, opcode, rest = found.groups()
        operands = [
            t.strip() for t in re.findall(r"\{[^}]*\}|\([^)]*\)|\[[^]]*\]|[^,\s][^,]*", rest)
        ]
        head: list[int | str] = [self._operand(guard, 1) if guard else -1, int(bool(negated))]
        for part in (self._control, self._memory, self._moves, self._arithmetic):
            decoded = part(opcode, operands)
            if decoded is not None:
                key, bits, signed, space, target, offset, slots = decoded
                line: list[int | str] = [self._line, key, bits, int(signed), space, *head]
                self._now.code.append([*line, target, offset, *slots])
                return
        raise PtxError(f"{opcode} is not known")

    _Decoded = tuple[str, int, bool, int, "int | str", int, list[int]]

    def _control(self, opcode: str, operands: list[str]) -> _Decoded | None:
        plain = {"ret": 0, "fence.acq_rel.sys": 0, "bar.sync": 1, "bar.warp.sync": 1}
        slots: list[int] = []
        target: int | str = 0
        if opcode in ("bra", "bra.uni"):
            opcode, target = "bra", operands[0]
        elif opcode == "call.uni":
            names = re.findall(r"\w+", operands[0] + operands[2])
            function = self._declared[operands[1]]
            opcode, target = "call", function.name
            slots = [self._operand(n, w) for n, w in zip(names, function.widths, strict=False)]
            if len(slots) != function.n_results + function.n_parameters:
                raise PtxError("other parameters than the function's")
        elif opcode == "nanosleep.u32":
            slots = [self._operand(operands[0], 32)]
        elif opcode == "vote.sync.ballot.b32":
            slots = [self._operand(t, w) for t, w in zip(operands, (32, 1, 32), strict=True)]
        elif opcode in ("shfl.sync.bfly.b32", "shfl.sync.idx.b32"):
            to, _, valid = operands[0].partition("|")
            slots = [self._operand(t, 32) for t in (to, *operands[1:])] + [self._operand(valid, 1)]
        elif opcode in plain and len(operands) == plain[opcode]:
            slots = [self._operand(t, 32) for t in operands]
        else:
            return None
        return opcode, 32, False, 0, target, 0, slots

    def _address(self, text: str) -> tuple[int, int]:
        base, _, offset = text.strip("[]").partition("+")
        return self._operand(base, 64), int(offset or 0)

    def _memory(self, opcode: str, operands: list[str]) -> _Decoded | None:
        if found := _ATOMIC.fullmatch(opcode):
            name, kind = found.groups()
            if (name == "add") != (kind == "u32"):
                return None
            slot, offset = self._address(operands[1])
            slots = [slot, *(self._operand(t, 32) for t in (operands[0], *operands[2:]))]
            if len(slots) != (4 if name == "cas" else 3):
                raise PtxError("too few operands")
            return f"atom.{name}", 32, False, _SPACES["global"], 0, offset, slots
        found = _MEMORY.fullmatch(opcode)
        if found is None:
            return None
        name, order, space, vector, letter, size = found.groups()
        if order and (order not in _ORDERED[name] or vector or space != "global"):
            return None
        bits = _bits(letter, size)
        address, values = operands if name == "st" else reversed(operands)
        if space == "param":
            parameter = self._operand(address.strip("[]").removesuffix("+0"), bits)
            pair = [parameter, self._operand(values, bits)]
            return "mov", bits, False, 0, 0, 0, pair if name == "st" else pair[::-1]
        parts = values.strip("{}").split(",")
        if len(parts) != int(vector or 1):
            raise PtxError("the vector has another length")
        slot, offset = self._address(address)
        slots = [slot, *(self._operand(t.strip(), bits, wider=True) for t in parts)]
        key = f"{name}.ordered" if order else name
        return key, bits, letter == "s", _SPACES[space or ""], 0, offset, slots

    def _moves(self, opcode: str, operands: list[str]) -> _Decoded | None:
        if opcode == "mov.u64" and operands[1] == "%globaltimer":
            return "clock", 64, False, 0, 0, 0, [self._operand(operands[0], 64)]
        if found := re.fullmatch(r"cvt\.[us](8|16|32|64)\.([us])(8|16|32|64)", opcode):
            to, letter, source = int(found[1]), found[2], int(found[3])
            slots = [self._operand(operands[0], to), self._operand(operands[1], source)]
            return "cvt", to, letter == "s", 0, 0, source, slots
        if opcode in ("cvta.to.global.u64", "cvta.shared.u64", "cvta.to.shared.u64"):
            slots = [self._operand(t, 64) for t in operands]
            key = "mov" if opcode == "cvta.to.global.u64" else opcode.removesuffix(".u64")
            return key, 64, False, 0, 0, 0, slots
        if not (found := re.fullmatch(rf"mov\.{_TYPE}", opcode)):
            return None
        bits = _bits(*found.groups())
        for key, whole, parts in (("pack", *operands), ("unpack", *operands[::-1])):
            if parts.startswith("{"):
                each = parts.strip("{}").split(",")
                width = bits // len(each)
                slots = [self._operand(t.strip(), width) for t in each]
                return key, width, False, 0, 0, 0, [self._operand(whole, bits), *slots]
        return "mov", bits, False, 0, 0, 0, [self._operand(t, bits) for t in operands]

    def _arithmetic(self, opcode: str, operands: list[str]) -> _Decoded | None:
        name, _, kind = opcode.rpartition(".")
        found = re.fullmatch(_TYPE, kind)
        if found is None or name not in _ARITHMETIC:
            return None
        bits = _bits(*found.groups())
        widths = [{"t": bits, "w": 2 * bits, "4": 32, "p": 1}[c] for c in _ARITHMETIC[name]]
        slots = [self._operand(t, w) for t, w in zip(operands, widths, strict=True)]
        return name, bits, found[1] == "s", 0, 0, 0, slots

    def text(self) -> str:
        places = {function.name: i for i, function in enumerate(self._functions)}
        lines = [f"shared {self._shared_nbytes}", f"bytes {self._data.hex() or '00'}"]
        for function in self._functions:
            counts = (function.threads, len(function.widths), function.n_results)
            parameters = function.widths[function.n_results :][: function.n_parameters]
            lines.append(" ".join(map(str, ("function", function.name, *counts, *parameters))))
            lines += [line.format(slot) for line, slot in function.constants.items()]
            for code in function.code:
                if isinstance(code[7], str):
                    code[7] = (places if code[1] == "call" else function.labels)[code[7]]
                lines.append(" ".join(map(str, ("i", *code))))
        return "\n".join([*lines, ""])
