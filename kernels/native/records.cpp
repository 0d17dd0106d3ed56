// CRC32C, and the sealing and checking of 4096-byte records in bulk.
//
// The processor's CRC instruction has a latency of three cycles and a throughput of one per cycle.
// So three records are processed at a time, without combining partial sums.
#include <nmmintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "api.h"

namespace {

constexpr uint32_t kPolynomial = 0x82F63B78U;  // Castagnoli's, bit-reversed.
constexpr uint64_t kSealedBytes = kTuttiRecordBytes - 4;
constexpr uint64_t kSideBySide = 3;

using Table = std::array<std::array<uint32_t, 256>, 8>;

// table[k][b]: the remainder of byte b followed by k zero bytes.
constexpr Table make_table() {
  Table table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[0][byte] = crc;
  }
  for (uint32_t k = 1; k < 8; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = table[k - 1][byte];
      table[k][byte] = (before >> 8) ^ table[0][before & 0xFF];
    }
  }
  return table;
}

constexpr Table kTable = make_table();

uint64_t read64(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

uint32_t read32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

bool has_crc_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}

__attribute__((target("sse4.2"))) uint32_t crc32c_hardware(const uint8_t* p, uint64_t nbytes,
                                                           uint32_t seed) {
  uint64_t crc = ~seed;
  for (; nbytes >= 8; nbytes -= 8, p += 8) crc = _mm_crc32_u64(crc, read64(p));
  uint32_t rest = static_cast<uint32_t>(crc);
  for (; nbytes > 0; --nbytes, ++p) rest = _mm_crc32_u8(rest, *p);
  return ~rest;
}

// The sums of three consecutive records.
__attribute__((target("sse4.2"))) void crc32c_three(const uint8_t* records, uint32_t* crcs) {
  const uint8_t* a = records;
  const uint8_t* b = records + kTuttiRecordBytes;
  const uint8_t* c = records + 2 * kTuttiRecordBytes;
  uint64_t crc_a = 0xFFFFFFFFU;
  uint64_t crc_b = 0xFFFFFFFFU;
  uint64_t crc_c = 0xFFFFFFFFU;
  constexpr uint64_t whole = kSealedBytes / 8 * 8;
  for (uint64_t i = 0; i < whole; i += 8) {
    crc_a = _mm_crc32_u64(crc_a, read64(a + i));
    crc_b = _mm_crc32_u64(crc_b, read64(b + i));
    crc_c = _mm_crc32_u64(crc_c, read64(c + i));
  }
  static_assert(kSealedBytes - whole == 4, "one 32-bit step is left");
  crcs[0] = ~_mm_crc32_u32(static_cast<uint32_t>(crc_a), read32(a + whole));
  crcs[1] = ~_mm_crc32_u32(static_cast<uint32_t>(crc_b), read32(b + whole));
  crcs[2] = ~_mm_crc32_u32(static_cast<uint32_t>(crc_c), read32(c + whole));
}

// Calls visit(i, crc of record i) for every record.
template <class Visit>
void for_each_crc(const uint8_t* records, uint64_t n, Visit visit) {
  uint64_t i = 0;
  if (has_crc_instruction()) {
    for (; i + kSideBySide <= n; i += kSideBySide) {
      uint32_t crcs[kSideBySide];
      crc32c_three(records + i * kTuttiRecordBytes, crcs);
      for (uint64_t k = 0; k < kSideBySide; ++k) visit(i + k, crcs[k]);
    }
  }
  for (; i < n; ++i) visit(i, tutti_crc32c(records + i * kTuttiRecordBytes, kSealedBytes, 0));
}

