// The C interface of the shared library that is not about rings: digests, records, the index.
//
// Loaded by tutti/native.py through ctypes. Every pointer is the caller's and must stay valid for
// the call only; nothing here allocates, blocks or keeps a pointer. The caller serialises calls
// that name the same tutti_index.
#ifndef TUTTI_NATIVE_API_H_
#define TUTTI_NATIVE_API_H_

#include <cstdint>

#define TUTTI_API extern "C" __attribute__((visibility("default")))

// Raised with every incompatible change of a signature or a struct below.
constexpr uint32_t kTuttiAbiVersion = 10;

// An empty table entry; look-ups report an absent key as kTuttiMissing.
constexpr uint32_t kTuttiNoSlot = 0xFFFFFFFFU;
constexpr int64_t kTuttiMissing = -1;

constexpr uint64_t kTuttiKeyBytes = 16;
constexpr uint64_t kTuttiRecordBytes = 4096;

// Instruction sets that digests choose from at run time.
enum TuttiIsa : uint32_t { kTuttiIsaScalar = 0, kTuttiIsaAvx2 = 1, kTuttiIsaAvx512 = 2 };

TUTTI_API uint32_t tutti_abi_version(void);

// XXH3-64, seed 0, of n segments as one string with a given instruction set; for tests and
// benchmarks: one the processor lacks falls back to scalar.
TUTTI_API uint64_t tutti_xxh3_64_isa(uint32_t isa, const uint64_t* addresses,
                                     const uint64_t* nbytes, uint32_t n);
TUTTI_API uint32_t tutti_isa_best(void);

// Key i is XXH3-128, as 16 big-endian bytes, of the fingerprint (16 bytes) and hash i. The n hashes
// lie one after another and have `nbytes` each, 1 to kTuttiHashBytesMax.
constexpr uint64_t kTuttiHashBytesMax = 112;
TUTTI_API void tutti_object_keys(const uint8_t* fingerprint, const uint8_t* hashes, uint64_t n,
                                 uint64_t nbytes, uint8_t* keys);
// As above, of hashes that are written as 2 * nbytes hexadecimal digits each, with one line feed
// between two. 0, and keys are undefined, where the text is not that; it has n * (2 * nbytes + 1) -
// 1 bytes.
TUTTI_API uint32_t tutti_named_keys(const uint8_t* fingerprint, const uint8_t* text, uint64_t n,
                                    uint64_t nbytes, uint8_t* keys);

// CRC32C (Castagnoli, RFC 3720 appendix B.4). `seed` is the CRC of what came before, 0 at first.
// `_table` is the portable path, exported for tests.
TUTTI_API uint32_t tutti_crc32c(const void* data, uint64_t nbytes, uint32_t seed);
TUTTI_API uint32_t tutti_crc32c_table(const void* data, uint64_t nbytes, uint32_t seed);

// n records of 4096 bytes whose last four bytes are the little-endian CRC32C of the first 4092.
// `check` sets ok[i] to 1 where it fits, else 0, and returns how many fit.
TUTTI_API void tutti_records_seal(uint8_t* records, uint64_t n);
TUTTI_API uint64_t tutti_records_check(const uint8_t* records, uint64_t n, uint8_t* ok);

// What all slot records of a member have in common (docs/format.md, section 3).
struct tutti_record_identity {
  uint8_t pool_uuid[16];
  uint8_t fingerprint[16];
  uint64_t epoch;
  uint32_t member;
  uint32_t layers;
};

// States of a slot and of a record that native code sets.
enum TuttiState : uint32_t {
  kTuttiSlotVoided = 1,
  kTuttiSlotWriting = 2,
  kTuttiSlotReady = 3,
  kTuttiRecordReady = 1
};

// The numbers of n records, one row of n after another.
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

// Overwrites n records and seals them. columns: u64[kTuttiColumns][n]; keys and parents: of 16
// bytes, and digests[n][layers], each may be 0 for zeros.
TUTTI_API void tutti_records_fill(uint8_t* records, uint64_t n,
                                  const tutti_record_identity* identity, uint32_t state,
                                  const uint64_t* columns, const uint8_t* keys,
                                  const uint8_t* parents, const uint64_t* digests);

constexpr uint64_t kTuttiDigestsBit = uint64_t{1} << 63;

// A hash table from 16-byte keys to slots over arrays that the caller owns: keys[slot] is the key
// of a slot (two words), state[slot] decides what `match` accepts: values from ready_min to
// ready_max. table has half as many `entries` again as slots: kTuttiNoSlot at first, else a slot in
// the bits of slot_mask, which no slot fills, and a part of its key's hash above them. `seed` keys
// the hash, so that chosen keys cannot be made to collide. The other arrays have an entry per slot,
// as tutti/placement/index.py says; hits is 0 where nothing counts them. The highest bit of a
// sequence number says that the object has digests.
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
// that many slots, and their access is `uses`.
TUTTI_API uint64_t tutti_index_match(tutti_index* index, const uint8_t* keys, uint64_t n,
                                     uint32_t uses, int64_t* slots_out);

