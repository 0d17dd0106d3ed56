// The part of the shared library's C interface that does not concern rings: digests, records, the
// index.
//
// Loaded by tutti/native.py through ctypes. Pointers need to be valid only during the call; nothing
// here allocates, blocks or keeps a pointer. The caller serialises calls on the same tutti_index.
#ifndef TUTTI_NATIVE_API_H_
#define TUTTI_NATIVE_API_H_

#include <cstdint>

#define TUTTI_API extern "C" __attribute__((visibility("default")))

// Incremented with every incompatible change of a signature or a struct below.
constexpr uint32_t kTuttiAbiVersion = 11;

// Marks an empty table entry; look-ups report an absent key as kTuttiMissing.
constexpr uint32_t kTuttiNoSlot = 0xFFFFFFFFU;
constexpr int64_t kTuttiMissing = -1;

constexpr uint64_t kTuttiKeyBytes = 16;
constexpr uint64_t kTuttiRecordBytes = 4096;

// Instruction sets for digests; the widest available one is chosen at run time.
enum TuttiIsa : uint32_t { kTuttiIsaScalar = 0, kTuttiIsaAvx2 = 1, kTuttiIsaAvx512 = 2 };

TUTTI_API uint32_t tutti_abi_version(void);

// XXH3-64, seed 0, of n segments as one string, with a given instruction set; for tests and
// benchmarks. If the processor lacks it, scalar code is used.
TUTTI_API uint64_t tutti_xxh3_64_isa(uint32_t isa, const uint64_t* addresses,
                                     const uint64_t* nbytes, uint32_t n);
TUTTI_API uint32_t tutti_isa_best(void);
// Reads a word of each line of 64 bytes of n segments, and returns their sum; for benchmarks.
TUTTI_API uint64_t tutti_read_lines(const uint64_t* addresses, const uint64_t* nbytes, uint32_t n);

// Key i is XXH3-128, as 16 big-endian bytes, of the fingerprint (16 bytes) and hash i. The n hashes
// are consecutive and have `nbytes` each, 1 to kTuttiHashBytesMax.
constexpr uint64_t kTuttiHashBytesMax = 112;
TUTTI_API void tutti_object_keys(const uint8_t* fingerprint, const uint8_t* hashes, uint64_t n,
                                 uint64_t nbytes, uint8_t* keys);
// As above, for hashes as text: 2 * nbytes hexadecimal digits each, separated by line feeds, in all
// n * (2 * nbytes + 1) - 1 bytes. Returns 0 for any other text; keys are undefined then.
TUTTI_API uint32_t tutti_named_keys(const uint8_t* fingerprint, const uint8_t* text, uint64_t n,
                                    uint64_t nbytes, uint8_t* keys);

// CRC32C (Castagnoli, RFC 3720 appendix B.4). `seed` is the CRC of the bytes before, 0 at first.
// `_table` is the portable version, exported for tests.
TUTTI_API uint32_t tutti_crc32c(const void* data, uint64_t nbytes, uint32_t seed);
TUTTI_API uint32_t tutti_crc32c_table(const void* data, uint64_t nbytes, uint32_t seed);

// For n records of 4096 bytes, whose last four bytes are the little-endian CRC32C of the first
// 4092. `seal` writes it. `check` sets ok[i] to 1 if it matches, else 0, and returns the number of
// matches.
TUTTI_API void tutti_records_seal(uint8_t* records, uint64_t n);
TUTTI_API uint64_t tutti_records_check(const uint8_t* records, uint64_t n, uint8_t* ok);

// Fields that all slot records of a member share (docs/format.md, section 3).
struct tutti_record_identity {
  uint8_t pool_uuid[16];
  uint8_t fingerprint[16];
  uint64_t epoch;
  uint32_t member;
  uint32_t layers;
};

// States of slots and records that native code sets.
enum TuttiState : uint32_t {
  kTuttiSlotVoided = 1,
  kTuttiSlotWriting = 2,
  kTuttiSlotReady = 3,
  kTuttiRecordReady = 1
};

// Numeric fields of n records: one row of n values per field.
enum TuttiColumn : uint64_t {
  kTuttiSlot,
  kTuttiSequence,
  kTuttiTenant,
  kTuttiDepth,
  kTuttiAccess,
  kTuttiFlags,
  kTuttiExpiry,
  kTuttiColumns
};

