"""The command line's messages when the system refuses a call, or when no server listens."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tutti import cli, store
from tutti.base.terminal import Progress
from tutti.bench.ttft.workloads import export
from tutti.commands import demo as cli_demo
from tutti.errors import CapacityError, system_message
from tutti.medium.layout import KVLayout

LAYOUT = KVLayout.mha(2, 1, 64, 32, "bfloat16", model="test-model")
TUTTI = [sys.executable, "-m", "tutti.cli"]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    store.format(path, LAYOUT, "16MiB")
    return path


def run(*argv: str | Path) -> int:
    return cli.main([str(word) for word in argv])


def test_what_the_system_refuses_has_a_place_and_a_remedy() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/mnt/x")
    assert system_message(full).startswith("/mnt/x: No space left on device; free space")
    odd = OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    assert system_message(odd).startswith("Invalid cross-device link; check ")
    assert system_message(OSError("a text of its own")) == "a text of its own"


@pytest.mark.parametrize(
    ("error", "code", "kind", "says"),
    [
        (PermissionError(errno.EACCES, "no", "/x"), 3, "PermissionError", "/x: no; change its per"),
        (MemoryError(), 3, "MemoryError", "out of memory; use smaller sizes"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt", "interrupted"),
        (cli._Terminated(), 143, "Terminated", "terminated by SIGTERM"),
        (RuntimeError("broken"), 70, "RuntimeError", "a bug in tutti"),
    ],
)
def test_every_end_is_one_json_document(
    error: BaseException,
    code: int,
    kind: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("tutti.commands.pool.layout_of", fails)
    assert run("format", tmp_path / "p", "--capacity", "16MiB", "--json") == code
    said = capsys.readouterr()
    found = json.loads(said.out)["error"]
    assert found["type"] == kind and says in found["message"]
    assert said.err.splitlines()[-1] == f"tutti: {found['message']}"
    assert ("Traceback" in said.err) == (code == 70)


def test_a_reader_that_goes_away(pool: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [*TUTTI, "info", pool], stdout=writer, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_result_that_cannot_be_written(pool: Path) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*TUTTI, "info", pool], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
        silent = subprocess.run([*TUTTI, "info", pool.parent / "none"], stderr=full, timeout=60)
    assert result.returncode == silent.returncode == 3
    assert result.stderr.startswith("tutti: cannot write the result: No space left on device;")
    assert len(result.stderr.splitlines()) == 1


def test_closed_streams_are_no_number_of_a_pool(pool: Path) -> None:
    """A library that writes to number 2 must not write into the pool."""
    script = """
import os, sys
from tutti import cli
from tutti.commands import fsck as cli_fsck
check = cli_fsck.check_files
def stray(*args, **more):
    found = check(*args, **more)
    os.write(1, b"stray"), os.write(2, b"stray")
    return found
cli_fsck.check_files = lambda *args, **more: stray(*args, **more)
for number in (0, 1, 2):
    os.close(number)
