// Executors do the I/O of the file controller: io_uring, threads, and a recorder around either.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <vector>

#include "gio_uring/atomics.h"

namespace gio {

enum class OpKind : u32 { kRead, kWrite, kFlush, kDeallocate };

// One request.  The executor owns it from submit() until reap() returns it.
struct Op {
  OpKind kind;
  u32 file;    // index into ExecutorConfig::fds, or buffered_fds
  u64 offset;  // bytes into the file
  u64 nbytes;  // of the extents, or of the range to deallocate
  iovec* iov;
  u32 n_iov;
  u32 slot;          // below ExecutorConfig::entries, unique among the requests under way
  bool fua;          // a write that is durable when it ends
  bool is_buffered;  // by the fd of buffered_fds
};

struct Done {
  Op* op;
  // Bytes moved, possibly fewer than requested; or a negative errno; or, below kErrnoMin, an NVMe
  // status.
  long long result;
};

// Encodes the status of a failed NVMe command, with its bits More and Do Not Retry, as a result.
constexpr long long kErrnoMin = -4095;
constexpr u32 kDoNotRetry = 1u << 14;
constexpr u32 kTypeAndCode = 0x7ff;
constexpr long long result_of_nvme(u32 status) {
  return kErrnoMin - 1 - static_cast<long long>(status);
}
// The NVMe status encoded in a result, or 0.
constexpr u32 nvme_status_of(long long result) {
  return result < kErrnoMin ? static_cast<u32>(kErrnoMin - 1 - result) : 0;
}

enum ExecutorKind : u32 {
  kExecutorAuto = 0,
  kExecutorUring = 1,
  kExecutorThreads = 2,
  kExecutorPassthrough = 3,
};

// A namespace behind an NVMe generic character device; all zeros for any other file.
struct GenericNamespace {
  u32 nsid;
  u32 lba_nbytes;
};

struct ExecutorConfig {
  std::vector<int> fds;  // stay the caller's and outlive the executor
  // The same files opened without O_DIRECT, for requests with is_buffered.
  std::vector<int> buffered_fds;
  std::vector<GenericNamespace> generic;  // by file
  u32 entries;                            // most requests under way
  u32 threads;
};

class Executor {
 public:
  virtual ~Executor() = default;

  // Takes a request; the caller submits at most `entries`.  Failures are reported by reap().
  virtual void submit(Op* op) = 0;

  // Starts submitted requests and appends ended ones to `done`; if there are none, sleeps up to
  // timeout_ns, or until wake().
  virtual void reap(std::vector<Done>* done, u64 timeout_ns) = 0;

  // Cancels all requests.  Each is still returned by reap(), with -ECANCELED if it did not take
  // place.
  virtual void cancel() = 0;

  // Ends a sleep of reap().  Callable by any thread, at any time.
  virtual void wake() = 0;

  virtual ExecutorKind kind() const = 0;
};

// The result of a request; -ENODEV instead of the kernel's errors if the device of `fd` is gone.
long long result_of(int fd, const Op& op, long long result);

// The reason why the kernel or a sandbox refuses io_uring: negative errno, or 0.
int uring_refusal();

// Null, with a negative errno in `error`, if io_uring is refused.
std::unique_ptr<Executor> make_uring_executor(const ExecutorConfig& config, int* error);

// Only for generic character devices.  Null, with a negative errno in `error`, if io_uring is
// refused or lacks passthrough commands.
std::unique_ptr<Executor> make_passthrough_executor(const ExecutorConfig& config, int* error);

std::unique_ptr<Executor> make_threads_executor(const ExecutorConfig& config);

// The recorder logs all changes of the medium to `record_fd`, for tests that rebuild the medium
// after a power cut.  An entry is written after a request has ended and before its end is reported:
// the log contains everything that was acknowledged, and nothing that was in flight.
struct RecordHeader {
  char magic[4];  // "GREC"
  u32 opcode;     // Opcode of nvme_spec.h: kWrite, kFlush or kDatasetManagement
  u32 nsid;
  u32 flags;    // kRecordFua
  u64 offset;   // bytes into the namespace
  u64 nbytes;   // written or deallocated; a write is followed by that many bytes of data
  u64 covered;  // entries that were in the log when this request was submitted: all that a
                // flush is known to have made durable
};
static_assert(sizeof(RecordHeader) == 40, "layout shared with Python");
constexpr u32 kRecordFua = 1;

std::unique_ptr<Executor> make_recorder(std::unique_ptr<Executor> inner, u32 entries,
                                        int record_fd);

}  // namespace gio
