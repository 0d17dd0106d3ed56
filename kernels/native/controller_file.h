// NVMe commands executed on files and block devices.
//
// Namespace i+1 is file i.  Commands fetched in one turn that are adjacent on the medium become
// one request to the kernel, and long ones are split: virtual disks have rings of 256 descriptors,
// one per contiguous piece of memory, so a request with many pieces blocks others.  Memory that
// direct I/O does not accept goes through a bounce buffer.  A request that fails is repeated
// command by command, so that each command reports only its own error.  Ranges of blocks can go
// through the page cache instead; no request crosses the border of such a range.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "bounce.h"
#include "buffered_ranges.h"
#include "controller.h"
#include "executor.h"

namespace gio {

// Plain data, mirrored by tutti/gio_uring/controller_file.py.
struct FileNamespace {
  int fd;           // stays the caller's; the controller works on a duplicate
  int buffered_fd;  // the same file opened without O_DIRECT, likewise; or -1
  u32 flags;
  u32 generic_nsid;  // of a generic character device, whose blocks offset_alignment tells; else 0
  u64 nlb;
  u32 memory_alignment;  // of addresses, for direct I/O
  u32 offset_alignment;  // of offsets and lengths, for direct I/O
};
static_assert(sizeof(FileNamespace) == 32, "layout shared with Python");
constexpr u32 kFileDirect = 1;  // opened with O_DIRECT: the alignments hold

struct FileConfig {
  u64 namespaces;  // FileNamespace[n_namespaces]
  u32 n_namespaces;
  u32 lba_shift;
  u32 mdts_nbytes;
  u32 request_nbytes_max;  // adjacent commands are joined and long ones cut to this
  u32 requests;            // most requests under way
  u32 executor;            // ExecutorKind
  u32 threads;             // of the threads executor
  int record_fd;           // the recorder's log, or -1
};
static_assert(sizeof(FileConfig) == 40, "layout shared with Python");

struct FileStats {
  u64 commands;     // fetched
  u64 requests;     // handed to the executor, repetitions not counted
  u64 nbytes_read;  // by requests that ended
  u64 nbytes_written;
  u64 joined;    // commands, or parts of one, that went with an adjacent one
  u64 bounced;   // requests through a bounce buffer
  u64 repeated;  // hand-overs after short transfers, interruptions and errors
  u64 buffered;  // requests through the page cache of files opened for direct I/O
};

class FileController final : public Controller {
 public:
  FileController() = default;
  ~FileController() override;

  // Called once, before anything else.  0 or negative errno.
  int open(const FileConfig& config);

  u32 service(u64 timeout_ns) override;
  void wake() override;
  int reset(u64 timeout_ns) override;

  // Sends exactly these blocks through the page cache, from the next turn of service() on.
  // Callable by any thread.  -EINVAL for bad ranges, -ENOTSUP for a file without buffered_fd.
  int set_buffered(const BufferedRange* ranges, size_t n);
  // Sets whether commands use memory on large pages, so that an extent is one piece for the drive.
  // Callable by any thread.
  void set_large_pages(bool has) { has_large_pages_.store(has, std::memory_order_relaxed); }
  FileStats stats() const;
  Executor* executor() { return executor_.get(); }
  int uring_error() const { return uring_error_; }

 private:
  // A fetched command.  It completes when all parts have ended; `parts` counts one more until the
  // command was split completely.
  struct Command {
    u32 queue;
    u32 cid;
    u32 parts;
    u32 status;
  };
  // The part of a command in one request: the extents iov[iov_first, iov_end).
  struct Part {
    u32 command;
    u32 iov_first;
    u32 iov_end;
    u32 nbytes;
  };
  struct Request : Op {
    iovec* extents;  // [kExtentsMax]
    Part* parts;     // [kExtentsMax]
    u32 n_extents;
    u32 n_parts;
    u64 start;  // bytes into the file
    u64 total_nbytes;
    u32 first_part;  // the window under way: all parts, or one by one after an error
    u32 window_parts;
    u32 tries;
    bool is_single;  // one part at a time
    char* bounce;    // or null
    iovec bounce_iov;
    iovec* moved_iov;  // the extent that a short transfer cut, and what it was
    iovec moved_was;
    std::vector<Extent> ranges;  // of a deallocate, in bytes of the file; done from the back
  };
  // A transfer that is being split into parts, kept while no request is free.
  struct Cutting {
    bool is_active;
    OpKind kind;
    bool fua;
    u32 command;
    u32 file;
    u64 offset;  // of the rest
    u64 left;
    BufferedRanges::Span span;  // around offset
    size_t extent;              // of the rest, and how much of it is gone
    u64 extent_done;
  };
  enum Counter {
    kCommands,
    kRequests,
    kRead_,
    kWritten,
    kJoined,
    kBounced,
    kRepeated,
    kBuffered,
    kCounters
  };

