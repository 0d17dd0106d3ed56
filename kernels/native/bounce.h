// Aligned buffers for transfers whose memory direct I/O does not accept.
#pragma once

#include <sys/mman.h>

#include <vector>

#include "gio_uring/atomics.h"

namespace gio {

// A fixed number of buffers in one arena on huge pages, mapped when the first buffer is taken.
class BouncePool {
 public:
  BouncePool(u32 buffers, u64 buffer_nbytes)
      : buffers_(buffers), buffer_nbytes_((buffer_nbytes + kPage - 1) & ~(kPage - 1)) {
    free_.reserve(buffers);  // the thread that takes them must not need memory
  }
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;
  ~BouncePool() {
    if (mapping_ != nullptr) munmap(mapping_, mapping_nbytes());
  }

  // Takes a buffer; null if all are in use, or without memory.
  char* take() {
    if (mapping_ == nullptr && !map()) return nullptr;
    if (free_.empty()) return nullptr;
    char* buffer = free_.back();
    free_.pop_back();
    return buffer;
  }

  // Whether the arena is mapped: if take() returned null, a buffer will become free later.
  bool is_mapped() const { return mapping_ != nullptr; }
  bool has_free() const { return !free_.empty(); }

  void give_back(char* buffer) { free_.push_back(buffer); }

 private:
  static constexpr u64 kPage = 4096;
  static constexpr u64 kHugePage = 2 << 20;

  u64 mapping_nbytes() const { return buffers_ * buffer_nbytes_ + kHugePage; }

  bool map() {
    void* mapping = mmap(nullptr, mapping_nbytes(), PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return false;
    mapping_ = mapping;
    const u64 start = (reinterpret_cast<u64>(mapping) + kHugePage - 1) & ~(kHugePage - 1);
    char* arena = reinterpret_cast<char*>(start);
    madvise(arena, buffers_ * buffer_nbytes_, MADV_HUGEPAGE);  // only faster; may be refused
    for (u32 i = buffers_; i-- > 0;) free_.push_back(arena + i * buffer_nbytes_);
    return true;
  }

  const u32 buffers_;
  const u64 buffer_nbytes_;
  void* mapping_ = nullptr;
  std::vector<char*> free_;
};

}  // namespace gio
