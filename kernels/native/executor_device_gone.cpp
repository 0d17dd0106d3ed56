// Detects devices that were removed while requests to them were in flight.
#include "executor.h"

#include <linux/fs.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <cerrno>

namespace gio {

namespace {

// A block device whose drive is gone has size 0 (__blk_mark_disk_dead in Linux' block/genhd.c),
// and a generic one has no path (nvme_ns_head_chr_ioctl in drivers/nvme/host/multipath.c).
bool has_left(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) return false;
  u64 nbytes = 0;
  if (S_ISBLK(status.st_mode)) return ioctl(fd, BLKGETSIZE64, &nbytes) == 0 && nbytes == 0;
  return S_ISCHR(status.st_mode) && ioctl(fd, NVME_IOCTL_ID) < 0;
}

}  // namespace

// Reads of such a block device return 0 bytes, writes fail with ENOSPC, and a generic device
// reports invalid commands.
long long result_of(int fd, const Op& op, long long result) {
  const bool moves = op.kind == OpKind::kRead || op.kind == OpKind::kWrite;
  const bool failed = result < 0 ? result != -ECANCELED : moves && result == 0;
  return failed && has_left(fd) ? -ENODEV : result;
}

}  // namespace gio
