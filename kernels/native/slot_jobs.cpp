#include "slot_jobs.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace {

// Whether one job can move all objects of a load: they have equal marks, and no digests are
// missing.
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
  config.ahead = job.ahead;
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

// Fills the job's configuration, with its status and runs in the words; errors as cut_runs.
int prepare(const tutti_slot_job& job, const int64_t* slots, uint64_t n, uint64_t* status,
            uint64_t* runs, gio::JobConfig* out) {
  const int64_t n_runs = cut_runs(job, slots, n, reinterpret_cast<gio::Run*>(runs));
  if (n_runs < 0) return static_cast<int>(n_runs);
  std::memset(status, 0, (n / 2 + 1) * sizeof *status);
  *out = config_of(job, n);
  out->iocb.runs = reinterpret_cast<uint64_t>(runs);
  out->iocb.n_runs = static_cast<uint32_t>(n_runs);
  out->page_status = reinterpret_cast<uint64_t>(status);
  return 0;
}

// Fills the records of a put once its digests are known.
struct Records {
  uint8_t* staging;
  uint64_t n;
  tutti_record_identity identity;
  const uint64_t* columns;
  const uint8_t* keys;
  const uint8_t* parents;
  const uint64_t* digests;
};
static_assert(sizeof(Records) <= 16 * sizeof(uint64_t), "of the words of a put");

void fill_records(uint64_t context) {
  const auto& r = *gio::at<Records>(context);
  tutti_records_fill(r.staging, r.n, &r.identity, kTuttiRecordReady, r.columns, r.keys, r.parents,
                     r.digests);
}

bool has_digests(const tutti_put& put) { return put.data.digest != gio::kDigestNone; }

// The layout of the words of a put of n keys.
struct PutWords {
  PutWords(const tutti_put& put, uint64_t* words, uint64_t n)
      : slots(reinterpret_cast<int64_t*>(words)),
        digests(words + 2 * n),
        status(digests + n * put.layers),
        is_chained(status + 2 * (n / 2 + 1)),
        columns(is_chained + 1),
        runs(columns + std::max<uint64_t>(kTuttiColumns * n, 5 * n + 3)),
        record_runs(runs + 3 * n * put.data.slot_runs_max),
        pages(reinterpret_cast<uint32_t*>(record_runs + 3 * n * put.records.slot_runs_max)),
        records(reinterpret_cast<uint64_t*>(pages) + n / 2 + 1) {}

  int64_t* slots;
  uint64_t* digests;
  uint64_t* status;
  uint64_t* is_chained;
  uint64_t* columns;  // first used as scratch
  uint64_t* runs;
  uint64_t* record_runs;
  uint32_t* pages;
  uint64_t* records;
};

// Columns of the packed keys of a put; see tutti_put_pack.
struct Packed {
  Packed(const uint8_t* packed, uint64_t n)
      : parents(packed),
        keys(packed + kTuttiKeyBytes * n),
        depths(reinterpret_cast<const uint32_t*>(packed + 2 * kTuttiKeyBytes * n)),
        pages(depths + n) {}

  const uint8_t* parents;
  const uint8_t* keys;
  const uint32_t* depths;
  const uint32_t* pages;
};

// Fills the numeric fields of the records, and the configuration of their job.
int prepare_records(const tutti_put& put, const tutti_put_batch& batch, const Packed& packed,
                    const PutWords& at, gio::JobConfig* out) {
  const uint64_t n = batch.n;
  const uint64_t member = static_cast<uint64_t>(at.slots[0]) / put.member_slots;
  for (uint64_t i = 0; i < n; ++i) {
    const auto set = [&](TuttiColumn column, uint64_t value) {
      at.columns[column * n + i] = value;
    };
    set(kTuttiSlot, static_cast<uint64_t>(at.slots[i]) - member * put.member_slots);
    set(kTuttiSequence, batch.sequence + i);
    set(kTuttiTenant, 0);
    set(kTuttiDepth, packed.depths[i]);
    set(kTuttiAccess, batch.access_64s);
    set(kTuttiFlags, has_digests(put) ? 1 : 0);
    set(kTuttiExpiry, 0);
    at.pages[i] = static_cast<uint32_t>(batch.first_page + i);
  }
  Records records = {put.staging + batch.first_page * kTuttiRecordBytes,
                     n,
                     *put.identity,
                     at.columns,
                     packed.keys,
                     packed.parents,
                     has_digests(put) ? at.digests : nullptr};
  records.identity.member = static_cast<uint32_t>(member);
  std::memcpy(at.records, &records, sizeof records);
  tutti_slot_job job = put.records;
  job.pages = at.pages;
  return prepare(job, at.slots, n, at.status + n / 2 + 1, at.record_runs, out);
}

}  // namespace

int tutti_slot_job_start(const tutti_slot_job* job, const int64_t* slots, uint64_t n,
                         uint64_t* words) {
  gio::JobConfig config;
  const int result = prepare(*job, slots, n, words, words + n / 2 + 1, &config);
  return result < 0 ? result : gio_engine_submit(job->engine, &config, job->job);
}

int tutti_put_pack(const uint8_t* keys, uint64_t n, const uint8_t* parent, uint32_t depth,
                   const uint8_t* pages, uint32_t page_bytes, uint64_t most, uint8_t* out) {
  if (n == 0) return 0;
  std::memset(out, 0, kTuttiKeyBytes);
  if (parent != nullptr) std::memcpy(out, parent, kTuttiKeyBytes);
  std::memcpy(out + kTuttiKeyBytes, keys, (n - 1) * kTuttiKeyBytes);
  std::memcpy(out + kTuttiKeyBytes * n, keys, n * kTuttiKeyBytes);
  auto* depths = reinterpret_cast<uint32_t*>(out + 2 * kTuttiKeyBytes * n);
  for (uint64_t i = 0; i < n; ++i) depths[i] = depth + static_cast<uint32_t>(i);
  return gio_copy_pages(pages, page_bytes, n, most, depths + n) < 0 ? -ERANGE : 0;
}

