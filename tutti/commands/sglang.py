"""`tutti sglang command` and `tutti sglang doctor`: SGLang's launch command, and what it needs."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path

from tutti.arguments import PAGE_SIZE, nbytes, nbytes_text, options, positive
from tutti.base.terminal import table
from tutti.base.units import MiB, format_nbytes, parse_nbytes
from tutti.commands.members import check_exist, has_superblock
from tutti.commands.outcome import EXIT_FAILED, EXIT_OK, CommandResult
from tutti.errors import CapacityError, ConfigError, PoolNotFound, TuttiError, Unsupported
from tutti.gio_uring import probe
from tutti.gio_uring.drives.mounts import filesystem_of
from tutti.gio_uring.named_drive import is_drive
from tutti.integration.sglang.identity import uses_agent
from tutti.integration.sglang.launch import (
    IO_BACKENDS,
    PLUGIN,
    PLUGIN_GROUP,
    VERSIONS,
    check_together,
    check_weights,
    installed_version,
    ranks_and_nodes,
    refused_arguments,
    server_arguments,
    server_environment,
    weights_from,
)
from tutti.integration.sglang.options import HICACHE, LINKER, named_options
from tutti.integration.sglang.rank_members import Shares, share
from tutti.machine import machine_facts
from tutti.node.connect import connect
from tutti.pool.places import (
    Place,
    PlaceKind,
    check_distinct,
    existing_folder,
    exists,
    is_device,
    place_of,
)
from tutti.pool.pool_format import is_labelled

LAYOUT = "page_first"
_MEMLOCK_WANTED_NBYTES = 64 * MiB
_NO_ADMIN_KEY = (
    "without --admin-api-key everyone who reaches the port can clear the storage, and detaching it "
    "(DELETE) answers 400; "
)
_CUDA_MIN = (13, 0)
_COMPILER_S = 10.0
_NO_COMPILER = (
    "SGLang compiles its page hashes at the first start; install g++, ninja, and the headers of "
    "OpenSSL and Python"
)
_RULE = (
    "ranks get equal shares of the files and devices, ordered by NUMA node, then as given; "
    "the GPUs' nodes are not considered"
)
_VOLATILE = ("tmpfs", "ramfs")

_COMMAND = """\
Prints the command that starts SGLang with Tutti and checks it with the installed SGLang.
With --mode hicache Tutti stores the pages of SGLang's host cache; with --mode linker KV moves
between SGLang's KV pool and the SSD without a host cache."""
_COMMAND_EXAMPLE = """\
example:
  tutti sglang command --model meta-llama/Llama-3.1-8B --path /mnt/nvme/tutti --capacity 2TiB"""
_DOCTOR = """\
Checks for problems that would prevent SGLang from starting with Tutti, or make it slow, and shows
how to fix each."""
_DOCTOR_EXAMPLE = """\
example:
  tutti sglang doctor --path /mnt/nvme/tutti --capacity 2TiB

The exit code is 1 when a check fails."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check: verdict "ok", "slow", "fails" or "unknown"."""

    what: str
    verdict: str
    text: str


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _COMMAND, _COMMAND_EXAMPLE
    option = options(parser)
    option("--model", None, "folder or name of the model", required=True)
    option("--capacity SIZE", None, "size of all pools, e.g. 2TiB", nbytes_text, required=True)
    _add_common(parser, path_required=True)
    what = f"memory layout of SGLang's host pool, with --mode {HICACHE}"
    option("--layout", LAYOUT, what, sorted(IO_BACKENDS))
    what = "set an option of the mode (see docs/sglang.md); may be repeated"
    option("--option NAME=VALUE", [], what, action="append")
    parser.add_argument(
        "more", nargs="*", metavar="-- ARGUMENT", help="arguments passed to SGLang unchanged"
    )
    parser.set_defaults(run=run_command)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DOCTOR, _DOCTOR_EXAMPLE
    options(parser)("--capacity SIZE", 0, "check that this much space is free", nbytes)
    _add_common(parser, path_required=False)
    parser.set_defaults(run=run_doctor)


def _add_common(parser: argparse.ArgumentParser, *, path_required: bool) -> None:
    option = options(parser)
    what = "folder on the SSD for the pools; several folders, files and devices are shared among"
    what += " the ranks (docs/sglang.md); or unix:SOCKET of `tutti serve`"
    default = None if path_required else ["."]
    option("--path", default, what, nargs="+", required=path_required)
    option("--mode", HICACHE, "how SGLang uses Tutti", (HICACHE, LINKER))
    option("--page-size TOKENS", PAGE_SIZE, "tokens per page", positive)


