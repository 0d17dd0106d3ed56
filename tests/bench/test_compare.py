"""Paired rounds, and what a result says of its machine."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tutti import native
from tutti.base.terminal import progress
from tutti.bench import freshness
from tutti.bench.compare import cases
from tutti.bench.compare import run as compare
from tutti.bench.compare.index_cost import measure
from tutti.bench.compare.paired import ComparedSystem, Round
from tutti.bench.compare.paired import compare as compare_pairs
from tutti.bench.environment import command_line, commit_of, describe
from tutti.bench.freshness import (
    CHANGED,
    DEPENDS,
    GPU_BENCHES,
    UNKNOWN,
    depends,
    has_history,
    why_stale,
)
from tutti.bench.store_results import MANIFEST
from tutti.bench.summary import NOT_MEASURED, STALE, STATE, pages_of, render
from tutti.errors import ConfigError
from tutti.gio_uring.memory import HostBuffer

ROOT = Path(__file__).parents[2]
RESULTS_PAGE, RESULTS = ROOT / "docs/results.md", ROOT / "bench/results"
#: Modules that describe and draw, and change no number.
SHOWS = {
    "writable",
    "environment",
    "plots",
    "charts",
    "freshness",
    "summary",
    "figures",
}
#: Some of their bench's files import the store; these results come from the others.
OPEN_NO_STORE = {"slack"}
STORES = {"tutti", "tutti.store", "tutti.store.open"}
#: Packages whose code decides what a result shows, even where no store is opened.
CHOOSES = {"placement", "transfers", "scheduler", "cluster", "node", "profiles"}


def rounds(log: list[str], name: str, speed: float, cpu: float) -> ComparedSystem:
    number = count()

    def run() -> Round:
        log.append(name)
        return Round(speed * (1000 if next(number) == 0 else 1), cpu)

    return ComparedSystem(name, run)


def test_rounds_alternate_and_the_first_is_thrown_away() -> None:
    log: list[str] = []
    a, b = rounds(log, "a", 2.0, 0.3), rounds(log, "b", 1.0, 0.1)
    result = compare_pairs(a, b, pairs=3, progress=progress, twin=False)
    assert "".join(log) == "ba" + "ab" + "ba" + "ab"
    assert result["speed_ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert result["cpu_ratio"]["median"] == pytest.approx(3.0)
    assert result["cpu_difference_s_per_gb"]["median"] == pytest.approx(0.2)
    assert result["a"]["gb_per_s"] == [2.0] * 3
    assert "noise" not in result


def test_the_twin_is_the_noise_floor() -> None:
    log: list[str] = []
    a, b = rounds(log, "a", 2.0, 0.3), rounds(log, "b", 1.0, 0.0)
    result = compare_pairs(a, b, pairs=2, progress=progress)
    assert "".join(log) == "bba" + "abb" + "bba"
    assert result["noise"]["speed_ratio"]["median"] == 1.0
    assert result["cpu_ratio"] is None
    json.dumps(result)


def test_a_bound_takes_part_in_every_pair() -> None:
    log: list[str] = []
    a, b, c = (
        rounds(log, name, speed, 0.1) for name, speed in (("a", 2.0), ("b", 1.0), ("c", 3.0))
    )
    result = compare_pairs(a, b, pairs=2, progress=progress, bound=c)
    assert "".join(log) == "cbba" + "abbc" + "cbba"
    assert result["bound"]["speed_ratio"]["median"] == 3.0
    assert result["noise"]["speed_ratio"]["median"] == 1.0


def test_files_move_after_half_of_the_pairs() -> None:
    log: list[str] = []
    a, b = rounds(log, "a", 2.0, 0.3), rounds(log, "b", 1.0, 0.1)
    move = partial(log.append, ", moved, ")
    compare_pairs(a, b, pairs=3, progress=progress, twin=False, move=move)
    assert "".join(log) == "ba" + "ab" + ", moved, " + "ba" + "ab"


def test_no_pairs_are_refused() -> None:
    system = rounds([], "a", 1.0, 1.0)
    with pytest.raises(ConfigError, match="0 pairs"):
        compare_pairs(system, system, pairs=0, progress=progress)


def test_a_case_that_cannot_run_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["index", "--dir", str(tmp_path / "absent"), "--out", str(tmp_path)]) == 3
    assert "tutti.bench.compare.run: " in capsys.readouterr().err


def test_python_makes_one_call_for_all_slices_of_a_timed_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, slices = native.lib(), list[int]()

    def digest(isa: int, where: int, sizes: int, count: int) -> int:
        slices.append(count)
        return int(real.tutti_xxh3_64_isa(isa, where, sizes, count))

    library = SimpleNamespace(tutti_xxh3_64_isa=digest, tutti_isa_best=real.tutti_isa_best)
    library.tutti_read_lines = real.tutti_read_lines
    stand_in = SimpleNamespace(lib=lambda: library, address=native.address)
    monkeypatch.setattr(cases, "native", stand_in)
    monkeypatch.setattr(cases, "HostBuffer", lambda nbytes: HostBuffer(nbytes // 1024))
    setup: Any = SimpleNamespace(compare=lambda a, b: {"a": a.round(), "b": b.round()})
    measured = cases.digest(setup)["1 GiB"]
    assert slices == [4], "1 MiB in slices of 256 KiB"
    assert measured["a"].gb_per_s > 0 < measured["b"].gb_per_s


def test_the_index_is_recovered(tmp_path: Path) -> None:
    result = measure(str(tmp_path), 1500)
    assert result["after_a_crash"]["objects"] >= 1500
    assert result["after_a_clean_close"]["objects"] == result["after_a_crash"]["objects"]
    assert 0 < result["index_nbytes_per_object"] <= 64
    assert not list(tmp_path.iterdir())


def test_the_latency_of_long_prompts_in_the_index(tmp_path: Path) -> None:
    few = ["--records", "5000", "--pairs", "1", "--out", str(tmp_path)]
    assert compare.main(["index-latency", "--dir", str(tmp_path), *few]) == 0
    cells = json.loads((tmp_path / "index-latency.json").read_text())["cells"]
    assert list(cells) == ["128K tokens", "256K tokens", "512K tokens", "1024K tokens"]
    assert [cell["pages"] for cell in cells.values()] == [2048, 4096, 8192, 16384]
    for cell in cells.values():
        assert min(cell["hash_ms"], cell["insert_ms"], cell["lookup_ms"]) > 0


def test_a_result_names_neither_the_machine_nor_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["tutti"])  # a command may have any words, and so a short name
    text = json.dumps(describe(tmp_path))
    assert socket.gethostname() not in text
    assert str(Path.cwd()) not in text
    assert {"cpu", "kernel", "filesystem", "disk", "commit"} <= describe(tmp_path).keys()
    assert command_line(["/usr/bin/x", "--dir", os.sep + "a/b", "n=1"]) == "x --dir b n=1"


@pytest.mark.parametrize("page", pages_of(RESULTS_PAGE), ids=lambda page: page.stem)
def test_pages_show_the_raw_results_and_their_state(page: Path) -> None:
    text = page.read_text()
    rendered = render(text, RESULTS)
    if not has_history(RESULTS):
        text = re.sub(f"{re.escape(STALE)}({CHANGED}|{UNKNOWN})", "", text).replace(STATE, "")
    assert rendered == text, "run python -m tutti.bench.summary docs/results.md bench/results"


@pytest.mark.parametrize("page", pages_of(RESULTS_PAGE), ids=lambda page: page.stem)
def test_a_page_that_links_to_a_result_has_its_state(page: Path) -> None:
    text = page.read_text()
    linked = set(re.findall(r"bench/results/([\w-]+)\.(?:json|png|svg)", text))
    assert linked <= states_in(text)


@pytest.mark.parametrize("page", pages_of(RESULTS_PAGE), ids=lambda page: page.stem)
def test_a_paragraph_with_a_number_of_a_result_has_its_state(page: Path) -> None:
    """Or its section has the whole result, with its state below the table."""
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
        shown = set(re.findall(r"<!-- result: ([\w/-]+) -->", section))
        for paragraph in section.split("\n\n"):
            quoted = set(re.findall(r"<!-- (?:value|bar): ([\w/-]+) ", paragraph))
            assert quoted <= states_in(paragraph) | shown, paragraph


def states_in(text: str) -> set[str]:
    """Results whose state the text shows."""
    return set(re.findall(r"<!-- (?:result|state): ([\w/-]+) -->", text))


def test_every_result_is_shown_and_known() -> None:
    shown = "".join(page.read_text() for page in pages_of(RESULTS_PAGE))
    for figure in (ROOT / "docs/figures").glob("*.csv"):
        assert f"<!-- state: figures/{figure.stem} -->" in shown
    for file in RESULTS.glob("*.json"):
        result = json.loads(file.read_text())
        assert result["machine"]["commit"]
        if file.stem != MANIFEST:
            assert depends(file.stem, result) and f": {file.stem} -->" in shown, file.name


def imports(file: Path) -> set[str]:
    """Names of modules, and of what is imported from them."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("name", DEPENDS)
