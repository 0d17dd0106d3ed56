"""Opens the controller of a pool's members: files, or drives that are opened exclusively."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tutti.base.units import format_nbytes
from tutti.errors import CapacityError, ConfigError
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.controller_file import FileController
from tutti.gio_uring.drives.device_content import Force, Held, check_forced, contents
from tutti.gio_uring.file_trust import check_owner
from tutti.gio_uring.named_drive import is_drive, open_drives, serial_of
from tutti.medium.geometry import BLOCK_NBYTES, Geometry
from tutti.pool.block_io import BlockIo


def are_drives(names: Sequence[str]) -> bool:
    """Whether these members are drives and not files.  Raises ConfigError for some of both."""
    drives = [name for name in names if is_drive(name)]
    if drives and len(drives) != len(names):
        raise ConfigError(
            f"{drives[0]} is a drive and other members are files; a pool is either on files"
            " or on drives: pass only one kind"
        )
    return bool(drives)


def open_controller(
    names: Sequence[str], *, executor: str = "auto", service_threads: int | None = None
) -> NativeController:
    """Opens the members exclusively; the namespace of member m is m + 1.

    names: paths, or addresses of drives as in docs/vfio.md.  executor: for files.  service_threads:
    see FileController; each drive has one thread.
    Raises PoolInUse, ConfigError, Unsupported, and what FileController and VfioController raise.
    """
    if are_drives(names):
        if service_threads not in (None, len(names)):
            raise ConfigError(
                f"service_threads is {service_threads}, but each vfio drive has exactly one thread;"
                f" pass {len(names)}, or omit it"
            )
        controller = open_drives(names)
        lba_nbytes = controller.info.lba_nbytes
        if lba_nbytes > BLOCK_NBYTES:
            controller.close()
            raise ConfigError(
                f"{names[0]} has blocks of {lba_nbytes} bytes; format it with blocks of 512 or"
                " 4096 bytes by nvme-cli"
            )
        return controller
    return FileController(names, executor=executor, lock=True, service_threads=service_threads)


def check_owners(controller: NativeController) -> None:
    """Raises PoolUntrusted for files that another user can change."""
    if isinstance(controller, FileController):
        for member in controller.members:
            check_owner(member.fd, member.name)


def check_room(controller: NativeController, names: Sequence[str], geometry: Geometry) -> None:
    """Raises CapacityError where a namespace is smaller than a member."""
    for name, nlb in zip(names, controller.info.namespace_nlb, strict=False):
        nbytes = nlb * controller.info.lba_nbytes
        if nbytes < geometry.member_nbytes:
            raise CapacityError(
                f"{name} has {nbytes} bytes ({format_nbytes(nbytes)}), a member needs"
                f" {geometry.member_nbytes}; pass a capacity of at most {len(names) * nbytes}"
            )


def check_blank(
    controller: NativeController, io: BlockIo, names: Sequence[str], force: Force
) -> None:
    """Raises PoolExists, naming all namespaces that hold data and whose drive's serial number is
    not in ``force``.
    """
    places = []
    for nsid, name in enumerate(names, 1):
        nbytes = controller.info.namespace_nlb[nsid - 1] * controller.info.lba_nbytes
        found = contents(partial(_read_end, io, nsid), nbytes)
        places.append(Held(name, found, serial_of(controller, nsid)))
    check_forced(places, force)


def _read_end(io: BlockIo, nsid: int, offset: int, nbytes: int) -> bytes:
    return io.read(nsid, offset, nbytes // BLOCK_NBYTES * BLOCK_NBYTES)
