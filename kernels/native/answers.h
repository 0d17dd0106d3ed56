// Answers of the node's agent to its clients: a plan and its message in one call.
#pragma once

#include "allocator.h"
#include "api.h"

// Plans like tutti_load_plan, and writes the answer if one job moves all pages and every digest to
// compare is known. plan: in addition, after marks u8[n] and padding up to the next word but one:
// the size of the answer in bytes (0 for none), and the answer, a whole frame of at most
// kTuttiAnswerBytes + 8 n (layers + 1) bytes. job: the job's number.
TUTTI_API int64_t tutti_load_answer(const tutti_load_tables* tables, const uint8_t* keys,
                                    uint64_t n, uint32_t uses, uint32_t verify, uint64_t job,
                                    uint64_t* plan);

constexpr uint64_t kTuttiAnswerBytes = 96;

// A put of consecutive keys of a chain. parent: the first key's parent, 0 for none. number: the
// client's number of the put. job: the number of its only job.
struct tutti_put_request {
  const uint8_t* keys;
  const uint8_t* parent;
  uint64_t n;
  uint64_t sequence;  // of the first
  uint64_t number;
  uint64_t job;
  uint32_t depth;  // of the first
  uint32_t uses;
  uint32_t has_digests;
};

// Allocates slots for all keys, for which there must be room, and writes the answer. Returns the
// number of keys that the index did not have, or -1 if the index uses a slot that is free. words:
// parent and keys u8[n + 1][16], depths u32[n] and padding up to the next word but one, the output
// of tutti_put_place (5n + 3 words), the size of the answer in bytes, and the answer, of at most
// kTuttiAnswerBytes + 12n bytes.
TUTTI_API int64_t tutti_put_answer(const tutti_put_tables* tables, const tutti_put_request* request,
                                   uint64_t* words);