int tutti_put_start(const tutti_put* put, const tutti_put_batch* batch, const uint8_t* packed,
                    uint64_t* words) {
  const uint64_t n = batch->n;
  const Packed of(packed, n);
  const PutWords at(*put, words, n);
  const tutti_put_tables& tables = put->tables;
  const auto uses = static_cast<uint32_t>(batch->uses);
  auto* rows = reinterpret_cast<int64_t*>(at.columns);
  if (n == 0 || tables.allocator->free_slots < n) return 0;
  if (tutti_index_absent(tables.index, of.keys, n, uses, rows) < static_cast<int64_t>(n)) return 0;
  const tutti_placement placement = {of.keys,         of.parents, of.depths,        n,
                                     batch->sequence, uses,       has_digests(*put)};
  if (tutti_put_place(&tables, &placement, at.columns) < 0) return -EINVAL;
  std::memcpy(at.slots, at.columns, 2 * n * sizeof *words);  // slots and sequence numbers
  const auto late = static_cast<int>(at.columns[5 * n + 2]);
  const auto of_first = [&](int64_t slot) {
    return static_cast<uint64_t>(slot) / put->member_slots ==
           static_cast<uint64_t>(at.slots[0]) / put->member_slots;
  };
  *at.is_chained = put->records.memory != nullptr && std::all_of(at.slots, at.slots + n, of_first);
  tutti_slot_job data = put->data;
  data.memory = batch->memory;
  data.descriptors_max = static_cast<uint32_t>(batch->descriptors_max);
  data.pages = of.pages;
  data.digests = has_digests(*put) ? at.digests : nullptr;
  data.job = batch->job;
  data.tag = batch->tag;
  data.held = static_cast<uint32_t>(batch->held);
  gio::JobConfig config;
  gio::JobConfig then;
  int result = prepare(data, at.slots, n, at.status, at.runs, &config);
  if (result == 0 && *at.is_chained != 0) {
    result = prepare_records(*put, *batch, of, at, &then);
    config.then = reinterpret_cast<uint64_t>(&then);
    config.before_then = reinterpret_cast<uint64_t>(&fill_records);
    config.context = reinterpret_cast<uint64_t>(at.records);
  }
  if (result == 0) result = gio_engine_submit(data.engine, &config, data.job);
  return result == 0 ? 1 + late : result;
}

int tutti_put_end(const tutti_put* put, uint64_t n, const uint64_t* words) {
  const PutWords at(*put, const_cast<uint64_t*>(words), n);
  const auto is_zero = [](uint64_t word) { return word == 0; };
  if (*at.is_chained == 0 || !std::all_of(at.status, at.is_chained, is_zero)) return 1;
  const uint32_t from = 1U << kTuttiSlotWriting;
  if (tutti_index_move(put->tables.index, at.slots, n, from, kTuttiSlotReady, 0) < 0) return 1;
  const uint64_t* sequences = words + n;
  if (has_digests(*put)) tutti_digests_put(put->cache, at.slots, sequences, n, at.digests);
  return 0;
}

int64_t tutti_load_start(const tutti_load_tables* tables, const tutti_slot_job* common,
                         const uint8_t* keys, const uint8_t* pages, const tutti_load* load,
                         uint64_t* plan) {
  const uint64_t n = load->n;
  const auto uses = static_cast<uint32_t>(load->uses);
  const auto verify = static_cast<uint32_t>(load->verify);
  if (common == nullptr) return tutti_load_plan(tables, keys, n, uses, verify, plan);
  uint64_t* digests = plan + 2 * n;
  uint64_t* marks_words = digests + n * tables->digests->layers;
  uint64_t* words = marks_words + n / 8 + 1;
  auto* numbers = reinterpret_cast<uint32_t*>(words + n + 1 + 3 * n * common->slot_runs_max);
  const int64_t ascends = gio_copy_pages(pages, static_cast<uint32_t>(load->page_bytes), n,
                                         load->memory->n_pages, numbers);
  if (ascends < 0 || (ascends == 0 && load->once != 0)) return kTuttiBadPages;
  const int64_t runs = tutti_load_plan(tables, keys, n, uses, verify, plan);
  const auto* marks = reinterpret_cast<const uint8_t*>(marks_words);
  if (runs < 0 || !is_one_job(marks, n, verify != 0)) return runs;
  tutti_slot_job own = *common;
  const bool compare = verify != 0 && (marks[0] & kTuttiHasDigests) != 0;
  own.memory = load->memory;
  own.pages = numbers;
  own.tag = load->tag;
  own.job = load->job;
  own.opcode = gio::kRead;
  own.priority = gio::kLoads;
  own.digests = compare ? digests : nullptr;
  own.digest = compare ? gio::kDigestCompare : gio::kDigestNone;
  own.held = static_cast<uint32_t>(load->held);
  own.ahead = static_cast<uint32_t>(load->ahead);
  const auto* slots = reinterpret_cast<const int64_t*>(plan);
  const int result = tutti_slot_job_start(&own, slots, n, words);
  if (result >= 0) return runs;
  tutti_index_unpin(tables->index, slots, n);
  return kTuttiNotStarted + result;
}
