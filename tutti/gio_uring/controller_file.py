"""NVMe commands executed on files and block devices, by io_uring or by threads.

Namespace i+1 is file i. Files are opened for direct I/O where their file system has it; each
`FileMember` says whether it has, and why not. How commands become requests to the kernel:
`kernels/native/controller_file.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tutti.errors import (
    CapacityError,
    ConfigError,
    MediumError,
    PoolInUse,
    PoolNotFound,
    PoolReadOnly,
    TuttiError,
    Unsupported,
)
from tutti.gio_uring import _native
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.memory import DmaRegion
from tutti.units import KiB, MiB, format_nbytes

EXECUTORS = ("auto", "uring", "threads")

#: Progress of `allocate_file`: bytes done, bytes in all.
Progress = Callable[[int, int], None]

_P = ctypes.c_void_p
_I = ctypes.c_int
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64

_DIRECT = 1  # FileNamespace::flags
_READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOCK_NAP_S = 0.02
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PREWRITE_NBYTES = 4 * MiB

_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "gio_file_controller_create": (_I, (_P, _P)),
    "gio_file_controller_executor": (_U32, (_P, _P)),
    "gio_file_controller_stats": (None, (_P, _P)),
    "gio_file_controller_sleep_max": (None, (_P, _U64)),
    "gio_file_controller_add_buffer": (_I, (_P, _U64, _U64)),
    "gio_file_controller_remove_buffer": (_I, (_P, _U64)),
    "gio_file_alignment": (_I, (_I, _P, _P)),
    "gio_uring_refusal": (_I, ()),
}


@cache
def _lib() -> ctypes.CDLL:
    library = _native.lib()
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


class FileNamespaceStruct(ctypes.LittleEndianStructure):
    """`gio::FileNamespace`."""

    _fields_ = (
        ("fd", _I),
        ("flags", _U32),
        ("nlb", _U64),
        ("memory_alignment", _U32),
        ("offset_alignment", _U32),
    )


class FileConfigStruct(ctypes.LittleEndianStructure):
    """`gio::FileConfig`."""

    _fields_ = (
        ("namespaces", _U64),
        ("n_namespaces", _U32),
        ("lba_shift", _U32),
        ("mdts_nbytes", _U32),
        ("request_nbytes_max", _U32),
        ("requests", _U32),
        ("executor", _U32),
        ("threads", _U32),
        ("record_fd", _I),
    )


class FileStats(ctypes.LittleEndianStructure):
    """`gio::FileStats`: totals since creation.

    commands: fetched. requests: handed to the kernel, repetitions not counted. joined: commands,
    or parts of one, that went with an adjacent one. bounced: requests whose memory direct I/O does
    not take. repeated: requests continued or done again after short transfers and errors.
    """

    _fields_ = (
        ("commands", _U64),
        ("requests", _U64),
        ("nbytes_read", _U64),
        ("nbytes_written", _U64),
        ("joined", _U64),
        ("bounced", _U64),
        ("repeated", _U64),
    )


class FileMember:
    """One open file or block device; closed by `close`, or when it is collected.

    file: a path, or the number of an open file, which is duplicated and kept as it was opened.
    direct: whether to ask for direct I/O at all (paths only).

    fd: its number, for locks. nbytes: its size. direct: whether it is opened for direct I/O, with
    `memory_alignment` and `offset_alignment` in bytes; else `buffered_reason` says why it is not.

    Raises PoolNotFound, PoolReadOnly, ConfigError for what is no file, else MediumError.
    """

    def __init__(self, file: str | os.PathLike[str] | int, *, direct: bool = True) -> None:
        self.name = f"file {file}" if isinstance(file, int) else os.fspath(file)
        self.buffered_reason: str | None = None
        self.memory_alignment = self.offset_alignment = 1
        if isinstance(file, int):
            self.fd = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 0)
            direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
            self._set_direct(direct, "it was opened so")
        else:
            self.fd = self._open(self.name, direct)
        self._finalizer = weakref.finalize(self, _unlock_and_close, self.fd)
        self.nbytes = self._size()
        if self.direct:
            self._find_alignment()

    def _open(self, path: str, direct: bool) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        self._set_direct(direct, "direct I/O was not asked for")
        try:
            if direct:
                try:
                    return os.open(path, flags | os.O_DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._set_direct(False, "its file system refuses O_DIRECT")
            return os.open(path, flags)
        except OSError as error:
            raise _open_error(path, error) from error

    def _size(self) -> int:
        status = os.fstat(self.fd)
        if stat.S_ISREG(status.st_mode):
            return status.st_size
        if not stat.S_ISBLK(status.st_mode):
            raise ConfigError(f"{self.name} is no file and no block device; give one of those")
        return os.lseek(self.fd, 0, os.SEEK_END)

    def _find_alignment(self) -> None:
        memory, offset = _U32(), _U32()
        result = _lib().gio_file_alignment(self.fd, ctypes.byref(memory), ctypes.byref(offset))
        if result == -errno.EOPNOTSUPP:
            self.give_up_direct("its file system has no direct I/O")
            return
        remedy = "check the medium, or open the file without direct I/O"
        _native.check(result, f"cannot tell the alignment of {self.name}", remedy, MediumError)
        self.memory_alignment, self.offset_alignment = memory.value, offset.value

    def give_up_direct(self, reason: str) -> None:
        """Go through the page cache from here on."""
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.memory_alignment = self.offset_alignment = 1
        self._set_direct(False, reason)

    def _set_direct(self, direct: bool, reason: str) -> None:
        self.direct = direct
        self.buffered_reason = None if direct else reason

    def lock(self, timeout_s: float = 2.0) -> None:
        """Makes this the only open file that is locked, until `close`.

        The lock belongs to the open file that the kernel's transfers use, so after a process was
        killed it holds until the last of them has ended; therefore this tries for `timeout_s`.
        Raises PoolInUse.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(PoolInUse):
                return _lock(self.fd, self.name)
            time.sleep(_LOCK_NAP_S)
        return _lock(self.fd, self.name)

    def close(self) -> None:
        """A second call does nothing."""
        self._finalizer()


