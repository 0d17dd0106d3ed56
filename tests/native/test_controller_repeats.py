"""What the file controller makes of the statuses of NVMe commands."""

from __future__ import annotations

import pytest
from native.programs import Start

from tutti.gio_uring import nvme_spec as nvme

FLUSH, WRITE, READ = nvme.OPCODE_FLUSH, nvme.OPCODE_WRITE, nvme.OPCODE_READ
DO_NOT_RETRY = 1 << 14
NOT_READY = 0x082
TRIES = 6  # as many as the kernel makes for its own commands


@pytest.mark.parametrize("opcode", [FLUSH, WRITE, READ])
def test_passing_statuses_are_repeated(start: Start, opcode: int) -> None:
    """They do not say that the medium is damaged, and the kernel does not repeat such commands."""
    program = start("controller_repeats")
    assert program.ask(opcode, 0) == [0, 1]
    assert program.ask(opcode, NOT_READY, nvme.STATUS_INTERNAL_ERROR, 0) == [0, 3]
    assert program.ask(opcode, NOT_READY) == [NOT_READY, TRIES]
    assert program.ask(opcode, NOT_READY | DO_NOT_RETRY) == [NOT_READY, 1]


@pytest.mark.parametrize("code", [0x80, 0x81, 0x82, 0x86])
def test_only_errors_of_the_medium_condemn_a_place(start: Start, code: int) -> None:
    program = start("controller_repeats")
    final = 0x200 | code | DO_NOT_RETRY
    assert program.ask(READ, final) == [nvme.STATUS_UNRECOVERED_READ, 1]
    assert program.ask(WRITE, final) == [nvme.STATUS_WRITE_FAULT, 1]
    for kind in (0x000, 0x100, 0x300):
        assert program.ask(WRITE, kind | code | DO_NOT_RETRY) == [kind | code, 1]
    assert program.ask(READ, 0x200 | code) == [nvme.STATUS_UNRECOVERED_READ, 1], "the drive tried"


def test_a_drives_own_statuses_are_not_taken_for_ours(start: Start) -> None:
    program = start("controller_repeats")
    for status in (nvme.STATUS_DEVICE_GONE, nvme.STATUS_DIGEST_MISMATCH, 0x7FF):
        assert program.ask(READ, status | DO_NOT_RETRY) == [nvme.STATUS_INTERNAL_ERROR, 1]
