"""The file controller where the kernel refuses something: in processes of their own."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from nvme_host import LBA

from tutti.base.units import MiB
from tutti.gio_uring.file_creation import allocate_file

CHILD_TIMEOUT_S = 60


@pytest.fixture
def path(tmp_path: Path, seed: int) -> Path:
    file = tmp_path / "member"
    allocate_file(file, 4 * MiB)
    file.write_bytes(random.Random(seed).randbytes(4 * MiB))
    return file


def run_child(source: str, *arguments: object) -> str:
    """Runs Python source in a process of its own, for what cannot be undone in this one."""
    here = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    script = f"import sys\nsys.path[:0] = {here!r}\n" + textwrap.dedent(source)
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SECCOMP = """
    import ctypes, struct
    # Classic BPF on struct seccomp_data (linux/seccomp.h): EPERM for system call 425,
    # io_uring_setup on every architecture; everything else is allowed.
    LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
    ALLOW, ERRNO, EPERM = 0x7FFF0000, 0x00050000, 1
    code = [(LOAD, 0, 0, 0), (JUMP_EQUAL, 0, 1, 425), (RETURN, 0, 0, ERRNO | EPERM),
            (RETURN, 0, 0, ALLOW)]
    program = b"".join(struct.pack("<HBBI", *line) for line in code)
    memory = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(
        struct.pack("@HP", len(code), ctypes.addressof(memory)))
    libc = ctypes.CDLL(None, use_errno=True)
    NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2
    assert libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(SET_SECCOMP, FILTER, header, 0, 0) == 0, ctypes.get_errno()
    from nvme_host import LBA, NvmeHost
    from tutti.errors import Unsupported
    from tutti.gio_uring.controller_file import FileController
    try:
        FileController([sys.argv[1]], executor="uring")
    except Unsupported as error:
        print(error)
    with FileController([sys.argv[1]]) as controller:
        print(controller.executor_name, controller.fallback_reason)
        host = NvmeHost(controller)
        assert host.write(3, b"y" * LBA) == 0
        assert host.flush() == 0
        assert host.read(3, 1).tobytes() == b"y" * LBA
        host.close()
"""


def test_threads_take_over_in_a_sandbox(path: Path) -> None:
    """A real seccomp filter, as container runtimes install it."""
    refusal, executor = run_child(SECCOMP, path).splitlines()
    assert "refused: Operation not permitted" in refusal
    assert executor.startswith("threads Operation not permitted: a sandbox")
    assert path.read_bytes()[3 * LBA :][:LBA] == b"y" * LBA
