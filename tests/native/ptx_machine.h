// Executes what ptx_text.py decoded of the kernels' PTX, a fiber a thread, in place of their C++.
//
// It shows what the instructions compute and where they store, in sequentially consistent
// interleavings; a switch point stands before every access that has an order.  Memory that the
// device does not reach, addresses that are not aligned and read-modify-writes of host memory end
// the process with the line of the PTX.
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_kernels.h"
#include "cuda_machine.h"

namespace ptx {

constexpr size_t kSharedNbytes = 48 * 1024;
using Shared = std::array<char, kSharedNbytes>;

enum class Space { kGeneric, kGlobal, kShared, kConst };

struct Frame;
struct Instruction;
using Run = void (*)(Frame&, const Instruction&);

struct Instruction {
  unsigned line, bits, target;
  bool is_signed, is_negated;
  Space space;
  int guard;
  int64_t offset;
  Run run;
  std::vector<unsigned> slots;
};

struct Special {
  unsigned slot;
  std::string name;
};

struct Function {
  std::string name;
  unsigned threads, results;
  std::vector<unsigned> parameters;  // widths
  std::vector<uint64_t> slots;       // as a frame begins
  std::vector<Special> specials;
  std::vector<Instruction> code;
};

struct Program {
  size_t shared_nbytes = 0;
  std::string data;
  std::vector<Function> functions;
  machine::Memory* memory = nullptr;
};

// A thread's registers in one function.
struct Frame {
  const Program& program;
  const Function& function;
  char* shared;
  std::vector<uint64_t> r;
  size_t at = 0;

  Frame(const Program& of, const Function& what, const uint64_t* parameters)
      : program(of), function(what), shared(simt::shared<Shared>(&of).data()), r(what.slots) {
    std::copy_n(parameters, what.parameters.size(), r.begin() + what.results);
    const simt::Lane& lane = simt::lane();
    for (const auto& [slot, name] : what.specials) {
      r[slot] = name == "tid.x"     ? lane.thread.x
                : name == "ctaid.x" ? lane.block.x
                : name == "ntid.x"  ? lane.size.x
                                    : lane.grid.x;
    }
  }

