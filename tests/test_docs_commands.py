"""Every command in a page runs here on small files, or is listed with what it needs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from waiting import wait_until

from tutti.bench.traces import Synthetic, generate
from tutti.cli import main

ROOT = Path(__file__).parent.parent
FOLDERS = ("*.md", "docs/**/*.md", "examples/*.md", "integration/**/*.md")
PAGES = [page for folder in FOLDERS for page in ROOT.glob(folder)]
#: The programs that a line of a shell begins with.
PROGRAMS = (
    "tutti|make|pip|python|curl|modprobe|echo|eval|cp|kubectl|systemctl|docker|sysctl|git|\\.|"
    "mooncake_\\w+|nvidia-smi"
)

#: Beginnings of commands that a machine without more than a CPU and a disk cannot run, and why.
NEEDS = {
    "tutti bench ttft": "a running server",
    "tutti bench serve": "SGLang and a model",
    "tutti bench peers": "a minute; tests/bench/test_peers.py runs it",
    "tutti format /dev/": "a drive; tests/medium runs it on loop devices",
    "tutti format nvme:": "a drive bound to vfio-pci; tests/qemu runs it on an emulated one",
    "tutti info nvme:": "the same",
    "tutti fsck nvme:": "the same",
    "tutti resize /dev/": "drives; tests/crash runs it on loop devices",
    "tutti serve --remote": "a Mooncake cluster; tests/cluster starts one",
    "tutti simulate --workload mooncake": "a minute; tests/bench runs a part of it",
    "tutti simulate --workload leval-synthetic --rates 1 --profile": "a profile of a real machine",
    "tutti simulate --validate": "a minute; tests/bench runs a part of it",
    "tutti simulate --fit": "ten seconds and more; tests/bench runs a part of it",
    "make": "its own minutes: only that the target exists is checked",
    "pip install": "a package index",
    "python -m sglang.launch_server": "SGLang; tests/sglang starts it with these flags",
    "python -m tutti.bench.yardsticks.run": "another project's benchmark; "
    "tests/bench/test_yardsticks.py runs it on a stand-in",
    "python -m tutti.bench.yardsticks.serving": "SGLang and a model; "
    "tests/sglang/test_serving_yardstick.py runs it",
    "python tests/sglang/upstream.py": "SGLang's repository; tests/sglang/test_upstream.py runs it",
    "curl": "a running server; tests/sglang/test_server_lives.py sends these requests",
    "git": "a network; tests/bench/test_yardsticks.py has a stand-in of what is cloned",
    "mooncake_": "Mooncake; tests/cluster starts both programs",
    "modprobe": "root, and a drive to take from the kernel",
    "echo": "the same",
    ". .venv/bin/activate": "a built environment; `make demo` uses it",
}
#: What makes a command small: added to those that begin so.
SMALL = {
    "tutti bench bandwidth": "--seconds 0.1 --capacity 64MiB --shapes 8x32KiB --memory 32MiB "
    "--batch 1MiB --prefix-pages 16",
    "tutti profile": "--sizes 1MiB --slices 64KiB --repeats 1 --file-size 16MiB",
    "tutti replay": "--requests 4 --capacity 64MiB",
    "tutti bench eviction": "--requests 40",
    "tutti simulate": "--requests 12 --warm 0",
}
#: Exit codes other than 0: a server's options are missing; a bar is missed on the trace.
CODES = {"tutti sglang doctor": 1, "tutti bench eviction": 1}


def lines() -> list[tuple[str, str]]:
    """(page, command) of every block of code that is for a shell, once."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.split(r"^ *```.*$", page.read_text(), flags=re.MULTILINE)[1::2]:
            for line in whole_lines(block):
                if re.match(rf"({PROGRAMS}) ", line):
                    found.setdefault(line, page.name)
    return [(page, command) for command, page in found.items()]


def whole_lines(block: str) -> list[str]:
    """Lines of a shell, without comments; what lies between quotation marks stays as it is."""
    found, begun = [], ""
    for line in textwrap.dedent(block).splitlines():
        is_quoted = begun.count("'") % 2 == 1
        begun += line if is_quoted else re.sub(r"(^|\s+)# .*", "", line)
        if begun.count("'") % 2 == 1:
            begun += "\n"
        elif begun.endswith("\\"):
            begun = begun[:-1]
        else:
            parts = begun.strip().split("'")
            parts[::2] = [re.sub(r"\s+", " ", part) for part in parts[::2]]
            found.append("'".join(parts))
            begun = ""
    return found


def needs(command: str) -> str | None:
    return next((why for start, why in NEEDS.items() if command.startswith(start)), None)


def local(command: str, folder: Path) -> list[str]:
    """The words of a command, with its files in ``folder``, and with less to do."""
    more = next((words for start, words in SMALL.items() if command.startswith(start)), "")
    words = [word for word in shlex.split(f"{command} {more}") if word != "..."][1:]
    words = [re.sub(r"^/(mnt|run|dev)\b", f"{folder}/\\1", word) for word in words]
    if words[0] == "profile":
        words = [str(folder / word) if word == "profile.json" else word for word in words]
    return ["256MiB" if re.fullmatch(r"\d+[GT]iB", word) else word for word in words]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands expect: the places, and the pools that earlier commands have made: these
    may have run in another process.
    """
    top = tmp_path_factory.mktemp("docs")
    for name in ("mnt/nvme/tutti/MODEL", "mnt/a", "mnt/b", "run/user/1000"):
        (top / name).mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "figures", top / "docs" / "figures")
    trace = top / "Mooncake/FAST25-release/traces/synthetic_trace.jsonl"
    trace.parent.mkdir(parents=True)
    trace.write_text("\n".join(one.to_json() for one in generate(Synthetic(requests=9))))
    for pool in ("mnt/nvme/pool.tutti", "mnt/nvme/tutti/MODEL/kv-tp0-pp0-cp0-dp0.tutti"):
        assert main(["format", str(top / pool), "--capacity", "64MiB", "--model", "tiny"]) == 0
    members = [str(top / member) for member in ("mnt/a/tutti", "mnt/b/tutti")]
    assert main(["format", *members, "--capacity", "64MiB", "--model", "tiny"]) == 0
    return top


RUN = [command for _, command in lines() if needs(command) is None]


@pytest.mark.parametrize("command", [c for c in RUN if not c.startswith("tutti serve")])
def test_a_command_of_a_page_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = local(command, folder)
    if words[0] == "format":
        for place in filter(Path.is_file, map(Path, words)):
            place.unlink()
    wanted = next((code for start, code in CODES.items() if command.startswith(start)), 0)
    assert main(words) == wanted


@pytest.mark.parametrize("command", [c for c in RUN if c.startswith("tutti serve")])
def test_the_agent_of_a_page_listens_and_ends(command: str, folder: Path) -> None:
    pytest.importorskip("msgspec")
    words = local(command, folder)
    socket = Path(words[words.index("--socket") + 1])
    with subprocess.Popen([sys.executable, "-m", "tutti.cli", *words]) as agent:
        wait_until(socket.exists, "it does not listen")
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30) == 0


def test_the_lists_are_of_commands_that_a_page_has() -> None:
    commands = [command for _, command in lines()]
    for start in (*NEEDS, *SMALL, *CODES):
        assert any(command.startswith(start) for command in commands), start
    assert len(RUN) >= 15


def test_every_target_of_make_that_a_page_has_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    suites = re.findall(r"^(?:TEST|MORE)_SUITES := (.*)", (ROOT / "Makefile").read_text(), re.M)
    targets |= {f"test-{suite}" for words in suites for suite in words.split()}
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"(?:`|^|; )make ([a-z][\w-]*)", text, re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


def test_json_in_a_command_of_a_page_can_be_read() -> None:
    words = [word for _, command in lines() if "{" in command for word in shlex.split(command)]
    bodies = [json.loads(word) for word in words if word.startswith("{")]
    assert len(bodies) >= 4
    for body in bodies:
        if "hicache_storage_backend_extra_config_json" in body:
            assert json.loads(body["hicache_storage_backend_extra_config_json"])["path"]