// Overwrites n records and seals them. columns: u64[kTuttiColumns][n]; keys and parents: 16 bytes
// per record; digests: u64[n][layers]. Each of the last three may be 0, for zeros.
TUTTI_API void tutti_records_fill(uint8_t* records, uint64_t n,
                                  const tutti_record_identity* identity, uint32_t state,
                                  const uint64_t* columns, const uint8_t* keys,
                                  const uint8_t* parents, const uint64_t* digests);

constexpr uint64_t kTuttiDigestsBit = uint64_t{1} << 63;

// A hash table from 16-byte keys to slots, over arrays that the caller owns. keys[slot]: the key of
// a slot (two words). state[slot]: `match` accepts slots with states from ready_min to ready_max.
// table: `entries` is 1.5 times the number of slots. An entry is kTuttiNoSlot, or has a slot in the
// bits of slot_mask (never all of them) and a part of its key's hash above these. seed: of the
// hash, so that clients cannot choose colliding keys. The other arrays have an entry per slot, see
// tutti/placement/index.py; hits is 0 if nothing counts them. The highest bit of a sequence number
// is set if the object has digests.
struct tutti_index {
  uint64_t* keys;
  uint32_t* table;
  uint8_t* state;
  uint16_t* pins;
  uint32_t* access;
  uint32_t* depth;
  uint64_t* sequence;
  uint16_t* hits;
  uint64_t slots;
  uint64_t entries;
  uint64_t seed;
  uint32_t ready_min;
  uint32_t ready_max;
  uint32_t slot_mask;
};

// Length of the longest prefix of `keys` that is present in an accepted state; slots_out receives
// its slots, and their access is set to `uses`.
TUTTI_API uint64_t tutti_index_match(tutti_index* index, const uint8_t* keys, uint64_t n,
                                     uint32_t uses, int64_t* slots_out);

// Finds the slot of every key, in any state, or kTuttiMissing; returns the number found.
TUTTI_API uint64_t tutti_index_find(const tutti_index* index, const uint8_t* keys, uint64_t n,
                                    int64_t* slots_out);

// Removes one pin of each slot (two of a slot that is listed twice). Returns -1 - i and changes
// nothing if slot i is out of range or has no pin left.
TUTTI_API int64_t tutti_index_unpin(tutti_index* index, const int64_t* slots, uint64_t n);

// Increments the counts of slots, from the first on (with `last`: from the last one back). Stops
// before a count of 65535, and before the count that would be the (room + 1)th to be 0. Returns how
// many were incremented; fresh_out: how many of these were 0. Slots are not checked.
TUTTI_API uint64_t tutti_pins_take(uint16_t* kept, const int64_t* slots, uint64_t n, uint64_t room,
                                   uint32_t last, uint64_t* fresh_out);
// Decrements these counts; returns the number of slots whose count becomes 0.
TUTTI_API uint64_t tutti_pins_give_back(uint16_t* kept, const int64_t* slots, uint64_t n);

// Rows of the keys without a slot, in order and without repeated keys; returns their number. The
// other keys' slots count as accessed.
TUTTI_API int64_t tutti_index_absent(tutti_index* index, const uint8_t* keys, uint64_t n,
                                     uint32_t uses, int64_t* rows_out);

// Keys to insert, with the values of their slots; each array has n rows.
struct tutti_insertion {
  const uint8_t* keys;
  const int64_t* slots;
  const uint64_t* sequence;
  const uint32_t* depth;
  const uint8_t* has_digests;
  const uint32_t* access;  // 0: `uses` for all
  int64_t* existing;       // out: kTuttiMissing, or the slot that the key has already
  uint64_t n;
  uint32_t uses;
  uint32_t from_max;  // the highest state of a slot that may take a key
  uint32_t state;     // of the slots afterwards
};

// Maps keys[i] to slots[i] unless the key is mapped already. Returns the number of mapped keys, or
// -1 - i and changes nothing if slot i is out of range, in a state above from_max, or listed twice.
TUTTI_API int64_t tutti_index_insert(tutti_index* index, const tutti_insertion* insertion);

