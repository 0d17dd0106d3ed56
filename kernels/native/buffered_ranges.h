// The blocks that go through the page cache although their file is opened for direct I/O.
#pragma once

#include <algorithm>
#include <cerrno>
#include <vector>

#include "gio_uring/atomics.h"

namespace gio {

// Plain data, mirrored by tutti/gio_uring/controller_file.py.
struct BufferedRange {
  u32 nsid;
  u32 reserved;
  u64 slba;
  u64 nlb;
};
static_assert(sizeof(BufferedRange) == 24, "layout shared with Python");

// Immutable once assigned: the controller replaces it as a whole.
class BufferedRanges {
 public:
  // A range of blocks, from an offset on, that take the same path.
  struct Span {
    bool is_buffered;
    u64 end;  // bytes into the file
  };

  // Assigns ranges, in any order.  -EINVAL for ranges that are empty, overlap or lie outside.
  int assign(const BufferedRange* ranges, size_t n, const std::vector<u64>& namespace_nlb,
             u32 lba_shift) {
    files_.assign(namespace_nlb.size(), {});
    for (size_t i = 0; i < n; ++i) {
      const BufferedRange& range = ranges[i];
      if (range.nsid == 0 || range.nsid > files_.size() || range.nlb == 0) return -EINVAL;
      const u64 size_nlb = namespace_nlb[range.nsid - 1];
      if (range.nlb > size_nlb || range.slba > size_nlb - range.nlb) return -EINVAL;
      files_[range.nsid - 1].push_back(
          {range.slba << lba_shift, (range.slba + range.nlb) << lba_shift});
    }
    for (std::vector<Piece>& pieces : files_) {
      std::sort(pieces.begin(), pieces.end(),
                [](const Piece& a, const Piece& b) { return a.start < b.start; });
      for (size_t i = 1; i < pieces.size(); ++i) {
        if (pieces[i].start < pieces[i - 1].end) return -EINVAL;
      }
    }
    return 0;
  }

  // file: the namespace's nsid minus one.
  Span at(u32 file, u64 offset) const {
    if (files_.empty()) return {false, ~0ULL};
    const std::vector<Piece>& pieces = files_[file];
    const auto after = std::upper_bound(pieces.begin(), pieces.end(), offset,
                                        [](u64 o, const Piece& p) { return o < p.start; });
    if (after != pieces.begin() && offset < after[-1].end) return {true, after[-1].end};
    return {false, after == pieces.end() ? ~0ULL : after->start};
  }

 private:
  struct Piece {
    u64 start;  // bytes into the file
    u64 end;
  };
  std::vector<std::vector<Piece>> files_;
};

}  // namespace gio
