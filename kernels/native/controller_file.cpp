// Turns commands into requests: fetches, joins and splits them.
#include "controller_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "descriptors.h"
#include "no_throw.h"

namespace gio {

namespace {

constexpr u32 kExtentsMax = 1024;  // of one request: the kernel's UIO_MAXIOV
constexpr u32 kPartsMax = 256;     // of one request
constexpr u32 kPiecesMax = 128;    // of memory, in one request of more than a block
constexpr u32 kBounces = 8;
constexpr u32 kRequestsMax = 4096;
constexpr u32 kCommandsPerRequest = 4;
constexpr u32 kSglDescriptorsMax = 1024;
static_assert(kSglDescriptorsMax <= kExtentsMax, "a request holds at least one block");
constexpr u32 kDepthMax = 4096;
constexpr u32 kThreadsMax = 64;
constexpr u64 kResetAtEndNs = 2'000'000'000;

}  // namespace

FileController::~FileController() {
  if (executor_ != nullptr && reset(kResetAtEndNs) != 0) {
    // The kernel or a thread still uses requests: their memory is never freed.
    struct Kept {
      std::unique_ptr<Executor> executor;
      std::unique_ptr<Request[]> requests;
      std::unique_ptr<iovec[]> extents;
      std::unique_ptr<BouncePool> bounces;
    };
    new Kept{std::move(executor_), std::move(requests_), std::move(extent_memory_),
             std::move(bounces_)};
    return;
  }
  executor_.reset();
  for (const FileNamespace& file : files_) {
    Descriptors::instance().close(file.fd);
    if (file.buffered_fd >= 0) Descriptors::instance().close(file.buffered_fd);
  }
}

int FileController::open(const FileConfig& config) {
  const u64 lba_nbytes = 1ULL << (config.lba_shift & 63);
  const bool is_valid = config.n_namespaces != 0 && config.lba_shift >= 9 &&
                        config.lba_shift <= 16 && config.mdts_nbytes >= lba_nbytes &&
                        config.request_nbytes_max >= lba_nbytes && config.requests != 0 &&
                        config.requests <= kRequestsMax && config.threads != 0 &&
                        config.threads <= kThreadsMax;
  if (!is_valid) return -EINVAL;
  info.lba_shift = config.lba_shift;
  info.namespaces = config.n_namespaces;
  info.mdts_nbytes = config.mdts_nbytes;
  info.sgl_descriptors = kSglDescriptorsMax;
  info.flags = kHasFua | kHasDeallocate | kHasVolatileCache | kHasPrp;
  info.depth_max = kDepthMax;
  request_nbytes_max_ = config.request_nbytes_max & ~static_cast<u32>(lba_nbytes - 1);
  int status = open_files(config);
  if (status == 0) status = open_executor(config);
  if (status == 0) allocate(config);
  return status;
}

int FileController::open_files(const FileConfig& config) {
  const FileNamespace* given = at<FileNamespace>(config.namespaces);
  files_.reserve(config.n_namespaces);
  for (u32 i = 0; i < config.n_namespaces; ++i) {
    FileNamespace file = given[i];
    const bool is_direct = (file.flags & kFileDirect) != 0;
    // Direct I/O must be able to read a single block of the medium.
    if (is_direct && (file.memory_alignment == 0 || file.offset_alignment == 0 ||
                      (1u << config.lba_shift) % file.offset_alignment != 0)) {
      return -EINVAL;
    }
    // A generic device takes commands in its own blocks, of offset_alignment bytes.
    if (file.generic_nsid != 0 && !is_direct) return -EINVAL;
    if (file.nlb == 0 || file.nlb > (~0ULL >> 1) >> config.lba_shift) return -EINVAL;
    file.fd = fcntl(file.fd, F_DUPFD_CLOEXEC, 0);
    if (file.fd < 0) return -errno;
    if (file.buffered_fd >= 0) file.buffered_fd = fcntl(file.buffered_fd, F_DUPFD_CLOEXEC, 0);
    files_.push_back(file);
    Descriptors::instance().add(file.fd);
    if (file.buffered_fd >= 0) Descriptors::instance().add(file.buffered_fd);
    namespace_nlb_.push_back(file.nlb);
  }
  return 0;
}

int FileController::open_executor(const FileConfig& config) {
  ExecutorConfig parts;
  size_t generic = 0;
  for (const FileNamespace& file : files_) {
    parts.fds.push_back(file.fd);
    // The ring's table must have no gaps; set_buffered() prevents any use of this entry.
    parts.buffered_fds.push_back(file.buffered_fd >= 0 ? file.buffered_fd : file.fd);
    parts.generic.push_back({file.generic_nsid, file.offset_alignment});
    generic += file.generic_nsid != 0 ? 1 : 0;
  }
  parts.entries = config.requests;
  parts.threads = config.threads;
  const bool is_passthrough =
      config.executor == kExecutorPassthrough || (config.executor == kExecutorAuto && generic != 0);
  if ((generic != 0) != is_passthrough || (is_passthrough && generic != files_.size())) {
    return -EINVAL;
  }
  if (is_passthrough) {
    executor_ = make_passthrough_executor(parts, &uring_error_);
    if (executor_ == nullptr) return uring_error_;
  } else if (config.executor != kExecutorThreads) {
    executor_ = make_uring_executor(parts, &uring_error_);
    if (executor_ == nullptr && config.executor == kExecutorUring) return uring_error_;
  }
  if (executor_ == nullptr) executor_ = make_threads_executor(parts);
  if (config.record_fd >= 0) {
    executor_ = make_recorder(std::move(executor_), config.requests, config.record_fd);
  }
  return 0;
}

void FileController::allocate(const FileConfig& config) {
  requests_ = std::make_unique<Request[]>(config.requests);
  // Not initialised, so that unused parts take no memory.
  extent_memory_.reset(new iovec[size_t{config.requests} * kExtentsMax]);
  part_memory_.reset(new Part[size_t{config.requests} * kPartsMax]);
  for (u32 i = config.requests; i-- > 0;) {
    Request& request = requests_[i];
    request.slot = i;
    request.extents = &extent_memory_[size_t{i} * kExtentsMax];
    request.parts = &part_memory_[size_t{i} * kPartsMax];
    free_requests_.push_back(&request);
  }
  const u32 commands = config.requests * kCommandsPerRequest;
  commands_.resize(commands);
  for (u32 i = commands; i-- > 0;) free_commands_.push_back(i);
  // The serving thread must not allocate.
  kept_.reserve(commands);
  posting_.reserve(commands);
  done_.reserve(config.requests);
  waiting_.reserve(config.requests);
  extents_.reserve(std::max<u64>(kSglDescriptorsMax, config.mdts_nbytes / kPageNbytes + 2));
  open_.assign(files_.size(), nullptr);
  bounces_ = std::make_unique<BouncePool>(kBounces, request_nbytes_max_);
}

u32 FileController::service(u64 timeout_ns) {
  take_changes();
  posted_ = 0;
  post_kept();
  if (under_way_ == 0) is_resetting_ = false;  // the last command outlived the reset's deadline
  if (!is_resetting_) fetch();
  reap(posted_ == 0 && kept_.empty() ? sleep_limit(timeout_ns) : 0);
  return posted_;
}

void FileController::wake() { executor_->wake(); }

// Fetches submitted commands, as long as requests are free.
void FileController::fetch() {
  {
    std::lock_guard<std::mutex> lock(next_buffered_mutex_);
    buffered_ = next_buffered_;
  }
  request_nbytes_ = request_nbytes_max_;
  if (!has_large_pages_.load(std::memory_order_relaxed)) {
    request_nbytes_ = std::min<u64>(request_nbytes_, kPiecesMax * kPageNbytes);
  }
  std::optional<MemoryMap::Reader> reader;
  bool has_room = !cutting_.is_active || cut();
  Sqe sqe;
  for (size_t i = 0; i < queues_.size() && has_room; ++i) {
    const u32 index = static_cast<u32>((first_queue_ + i) % queues_.size());
    ControllerQueue* queue = &queues_[index];
    for (u32 n = 0; n < queue->depth && has_room; ++n) {
      has_room = !free_requests_.empty() && !free_commands_.empty();
      if (!has_room || !sq_fetch(queue, &sqe)) break;
      if (!reader) reader.emplace(memory);
      begin(index, sqe, &*reader);
      has_room = !cutting_.is_active;
    }
  }
  if (!queues_.empty()) first_queue_ = (first_queue_ + 1) % queues_.size();
  for (u32 file = 0; file < open_.size(); ++file) close_open(file);
}

void FileController::begin(u32 queue, const Sqe& sqe, MemoryMap::Reader* memory) {
  const u32 command = free_commands_.back();
  free_commands_.pop_back();
  commands_[command] = {queue, sqe_cid(sqe), 1, kOk};
  count(kCommands, 1);
  u32 status = validate(sqe);
  const u32 opcode = sqe_opcode(sqe);
  if (status == kOk && (opcode == kRead || opcode == kWrite)) {
    status = begin_transfer(sqe, command, memory);
    if (status == kOk) {  // ends with its last part
      cut();
      return;
    }
  } else if (status == kOk && opcode == kFlush) {
    begin_flush(sqe, command);
  } else if (status == kOk) {
    status = begin_deallocate(sqe, command, memory);
  }
  end_part(command, status);
}

u32 FileController::begin_transfer(const Sqe& sqe, u32 command, MemoryMap::Reader* memory) {
  const u64 nbytes = static_cast<u64>(sqe_nlb(sqe)) << info.lba_shift;
  const u32 status = decode_data_pointer(sqe, nbytes, info.sgl_descriptors, memory, &extents_);
  if (status != kOk) return status;
  cutting_ = {};
  cutting_.is_active = true;
  cutting_.kind = sqe_opcode(sqe) == kRead ? OpKind::kRead : OpKind::kWrite;
  cutting_.fua = cutting_.kind == OpKind::kWrite && (sqe.cdw12 & kFua) != 0;
  cutting_.command = command;
  cutting_.file = sqe.nsid - 1;
  cutting_.offset = sqe_slba(sqe) << info.lba_shift;
  cutting_.left = nbytes;
  return kOk;
}

void FileController::begin_flush(const Sqe& sqe, u32 command) {
  Request* request = take_request(OpKind::kFlush, sqe.nsid - 1, 0);
  add_part(request, command);
  launch(request, false);
}

u32 FileController::begin_deallocate(const Sqe& sqe, u32 command, MemoryMap::Reader* memory) {
  const u32 n = (sqe.cdw10 & 0xffu) + 1;
  const u32 status =
      decode_data_pointer(sqe, n * sizeof(DsmRange), kDsmRangesMax, memory, &extents_);
  if (status != kOk) return status;
  DsmRange ranges[kDsmRangesMax];
  char* to = reinterpret_cast<char*>(ranges);
  for (const Extent& extent : extents_) {
    std::memcpy(to, at<char>(extent.address), extent.nbytes);
    to += extent.nbytes;
  }
  if ((sqe.cdw11 & kDsmDeallocate) == 0) return kOk;  // only advice about access patterns
  const u64 size_nlb = namespace_nlb(sqe.nsid);
  Request* request = take_request(OpKind::kDeallocate, sqe.nsid - 1, 0);
  request->ranges.clear();
  if (without_exceptions([=] { return request->ranges.reserve(n), 0; }) != 0) {
    free_requests_.push_back(request);
    return kInternalError;
  }
  for (u32 i = n; i-- > 0;) {
    const DsmRange& range = ranges[i];
    if (range.nlb > size_nlb || range.slba > size_nlb - range.nlb) {
      free_requests_.push_back(request);
      return kLbaOutOfRange;
    }
    if (range.nlb != 0) {
      request->ranges.push_back(
          {range.slba << info.lba_shift, static_cast<u64>(range.nlb) << info.lba_shift});
    }
  }
  if (request->ranges.empty()) {
    free_requests_.push_back(request);
    return kOk;
  }
  add_part(request, command);
  launch(request, false);
  return kOk;
}

// Distributes the transfer in cutting_ to requests; false if no request is free.
bool FileController::cut() {
  Cutting& c = cutting_;
  Request*& open = open_[c.file];
  while (c.left != 0) {  // bounded: every turn opens a request or takes at least one block
    c.span = buffered_->at(c.file, c.offset);
    if (open != nullptr) {
      const bool joins = open->kind == c.kind && open->fua == c.fua &&
                         open->is_buffered == c.span.is_buffered && open->n_parts < kPartsMax &&
                         open->start + open->total_nbytes == c.offset && fit(*open) == c.left;
      if (!joins) close_open(c.file);
    }
    if (open == nullptr) {
      if (free_requests_.empty()) return false;
      open = take_request(c.kind, c.file, c.offset);
      open->fua = c.fua;
      open->is_buffered = c.span.is_buffered;
    } else {
      count(kJoined, 1);
    }
    append(open, fit(*open));
  }
  c.is_active = false;
  end_part(c.command, kOk);
  return true;
}

// Bytes of the transfer in cutting_ that fit into the request, in whole blocks.
u64 FileController::fit(const Request& request) const {
  const u64 room_nbytes = request_nbytes_ - request.total_nbytes;
  const u64 span_nbytes = cutting_.span.end - cutting_.offset;
  const u64 wanted = std::min({room_nbytes, cutting_.left, span_nbytes});
  u64 nbytes = 0;
  u64 skip = cutting_.extent_done;
  const size_t end = std::min(extents_.size(), cutting_.extent + kExtentsMax - request.n_extents);
  const size_t pieces_end = cutting_.extent + kPiecesMax - std::min(kPiecesMax, request.n_extents);
  const u64 lba_nbytes = 1ULL << info.lba_shift;
  for (size_t i = cutting_.extent; i < end && nbytes < wanted; ++i) {
    if (i >= pieces_end && (nbytes >= lba_nbytes || request.n_extents != 0)) break;
    nbytes += extents_[i].nbytes - skip;
    skip = 0;
  }
  return std::min(nbytes, wanted) & ~(lba_nbytes - 1);
}

void FileController::append(Request* request, u64 nbytes) {
  Cutting& c = cutting_;
  Part& part = request->parts[request->n_parts++];
  part = {c.command, request->n_extents, 0, static_cast<u32>(nbytes)};
  ++commands_[c.command].parts;
  request->total_nbytes += nbytes;
  c.offset += nbytes;
  c.left -= nbytes;
  while (nbytes != 0) {  // bounded: every turn takes an extent, or the rest
    const Extent& extent = extents_[c.extent];
    const u64 piece = std::min(nbytes, extent.nbytes - c.extent_done);
    request->extents[request->n_extents++] = {at<void>(extent.address + c.extent_done), piece};
    nbytes -= piece;
    c.extent_done += piece;
    if (c.extent_done == extent.nbytes) {
      ++c.extent;
      c.extent_done = 0;
    }
  }
  part.iov_end = request->n_extents;
}

FileController::Request* FileController::take_request(OpKind kind, u32 file, u64 offset) {
  Request* request = free_requests_.back();
  free_requests_.pop_back();
  request->kind = kind;
  request->file = file;
  request->fua = false;
  request->is_buffered = false;
  request->start = offset;
  request->total_nbytes = 0;
  request->n_extents = 0;
  request->n_parts = 0;
  request->tries = 0;
  request->is_single = false;
  request->bounce = nullptr;
  request->moved_iov = nullptr;
  return request;
}

// Adds a command without extents.
void FileController::add_part(Request* request, u32 command) {
  count(kRequests, 1);
  request->parts[request->n_parts++] = {command, 0, 0, 0};
  ++commands_[command].parts;
}

void FileController::close_open(u32 file) {
  Request* request = open_[file];
  open_[file] = nullptr;
  if (request == nullptr) return;
  count(kRequests, 1);
  if (request->is_buffered) count(kBuffered, 1);
  launch(request, needs_bounce(*request));
}

int FileController::set_buffered(const BufferedRange* ranges, size_t n) {
  auto next = std::make_shared<BufferedRanges>();
  const int status = next->assign(ranges, n, namespace_nlb_, info.lba_shift);
  if (status != 0) return status;
  for (size_t i = 0; i < n; ++i) {
    if (files_[ranges[i].nsid - 1].buffered_fd < 0) return -ENOTSUP;
  }
  std::lock_guard<std::mutex> lock(next_buffered_mutex_);
  next_buffered_ = std::move(next);
  return 0;
}

void FileController::count(Counter counter, u64 n) {
  // One writer: no read-modify-write needed.
  const u64 before = counters_[counter].load(std::memory_order_relaxed);
  counters_[counter].store(before + n, std::memory_order_relaxed);
}

FileStats FileController::stats() const {
  u64 n[kCounters];
  for (u32 i = 0; i < kCounters; ++i) n[i] = counters_[i].load(std::memory_order_relaxed);
  return {n[kCommands], n[kRequests], n[kRead_],    n[kWritten],
          n[kJoined],   n[kBounced],  n[kRepeated], n[kBuffered]};
}

}  // namespace gio