class FileController(NativeController):
    """NVMe over files.

    files: paths, numbers of open files or `FileMember`s; the controller closes what it opened.
    lba_nbytes: the block size, 512 to 65536. mdts_nbytes: largest transfer of one command.
    request_nbytes_max: adjacent commands are joined and long ones cut to this. requests: most
    under way. executor: "auto" takes io_uring unless it is refused, see `executor_name` and
    `fallback_reason`. threads: of the threads executor. registered_buffers: ask the kernel to keep
    registered memory pinned, which saves CPU; `buffers_reason` says why it could not.
    record_fd: an open file that receives what reached the medium (`RecordHeader` in
    `kernels/native/executor.h`), for tests of power loss.

    Raises what FileMember raises, ConfigError for unacceptable arguments, Unsupported where
    executor="uring" is refused.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str] | int | FileMember],
        *,
        lba_nbytes: int = 4 * KiB,
        mdts_nbytes: int = MiB,
        request_nbytes_max: int = 512 * KiB,
        requests: int = 256,
        executor: str = "auto",
        threads: int = 4,
        registered_buffers: bool = False,
        record_fd: int | None = None,
    ) -> None:
        if executor not in EXECUTORS:
            raise ConfigError(f"no executor {executor!r}; use one of {', '.join(EXECUTORS)}")
        if lba_nbytes & (lba_nbytes - 1) or not 512 <= lba_nbytes <= 64 * KiB:
            raise ConfigError(f"lba_nbytes={lba_nbytes} is no power of two from 512 to 65536")
        if not files:
            raise ConfigError("a controller without files; give at least one")
        self.members: list[FileMember] = []
        self._own_members: list[FileMember] = []
        try:
            self._take_members(files, lba_nbytes)
            config = FileConfigStruct(
                n_namespaces=len(self.members),
                lba_shift=lba_nbytes.bit_length() - 1,
                mdts_nbytes=mdts_nbytes,
                request_nbytes_max=request_nbytes_max,
                requests=requests,
                executor=EXECUTORS.index(executor),
                threads=threads,
                record_fd=-1 if record_fd is None else record_fd,
            )
            handle = self._create(config, lba_nbytes)
        except BaseException:
            self._close_members()
            raise
        super().__init__(handle)
        self._registers = registered_buffers
        self._fixed: set[int] = set()
        self.buffers_reason: str | None = None
        self.executor_name, self.fallback_reason = self._read_executor()

    def _take_members(
        self, files: Sequence[str | os.PathLike[str] | int | FileMember], lba_nbytes: int
    ) -> None:
        for file in files:
            member = file if isinstance(file, FileMember) else FileMember(file)
            self.members.append(member)
            if member is not file:
                self._own_members.append(member)
            if member.direct and lba_nbytes % member.offset_alignment:
                member.give_up_direct(
                    f"blocks of {lba_nbytes} bytes are smaller than its direct I/O,"
                    f" {member.offset_alignment}"
                )
            if member.nbytes < lba_nbytes:
                raise ConfigError(
                    f"{member.name} has {member.nbytes} bytes, less than a block of {lba_nbytes};"
                    " allocate it first"
                )

    def _create(self, config: FileConfigStruct, lba_nbytes: int) -> int:
        namespaces = (FileNamespaceStruct * len(self.members))()
        for entry, member in zip(namespaces, self.members, strict=True):
            entry.fd = member.fd
            entry.flags = _DIRECT if member.direct else 0
            entry.nlb = member.nbytes // lba_nbytes
            entry.memory_alignment = member.memory_alignment
            entry.offset_alignment = member.offset_alignment
        config.namespaces = ctypes.addressof(namespaces)
        handle = _P()
        result = _lib().gio_file_controller_create(ctypes.byref(config), ctypes.byref(handle))
        if config.executor == EXECUTORS.index("uring") and (reason := uring_refusal()):
            raise Unsupported(f"io_uring is refused: {reason}; use executor='auto' or 'threads'")
        remedy = (
            "sizes are at least one block, requests 1 to 4096 and threads 1 to 64; with fewer of"
            " both it needs less"
        )
        _native.check(result, "cannot create a file controller", remedy, ConfigError)
        return int(handle.value or 0)

    def _read_executor(self) -> tuple[str, str | None]:
        error = _I()
        kind = _lib().gio_file_controller_executor(self.handle, ctypes.byref(error))
        return EXECUTORS[kind], _refusal(error.value)

    @property
    def direct(self) -> bool:
        """Whether every file is opened for direct I/O; see `members` for the reasons."""
        return all(member.direct for member in self.members)

    def register(self, buffer: Any) -> DmaRegion:
        """As NativeController.register; with registered_buffers the kernel pins it as well."""
        region = super().register(buffer)
        if self._registers:
            result = _lib().gio_file_controller_add_buffer(
                self.handle, region.address, region.nbytes
            )
            self._fixed.add(region.address)  # a part of it may be
            if result < 0:
                self.buffers_reason = f"{os.strerror(-result)}; RLIMIT_MEMLOCK may be too low"
        return region

    def _unregister(self, region: DmaRegion) -> None:
        if region.address in self._fixed and not self.is_closed:
            self._fixed.discard(region.address)
            _lib().gio_file_controller_remove_buffer(self.handle, region.address)
        super()._unregister(region)

    def start(self, poll_us: int = 50) -> None:
        """As NativeController.start, looking at the doorbells at least every `poll_us`.

        Submitters on a GPU ring and cannot wake.
        """
        _lib().gio_file_controller_sleep_max(self.handle, poll_us * 1000)
        super().start()

    def stop(self) -> None:
        super().stop()
        if not self.is_closed:
            _lib().gio_file_controller_sleep_max(self.handle, 0)

    def stats(self) -> FileStats:
        """Totals since creation."""
        self._check_open()
        stats = FileStats()
        _lib().gio_file_controller_stats(self.handle, ctypes.byref(stats))
        return stats

    def close(self) -> None:
        super().close()
        self._close_members()

    def _close_members(self) -> None:
        for member in self._own_members:
            member.close()


def uring_refusal() -> str | None:
    """Why io_uring cannot be used in this process; None when it can."""
    return _refusal(int(_lib().gio_uring_refusal()))


def _refusal(error: int) -> str | None:
    if error == 0:
        return None
    text = os.strerror(-error)
    if -error in (errno.EPERM, errno.EACCES):
        return f"{text}: a sandbox or the sysctl kernel.io_uring_disabled forbids it"
    if -error in (errno.ENOSYS, errno.EINVAL):
        return f"{text}: this kernel has none, or one older than Linux 5.11"
    return text


def _open_error(path: str, error: OSError) -> TuttiError:
    reason = f"cannot open {path} for writing: {error.strerror}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return PoolNotFound(f"{path} does not exist; format a pool there, or correct the path")
    if error.errno in _READ_ONLY_ERRNOS:
        return PoolReadOnly(f"{reason}; change its permissions or remount it writable")
    if error.errno in (errno.ENXIO, errno.ENODEV, errno.EIO):
        return MediumError(f"{reason}; check the device")
    return ConfigError(f"{reason}; give a file or a block device")


def allocate_file(
    path: str | os.PathLike[str],
    nbytes: int,
    prewrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Make a file of exactly `nbytes` whose blocks exist, new or out of one that is there.

    What an existing file holds is kept or becomes zeros. prewrite: write zeros once and flush, so
    that later writes convert no extents. A block device only has to be large enough. `progress`
    is called with (bytes done, nbytes).

    Raises CapacityError without enough space (a new file is removed then), PoolInUse when another
    process holds the file's lock, PoolReadOnly, PoolNotFound when the folder does not exist.
    """
    name = os.fspath(path)
    is_new = not os.path.lexists(name)
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise PoolNotFound(f"the folder of {name} does not exist; create it first") from error
        raise _open_error(name, error) from error
    try:
        _lock(fd, name)
        _reserve(fd, name, nbytes)
        if prewrite:
            _prewrite(fd, nbytes, progress)
        os.fsync(fd)
        _sync_folder(name)
    except BaseException as error:
        if is_new:
            Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _FULL_ERRNOS:
            raise CapacityError(
                f"no room for {format_nbytes(nbytes)} in {name}: {error.strerror}; free space or"
                " choose a smaller capacity"
            ) from error
        if isinstance(error, OSError):
            reason = f"cannot allocate {name}: {error.strerror}"
            raise MediumError(f"{reason}; check the device and its file system") from error
        raise
    finally:
        os.close(fd)
    if progress is not None:
        progress(nbytes, nbytes)


