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
constexpr uint32_t kTuttiAbiVersion = 2;

// "No slot": an empty table entry, and what look-ups report for an absent key.
constexpr uint32_t kTuttiNoSlot = 0xFFFFFFFFU;

constexpr uint64_t kTuttiKeyBytes = 16;
constexpr uint64_t kTuttiRecordBytes = 4096;

// Instruction sets that digests choose from at run time.
enum TuttiIsa : uint32_t { kTuttiIsaScalar = 0, kTuttiIsaAvx2 = 1, kTuttiIsaAvx512 = 2 };

TUTTI_API uint32_t tutti_abi_version(void);

// XXH3-64, seed 0. `_isa` hashes n segments as one string with a given instruction set and is for
// tests: one the processor lacks falls back to scalar.
TUTTI_API uint64_t tutti_xxh3_64(const void* data, uint64_t nbytes);
TUTTI_API uint64_t tutti_xxh3_64_isa(uint32_t isa, const uint64_t* addresses,
                                     const uint64_t* nbytes, uint32_t n);
TUTTI_API uint32_t tutti_isa_best(void);

// CRC32C (Castagnoli, RFC 3720 appendix B.4). `seed` is the CRC of what came before, 0 at first.
// `_table` is the portable path, exported for tests.
TUTTI_API uint32_t tutti_crc32c(const void* data, uint64_t nbytes, uint32_t seed);
TUTTI_API uint32_t tutti_crc32c_table(const void* data, uint64_t nbytes, uint32_t seed);

// n records of 4096 bytes whose last four bytes are the little-endian CRC32C of the first 4092.
// `check` sets ok[i] to 1 where it fits, else 0, and returns how many fit.
TUTTI_API void tutti_records_seal(uint8_t* records, uint64_t n);
TUTTI_API uint64_t tutti_records_check(const uint8_t* records, uint64_t n, uint8_t* ok);

// A hash table from 16-byte keys to slots over arrays that the caller owns: keys[slot] is the key
// of a slot (two words), table has mask + 1 entries (a power of two, at least twice the slots, all
// kTuttiNoSlot at first), state[slot] decides what `match` accepts: values from ready_min to
// ready_max. `seed` keys the hash, so that chosen keys cannot be made to collide.
struct tutti_index {
  uint64_t* keys;
  uint32_t* table;
  uint8_t* state;
  uint64_t slots;
  uint64_t mask;
  uint64_t seed;
  uint32_t ready_min;
  uint32_t ready_max;
};

// Length of the longest prefix of `keys` that is present in an accepted state; slots_out receives
// that many slots.
TUTTI_API uint64_t tutti_index_match(const tutti_index* index, const uint8_t* keys, uint64_t n,
                                     uint32_t* slots_out);

// The slot of every key whatever its state, or kTuttiNoSlot; returns how many were found.
TUTTI_API uint64_t tutti_index_find(const tutti_index* index, const uint8_t* keys, uint64_t n,
                                    uint32_t* slots_out);

// Maps keys[i] to slots[i] unless the key is there already: existing_out[i] is kTuttiNoSlot where
// it was mapped, else the slot that holds the key. Returns how many were mapped. The slots must
// be below index->slots and hold no key.
TUTTI_API uint64_t tutti_index_insert(tutti_index* index, const uint8_t* keys,
                                      const uint32_t* slots, uint64_t n, uint32_t* existing_out);

// Unmaps the keys of the given slots; returns how many of them were mapped.
TUTTI_API uint64_t tutti_index_remove(tutti_index* index, const uint32_t* slots, uint64_t n);

#endif  // TUTTI_NATIVE_API_H_
