// The builders of sgl.h and iocb.h, one call a line; Python holds the expectations.
//
//   sgl LIST_NBYTES DMA N (ADDRESS NBYTES)*   ->  STATUS SQE LIST
//   prp LIST_NBYTES DMA N (ADDRESS NBYTES)*   ->  STATUS SQE LIST
//   iocb LIST_NBYTES DMA OPCODE PSDT FLAGS SLICE_NLB LBA_SHIFT LAYER_STRIDE_NLB PADDING
//        SEGMENTS (NBYTES STRIDE)* LAYERS BASE* PAGES PAGE* SLBA NSID NLB FIRST SKIP LAYER CID
//
// SQE is its 8 qwords; LIST is the list memory's qwords.  The list has exactly LIST_NBYTES bytes,
// so that the address sanitizer sees a byte more being written.
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "gio_uring/iocb.h"

namespace {

using gio::u32;
using gio::u64;

u64 number() {
  u64 value = 0;
  std::cin >> value;
  return value;
}
u32 word() { return static_cast<u32>(number()); }

template <typename Builder>
u32 build(const gio::ListMemory& list, gio::Sqe* sqe) {
  Builder builder(list);
  u32 status = gio::kOk;
  for (u32 n = word(); n != 0; --n) {
    const u64 address = number();
    const u32 nbytes = word();
    if (status == gio::kOk) status = builder.add(address, nbytes);
  }
  return status == gio::kOk ? builder.finish(sqe) : status;
}

u32 build_iocb(const gio::ListMemory& list, gio::Sqe* sqe) {
  gio::Iocb io = {};
  io.opcode = word();
  io.psdt = word();
  io.flags = word();
  io.slice_nlb = word();
  io.lba_shift = word();
  io.layer_stride_nlb = word();
  io.padding = number();
  io.n_segments = word();
  for (u32 k = 0; k < io.n_segments; ++k) {
    io.segment_nbytes[k] = word();
    io.segment_stride[k] = number();
  }
  io.n_layers = word();
  std::vector<u64> bases(static_cast<size_t>(io.n_layers) * io.n_segments);
  for (u64& base : bases) base = number();
  io.n_pages = word();
  std::vector<u32> pages(io.n_pages);
  for (u32& page : pages) page = word();
  io.bases = reinterpret_cast<u64>(bases.data());
  io.pages = reinterpret_cast<u64>(pages.data());
  const u64 slba = number();
  const u32 nsid = word(), nlb = word(), first = word(), skip = word();
  const gio::Run run = {slba, nsid, nlb, first, skip};
  const u32 layer = word(), cid = word();
  return iocb_build(io, run, layer, cid, list, sqe);
}

void print(u32 status, const gio::Sqe& sqe, const std::vector<unsigned char>& list) {
  std::printf("%u", status);
  u64 qwords[8];
  std::memcpy(qwords, &sqe, sizeof sqe);
  for (u64 qword : qwords) std::printf(" %llu", qword);
  for (size_t i = 0; i + 8 <= list.size(); i += 8) {
    u64 qword;
    std::memcpy(&qword, list.data() + i, 8);
    std::printf(" %llu", qword);
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main() {
  std::string what;
  while (std::cin >> what) {  // bounded by the input
    std::vector<unsigned char> memory(number(), 0xa5);
    const gio::ListMemory list = {reinterpret_cast<u64>(memory.data()), number(),
                                  static_cast<u32>(memory.size())};
    gio::Sqe sqe;
    std::memset(&sqe, 0xa5, sizeof sqe);
    const u32 status = what == "sgl"   ? build<gio::SglBuilder>(list, &sqe)
                       : what == "prp" ? build<gio::PrpBuilder>(list, &sqe)
                                       : build_iocb(list, &sqe);
    print(status, sqe, memory);
  }
  return 0;
}
