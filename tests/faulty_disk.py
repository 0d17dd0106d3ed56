"""A file system whose medium misbehaves on demand: `FaultyDisk`, a FUSE server over a folder.

What is tested above it runs unchanged. Needs the right to mount; without it
`FaultyDisk.refusal` is the reason.
The protocol is that of include/uapi/linux/fuse.h, version 7.31, as far as pools need it.

    faulty_disk.py FOLDER MOUNTPOINT     serves until its standard input ends
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType

_WRITE_MAX_NBYTES = 1 << 20
_HEADER, _REPLY = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ROOT = 1
# INIT flags: asynchronous reads, writes beyond 4 KiB, asynchronous direct I/O, max_pages.
_FLAGS = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 22
_OPEN_DIRECT_IO = 1
_SET_SIZE = 8
_NO_REPLY = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
_READ, _WRITE = 15, 16
_MNT_DETACH = 2


@dataclass(frozen=True)
class Faults:
    """Chances are of one request; a request is what the kernel sends, at most 1 MiB.

    read_error, write_error: it fails with `number`. torn: half of a write lands, then it fails.
    lost: a write is acknowledged, and nothing lands. flip: a read returns a flipped bit.
    delay_s: each request takes so much longer. hang: reads and writes get no answer until this
    ends.
    """

    seed: int = 0
    read_error: float = 0.0
    write_error: float = 0.0
    number: int = errno.EIO
    torn: float = 0.0
    lost: float = 0.0
    flip: float = 0.0
    delay_s: float = 0.0
    hang: bool = False


class FaultyDisk:
    """A mounted file system. Use it as a context manager; `folder` has the files as they are."""

    def __init__(self, folder: Path, mountpoint: Path) -> None:
        self.folder, self.mountpoint = folder, mountpoint
        for path in (folder, mountpoint):
            path.mkdir()
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(folder), str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.refusal = self._answer().get("refusal", "")

    def __enter__(self) -> FaultyDisk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Everything that still waits for the disk fails."""
        self._server.kill()
        self._server.wait(30)
        if not self.refusal:
            _libc().umount2(os.fsencode(self.mountpoint), _MNT_DETACH)

    def set(self, faults: Faults) -> dict[str, int]:
        """From now on; returns how many faults of each kind the ones before have made."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(asdict(faults)) + "\n")
        self._server.stdin.flush()
        return {name: int(count) for name, count in self._answer().items()}

    def _answer(self) -> dict[str, str]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError("the faulty disk's server has ended")
        answer: dict[str, str] = json.loads(line)
        return answer


class _Disk:
    """The server's side: requests of the kernel, one after the other."""

    def __init__(self, folder: Path, device: int) -> None:
        self._folder, self._device = folder, device
        self._paths: dict[int, str] = {_ROOT: "."}
        self._faults, self._random = Faults(), random.Random(0)
        self._made = {field.name: 0 for field in fields(Faults)}
        self._held: list[tuple[int, int, int, bytes]] = []
        self._calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._look_up,
            3: lambda node, body: struct.pack("<QII", 0, 0, 0) + self._attributes(node),
            4: self._set_attributes,
            9: self._make_folder,
            10: self._remove,
            14: self._open,
            _READ: self._read,
            _WRITE: self._write,
            17: self._space,
            18: self._close,
            20: lambda node, body: b"",  # FSYNC
            25: lambda node, body: b"",  # FLUSH
            26: self._begin,
            35: self._create,
            43: self._allocate,
        }

    def serve(self) -> None:
        """Until the standard input ends, with which the mount ends too."""
        buffer = bytearray(_WRITE_MAX_NBYTES + 4096)
        alive = True
        while alive:
            ready, _, _ = select.select([self._device, sys.stdin], [], [])
            if sys.stdin in ready:
                alive = self._take_orders()
            if self._device in ready:
                nbytes = os.readv(self._device, [buffer])
                _, call, unique, node, *_ = _HEADER.unpack_from(buffer)
                body = bytes(buffer[_HEADER.size : nbytes])
                if self._faults.hang and call in (_READ, _WRITE):
                    self._made["hang"] += 1
                    self._held.append((call, unique, node, body))
                else:
                    self._answer(call, unique, node, body)

    def _take_orders(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        self._faults = Faults(**json.loads(line))
        self._random = random.Random(self._faults.seed)
        print(json.dumps(self._made), flush=True)
        self._made = dict.fromkeys(self._made, 0)
        held, self._held = self._held, []
        if self._faults.hang:
            self._held = held
        else:
            for request in held:
                self._answer(*request)
        return True

    def _answer(self, call: int, unique: int, node: int, body: bytes) -> None:
        if self._faults.delay_s and call in (_READ, _WRITE):
            time.sleep(self._faults.delay_s)
        try:
            if call not in self._calls:
                raise OSError(errno.ENOSYS, "")
            result, code = self._calls[call](node, body), 0
        except OSError as error:
            result, code = b"", -(error.errno or errno.EIO)
        if call not in _NO_REPLY:
            header = _REPLY.pack(_REPLY.size + len(result), code, unique)
            try:
                os.writev(self._device, [header, result])
            except FileNotFoundError:  # the client was killed
                return

    def _path(self, node: int, name: bytes = b"") -> Path:
        return self._folder / self._paths[node] / os.fsdecode(name.rstrip(b"\0"))

    def _strikes(self, what: str) -> bool:
        if self._random.random() >= getattr(self._faults, what):
            return False
        self._made[what] += 1
        return True

    def _begin(self, node: int, body: bytes) -> bytes:
        return struct.pack(
            "<4I2H2I2H28x", 7, 31, 0, _FLAGS, 64, 48, _WRITE_MAX_NBYTES, 1,
            _WRITE_MAX_NBYTES // 4096, 0,
        )  # fmt: skip

    def _attributes(self, node: int) -> bytes:
        stat = self._path(node).stat()
        times = [int(stat.st_atime), int(stat.st_mtime), int(stat.st_ctime)]
        owner = [stat.st_mode, stat.st_nlink, stat.st_uid, stat.st_gid]
        return _ATTRIBUTES.pack(
            node, stat.st_size, stat.st_blocks, *times, 0, 0, 0, *owner, 0, 4096, 0
        )

    def _entry(self, path: Path) -> bytes:
        path.stat()
        name = str(path.relative_to(self._folder))
        known = [node for node, there in self._paths.items() if there == name]
        node = known[0] if known else max(self._paths) + 1
        self._paths[node] = name
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self._attributes(node)

    def _look_up(self, node: int, body: bytes) -> bytes:
        return self._entry(self._path(node, body))

    def _set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & _SET_SIZE:
            os.truncate(self._path(node), size)
        return struct.pack("<QII", 0, 0, 0) + self._attributes(node)

    def _make_folder(self, node: int, body: bytes) -> bytes:
        path = self._path(node, body[8:])
        path.mkdir(mode=struct.unpack_from("<I", body)[0] & 0o777)
        return self._entry(path)

    def _remove(self, node: int, body: bytes) -> bytes:
        self._path(node, body).unlink()
        return b""

    def _open(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QIi", os.open(self._path(node), os.O_RDWR), _OPEN_DIRECT_IO, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        path = self._path(node, body[16:])
        flags, mode = struct.unpack_from("<II", body)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | flags & os.O_EXCL, mode & 0o777)
        return self._entry(path) + struct.pack("<QIi", handle, _OPEN_DIRECT_IO, 0)

    def _close(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        if self._strikes("read_error"):
            raise OSError(self._faults.number, "")
        data = os.pread(handle, size, offset)
        if data and self._strikes("flip"):
            at = self._random.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        return data

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        data = body[40 : 40 + size]
        if self._strikes("write_error"):
            raise OSError(self._faults.number, "")
        if self._strikes("torn"):
            os.pwrite(handle, data[: size // 2], offset)
            raise OSError(self._faults.number, "")
        if not self._strikes("lost"):
            os.pwrite(handle, data, offset)
        return struct.pack("<II", size, 0)

    def _space(self, node: int, body: bytes) -> bytes:
        stat = os.statvfs(self._folder)
        counts = (stat.f_blocks, stat.f_bfree, stat.f_bavail, stat.f_files, stat.f_ffree)
        return struct.pack("<5Q4I24x", *counts, stat.f_bsize, stat.f_namemax, stat.f_frsize, 0)

    def _allocate(self, node: int, body: bytes) -> bytes:
        handle, offset, length, mode = struct.unpack_from("<QQQI", body)
        if _libc().fallocate(handle, mode, ctypes.c_long(offset), ctypes.c_long(length)):
            raise OSError(ctypes.get_errno(), "")
        return b""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _main(folder: Path, mountpoint: Path) -> None:
    _libc().prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: it ends with the tests
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if _libc().mount(b"faulty-disk", os.fsencode(mountpoint), b"fuse", 6, options):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        print(json.dumps({"refusal": f"no FUSE file system can be mounted: {error}"}), flush=True)
        return
    print("{}", flush=True)
    _Disk(folder, device).serve()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
