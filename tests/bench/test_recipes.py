"""Launch recipes: what is started, what is the same for all, and how a server is ended.

A package named sglang that is a stand-in takes the place of SGLang.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port

from tutti.base.terminal import progress
from tutti.bench.ttft import recipes
from tutti.bench.ttft.http import ServerError
from tutti.bench.ttft.recipes import RECIPES
from tutti.errors import ConfigError, Unsupported

STAND_IN = """\
import http.server, json, os, signal, sys, threading
if "--end-at-once" in sys.argv:
    sys.exit(7)
if "--end-soon" in sys.argv:
    threading.Timer(1, os._exit, [9]).start()
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("a server's log", flush=True)
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"argv": sys.argv[1:], "storage": os.environ.get(
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"), "api_key": "secret"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that answers like a server, in place of SGLang."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    places = [str(package.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    return package


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    recipes.add_arguments(parser)
    return parser.parse_args(argv)


def printed(name: str, *argv: str) -> dict[str, Any]:
    args = parsed(name, "--model", "some/model", "--print", *argv)
    return recipes.run(args, progress)


def test_every_recipe_prints_one_command_with_the_same_sizes(tmp_path: Path) -> None:
    for name, recipe in RECIPES.items():
        result = printed(name, "--dir", str(tmp_path / name), "--page-size", "32", "--dram", "8GB")
        command = result["command"]
        assert command[:3] == ["python", "-m", "sglang.launch_server"]
        assert command.count("--page-size") == 1
        assert command[command.index("--page-size") + 1] == "32"
        assert command.count("--enable-metrics") == command.count("--enable-cache-report") == 1
        if "--hicache-size" in command:
            assert command[command.index("--hicache-size") + 1] == "8"
        if recipe.uses_storage:
            everything = [*command, *result["env"].values(), *result["daemon"]]
            assert any(str(tmp_path / name) in word for word in everything), name
        last = recipes.report(result).splitlines()[-1]
        assert shlex.split(last)[-len(command) :] == command, "a shell takes it as it is"
        assert not (tmp_path / name).exists(), "printing makes nothing"


@pytest.mark.parametrize("name", ["tutti-hicache", "tutti-linker"])
def test_tutti_takes_a_folder_on_each_of_several_drives(name: str, tmp_path: Path) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    words = " ".join(printed(name, "--dir", *folders)["command"])
    assert json.dumps(folders) in words


def test_tutti_takes_its_own_options(tmp_path: Path) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    words = ["--dir", *folders, "--option", "service_threads=2"]
    linker = printed("tutti-linker", *words, "--option", "verify=off")["command"]
    assert '"service_threads": 2, "verify": "off"' in " ".join(linker)
    with pytest.raises(ConfigError, match=r"unknown option 'verrify'.*'verify'"):
        printed("tutti-linker", "--dir", folders[0], "--option", "verrify=off")
    with pytest.raises(ConfigError, match="so give 1 at most, or more places"):
        printed("tutti-linker", "--dir", folders[0], "--option", "service_threads=2")
    with pytest.raises(ConfigError, match="give --capacity instead"):
        printed("tutti-hicache", *words, "--option", "capacity=1GiB")
    with pytest.raises(ConfigError, match="hicache-file does not take --option"):
        printed("hicache-file", "--dir", folders[0], "--option", "verify=off")


def test_what_a_recipe_refuses(tmp_path: Path, sglang: Path) -> None:
    with pytest.raises(ConfigError, match="needs --dir"):
        printed("hicache-file")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pool").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        printed("tutti-hicache", "--dir", str(tmp_path / "old"))
    assert printed("tutti-hicache", "--dir", str(tmp_path / "old"), "--keep")
    with pytest.raises(ConfigError, match="hicache-file keeps all in one folder"):
        printed("hicache-file", "--dir", str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(ConfigError, match="--more"):
        printed("hbm", "--more='")
    with pytest.raises(SystemExit):
        parsed("vllm", "--model", "m")
    missing = parsed("lmcache", "--model", "m", "--dir", str(tmp_path / "new"))
    with pytest.raises(Unsupported, match="lmcache is not installed"):
        recipes.run(missing, progress)
    unquoted = parsed("hicache-file", "--model", "m", "--dir", str(tmp_path / "new"), "--more='")
    with pytest.raises(ConfigError, match="--more"):
        recipes.run(unquoted, progress)
    for port in ("0", "65536", "99999999"):
        with pytest.raises(SystemExit):
            parsed("hbm", "--model", "m", "--port", port)
    assert not (tmp_path / "new").exists(), "a refusal leaves nothing"


def test_facts_that_cannot_be_written_are_refused_before_the_server_starts(
    sglang: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    argv = ["tutti-hicache", "--model", "m", "--dir", str(folder), "--info", str(tmp_path)]
    with pytest.raises(ConfigError, match="is a folder"):
        recipes.run(parsed(*argv), progress)
    assert not folder.exists()


def test_a_server_that_ends_at_once_is_an_error(sglang: Path) -> None:
    args = parsed("hbm", "--model", "m", "--port", str(free_port()), "--more=--end-at-once")
    with pytest.raises(ServerError, match="ended with 7"):
        recipes.run(args, progress)


def test_a_server_that_ends_later_is_no_success(sglang: Path, tmp_path: Path, capfd: Any) -> None:
    # A folder that it has no use for need not be there.
    argv = ["--model", "m", "--port", str(free_port()), "--dir", str(tmp_path / "none")]
    result = recipes.run(parsed("hbm", *argv, "--more=--end-soon"), progress)
    assert result["exit_code"] == 9 and "SGLang ended with 9" in result["stopped"]
    written = capfd.readouterr()
    assert "a server's log" in written.err and not written.out, "stdout is for the result"


def test_what_runs_beside_the_server_has_to_stay(sglang: Path, tmp_path: Path) -> None:
    daemon = sglang.parent / "lmcache" / "cli"
    daemon.mkdir(parents=True)
    (daemon / "main.py").write_text("import sys; sys.exit(8)")
    argv = ["--model", "m", "--port", str(free_port()), "--dir", str(tmp_path / "kv")]
    with pytest.raises(ServerError, match="beside it ended with 8"):
        # The server may be up first; then it is told in the result.
        raise ServerError(recipes.run(parsed("lmcache", *argv), progress)["stopped"])


def test_a_server_that_cannot_start_takes_along_what_runs_beside_it(
    sglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sglang.parent / "lmcache").mkdir()
    (sglang.parent / "lmcache" / "__init__.py").write_text("")
    started: list[subprocess.Popen[bytes]] = []

    def start(words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        if started:
            raise OSError("no more processes")
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[0]

    monkeypatch.setattr(recipes, "_start", start)
    with pytest.raises(OSError, match="no more processes"):
        recipes.run(parsed("lmcache", "--model", "m", "--dir", str(tmp_path / "new")), progress)
    assert started[0].poll() is not None, "the daemon has ended"


def test_only_the_first_signal_raises() -> None:
    """A second one that raised would leave the server running, or end the program in its midst."""
    before = signal.getsignal(signal.SIGTERM)
    with recipes._Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert not interrupts.urgent
        signal.raise_signal(signal.SIGINT)
        assert interrupts.urgent
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("number", "deaf"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_a_server_runs_until_it_is_ended(
    tmp_path: Path, sglang: Path, number: signal.Signals, deaf: bool
) -> None:
    info, port = tmp_path / "info.json", str(free_port())
    argv = ["hicache-file", "--model", "m", "--dir", str(tmp_path / "kv"), "--port", port]
    returned = threading.Event()
    main_thread = threading.main_thread().ident or 0

    def end_it() -> None:
        deadline = time.monotonic() + 30
        while not (info.exists() and info.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        for _ in range(1 + deaf):  # a second time, when the first does not help
            if not returned.is_set():
                signal.pthread_kill(main_thread, number)
            time.sleep(0.5)

    before = signal.getsignal(signal.SIGTERM)
    ender = threading.Thread(target=end_it)
    ender.start()
    more = "--deaf --tp 2" if deaf else "--tp 2"
    try:
        result = recipes.run(parsed(*argv, "--info", str(info), f"--more={more}"), progress)
    finally:
        returned.set()
    ender.join(30)
    assert result["ended"] == "interrupted"
    assert result["exit_code"] == (-signal.SIGKILL if deaf else -signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    facts = json.loads(info.read_text())
    assert facts["system"] == "hicache-file" and facts["server"]["storage"] == "kv"
    assert facts["server"]["argv"][-2:] == ["--tp", "2"] and "secret" not in info.read_text()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))) != 0, "nothing stays behind"
