"""Reads C++ as text, far enough for the house rules: comments, braces, lengths of functions."""

from __future__ import annotations

import re
from dataclasses import dataclass

TOKEN = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"
    | "(?:\\.|[^"\\\n])*" | (?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+' """,
    re.DOTALL | re.VERBOSE,
)
DIRECTIVE = re.compile(r"^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
# How the text before a function's body ends: parameters, then qualifiers or a return type.
SIGNATURE_END = re.compile(r"\)\s*(?:(?:const|noexcept|override|final|mutable)\b\s*|->[^;{}=]*)*$")
INITIALISERS = re.compile(r"\)\s*(?:noexcept\s*)?:\s*[^:].*$", re.DOTALL)
CONTROL = re.compile(r"^\s*(?:if|for|while|switch|catch|else|do)\b")


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def without_comments(source: str) -> str:
    """The source with its comments blanked; lines keep their numbers."""
    return TOKEN.sub(lambda m: _blank(m) if m.group().startswith("/") else m.group(), source)


def _bare(source: str) -> str:
    """The source without comments, strings and preprocessor lines; lines keep their numbers."""
    return DIRECTIVE.sub(_blank, TOKEN.sub(_blank, source))


@dataclass
class _Scope:
    kind: str  # "function", "scope" (namespace, class) or "braces" (initialisers, statements)
    name: str
    first: int


def _open(header: str, line: int) -> _Scope:
    first = line - header.strip().count("\n")
    if CONTROL.match(header) or header.rstrip().endswith("="):
        return _Scope("braces", "", first)
    initialisers = INITIALISERS.search(header)
    if initialisers and re.search(r"\w\s*$", header) and "?" not in header:
        return _Scope("braces", header, first)  # a member's {value}: the body is still to come
    if SIGNATURE_END.search(header) or initialisers:
        before = header[: initialisers.start() + 1] if initialisers else header
        name = re.search(r"([\w:~]+|operator\s*\S+)\s*\(", before)
        return _Scope("function", name.group(1) if name else "lambda", first)
    return _Scope("scope", "", first)


def cpp_functions(source: str) -> list[tuple[str, int, int]]:
    """(name, first line, last line) of every outermost function; lambdas count as their function.

    A brace counter, not a parser: bodies split by the preprocessor confuse it.
    """
    found: list[tuple[str, int, int]] = []
    stack: list[_Scope] = []
    header, line = "", 1
    for character in _bare(source):
        line += character == "\n"
        if character == "{":
            stack.append(_open(header, line))
            header = ""
        elif character == "}" and stack:
            scope = stack.pop()
            inside = any(outer.kind == "function" for outer in stack)
            if scope.kind == "function" and not inside:
                found.append((scope.name, scope.first, line))
            header = f"{scope.name}() " if scope.name and scope.kind == "braces" else ""
        elif character == ";":
            header = ""
        else:
            header += character
    return found
