"""What `tutti sglang command` and `tutti sglang doctor` refuse and report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tutti import cli, store
from tutti.commands import sglang
from tutti.gio_uring import probe
from tutti.medium.layout import KVLayout

LAYOUT = KVLayout.mha(2, 1, 64, 32, "bfloat16", model="test-model")
COMMAND = ["sglang", "command", "--model=m", "--capacity=1MiB"]
DRIVE = "nvme:0000:99:00.0"


def doctor(
    capsys: pytest.CaptureFixture[str], what: str, *more: str | Path
) -> list[tuple[str, str]]:
    """(verdict, text) of each row of this name."""
    cli.main(["sglang", "doctor", "--json", *map(str, more)])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return [(found["verdict"], found["text"]) for found in findings if found["what"] == what]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("text", "{}/text is neither a folder nor a pool; pass another path"),
        ("zeros", "{}/zeros is neither a folder nor a pool; pass another path"),
        ("text/pools", "{}/text is not a folder; pass one with --path"),
        (DRIVE, f"{DRIVE} does not exist; correct the path"),
        ("/dev/ng9n1", "/dev/ng9n1 does not exist; correct the path"),
    ],
)
def test_the_command_refuses_paths_as_the_doctor_does(
    name: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("hello\n")
    Path("zeros").write_bytes(bytes(1 << 16))
    assert cli.main([*COMMAND, "--path", name]) == 3
    assert says.format(tmp_path) in capsys.readouterr().err
    row = "path" if says.startswith("{}") else "device"
    ((verdict, text),) = doctor(capsys, row, "--path", name)
    assert verdict == "fails" and says.format(tmp_path) in text


def test_the_doctor_finds_what_sglang_compiles_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, status in (("c++", 0), ("ninja", 1)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    ((verdict, text),) = doctor(capsys, "compiler")
    assert verdict == "fails" and "install g++, ninja, and the headers" in text and "ninja'" in text
    (tmp_path / "ninja").write_text("#!/bin/sh\n")
    ((verdict, text),) = doctor(capsys, "compiler")
    assert verdict == "ok"
    monkeypatch.setenv("CXX", "no-compiler")
    ((verdict, text),) = doctor(capsys, "compiler")
    assert verdict == "fails" and "no-compiler" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--enable-pdmux"],
        ["--enable-pdm"],
        ["--dllm-algorithm=LowConfidence"],
        ["--enable-pd-role-switch"],
        ["--disaggregation-mode", "decode"],
    ],
)
def test_a_linker_is_refused_for_servers_that_do_not_serve_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, "--path", str(tmp_path / "pools")]
    assert cli.main([*command, "--mode=linker", "--", *words]) == 2
    error = capsys.readouterr().err
    assert (
        f"with a linker and {words[0].split('=')[0]}" in error and "SGLang 0.5.23 does not" in error
    )
    assert cli.main([*command, "--", *words]) == 0


@pytest.mark.parametrize("words", [["--config", "a.yaml"], ["--config=a.yaml"]])
def test_the_command_says_that_it_does_not_read_sglangs_file(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which may set the number of ranks that share the paths."""
    command = [*COMMAND, "--path", str(tmp_path / "pools"), "--json", "--"]
    for more, note in (([], False), (words, True), ([*words, "--tp=2"], True)):
        assert cli.main([*command, *more]) == 0
        notes = "; ".join(json.loads(capsys.readouterr().out)["notes"])
        assert ("the file of --config was not read" in notes) == note
    assert "(2 per node, nodes: 1)" in notes


def test_the_command_takes_what_a_server_opens_or_makes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a pool of whose superblock the first copy was lost."""
    store.format(tmp_path / "pool", LAYOUT, "16MiB")
    shutil.copy(tmp_path / "pool", tmp_path / "torn")
    with (tmp_path / "torn").open("r+b") as file:
        file.write(bytes(4096))
    for name in ("pool", "torn", "new", "new.tutti", "none/new.tutti", "none/of/these"):
        assert cli.main([*COMMAND, "--path", str(tmp_path / name)]) == 0, capsys.readouterr().err


def test_a_pool_is_room_for_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk; its neighbours' is not, and folders hold nothing beside files."""
    store.format(tmp_path / "pool", LAYOUT, "16MiB")
    monkeypatch.setattr(
        sglang.os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096)
    )
    words = ["--path", str(tmp_path / "pool"), str(tmp_path / "folder")]
    assert cli.main([*COMMAND[:-1], "--capacity=8MiB", *words]) == 0
    assert cli.main([*COMMAND[:-1], "--capacity=1GiB", *words]) == 3
    assert "--capacity needs 1 GiB of it; pass less" in capsys.readouterr().err
    assert cli.main([*COMMAND[:-1], "--capacity=8MiB", *words[:1], words[2]]) == 3


def test_a_degraded_server_needs_no_room_where_a_drive_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder where it was mounted is on the system's disk, which is full."""
    monkeypatch.setattr(
        sglang.os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096)
    )
    command = [*COMMAND, "--path", str(tmp_path / "a"), str(tmp_path / "lost")]
    assert cli.main(command) == 3
    assert cli.main([*command, "--option", "degraded=true"]) == 0


