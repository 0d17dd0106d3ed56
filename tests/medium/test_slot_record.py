"""Slot records: filling, sealing, and telling them apart from everything else."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti import native
from tutti.medium.slot_record import (
    FLAG_DIGESTS,
    RECORD_DTYPE,
    RecordContent,
    RecordIdentity,
    Records,
    RecordState,
    access_64s,
    check_records,
    fill_records,
    torn_records,
)

IDENTITY = RecordIdentity(
    pool_uuid=bytes(range(16)), member=1, epoch=77, fingerprint=bytes(range(16, 32)), layers=5
)
SLOTS = np.array([3, 4, 9])


def filled(state: RecordState = RecordState.READY, **fields: object) -> Records:
    records = np.zeros(len(SLOTS), RECORD_DTYPE)
    arguments: dict[str, object] = {
        "slots": SLOTS,
        "sequences": np.arange(10, 13),
        "keys": np.arange(48, dtype=np.uint8).reshape(3, 16),
        "parents": np.arange(48, 96, dtype=np.uint8).reshape(3, 16),
        "depths": np.arange(3),
        "access_64s": 1234,
        "tenants": 2**63,
        "digests": np.arange(15, dtype=np.uint64).reshape(3, 5),
    }
    content = RecordContent(state=state, **{**arguments, **fields})  # type: ignore[arg-type]
    fill_records(records, IDENTITY, content)
    return records


def test_a_filled_record_holds_what_was_given() -> None:
    records = filled()
    assert records.itemsize == 4096
    assert records["slot"].tolist() == SLOTS.tolist()
    assert records["sequence"].tolist() == [10, 11, 12]
    assert records["key"][2].tobytes() == bytes(range(32, 48))
    assert records["parent"][0].tobytes() == bytes(range(48, 64))
    assert records["depth"].tolist() == [0, 1, 2]
    assert records["access_64s"].tolist() == [1234] * 3
    assert records["tenant"].tolist() == [2**63] * 3
    assert records["flags"].tolist() == [FLAG_DIGESTS] * 3
    assert records["digests"][1, :6].tolist() == [5, 6, 7, 8, 9, 0]
    assert check_records(records, SLOTS, IDENTITY).tolist() == [RecordState.READY] * 3


def test_records_are_written_in_place_over_debris() -> None:
    staging = np.full(3 * 4096, 0xEE, np.uint8)
    content = RecordContent(SLOTS, np.arange(3), RecordState.VOID)
    fill_records(staging.view(RECORD_DTYPE), IDENTITY, content)
    assert not (staging == 0xEE).reshape(3, 4096)[:, 48:80].any()
    assert not staging.reshape(3, 4096)[:, 124:4092].any()
    records = staging.view(RECORD_DTYPE)
    assert records["flags"].tolist() == [0] * 3
    assert check_records(records, SLOTS, IDENTITY).tolist() == [RecordState.VOID] * 3


def test_no_records_are_no_problem() -> None:
    none = np.zeros(0, RECORD_DTYPE)
    slots = np.zeros(0, np.int64)
    fill_records(none, IDENTITY, RecordContent(slots, slots, RecordState.VOID))
    assert check_records(none, slots, IDENTITY).shape == (0,)


@pytest.mark.parametrize("content", [0x00, 0xFF])
def test_a_place_never_written_is_empty(content: int) -> None:
    records = np.full(3 * 4096, content, np.uint8).view(RECORD_DTYPE)
    assert check_records(records, SLOTS, IDENTITY).tolist() == [RecordState.EMPTY] * 3


def test_a_torn_record_is_told_from_a_free_slot() -> None:
    records = filled()
    records[1:2] = np.zeros(4096, np.uint8).view(RECORD_DTYPE)
    records.view(np.uint8)[2 * 4096 + 512 : 3 * 4096] = 0  # its first block alone was written
    verdicts = check_records(records, SLOTS, IDENTITY)
    assert verdicts.tolist() == [RecordState.READY, RecordState.EMPTY, RecordState.EMPTY]
    assert torn_records(records, verdicts).tolist() == [False, False, True]


@pytest.mark.parametrize("state", [RecordState.READY, RecordState.VOID, RecordState.QUARANTINED])
def test_states_are_told_apart(state: RecordState) -> None:
    assert check_records(filled(state), SLOTS, IDENTITY).tolist() == [state] * 3


@pytest.mark.parametrize(
    "other",
    [
        {"pool_uuid": bytes(16)},
        {"member": 0},
        {"fingerprint": bytes(16)},
        {"layers": 6},
    ],
)
def test_what_belongs_elsewhere_is_foreign(other: dict[str, object]) -> None:
    identity = dataclasses.replace(IDENTITY, **other)  # type: ignore[arg-type]
    for state in (RecordState.READY, RecordState.QUARANTINED):
        assert check_records(filled(state), SLOTS, identity).tolist() == [RecordState.FOREIGN] * 3


def test_a_record_in_another_slot_is_foreign() -> None:
    verdicts = check_records(filled(), SLOTS + np.array([0, 1, 0]), IDENTITY)
    assert verdicts.tolist() == [RecordState.READY, RecordState.FOREIGN, RecordState.READY]


def test_before_a_clear_is_stale_but_quarantine_stays() -> None:
    later = dataclasses.replace(IDENTITY, epoch=78)
    for state, verdict in (
        (RecordState.READY, RecordState.STALE),
        (RecordState.VOID, RecordState.STALE),
        (RecordState.QUARANTINED, RecordState.QUARANTINED),
    ):
        assert check_records(filled(state), SLOTS, later).tolist() == [verdict] * 3


def test_every_sector_of_a_torn_record_counts() -> None:
    old, new = filled(sequences=np.arange(3)), filled()
    for sectors in range(1, 8):
        torn = old.copy()
        torn.view(np.uint8).reshape(3, 4096)[:, : sectors * 512] = new.view(np.uint8).reshape(
            3, 4096
        )[:, : sectors * 512]
        assert check_records(torn, SLOTS, IDENTITY).tolist() == [RecordState.EMPTY] * 3


@given(bit=st.integers(0, 4096 * 8 - 1))
def test_any_flipped_bit_makes_a_record_empty(bit: int) -> None:
    records = filled()
    records.view(np.uint8)[4096 + bit // 8] ^= 1 << bit % 8
    verdicts = check_records(records, SLOTS, IDENTITY)
    assert verdicts.tolist() == [RecordState.READY, RecordState.EMPTY, RecordState.READY]


@given(
    field=st.sampled_from(["version", "state", "slot", "member", "layers", "epoch"]),
    value=st.integers(0, 2**16 - 1),
)
def test_numbers_behind_a_right_crc_are_not_trusted(field: str, value: int) -> None:
    records = filled()
    before = int(records[field][0])
    records[field][0] = value
    native.records_seal(records)
    verdict = check_records(records, SLOTS, IDENTITY)[0]
    if value == before:
        assert verdict == RecordState.READY
    elif field == "state":
        assert verdict == (RecordState(value) if value <= 3 else RecordState.FOREIGN)
    else:
        assert verdict == (RecordState.STALE if field == "epoch" else RecordState.FOREIGN)


def test_noise_is_empty(seed: int) -> None:
    noise = np.frombuffer(random.Random(seed).randbytes(64 * 4096), RECORD_DTYPE)
    assert not check_records(noise, np.arange(64), IDENTITY).any()


def test_access_time_is_coarse_and_bounded() -> None:
    assert access_64s(1_700_000_000 * 10**9) == 1_700_000_000 >> 6
    assert access_64s(2**80) == 2**32 - 1