// A record on the medium, up to the digests.
struct Head {
  uint32_t magic;
  uint16_t version;
  uint16_t state;
  uint8_t pool_uuid[16];
  uint64_t slot;
  uint64_t sequence;
  uint64_t epoch;
  uint8_t key[kTuttiKeyBytes];
  uint8_t parent[kTuttiKeyBytes];
  uint8_t fingerprint[16];
  uint64_t tenant;
  uint32_t member;
  uint32_t depth;
  uint32_t access_64s;
  uint32_t layers;
  uint32_t flags;
  uint32_t expiry_64s;
};
static_assert(sizeof(Head) == 128, "the digests follow");
constexpr uint32_t kRecordMagic = 0x43455254;  // "TREC"
constexpr uint16_t kFormatVersion = 1;

void copy_key(uint8_t* out, const uint8_t* keys, uint64_t i) {
  if (keys != nullptr) std::memcpy(out, keys + i * kTuttiKeyBytes, kTuttiKeyBytes);
}

}  // namespace

uint32_t tutti_crc32c_table(const void* data, uint64_t nbytes, uint32_t seed) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  uint32_t crc = ~seed;
  for (; nbytes >= 8; nbytes -= 8, p += 8) {
    const uint64_t word = read64(p) ^ crc;
    crc = 0;
    for (uint32_t k = 0; k < 8; ++k) crc ^= kTable[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; nbytes > 0; --nbytes, ++p) crc = (crc >> 8) ^ kTable[0][(crc ^ *p) & 0xFF];
  return ~crc;
}

uint32_t tutti_crc32c(const void* data, uint64_t nbytes, uint32_t seed) {
  if (!has_crc_instruction()) return tutti_crc32c_table(data, nbytes, seed);
  return crc32c_hardware(static_cast<const uint8_t*>(data), nbytes, seed);
}

void tutti_records_seal(uint8_t* records, uint64_t n) {
  for_each_crc(records, n, [records](uint64_t i, uint32_t crc) {
    std::memcpy(records + i * kTuttiRecordBytes + kSealedBytes, &crc, sizeof crc);
  });
}

uint64_t tutti_records_check(const uint8_t* records, uint64_t n, uint8_t* ok) {
  uint64_t fitting = 0;
  for_each_crc(records, n, [records, ok, &fitting](uint64_t i, uint32_t crc) {
    ok[i] = crc == read32(records + i * kTuttiRecordBytes + kSealedBytes) ? 1 : 0;
    fitting += ok[i];
  });
  return fitting;
}

void tutti_records_fill(uint8_t* records, uint64_t n, const tutti_record_identity* identity,
                        uint32_t state, const uint64_t* columns, const uint8_t* keys,
                        const uint8_t* parents, const uint64_t* digests) {
  Head head = {};
  head.magic = kRecordMagic;
  head.version = kFormatVersion;
  head.state = static_cast<uint16_t>(state);
  head.epoch = identity->epoch;
  head.member = identity->member;
  head.layers = identity->layers;
  std::memcpy(head.pool_uuid, identity->pool_uuid, sizeof head.pool_uuid);
  std::memcpy(head.fingerprint, identity->fingerprint, sizeof head.fingerprint);
  for (uint64_t i = 0; i < n; ++i) {
    const auto value = [=](TuttiColumn column) { return columns[column * n + i]; };
    head.slot = value(kTuttiSlot);
    head.sequence = value(kTuttiSequence);
    head.tenant = value(kTuttiTenant);
    head.depth = static_cast<uint32_t>(value(kTuttiDepth));
    head.access_64s = static_cast<uint32_t>(value(kTuttiAccess));
    head.flags = static_cast<uint32_t>(value(kTuttiFlags));
    head.expiry_64s = static_cast<uint32_t>(value(kTuttiExpiry));
    copy_key(head.key, keys, i);
    copy_key(head.parent, parents, i);
    uint8_t* record = records + i * kTuttiRecordBytes;
    std::memset(record, 0, kTuttiRecordBytes);
    std::memcpy(record, &head, sizeof head);
    if (digests == nullptr) continue;
    std::memcpy(record + sizeof head, digests + i * head.layers, 8 * uint64_t{head.layers});
  }
  tutti_records_seal(records, n);
}
