"""Loads the shared library `tutti/_native.so` and declares the part of it that is not about rings.

The library is built from `kernels/native/*.cpp` when the package is installed; its interface is
`kernels/native/api.h`. Calls through ctypes release the GIL. Nothing here builds or downloads
anything: a library that is missing or of another version is an error that names the command to run.

The environment variable `TUTTI_NATIVE_LIBRARY` names another build of it: tests load builds with
sanitizers this way.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.errors import NativeError

ABI_VERSION = 11
#: Bytes of a page's hash, without the fingerprint: `kTuttiHashBytesMax`.
HASH_NBYTES_MAX = 112
LIBRARY_VARIABLE = "TUTTI_NATIVE_LIBRARY"
RECORD_NBYTES = 4096
NO_SLOT = 0xFFFFFFFF

Bytes = npt.NDArray[np.uint8]

#: The words of an array object with its address and its flags (numpy's `PyArrayObject_fields`).
_DATA, _FLAGS, _C_CONTIGUOUS = object.__basicsize__ // 8, object.__basicsize__ // 8 + 6, 1
_words_at = (ctypes.c_uint64 * (_FLAGS + 1)).from_address


def members(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Consecutive `_fields_` of one type; names: separated by spaces."""
    return tuple((name, kind) for name in names.split())


class NativeIndex(ctypes.Structure):
    """`struct tutti_index`: the arrays of one hash table, all owned by the caller."""

    _fields_ = (
        *members(ctypes.c_void_p, "keys table state pins access depth sequence hits"),
        *members(ctypes.c_uint64, "slots entries seed"),
        *members(ctypes.c_uint32, "ready_min ready_max slot_mask"),
    )


#: Buckets of the histogram of gaps (tutti/placement/reuse.py).
GAPS = 33


class NativeReuse(ctypes.Structure):
    """`struct tutti_reuse`."""

    _fields_ = (
        *members(ctypes.c_void_p, "used uses ghosts ghost_uses heads gaps known"),
        *members(ctypes.c_uint64, "slots buckets oldest gaps_sum references since"),
        ("hits", 3 * ctypes.c_double),
    )


class NativeDigests(ctypes.Structure):
    """`struct tutti_digests`."""

    _fields_ = (
        *members(ctypes.c_void_p, "slot sequence digests"),
        *members(ctypes.c_uint64, "entries layers"),
    )


class NativeLoadTables(ctypes.Structure):
    """`struct tutti_load_tables`."""

    _fields_ = (*members(ctypes.c_void_p, "index reuse digests"), ("group_slots", ctypes.c_uint64))


class NativeRecordIdentity(ctypes.Structure):
    """`struct tutti_record_identity`."""

    _fields_ = (
        *members(ctypes.c_uint8 * 16, "pool_uuid fingerprint"),
        ("epoch", ctypes.c_uint64),
        *members(ctypes.c_uint32, "member layers"),
    )


class NativeAllocator(ctypes.Structure):
    """`struct tutti_allocator`."""

    _fields_ = (
        *members(ctypes.c_void_p, "free longest next previous first last"),
        *members(ctypes.c_uint64, "members groups_per_member group_slots free_slots cursor"),
    )


