#include "slot_jobs.h"

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

gio::JobConfig config_of(const tutti_slot_job& job, uint64_t n) {
  gio::JobConfig config = {};
  config.iocb = *job.memory;
  config.iocb.pages = reinterpret_cast<uint64_t>(job.pages);
  config.iocb.n_pages = static_cast<uint32_t>(n);
  config.iocb.padding = job.opcode == gio::kRead ? job.scratch : job.zeros;
  config.iocb.opcode = job.opcode;
  config.iocb.flags = job.flags;
  config.iocb.slice_nlb = job.slice_nlb;
  config.iocb.layer_stride_nlb = job.layer_stride_nlb;
  config.iocb.lba_shift = job.lba_shift;
  config.iocb.psdt = job.psdt;
  config.digests = reinterpret_cast<uint64_t>(job.digests);
  config.digest = job.digest;
  config.tag = job.tag;
  config.timeout_ns = job.timeout_ns;
  config.priority = job.priority;
  config.held = job.held;
  return config;
}

int64_t cut_runs(const tutti_slot_job& job, const int64_t* slots, uint64_t n, gio::Run* out) {
  const uint32_t slices = (job.descriptors_max - 1) / (job.memory->n_segments + 1);
  const gio::Cut cut = {job.slice_nlb, 1U << job.lba_shift, job.command_nlb_max,
                        std::max(1U, slices)};
  const uint64_t room = n * job.slot_runs_max;
  const int64_t found = gio_slot_runs(slots, n, job.places, &cut, out, room);
  return found > static_cast<int64_t>(room) ? -EINVAL : found;
}

}  // namespace

int tutti_slot_job_start(const tutti_slot_job* job, const int64_t* slots, uint64_t n,
                         uint64_t* words) {
  auto* runs = reinterpret_cast<gio::Run*>(words + n / 2 + 1);
  const int64_t n_runs = cut_runs(*job, slots, n, runs);
  if (n_runs < 0) return static_cast<int>(n_runs);
  std::memset(words, 0, (n / 2 + 1) * sizeof *words);
  gio::JobConfig config = config_of(*job, n);
  config.iocb.runs = reinterpret_cast<uint64_t>(runs);
  config.iocb.n_runs = static_cast<uint32_t>(n_runs);
  config.page_status = reinterpret_cast<uint64_t>(words);
  return gio_engine_submit(job->engine, &config, job->job);
}

int64_t tutti_load_start(const tutti_load_tables* tables, const uint8_t* keys, uint64_t n,
                         uint32_t uses, uint32_t verify, uint64_t* plan,
                         const tutti_slot_job* job) {
  const int64_t runs = tutti_load_plan(tables, keys, n, uses, verify, plan);
  if (runs < 0 || job->memory == nullptr) return runs;
  uint64_t* digests = plan + 2 * n;
  uint64_t* marks_words = digests + n * tables->digests->layers;
  const auto* marks = reinterpret_cast<const uint8_t*>(marks_words);
  if (!is_one_job(marks, n, verify != 0)) return runs;
  tutti_slot_job own = *job;
  const bool compare = verify != 0 && (marks[0] & kTuttiHasDigests) != 0;
  own.opcode = gio::kRead;
  own.priority = gio::kLoads;
  own.digests = compare ? digests : nullptr;
  own.digest = compare ? gio::kDigestCompare : gio::kDigestNone;
  const auto* slots = reinterpret_cast<const int64_t*>(plan);
  const int result = tutti_slot_job_start(&own, slots, n, marks_words + n / 8 + 1);
  if (result >= 0) return runs;
  tutti_index_unpin(tables->index, slots, n);
  return kTuttiNotStarted + result;
}