// The slot of every key whatever its state, or kTuttiMissing; returns how many were found.
TUTTI_API uint64_t tutti_index_find(const tutti_index* index, const uint8_t* keys, uint64_t n,
                                    int64_t* slots_out);

// Takes a pin back from each slot, given twice twice. -1 - i, and nothing changes, where slot i
// is out of range or has no pin left.
TUTTI_API int64_t tutti_index_unpin(tutti_index* index, const int64_t* slots, uint64_t n);

// Counts a mention for each slot, from the first on (with `last` from the last one), while at most
// `room` of them had none and none has 65535; returns how many, and how many had none. Slots are
// not checked.
TUTTI_API uint64_t tutti_pins_take(uint16_t* kept, const int64_t* slots, uint64_t n, uint64_t room,
                                   uint32_t last, uint64_t* fresh_out);
// Takes these mentions back; returns how many slots have none then.
TUTTI_API uint64_t tutti_pins_give_back(uint16_t* kept, const int64_t* slots, uint64_t n);

// Rows of keys without a slot, each key once, in order; returns how many. The slots of the others
// are accessed.
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

// Maps keys[i] to slots[i] unless the key is there already. Returns how many were mapped; or -1 - i
// and changes nothing where slot i is out of range, in a state above from_max, or was given before.
TUTTI_API int64_t tutti_index_insert(tutti_index* index, const tutti_insertion* insertion);

// Moves slots to `state`. -1 - i, and nothing changes, where slot i is out of range, in a state
// whose bit is not in `from`, or pinned though `unpinned` is set.
TUTTI_API int64_t tutti_index_move(tutti_index* index, const int64_t* slots, uint64_t n,
                                   uint32_t from, uint32_t state, uint32_t unpinned);

// Unmaps the keys of the given slots, all in range; returns how many of them were mapped.
TUTTI_API uint64_t tutti_index_remove(tutti_index* index, const int64_t* slots, uint64_t n);

// An evicted key, by a part of its hash: its last use, and an older ghost of its bucket.
struct tutti_ghost {
  uint32_t tag;
  uint32_t used;
  uint32_t next;
};

constexpr uint64_t kTuttiGaps = 33;

// How often objects are used (tutti/placement/reuse.py), all the caller's: by slot, the use in
// which it was filled or last loaded, 0 for unknown, and how often that was; as many ghosts as
// slots, a ring, with how often each was used (0: none is here); the latest ghost of each bucket;
// and, by the bits of the gap, the uses that came that long after the one before.
struct tutti_reuse {
  uint32_t* used;
  uint8_t* uses;
  tutti_ghost* ghosts;
  uint8_t* ghost_uses;
  uint32_t* heads;
  uint32_t* gaps;
  uint64_t slots;
  uint64_t buckets;
  uint64_t oldest;
  uint64_t gaps_sum;
};

// The objects of slots were evicted: their keys take the places of the oldest ghosts. -1 for a slot
// out of range.
TUTTI_API int64_t tutti_reuse_evicted(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                                      uint64_t n);

// Slots were loaded in use `now`; counts each once. -1 for a slot out of range.
TUTTI_API int64_t tutti_reuse_loaded(tutti_reuse* reuse, const int64_t* slots, uint64_t n,
                                     int64_t now);

// Keys came into slots; returns how many of them had been evicted. -1 for a slot out of range.
TUTTI_API int64_t tutti_reuse_stored(tutti_reuse* reuse, const int64_t* slots, const uint8_t* keys,
                                     uint64_t n, int64_t now);

// A cache of digests, mapped directly by slot number; see tutti/placement/digest_cache.py.
struct tutti_digests {
  int64_t* slot;
  uint64_t* sequence;
  uint64_t* digests;
  uint64_t entries;
  uint64_t layers;
};

TUTTI_API void tutti_digests_put(tutti_digests* cache, const int64_t* slots,
                                 const uint64_t* sequences, uint64_t n, const uint64_t* digests);

// What a load looks at.
struct tutti_load_tables {
  tutti_index* index;
  tutti_reuse* reuse;
  const tutti_digests* digests;
  uint64_t group_slots;
};

// Of each key of a load; kTuttiKnown: its digests were in the cache.
enum TuttiMark : uint8_t { kTuttiUnproven = 1, kTuttiHasDigests = 2, kTuttiKnown = 4 };

// A load of `keys` begins: pins, accesses and counts a hit of each key's slot, and tells the
// history. Returns the number of runs in the slots (up by one, within a group); or -1 - i and
// changes nothing where key i is not in an accepted state or has 65535 pins. plan: slots i64[n],
// sequence numbers u64[n], digests u64[n][layers] as far as known, and marks u8[n] one after
// another. verify: the digests of proven objects are wanted too.
TUTTI_API int64_t tutti_load_plan(const tutti_load_tables* tables, const uint8_t* keys, uint64_t n,
                                  uint32_t uses, uint32_t verify, uint64_t* plan);

#endif  // TUTTI_NATIVE_API_H_