def test_a_folder_of_a_drive_that_is_not_mounted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mnt/nvme/tutti"
    monkeypatch.setattr(sglang.os.path, "ismount", lambda place: str(place) == "/")
    ((verdict, text),) = doctor(capsys, "path", "--path", path)
    assert verdict == "unknown"
    assert f"{path} does not exist, and would be made on the file system at / (" in text
    assert "mount the drive first" in text
    monkeypatch.setattr(sglang.os.path, "ismount", lambda place: str(place) == str(tmp_path))
    ((verdict, text),) = doctor(capsys, "path", "--path", path)
    assert verdict == "ok" and f"on the file system at {tmp_path} (" in text
    path.mkdir(parents=True)
    assert doctor(capsys, "path", "--path", path) == [("ok", str(path))]


@pytest.mark.parametrize(
    ("disk", "verdict"), [("sda, reported as rotational", "slow"), ("sda, solid state", "ok")]
)
def test_a_disk_that_is_reported_as_rotational(
    disk: str,
    verdict: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = probe.DirectFacts(str(tmp_path), "ext4", True, "", 0, 0)
    monkeypatch.setattr(probe, "probe_direct", lambda path: facts)
    monkeypatch.setattr(sglang, "machine_facts", lambda folder: {"disk": disk})
    ((found, text),) = doctor(capsys, "disk", "--path", tmp_path)
    assert found == verdict and (f"the disk is {disk}; choose" in text) == (found == "slow")
    assert not doctor(capsys, "disk", "--path", DRIVE), "this folder's says nothing of a drive"


def test_each_disk_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the first of several paths is good."""
    memory = Path("/dev/shm").resolve()
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    paths: list[str | Path] = [tmp_path / "a", tmp_path / "b", memory / "tutti-doctor"]
    (_, first), (verdict, second) = doctor(capsys, "disk", "--path", *paths)
    assert first.startswith(f"{tmp_path}: ")
    assert verdict == "slow" and second.startswith(f"{memory}: ") and "is memory" in second


@pytest.mark.parametrize(
    ("driver", "devices", "has_bindings", "verdict", "says"),
    [
        ("", (), True, "unknown", "not checked, as no GPU was found: no driver"),
        ("13.0", ("H100",), False, "fails", "pip install -e '.[cuda]'"),
        ("12.9", ("H100",), True, "fails", "is of CUDA 12.9; install one of CUDA 13.0 or newer"),
        ("13.0", ("H100",), True, "ok", "is of CUDA 13.0, and cuda-bindings is installed"),
    ],
)
def test_the_linker_needs_a_driver_and_its_bindings(
    driver: str,
    devices: tuple[str, ...],
    has_bindings: bool,
    verdict: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def imported(name: str) -> None:
        assert name == "cuda.bindings.driver"
        if not has_bindings:
            raise ImportError(name)

    facts = probe.CudaFacts(driver, devices, "" if devices else "no driver")
    monkeypatch.setattr(probe, "probe_cuda", lambda: facts)
    monkeypatch.setattr(sglang, "import_module", imported)
    ((found, text),) = doctor(capsys, "cuda", "--mode=linker", "--path", tmp_path)
    assert found == verdict and says in text
    assert not doctor(capsys, "cuda", "--path", tmp_path), "HiCache's pool is in host memory"
    for mode, warns in (("linker", verdict == "fails"), ("hicache", False)):
        assert cli.main([*COMMAND, f"--mode={mode}", f"--path={tmp_path}"]) == 0
        assert (f"warning: {text}" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("mode", "more", "says"),
    [
        ("hicache", ["--page-size", "32"], "leave it out, and use --page-size before the `--`"),
        (
            "linker",
            ["--model=x"],
            "--model contradicts what this command sets; leave it out, and u",
        ),
        ("hicache", ["--hicache-io-backend", "direct"], "use --layout before"),
        ("hicache", ["--hicache-storage-backend", "file"], "what this command sets; leave it out"),
        ("linker", ["--unified-cache-external-linker-config={}"], "use --option before"),
    ],
)
def test_arguments_that_contradict_the_commands_own(
    mode: str, more: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, f"--path={tmp_path}", "--mode", mode]
    assert cli.main([*command, "--", *more]) == 2
    assert says in capsys.readouterr().err
    same = ["--page-size", "64", "--model=m", "--hicache-storage-prefetch-policy=wait_complete"]
    assert cli.main([*command, "--", *same]) == 0


def test_an_option_of_the_other_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*COMMAND, f"--path={tmp_path}"]
    assert cli.main([*command, "--option=min_tokens=5"]) == 2
    assert "hicache: it needs --mode linker" in capsys.readouterr().err
    assert cli.main([*command, "--mode=linker", "--option=hugepages=off"]) == 2
    assert "linker: it needs --mode hicache" in capsys.readouterr().err


def test_a_layout_is_of_a_host_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The linker has none, and the doctor looks at none."""
    words = [f"--path={tmp_path}", "--layout=layer_first"]
    assert cli.main([*COMMAND, *words, "--mode=linker"]) == 2
    assert "linker has no host pool; leave --layout out" in capsys.readouterr().err
    assert cli.main([*COMMAND, *words]) == 0
    assert "--hicache-mem-layout layer_first" in capsys.readouterr().out
    assert cli.main(["sglang", "doctor", *words]) == 2


def test_a_path_that_must_be_given_has_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    for command, has_default in (("command", False), ("doctor", True)):
        with pytest.raises(SystemExit):
            cli.main(["sglang", command, "--help"])
        assert ("(default: .)" in " ".join(capsys.readouterr().out.split())) == has_default
