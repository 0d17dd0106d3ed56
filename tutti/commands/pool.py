"""`tutti format` and `tutti info`: make a pool, and show its geometry and usage."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tutti import store
from tutti.arguments import add_layout, add_paths, layout_of, nbytes, options, say_capacity
from tutti.base.terminal import Progress, facts, table
from tutti.base.units import format_nbytes
from tutti.commands.members import check_exist, existing_members
from tutti.commands.outcome import CommandResult
from tutti.errors import ConfigError, PoolCorrupt, PoolNotFound
from tutti.gio_uring.drives.device_content import LABEL
from tutti.gio_uring.drives.generic_device import readable_path
from tutti.gio_uring.file_member import lock_owner
from tutti.medium.geometry import BLOCK_NBYTES, Geometry
from tutti.medium.layout import KVLayout
from tutti.medium.slot_record import RecordState
from tutti.medium.superblock import (
    PoolState,
    Superblock,
    check_members,
    check_size,
    choose_superblock,
    decode_snapshot,
)
from tutti.pool import replacement
from tutti.pool.block_io import opened_io
from tutti.pool.member_controller import are_drives, open_controller
from tutti.pool.places import is_device
from tutti.pool.pool_format import label, pool_members

_FORMAT = """\
Creates an empty pool, striped over one or more files. All pages of a pool have one shape, which
cannot change later. The disk space is allocated immediately.

A folder gets a file of the pool: FOLDER/<model>-<fingerprint>/pool-tp0-pp0-cp0-dp0.tutti. A path
that does not exist is a file, unless it ends in "/".

A path can also be an NVMe namespace (/dev/ng0n1, or /dev/nvme0n1 through the block layer) or a
partition; `tutti nvme list` shows which are free. nvme:0000:03:00.0 is a whole drive bound to
vfio-pci (docs/vfio.md). A device that is in use is refused.

