// The processing of requests: bounce buffers, short transfers, errors, completions, reset; and the
// C interface of the file controller.
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "controller_file.h"
#include "no_throw.h"

namespace gio {

namespace {

constexpr u32 kTriesMax = 64;     // of one window without progress
constexpr u32 kNvmeTriesMax = 6;  // of an NVMe command, as many as the kernel's driver makes
constexpr u64 kResetTickNs = 10'000'000;

constexpr u32 kMediaErrors = 2, kVendors = 7;
constexpr u32 type_of_nvme(u32 status) { return status >> 8 & 7; }

u32 status_of_nvme(OpKind kind, u32 status) {
  switch (type_of_nvme(status)) {
    case kMediaErrors:
      return kind == OpKind::kRead ? kUnrecoveredRead : kWriteFault;
    case kVendors:  // not to be taken for those that gio_uring itself reports
      return kInternalError;
    default:
      return status & kTypeAndCode;
  }
}

u32 status_of(OpKind kind, long long result) {
  const u32 nvme = nvme_status_of(result);
  if (nvme != 0) return status_of_nvme(kind, nvme);
  switch (-result) {
    case 0:  // nothing moved: the end of the file
    case EIO:
    // Errors of block devices for a bad block, a failed target and wrong protection information
    // (blk_errors in Linux' block/blk-core.c).
    case ENODATA:
    case EREMOTEIO:
    case EILSEQ:
      return kind == OpKind::kRead ? kUnrecoveredRead : kWriteFault;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return kCapacityExceeded;
    case ENXIO:  // what the block layer and the driver say of a device that has left
    case ENODEV:
      return kDeviceGone;
    case EROFS:
    case EPERM:  // what the block layer says of a device that is read-only
      return kNamespaceWriteProtected;
    case EFAULT:
      return kDataTransferError;
    case EINVAL:
      return kInvalidField;
    case ECANCELED:
      return kAbortedSqDeletion;
    default:
      return kInternalError;
  }
}

}  // namespace

bool FileController::needs_bounce(const Request& request) const {
  const FileNamespace& file = files_[request.file];
  if ((file.flags & kFileDirect) == 0 || request.is_buffered) return false;
  for (u32 i = 0; i < request.n_extents; ++i) {
    const iovec& extent = request.extents[i];
    if (reinterpret_cast<u64>(extent.iov_base) % file.memory_alignment != 0) return true;
    if (extent.iov_len % file.offset_alignment != 0) return true;
  }
  return false;
}

// Copies between the bounce buffer and the extents of the window.
void FileController::copy_window(const Request& request, bool to_bounce) {
  char* bounce = request.bounce;
  for (u32 i = 0; i < request.first_part; ++i) bounce += request.parts[i].nbytes;
  const u32 end = request.parts[request.first_part + request.window_parts - 1].iov_end;
  for (u32 i = request.parts[request.first_part].iov_first; i < end; ++i) {
    const iovec& extent = request.extents[i];
    if (to_bounce) {
      std::memcpy(bounce, extent.iov_base, extent.iov_len);
    } else {
      std::memcpy(extent.iov_base, bounce, extent.iov_len);
    }
    bounce += extent.iov_len;
  }
}

// Submits a whole request: at once, or, through a bounce buffer, when one is free.
void FileController::launch(Request* request, bool through_bounce) {
  if (through_bounce) {
    request->bounce = bounces_->take();
    if (request->bounce == nullptr) {
      if (bounces_->is_mapped()) {
        waiting_.push_back(request);
      } else {
        end_parts(request, 0, kInternalError);
      }
      return;
    }
    count(kBounced, 1);
  }
  open_window(request, 0, request->n_parts);
  if (through_bounce && request->kind == OpKind::kWrite) copy_window(*request, true);
  hand_over(request);
}

void FileController::hand_over(Request* request) {
  ++under_way_;
  executor_->submit(request);
}

// Sets the request's window to these parts, from their first byte on.
void FileController::open_window(Request* request, u32 first_part, u32 n_parts) {
  restore_extent(request);
  request->tries = 0;
  request->first_part = first_part;
  request->window_parts = n_parts;
  if (request->kind == OpKind::kDeallocate) {
    request->offset = request->ranges.back().address;
    request->nbytes = request->ranges.back().nbytes;
    request->n_iov = 0;
    return;
  }
  u64 before = 0;
  for (u32 i = 0; i < first_part; ++i) before += request->parts[i].nbytes;
  u64 nbytes = 0;
  for (u32 i = first_part; i < first_part + n_parts; ++i) nbytes += request->parts[i].nbytes;
  request->offset = request->start + before;
  request->nbytes = nbytes;
  if (request->bounce != nullptr) {
    request->bounce_iov = {request->bounce + before, nbytes};
    request->iov = &request->bounce_iov;
    request->n_iov = 1;
  } else {
    request->iov = request->extents + request->parts[first_part].iov_first;
    request->n_iov =
        request->parts[first_part + n_parts - 1].iov_end - request->parts[first_part].iov_first;
  }
}

// Restores an extent that advance() changed.
void FileController::restore_extent(Request* request) {
  if (request->moved_iov != nullptr) *request->moved_iov = request->moved_was;
  request->moved_iov = nullptr;
}

// Advances the request by the bytes of a short transfer.
void FileController::advance(Request* request, u64 nbytes) {
  request->offset += nbytes;
  request->nbytes -= nbytes;
  for (; nbytes >= request->iov->iov_len; ++request->iov, --request->n_iov) {
    nbytes -= request->iov->iov_len;
  }
  if (nbytes == 0) return;
  iovec* iov = request->iov;
  if (request->moved_iov != iov) {
    restore_extent(request);
    request->moved_iov = iov;
    request->moved_was = *iov;
  }
  iov->iov_base = static_cast<char*>(iov->iov_base) + nbytes;
  iov->iov_len -= nbytes;
}

void FileController::reap(u64 timeout_ns) {
  done_.clear();
  executor_->reap(&done_, timeout_ns);
  for (const Done& done : done_) {
    --under_way_;
    finish(done);
  }
  while (!waiting_.empty() && bounces_->has_free()) {  // bounded by the buffers
    Request* request = waiting_.front();
    waiting_.erase(waiting_.begin());
    launch(request, true);
  }
}

void FileController::finish(const Done& done) {
  Request* request = static_cast<Request*>(done.op);
  const bool moves = request->kind == OpKind::kRead || request->kind == OpKind::kWrite;
  if (moves && done.result > 0) {
    const u64 nbytes = static_cast<u64>(done.result);
    count(request->kind == OpKind::kRead ? kRead_ : kWritten, nbytes);
    if (nbytes >= request->nbytes) {
      end_window(request, kOk);
    } else if (is_resetting_) {
      end_window(request, kAbortedSqDeletion);
    } else {
      advance(request, nbytes);
      request->tries = 0;
      count(kRepeated, 1);
      hand_over(request);
    }
  } else if (!moves && done.result >= 0) {
    end_window(request, kOk);
  } else if (is_resetting_ || !try_again(request, done.result)) {
    const bool is_advice = request->kind == OpKind::kDeallocate && done.result == -EOPNOTSUPP;
    end_window(request, is_advice ? u32{kOk} : status_of(request->kind, done.result));
  }
}

// Handles an error; true if the request continues.
bool FileController::try_again(Request* request, long long result) {
  const bool is_passing = result == -EAGAIN || result == -EINTR || result == -ECANCELED;
  const u32 nvme = nvme_status_of(result);  // the kernel does not repeat commands of our own
  // For errors of the medium the drive itself has retried already.
  const bool may_pass =
      nvme != 0 && (nvme & kDoNotRetry) == 0 && type_of_nvme(nvme) != kMediaErrors;
  if ((is_passing || may_pass) && ++request->tries < (may_pass ? kNvmeTriesMax : kTriesMax)) {
    count(kRepeated, 1);
    hand_over(request);
    return true;
  }
  const bool is_direct = (files_[request->file].flags & kFileDirect) != 0 && !request->is_buffered;
  if (result == -EINVAL && is_direct && request->n_extents != 0 && request->bounce == nullptr &&
      !request->is_single) {  // stricter about memory than the file system said
    launch(request, true);
    return true;
  }
  if (request->n_parts > 1 && !request->is_single) {
    request->is_single = true;
    count(kRepeated, 1);
    open_window(request, 0, 1);
    hand_over(request);
    return true;
  }
  return false;
}

void FileController::end_window(Request* request, u32 status) {
  if (request->kind == OpKind::kDeallocate && status == kOk) {
    request->ranges.pop_back();
    if (!request->ranges.empty() && !is_resetting_) {
      open_window(request, 0, 1);
      hand_over(request);
      return;
    }
    if (!request->ranges.empty()) status = kAbortedSqDeletion;
  }
  restore_extent(request);
  if (status == kOk && request->bounce != nullptr && request->kind == OpKind::kRead) {
    copy_window(*request, false);
  }
  const u32 end = request->first_part + request->window_parts;
  for (u32 i = request->first_part; i < end; ++i) end_part(request->parts[i].command, status);
  if (end == request->n_parts) {
    recycle(request);
  } else if (is_resetting_) {
    end_parts(request, end, kAbortedSqDeletion);
  } else {
    open_window(request, end, 1);
    hand_over(request);
  }
}

void FileController::recycle(Request* request) {
  if (request->bounce != nullptr) bounces_->give_back(request->bounce);
  request->bounce = nullptr;
  free_requests_.push_back(request);
}

// Ends the parts from first_part on; they must not be in progress.
void FileController::end_parts(Request* request, u32 first_part, u32 status) {
  for (u32 i = first_part; i < request->n_parts; ++i) end_part(request->parts[i].command, status);
  recycle(request);
}

void FileController::end_part(u32 command, u32 status) {
  Command* ended = &commands_[command];
  if (ended->status == kOk) ended->status = status;  // the first error stays
  if (--ended->parts != 0) return;
  post(*ended);
  free_commands_.push_back(command);
}

void FileController::post(const Command& command) {
  if (Controller::post(command.queue, command.cid, command.status)) {
    ++posted_;
  } else {
    kept_.push_back(command);
  }
}

void FileController::post_kept() {
  if (kept_.empty()) return;
  posting_.swap(kept_);
  for (const Command& command : posting_) post(command);
  posting_.clear();
}

int FileController::reset(u64 timeout_ns) {
  take_changes();
  is_resetting_ = true;
  abort_queued();
  if (under_way_ != 0) executor_->cancel();
  const u64 start_ns = monotonic_ns();
  u64 waited_ns = 0;
  while (under_way_ != 0) {  // bounded by the deadline
    reap(std::min(kResetTickNs, timeout_ns - waited_ns));
    waited_ns = monotonic_ns() - start_ns;
    if (under_way_ != 0 && waited_ns >= timeout_ns) return -ETIMEDOUT;
  }
  post_kept();
  is_resetting_ = false;
  return 0;
}

// Ends everything that was not given to the executor.
void FileController::abort_queued() {
  if (cutting_.is_active) {
    cutting_.is_active = false;
    end_part(cutting_.command, kAbortedSqDeletion);
  }
  for (Request* request : waiting_) end_parts(request, 0, kAbortedSqDeletion);
  waiting_.clear();
  for (u32 i = 0; i < queues_.size(); ++i) {
    Sqe sqe;
    for (u32 n = 0; n < queues_[i].depth && sq_fetch(&queues_[i], &sqe); ++n) {
      post({i, sqe_cid(sqe), 0, kAbortedSqDeletion});
    }
  }
}

}  // namespace gio

