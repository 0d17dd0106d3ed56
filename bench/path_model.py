"""A model of the Python code of a call: it has as many steps, each as cheap as possible.

A call is recorded: its tree of Python functions, and for each function its calls of C functions,
the attributes and items that it reads, the attributes that it writes, and its `with` blocks.  The
model has a separate function for each function of the tree, and an object for each first argument.
So it runs through as much code in as many steps, which dominates while caches are cold.  It
allocates nothing, converts no arguments and calls no native code; it only reads None, calls cheap C
functions, and takes free locks.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

_ATTRIBUTES = 8
#: Calls of C functions, which read two attributes each; and of functions that read none.
_METHODS = ("s.d.get(7)", "s.l.count(7)", "s.n.bit_length()", "s.t.find('x')", "s.y.count(b'x')")
_BUILTINS = ("abs(7)", "callable(s)", "chr(77)", "hash(7)", "id(s)", "ord('x')", "repr(7)")
#: Kind of step by bytecode.
_STEPS = {
    "LOAD_ATTR": "attribute reads",
    "LOAD_METHOD": "attribute reads",
    "STORE_ATTR": "attribute writes",
    "BINARY_SUBSCR": "items",
    "BEFORE_WITH": "locks",
}


class Frame:
    """A called Python function.  steps: its number of steps by kind.  calls: in order.

    who: ids of its code object and of its first argument.
    """

    def __init__(self, who: tuple[int, int] = (0, 0)) -> None:
        self.who = who
        self.steps = Counter[str]()
        self.calls: list[Frame] = []

    def total(self) -> Counter[str]:
        """Steps of the whole tree."""
        own = self.steps + Counter(functions=1)
        return sum((call.total() for call in self.calls), own)


def record(call: Callable[[], Any]) -> tuple[Frame, Any]:
    """Calls a Python function; returns its recorded tree on this thread, and its result."""
    root = Frame()
    stack = [root]

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            first = frame.f_locals[code.co_varnames[0]] if code.co_argcount else code
            stack[-1].calls.append(Frame((id(code), id(first))))
            stack.append(stack[-1].calls[-1])
        elif event == "return":
            stack.pop()
        elif event == "c_call":
            stack[-1].steps["C calls"] += 1

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            step = _STEPS.get(dis.opname[frame.f_code.co_code[frame.f_lasti]])
            if step is not None:
                stack[-1].steps[step] += 1
        return trace

    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        result = call()
    finally:
        sys.setprofile(None)
        sys.settrace(None)
    return root.calls[0], result


class _Object:
    """The object of functions with the same first argument."""

    def __init__(self) -> None:
        for i in range(_ATTRIBUTES):
            setattr(self, f"a{i}", None)
        self.d, self.l, self.n = dict.fromkeys(range(_ATTRIBUTES)), [7], 12345
        self.t, self.y, self.k = "model", b"model", threading.Lock()


def build(tree: Frame) -> Callable[[], None]:
    """A function that takes the same steps."""
    made: dict[str, Any] = {}
    lines: list[str] = []
    first = _define(tree, lines, made, {})
    exec("\n".join(lines), made)
    model: Callable[[], None] = made[first]
    return model


def _define(frame: Frame, lines: list[str], made: dict[str, Any], known: dict[object, str]) -> str:
    """Adds the source of a function and of the functions that it calls; returns its name."""
    calls = [_define(call, lines, made, known) for call in frame.calls]
    steps, kind = frame.steps, (frame.who, *sorted(frame.steps.items()), *calls)
    if kind in known:  # called twice
        return known[kind]
    i = len(known)
    known[kind] = f"f{i}"
    which = f"s{frame.who[1]}"
    made.setdefault(which, _Object())
    # A `with` reads its lock and calls a C function at its end, an item reads the dict.
    in_c = max(0, steps["C calls"] - steps["locks"])
    reads = max(0, steps["attribute reads"] - steps["locks"] - steps["items"])
    methods = min(in_c, reads // 2)
    body = [
        *(f"with s.k: x = {j}" for j in range(steps["locks"])),
        *(f"x = s.a{(i + j) % _ATTRIBUTES}" for j in range(reads - 2 * methods)),
        *(f"s.a{(i + j) % _ATTRIBUTES} = x" for j in range(steps["attribute writes"])),
        *(f"x = s.d[{(i + j) % _ATTRIBUTES}]" for j in range(steps["items"])),
        *(_METHODS[(i + j) % len(_METHODS)] for j in range(methods)),
        *(_BUILTINS[(i + j) % len(_BUILTINS)] for j in range(in_c - methods)),
        *(f"{call}()" for call in calls),
    ]
    lines += [f"def f{i}(x=None, s={which}):", *(f" {line}" for line in body), " return x"]
    return known[kind]
