"""The documents are true: the README's program runs, the picture shows the code."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import tutti
from tutti.cli import COMMANDS, GROUPS, build_parser
from tutti.errors import ConfigError
from tutti.medium.layout import MODELS

ROOT = Path(__file__).parent.parent
#: Not in the picture: what every file uses, and what only the command line uses.
_NOT_DRAWN = {
    "errors",
    "units",
    "clock",
    "native",
    "cli",
    "terminal",
    "arguments",
    "arrays",
    "machine",
}


def pages() -> list[Path]:
    folders = ("*.md", "docs/**/*.md", "examples/*.md", "integration/**/*.md")
    return [page for folder in folders for page in ROOT.glob(folder)]


def test_the_readme_program_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    program = blocks[0].replace("pool.tutti", str(tmp_path / "pool.tutti"))
    program = program.replace('"4GiB"', '"256MiB"').replace("pages=256", "pages=8")
    program = program.replace("range(10_000)", "range(8 * 64 + 5)")
    for _ in range(2):  # the second time everything is there
        exec(program, {"__name__": "readme"})


def test_the_numbers_of_a_store_are_explained(tmp_path: Path) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    rows = re.findall(r"^[* ] .*$", page[page.index("## A store without SGLang") :], re.MULTILINE)
    told = set(re.findall(r"`(\w+)`", "\n".join(rows)))
    layout = tutti.KVLayout.mha(1, 1, 64, 64, "float16", model="test-model")
    with tutti.open(tmp_path / "pool", layout=layout, capacity="8MiB") as store:
        stats = store.stats()
    assert told == stats.keys() | {"unproven"}


def code_lines() -> list[tuple[str, str]]:
    """(page, line) of every block of code, lines that go on joined."""
    found = []
    for page in pages():
        # Between the fences: every second part.
        for block in re.split(r"^ *```.*$", page.read_text(), flags=re.MULTILINE)[1::2]:
            found += [(page.name, line) for line in block.replace("\\\n", " ").splitlines()]
    return found


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every call of tutti in a block of code."""
    calls = [(page, line) for page, line in code_lines() if line.strip().startswith("tutti ")]
    return [(page, shlex.split(line, comments=True)[1:]) for page, line in calls]


def test_every_name_that_a_page_imports_is_there() -> None:
    found = [(p, re.match(r"from (tutti[\w.]*) import (.+)", line)) for p, line in code_lines()]
    imports = [(page, match) for page, match in found if match]
    assert len(imports) > 5
    for page, match in imports:
        for name in match[2].split(", "):
            there = hasattr(import_module(match[1]), name) or find_spec(f"{match[1]}.{name}")
            assert there, f"{page}: {match[0]}"


def test_every_command_in_a_page_is_taken() -> None:
    found = commands()
    assert len(found) > 20
    for page, given in found:
        words = [word for word in given if word != "..."]
        try:
            build_parser(words).parse_args(words)
        except ConfigError:
            pytest.fail(f"{page}: tutti {shlex.join(words)} is refused")


def test_every_command_that_a_page_names_is_there() -> None:
    names = {name for name, _, _ in COMMANDS} | GROUPS.keys()
    for page in pages():
        for words in re.findall(r"`tutti ([a-z]+(?: [a-z-]+)?)", page.read_text()):
            known = words in names or words.split()[0] in names - GROUPS.keys()
            assert known, f"{page.name} names `tutti {words}`"


def test_no_page_and_no_command_replaces_an_editable_installation() -> None:
    """One page installs Tutti without -e, because it goes into the environment of SGLang."""
    files = [*pages(), *(p for d in ("tutti", "bench") for p in (ROOT / d).rglob("*.py"))]
    found = {file.relative_to(ROOT) for file in files if "pip install '." in file.read_text()}
    assert found == {Path("integration/sglang/README.md")}


def test_the_picture_shows_the_modules() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    picture = text[text.index("```") : text.index("## Layers")]
    drawn = set(re.findall(r"(?:gio_uring/|kernels/native/)?\b[a-z_]+\.(?:py|cpp|h)\b", picture))
    names = {Path(name).name for name in drawn}
    modules = {
        path.stem
        for folder in ("", "medium", "placement", "pool", "memory", "transfers")
        for path in (ROOT / "tutti" / folder).glob("*.py")
        if path.stem != "__init__"
    }
    for module in modules - _NOT_DRAWN:
        assert f"{module}.py" in names, f"{module}.py is not in the picture of docs/architecture.md"
    folders = ("tutti", "kernels", "integration", "bench", "tests")
    files = {path.name for folder in folders for path in (ROOT / folder).rglob("*.*")}
    for name in names:
        assert name in files, f"docs/architecture.md draws {name}, which does not exist"


def test_every_source_file_that_a_page_names_is_there() -> None:
    folders = ("tutti", "kernels", "integration", "bench", "tests", "examples")
    files = ["/" + path.as_posix() for name in folders for path in (ROOT / name).rglob("*.*")]
    for page in pages():
        for name in re.findall(r"`([\w/.-]+\.(?:py|cpp|h|cuh?))`", page.read_text()):
            known = name == "utils.py" or any(file.endswith("/" + name) for file in files)
            assert known, f"{page.name} names {name}"


def test_no_table_is_wider_than_120_columns() -> None:
    for page in pages():
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert not line.startswith("|") or len(line) <= 120, f"{page.name}:{number}: a list?"


def test_the_table_of_sizes_is_computed_from_the_models() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| (.*) \|$", (ROOT / "docs/sizing.md").read_text(), re.M)
    assert {name for name, _ in rows} == MODELS.keys() - {"tiny"}
    for name, cells in rows:
        nbytes = MODELS[name](64, "bfloat16").object_nbytes // 64
        prompt = 8192 * nbytes
        assert cells.split(" | ") == [
            f"{nbytes}",
            f"{nbytes * 64 / 2**20:.1f}",
            f"{1000 * prompt / 1e9:.0f}",
            f"{2**40 / nbytes / 1e6:.1f}",
            f"{7.68e12 / prompt:.0f}",
        ], name


def test_every_wish_has_an_answer_and_its_tests_are_there() -> None:
    text = (ROOT / "docs/wishes.md").read_text()
    rows = re.findall(r"^\* \*\*.+?\*\*: ((?:.|\n  )+)$", text, re.M)
    assert len(rows) == 35
    named = [path for answer in rows for path in re.findall(r"`(tests/[\w/]+\.py)`", answer)]
    assert len(named) > 30
    for path in named:
        assert (ROOT / path).exists(), f"docs/wishes.md names {path}"


def test_every_row_of_what_was_tested_names_tests_of_its_suite() -> None:
    text = (ROOT / "integration/sglang/README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|") and "`test_" in line]
    assert len(rows) >= 15
    for row in rows:
        names = re.findall(r"`(test_\w+\.py)`", row)
        texts = [(ROOT / "tests/sglang" / name).read_text() for name in names]
        assert ("(s)" not in row) or any("pytest.mark.slow" in text for text in texts), row
        all_slow = any(re.search(r"^pytestmark = .*slow", text, re.M) for text in texts)
        assert "(s)" in row or not all_slow, row


def test_links_lead_somewhere() -> None:
    for page in pages():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """What links may name after the #: GitHub's names of the page's headings."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_lead_to_headings() -> None:
    found = {page.resolve(): anchors(page) for page in pages()}
    for page in found:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            there = (page.parent / target).resolve() if target else page
            assert anchor in found[there], f"{page.name} links to {target}#{anchor}"
