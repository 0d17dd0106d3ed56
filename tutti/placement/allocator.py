"""Free slots of a pool, handed out so that consecutive pages get consecutive slots.

A group is `group_slots` consecutive slots of one member; a run is consecutive slots of one group.
Global slot = member * slots_per_member + group * group_slots + slot in group, so `slot //
group_slots` numbers the groups of the whole pool. The allocator knows nothing of keys and states,
and it is not thread-safe: the store holds a lock around it. It is deterministic.

Cost: O(runs) Python per call, plus vectorised work on the groups that change.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np
import numpy.typing as npt

from tutti.arrays import Slots


class Allocator:
    """The free slots of `members` members with `groups_per_member` groups each."""

    def __init__(self, members: int, groups_per_member: int, group_slots: int) -> None:
        """All slots are free at first; `take` marks those that are not."""
        assert members > 0, "a pool has a member"
        assert groups_per_member > 0, "a member has a group"
        assert group_slots > 0, "a group has a slot"
        self.members = members
        self.groups_per_member = groups_per_member
        self.group_slots = group_slots
        self._free = np.ones((members * groups_per_member, group_slots), np.bool_)
        # The longest free run of each group: group_slots for a whole one, 0 for a full one.
        self._longest = np.zeros(len(self._free), np.int64)
        self._whole: list[deque[int]] = []
        # Partly used groups by their longest free run, oldest first.
        self._partial: list[OrderedDict[int, None]] = []
        self._cursor = 0
        self._rebuild()

    @property
    def slots(self) -> int:
        """Slots of the pool, free or not."""
        return self._free.size

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated."""
        return self._free_slots

    def is_free(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """For every slot whether it is free, shape (n,)."""
        free: npt.NDArray[np.bool_] = self._free.reshape(-1)[slots]
        return free

    def allocate(self, n: int, *, after: int | None = None) -> Slots:
        """Up to n slots in page order, shape (<= n,); fewer only when the pool is full.

        In this order: the free slots directly behind slot `after` in its group (the predecessor's
        slot: short tails stay in one run); whole groups on rotating members, beginning behind the
        member of `after`; for what is left, the tightest run of the partly used group whose longest
        free run fits best, else the front of a whole group; and without whole groups the longest
        free runs.
        """
        assert n >= 0, "a count is not negative"
        parts: list[Slots] = []
        need = n
        cursor = self._cursor
        if after is not None:
            assert 0 <= after < self.slots, "a slot number lies beyond the pool"
            need -= self._continue_run(after, need, parts)
            cursor = after // (self.group_slots * self.groups_per_member) + 1
        cursor, taken = self._take_whole(need // self.group_slots, cursor, parts)
        need -= taken
        # Bounded: every pass takes a slot or ends the loop.
        for _ in range(need):
            if need == 0:
                break
            cursor, taken = self._take_rest(need, cursor, parts)
            if taken == 0:
                break
            need -= taken
        if after is None:
            self._cursor = cursor % self.members
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def free(self, slots: Slots) -> None:
        """Frees distinct allocated slots, in any order."""
        flat = self._free.reshape(-1)
        assert not flat[slots].any(), "a slot was freed that was free"
        groups = np.unique(slots // self.group_slots)
        before = np.count_nonzero(self._free[groups])
        flat[slots] = True
        freed = int(np.count_nonzero(self._free[groups]) - before)
        assert freed == len(slots), "a slot was given twice"
        self._free_slots += freed
        self._refile(groups)

    def take(self, slots: Slots) -> None:
        """Marks given distinct free slots as allocated, at recovery. O(slots of the pool)."""
        flat = self._free.reshape(-1)
        assert flat[slots].all(), "a slot was taken that was not free"
        flat[slots] = False
        self._rebuild()

    def check_integrity(self) -> None:
        """Asserts that counts and queues agree with the free slots; for tests, O(slots)."""
        longest = _longest_runs(self._free)
        assert np.array_equal(longest, self._longest), "a group has another longest run"
        assert self._free_slots == np.count_nonzero(self._free), "the count of free slots is off"
        whole = sorted(group for queue in self._whole for group in queue)
        assert whole == np.flatnonzero(longest == self.group_slots).tolist(), "whole groups"
        for member, queue in enumerate(self._whole):
            assert all(group // self.groups_per_member == member for group in queue), "member"
        for length, groups in enumerate(self._partial):
            expected = np.flatnonzero(longest == length).tolist() if length else []
            assert sorted(groups) == expected, "partly used groups are filed wrongly"

    def _rebuild(self) -> None:
        """Files every group anew, in ascending order."""
        self._free_slots = int(np.count_nonzero(self._free))
        self._longest = _longest_runs(self._free)
        self._whole = [deque() for _ in range(self.members)]
        self._partial = [OrderedDict() for _ in range(self.group_slots)]
        self._file(np.flatnonzero(self._longest > 0))

    def _file(self, groups: Slots) -> None:
        """Puts groups with free slots, which are in no queue, where `allocate` looks for them."""
        lengths = self._longest[groups].tolist()
        for group, length in zip(groups.tolist(), lengths, strict=True):
            if length == self.group_slots:
                self._whole[group // self.groups_per_member].append(group)
            else:
                self._partial[length][group] = None

    def _refile(self, groups: Slots) -> None:
        """Files groups again after their slots changed. Whole groups were taken out before."""
        for group in groups.tolist():
            self._refile_one(group)

    def _refile_one(self, group: int) -> None:
        length = int(self._longest[group])
        if 0 < length < self.group_slots:
            del self._partial[length][group]
        # Of one group bytes are searched sooner than an array.
        runs = self._free[group].tobytes().split(b"\0")
        self._longest[group] = length = max(map(len, runs))
        if length == self.group_slots:
            self._whole[group // self.groups_per_member].append(group)
        elif length > 0:
            self._partial[length][group] = None

    def _take_run(self, group: int, start: int, count: int, parts: list[Slots]) -> int:
        self._free[group, start : start + count] = False
        self._free_slots -= count
        self._refile_one(group)
        first = group * self.group_slots + start
        parts.append(np.arange(first, first + count, dtype=np.int64))
        return count

    def _continue_run(self, after: int, need: int, parts: list[Slots]) -> int:
        group, slot = divmod(after, self.group_slots)
        behind = self._free[group, slot + 1 :]
        if need == 0 or self._free[group, slot] or not behind.size or not behind[0]:
            return 0
        run = behind.size if behind.all() else int(behind.argmin())
        return self._take_run(group, slot + 1, min(run, need), parts)

    def _pop_whole(self, cursor: int) -> int | None:
        """A whole group of the first member at or behind `cursor` that has one."""
        for step in range(self.members):
            queue = self._whole[(cursor + step) % self.members]
            if queue:
                return queue.popleft()
        return None

    def _take_whole(self, count: int, cursor: int, parts: list[Slots]) -> tuple[int, int]:
        """Up to `count` whole groups; returns the next member and the number of slots taken."""
        taken: list[int] = []
        for _ in range(count):
            group = self._pop_whole(cursor)
            if group is None:
                break
            taken.append(group)
            cursor = group // self.groups_per_member + 1
        if not taken:
            return cursor, 0
        groups = np.array(taken, np.int64)
        self._free[groups] = False
        self._longest[groups] = 0
        slots = groups[:, None] * self.group_slots + np.arange(self.group_slots)
        parts.append(slots.reshape(-1))
        self._free_slots -= slots.size
        return cursor, slots.size

    def _take_rest(self, need: int, cursor: int, parts: list[Slots]) -> tuple[int, int]:
        """One run for `need` slots that whole groups did not serve; 0 taken when there is none."""
        fitting = self._first_partial(range(need, self.group_slots))
        if fitting is not None:
            start = _tightest_run(self._free[fitting], need)
            return cursor, self._take_run(fitting, start, need, parts)
        group = self._pop_whole(cursor)
        if group is not None:
            cursor = group // self.groups_per_member + 1
            return cursor, self._take_run(group, 0, min(need, self.group_slots), parts)
        longest = self._first_partial(range(min(need, self.group_slots) - 1, 0, -1))
        if longest is None:
            return cursor, 0
        length = int(self._longest[longest])
        start = _tightest_run(self._free[longest], length)
        return cursor, self._take_run(longest, start, length, parts)

    def _first_partial(self, lengths: range) -> int | None:
        for length in lengths:
            if self._partial[length]:
                return next(iter(self._partial[length]))
        return None


def _run_lengths(free: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """For each slot of each group (n, group_slots) the length of the free run that ends there."""
    position = np.arange(1, free.shape[1] + 1)
    last_used = np.maximum.accumulate(np.where(free, 0, position), axis=1)
    lengths: npt.NDArray[np.int64] = position - last_used
    return lengths


def _longest_runs(free: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    longest: npt.NDArray[np.int64] = _run_lengths(free).max(axis=1)
    return longest


def _tightest_run(free: npt.NDArray[np.bool_], need: int) -> int:
    """Where the shortest free run of at least `need` slots begins in one group."""
    octets = b"\0%b\0" % free.tobytes()
    runs = [run for run in set(octets.split(b"\0")) if len(run) >= need]
    return octets.index(b"\0%b\0" % min(runs, key=len))