// Moves slots to `state`. Returns -1 - i and changes nothing if slot i is out of range, in a state
// whose bit is not in `from`, or pinned while `unpinned` is set.
TUTTI_API int64_t tutti_index_move(tutti_index* index, const int64_t* slots, uint64_t n,
                                   uint32_t from, uint32_t state, uint32_t unpinned);

// Unmaps the keys of slots, which must be in range; returns how many were mapped.
TUTTI_API uint64_t tutti_index_remove(tutti_index* index, const int64_t* slots, uint64_t n);

// A ghost: an evicted key, as a part of its hash, its last use, and an older ghost of its bucket.
struct tutti_ghost {
  uint32_t tag;
  uint32_t used;
  uint32_t next;
};

constexpr uint64_t kTuttiGaps = 33;

// How often objects are used (tutti/placement/reuse.py); the caller owns the arrays. By slot: the
// use in which it was filled or last loaded, 0 if unknown, and its number of uses. A ring of as
// many ghosts as slots, with each one's number of uses (0: empty). The latest ghost of each bucket.
// A histogram of gaps between the uses of an object, by the bit length of the gap. The number of
// objects and ghosts by their uses. References since a use, and how many hit; would hit if the pool
// kept the objects with the most uses; or those used last.
struct tutti_reuse {
  uint32_t* used;
  uint8_t* uses;
  tutti_ghost* ghosts;
  uint8_t* ghost_uses;
  uint32_t* heads;
  uint32_t* gaps;
  uint32_t* known;
  uint64_t slots;
  uint64_t buckets;
  uint64_t oldest;
  uint64_t gaps_sum;
  uint64_t references;
  uint64_t since;
  double hits[3];
};

// Records that the objects of slots were evicted: their keys replace the oldest ghosts. Returns -1
// for a slot out of range.
TUTTI_API int64_t tutti_reuse_evicted(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                                      uint64_t n);

// Records that slots were loaded in use `now`; counts each once. Returns -1 for a slot out of
// range.
TUTTI_API int64_t tutti_reuse_loaded(tutti_reuse* reuse, const int64_t* slots, uint64_t n,
                                     int64_t now);

// Records that keys were stored in slots; returns how many of them had been evicted, or -1 for a
// slot out of range.
TUTTI_API int64_t tutti_reuse_stored(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                                     uint64_t n, int64_t now);

// Records that keys are put that may not be stored: remembers them as if they had been evicted.
// Returns the most uses of one, this one included. If they are stored in the same use, that is not
// another one. since: the use in which they may have been counted by an earlier call, or `now`.
TUTTI_API int64_t tutti_reuse_missed(tutti_reuse* reuse, const uint8_t* keys, uint64_t n,
                                     int64_t since, int64_t now);

// A direct-mapped cache of digests by slot number; see tutti/placement/digest_cache.py.
struct tutti_digests {
  int64_t* slot;
  uint64_t* sequence;
  uint64_t* digests;
  uint64_t entries;
  uint64_t layers;
};

TUTTI_API void tutti_digests_put(tutti_digests* cache, const int64_t* slots,
                                 const uint64_t* sequences, uint64_t n, const uint64_t* digests);

// The tables that a load uses.
struct tutti_load_tables {
  tutti_index* index;
  tutti_reuse* reuse;
  const tutti_digests* digests;
  uint64_t group_slots;
};

// Marks of a load's keys; kTuttiKnown: its digests were in the cache.
enum TuttiMark : uint8_t { kTuttiUnproven = 1, kTuttiHasDigests = 2, kTuttiKnown = 4 };

// Begins a load of `keys`: pins each key's slot, counts an access and a hit, and updates the
// history. Returns the number of runs (consecutive slots of a group), or -1 - i and changes nothing
// if key i is not in an accepted state or has 65535 pins. plan: consecutive slots i64[n], sequence
// numbers u64[n], digests u64[n][layers] (known ones), and marks u8[n]. verify: digests are needed
// for proven objects, too.
TUTTI_API int64_t tutti_load_plan(const tutti_load_tables* tables, const uint8_t* keys, uint64_t n,
                                  uint32_t uses, uint32_t verify, uint64_t* plan);

#endif  // TUTTI_NATIVE_API_H_