namespace {

gio::FileController* file(gio::Controller* controller) {
  return static_cast<gio::FileController*>(controller);
}

}  // namespace

int gio_file_controller_create(const gio::FileConfig* config, gio::Controller** out) {
  return gio::without_exceptions([=] {
    auto controller = std::make_unique<gio::FileController>();
    const int status = controller->open(*config);
    if (status == 0) *out = controller.release();  // pairs with gio_controller_destroy
    return status;
  });
}

int gio_uring_refusal() { return gio::uring_refusal(); }

uint32_t gio_file_controller_executor(gio::Controller* controller, int* uring_error) {
  *uring_error = file(controller)->uring_error();
  return file(controller)->executor()->kind();
}

void gio_file_controller_stats(gio::Controller* controller, gio::FileStats* out) {
  *out = file(controller)->stats();
}

int gio_file_controller_set_buffered(gio::Controller* controller, const gio::BufferedRange* ranges,
                                     uint64_t n) {
  return gio::without_exceptions([=] { return file(controller)->set_buffered(ranges, n); });
}

void gio_file_controller_set_large_pages(gio::Controller* controller, int has) {
  file(controller)->set_large_pages(has != 0);
}

int gio_file_alignment(int fd, uint32_t* memory, uint32_t* offset) {
  struct statfs system = {};
  if (fstatfs(fd, &system) != 0) return -errno;
  struct statx facts = {};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN | STATX_BASIC_STATS, &facts) != 0) {
    return -errno;
  }
  const bool is_device = S_ISBLK(facts.stx_mode);
  // These file systems accept O_DIRECT but copy through the page cache.  A device's node may be
  // in one; its blocks are not.
  if (!is_device && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)) {
    return -EOPNOTSUPP;
  }
  if ((facts.stx_mask & STATX_DIOALIGN) != 0) {
    *memory = facts.stx_dio_mem_align;
    *offset = facts.stx_dio_offset_align;
    return *offset == 0 ? -EOPNOTSUPP : 0;
  }
  // Before Linux 6.1: every file system accepts a page for both, a device a block, open(2).
  int nbytes = static_cast<int>(gio::kPageNbytes);
  if (is_device && ioctl(fd, BLKSSZGET, &nbytes) != 0) return -errno;
  *memory = *offset = static_cast<uint32_t>(nbytes);
  return 0;
}
