#include "allocator.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr uint32_t kNone = kTuttiNoSlot;

struct FreeRun {
  uint64_t start;
  uint64_t length;
};

// Operations on one allocator; allocated slots are written to `out`.
class Groups {
 public:
  explicit Groups(tutti_allocator* allocator, int64_t* out = nullptr) : a_(*allocator), out_(out) {}

  uint64_t taken() const { return taken_; }

  void rebuild() {
    std::fill_n(a_.first, a_.members + a_.group_slots, kNone);
    std::fill_n(a_.last, a_.members + a_.group_slots, kNone);
    const uint64_t groups = a_.members * a_.groups_per_member;
    a_.free_slots = 0;
    for (uint64_t group = 0; group < groups; ++group) {
      const uint8_t* free = free_of(group);
      a_.free_slots += static_cast<uint64_t>(std::count(free, free + a_.group_slots, 1));
      file(group);
    }
  }

  // Moves a group whose slots changed to its list.  A whole group was removed from its list before.
  void refile(uint64_t group) {
    const uint32_t length = a_.longest[group];
    if (length > 0 && length < a_.group_slots) remove(a_.members + length, group);
    file(group);
  }

  void continue_run(uint64_t after, uint64_t need) {
    const uint64_t group = after / a_.group_slots;
    const uint64_t start = after % a_.group_slots + 1;
    const uint8_t* free = free_of(group);
    if (need == 0 || free[start - 1] != 0) return;
    uint64_t end = start;
    while (end < a_.group_slots && end - start < need && free[end] != 0) ++end;
    if (end != start) take(group, start, end - start);
  }

  void take_whole(uint64_t count, uint64_t* cursor) {
    for (uint64_t i = 0; i < count; ++i) {
      const uint32_t group = pop_whole(*cursor);
      if (group == kNone) return;
      *cursor = group / a_.groups_per_member + 1;
      take(group, 0, a_.group_slots);
    }
  }

  // Takes one run for `need` slots that whole groups did not cover; false if there is none.
  bool take_rest(uint64_t need, uint64_t* cursor) {
    for (uint64_t length = need; length < a_.group_slots; ++length) {
      const uint32_t group = a_.first[a_.members + length];
      if (group == kNone) continue;
      take(group, tightest_run(group, need), need);
      return true;
    }
    const uint32_t whole = pop_whole(*cursor);
    if (whole != kNone) {
      *cursor = whole / a_.groups_per_member + 1;
      take(whole, 0, std::min(need, a_.group_slots));
      return true;
    }
    for (uint64_t length = std::min(need, a_.group_slots) - 1; length > 0; --length) {
      const uint32_t group = a_.first[a_.members + length];
      if (group == kNone) continue;
      take(group, tightest_run(group, length), length);
      return true;
    }
    return false;
  }

 private:
  uint8_t* free_of(uint64_t group) const { return a_.free + group * a_.group_slots; }

  // The next free run of a group from `start` on; its length is 0 if there is none.
  FreeRun next_run(uint64_t group, uint64_t start) const {
    const uint8_t* free = free_of(group);
    while (start < a_.group_slots && free[start] == 0) ++start;
    uint64_t end = start;
    while (end < a_.group_slots && free[end] != 0) ++end;
    return {start, end - start};
  }

  uint64_t tightest_run(uint64_t group, uint64_t need) const {
    FreeRun best = {0, ~uint64_t{0}};
    FreeRun run = next_run(group, 0);
    for (; run.length != 0; run = next_run(group, run.start + run.length)) {
      if (run.length >= need && run.length < best.length) best = run;
    }
    return best.start;
  }

  void take(uint64_t group, uint64_t start, uint64_t count) {
    std::memset(free_of(group) + start, 0, count);
    a_.free_slots -= count;
    const uint64_t first = group * a_.group_slots + start;
    for (uint64_t i = 0; i < count; ++i) out_[taken_++] = static_cast<int64_t>(first + i);
    refile(group);
  }

  // Adds a group that is in no list to the list for its longest free run.
  void file(uint64_t group) {
    uint64_t longest = 0;
    FreeRun run = next_run(group, 0);
    for (; run.length != 0; run = next_run(group, run.start + run.length)) {
      longest = std::max(longest, run.length);
    }
    a_.longest[group] = static_cast<uint32_t>(longest);
    if (longest == 0) return;
    const bool is_whole = longest == a_.group_slots;
    append(is_whole ? group / a_.groups_per_member : a_.members + longest, group);
  }

  void append(uint64_t list, uint64_t group) {
    const uint32_t before = a_.last[list];
    const auto number = static_cast<uint32_t>(group);
    a_.previous[group] = before;
    a_.next[group] = kNone;
    (before == kNone ? a_.first[list] : a_.next[before]) = number;
    a_.last[list] = number;
  }

  void remove(uint64_t list, uint64_t group) {
    const uint32_t before = a_.previous[group];
    const uint32_t behind = a_.next[group];
    (before == kNone ? a_.first[list] : a_.next[before]) = behind;
    (behind == kNone ? a_.last[list] : a_.previous[behind]) = before;
  }