  int open_files(const FileConfig& config);
  int open_executor(const FileConfig& config);
  void allocate(const FileConfig& config);

  void fetch();
  void begin(u32 queue, const Sqe& sqe, MemoryMap::Reader* memory);
  u32 begin_transfer(const Sqe& sqe, u32 command, MemoryMap::Reader* memory);
  void begin_flush(const Sqe& sqe, u32 command);
  u32 begin_deallocate(const Sqe& sqe, u32 command, MemoryMap::Reader* memory);
  bool cut();
  u64 fit(const Request& request) const;
  void append(Request* request, u64 nbytes);

  Request* take_request(OpKind kind, u32 file, u64 offset);
  void add_part(Request* request, u32 command);
  void close_open(u32 file);
  bool needs_bounce(const Request& request) const;
  void launch(Request* request, bool through_bounce);
  void hand_over(Request* request);
  void open_window(Request* request, u32 first_part, u32 n_parts);
  static void copy_window(const Request& request, bool to_bounce);
  static void restore_extent(Request* request);

  void finish(const Done& done);
  bool try_again(Request* request, long long result);
  void advance(Request* request, u64 nbytes);
  void end_window(Request* request, u32 status);
  void recycle(Request* request);
  void end_parts(Request* request, u32 first_part, u32 status);
  void abort_queued();
  void end_part(u32 command, u32 status);
  void post(const Command& command);
  void post_kept();
  void reap(u64 timeout_ns);
  void count(Counter counter, u64 n);

  std::vector<FileNamespace> files_;  // with fds of our own
  std::unique_ptr<Executor> executor_;
  int uring_error_ = 0;  // why the threads executor took its place
  u32 request_nbytes_max_ = 0;
  u64 request_nbytes_ = 0;  // of this turn: less than the most without large pages
  std::atomic<bool> has_large_pages_ = false;

  std::unique_ptr<Request[]> requests_;
  std::unique_ptr<iovec[]> extent_memory_;
  std::unique_ptr<Part[]> part_memory_;
  std::vector<Request*> free_requests_;
  std::vector<Request*> open_;     // by file: still taking adjacent commands, or null
  std::vector<Request*> waiting_;  // for a bounce buffer, the first one first
  u32 under_way_ = 0;              // with the executor
  std::vector<Command> commands_;
  std::vector<u32> free_commands_;
  std::vector<Command> kept_;  // ended, but their completion queue is full
  std::vector<Command> posting_;
  std::vector<Extent> extents_;  // of the command being cut
  Cutting cutting_ = {};
  std::shared_ptr<const BufferedRanges> buffered_;  // of this turn
  std::mutex next_buffered_mutex_;
  std::shared_ptr<const BufferedRanges> next_buffered_ = std::make_shared<BufferedRanges>();
  std::unique_ptr<BouncePool> bounces_;
  std::vector<Done> done_;
  size_t first_queue_ = 0;  // fetching takes turns
  u32 posted_ = 0;          // in this turn
  bool is_resetting_ = false;
  std::atomic<u64> counters_[kCounters] = {};
};

}  // namespace gio

extern "C" {
TUTTI_API int gio_file_controller_create(const gio::FileConfig*, gio::Controller** out);
// The reason why io_uring is refused here: negative errno, or 0.
TUTTI_API int gio_uring_refusal();
// The ExecutorKind in use; *uring_error: why io_uring was not used (negative errno), or 0.
TUTTI_API uint32_t gio_file_controller_executor(gio::Controller*, int* uring_error);
TUTTI_API void gio_file_controller_stats(gio::Controller*, gio::FileStats* out);
// See FileController::set_buffered.
TUTTI_API int gio_file_controller_set_buffered(gio::Controller*, const gio::BufferedRange* ranges,
                                               uint64_t n);
// See FileController::set_large_pages.
TUTTI_API void gio_file_controller_set_large_pages(gio::Controller*, int has);
// Alignment that direct I/O on fd needs: STATX_DIOALIGN, else the file system's block size.
// 0, -EOPNOTSUPP where the file takes no direct I/O, or another negative errno.
TUTTI_API int gio_file_alignment(int fd, uint32_t* memory, uint32_t* offset);
}
