"""The house rules that a program can check. CONTRIBUTING.md explains each of them."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cpp_text import cpp_functions, without_comments

ROOT = Path(__file__).parent.parent
SHIPPED = ("tutti/", "kernels/", "bench/", "integration/")
CPP_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
# Not everything that lies in a checkout is text, or small: a pool is neither.
TEXTS = (".py", *CPP_SUFFIXES, ".md", ".txt", ".toml", ".in", ".sh", ".json", ".ci/run", "Makefile")
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
RESULT_NBYTES_MAX = 2 << 20
# Lines of Python and C++ that are shipped. Raise it in the change that needs it, and say why there.
CODE_LINES_MAX = 81_670

# Longer than the limits, by "path" or "path:function", with the reason. May only shrink.
SIZE_EXCEPTIONS: dict[str, str] = {}
# "path:function" of waits without a deadline and loops without a bound, with the reason.
WAIT_EXCEPTIONS: dict[str, str] = {}


class Function(NamedTuple):
    path: str
    name: str
    first: int
    last: int

    @property
    def id(self) -> str:
        return f"{self.path}:{self.name}"


@functools.cache
def files() -> list[str]:
    """Files of the project: what git tracks or would track, or all of them outside a checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=True)
        names = listing.stdout.decode().split("\0")[:-1]
    except (OSError, subprocess.CalledProcessError):
        folders = (*SHIPPED, "docs/", "tests/")
        paths = [p for folder in folders for p in (ROOT / folder).rglob("*")]
        names = [str(p.relative_to(ROOT)) for p in paths if "__pycache__" not in p.parts]
    return sorted(name for name in set(names) if (ROOT / name).is_file())


@functools.cache
def text(path: str) -> str:
    return (ROOT / path).read_bytes().decode("utf-8", errors="replace")


def sources(folders: tuple[str, ...], *suffixes: str) -> list[str]:
    return [p for p in files() if p.startswith(folders) and p.endswith(suffixes)]


def code(*folders: str) -> list[str]:
    return sources(folders, ".py", *CPP_SUFFIXES)


def mentions(paths: list[str], pattern: str) -> list[str]:
    """`path:line: text` of every line that the pattern matches, whatever the case."""
    regex = re.compile(pattern, re.IGNORECASE)
    return [
        f"{path}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(text(path).splitlines(), 1)
        if regex.search(line)
    ]


def report(found: list[str], rule: str) -> None:
    assert not found, f"{rule}:\n  " + "\n  ".join(found)