  // Removes a whole free group from the first member, from `cursor` on, that has one.
  uint32_t pop_whole(uint64_t cursor) {
    for (uint64_t step = 0; step < a_.members; ++step) {
      const uint64_t member = (cursor + step) % a_.members;
      const uint32_t group = a_.first[member];
      if (group == kNone) continue;
      remove(member, group);
      return group;
    }
    return kNone;
  }

  tutti_allocator& a_;
  int64_t* const out_;
  uint64_t taken_ = 0;
};

bool is_same(const uint8_t* a, const uint8_t* b) { return std::memcmp(a, b, kTuttiKeyBytes) == 0; }

// Allocates slots for keys; those of a part of a chain follow its parent's slot.  Returns their
// number.
uint64_t allocate_chain(const tutti_put_tables& tables, const uint8_t* keys, const uint8_t* parents,
                        uint64_t n, int64_t* slots) {
  uint64_t start = 0;
  while (start < n) {
    uint64_t end = start + 1;
    while (end < n && is_same(parents + end * kTuttiKeyBytes, keys + (end - 1) * kTuttiKeyBytes)) {
      ++end;
    }
    int64_t after = kTuttiMissing;
    tutti_index_find(tables.index, parents + start * kTuttiKeyBytes, 1, &after);
    const uint64_t count =
        tutti_allocator_allocate(tables.allocator, end - start, after, slots + start);
    start += count;
    if (start < end) break;
  }
  return start;
}

}  // namespace

void tutti_allocator_rebuild(tutti_allocator* allocator) { Groups(allocator).rebuild(); }

uint64_t tutti_allocator_allocate(tutti_allocator* allocator, uint64_t n, int64_t after,
                                  int64_t* slots_out) {
  Groups groups(allocator, slots_out);
  uint64_t cursor = allocator->cursor;
  if (after != kTuttiMissing) {
    groups.continue_run(static_cast<uint64_t>(after), n);
    const uint64_t member_slots = allocator->group_slots * allocator->groups_per_member;
    cursor = static_cast<uint64_t>(after) / member_slots + 1;
  }
  groups.take_whole((n - groups.taken()) / allocator->group_slots, &cursor);
  while (groups.taken() < n && groups.take_rest(n - groups.taken(), &cursor)) {
  }
  if (after == kTuttiMissing) allocator->cursor = cursor % allocator->members;
  return groups.taken();
}

int64_t tutti_allocator_free(tutti_allocator* allocator, const int64_t* slots, uint64_t n) {
  const uint64_t all = allocator->members * allocator->groups_per_member * allocator->group_slots;
  for (uint64_t i = 0; i < n; ++i) {
    const bool ascends = slots[i] >= 0 && (i == 0 || slots[i] > slots[i - 1]);
    if (!ascends || static_cast<uint64_t>(slots[i]) >= all || allocator->free[slots[i]] != 0) {
      return -1 - static_cast<int64_t>(i);
    }
  }
  Groups groups(allocator);
  for (uint64_t i = 0; i < n; ++i) {
    allocator->free[slots[i]] = 1;
    const uint64_t group = static_cast<uint64_t>(slots[i]) / allocator->group_slots;
    const bool is_last =
        i + 1 == n || static_cast<uint64_t>(slots[i + 1]) / allocator->group_slots != group;
    if (is_last) groups.refile(group);
  }
  allocator->free_slots += n;
  return static_cast<int64_t>(n);
}

int64_t tutti_put_place(const tutti_put_tables* tables, const tutti_placement* placement,
                        uint64_t* out) {
  const tutti_placement& put = *placement;
  const uint64_t n = put.n;
  auto* slots = reinterpret_cast<int64_t*>(out);
  uint64_t* sequences = out + n;
  auto* rows = reinterpret_cast<int64_t*>(out + 2 * n);
  auto* existing = reinterpret_cast<int64_t*>(out + 3 * n);
  auto* flags = reinterpret_cast<uint8_t*>(out + 4 * n);
  const uint64_t placed = allocate_chain(*tables, put.keys, put.parents, n, slots);
  for (uint64_t i = 0; i < placed; ++i) sequences[i] = put.sequence + i;
  std::memset(flags, static_cast<int>(put.has_digests), placed);
  const tutti_insertion insertion = {
      put.keys, slots,    sequences,        put.depths,       flags, nullptr, existing,
      placed,   put.uses, kTuttiSlotVoided, kTuttiSlotWriting};
  if (tutti_index_insert(tables->index, &insertion) < 0) return -1;
  uint64_t kept = 0;
  uint64_t late = 0;
  for (uint64_t i = 0; i < placed; ++i) {
    if (existing[i] != kTuttiMissing) {
      tutti_allocator_free(tables->allocator, slots + i, 1);
      continue;
    }
    const uint8_t* key = put.keys + i * kTuttiKeyBytes;
    late += static_cast<uint64_t>(tutti_reuse_stored(tables->reuse, slots + i, key, 1, put.uses));
    slots[kept] = slots[i];
    sequences[kept] = sequences[i];
    rows[kept++] = static_cast<int64_t>(i);
  }
  uint64_t* counts = out + 5 * n;
  counts[0] = placed;
  counts[1] = kept;
  counts[2] = late;
  return 0;
}