def run_command(args: argparse.Namespace) -> CommandResult:
    if args.mode == LINKER and args.layout != LAYOUT:
        raise ConfigError(
            f"--layout {args.layout}: --mode {LINKER} has no host pool; leave --layout out, or "
            f"pass --mode {HICACHE}"
        )
    path = args.path[0] if len(args.path) == 1 else args.path
    options = {"path": path, "capacity": args.capacity}
    options.update(named_options(args.option, args.mode))
    arguments = server_arguments(
        args.mode, args.model, options, page_size=args.page_size, layout=args.layout
    )
    check_together(args.mode, arguments, args.more)
    check_weights(weights_from(args.more), args.model, options.get("weights"))
    passed = {word.split("=")[0] for word in args.more}
    start = "" if args.more else "-- "
    if options.get("kv_events") and passed.isdisjoint(("--kv-events-config", "--config")):
        raise ConfigError(
            "kv_events adds to the events that SGLang publishes, and the server would not start "
            f"without them; append `{start}--kv-events-config JSON` to this command "
            "(docs/cluster.md)"
        )
    arguments += args.more
    capacity = parse_nbytes(args.capacity)
    command = ["python", "-m", "sglang.launch_server", *arguments]
    ranks, nodes = ranks_and_nodes(args.more)
    shares = None
    if not uses_agent({"path": args.path}):
        certain = [] if options.get("degraded") else args.path  # then a drive may be lost
        found = _places(certain, capacity // nodes, elsewhere=True)
        if failed := next((each for each in found if each.verdict == "fails"), None):
            raise (CapacityError if failed.what == "space" else PoolNotFound)(failed.text)
        shares = share(args.path, ranks)
        files, threads = len(shares.of(0, "", is_kv=True)), options.get("service_threads", 0)
        if threads > files:
            raise ConfigError(
                f"option 'service_threads' is {threads}, and the KV pool of a rank has {files} of "
                f"these paths; give {files} at most, or more paths"
            )
    if args.mode == LINKER and (cuda := _cuda(probe.probe_cuda())).verdict == "fails":
        print(f"warning: {cuda.text}", file=sys.stderr)
    checked, note = _check(arguments)
    notes = [] if checked else [note]
    notes.append(f"capacity: {format_nbytes(capacity)} ({capacity} bytes) over all ranks")
    if "--config" in passed:
        sizes = "--tp-size, --pp-size, --dp-size or --nnodes, pass these here as well"
        unread = "the file of --config was not read, and ranks were counted without it"
        notes.append(f"{unread} ({ranks} per node, nodes: {nodes}); if it sets {sizes}")
    notes += [] if shares is None else _share_lines(shares)
    if "--admin-api-key" not in passed:
        notes.append(f"{_NO_ADMIN_KEY}append `{start}--admin-api-key KEY` to this command")
    text = shlex.join(command) + "\n\n" + "\n".join(f"# {line}" for line in notes)
    dealt = [] if shares is None else [[p.path for p in places] for places in shares.dealt]
    result = {"command": command, "checked": checked, "note": note}
    return CommandResult({**result, "notes": notes, "dealt": dealt}, text)


def _share_lines(shares: Shares) -> list[str]:
    """Which rank of a node uses which place, and which devices have to be labelled before."""
    lines = []
    if len(shares.folders) > 1 or (shares.folders and any(shares.dealt)):
        what = "other pools" if any(shares.dealt) else "pools"
        lines.append(f"every rank: a file in each of {', '.join(shares.folders)} for its {what}")
    if any(shares.dealt):
        lines.append(_RULE)
    for rank, places in enumerate(shares.dealt):
        if places:
            named = ", ".join(map(_place_text, places))
            lines.append(f"rank {rank} of a node: {named} for its KV pool")
    devices = [p.path for places in shares.dealt for p in places if p.kind is PlaceKind.DEVICE]
    if devices:
        lines.append("Label each device once before the first start; this erases it:")
        lines.append(shlex.join(["tutti", "format", *devices, "--for-server"]))
    return lines


def _place_text(place: Place) -> str:
    return place.path + ("" if place.numa_node is None else f" (NUMA node {place.numa_node})")


def run_doctor(args: argparse.Namespace) -> CommandResult:
    findings = list(_sglang(args.mode, args.page_size))
    is_agents = uses_agent({"path": args.path})
    findings += [_agent(args.path[0])] if is_agents else _storage(args.path, args.capacity)
    files = [path for path in args.path if not (is_agents or is_device(path))]
    findings += _disks(files)
    folder, with_drive = existing_folder(files[0] if files else "."), any(map(is_drive, args.path))
    findings += _machine(folder, args.mode, with_drive=with_drive)
    findings += [finding for file in files for finding in _pools(Path(file).absolute())]
    failed = any(finding.verdict == "fails" for finding in findings)
    rows = [(finding.what, finding.verdict, finding.text) for finding in findings]
    return CommandResult(
        {"findings": [asdict(finding) for finding in findings]},
        table(("what", "verdict", "why, and what to do"), rows),
        EXIT_FAILED if failed else EXIT_OK,
    )


def _agent(path: str) -> CheckResult:
    """Whether an agent of this version answers, and how full its pool is."""
    try:
        with connect(path, profile=None) as store:
            stats = store.stats()
    except PoolNotFound as error:  # it has none or several; servers name a layout
        return CheckResult("agent", "ok", f"answers; {error}")
    except TuttiError as error:
        return CheckResult("agent", "fails", str(error))
    free, capacity = stats["free_objects"], stats["capacity_objects"]
    return CheckResult("agent", "ok", f"answers; {free} of {capacity} slots of its pool are free")


def _storage(paths: list[str], capacity: int) -> Iterator[CheckResult]:
    """Folders, files and devices."""
    try:  # the absence of a device is reported once
        check_distinct([path for path in paths if exists(path) or not is_device(path)])
    except TuttiError as error:
        yield CheckResult("path", "fails", str(error))
    yield from _places(paths, capacity)


def _places(paths: Sequence[str], capacity: int, elsewhere: bool = False) -> Iterator[CheckResult]:
    """Whether the paths can be used, and have room.

    elsewhere: the paths may be of another machine, so those in a missing folder are not checked.
    """
    places = [place_of(path) for path in paths]
    # Files and devices, where there are any, hold the KV pools, and folders the other pools.
    holding = [place for place in places if place.kind is not PlaceKind.FOLDER] or places
    disks: dict[int, list[Place]] = {}
    for place in places:
        if place.kind is PlaceKind.DEVICE:
            yield _device(place)
        elif not elsewhere or Path(place.path).absolute().parent.exists():
            yield _place(place.path)
            disks.setdefault(os.stat(existing_folder(place.path)).st_dev, []).append(place)
    for on_disk in disks.values():
        wanted = capacity * sum(place in holding for place in on_disk) // len(holding)
        yield _space([place.path for place in on_disk], wanted)
        folders = [place.path for place in on_disk if place.kind is PlaceKind.FOLDER]
        if len(folders) > 1:
            text = f"{' and '.join(folders)} are on one file system; pass only one of them"
            yield CheckResult("path", "slow", text)


def _check(arguments: list[str]) -> tuple[bool, str]:
    """Whether the installed SGLang takes the arguments.  Raises ConfigError when it refuses."""
    version = installed_version()
    if version.split("+")[0] not in VERSIONS:
        found = f"SGLang {version} is installed" if version else "SGLang is not installed"
        return False, f"not checked: {found} on this machine; Tutti supports SGLang {VERSIONS[0]}"
    try:
        refusal = refused_arguments(arguments)
    except Exception as error:  # an incomplete installation fails in many ways
        return False, f"not checked: SGLang {version} cannot be imported here ({error})"
    if refusal:
        raise ConfigError(f"SGLang {version} refuses the command: {refusal}")
    return True, f"checked with SGLang {version}"


def _sglang(mode: str, page_size: int) -> Iterator[CheckResult]:
    version = installed_version()
    if version.split("+")[0] in VERSIONS:
        yield CheckResult("SGLang", "ok", version)
    else:
        found = f"{version} is installed" if version else "not installed"
        yield CheckResult("SGLang", "fails", f"{found}; pip install sglang=={VERSIONS[0]}")
    yield _compiler()
    plugins = {entry.name for entry in metadata.entry_points(group=PLUGIN_GROUP)}
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    if PLUGIN not in plugins:
        yield CheckResult("plugin", "fails", "not registered; install tutti with pip, not by path")
    elif allowed and PLUGIN not in allowed:
        yield CheckResult("plugin", "fails", f"SGLANG_PLUGINS leaves it out; add {PLUGIN}")
    else:
        yield CheckResult("plugin", "ok", "weight updates are detected")
    small = f"{page_size} makes small objects, which are slow, or too small to store; use 64"
    yield _either("page size", page_size >= 16, f"{page_size} tokens", small)
    yield CheckResult("admin key", "unknown", f"{_NO_ADMIN_KEY}start SGLang with one")
    if mode == LINKER:
        yield CheckResult("mode", "ok", "linker")


def _compiler() -> CheckResult:
    """What SGLang compiles its page hashes with, when a server starts for the first time."""
    compiler = [os.environ.get("CXX", "c++"), f"-I{sysconfig.get_path('include')}", "-E", "-xc++"]
    headers = b"#include <Python.h>\n#include <openssl/sha.h>\n"
    try:
        for command in ([*compiler, "-"], ["ninja", "--version"]):
            subprocess.run(
                command, input=headers, capture_output=True, timeout=_COMPILER_S, check=True
            )
    except (OSError, subprocess.SubprocessError) as error:
        return CheckResult("compiler", "fails", f"{_NO_COMPILER} ({error})")
    return CheckResult("compiler", "ok", "ninja, and headers of OpenSSL and Python")


def _place(name: str) -> CheckResult:
    """A folder, there or to be made, or a file of a pool."""
    path, folder = Path(name).absolute(), existing_folder(name)
    if file := next(filter(os.path.isfile, path.parents), None):
        return CheckResult("path", "fails", f"{file} is not a folder; pass one with --path")
    text, verdict, is_there = str(path), "ok", exists(name)
    is_file = is_there and not os.path.isdir(name)
    if is_file and not (os.path.isfile(name) and has_superblock(name)):
        text = f"{path} is neither a folder nor a pool; pass another path"
        return CheckResult("path", "fails", text)
    if not is_there:
        mount = next(filter(os.path.ismount, (folder, *folder.parents)))
        verdict = "unknown" if mount == Path("/") else "ok"
        text = f"{path} does not exist, and would be made on the file system at {mount} "
        text += f"({filesystem_of(folder)}); if a drive should be there, mount the drive first"
    changed = path if is_file else folder
    if not os.access(changed, os.W_OK if is_file else os.W_OK | os.X_OK):
        verdict = "fails"
        text = f"{changed} is not writable; pass another path, or change its owner"
    return CheckResult("path", verdict, text)


def _space(paths: Sequence[str], wanted: int) -> CheckResult:
    """Whether ``wanted`` bytes fit on the disk of these paths, besides the other files on it."""
    stat = os.statvfs(existing_folder(paths[0]))
    free = stat.f_bavail * stat.f_frsize
    pools = [pool for name in paths for pool in (Path(name), *Path(name).glob("*/*.tutti"))]
    used = sum(pool.stat().st_blocks * 512 for pool in pools if os.path.isfile(pool))
    text = f"{', '.join(paths)}: {format_nbytes(free)} free"
    if wanted <= free + used:
        return CheckResult("space", "ok", text)
    text += f" and {format_nbytes(used)} in pools; --capacity needs {format_nbytes(wanted)} of it"
    return CheckResult("space", "fails", f"{text}; pass less, or another --path")


def _device(place: Place) -> CheckResult:
    """Whether a device is labelled for a server, or has a pool that a server may open."""
    try:
        check_exist([place.path])
        if is_drive(place.path):
            return CheckResult("device", "unknown", f"{place.path}, not opened; see docs/vfio.md")
        if is_labelled(place.path):
            return CheckResult("device", "ok", f"{_place_text(place)}, labelled for a server")
        text = f"{place.path} is not labelled; if `{shlex.join(['tutti', 'info', place.path])}`"
        text += " shows no pool of this server, run `tutti format --for-server`"
        return CheckResult("device", "unknown", text)
    except TuttiError as error:
        return CheckResult("device", "fails", str(error))


def _either(what: str, is_ok: bool, text: str, otherwise: str) -> CheckResult:
    return CheckResult(what, "ok" if is_ok else "slow", text if is_ok else otherwise)


def _disks(paths: Sequence[str]) -> Iterator[CheckResult]:
    """How suitable each disk is that has, or would get, the files of pools."""
    folders: dict[int, Path] = {}
    for folder in map(existing_folder, paths):
        folders.setdefault(os.stat(folder).st_dev, folder)
    for folder in folders.values():
        where = f"{folder}: " if len(folders) > 1 else ""
        try:
            verdict, text = _disk(folder, probe.probe_direct(str(folder)))
        except Unsupported as error:  # a folder that cannot be written, for instance
            verdict, text = "unknown", str(error)
        yield CheckResult("disk", verdict, where + text)


def _disk(folder: Path, direct: probe.DirectFacts) -> tuple[str, str]:
    if direct.filesystem in _VOLATILE:
        text = "is memory: pages are lost at a restart of the machine, and take memory from SGLang"
        return "slow", f"{direct.filesystem} {text}; choose a folder on an SSD"
    if not direct.direct:
        return "slow", f"no direct I/O: {direct.reason}; use ext4 or xfs on NVMe"
    disk, text = str(machine_facts(folder)["disk"]), f"direct I/O on {direct.filesystem}"
    if "rotational" in disk:
        advice = "choose a folder on an SSD, unless it is a virtual disk"
        return "slow", f"{text}, but the disk is {disk}; {advice}"
    return "ok", text


def _machine(folder: Path, mode: str, *, with_drive: bool) -> Iterator[CheckResult]:
    try:
        machine = probe.probe_machine(str(folder))
    except Unsupported as error:  # a folder that cannot be written, for instance
        yield CheckResult("machine", "unknown", str(error))
        return
    uring, memory = machine.uring, machine.memory
    yield _either("io_uring", uring.available, ", ".join(uring.features) or "works", uring.reason)
    if with_drive:  # files need no locked memory
        yield _either(
            "memlock",
            not 0 <= memory.memlock_nbytes < _MEMLOCK_WANTED_NBYTES,
            "enough",
            f"{format_nbytes(max(0, memory.memlock_nbytes))}; memory is mapped for a drive: raise "
            "it above SGLang's host pool and Tutti's staging together (ulimit -l unlimited, or "
            "LimitMEMLOCK=infinity in the unit)",
        )
    paged = "Tutti's buffers get none: one descriptor per 4 KiB, which costs bandwidth"
    backing = f"Tutti's buffers: {memory.backing}"
    yield _either("hugepages", memory.backing != "pages", backing, paged)
    if mode == HICACHE:
        is_advised = memory.transparent in ("always", "madvise") or not server_environment(mode)
        refusal = memory.collapse_refusal or ("pinned for a GPU" if machine.cuda.devices else "")
        huge = "on large pages, as far as memory is free (see tutti:hugepage_bytes)"
        small = "on ordinary pages: write madvise to /sys/kernel/mm/transparent_hugepage/enabled"
        small = f"{small} (they cannot be collapsed later: {refusal})"
        yield _either("host pool", is_advised or not refusal, huge, small)
    if mode == LINKER:
        yield _cuda(machine.cuda)
    best = next((tier for tier in machine.tiers if tier.available), None)
    yield CheckResult("tier", "ok" if best else "unknown", best.name if best else "none")


def _cuda(found: probe.CudaFacts) -> CheckResult:
    """What the linker needs for pools in GPU memory."""
    if not found.devices:
        return CheckResult("cuda", "unknown", f"not checked, as no GPU was found: {found.reason}")
    try:
        import_module("cuda.bindings.driver")
    except ImportError:
        text = "cuda-bindings is not installed; in a clone of Tutti: pip install -e '.[cuda]'"
        return CheckResult("cuda", "fails", text)
    text = f"the NVIDIA driver is of CUDA {found.driver}"
    if tuple(map(int, found.driver.split("."))) < _CUDA_MIN:
        return CheckResult("cuda", "fails", f"{text}; install one of CUDA 13.0 or newer")
    return CheckResult("cuda", "ok", f"{text}, and cuda-bindings is installed")


def _pools(path: Path) -> Iterator[CheckResult]:
    for file in sorted(path.glob("*/*.tutti")):
        stat = file.stat()
        text = f"{file.relative_to(path)}, {format_nbytes(stat.st_size)}"
        if stat.st_mode & 0o077:
            yield CheckResult("pool", "fails", f"{text}; readable by other users: chmod 600")
        else:
            yield CheckResult("pool", "ok", text)
