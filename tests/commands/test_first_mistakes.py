"""The mistakes of a first hour: each ends in one sentence that names the remedy."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tutti import cli, store
from tutti.errors import ConfigError, NativeError, PoolMismatch, TuttiError
from tutti.medium.layout import KVLayout
from tutti.memory.host_memory import HostMemory
from tutti.node.connect import connect

ROOT = Path(__file__).parents[2]
LAYOUT = KVLayout.mha(2, 1, 64, 32, "bfloat16", model="test-model")
SMALL = ["--model=test-model", "--layers=2", "--kv-heads=1", "--head-dim=64", "--page-size=32"]
SGLANG = ["sglang", "command", "--model=m", "--path=/nowhere/p"]


POOL_COMMANDS = (["info"], ["fsck"], ["ls"], ["resize", "--capacity=1GiB"], ["serve", "--socket=s"])


def sentence(capsys: pytest.CaptureFixture[str], *argv: str | Path, code: int | None = None) -> str:
    """The last line on stderr of a command that fails, after checking that no traceback is."""
    ended = cli.main([str(word) for word in argv])
    said = capsys.readouterr().err
    assert ended in ((1, 2, 3) if code is None else (code,)), said
    assert "Traceback" not in said
    return said.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("CXX=no-such-compiler", "no C++ compiler: install g++, or name one with CXX="),
        ("INSTALL=false", "not installed, see above: without a package index"),
    ],
)
def test_a_build_without_compiler_or_package_index(tmp_path: Path, given: str, said: str) -> None:
    (tmp_path / ".venv").touch()
    ended = subprocess.run(
        ["make", f"VENV={tmp_path}", given, f"{tmp_path}/.core"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode != 0
    assert said in ended.stderr


def test_python_started_in_the_folder_above_the_clone(tmp_path: Path) -> None:
    """Python takes a folder called tutti for a package before it asks setuptools' finder."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True, timeout=60
    )
    (tmp_path / ".venv").touch()
    (tmp_path / "above/tutti/tutti").mkdir(parents=True)
    words = ["make", f"VENV={tmp_path}", "INSTALL=true", f"{tmp_path}/.core"]
    subprocess.run(words, cwd=ROOT, check=True, timeout=60)
    program = "import tutti; print(tutti.__file__)"
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    words = [f"{tmp_path}/bin/python", "-c", program]
    found = subprocess.check_output(words, cwd=tmp_path / "above", env=env, text=True, timeout=60)
    assert Path(found.strip()).samefile(ROOT / "tutti/__init__.py")


def test_no_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = sentence(capsys, "format", tmp_path / "p", "--capacity", "900TiB", *SMALL)
    assert "no room for 900 TiB" in said and "are free; free space" in said
    assert not (tmp_path / "p").exists()


def test_a_file_in_place_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    said = sentence(capsys, "format", tmp_path / "file" / "p", "--capacity=32MiB", *SMALL)
    assert f"{tmp_path}/file is a file, not a folder; correct the path" in said


def test_a_wrong_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain").touch()
    for command in POOL_COMMANDS:
        for name in ("nothing", "nothing/", "plain/pool"):
            said = sentence(capsys, *command, f"{tmp_path}/{name}", code=3)
            assert said.endswith(
                f"{name} does not exist; correct the path, or create a pool with `tutti format`"
            )


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    label, format = ["format", "--for-server"], ["format", "--capacity=1GiB", *SMALL]
    for command in (*POOL_COMMANDS, label, format):
        for name in ("/dev/ng9n1", "nvme:0000:99:00.0"):
            said = sentence(capsys, *command, name, code=3)
            assert f"{name} does not exist; correct the path (`tutti nvme list --all` li" in said