  void run() {
    while (at < function.code.size()) {  // as long as the kernel runs
      const Instruction& i = function.code[at++];
      if (i.guard < 0 || (r[i.guard] != 0) != i.is_negated) i.run(*this, i);
    }
  }
};

[[noreturn]] inline void fail(const Frame& f, const Instruction& i, const char* why) {
  std::fprintf(stderr, "%s, line %u of the PTX: %s\n", f.function.name.c_str(), i.line, why);
  std::abort();
}

inline uint64_t masked(uint64_t value, unsigned bits) {
  return bits >= 64 ? value : value & ((uint64_t{1} << bits) - 1);
}
inline int64_t extended(uint64_t value, unsigned bits) {
  return static_cast<int64_t>(value << (64 - bits)) >> (64 - bits);
}

// Operand `n` as the instruction's type says, sign-extended where it has one.
inline uint64_t in(const Frame& f, const Instruction& i, unsigned n) {
  const uint64_t value = masked(f.r[i.slots[n]], i.bits);
  return i.is_signed ? static_cast<uint64_t>(extended(value, i.bits)) : value;
}
inline uint64_t raw(const Frame& f, const Instruction& i, unsigned n) { return f.r[i.slots[n]]; }
inline void out(Frame& f, const Instruction& i, uint64_t value, unsigned bits) {
  f.r[i.slots[0]] = masked(value, bits);
}

inline bool is_less(const Frame& f, const Instruction& i, unsigned a, unsigned b) {
  const uint64_t x = in(f, i, a), y = in(f, i, b);
  return i.is_signed ? static_cast<int64_t>(x) < static_cast<int64_t>(y) : x < y;
}

inline unsigned __int128 product(const Frame& f, const Instruction& i) {
  const auto wide = [&](unsigned n) -> __int128 {
    return i.is_signed ? __int128{static_cast<int64_t>(in(f, i, n))} : __int128{in(f, i, n)};
  };
  return static_cast<unsigned __int128>(wide(1)) * static_cast<unsigned __int128>(wide(2));
}

inline uint64_t shifted(const Frame& f, const Instruction& i, bool is_left) {
  const uint64_t n = raw(f, i, 2), value = in(f, i, 1);
  const bool is_beyond = n >= i.bits;
  if (is_left) return is_beyond ? 0 : value << n;
  if (i.is_signed)
    return static_cast<uint64_t>(static_cast<int64_t>(value) >> (is_beyond ? 63 : n));
  return is_beyond ? 0 : value >> n;
}

inline uint64_t reversed(uint64_t value, unsigned bits) {
  uint64_t result = 0;
  for (unsigned k = 0; k < bits; ++k) result |= (value >> k & 1) << (bits - 1 - k);
  return result;
}

// Bytes of two words, chosen by the nibbles of a selector, whose high bit spreads a sign.
inline uint64_t permuted(const Frame& f, const Instruction& i) {
  const uint64_t bytes = raw(f, i, 2) << 32 | raw(f, i, 1);
  uint64_t result = 0;
  for (unsigned k = 0; k < 4; ++k) {
    const uint64_t nibble = raw(f, i, 3) >> 4 * k & 0xf, byte = bytes >> 8 * (nibble & 7) & 0xff;
    result |= ((nibble & 8) == 0 ? byte : (byte & 0x80) != 0 ? 0xff : 0) << 8 * k;
  }
  return result;
}

inline uint64_t inserted(const Frame& f, const Instruction& i) {
  const uint64_t place = raw(f, i, 3) & 0xff, length = raw(f, i, 4) & 0xff;
  if (place >= i.bits) return raw(f, i, 2);
  const uint64_t mask = masked(~uint64_t{0}, length) << place;
  return (raw(f, i, 2) & ~mask) | (raw(f, i, 1) << place & mask);
}

// How far to shift the highest bit to the left.
inline uint64_t leading(const Frame& f, const Instruction& i) {
  if (i.is_signed) fail(f, i, "of a signed number");
  const uint64_t value = in(f, i, 1);
  return value == 0 ? ~0u : __builtin_clzll(value) - (64 - i.bits);
}

inline uint64_t divisor(const Frame& f, const Instruction& i) {
  if (in(f, i, 2) == 0 || i.is_signed) fail(f, i, "a division by zero, or of signed numbers");
  return in(f, i, 2);
}

// The host's address of the memory that the instruction names.
inline char* reach(Frame& f, const Instruction& i, bool is_atomic = false) {
  const uint64_t address = raw(f, i, 0) + static_cast<uint64_t>(i.offset);
  const size_t nbytes = i.bits / 8 * (is_atomic ? 1 : i.slots.size() - 1);
  if (address % nbytes != 0) fail(f, i, "the address is not aligned");
  if (i.space == Space::kShared) {
    if (address + nbytes > f.program.shared_nbytes) fail(f, i, "beyond the shared memory");
    return f.shared + address;
  }
  const auto place = reinterpret_cast<char*>(address);
  const auto lies_in = [&](const char* start, size_t size) {
    return place >= start && place + nbytes <= start + size;
  };
  const std::string& data = f.program.data;
  const bool is_own = i.space == Space::kConst ? lies_in(data.data(), data.size())
                                               : i.space == Space::kGeneric &&
                                                     lies_in(f.shared, f.program.shared_nbytes);
  if (is_own) return place;
  if (i.space == Space::kConst) fail(f, i, "beyond the constants");
  if (!f.program.memory->holds(address, nbytes, is_atomic)) {
    fail(f, i, is_atomic ? "an atomic of what is not device memory" : "a wild address");
  }
  return place;
}

template <bool kIsStore>
void move(Frame& f, const Instruction& i) {
  char* place = reach(f, i);
  const size_t nbytes = i.bits / 8;
  for (size_t n = 1; n < i.slots.size(); ++n, place += nbytes) {
    uint64_t& slot = f.r[i.slots[n]];
    if (kIsStore) {
      std::memcpy(place, &slot, nbytes);
    } else {
      slot = 0;
      std::memcpy(&slot, place, nbytes);
      if (i.is_signed) slot = static_cast<uint64_t>(extended(slot, i.bits));
    }
  }
}

// A store is whole at once for the controller's thread.
template <typename Word, bool kIsStore>
void move_ordered(Frame& f, const Instruction& i) {
  Word* word = reinterpret_cast<Word*>(reach(f, i));
  if (kIsStore) {
    // Pairs with the acquire of the reader that waits for the word.
    __atomic_store_n(word, static_cast<Word>(raw(f, i, 1)), __ATOMIC_RELEASE);
  } else {
    // Pairs with the release of the writer that stores the word.
    f.r[i.slots[1]] = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  }
}

template <bool kIsStore>
void ordered(Frame& f, const Instruction& i) {
  fiber::switch_point();
  if (i.bits == 8) return move_ordered<uint8_t, kIsStore>(f, i);
  if (i.bits == 16) return move_ordered<uint16_t, kIsStore>(f, i);
  if (i.bits == 32) return move_ordered<uint32_t, kIsStore>(f, i);
  move_ordered<uint64_t, kIsStore>(f, i);
}

// A read-modify-write: f(old, operand, second operand).  All threads of a launch are fibers of one
// thread, and other launches are other threads.
template <typename Change>
void modify(Frame& f, const Instruction& i, const Change& change) {
  fiber::switch_point();
  auto* word = reinterpret_cast<uint32_t*>(reach(f, i, true));
  const auto a = static_cast<uint32_t>(raw(f, i, 2));
  const auto b = static_cast<uint32_t>(i.slots.size() > 3 ? raw(f, i, 3) : 0);
  uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED);  // pairs with nothing: it is tried below
  // Pairs with the read-modify-writes of other launches.
  while (!__atomic_compare_exchange_n(word, &old, change(old, a, b), false, __ATOMIC_ACQ_REL,
                                      __ATOMIC_RELAXED)) {
  }
  f.r[i.slots[1]] = old;
}