def test_a_result_depends_on_all_that_its_bench_imports(name: str) -> None:
    """Modules of bench/ by their imports; one that opens a store depends on all of the store."""
    known = [ROOT / path for path in DEPENDS[name]]
    apart = [ROOT / path for path in GPU_BENCHES if path not in DEPENDS[name]]
    sources = [path for path in known if path.is_relative_to(ROOT / "bench")]
    unread = [
        file for path in sources for file in (path.rglob("*.py") if path.is_dir() else [path])
    ]
    seen: set[Path] = set()
    others: set[str] = set()
    while unread:
        file = unread.pop()
        if file in seen or file.stem in SHOWS or file.parent.name in SHOWS:
            continue
        if file not in known and any(file == path or path in file.parents for path in apart):
            continue
        seen.add(file)
        assert any(file == path or path in file.parents for path in known), file
        needed = imports(file)
        of_store = name in OPEN_NO_STORE and bool(needed & STORES)
        for module in needed:
            parts = module.split(".")
            other = ROOT.joinpath("bench", *parts[2:]).with_suffix(".py")
            if parts[:2] == ["tutti", "bench"] and other.exists():
                unread.append(other)
            elif not of_store:
                others.add(module)
    for file in (ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in others):
        if file.parent.name in CHOOSES and file.exists():
            assert any(file == path or path in file.parents for path in known), file
    if others & STORES:
        assert set(DEPENDS["threads"]) - {"bench/threads.py"} <= set(DEPENDS[name])
        assert {"tutti/store.py", "tutti/transfers", "tutti/scheduler"} <= set(DEPENDS[name])