@pytest.mark.parametrize("content", [b"", b"hello\n", b"root:x:0:0\n" * 1000])
def test_a_file_that_is_not_a_pool(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must not be advised to format it, which would destroy it."""
    (tmp_path / "file").write_bytes(content)
    for command in POOL_COMMANDS:
        said = sentence(capsys, *command, tmp_path / "file", code=3)
        assert said.endswith("file is not a Tutti pool; correct the path")


def test_an_agent_of_files_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", f"--socket={tmp_path}/s"]
    said = sentence(capsys, *words, "p.tutti", f"--folder={tmp_path}", code=2)
    assert said == "tutti: pass either PATH... or --folder DIR, not both"
    said = sentence(capsys, *words, code=2)
    assert said == "tutti: nothing to serve; pass PATH... or --folder DIR"


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("192.0.2.1", "Cannot assign requested address"),  # no machine has it
        ("no..host", "'idna' codec"),
    ],
)
def test_metrics_at_an_address_of_no_machine(
    host: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", f"--folder={tmp_path}", f"--socket={tmp_path}/s", f"--metrics={host}:9100"]
    said = sentence(capsys, *words, code=2)
    assert said.startswith(f"tutti: cannot serve metrics at {host}:9100: ") and why in said
    assert said.endswith("; choose another")


def test_the_socket_of_an_agent_in_place_of_a_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tutti.sock"
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path))
        said = sentence(capsys, "ls", path)
    assert said.endswith(f"is a socket; for the pools of an agent give unix:{path}")
    for command, *more in (["info"], ["fsck"], ["resize", "--capacity=1GiB"]):
        assert "`tutti stat` show its" in sentence(capsys, command, f"unix:{path}", *more)


def test_a_member_that_is_given_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = tmp_path / "pool.tutti"
    pool.touch()
    assert "given twice" in sentence(capsys, "fsck", pool, pool)


def test_a_link_to_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written, and a link to a new file in a folder that exists is followed."""
    (tmp_path / "nowhere").symlink_to(tmp_path / "none" / "pool")
    (tmp_path / "there").symlink_to(tmp_path / "pool")
    words = ["--capacity=32MiB", *SMALL]
    said = sentence(capsys, "format", tmp_path / "first", tmp_path / "nowhere", *words)
    assert f"nowhere is a link to {tmp_path}/none/pool, whose folder does not exist; make" in said
    assert sorted(os.listdir(tmp_path)) == ["nowhere", "there"]
    assert cli.main(["format", str(tmp_path / "there"), *words]) == 0
    assert (tmp_path / "pool").is_file() and (tmp_path / "there").is_symlink()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_link_to_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The room is that of the file system where the link leads."""
    link = tmp_path / "link"
    link.symlink_to(f"/dev/shm/{tmp_path.name}-pool")
    said = sentence(capsys, "format", link, "--capacity=900TiB", *SMALL)
    assert f"in /dev/shm/{tmp_path.name}-pool: " in said and "free space" in said


def test_a_pool_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with store.open(tmp_path / "p", layout=LAYOUT, capacity="16MiB"):
        assert "in use by another store of this" in sentence(capsys, "fsck", tmp_path / "p")
        ended = subprocess.run(
            [sys.executable, "-m", "tutti.cli", "ls", tmp_path / "p"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert f"is in use by process {os.getpid()}; close it there" in ended.stderr


def test_a_server_that_is_not_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    said = sentence(
        capsys, "bench", "ttft", "--url", "http://127.0.0.1:9", "--rates", "1", "--out", out
    )
    assert "127.0.0.1:9" in said
    assert not out.exists(), "nothing was measured, nothing is left"


def test_a_model_that_is_not_local(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    said = sentence(capsys, "format", tmp_path / "p", "--capacity=1GiB", "--model=org/some-model")
    assert "no config.json found for 'org/some-model'; pass --model as a folder" in said


def test_a_user_without_a_home_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    said = sentence(capsys, "format", tmp_path / "p", "--capacity=1GiB", "--model=org/some-model")
    assert "no config.json found for 'org/some-model'; pass --model as a folder" in said


@pytest.mark.parametrize(
    "config",
    [
        '{"num_hidden_layers": "many", "num_attention_heads": 8, "head_dim": 64}',
        '{"num_hidden_layers": 1e999, "num_attention_heads": 8, "head_dim": 64}',
        '{"num_hidden_layers": 4, "num_attention_heads": 0, "hidden_size": 64}',
        '{"num_hidden_layers": -4, "num_attention_heads": 8, "head_dim": 64}',
        '{"text_config": []}',
        "[" * 100_000,
    ],
)
def test_a_config_of_no_model(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config)
    said = sentence(capsys, "format", tmp_path / "p", "--capacity=1GiB", f"--model={tmp_path}")
    assert "; " in said, "it says what to do"
    assert not (tmp_path / "p").exists()


def test_an_old_sglang(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.commands.sglang.installed_version", lambda: "0.4.0")
    assert cli.main(["sglang", "doctor"]) == 1
    assert "0.4.0 is installed; pip install sglang==0.5.23" in capsys.readouterr().out


def test_a_size_without_a_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = sentence(capsys, "format", tmp_path / "p", "--capacity", "64G", *SMALL)
    assert "KiB, MiB, GiB, TiB (powers of 1024)" in said
    for command in ([*SGLANG], ["sglang", "doctor", "--path=/p"], ["format", tmp_path / "p"]):
        assert "500 is 500 bytes; write the unit" in sentence(capsys, *command, "--capacity=500")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["doctor"], "tutti sglang doctor"),
        (["bandwidth"], "tutti bench bandwidth"),
        (["bench", "bandwith"], "tutti bench bandwidth"),
        (["bench", "bandwidth", "--secnds", "1"], "--seconds"),
    ],
)
def test_a_misspelt_word(given: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"; did you mean `{meant}`?; see" in sentence(capsys, *given)


def test_arguments_of_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    said = sentence(capsys, *SGLANG, "--capacity=1GiB", "--tp", "2")
    assert "--tp; SGLang's own arguments come after `--`; see" in said


def test_a_wrong_value_is_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["format", "p", "--capacity=10XB"]) == 2
    assert capsys.readouterr().err.startswith("tutti: argument --capacity: cannot read the size")


def test_the_pool_of_another_model(tmp_path: Path) -> None:
    store.format(tmp_path / "p", LAYOUT, "16MiB")
    other = KVLayout.mha(2, 1, 64, 32, "float16", model="test-model")
    with pytest.raises(PoolMismatch) as caught:
        store.open(tmp_path / "p", layout=other)
    assert "another layout: dtype is 'bfloat16', not 'float16'; open it with" in str(caught.value)


def test_an_array_in_place_of_a_layout() -> None:
    with pytest.raises(ConfigError, match="layout has type bytearray; pass a KVLayout"):
        HostMemory.from_buffer(bytearray(4096), LAYOUT, 1)  # type: ignore[arg-type]


def test_memory_of_another_element_size() -> None:
    wide = np.zeros(LAYOUT.object_nbytes, np.float32)
    layers = [[wide] * len(LAYOUT.segments)] * LAYOUT.layers
    for make in (
        lambda: HostMemory.from_buffer(LAYOUT, wide, 1),
        lambda: HostMemory.from_layers(LAYOUT, layers, 1),
    ):
        with pytest.raises(
            ConfigError, match=r"elements have 4 bytes, the layout's have 2 .*uint8"
        ):
            make()
    for right in (wide.view(np.uint8), wide.view(np.float16)):
        assert HostMemory.from_buffer(LAYOUT, right, 1).pages == 1


@pytest.mark.parametrize("capacity", ["32MiB", "8MiB", 1])
def test_a_capacity_that_the_pool_does_not_have(
    tmp_path: Path, capacity: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        store.open(tmp_path / "p", LAYOUT, "16MiB").close()
    assert "capacity" not in caplog.text
    store.open(tmp_path / "p", LAYOUT, capacity).close()
    assert "a pool keeps its size; to change it, close it and run `tutti resize`" in caplog.text


def test_a_misspelt_option(capsys: pytest.CaptureFixture[str]) -> None:
    said = sentence(capsys, *SGLANG, "--capacity=1GiB", "--option", "second_tuch=true")
    assert "did you mean 'second_touch'?" in said


def test_an_agent_that_is_not_up(tmp_path: Path) -> None:
    with pytest.raises(TuttiError, match="tutti serve"):
        connect(f"unix:{tmp_path}/tutti.sock", LAYOUT, "16MiB")


def test_a_checkout_that_was_not_built(tmp_path: Path) -> None:
    program = "import tutti.native as n; n.lib()"
    missing = {**os.environ, "TUTTI_NATIVE_LIBRARY": str(tmp_path / "none.so")}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=missing, capture_output=True, text=True, timeout=60
    )
    last = ended.stderr.splitlines()[-1]
    assert NativeError.__name__ in last and "make install" in last


def test_a_file_where_a_folder_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    said = sentence(capsys, "demo", "--quick", "--dir", tmp_path / "file", code=2)
    assert "is not a folder; pass another with --dir" in said


def test_a_name_after_an_option_that_takes_several_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = sentence(capsys, "bench", "serve", "--model", "m", "--dir", "/mnt/a", "tutti-hicache")
    assert "SYSTEM comes before --dir, which takes all words after it" in said
    said = sentence(capsys, "bench", "serve", "tutti-hicache", "--dir", "/mnt/a")
    assert "arguments are required: --model; see" in said