def python_functions(path: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(path, node.name, node.lineno, node.end_lineno or node.lineno)


@functools.cache
def functions() -> list[Function]:
    found = [f for p in sources((*SHIPPED, "tests/"), ".py") for f in python_functions(p)]
    for path in sources((*SHIPPED, "tests/"), *CPP_SUFFIXES):
        found += [Function(path, *span) for span in cpp_functions(text(path))]
    return found


def enclosing(path: str, line: int) -> str:
    """`path:function` of the innermost function around a line."""
    around = [f for f in functions() if f.path == path and f.first <= line <= f.last]
    return max(around, key=lambda f: f.first).id if around else path


def too_long() -> dict[str, int]:
    lengths = {p: text(p).count("\n") for p in code(*SHIPPED, "tests/")}
    long = {path: n for path, n in lengths.items() if n > FILE_LINES_MAX}
    for function in functions():
        if (lines := function.last - function.first + 1) > FUNCTION_LINES_MAX:
            long[function.id] = lines
    return long


def test_files_and_functions_are_short() -> None:
    found = [f"{name}: {n} lines" for name, n in too_long().items() if name not in SIZE_EXCEPTIONS]
    report(found, f"files <= {FILE_LINES_MAX} lines, functions <= {FUNCTION_LINES_MAX}: split them")


def test_no_size_exception_outlives_its_need() -> None:
    report(sorted(SIZE_EXCEPTIONS.keys() - too_long().keys()), "take these out of SIZE_EXCEPTIONS")


def test_shipped_code_stays_below_its_ceiling() -> None:
    lines = sum(text(path).count("\n") for path in code(*SHIPPED))
    assert lines <= CODE_LINES_MAX, (
        f"{lines} lines: delete some, or raise CODE_LINES_MAX and say why"
    )


def test_gio_uring_knows_nothing_of_what_it_carries() -> None:
    paths = code("tutti/gio_uring/", "kernels/include/gio_uring/")
    words = r"\bkv|_kv|kv_|kvcache|kvlayout|key-value"
    report(mentions(paths, words), "gio_uring knows NVMe and rings; name what it moves bytes")


def test_scheduler_knows_no_device() -> None:
    report(mentions(code("tutti/scheduler/"), "nvme|gio_uring"), "the scheduler is pure policy")


ORDERING = re.compile(r"fence|acquire|release(?!d)|volatile|__ATOMIC_|seq_cst", re.IGNORECASE)
# Names that hold such a word and order no memory: CIDs are acquired, a drive's cache is volatile.
ORDER_FREE = {"cid_acquire", "cid_release", "kHasVolatileCache"}


def orders_memory(line: str) -> bool:
    return any(ORDERING.search(w) for w in re.findall(r"\w+", line) if w not in ORDER_FREE)


def unpaired(source: str, reach: int = 3) -> list[int]:
    """Numbers of the lines that order memory without a "pairs with" within `reach` lines."""
    lines = source.lower().splitlines()
    found = []
    for index, line in enumerate(without_comments(source).splitlines()):
        around = lines[max(0, index - reach) : index + reach + 1]
        if orders_memory(line) and not any("pairs with" in near for near in around):
            found.append(index + 1)
    return found


def test_every_fence_names_its_pair() -> None:
    found = [
        f"{path}:{number}: {text(path).splitlines()[number - 1].strip()}"
        for path in sources(("kernels/",), *CPP_SUFFIXES)
        for number in unpaired(text(path))
    ]
    report(found, 'memory ordering without a comment "pairs with ..." within three lines')


def test_no_order_free_name_outlives_its_need() -> None:
    words = {w for p in sources(("kernels/",), *CPP_SUFFIXES) for w in re.findall(r"\w+", text(p))}
    report(sorted(ORDER_FREE - words), "take these out of ORDER_FREE")


def test_the_fence_rule_sees_code_and_not_comments() -> None:
    assert unpaired("// a fence\nint x;\n") == []
    assert unpaired("__atomic_store_n(p, v, __ATOMIC_RELEASE);\n") == [1]
    assert unpaired("// Pairs with poll().\n\n\nstore(p, __ATOMIC_RELEASE);\n") == []
    assert unpaired("// Pairs with poll().\n\n\n\nstore(p, __ATOMIC_RELEASE);\n") == [5]
    assert unpaired('asm volatile("fence.acq_rel.sys;");  // pairs with poll()\n') == []


WAITS = {"acquire", "communicate", "get", "join", "result", "wait"}
SUBPROCESS = {"call", "check_call", "check_output", "run"}


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def waits_forever(call: ast.Call) -> bool:
    """Whether a call waits without a deadline: `event.wait()`, `subprocess.run(command)`."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    keywords = {k.arg for k in call.keywords if not is_none(k.value)}
    if isinstance(function.value, ast.Name) and function.value.id == "subprocess":
        return function.attr in SUBPROCESS and not keywords & {"timeout", None}
    arguments = [a for a in call.args if not is_none(a)]
    return function.attr in WAITS and not arguments and not keywords


def endless(source: str) -> list[tuple[int, str]]:
    """(line, what) of every wait without a deadline and every loop without a condition."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
            found.append((node.lineno, "while True"))
        elif isinstance(node, ast.Call) and waits_forever(node):
            found.append((node.lineno, ast.unparse(node)))
    return found


def test_every_python_wait_has_a_deadline() -> None:
    found = {
        f"{enclosing(path, line)}": f"{path}:{line}: {what}"
        for path in sources(SHIPPED, ".py")
        for line, what in endless(text(path))
    }
    report([found[k] for k in found.keys() - WAIT_EXCEPTIONS.keys()], "give these a deadline")
    report(sorted(WAIT_EXCEPTIONS.keys() - found.keys()), "take these out of WAIT_EXCEPTIONS")


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("while True: pass", 1),
        ("while n: pass", 0),
        ("event.wait()", 1),
        ("event.wait(timeout=None)", 1),
        ("event.wait(timeout_s)", 0),
        ("', '.join(names)", 0),
        ("thread.join()", 1),
        ("lock.acquire(timeout=1)", 0),
        ("mapping.get(key)", 0),
        ("subprocess.run(['ls'])", 1),
        ("subprocess.run(['ls'], timeout=5)", 0),
    ],
)
def test_the_wait_rule(source: str, count: int) -> None:
    assert len(endless(source)) == count


