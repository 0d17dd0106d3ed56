"""The index of a pool: which slot holds which key, in which state, who uses it, and when last.

Everything is an array with one entry per slot; the hash table over them is native
(`kernels/native/index.cpp`). Every method takes a batch. The index knows nothing of the medium and
nothing of free space, and it is not thread-safe: the store holds a lock around it.

Slots are int64 arrays everywhere here, keys are uint8 arrays of shape (n, 16).
"""

from __future__ import annotations

import ctypes
import secrets
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tutti.base.arrays import U64, UINT8, Keys, Mask, Slots
from tutti.errors import CapacityError
from tutti.medium.keys import KEY_NBYTES
from tutti.native import NO_SLOT, NativeIndex, NativeInsertion, address, quick

_Scalar = TypeVar("_Scalar", bound=np.generic)

MISSING = -1
CLOCK_MAX = 0xFFFFFFFF
PINS_MAX = 0xFFFF  # of one slot

_DIGESTS = np.uint64(1 << 63)  # above a sequence number


class SlotState(IntEnum):
    """The state of a slot. READY and UNPROVEN, which `match` accepts, have neighbouring values."""

    FREE = 0  # holds nothing, and no valid record on the medium says otherwise
    VOIDED = 1  # its void record is on the medium: data may be written
    WRITING = 2  # owns a key; data or record are being written
    READY = 3  # owns a key; may be served
    UNPROVEN = 4  # owns a key; must be verified in full before it is served
    QUARANTINED = 5  # damaged bytes were read from it; not used any more
    VOIDING = 6  # lost its key; the void record is being written


_S = SlotState
_TRANSITIONS: dict[SlotState, tuple[SlotState, ...]] = {
    _S.FREE: (_S.VOIDED, _S.VOIDING, _S.WRITING, _S.READY, _S.UNPROVEN, _S.QUARANTINED),
    _S.VOIDED: (_S.FREE, _S.WRITING, _S.QUARANTINED),
    _S.WRITING: (_S.READY, _S.VOIDING, _S.VOIDED, _S.QUARANTINED),
    _S.READY: (_S.VOIDING, _S.FREE, _S.QUARANTINED),
    _S.UNPROVEN: (_S.READY, _S.VOIDING, _S.FREE, _S.QUARANTINED),
    _S.QUARANTINED: (_S.VOIDING,),
    _S.VOIDING: (_S.VOIDED, _S.QUARANTINED),
}
_ALLOWED = np.zeros((len(_S), len(_S)), np.bool_)
for _before, _afters in _TRANSITIONS.items():
    _ALLOWED[_before, list(_afters)] = True

# A slot owns a key exactly in these states.
_OWNS_KEY = np.zeros(len(_S), np.bool_)
_OWNS_KEY[[_S.WRITING, _S.READY, _S.UNPROVEN]] = True

# For each state, a bit mask of the states from which `set_state` may move a slot to it.
_KEEPS_KEY = [
    sum(1 << b for b in _S if _ALLOWED[b, after] and _OWNS_KEY[b] == _OWNS_KEY[after])
    for after in _S
]


