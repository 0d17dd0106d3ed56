"""What every controller must refuse alike, without touching memory or medium."""

from __future__ import annotations

import ctypes

import pytest
from gio_uring.command_ring import transfer_command
from gio_uring.data_pointer import set_descriptor
from nvme_host import (
    LBA,
    NAMESPACES,
    PRP,
    READ,
    SGL,
    WRITE,
    Fill,
    NvmeHost,
    put_descriptors,
    segment,
)

from tutti.base.units import KiB, MiB
from tutti.gio_uring import nvme_spec as nvme
from tutti.gio_uring.controller import NativeController
from tutti.gio_uring.memory import HostBuffer

OK = nvme.STATUS_OK


def refused(host: NvmeHost, fill: Fill, status: int) -> None:
    """The command ends with `status`, and neither memory nor medium changed."""
    host.data[:] = 0xA5
    assert host.run(fill) == status
    assert (host.data == 0xA5).all(), "a refused command wrote to memory"
    assert not host.read(0, 64).any(), "a refused command wrote to the medium"


def with_opcode(fill: Fill, opcode: int) -> Fill:
    def changed(sqe: nvme.Sqe) -> None:
        fill(sqe)
        sqe.cdw0 = (sqe.cdw0 & ~0xFF) | opcode

    return changed


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize(
    ("slba", "nlb"),
    [
        (NAMESPACES[0] // LBA, 1),
        (NAMESPACES[0] // LBA - 1, 2),
        (2**64 - 1, 1),
        (2**64 - 1, 2),
        (2**63, 16),
    ],
)
def test_lba_out_of_range(host: NvmeHost, opcode: int, slba: int, nlb: int) -> None:
    fill = host.transfer(opcode, slba, nlb, [host.extent(0, nlb * LBA)])
    refused(host, fill, nvme.STATUS_LBA_OUT_OF_RANGE)


@pytest.mark.parametrize("nsid", [0, 3, 64, 0xFFFFFFFF])
def test_unknown_namespace(host: NvmeHost, nsid: int) -> None:
    fill = host.transfer(READ, 0, 1, [host.extent(0, LBA)], nsid=nsid)
    refused(host, fill, nvme.STATUS_INVALID_NAMESPACE)
    assert host.flush(nsid=nsid) == nvme.STATUS_INVALID_NAMESPACE


@pytest.mark.parametrize("opcode", [0x03, 0x05, 0x7F, 0xFF])
def test_unknown_opcode(host: NvmeHost, opcode: int) -> None:
    fill = with_opcode(host.transfer(READ, 0, 1, [host.extent(0, LBA)]), opcode)
    refused(host, fill, nvme.STATUS_INVALID_OPCODE)


def test_mdts(host: NvmeHost) -> None:
    most = host.controller.info.mdts_nbytes // LBA
    size = NAMESPACES[0] // LBA
    if most < size:
        extents = [host.extent(0, (most + 1) * LBA)]
        refused(host, host.transfer(READ, 0, most + 1, extents), nvme.STATUS_INVALID_FIELD)
    nlb = min(most, host.buffer.nbytes // LBA)
    assert host.run(host.transfer(READ, 0, nlb, [host.extent(0, nlb * LBA)])) == OK


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("psdt", [SGL, PRP])
def test_wild_addresses(host: NvmeHost, opcode: int, psdt: int) -> None:
    base, end = host.buffer.address, host.buffer.address + host.buffer.nbytes
    stranger = HostBuffer(4 * MiB)
    stranger.array[:] = 0x5A
    wild = {0, LBA, base - LBA, end, stranger.address, host.queue_pair.struct.sq, 2**64 - LBA}
    lists = range(host.lists.address, host.lists.address + host.lists.nbytes, LBA)
    for address in wild.difference(lists):  # which are registered, and may lie next to the buffer
        fill = host.transfer(opcode, 0, 1, [(address, LBA)], psdt=psdt)
        refused(host, fill, nvme.STATUS_DATA_TRANSFER_ERROR)
        fill = host.transfer(opcode, 0, 2, [host.extent(0, LBA), (address, LBA)], psdt=psdt)
        refused(host, fill, nvme.STATUS_DATA_TRANSFER_ERROR)
    assert (stranger.array == 0x5A).all()


def test_extent_over_the_end_of_a_region(host: NvmeHost) -> None:
    extents = [host.extent(host.buffer.nbytes - LBA, 2 * LBA)]
    refused(host, host.transfer(READ, 0, 2, extents), nvme.STATUS_DATA_TRANSFER_ERROR)


def test_extent_over_touching_regions(controller: NativeController) -> None:
    """Submitters join adjacent extents, so a joined extent may span two registrations."""
    host = NvmeHost(controller)
    both = HostBuffer(64 * KiB)
    for start in (0, 32 * KiB):
        host.regions.append(controller.register((both.address + start, 32 * KiB)))
    both.array[:] = 9
    extents = [(both.address + 16 * KiB, 32 * KiB)]
    assert host.run(host.transfer(WRITE, 0, 8, extents)) == OK
    assert (host.read(0, 8) == 9).all()
    host.close()


@pytest.mark.parametrize("psdt", [SGL, PRP])
@pytest.mark.parametrize("address", [LBA, 2**64 - LBA])
def test_wild_lists(host: NvmeHost, psdt: int, address: int) -> None:
    extents = [host.extent(2 * i * LBA, LBA) for i in range(4)]
    fill = host.transfer(READ, 0, 4, extents, psdt=psdt)

    def wild(sqe: nvme.Sqe) -> None:
        fill(sqe)
        sqe.dptr[psdt == PRP] = address

    refused(host, wild, nvme.STATUS_DATA_TRANSFER_ERROR)


@pytest.mark.parametrize("nbytes", [LBA - 4, LBA + 4, 2 * LBA, 0, 2**32 - 4])
def test_sgl_length_mismatch(host: NvmeHost, nbytes: int) -> None:
    fill = host.transfer(READ, 0, 1, [host.extent(0, nbytes)])
    refused(host, fill, nvme.STATUS_SGL_LENGTH_INVALID)
    fill = host.transfer(READ, 0, 3, [host.extent(0, LBA), host.extent(4 * LBA, nbytes)])
    status = OK if nbytes == 2 * LBA else nvme.STATUS_SGL_LENGTH_INVALID
    assert host.run(fill) == status


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_misaligned_prp(host: NvmeHost, offset: int) -> None:
    fill = host.transfer(READ, 0, 1, [host.extent(0, LBA)], psdt=PRP)

    def misaligned(sqe: nvme.Sqe) -> None:
        fill(sqe)
        sqe.dptr[0] += offset

    refused(host, misaligned, nvme.STATUS_INVALID_PRP_OFFSET)


@pytest.mark.parametrize("nlb", [2, 3])
def test_misaligned_second_prp(host: NvmeHost, nlb: int) -> None:
    fill = host.transfer(READ, 0, nlb, [host.extent(0, nlb * LBA)], psdt=PRP)

    def misaligned(sqe: nvme.Sqe) -> None:
        fill(sqe)
        sqe.dptr[1] += 4

    refused(host, misaligned, nvme.STATUS_INVALID_PRP_OFFSET)


def test_misaligned_prp_entry(host: NvmeHost) -> None:
    fill = host.transfer(READ, 0, 3, [host.extent(0, 3 * LBA)], psdt=PRP)

    def misaligned(sqe: nvme.Sqe) -> None:
        fill(sqe)
        ctypes.c_uint64.from_address(host.lists.address + 8).value += 512

    refused(host, misaligned, nvme.STATUS_INVALID_PRP_OFFSET)


def test_prp_chain_that_leads_to_itself_ends(host: NvmeHost) -> None:
    """The last entry of a list page names that page again: a loop of 512 entries, then data."""
    pages = (ctypes.c_uint64 * 512).from_address(host.lists.address)
    pages[:] = [host.buffer.address] * 511 + [host.lists.address]

    def fill(sqe: nvme.Sqe) -> None:
        transfer_command(sqe, READ, 1, 0, 256)
        sqe.dptr[0] = host.buffer.address
        sqe.dptr[1] = host.lists.address + 8 * 511

    assert host.run(fill) == OK


def test_bad_psdt(host: NvmeHost) -> None:
    fill = host.transfer(READ, 0, 1, [host.extent(0, LBA)])
    for psdt in (2, 3):

        def changed(sqe: nvme.Sqe, psdt: int = psdt) -> None:
            fill(sqe)
            sqe.cdw0 = (sqe.cdw0 & ~(3 << 14)) | psdt << 14

        refused(host, changed, nvme.STATUS_INVALID_FIELD)


BLOCK, BUCKET = nvme.SGL_DATA_BLOCK, nvme.SGL_BIT_BUCKET
SEGMENT, LAST = nvme.SGL_SEGMENT, nvme.SGL_LAST_SEGMENT


@pytest.mark.parametrize(
    ("head", "kinds", "status"),
    [
        (LAST, [BLOCK, BUCKET], nvme.STATUS_SGL_TYPE_INVALID),
        (LAST, [BLOCK, 0x40], nvme.STATUS_SGL_TYPE_INVALID),
        (LAST, [BLOCK, 0x01], nvme.STATUS_SGL_TYPE_INVALID),
        (LAST, [BLOCK, LAST], nvme.STATUS_INVALID_SGL_COUNT),
        (LAST, [SEGMENT, BLOCK], nvme.STATUS_INVALID_SGL_COUNT),
        (SEGMENT, [LAST, BLOCK], nvme.STATUS_INVALID_SGL_COUNT),
        (SEGMENT, [BLOCK, BLOCK], nvme.STATUS_INVALID_SGL_SEGMENT),
        # The second descriptor leads to the list itself, without end.
        (SEGMENT, [0, SEGMENT], nvme.STATUS_SGL_LENGTH_INVALID),
    ],
)
def test_bad_descriptors(host: NvmeHost, head: int, kinds: list[int], status: int) -> None:
    def fill(sqe: nvme.Sqe) -> None:
        transfer_command(sqe, READ, 1, 0, 4)
        descriptors = []
        for i, kind in enumerate(kinds):
            is_data = kind in (BLOCK, BUCKET)
            place = host.extent(4 * i * LBA, 2 * LBA) if is_data else (host.lists.address, 32)
            descriptors.append(nvme.SglDescriptor(*place, type=kind))
        put_descriptors(host.lists.address, descriptors)
        set_descriptor(sqe, segment((host.lists.address, 32), is_last=head == LAST))

    refused(host, fill, status)


def test_endless_chain_of_empty_segments(host: NvmeHost) -> None:
    def fill(sqe: nvme.Sqe) -> None:
        transfer_command(sqe, READ, 1, 0, 1)
        put_descriptors(host.lists.address, [segment((host.lists.address, 16), is_last=False)])
        set_descriptor(sqe, segment((host.lists.address, 16), is_last=False))

    refused(host, fill, nvme.STATUS_INVALID_SGL_COUNT)


@pytest.mark.parametrize(("shift", "nbytes"), [(0, 0), (0, 8), (0, 24), (4, 32), (1, 16)])
def test_bad_segments(host: NvmeHost, shift: int, nbytes: int) -> None:
    def fill(sqe: nvme.Sqe) -> None:
        transfer_command(sqe, READ, 1, 0, 1)
        set_descriptor(sqe, segment((host.lists.address + shift, nbytes)))

    refused(host, fill, nvme.STATUS_INVALID_SGL_SEGMENT)


def test_too_many_descriptors(host: NvmeHost) -> None:
    most = host.controller.info.sgl_descriptors
    piece = 64
    assert (most + LBA // piece) * 16 <= host.lists.nbytes
    assert most % (LBA // piece) == 0
    for count, status in ((most, OK), (most + LBA // piece, nvme.STATUS_INVALID_SGL_COUNT)):
        extents = [host.extent(2 * piece * i, piece) for i in range(count)]
        lists = host.list_memory(nbytes=host.lists.nbytes)
        nlb = count * piece // LBA
        assert host.run(host.transfer(READ, 0, nlb, extents, lists=lists)) == status
