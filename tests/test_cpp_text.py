"""The reader behind the house rules for C++ sees what a reader would see."""

from __future__ import annotations

import pytest
from cpp_text import cpp_functions, without_comments


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("int f(int a) {\n  return a;\n}\n", [("f", 1, 3)]),
        ("namespace a {\nstruct B {\n  int g() const noexcept {\n  }\n};\n}\n", [("g", 3, 4)]),
        ("void h() {\n  if (x) {\n  }\n  for (;;) {\n  }\n}\n", [("h", 1, 6)]),
        ('extern "C" {\nint f(\n    int a) {\n}\n}\n', [("f", 2, 4)]),
        ('const char* s = "{";\nauto f() -> int {\n}\n', [("f", 2, 3)]),
        ("int a[] = {f(1), {2}};\nvoid g() {}\n", [("g", 2, 2)]),
        ("X::X(int a) : a_(a), b_{1} {\n}\n", [("X::X", 1, 2)]),
        ("X::X(int a) : a_{a}, b_(1) {\n}\n", [("X::X", 1, 2)]),
        ("#define M() {\\\n  {\nvoid g() {\n}\n", [("g", 3, 4)]),
        ("struct S { int a{0}; int b = 1'000; };\nclass alignas(64) T {\n};\n", []),
        ("void f() {\n  auto g = [](int a) {\n  };\n  g(1);\n}\n", [("f", 1, 5)]),
        ("// void f() {\n/* { */ char c = '{';\nstruct A f() {\n}\n", [("f", 3, 4)]),
        ("template <typename T>\nT f(T a) {\n}\n", [("f", 1, 3)]),
    ],
)
def test_functions_are_found(source: str, expected: list[tuple[str, int, int]]) -> None:
    assert cpp_functions(source) == expected


def test_comments_go_and_strings_stay() -> None:
    source = 'a("//");  // fence\n/* two\nlines */ b;\n'
    assert without_comments(source).split() == ['a("//");', "b;"]
    assert without_comments(source).count("\n") == source.count("\n")
