// Answers of the node's agent to its clients: a plan and its message in one call.
#include "answers.h"

#include <cstring>

namespace {

// Writes a frame: the length of the body, and a message in MessagePack (tutti/node/messages.py).
class Frame {
 public:
  explicit Frame(uint8_t* out) : out_(out), at_(out + sizeof(uint32_t)) {}

  void byte(uint8_t value) { *at_++ = value; }
  void array(uint8_t n) { byte(static_cast<uint8_t>(0x90 | n)); }
  void boolean(bool value) { byte(value ? 0xc3 : 0xc2); }
  void name(const char* text) {
    const size_t n = std::strlen(text);
    byte(static_cast<uint8_t>(0xa0 | n));
    copy(text, n);
  }
  void number(uint64_t value) {
    byte(0xcf);
    for (int shift = 56; shift >= 0; shift -= 8) byte(static_cast<uint8_t>(value >> shift));
  }
  void bytes(const void* data, uint64_t n) {
    byte(0xc6);
    for (int shift = 24; shift >= 0; shift -= 8) byte(static_cast<uint8_t>(n >> shift));
    copy(data, n);
  }
  // Writes the length; returns the bytes of the whole frame.
  uint64_t end() {
    const auto all = static_cast<uint64_t>(at_ - out_);
    const auto body = static_cast<uint32_t>(all - sizeof(uint32_t));
    std::memcpy(out_, &body, sizeof body);  // little-endian, as this machine is
    return all;
  }

 private:
  void copy(const void* data, uint64_t n) {
    if (n != 0) std::memcpy(at_, data, n);
    at_ += n;
  }

  uint8_t* const out_;
  uint8_t* at_;
};

struct Moved {
  uint64_t plan;
  uint64_t job;
  const int64_t* slots;
  uint64_t n;
};

// Writes Plan(number, [MoveJob(job, slots, rows, digests, compare)]); rows are u32.
uint64_t write_plan(uint8_t* out, const Moved& moved, const uint32_t* rows, const uint64_t* digests,
                    uint64_t layers) {
  Frame frame(out);
  frame.array(5);
  frame.name("plan");
  frame.number(moved.plan);
  frame.array(1);
  frame.array(7);
  frame.name("job");
  frame.number(moved.job);
  frame.bytes(moved.slots, moved.n * sizeof *moved.slots);
  frame.bytes(rows, rows == nullptr ? 0 : moved.n * sizeof *rows);
  frame.bytes(digests, digests == nullptr ? 0 : moved.n * layers * sizeof *digests);
  frame.boolean(digests != nullptr);
  frame.boolean(false);
  frame.bytes(nullptr, 0);
  frame.bytes(nullptr, 0);
  return frame.end();
}

}  // namespace

int64_t tutti_load_answer(const tutti_load_tables* tables, const uint8_t* keys, uint64_t n,
                          uint32_t uses, uint32_t verify, uint64_t job, uint64_t* plan) {
  const int64_t runs = tutti_load_plan(tables, keys, n, uses, verify, plan);
  if (runs < 0) return runs;
  const uint64_t layers = tables->digests->layers;
  const uint64_t* digests = plan + 2 * n;
  const auto* marks = reinterpret_cast<const uint8_t*>(digests + n * layers);
  uint64_t* size = plan + (2 + layers) * n + n / 8 + 1;
  *size = 0;
  const uint8_t first = n == 0 ? static_cast<uint8_t>(kTuttiUnproven) : marks[0];
  const bool compares = verify != 0 && (first & kTuttiHasDigests) != 0;
  if ((first & kTuttiUnproven) != 0 || ((first & kTuttiKnown) != 0) != compares) return runs;
  for (uint64_t i = 1; i < n; ++i) {
    if (marks[i] != first) return runs;
  }
  const auto* slots = reinterpret_cast<const int64_t*>(plan);
  *size = write_plan(reinterpret_cast<uint8_t*>(size + 1), {0, job, slots, n}, nullptr,
                     compares ? digests : nullptr, layers);
  return runs;
}

int64_t tutti_put_answer(const tutti_put_tables* tables, const tutti_put_request* request,
                         uint64_t* words) {
  const tutti_put_request& put = *request;
  const uint64_t n = put.n;
  auto* chain = reinterpret_cast<uint8_t*>(words);
  auto* depths = reinterpret_cast<uint32_t*>(words + 2 * (n + 1));
  uint64_t* placed = words + 2 * (n + 1) + n / 2 + 1;
  std::memset(chain, 0, kTuttiKeyBytes);
  if (put.parent != nullptr) std::memcpy(chain, put.parent, kTuttiKeyBytes);
  std::memcpy(chain + kTuttiKeyBytes, put.keys, n * kTuttiKeyBytes);
  for (uint64_t i = 0; i < n; ++i) depths[i] = put.depth + static_cast<uint32_t>(i);
  const tutti_placement placement = {chain + kTuttiKeyBytes, chain,    depths,         n,
                                     put.sequence,           put.uses, put.has_digests};
  if (tutti_put_place(tables, &placement, placed) < 0) return -1;
  const uint64_t mapped = placed[5 * n + 1];
  uint64_t* size = placed + 5 * n + 3;
  uint32_t* rows = nullptr;
  if (mapped != n) {
    rows = reinterpret_cast<uint32_t*>(placed + 3 * n);  // what place needed of it is done
    for (uint64_t i = 0; i < mapped; ++i) rows[i] = static_cast<uint32_t>(placed[2 * n + i]);
  }
  const auto* slots = reinterpret_cast<const int64_t*>(placed);
  *size = write_plan(reinterpret_cast<uint8_t*>(size + 1), {put.number, put.job, slots, mapped},
                     rows, nullptr, 0);
  return static_cast<int64_t>(mapped);
}
