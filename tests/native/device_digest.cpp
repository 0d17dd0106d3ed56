// The warp's digest on fibers, one string a line:
//
//   NBYTES FACTOR SEGMENTS UNIT SHIFT WAY  ->  HIGH LOW COPIED
//
// Byte i of the string is bits 40 to 47 of (i + 1) * FACTOR modulo 2^64.  It is cut into SEGMENTS
// pieces whose sizes are multiples of UNIT, each SHIFT bytes behind a multiple of 16; in staging it
// is one piece.  WAY: 0 staging to pages, 1 pages to staging, 2 digested in its pages.  COPIED: the
// other side has the string, and nothing around it has changed.
#include <cstdio>

#include "simt.h"  // first: words of CUDA
// The code under test.
#include "digest.cuh"

namespace {

using gio::u32;
using gio::u64;
using gio::u8;
using Bytes = std::vector<u8>;

constexpr u8 kGuard = 0xee;
constexpr u32 kGap = 48;  // around every piece

struct Case {
  u32 nbytes;
  u64 factor;
  u32 segments, unit, shift, way;
};

u8 byte_at(const Case& c, u64 i) { return static_cast<u8>((i + 1) * c.factor >> 40); }

struct Text {
  gio::Iocb io = {};
  u32 page = 0;
  std::vector<u64> bases;
  std::vector<u32> sizes;
  Bytes paged, staged;

  explicit Text(const Case& c)
      : paged(c.nbytes + (c.segments + 1) * (kGap + 32), kGuard), staged(c.nbytes + 96, kGuard) {
    u32 left = c.nbytes;
    u64 at = (reinterpret_cast<u64>(paged.data()) + 31) & -16ull;
    for (u32 k = 0; k < c.segments; ++k) {
      const u32 share = left / (c.segments - k) / c.unit * c.unit;
      const u32 size = k + 1 == c.segments ? left : share;
      bases.push_back(at + c.shift);
      sizes.push_back(size);
      io.segment_nbytes[k] = size;
      at = (at + c.shift + size + kGap) & -16ull;
      left -= size;
    }
    io.n_segments = c.segments;
    io.n_layers = io.n_pages = 1;
    io.pages = reinterpret_cast<u64>(&page);
    io.bases = reinterpret_cast<u64>(bases.data());
  }
  u64 staged_address(const Case& c) {
    return ((reinterpret_cast<u64>(staged.data()) + 31) & -16ull) + c.shift;
  }
  void write_paged(const Case& c) {
    u64 i = 0;
    for (u32 k = 0; k < c.segments; ++k) {
      for (u32 j = 0; j < sizes[k]; ++j) gio::at<u8>(bases[k])[j] = byte_at(c, i++);
    }
  }
  void write_staged(const Case& c) {
    for (u64 i = 0; i < c.nbytes; ++i) gio::at<u8>(staged_address(c))[i] = byte_at(c, i);
  }
};

void run(const Case& c) {
  Text text(c), right(c);
  const gio::Way way = static_cast<gio::Way>(c.way);
  way == gio::Way::kToPages ? text.write_staged(c) : text.write_paged(c);
  right.write_paged(c);
  right.write_staged(c);
  u64 digests[2 * simt::kLanes] = {};
  fiber::Scheduler scheduler(c.nbytes);
  simt::Launch launch;
  launch.spawn(&scheduler, 1, 2, [&] {
    if (gio::warp_index() != 1) return;  // the second warp: it has memory of its own
    const gio::Slice slice(text.io, 0, 0, text.staged_address(c), way);
    digests[threadIdx.x] = gio::warp_digest(slice);
  });
  bool good = scheduler.run(1u << 30);
  for (u32 i = simt::kLanes; i < 2 * simt::kLanes; ++i) {
    good = good && digests[i] == digests[2 * simt::kLanes - 1];
  }
  if (way == gio::Way::kToPages) {
    const u64 shift = reinterpret_cast<u64>(text.paged.data()) & 15u;
    const u64 other = reinterpret_cast<u64>(right.paged.data()) & 15u;
    good = good && shift == other && text.paged == right.paged;
  }
  if (way == gio::Way::kToStaging) {
    const u8* copy = gio::at<u8>(text.staged_address(c));
    const u8* end = text.staged.data() + text.staged.size();
    good = good && std::memcmp(copy, gio::at<u8>(right.staged_address(c)), c.nbytes) == 0;
    for (const u8* p = text.staged.data(); p != end; ++p) {
      good = good && ((p >= copy && p < copy + c.nbytes) || *p == kGuard);
    }
  }
  const u64 digest = digests[simt::kLanes];
  std::printf("%llu %llu %d\n", digest >> 32, digest & 0xffffffffu, good);
  std::fflush(stdout);
}

}  // namespace

int main() {
  Case c;
  while (std::scanf("%u %llu %u %u %u %u", &c.nbytes, &c.factor, &c.segments, &c.unit, &c.shift,
                    &c.way) == 6) {  // bounded by the input
    run(c);
  }
  return 0;
}