class NativePutTables(ctypes.Structure):
    """`struct tutti_put_tables`."""

    _fields_ = (
        ("index", ctypes.c_void_p),
        ("reuse", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
    )


class NativeInsertion(ctypes.Structure):
    """`struct tutti_insertion`."""

    _fields_ = (
        *members(ctypes.c_void_p, "keys slots sequence depth has_digests access existing"),
        ("n", ctypes.c_uint64),
        *members(ctypes.c_uint32, "uses from_max state"),
    )


class NativePlacement(ctypes.Structure):
    """`struct tutti_placement`."""

    _fields_ = (
        *members(ctypes.c_void_p, "keys parents depths"),
        *members(ctypes.c_uint64, "n sequence"),
        *members(ctypes.c_uint32, "uses has_digests"),
    )


class NativePutRequest(ctypes.Structure):
    """`struct tutti_put_request`."""

    _fields_ = (
        *members(ctypes.c_char_p, "keys parent"),
        *members(ctypes.c_uint64, "n sequence number job"),
        *members(ctypes.c_uint32, "depth uses has_digests"),
    )


#: `kTuttiAnswerBytes`.
ANSWER_NBYTES = 96

_POINTER = ctypes.c_void_p
_U32 = ctypes.c_uint32
_U64 = ctypes.c_uint64
_I64 = ctypes.c_int64
_INDEX = ctypes.POINTER(NativeIndex)
_REUSE = ctypes.POINTER(NativeReuse)
_DIGESTS = ctypes.POINTER(NativeDigests)
_TABLES = ctypes.POINTER(NativeLoadTables)

#: By the name of a function: the type of its result, and those of its arguments.
Prototypes = dict[str, tuple[Any, tuple[Any, ...]]]

#: Takes microseconds for a few records, so it is declared for both ways to call the library.
_FILL: Prototypes = {
    "tutti_records_fill": (None, (_POINTER, _U64, _POINTER, _U32, *[_POINTER] * 4))
}

_PROTOTYPES: Prototypes = {
    "tutti_isa_best": (_U32, ()),
    "tutti_xxh3_64_isa": (_U64, (_U32, _POINTER, _POINTER, _U32)),
    "tutti_read_lines": (_U64, (_POINTER, _POINTER, _U32)),
    "tutti_crc32c": (_U32, (_POINTER, _U64, _U32)),
    "tutti_crc32c_table": (_U32, (_POINTER, _U64, _U32)),
    "tutti_records_seal": (None, (_POINTER, _U64)),
    "tutti_records_check": (_U64, (_POINTER, _U64, _POINTER)),
    **_FILL,
}

#: Calls of microseconds, which keep the GIL: to release and take it again would cost more.
_QUICK: Prototypes = {
    "tutti_object_keys": (None, (_POINTER, _POINTER, _U64, _U64, _POINTER)),
    "tutti_named_keys": (_U32, (_POINTER, _POINTER, _U64, _U64, _POINTER)),
    "tutti_index_match": (_U64, (_INDEX, _POINTER, _U64, _U32, _POINTER)),
    "tutti_index_find": (_U64, (_INDEX, _POINTER, _U64, _POINTER)),
    "tutti_index_unpin": (_I64, (_INDEX, _POINTER, _U64)),
    "tutti_pins_take": (_U64, (_POINTER, _POINTER, _U64, _U64, _U32, _POINTER)),
    "tutti_pins_give_back": (_U64, (_POINTER, _POINTER, _U64)),
    "tutti_index_absent": (_I64, (_INDEX, _POINTER, _U64, _U32, _POINTER)),
    "tutti_index_insert": (_I64, (_INDEX, _POINTER)),
    "tutti_index_move": (_I64, (_INDEX, _POINTER, _U64, _U32, _U32, _U32)),
    "tutti_index_remove": (_U64, (_INDEX, _POINTER, _U64)),
    "tutti_reuse_evicted": (_I64, (_REUSE, _POINTER, _POINTER, _U64)),
    "tutti_reuse_loaded": (_I64, (_REUSE, _POINTER, _U64, _I64)),
    "tutti_reuse_missed": (_I64, (_REUSE, _POINTER, _U64, _I64, _I64)),
    "tutti_reuse_stored": (_I64, (_REUSE, _POINTER, _POINTER, _U64, _I64)),
    "tutti_load_answer": (_I64, (_TABLES, _POINTER, _U64, _U32, _U32, _U64, _POINTER)),
    "tutti_put_answer": (_I64, (_POINTER, _POINTER, _POINTER)),
    "tutti_load_start": (_I64, (_TABLES, *[_POINTER] * 5)),
    "tutti_put_pack": (
        ctypes.c_int,
        (_POINTER, _U64, _POINTER, _U32, _POINTER, _U32, _U64, _POINTER),
    ),
    "tutti_put_start": (ctypes.c_int, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "tutti_put_end": (ctypes.c_int, (_POINTER, _U64, _POINTER)),
    "tutti_slot_job_start": (ctypes.c_int, (_POINTER, _POINTER, _U64, _POINTER)),
    **_FILL,
    "tutti_allocator_rebuild": (None, (_POINTER,)),
    "tutti_allocator_allocate": (_U64, (_POINTER, _U64, _I64, _POINTER)),
    "tutti_allocator_free": (_I64, (_POINTER, _POINTER, _U64)),
    "tutti_put_place": (_I64, (_POINTER, _POINTER, _POINTER)),
    "tutti_digests_put": (None, (_DIGESTS, _POINTER, _POINTER, _U64, _POINTER)),
}


def load(path: Path) -> ctypes.CDLL:
    """Loads the library at `path` and declares its functions.

    Raises NativeError when it is missing, cannot be loaded or has another ABI version, or when
    numpy's arrays do not have the memory layout that `address` expects.
    """
    array = np.zeros((2, 2), np.uint8)
    turned = array.T  # not C-contiguous
    flags = [_words_at(id(a))[_FLAGS] & _C_CONTIGUOUS for a in (array, turned)]
    if flags != [1, 0] or address(array) != array.ctypes.data:
        message = f"the arrays of numpy {np.__version__} are unknown; install an older version"
        raise NativeError(message)
    try:
        library = ctypes.CDLL(str(path))
        library.tutti_abi_version.restype = _U32
        version = int(library.tutti_abi_version())
    except (OSError, AttributeError) as error:
        message = f"the native library {path} cannot be loaded ({error}); run `make install`"
        raise NativeError(message) from error
    if version != ABI_VERSION:
        raise NativeError(
            f"the native library {path} has ABI version {version}, this package needs "
            f"{ABI_VERSION}; run `make install` to rebuild it"
        )
    return declare(library, _PROTOTYPES)


def declare(library: ctypes.CDLL, prototypes: Prototypes) -> ctypes.CDLL:
    """Sets the types of these functions, and returns the library.

    Raises NativeError when it lacks one because it was built from other sources.
    """
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name, None)
        if function is None:
            message = f"the native library has no function {name}; run `make install` to rebuild it"
            raise NativeError(message)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def lib() -> ctypes.CDLL:
    """The library next to this file, or the one that `LIBRARY_VARIABLE` names; see `load`."""
    return load(_path())


@cache
def quick() -> ctypes.CDLL:
    """The same library for calls of microseconds, which keep the GIL."""
    lib()  # it checks the version
    return declare(ctypes.PyDLL(str(_path())), _QUICK)


def _path() -> Path:
    named = os.environ.get(LIBRARY_VARIABLE)
    return Path(named) if named else Path(__file__).with_name("_native.so")


def address(array: npt.NDArray[Any]) -> int:
    """The address of an array's first byte; the array must be C-contiguous.

    Read from the array itself: the buffer protocol, on which array.ctypes and ctypes' from_buffer
    build, describes the whole array first and takes several times as long.
    """
    assert type(array) is np.ndarray or isinstance(array, np.ndarray), "only an array has one"
    words = _words_at(id(array))
    assert words[_FLAGS] & _C_CONTIGUOUS, "native code needs a C-contiguous array"
    place: int = words[_DATA]
    return place


def object_keys(fingerprint: bytes, hashes: Bytes) -> Bytes:
    """XXH3-128(fingerprint || hash) of each row of (n, at most HASH_NBYTES_MAX): (n, 16) uint8."""
    hashes = np.ascontiguousarray(hashes)
    n, nbytes = hashes.shape
    keys = np.empty((n, 16), np.uint8)
    quick().tutti_object_keys(fingerprint, address(hashes), n, nbytes, address(keys))
    return keys


def named_keys(fingerprint: bytes, names: Sequence[str]) -> Bytes | None:
    """As `object_keys`, of hashes in hexadecimal; None unless all are that and of one length."""
    n, digits = len(names), len(names[0])
    # Native code checks where the line feeds are; with the total length, all names have one length.
    text = "\n".join(names).encode(errors="replace")
    nbytes, odd = divmod(digits, 2)
    if odd or not 0 < nbytes <= HASH_NBYTES_MAX or len(text) != n * (digits + 1) - 1:
        return None
    keys = np.empty((n, 16), np.uint8)
    is_right = quick().tutti_named_keys(fingerprint, text, n, nbytes, address(keys))
    return keys if is_right else None


def _count_records(records: npt.NDArray[Any]) -> int:
    assert records.nbytes % RECORD_NBYTES == 0, "records are 4096 bytes each"
    return records.nbytes // RECORD_NBYTES


def records_seal(records: npt.NDArray[Any]) -> None:
    """Writes the CRC32C of bytes 0..4091 of every 4096-byte record to its last four bytes.

    `records` is any C-contiguous array whose size is a multiple of 4096 bytes.
    """
    lib().tutti_records_seal(address(records), _count_records(records))


def records_check(records: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """For every 4096-byte record, shape (n,): whether its CRC32C fits."""
    ok = np.zeros(_count_records(records), np.uint8)
    lib().tutti_records_check(address(records), ok.size, address(ok))
    return ok.view(np.bool_)