class Index:
    """Keys, states and pins of `slots` slots.

    Public arrays, shape (slots,), to be read freely and written only by the methods:
    `state` u8, `pins` u16 (transfers in flight), `kept` u16 (pins, written
    by `LookupPins`), `access` u32 (the use that last reached it), `depth` u32
    (pages before it in its chain); and `key`, shape (slots, 16) u8.
    Arrays of the catalogue, which take no memory until one slot has a value other than 0: `pinned`
    bool (until `unpin`), `tenant` u16 (a namespace), `hits` u16 (loads, at most 65535) and
    `expiry` u32 (Unix time in units of 64 s, 0 for never).
    `tenant_slots`, int64 (65536,): how many slots each namespace has; not counted for 0.
    """

    def __init__(self, slots: int, *, seed: int | None = None) -> None:
        """An index of `slots` free slots.

        `seed` keys the hash table; by default it is random, which changes no result.
        """
        assert 0 < slots < NO_SLOT, "slot numbers are 32 bits on the native side"
        self.slots = slots
        # Look-ups, loads and new chains so far: recency.
        self.uses = 1
        self.unpins = 0  # calls
        self._words = np.zeros((slots, 2), np.uint64)
        self.key: Keys = self._words.view(np.uint8)
        self.state = np.full(slots, SlotState.FREE, np.uint8)
        self.pins = np.zeros(slots, np.uint16)
        self.kept = np.zeros(slots, np.uint16)
        self._numbers = np.zeros(slots, np.uint64)
        self.access = np.zeros(slots, np.uint32)
        self.depth = np.zeros(slots, np.uint32)
        # At most two thirds full, so that probes stay short, and never full.
        self._table = np.full(max(slots + 1, 3 * slots // 2), NO_SLOT, np.uint32)
        self.native = NativeIndex(
            keys=address(self._words),
            table=address(self._table),
            state=address(self.state),
            pins=address(self.pins),
            access=address(self.access),
            depth=address(self.depth),
            sequence=address(self._numbers),
            slots=slots,
            entries=self._table.size,
            seed=secrets.randbits(64) if seed is None else seed,
            ready_min=SlotState.READY,
            ready_max=SlotState.UNPROVEN,
            slot_mask=(1 << slots.bit_length()) - 1,
        )
        self._handle = ctypes.byref(self.native)
        self._match = quick().tutti_index_match  # to find it takes a microsecond
        self._found: tuple[Slots, int] = np.empty(0, np.int64), 0
        self._clear_catalogue()

    @property
    def nbytes_per_slot(self) -> float:
        """Memory of all arrays over the number of slots."""
        arrays = (self._words, self.state, self.pins, self.kept, self._numbers)
        more = (self.access, self.depth, self._table)
        listed = (self.pinned, self.tenant, self.hits, self.expiry)
        # The stride of an array that takes no memory is 0.
        return sum(len(a) * a.strides[0] for a in (*arrays, *more, *listed)) / self.slots

    def match(self, keys: Keys) -> Slots:
        """The slots of the longest prefix of `keys` that is READY or UNPROVEN, shape (<= n,).

        Counts as an access of every slot returned. The array is valid until the next look-up.
        """
        length = self.prefix(keys)
        return self._found[0][:length]

    def prefix(self, keys: Keys) -> int:
        """As `match`: how many slots it would return."""
        n, raw = len(keys), keys.tobytes()  # to copy few takes less time than to find the address
        assert len(raw) == n * KEY_NBYTES, "a key is 16 bytes"
        self.begin_use()
        place = self._found[1] if n <= self._found[0].size else self._room(n)[1]
        length: int = self._match(self._handle, raw, n, self.uses, place)
        return length

    def look(self, keys: Keys) -> Slots:
        """As `match`, but for every key on its own: its slot or MISSING, shape (n,)."""
        slots = self.find(keys)
        self.begin_use()
        state = self.state[slots]
        slots[(state != SlotState.READY) & (state != SlotState.UNPROVEN)] = MISSING
        found = slots[slots != MISSING]
        self.access[found] = self.uses
        return slots

    def sequence(self, slots: Slots) -> U64:
        """Sequence numbers of the objects in slots, shape (n,)."""
        return self._numbers[slots] & ~_DIGESTS

    def has_digests(self, slots: Slots) -> Mask:
        """For every slot, which must own a key, whether its object has digests, shape (n,)."""
        mask: Mask = self._numbers[slots] >= _DIGESTS
        return mask

    def find(self, keys: Keys) -> Slots:
        """The slot of every key in whatever state, or MISSING; shape (n,). Not an access."""
        self.check_keys(keys)
        found = np.empty(len(keys), np.int64)
        quick().tutti_index_find(self._handle, address(keys), len(keys), address(found))
        return found

    def has_any(self, keys: Keys) -> bool:
        """Whether `find` finds one of them."""
        self.check_keys(keys)
        arguments = (keys.tobytes(), len(keys), self._room(len(keys))[1])
        return bool(quick().tutti_index_find(self._handle, *arguments))

    def absent(self, keys: Keys) -> Slots:
        """Rows of `keys` that have no slot, each key once, ascending; an access of the others."""
        self.check_keys(keys)
        rows = np.empty(len(keys), np.int64)
        arguments = (address(keys), len(keys), self.uses, address(rows))
        return rows[: quick().tutti_index_absent(self._handle, *arguments)]

    def insert(
        self,
        slots: Slots,
        keys: Keys,
        sequence: npt.ArrayLike,
        depth: npt.ArrayLike,
        *,
        state: SlotState = SlotState.WRITING,
        access: npt.ArrayLike | None = None,
        has_digests: npt.ArrayLike = False,
    ) -> Slots:
        """Gives keys[i] to slots[i], which must be FREE or VOIDED, and moves it to `state`.

        A key that has a slot already, or came earlier in the batch, is left where it is: the
        answer, shape (n,), has that slot, and MISSING for every key that was inserted. `sequence`,
        `depth`, `access` and `has_digests` are scalars or shape (n,). Without `access` the slots
        count as accessed now; with it `uses` is raised so that no access lies in the future.
        """
        self.check_keys(keys)
        assert slots.shape == (len(keys),), "every key has one slot"
        assert slots.dtype == np.int64, "slots are int64"
        assert _OWNS_KEY[state], f"a slot in state {state.name} owns no key"
        n = len(keys)
        existing = np.empty(n, np.int64)
        columns: list[npt.NDArray[Any]] = [
            _column(sequence, np.uint64, n),
            _column(depth, np.uint32, n),
            _column(has_digests, np.uint8, n),
        ]
        if access is not None:
            columns.append(_column(access, np.uint32, n))
            self.uses = max(self.uses, int(columns[3].max(initial=0)))
        columns_at = [*map(address, columns), 0][:4]
        # Only FREE slots become READY or UNPROVEN: the record of a VOIDED one describes no object.
        last = SlotState.VOIDED if state == SlotState.WRITING else SlotState.FREE
        insertion = NativeInsertion(
            address(keys), address(slots), *columns_at, address(existing), n, self.uses, last, state
        )
        done = quick().tutti_index_insert(self._handle, ctypes.byref(insertion))
        if done < 0:
            self._check_slots(slots)
            self._check_transition(slots, state)
            raise AssertionError("a slot was given twice")
        return existing

    def remove(self, slots: Slots, state: SlotState = SlotState.VOIDING) -> None:
        """Takes the keys from distinct slots that own one and moves the slots to `state`.

        A slot with a transfer in flight can only be quarantined: its place must not be reused.
        """
        self._check_slots(slots)
        assert not _OWNS_KEY[state], f"a slot in state {state.name} owns a key"
        assert _OWNS_KEY[self.state[slots]].all(), "a slot without a key cannot lose it"
        self._check_transition(slots, state)
        if state != SlotState.QUARANTINED:
            assert not self.pins[slots].any(), "a slot with a transfer in flight was removed"
        slots = np.ascontiguousarray(slots)
        removed = quick().tutti_index_remove(self._handle, address(slots), slots.size)
        assert removed == len(slots), "a slot was given twice"
        self.state[slots] = state
        self.describe(slots)
        self._set("hits", slots, 0)

    def describe(
        self,
        slots: Slots,
        *,
        tenant: npt.ArrayLike = 0,
        expiry: npt.ArrayLike = 0,
        pinned: npt.ArrayLike = False,
    ) -> None:
        """Sets the catalogue's values of distinct slots; each is a scalar or of shape (n,)."""
        self._check_slots(slots)
        if self.tenant.flags.writeable or np.any(tenant):
            np.subtract.at(self.tenant_slots, self.own("tenant")[slots], 1)
            self.tenant[slots] = tenant
            np.add.at(self.tenant_slots, self.tenant[slots], 1)
        self._set("expiry", slots, expiry)
        self._set("pinned", slots, pinned)

    def set_state(self, slots: Slots, state: SlotState) -> None:
        """Moves slots to `state`, where that neither gives them a key nor takes it away."""
        assert slots.dtype == np.int64, "slots are int64"
        slots, voids = np.ascontiguousarray(slots), state == SlotState.VOIDING
        arguments = (address(slots), slots.size, _KEEPS_KEY[state], state, voids)
        if quick().tutti_index_move(self._handle, *arguments) < 0:
            self._check_slots(slots)
            self._check_transition(slots, state)
            owns = _OWNS_KEY[self.state[slots]]
            assert (owns == _OWNS_KEY[state]).all(), "use insert or remove: a key comes or goes"
            raise AssertionError("a slot with a transfer in flight was given up")

    def clear(self) -> Slots:
        """Forgets every key; returns the slots that held one, which are FREE now.

        Quarantined slots stay so. Nothing may be in flight.
        """
        in_flight = (self.state == SlotState.WRITING) | (self.state == SlotState.VOIDING)
        assert not in_flight.any(), "clear while records are being written"
        assert not self.pins.any(), "clear while transfers are in flight"
        held = np.flatnonzero(_OWNS_KEY[self.state]).astype(np.int64)
        self._table.fill(NO_SLOT)
        self._words.fill(0)
        self._clear_catalogue()
        self.state[self.state != SlotState.QUARANTINED] = SlotState.FREE
        return held

    def pin(self, slots: Slots) -> None:
        """Counts a transfer in flight on every slot given; a slot given twice counts twice.

        Raises CapacityError where one could have more than PINS_MAX; then nothing was counted.
        """
        self._check_slots(slots)
        assert _OWNS_KEY[self.state[slots]].all(), "a slot without a key cannot be transferred"
        if int(self.pins[slots].max(initial=0)) + slots.size > PINS_MAX:
            raise CapacityError(
                f"an object has about {PINS_MAX} transfers in flight, which is the maximum; try"
                " again after some have ended"
            )
        np.add.at(self.pins, slots, 1)

    def unpin(self, slots: Slots) -> None:
        """Undoes one `pin` of the same slots."""
        slots = np.ascontiguousarray(slots)
        self.unpins += 1
        if quick().tutti_index_unpin(self._handle, address(slots), slots.size) < 0:
            self._check_slots(slots)
            raise AssertionError("a slot was unpinned more often than pinned")

    def begin_use(self) -> None:
        """Advances the clock of uses, so that later accesses count as more recent. Near the end of
        32 bits all times move back, which keeps the order of the last 2^31 uses.
        """
        if self.uses + 1 >= CLOCK_MAX:
            back = self.uses - (1 << 31)
            self.access[:] = np.where(self.access > back, self.access - np.uint32(back), 0)
            self.uses -= back
        self.uses += 1

    def resident(self) -> Mask:
        """Slots that hold an object, shape (slots,)."""
        mask: Mask = (self.state == SlotState.READY) | (self.state == SlotState.UNPROVEN)
        return mask

    def busy(self) -> Mask:
        """Slots that must stay as they are for now: pinned, kept, or a write is under way."""
        writing = (self.state == SlotState.WRITING) | (self.state == SlotState.VOIDING)
        mask: Mask = writing | (self.pins > 0) | (self.kept > 0)
        return mask

    def counts(self) -> dict[SlotState, int]:
        """How many slots are in each state."""
        numbers = np.bincount(self.state, minlength=len(SlotState))
        return {state: int(numbers[state]) for state in SlotState}

    def _clear_catalogue(self) -> None:
        self.pinned = _zeros(self.slots, np.bool_)
        self.tenant = _zeros(self.slots, np.uint16)
        self.tenant_slots = np.zeros(1 << 16, np.int64)
        self.hits = _zeros(self.slots, np.uint16)
        self.expiry = _zeros(self.slots, np.uint32)
        self.native.hits, self.counts_hits = 0, False

    def own(self, name: str) -> npt.NDArray[Any]:
        """An array of the catalogue, which gets memory if it has none yet."""
        array: npt.NDArray[Any] = getattr(self, name)
        if not array.flags.writeable:
            array = array.copy()
            setattr(self, name, array)
            if name == "hits":
                self.native.hits, self.counts_hits = address(array), True
        return array

    def _set(self, name: str, slots: Slots, values: npt.ArrayLike) -> None:
        """Writes an array of the catalogue; the first value that is not 0 gives it memory."""
        if getattr(self, name).flags.writeable or np.any(values):
            self.own(name)[slots] = values

    def check_keys(self, keys: Keys) -> None:
        """Asserts that native code can read them."""
        assert keys.ndim == 2, "keys have the shape (n, 16)"
        assert keys.shape[1] == KEY_NBYTES, "a key is 16 bytes"
        assert keys.dtype == UINT8, "keys are uint8"

    def _room(self, n: int) -> tuple[Slots, int]:
        """Where native code may write n slots of a look-up: an array, and its address."""
        if n > self._found[0].size:
            found = np.empty(n, np.int64)
            self._found = found, address(found)  # as one: an interrupt may strike in between
        return self._found

    def _check_slots(self, slots: Slots) -> None:
        # The native side indexes with these: a wrong one would write outside the arrays.
        assert slots.ndim == 1, "slots have the shape (n,)"
        assert slots.dtype == np.int64, "slots are int64"
        if slots.size > 0:
            assert slots.min() >= 0, "a slot number is negative"
            assert slots.max() < self.slots, "a slot number lies beyond the pool"

    def _check_transition(self, slots: Slots, state: SlotState) -> None:
        before = self.state[slots]
        wrong = ~_ALLOWED[before, state]
        if wrong.any():
            first = SlotState(int(before[wrong][0]))
            raise AssertionError(f"a slot cannot go from {first.name} to {state.name}")


def _zeros(slots: int, dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    """Read-only zeros that take no memory, shape (slots,)."""
    return np.broadcast_to(dtype(), slots)


def _column(values: Any, dtype: type[_Scalar], n: int) -> npt.NDArray[_Scalar]:
    """A value per key, shape (n,), from such an array or from one value for all."""
    if isinstance(values, int):
        column = np.empty(n, dtype)
        column.fill(values)
        return column
    column = np.ascontiguousarray(values, dtype)
    assert column.shape == (n,), "a value per key"
    return column