def run_git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    command = ["git", *identity, *arguments]
    return subprocess.check_output(command, cwd=folder, text=True).strip()


def committed(folder: Path, files: dict[str, str]) -> Callable[..., str]:
    """Runs git in a repository, whose only commit has these files."""
    git = partial(run_git, folder)
    git("init", "-q")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git("add", ".")
    git("commit", "-qm", "one")
    return git


def result_of(name: str, git: Callable[..., str]) -> dict[str, Any]:
    """A result that was measured with the last commit."""
    return {"benchmark": name, "machine": {"commit": git("rev-parse", "HEAD")}}


def test_a_result_is_stale_when_its_code_has_changed(tmp_path: Path) -> None:
    assert not has_history(tmp_path)
    git = committed(tmp_path, {"bench/ring.py": "1"})
    result = {"benchmark": "ring", "machine": {"commit": git("rev-parse", "--short=12", "HEAD")}}
    assert has_history(tmp_path)
    assert not why_stale("ring", result, tmp_path)
    (tmp_path / "bench/other.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "other")
    assert not why_stale("ring", result, tmp_path)
    (tmp_path / "bench/ring.py").write_text("2")
    assert why_stale("ring", result, tmp_path) == CHANGED
    assert commit_of(tmp_path).endswith("+dirty")
    unknown = {"benchmark": "ring", "machine": {"commit": "0123456789ab"}}
    assert why_stale("ring", unknown, tmp_path) == UNKNOWN


def test_what_a_result_measured_is_known_after_its_commit_has_left_the_history(
    tmp_path: Path,
) -> None:
    git = committed(tmp_path, {"bench/ring.py": "1"})
    result = result_of("ring", git)
    (tmp_path / "bench/results").mkdir()
    (tmp_path / "bench/results/ring.json").write_text(json.dumps(result))
    freshness.write_lock(tmp_path)
    git("commit", "-q", "--amend", "-m", "the same under another name")
    assert not why_stale("ring", result, tmp_path)
    freshness.write_lock(tmp_path)
    assert not why_stale("ring", result, tmp_path)
    (tmp_path / "bench/ring.py").write_text("2")
    assert why_stale("ring", result, tmp_path) == CHANGED
    (tmp_path / freshness.LOCK).unlink()
    assert why_stale("ring", result, tmp_path) == UNKNOWN


def test_a_figure_is_stale_when_the_code_behind_its_rows_has_changed(tmp_path: Path) -> None:
    git = committed(tmp_path, {"bench/simulate/server.py": "1"})
    results = tmp_path / "bench/results"
    for folder in (results, tmp_path / "docs/figures"):
        folder.mkdir(parents=True)
    rows = f"a,simulated,{git('rev-parse', 'HEAD')}\nb,published,\n"
    (tmp_path / "docs/figures/one.csv").write_text(f"system,source,commit\n{rows}")
    page = "Figure 1<!-- state: figures/one --><!-- end -->"
    assert render(page, results) == page
    (tmp_path / "bench/simulate/server.py").write_text("2")
    assert render(page, results) == page.replace(" --><", f" -->{STATE}<", 1)


def test_comments_and_names_of_files_make_no_result_stale(tmp_path: Path) -> None:
    folder = "tutti/gio_uring"
    files = {
        f"{folder}/one.py": '"""One."""\n\n\ndef f():\n    """It is one."""\n    return 1\n',
        f"{folder}/two.py": "from tutti.gio_uring.one import f\n\nf()\n",
        f"{folder}/old.h": '#include "one.h"\nint f();  // one\n',
        f"{folder}/README.md": "One.\n",
    }
    git, place = committed(tmp_path, files), tmp_path / folder
    result = result_of("threads", git)
    (place / "one.py").rename(place / "first.py")
    (place / "first.py").write_text("def f():\n    return 1  # which is one\n")
    (place / "two.py").write_text("from tutti.gio_uring.first import f\n\nf()\n")
    (place / "old.h").write_text('// Of one.\n#include "first.h"\nint f();  // one\n')
    (place / "README.md").write_text("Two.\n")
    git("add", ".")
    assert not why_stale("threads", result, tmp_path)
    (place / "first.py").write_text("def f():\n    return 2\n")
    assert why_stale("threads", result, tmp_path) == CHANGED
    (place / "first.py").unlink()
    assert why_stale("threads", result, tmp_path) == CHANGED


def test_texts_of_errors_and_log_lines_make_no_result_stale(tmp_path: Path) -> None:
    code = 'def f(n):\n    _log.warning("%d is odd", n)\n    raise ValueError(f"{n} is odd")\n'
    result = result_of("threads", committed(tmp_path, {"tutti/gio_uring/one.py": code}))
    file = tmp_path / "tutti/gio_uring/one.py"
    file.write_text(code.replace("is odd", "is not even").replace('f"{', 'f"the number {'))
    assert not why_stale("threads", result, tmp_path)
    for old, new in (("ValueError", "KeyError"), ("{n}", "{n + 1}"), ('odd", n', 'odd", n + 1')):
        assert old in code
        file.write_text(code.replace(old, new))
        assert why_stale("threads", result, tmp_path) == CHANGED
    file.write_text(code + 'NAME = "n"\n')
    assert why_stale("threads", result, tmp_path) == CHANGED


def test_what_handles_the_failure_of_a_medium_counts_for_results_about_failures(
    tmp_path: Path,
) -> None:
    code = """from tutti.errors import MediumError, PoolMoved

try:
    f()
except (PoolMoved, KeyError):
    g()
except PoolMoved:
    g()
"""
    git = committed(tmp_path, {"tutti/gio_uring/one.py": code})
    result, about = (result_of(name, git) for name in ("threads", "fuzz"))
    file = tmp_path / "tutti/gio_uring/one.py"
    file.write_text(code.replace("PoolMoved:\n    g()", "(PoolMoved, MediumError):\n    h()"))
    assert not why_stale("threads", result, tmp_path)
    assert why_stale("fuzz", about, tmp_path) == CHANGED
    file.write_text(code.replace("KeyError):\n    g()", "KeyError):\n    h()"))
    assert why_stale("threads", result, tmp_path) == CHANGED, "KeyError is none of a medium"


def test_what_shows_a_result_makes_none_stale(tmp_path: Path) -> None:
    names, code = ("bench/threads.py", "tutti/gio_uring/rows.py"), "def rows_of(n):\n    return n\n"
    result = result_of("threads", committed(tmp_path, dict.fromkeys(names, code)))
    bench, core = (tmp_path / name for name in names)
    bench.write_text("def rows_of(n):\n    return -n\n\n\ndef notes_of(n):\n    return []\n")
    assert not why_stale("threads", result, tmp_path)
    core.write_text("def rows_of(n):\n    return -n\n")
    assert why_stale("threads", result, tmp_path) == CHANGED, "only in bench"
    core.write_text(code)
    bench.write_text("def run(n):\n    return n\n")
    assert why_stale("threads", result, tmp_path) == CHANGED


def test_code_of_gpus_makes_only_results_that_name_it_stale(tmp_path: Path) -> None:
    git = committed(tmp_path, {"tutti/gio_uring/gpu/one.py": "1"})
    found = {name: result_of(name, git) for name in ("submit", "threads")}
    (tmp_path / "tutti/gio_uring/gpu/one.py").write_text("2")
    stale = {name: why_stale(name, result, tmp_path) for name, result in found.items()}
    assert stale == {"submit": CHANGED, "threads": ""}


def test_simulations_depend_on_the_limits_of_stores_alone(tmp_path: Path) -> None:
    name, code = (
        "tutti/profiles/at_open.py",
        "_PRESSING_US = 1\n\ndef store_limits():\n    return 1\n",
    )
    git = committed(tmp_path, {name: code})
    found = {key: result_of(key, git) for key in ("slack", "window")}
    file = tmp_path / name
    file.write_text(f"import os\n{code}\ndef media_of():\n    return os\n")
    stale = {key: why_stale(key, result, tmp_path) for key, result in found.items()}
    assert stale == {"slack": "", "window": CHANGED}
    file.write_text(code.replace("_PRESSING_US = 1", "_PRESSING_US = 2"))
    assert why_stale("slack", found["slack"], tmp_path) == CHANGED


def test_results_that_a_run_replaces_change_no_commit(tmp_path: Path) -> None:
    names = ("docs/results.md", "bench/results/ring.json")
    committed(tmp_path, dict.fromkeys(names, "old"))
    commit = commit_of(tmp_path)
    for name in names:
        (tmp_path / name).write_text("new")
    assert commit_of(tmp_path / "bench/results") == commit != "unknown"


def test_what_results_depend_on_exists() -> None:
    missing = [path for paths in DEPENDS.values() for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_a_table_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run the benchmark"):
        render("<!-- result: nothing -->\n<!-- end -->\n", tmp_path)


def test_a_result_that_make_bench_will_measure_has_its_place(tmp_path: Path) -> None:
    page = "<!-- result: index-latency -->\n<!-- end -->\n"
    waiting = render(page, tmp_path)
    assert NOT_MEASURED in waiting
    cell = {"pages": 2048, "hash_ms": 1.5, "insert_ms": 2.5, "lookup_ms": 3.5}
    result = {"benchmark": "compare", "cells": {"128K tokens": cell}, "machine": {"command": "c"}}
    (tmp_path / "index-latency.json").write_text(json.dumps(result))
    shown = render(waiting, tmp_path)
    assert "128K tokens: pages 2048, hash ms 1.5" in shown and NOT_MEASURED not in shown
