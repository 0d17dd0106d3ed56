// Answers of the node's agent to its clients: a plan and its message in one call.
#pragma once

#include "allocator.h"
#include "api.h"

// As tutti_load_plan, with the answer behind it if one job moves all pages and every digest that is
// to be compared is known. plan: in addition, after marks u8[n] and up to the next word but one,
// the bytes of the answer, 0 for none, and the answer, a message as it is sent, of at most
// kTuttiAnswerBytes + 8 n (layers + 1) bytes. job: its number.
TUTTI_API int64_t tutti_load_answer(const tutti_load_tables* tables, const uint8_t* keys,
                                    uint64_t n, uint32_t uses, uint32_t verify, uint64_t job,
                                    uint64_t* plan);

constexpr uint64_t kTuttiAnswerBytes = 96;

// Keys that follow one another. parent: of the first, 0 for none. number: of the put, as the client
// hears it; job: of its only job.
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

// Gives slots to all keys, for which there is room, and writes the answer. Returns how many keys
// the index did not have, or -1 where a free slot is in use by the index. words: parent and keys
// u8[n + 1][16], depths u32[n] up to the next word but one, what tutti_put_place writes (5n + 3),
// the bytes of the answer, and the answer, of at most kTuttiAnswerBytes + 12n bytes.
TUTTI_API int64_t tutti_put_answer(const tutti_put_tables* tables, const tutti_put_request* request,
                                   uint64_t* words);