inline void call(Frame& f, const Instruction& i) {
  const Function& called = f.program.functions[i.target];
  std::vector<uint64_t> values;
  for (size_t n = called.results; n < i.slots.size(); ++n) values.push_back(raw(f, i, n));
  Frame inner(f.program, called, values.data());
  inner.run();
  for (size_t n = 0; n < called.results; ++n) f.r[i.slots[n]] = inner.r[n];
}

inline void shuffle(Frame& f, const Instruction& i, bool is_xor) {
  if (raw(f, i, 3) != 31 || raw(f, i, 4) != 0xffffffff) fail(f, i, "not of the whole warp");
  const auto b = static_cast<unsigned>(raw(f, i, 2));
  const unsigned source = is_xor ? simt::lane().index() ^ b : b;
  out(f, i, simt::shuffle(0xffffffff, static_cast<uint32_t>(raw(f, i, 1)), source), 32);
  f.r[i.slots[5]] = 1;
}

#define DO(key, ...) {key, [](Frame& f, const Instruction& i) { __VA_ARGS__; }}
#define RESULT(key, expression) DO(key, out(f, i, expression, i.bits))
#define TEST(key, expression) DO(key, out(f, i, expression, 1))
#define MODIFY(key, expression)                                \
  DO(key, modify(f, i,                                         \
                 [](uint32_t old, [[maybe_unused]] uint32_t a, \
                    [[maybe_unused]] uint32_t b) -> uint32_t { return expression; }))

inline const std::map<std::string, Run>& runs() {
  static const std::map<std::string, Run> all = {
      RESULT("mov", raw(f, i, 1)),
      RESULT("cvt", i.is_signed ? extended(raw(f, i, 1), i.offset) : raw(f, i, 1)),
      RESULT("add", in(f, i, 1) + in(f, i, 2)),
      RESULT("sub", in(f, i, 1) - in(f, i, 2)),
      RESULT("and", in(f, i, 1) & in(f, i, 2)),
      RESULT("or", in(f, i, 1) | in(f, i, 2)),
      RESULT("xor", in(f, i, 1) ^ in(f, i, 2)),
      RESULT("not", ~in(f, i, 1)),
      RESULT("neg", 0 - in(f, i, 1)),
      RESULT("min", in(f, i, is_less(f, i, 1, 2) ? 1 : 2)),
      RESULT("max", in(f, i, is_less(f, i, 1, 2) ? 2 : 1)),
      RESULT("mul.lo", in(f, i, 1) * in(f, i, 2)),
      RESULT("mul.hi", static_cast<uint64_t>(product(f, i) >> i.bits)),
      DO("mul.wide", out(f, i, in(f, i, 1) * in(f, i, 2), 2 * i.bits)),
      RESULT("mad.lo", in(f, i, 1) * in(f, i, 2) + in(f, i, 3)),
      RESULT("shl", shifted(f, i, true)),
      RESULT("shr", shifted(f, i, false)),
      RESULT("brev", reversed(in(f, i, 1), i.bits)),
      RESULT("prmt", permuted(f, i)),
      RESULT("bfi", inserted(f, i)),
      RESULT("selp", raw(f, i, raw(f, i, 3) != 0 ? 1 : 2)),
      DO("popc", out(f, i, __builtin_popcountll(in(f, i, 1)), 32)),
      DO("bfind.shiftamt", out(f, i, leading(f, i), 32)),
      RESULT("div", in(f, i, 1) / divisor(f, i)),
      RESULT("rem", in(f, i, 1) % divisor(f, i)),
      TEST("setp.eq", in(f, i, 1) == in(f, i, 2)),
      TEST("setp.ne", in(f, i, 1) != in(f, i, 2)),
      TEST("setp.lt", is_less(f, i, 1, 2)),
      TEST("setp.le", !is_less(f, i, 2, 1)),
      TEST("setp.gt", is_less(f, i, 2, 1)),
      TEST("setp.ge", !is_less(f, i, 1, 2)),
      DO("pack", f.r[i.slots[0]] = 0; for (size_t n = i.slots.size(); --n > 0;) f.r[i.slots[0]] =
                                          f.r[i.slots[0]] << i.bits | masked(raw(f, i, n), i.bits)),
      DO("unpack", uint64_t whole = raw(f, i, 0);
         for (size_t n = 1; n < i.slots.size(); ++n, whole >>= i.bits) f.r[i.slots[n]] =
             masked(whole, i.bits)),
      DO("cvta.shared", out(f, i, reinterpret_cast<uint64_t>(f.shared) + raw(f, i, 1), 64)),
      DO("cvta.to.shared", out(f, i, raw(f, i, 1) - reinterpret_cast<uint64_t>(f.shared), 64)),
      DO("ld", move<false>(f, i)),
      DO("st", move<true>(f, i)),
      DO("ld.ordered", ordered<false>(f, i)),
      DO("st.ordered", ordered<true>(f, i)),
      MODIFY("atom.exch", (static_cast<void>(old), a)),
      MODIFY("atom.add", old + a),
      MODIFY("atom.or", old | a),
      MODIFY("atom.and", old & a),
      MODIFY("atom.cas", old == a ? b : old),
      DO("fence.acq_rel.sys", static_cast<void>(f); static_cast<void>(i);
         // Pairs with the fences and acquires of other processors.
         __atomic_thread_fence(__ATOMIC_SEQ_CST)),
      DO("clock", out(f, i, simt::now_ns(), 64)),
      DO("nanosleep.u32", static_cast<void>(f); __nanosleep(raw(f, i, 0))),
      DO("bra", f.at = i.target),
      DO("ret", static_cast<void>(i); f.at = f.function.code.size()),
      DO("call", call(f, i)),
      DO("bar.sync", if (raw(f, i, 0) != 0) fail(f, i, "another barrier"); __syncthreads()),
      DO("bar.warp.sync", if (raw(f, i, 0) != 0xffffffff) fail(f, i, "not of the whole warp");
         __syncwarp()),
      DO("vote.sync.ballot.b32",
         if (raw(f, i, 2) != 0xffffffff) fail(f, i, "not of the whole warp");
         out(f, i, simt::ballot(0xffffffff, raw(f, i, 1) != 0), 32)),
      DO("shfl.sync.bfly.b32", shuffle(f, i, true)),
      DO("shfl.sync.idx.b32", shuffle(f, i, false)),
  };
  return all;
}