sys.stdin = sys.stdout = sys.stderr = None
sys.exit(cli.main(sys.argv[1:]))
"""
    before = pool.read_bytes()
    ended = subprocess.run([sys.executable, "-c", script, "fsck", pool], timeout=60)
    assert (ended.returncode, pool.read_bytes()) == (0, before)


def test_a_path_that_the_terminal_cannot_show(pool: Path) -> None:
    odd = os.fsencode(pool.parent) + b"/\xff\xc3\xa4"
    os.rename(pool, odd)
    for encoding in ("utf-8:strict", "ascii:strict"):
        ended = subprocess.run(
            [*TUTTI, "info", odd],
            capture_output=True,
            timeout=60,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        assert b"clean" in ended.stdout


def test_a_path_is_no_serial_number(
    pool: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pool.parent)
    for path in (pool, Path("new/pool"), Path("pool")):
        assert run("format", "--capacity", "16MiB", "--model", "tiny", "--force", path) == 2
        assert "put --force after the paths" in capsys.readouterr().err


def test_info_says_that_a_pool_was_truncated(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nbytes in (pool.stat().st_size - 4096, 4096):
        os.truncate(pool, nbytes)
        assert run("info", pool) == 3
        assert "it was truncated" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_format_that_is_ended_leaves_nothing(number: int, tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
from tutti import cli
write = os.pwrite
def ended(*args):
    os.pwrite = write
    os.kill(os.getpid(), {int(number)})
    return write(*args)
os.pwrite = ended
sys.exit(cli.main(sys.argv[1:]))
"""
    argv = ["format", tmp_path / "p", "--capacity", "16MiB", "--model", "tiny", "--prewrite"]
    ended = subprocess.run(
        [sys.executable, "-c", script, *argv], stderr=subprocess.PIPE, timeout=60, text=True
    )
    assert ended.returncode == 128 + number, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_work_goes_on_where_nobody_sees_how_far_it_is() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "full")

        def isatty(self) -> bool:
            return True

    with Progress("work", 2, stream=Full()) as bar:
        bar._shown_ns -= 10**10
        bar.advance(1)
    assert bar.done == 1


def test_a_demo_prints_what_it_cannot_keep(tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    assert "not kept: " in cli_demo._keep({}, tmp_path)


def test_a_file_that_may_not_be_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "w.jsonl"
    kept.write_text("kept\n")

    def refused(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        with pytest.raises(CapacityError, match="Permission denied; change its permissions"):
            export.write_lines(kept, ["new"])
    assert kept.read_text() == "kept\n"
    with pytest.raises(CapacityError, match="pass a file"):
        export.write_lines(tmp_path, ["new"])


def test_a_csv_that_cannot_be_written_is_refused_before_the_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.bench.simulate.run.build_workload", lambda _: pytest.fail("began"))
    (tmp_path / "file").write_text("")
    assert run("simulate", "--rates", "1", "--csv", tmp_path / "file" / "x.csv") == 3
    assert "cannot write " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("profile --medium . --out .", 2, ". is a folder; name a file in it"),
        ("sglang command --model m --path . --capacity 1GiB --option timeout_s=x", 2, "a number"),
        ("info ''", 2, "tutti: PATH is empty; pass a file"),
        ("ls ''", 2, "tutti: POOL is empty; pass a file"),
        ("serve --socket s --folder ''", 2, "tutti: --folder is empty; pass a file, a folder"),
        ("serve p --socket s --timeout -1", 2, "tutti: --timeout is -1.0; pass a number from 0"),
        ("serve p --socket s --pin-share nan", 2, "tutti: --pin-share is nan; pass a number"),
        ("bench slack --dir /nope", 2, "cannot use /nope: No such file or directory; correct"),
        ("bench residency --dir /proc", 2, "cannot use /proc: "),
        ("bench eviction --trace nope", 2, "cannot use nope: No such file or directory; correct"),
        ("bench slack --recorded nope", 2, "cannot use nope: No such file or directory; correct"),
        ("simulate --data nope", 2, "cannot use nope: No such file or directory; correct"),
        ("simulate --workload mooncake --data .", 2, "cannot use .: not a regular file; "),
        ("simulate --calibration nope", 2, "cannot use nope: No such file or directory; correct"),
        ("bench workload --workload leval --data .", 2, "no .jsonl of any task below "),
        ("demo --dir nope/inside", 2, "nope is not a folder; create it, or pass another --dir"),
    ],
)
def test_what_makes_no_sense_is_said_at_once(
    words: str,
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(words)) == code
    assert says in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_doctor_names_a_folder_that_is_not_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "theirs" / "pools"
    exists = Path.exists

    def seen(self: Path) -> bool:
        if self == inside:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return exists(self)

    monkeypatch.setattr(Path, "exists", seen)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert run("sglang", "doctor", "--path", inside) == 1
    assert f"{tmp_path} is not writable" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert run("sglang", "doctor", "--path", tmp_path / "file") == 1
    assert "neither a folder nor a pool" in " ".join(capsys.readouterr().out.split())
