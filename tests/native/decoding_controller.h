// A controller for the warp tests: decodes PRP and SGL as the NVMe Base Specification 2.0 (sections
// 4.1.1 and 4.1.2) says, and copies between a medium and memory.  Written from the specification,
// not from the builders that it checks.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "fiber.h"  // first: defines GIO_SCHED_POINT
// The headers under test.
#include "gio_uring/controller_queue.h"

namespace ring {

using gio::u32;
using gio::u64;
using gio::u8;

struct Extent {
  u64 address, nbytes;
};

template <typename T>
T load(u64 address) {
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
  return value;
}

// False for a descriptor that a drive would refuse.
inline bool decode_sgl(const gio::Sqe& sqe, std::vector<Extent>* extents) {
  const u8 type = static_cast<u8>(sqe.dptr[1] >> 56);
  const u32 nbytes = static_cast<u32>(sqe.dptr[1]);
  if (((sqe.dptr[1] >> 32) & 0xffffffu) != 0) return false;
  if (type == 0x00) {
    extents->push_back({sqe.dptr[0], nbytes});
    return true;
  }
  if (type != 0x30 || nbytes == 0 || nbytes % 16 != 0) return false;
  for (u32 i = 0; i < nbytes; i += 16) {
    const u64 high = load<u64>(sqe.dptr[0] + i + 8);
    if (high >> 32 != 0) return false;  // reserved bytes, and type 0: data block
    extents->push_back({load<u64>(sqe.dptr[0] + i), high});
  }
  return true;
}

inline bool decode_prp(const gio::Sqe& sqe, u64 nbytes, std::vector<Extent>* extents) {
  constexpr u64 kPage = 4096;
  if (sqe.dptr[0] % 4 != 0) return false;
  const u64 first = std::min(nbytes, kPage - sqe.dptr[0] % kPage);
  extents->push_back({sqe.dptr[0], first});
  u64 left = nbytes - first;
  if (left == 0) return true;
  if (left <= kPage) {
    extents->push_back({sqe.dptr[1], left});
    return sqe.dptr[1] % kPage == 0;
  }
  u64 entry = sqe.dptr[1];
  if (entry % 8 != 0) return false;
  while (left != 0) {  // bounded: every entry but the chain pointers takes from what is left
    if ((entry + 8) % kPage == 0 && left > kPage) {
      entry = load<u64>(entry);
      if (entry % kPage != 0) return false;
    }
    const u64 page = load<u64>(entry);
    if (page % kPage != 0) return false;
    extents->push_back({page, std::min(left, kPage)});
    left -= extents->back().nbytes;
    entry += 8;
  }
  return true;
}

// Executes reads and writes at once, completes them in an order drawn from the seed.
class DecodingController {
 public:
  DecodingController(const gio::ControllerQueue& queue, std::vector<u8>* medium, u32 lba_shift,
                     u64 seed)
      : queue_(queue), medium_(*medium), lba_shift_(lba_shift), random_(seed) {}

  bool step() {
    gio::Sqe sqe;
    const bool fetched = sq_fetch(&queue_, &sqe);
    if (fetched) pending_.push_back({sqe_cid(sqe), execute(sqe)});
    if (pending_.empty() || (fetched && random_.below(4) != 0)) return fetched;
    std::swap(pending_[random_.below(static_cast<u32>(pending_.size()))], pending_.back());
    if (cq_post(&queue_, pending_.back().cid, pending_.back().status)) pending_.pop_back();
    return true;
  }

 private:
  struct Result {
    u32 cid, status;
  };

  u32 execute(const gio::Sqe& sqe) {
    const u64 nbytes = static_cast<u64>(sqe_nlb(sqe)) << lba_shift_;
    const u64 at = sqe_slba(sqe) << lba_shift_;
    if (at + nbytes > medium_.size()) return gio::kLbaOutOfRange;
    std::vector<Extent> extents;
    const bool sound = sqe_psdt(sqe) == gio::kPsdtSgl ? decode_sgl(sqe, &extents)
                                                      : decode_prp(sqe, nbytes, &extents);
    u64 total = 0;
    for (const Extent& extent : extents) total += extent.nbytes;
    if (!sound || total != nbytes) return gio::kSglLengthInvalid;
    u8* block = medium_.data() + at;
    for (const Extent& extent : extents) {
      u8* memory = reinterpret_cast<u8*>(extent.address);
      if (sqe_opcode(sqe) == gio::kRead) {
        std::memcpy(memory, block, extent.nbytes);
      } else {
        std::memcpy(block, memory, extent.nbytes);
      }
      block += extent.nbytes;
    }
    return gio::kOk;
  }

  gio::ControllerQueue queue_;
  std::vector<u8>& medium_;
  u32 lba_shift_;
  fiber::Random random_;
  std::vector<Result> pending_;
};

}  // namespace ring