def _unlock_and_close(fd: int) -> None:
    # A ring lets go of its files some time after it was closed: closing alone would unlock late.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _lock(fd: int, name: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PoolInUse(
            f"{name} is in use by another process or another store; close it there first"
        ) from error


def _reserve(fd: int, name: str, nbytes: int) -> None:
    if stat.S_ISBLK(os.fstat(fd).st_mode):
        available = os.lseek(fd, 0, os.SEEK_END)
        if available < nbytes:
            raise CapacityError(
                f"{name} has {format_nbytes(available)}, not {format_nbytes(nbytes)}; choose a"
                " smaller capacity"
            )
        return
    os.posix_fallocate(fd, 0, nbytes)
    os.ftruncate(fd, nbytes)


def _prewrite(fd: int, nbytes: int, progress: Progress | None) -> None:
    """Zeros over the whole file, past the page cache where that is possible."""
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if nbytes % mmap.PAGESIZE == 0:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:
        pass  # through the page cache, then
    with mmap.mmap(-1, _PREWRITE_NBYTES) as zeros, memoryview(zeros) as view:
        done = 0
        while done < nbytes:
            part = view[: min(_PREWRITE_NBYTES, nbytes - done)]
            written = os.pwrite(fd, part, done)
            part.release()
            done += written
            if progress is not None and done < nbytes:
                progress(done, nbytes)


def _sync_folder(name: str) -> None:
    """Make the file's directory entry durable."""
    fd = os.open(Path(name).absolute().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