With --for-server, devices are erased and labelled, and no pool is made: SGLang's server later makes
its pools on them, with its own layout. It uses only devices with this label."""
_FORMAT_EXAMPLE = """\
example:
  tutti format pool.tutti --capacity 64GiB --model llama-3.1-8b
  tutti format /mnt/a/ /mnt/b/ --capacity 1TiB --model my-model \\
    --layers 48 --kv-heads 4 --head-dim 128
  tutti format /dev/ng0n1 --capacity 1TiB --model llama-3.1-8b --force S5GXNF0R
  tutti format /dev/ng0n1 /dev/ng1n1 --capacity 2TiB --model llama-3.1-8b \\
    --force S5GXNF0R --force S5GXNF0T
  tutti format /dev/ng0n1 /dev/ng1n1 --for-server"""
_INFO = """\
Shows a pool's geometry and usage from its superblocks. Nothing is written, and the pool may be in
use. Usage is shown only for cleanly closed pools; a running server reports it in its metrics.
A pool on drives (nvme:0000:03:00.0) must not be in use: drives are opened exclusively."""
_INFO_EXAMPLE = """\
example:
  tutti info pool.tutti
  tutti info pool.tutti --json"""


_STATES = {
    "in use": "in use by process {}",
    "clean": "closed cleanly",
    "not closed": "in use elsewhere, or not closed cleanly: the next open scans the slot tables",
}


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _FORMAT, _FORMAT_EXAMPLE
    add_paths(parser)
    option = options(parser)
    option("--capacity SIZE", None, "total size of the pool, e.g. 64GiB", nbytes)
    what = "label devices for SGLang, which then creates its own pools on them; creates none now"
    option("--for-server", False, what)
    add_layout(parser)
    what = "write every byte once now, so that first writes run at full speed"
    option("--prewrite", False, what)
    what = "overwrite existing files; to overwrite a drive, pass its serial number, once per"
    what += " drive. Their contents are destroyed"
    option("--force SERIAL", [], what, _serial, action="append", nargs="?", const=True)
    parser.set_defaults(run=run_format)


def _serial(text: str) -> str:
    """An argparse type: a serial number.  Paths are refused, except those behind loop devices."""
    if ("/" in text or os.path.exists(text)) and text not in _loop_files():
        raise argparse.ArgumentTypeError(
            f"{text!r} is a path, not a serial number; put --force after the paths"
        )
    return text


def _loop_files() -> list[str]:
    """The paths of the files behind loop devices, which are their serial numbers."""
    found = []
    for place in Path("/sys/class/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # detached just now
            found.append(place.read_text(errors="replace").strip())
    return found


def run_format(args: argparse.Namespace) -> CommandResult:
    """Formats a pool and reports its overhead."""
    serials = [serial for serial in args.force if serial and serial is not True]
    if args.for_server:
        return _label(args, serials)
    if args.capacity is None:
        raise ConfigError("--capacity is missing; pass it, or --for-server to label devices")
    layout = layout_of(args)
    check_exist(list(filter(is_device, args.paths)))
    say_capacity(args.capacity)
    with Progress("prewrite", 0, in_bytes=True) as bar:
        geometry = store.format(
            args.paths,
            layout,
            args.capacity,
            force=serials or True in args.force,
            prewrite=args.prewrite,
            progress=bar.update if args.prewrite else None,
        )
    paths = pool_members(args.paths, layout)
    members = len(paths)
    result = {
        "paths": paths,
        "layout": _layout_numbers(layout),
        "geometry": _geometry_numbers(geometry, layout, members),
        "prewritten": args.prewrite,
    }
    text = facts([*_layout_facts(layout), *_geometry_facts(geometry, layout, members)])
    return CommandResult(result, f"{text}\n\nThe pool is formatted and empty.")


def _label(args: argparse.Namespace, serials: list[str]) -> CommandResult:
    given = args.capacity, args.model, args.layers, args.kv_heads, args.head_dim, args.mla
    if given != (None,) * len(given) or args.any_model or args.weights or args.prewrite:
        raise ConfigError("the server chooses layout and capacity; pass --for-server without them")
    check_exist(list(filter(is_device, args.paths)))
    label(args.paths, force=serials)
    text = f"Labelled for a server's pools: {', '.join(args.paths)}"
    return CommandResult({"paths": args.paths, "labelled": True}, text)


def add_info(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _INFO, _INFO_EXAMPLE
    add_paths(parser)
    parser.set_defaults(run=run_info)


#: (offset, nbytes) of a member, both multiples of 4096, to its bytes.
_Read = Callable[[int, int], bytes]


@dataclass(frozen=True)
class _Member:
    """One member as found on the medium; counts are None without a snapshot."""

    path: str
    superblock: Superblock
    objects: int | None
    quarantined: int | None
    owner: int | None  # process that has it open


def run_info(args: argparse.Namespace) -> CommandResult:
    """Reads superblocks and snapshots, and takes no ownership."""
    paths = existing_members(args.paths)
    members = _read_drives(paths) if are_drives(paths) else [_read_file(path) for path in paths]
    with replacement.explained(paths):
        check_members([member.superblock for member in members], paths)
    newest = max((member.superblock for member in members), key=lambda s: s.generation)
    geometry, layout = newest.geometry, KVLayout.from_json(newest.layout_json)
    owners = sorted({member.owner for member in members if member.owner is not None})
    left = [] if owners else replacement.leftovers(paths)  # an owner may be a resize that runs
    slots = len(members) * geometry.slots
    objects = _total([member.objects for member in members])
    quarantined = _total([member.quarantined for member in members])
    created = datetime.datetime.fromtimestamp(newest.created_ns // 10**9, datetime.UTC)
    is_clean = all(member.superblock.state == PoolState.CLEAN for member in members)
    state = "in use" if owners else "clean" if is_clean else "not closed"
    result = {
        "pool_uuid": newest.pool_uuid.hex(),
        "created": created.isoformat(),
        "state": state,
        "owners": owners,
        "epoch": f"{newest.epoch:016x}",
        "generation": newest.generation,
        "next_sequence": newest.next_sequence,
        "objects": objects,
        "quarantined": quarantined,
        "layout": _layout_numbers(layout),
        "geometry": _geometry_numbers(geometry, layout, len(members)),
        "members": [
            {"path": m.path, "state": m.superblock.state.name.lower(), "objects": m.objects}
            for m in members
        ],
        "left_of_resize": left,
    }
    full = "unknown until the pool is closed cleanly"
    if objects is not None:
        full = f"{objects} of {slots} slots, {objects / slots:.1%}; {quarantined} quarantined"
    rows: list[tuple[str, object]] = [
        ("pool", newest.pool_uuid.hex()),
        ("created", created.isoformat()),
        ("state", _STATES[state].format(", ".join(map(str, owners)))),
        ("objects", full),
        ("epoch", f"{newest.epoch:016x}, generation {newest.generation}"),
        *_layout_facts(layout),
        *_geometry_facts(geometry, layout, len(members)),
    ]
    lines = [
        (
            m.superblock.member_index,
            m.superblock.state.name.lower(),
            "?" if m.objects is None else m.objects,
            m.path,
        )
        for m in members
    ]
    text = f"{facts(rows)}\n\n{table(('member', 'superblock', 'objects', 'path'), lines)}"
    return CommandResult(result, f"{text}\n\n{replacement.remedy(left)}" if left else text)


def _read_drives(names: list[str]) -> list[_Member]:
    with open_controller(names) as controller, opened_io(controller) as (_, io):
        return [
            _read_member(name, partial(io.read, nsid), None) for nsid, name in enumerate(names, 1)
        ]


def _read_file(path: str) -> _Member:
    # Without O_NONBLOCK the open of a FIFO would wait for a writer.
    fd = os.open(readable_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode)):
            raise PoolNotFound(
                f"{path} is neither a file nor a block device; pass the path of a pool"
            )
        if stat.S_ISBLK(status.st_mode):
            # The page cache may be older than what was written without the block layer; what a
            # running pool has in it stays there.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        owner = lock_owner(status)
        member = _read_member(path, partial(_read_blocks, fd), owner)
        check_size(os.lseek(fd, 0, os.SEEK_END), member.superblock.geometry, path)
        return member
    finally:
        os.close(fd)


def _read_blocks(fd: int, offset: int, nbytes: int) -> bytes:
    """As os.pread, into memory that is aligned for direct I/O."""
    with mmap.mmap(-1, nbytes) as memory:
        return memory[: os.preadv(fd, [memory], offset)]


def _read_member(path: str, read: _Read, owner: int | None) -> _Member:
    a, b = (read(copy * BLOCK_NBYTES, BLOCK_NBYTES) for copy in (0, 1))
    if a == LABEL:
        raise PoolNotFound(f"{path} is labelled for a server, which has made no pool there yet")
    superblock, _ = choose_superblock(a, b, path)
    objects, quarantined = _read_counts(read, superblock, path)
    return _Member(path, superblock, objects, quarantined, owner)


def _read_counts(read: _Read, superblock: Superblock, path: str) -> tuple[int | None, int | None]:
    """(objects, quarantined slots) of the snapshot; (None, None) without a valid one."""
    if superblock.state != PoolState.CLEAN:
        return None, None
    if superblock.snapshot is None:  # never opened since its format
        return (0, 0) if superblock.next_sequence == 1 else (None, None)
    raw = read(superblock.geometry.snapshot_offset, superblock.snapshot.nbytes)
    try:
        entries = decode_snapshot(raw, superblock, path)
    except PoolCorrupt:
        return None, None
    objects = int(np.count_nonzero(entries["state"] == RecordState.READY))
    return objects, entries.size - objects


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _layout_numbers(layout: KVLayout) -> dict[str, Any]:
    return {
        "model": layout.model or None,
        "weights": layout.weights,
        "warning": _model_warning(layout),
        "layers": layout.layers,
        "model_layers": layout.model_layers,
        "segments": list(layout.segments),
        "page_size": layout.page_size,
        "dtype": layout.dtype,
        "kind": layout.kind,
        "dims": list(layout.dims),
        "object_nbytes": layout.object_nbytes,
        "fingerprint": layout.fingerprint.hex(),
    }


def _geometry_numbers(geometry: Geometry, layout: KVLayout, members: int) -> dict[str, Any]:
    slots = members * geometry.slots
    return {
        "members": members,
        "member_nbytes": geometry.member_nbytes,
        "slots": slots,
        "tokens": slots * layout.page_size,
        "payload_nbytes": slots * layout.object_nbytes,
        "groups": geometry.groups,
        "group_slots": geometry.group_slots,
        "lba_nbytes": geometry.lba_nbytes,
        "slice_nbytes": geometry.slice_nbytes,
        "slice_padded_nbytes": geometry.slice_padded_nbytes,
    }


def _model_warning(layout: KVLayout) -> str | None:
    if layout.model:
        return None
    return "warning: no model is named, so pages of any model with this shape match"


def _layout_facts(layout: KVLayout) -> list[tuple[str, object]]:
    segments = " + ".join(format_nbytes(segment) for segment in layout.segments)
    named = f"{layout.model}, weights {layout.weights or 'not named'}"
    return [
        ("model", _model_warning(layout) or named),
        ("page", f"{layout.page_size} tokens of {layout.dtype}, {layout.kind}"),
        ("slice", f"{segments}, one per page and layer"),
        ("object", f"{format_nbytes(layout.object_nbytes)} = {layout.layers} slices"),
        ("fingerprint", layout.fingerprint.hex()),
    ]


def _geometry_facts(geometry: Geometry, layout: KVLayout, members: int) -> list[tuple[str, object]]:
    slots = members * geometry.slots
    payload_nbytes = slots * layout.object_nbytes
    spent_nbytes = members * geometry.member_nbytes
    cost = f"{spent_nbytes - payload_nbytes:,} bytes, {spent_nbytes / payload_nbytes - 1:.2%}"
    files = f"{members} x {format_nbytes(geometry.member_nbytes)}"
    return [
        ("holds", f"{slots} objects, {slots * layout.page_size} tokens"),
        ("payload", format_nbytes(payload_nbytes)),
        ("files", f"{files}, in {geometry.groups} groups of {geometry.group_slots} slots each"),
        ("overhead", f"{cost} for padding, records and superblocks"),
    ]