def test_no_cpp_function_has_more_than_eight_parameters() -> None:
    found = []
    for path in [p for p in files() if p.startswith("kernels/") and p.endswith(CPP_SUFFIXES)]:
        source = without_comments(text(path))
        for start in re.finditer(r"\w\(", source):
            commas = depth = 0
            for end in range(start.end() - 1, len(source)):
                depth += (source[end] in "([{") - (source[end] in ")]}")
                commas += source[end] == "," and depth == 1
                if depth == 0:
                    break
            if commas > 7 and re.match(r"\)\s*(?:const\b|noexcept\b|[{;])", source[end:]):
                found.append(f"{path}:{source[: start.start()].count(chr(10)) + 1}")
    report(found, "give these a struct for their parameters")


def test_every_cpp_loop_without_a_condition_states_its_bound() -> None:
    loop = re.compile(r"\bfor\s*\(\s*;\s*;|\bwhile\s*\(\s*(true|1)\s*\)")
    found = []
    for path in sources(("kernels/",), *CPP_SUFFIXES):
        lines = text(path).splitlines()
        for index, line in enumerate(without_comments(text(path)).splitlines()):
            near = " ".join(lines[max(0, index - 3) : index + 4]).lower()
            if loop.search(line) and "bound" not in near:
                found.append(f"{path}:{index + 1}: {line.strip()}")
    report(found, 'say in a comment within three lines what it is "bounded by"')


def init_extras(path: str) -> list[str]:
    """Statements of an __init__.py beyond its docstring; tutti's own may load exports lazily, and
    tell their types to type checkers.
    """
    body = ast.parse(text(path)).body
    if ast.get_docstring(ast.parse(text(path))) is None:
        return [f"{path}: no docstring"]
    lazy = ast.FunctionDef | ast.Assign | ast.AnnAssign
    extras = []
    for node in body[1:]:
        future = isinstance(node, ast.ImportFrom) and node.module in ("__future__", "typing")
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if path != "tutti/__init__.py" or not (future or typing or isinstance(node, lazy)):
            extras.append(f"{path}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return extras


def test_init_files_hold_a_docstring_alone() -> None:
    paths = [p for p in sources(SHIPPED, ".py") if p.endswith("__init__.py")]
    assert paths
    report([extra for p in paths for extra in init_extras(p)], "move these into a module")


@functools.cache
def defined(path: str) -> set[str]:
    """Names that a module may define, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_what_tests_import_exists() -> None:
    """mypy checks the package alone, and tests that need a GPU or SGLang run seldom."""
    modules, missing = {}, []
    for path in sources(SHIPPED, ".py"):
        dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        modules[dotted if dotted.split(".")[0] == "tutti" else f"tutti.{dotted}"] = path
    for path in sources(("tests/", "examples/"), ".py"):
        for node in ast.walk(ast.parse(text(path))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "tutti":
                continue
            known = defined(modules[node.module]) if node.module in modules else set()
            missing += [
                f"{path}:{node.lineno}: {node.module}.{alias.name}"
                for alias in node.names
                if alias.name not in known and f"{node.module}.{alias.name}" not in modules
            ]
    report(missing, "the package has no such names")


def test_every_folder_has_an_import_contract() -> None:
    contracts = tomllib.loads(text("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    covered = {name for one in contracts if one.get("exhaustive") for name in one["containers"]}
    paths = [Path(p) for p in sources(SHIPPED, ".py") if not p.endswith("__init__.py")]
    folders = {path.parent for path in paths}
    folders = {f for f in folders if sum(path.parent == f for path in paths) > 1}
    names = {
        ".".join(f.parts) if f.parts[0] == "tutti" else ".".join(("tutti", *f.parts))
        for f in folders
    }
    report(sorted(names - covered), "give these folders layers in pyproject.toml")


def test_files_are_named_by_their_role() -> None:
    vague = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}
    report([p for p in code(*SHIPPED, "tests/") if Path(p).stem in vague], "name the role")


def test_nothing_depends_on_one_machine() -> None:
    # The look-behind spares addresses such as example.org/home/page.
    paths = [p for p in files() if p.endswith(TEXTS) and not p.startswith("bench/results/")]
    places = "|".join(("work", "root", "home"))
    report(mentions(paths, rf"(?<![\w.]){'/'}({places})/"), "paths of one machine")


def test_no_unfinished_business() -> None:
    report(mentions(code(*SHIPPED, "tests/"), r"\bTO" r"DO\b|\bFIX" r"ME\b"), "do it or leave it")


def test_results_are_small() -> None:
    results = [p for p in files() if p.startswith("bench/results/")]
    large = [p for p in results if (ROOT / p).stat().st_size > RESULT_NBYTES_MAX]
    report(large, f"results above {RESULT_NBYTES_MAX} bytes: keep a summary")