inline Instruction read_instruction(std::istream& words) {
  Instruction i;
  std::string key;
  int space;
  words >> i.line >> key >> i.bits >> i.is_signed >> space >> i.guard >> i.is_negated >> i.target >>
      i.offset;
  i.space = static_cast<Space>(space);
  i.run = runs().at(key);
  for (unsigned slot; words >> slot;) i.slots.push_back(slot);
  return i;
}

// Reads a decoded module; its memory is what kernels may touch.
inline std::unique_ptr<Program> read(const char* path, machine::Memory* memory) {
  auto program = std::make_unique<Program>();
  program->memory = memory;
  std::ifstream file(path);
  for (std::string line, word; std::getline(file, line);) {
    std::istringstream words(line);
    words >> word;
    Function* last = program->functions.empty() ? nullptr : &program->functions.back();
    unsigned slot;
    if (word == "shared") {
      words >> program->shared_nbytes;
    } else if (word == "bytes") {
      for (char pair[3] = {}; words >> pair[0] >> pair[1];) {
        program->data += static_cast<char>(std::strtoul(pair, nullptr, 16));
      }
    } else if (word == "function") {
      Function made;
      size_t slots;
      words >> made.name >> made.threads >> slots >> made.results;
      made.slots.resize(slots);
      for (unsigned width; words >> width;) made.parameters.push_back(width);
      program->functions.push_back(made);
    } else if (word == "special") {
      Special special;
      words >> special.slot >> special.name;
      last->specials.push_back(special);
    } else if (word == "i") {
      last->code.push_back(read_instruction(words));
    } else if (words >> slot >> last->slots[slot]; word == "data") {
      last->slots[slot] += reinterpret_cast<uint64_t>(program->data.data());
    }
  }
  return program;
}

// The entry points, as the stand-in launches kernels.
inline std::vector<machine::Kernel> kernels(const Program& program) {
  std::vector<machine::Kernel> found;
  for (const Function& function : program.functions) {
    const auto capture = [&](void** parameters) -> machine::Call {
      std::vector<uint64_t> values;
      for (const unsigned width : function.parameters) {
        values.push_back(0);
        std::memcpy(&values.back(), parameters[values.size() - 1], width / 8);
      }
      return [&program, &function, values] { Frame(program, function, values.data()).run(); };
    };
    if (function.threads != 0) found.push_back({function.name.c_str(), function.threads, capture});
  }
  return found;
}

// A kernel that the module lacks.
inline const machine::Kernel kMissing = {"", 1024, [](void**) -> machine::Call {
                                           return [] { throw std::runtime_error("no such PTX"); };
                                         }};

}  // namespace ptx
