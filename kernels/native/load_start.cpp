#include "load_start.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace {

// Whether one job can move all objects of a load: they are alike, and nothing is left to be read.
bool is_one_job(const uint8_t* marks, uint64_t n, bool verify) {
  const uint8_t first = n == 0 ? 0 : marks[0];
  const bool compare = verify && (first & kTuttiHasDigests) != 0;
  if (n == 0 || (first & kTuttiUnproven) != 0 || ((first & kTuttiKnown) != 0) != compare) {
    return false;
  }
  return std::all_of(marks, marks + n, [first](uint8_t mark) { return mark == first; });
}

gio::JobConfig config_of(const tutti_start& start, uint64_t n) {
  gio::JobConfig config = {};
  config.iocb = *start.memory;
  config.iocb.pages = reinterpret_cast<uint64_t>(start.pages);
  config.iocb.n_pages = static_cast<uint32_t>(n);
  config.iocb.padding = start.padding;
  config.iocb.slice_nlb = start.slice_nlb;
  config.iocb.layer_stride_nlb = start.layer_stride_nlb;
  config.iocb.lba_shift = start.lba_shift;
  config.iocb.psdt = start.psdt;
  config.tag = start.tag;
  config.timeout_ns = start.timeout_ns;
  config.held = start.held;
  return config;
}

int64_t cut_runs(const tutti_start& start, const int64_t* slots, uint64_t n, gio::Run* out) {
  const uint32_t slices = (start.descriptors_max - 1) / (start.memory->n_segments + 1);
  const gio::Cut cut = {start.slice_nlb, 1U << start.lba_shift, start.command_nlb_max,
                        std::max(1U, slices)};
  const uint64_t room = n * start.slot_runs_max;
  const int64_t found = gio_slot_runs(slots, n, start.places, &cut, out, room);
  return found > static_cast<int64_t>(room) ? -EINVAL : found;
}

int64_t submit(const tutti_start* start, uint64_t n, uint64_t layers, bool compare, uint64_t* plan) {
  const uint64_t marks_words = n / 8 + 1;
  uint64_t* digests = plan + 2 * n;
  uint64_t* status = digests + n * layers + marks_words;
  auto* runs = reinterpret_cast<gio::Run*>(status + n / 2 + 1);
  gio::JobConfig config = config_of(*start, n);
  const int64_t n_runs = cut_runs(*start, reinterpret_cast<int64_t*>(plan), n, runs);
  if (n_runs < 0) return n_runs;
  std::memset(status, 0, (n / 2 + 1) * sizeof *status);
  config.iocb.opcode = gio::kRead;
  config.iocb.runs = reinterpret_cast<uint64_t>(runs);
  config.iocb.n_runs = static_cast<uint32_t>(n_runs);
  config.page_status = reinterpret_cast<uint64_t>(status);
  config.priority = gio::kLoads;
  if (compare) {
    config.digests = reinterpret_cast<uint64_t>(digests);
    config.digest = gio::kDigestCompare;
  }
  return gio_engine_submit(start->engine, &config, start->job);
}

}  // namespace

int64_t tutti_load_start(const tutti_load_tables* tables, const uint8_t* keys, uint64_t n,
                         uint32_t uses, uint32_t verify, uint64_t* plan, const tutti_start* start) {
  const int64_t runs = tutti_load_plan(tables, keys, n, uses, verify, plan);
  if (runs < 0 || start->memory == nullptr) return runs;
  const uint64_t layers = tables->digests->layers;
  const auto* marks = reinterpret_cast<const uint8_t*>(plan + (2 + layers) * n);
  if (!is_one_job(marks, n, verify != 0)) return runs;
  const bool compare = verify != 0 && (marks[0] & kTuttiHasDigests) != 0;
  const int64_t result = submit(start, n, layers, compare, plan);
  if (result >= 0) return runs;
  tutti_index_unpin(tables->index, reinterpret_cast<const int64_t*>(plan), n);
  return kTuttiStartFailed + result;
}
