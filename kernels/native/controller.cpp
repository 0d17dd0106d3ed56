// The common part of all controllers: the map of registered memory, the decoding of a command's
// data pointer, the checks of every command, and the thread that serves submitters.
#include "controller.h"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "no_throw.h"

namespace gio {

namespace {

constexpr size_t kQueuesMax = 64;
constexpr u64 kIdleNs = 50'000'000;
constexpr u64 kPageMask = kPageNbytes - 1;

bool starts_before(u64 address, const Extent& region) { return address < region.address; }

void append(u64 address, u64 nbytes, std::vector<Extent>* extents) {
  if (!extents->empty() && extents->back().address + extents->back().nbytes == address) {
    extents->back().nbytes += nbytes;
  } else {
    extents->push_back({address, nbytes});
  }
}

// Walks an SGL.  `left`: bytes that the remaining descriptors must describe.
class SglWalk {
 public:
  SglWalk(u64 nbytes, u32 descriptors_max, MemoryMap::Reader* memory, std::vector<Extent>* extents)
      : left_(nbytes), room_(descriptors_max), memory_(memory), extents_(extents) {}

  u32 walk(SglDescriptor next) {
    // Bounded by room_: every segment but an invalid one uses up at least one descriptor.
    while (next.type == kSglSegment || next.type == kSglLastSegment) {
      const bool is_last = next.type == kSglLastSegment;
      bool is_chained = false;
      const u32 status = walk_segment(next, is_last, &next, &is_chained);
      if (status != kOk) return status;
      if (!is_chained) return left_ == 0 ? kOk : kSglLengthInvalid;
    }
    const u32 status = add_block(next);
    if (status != kOk) return status;
    return left_ == 0 ? kOk : kSglLengthInvalid;
  }

 private:
  // Walks one segment.  The last descriptor of a segment that is not the last segment must
  // describe another segment; no other descriptor may.
  u32 walk_segment(const SglDescriptor segment, bool is_last, SglDescriptor* next,
                   bool* is_chained) {
    const u32 n = segment.nbytes / sizeof(SglDescriptor);
    if (n == 0 || segment.nbytes % sizeof(SglDescriptor) != 0 || (segment.address & 7u) != 0) {
      return kInvalidSglSegment;
    }
    if (n > room_) return kInvalidSglCount;
    room_ -= n;
    if (!memory_->contains(segment.address, segment.nbytes)) return kDataTransferError;
    for (u32 i = 0; i < n; ++i) {
      const SglDescriptor descriptor = at<SglDescriptor>(segment.address)[i];
      const bool is_segment = descriptor.type == kSglSegment || descriptor.type == kSglLastSegment;
      if (is_segment) {
        if (is_last || i != n - 1) return kInvalidSglCount;
        *next = descriptor;
        *is_chained = true;
        return kOk;
      }
      const u32 status = add_block(descriptor);
      if (status != kOk) return status;
    }
    return is_last ? kOk : kInvalidSglSegment;
  }

  u32 add_block(const SglDescriptor& descriptor) {
    if (descriptor.type != kSglDataBlock) return kSglTypeInvalid;
    if (descriptor.nbytes > left_) return kSglLengthInvalid;
    if (descriptor.nbytes == 0) return kOk;
    if (!memory_->contains(descriptor.address, descriptor.nbytes)) return kDataTransferError;
    append(descriptor.address, descriptor.nbytes, extents_);
    left_ -= descriptor.nbytes;
    return kOk;
  }

  u64 left_;
  u32 room_;
  MemoryMap::Reader* memory_;
  std::vector<Extent>* extents_;
};

u32 add_page(u64 address, u64 nbytes, MemoryMap::Reader* memory, std::vector<Extent>* extents) {
  if (!memory->contains(address, nbytes)) return kDataTransferError;
  append(address, nbytes, extents);
  return kOk;
}

// Walks PRP1 and PRP2 (NVM Express Base Specification 2.0, section 4.1.1).
u32 walk_prp(const Sqe& sqe, u64 nbytes, MemoryMap::Reader* memory, std::vector<Extent>* extents) {
  const u64 first = sqe.dptr[0];
  if ((first & 3u) != 0) return kInvalidPrpOffset;
  const u64 in_first = std::min<u64>(nbytes, kPageNbytes - (first & kPageMask));
  u32 status = add_page(first, in_first, memory, extents);
  u64 left = nbytes - in_first;
  if (status != kOk || left == 0) return status;
  u64 entry = sqe.dptr[1];
  if (left <= kPageNbytes) {
    if ((entry & kPageMask) != 0) return kInvalidPrpOffset;
    return add_page(entry, left, memory, extents);
  }
  if ((entry & 7u) != 0) return kInvalidPrpOffset;
  while (left != 0) {  // bounded: at least every second turn moves on by a page
    if (!memory->contains(entry, sizeof(u64))) return kDataTransferError;
    const u64 page = *at<u64>(entry);
    if ((page & kPageMask) != 0) return kInvalidPrpOffset;
    const bool is_chain = (entry & kPageMask) == kPageNbytes - sizeof(u64) && left > kPageNbytes;
    if (is_chain) {
      entry = page;
      continue;
    }
    const u64 in_page = std::min<u64>(left, kPageNbytes);
    status = add_page(page, in_page, memory, extents);
    if (status != kOk) return status;
    left -= in_page;
    entry += sizeof(u64);
  }
  return kOk;
}

}  // namespace

u64 monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1'000'000'000 + static_cast<u64>(now.tv_nsec);
}

int MemoryMap::add(u64 address, u64 nbytes) {
  if (address == 0 || nbytes == 0 || address + nbytes < address) return -EINVAL;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto next = std::upper_bound(regions_.begin(), regions_.end(), address, starts_before);
  if (next != regions_.end() && next->address - address < nbytes) return -EEXIST;
  if (next != regions_.begin()) {
    const Extent& before = *(next - 1);
    if (address - before.address < before.nbytes) return -EEXIST;
  }
  regions_.insert(next, {address, nbytes});
  return 0;
}

int MemoryMap::remove(u64 address) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto region = regions_.begin(); region != regions_.end(); ++region) {
    if (region->address == address) {
      regions_.erase(region);
      return 0;
    }
  }
  return -ENOENT;
}

// An extent may span adjacent regions: submitters join adjacent extents.
bool MemoryMap::Reader::contains(u64 address, u64 nbytes) {
  const bool is_same =
      last_ < regions_.size() && address - regions_[last_].address < regions_[last_].nbytes;
  if (!is_same) {
    const auto next = std::upper_bound(regions_.begin(), regions_.end(), address, starts_before);
    if (next == regions_.begin()) return false;
    last_ = static_cast<size_t>(next - regions_.begin()) - 1;
  }
  for (size_t i = last_; i < regions_.size(); ++i) {
    const u64 offset = address - regions_[i].address;
    if (offset >= regions_[i].nbytes) return false;
    const u64 room = regions_[i].nbytes - offset;
    if (nbytes <= room) return true;
    address += room;
    nbytes -= room;
  }
  return false;
}

u32 decode_data_pointer(const Sqe& sqe, u64 nbytes, u32 descriptors_max, MemoryMap::Reader* memory,
                        std::vector<Extent>* extents) {
  extents->clear();
  if (sqe_psdt(sqe) == kPsdtPrp) return walk_prp(sqe, nbytes, memory, extents);
  if (sqe_psdt(sqe) != kPsdtSgl || descriptors_max == 0) return kInvalidField;
  const SglDescriptor head = sgl_descriptor(sqe.dptr[0], static_cast<u32>(sqe.dptr[1]),
                                            static_cast<u8>(sqe.dptr[1] >> 56));
  return SglWalk(nbytes, descriptors_max, memory, extents).walk(head);
}

Controller::Controller() {
  queues_.reserve(kQueuesMax);  // the thread that serves them must not need memory
  attached_.reserve(kQueuesMax);
}

int Controller::attach(const QueuePair& qp) {
  if (qp.depth < 2 || qp.depth > info.depth_max || (qp.depth & (qp.depth - 1)) != 0) return -EINVAL;
  if (qp.sq == 0 || qp.cq == 0 || qp.sq_doorbell == 0 || qp.cq_doorbell == 0) return -EINVAL;
  ControllerQueue queue = {};
  queue.sq = qp.sq;
  queue.cq = qp.cq;
  queue.sq_doorbell = qp.sq_doorbell;
  queue.cq_doorbell = qp.cq_doorbell;
  queue.depth = qp.depth;
  queue.qid = qp.qid;
  std::unique_lock<std::mutex> lock(changes_mutex_);
  if (attached_.size() >= kQueuesMax) return -ENOSPC;
  changes_.push_back({queue, false});  // may fail, and nothing has happened then
  attached_.push_back(queue.sq);
  lock.unlock();
  announce();
  return 0;
}

int Controller::detach(const QueuePair& qp, u64 timeout_ns) {
  std::unique_lock<std::mutex> lock(changes_mutex_);
  const auto known = std::find(attached_.begin(), attached_.end(), qp.sq);
  if (known == attached_.end()) return -ENOENT;
  ControllerQueue queue = {};
  queue.sq = qp.sq;
  changes_.push_back({queue, true});
  attached_.erase(known);
  lock.unlock();
  announce();
  lock.lock();
  const auto is_taken = [this] { return changes_.empty() || !is_claimed(); };
  return changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), is_taken) ? 0 : -ETIMEDOUT;
}

void Controller::announce() {
  has_changes_.store(true, std::memory_order_release);  // pairs with take_changes
  wake();
}

void Controller::apply_changes() {
  static u32 no_doorbell = 0;
  ControllerQueue nothing = {};
  nothing.sq_doorbell = nothing.cq_doorbell = reinterpret_cast<u64>(&no_doorbell);
  nothing.depth = 1;  // nothing can be fetched from it
  std::lock_guard<std::mutex> lock(changes_mutex_);
  has_changes_.store(false, std::memory_order_relaxed);
  for (const Change& change : changes_) {
    const u64 wanted = change.is_removal ? change.queue.sq : 0;
    const auto place = std::find_if(queues_.begin(), queues_.end(),
                                    [&](const ControllerQueue& q) { return q.sq == wanted; });
    if (place != queues_.end()) {
      *place = change.is_removal ? nothing : change.queue;
    } else if (!change.is_removal) {
      queues_.push_back(change.queue);
    }
  }
  changes_.clear();
  changed_.notify_all();
}

int Controller::start() {
  if (!claim()) return -EBUSY;
  stop_ = false;
  expect_rings(1);
  const int result = without_exceptions([this] {
    thread_ = std::thread([this] {
      while (!stop_) service(kIdleNs);  // bounded by stop()
    });
    return 0;
  });
  if (result == 0) return 0;
  expect_rings(-1);
  unclaim();
  return result;
}

void Controller::stop() {
  if (!thread_.joinable()) return;
  stop_ = true;
  wake();
  thread_.join();
  expect_rings(-1);
  unclaim();
}

u32 Controller::validate(const Sqe& sqe) const {
  const u32 opcode = sqe_opcode(sqe);
  const bool is_transfer = opcode == kRead || opcode == kWrite;
  const bool is_deallocate = opcode == kDatasetManagement && (info.flags & kHasDeallocate) != 0;
  if (!is_transfer && !is_deallocate && opcode != kFlush) return kInvalidOpcode;
  if ((sqe.cdw0 & 0x300u) != 0) return kInvalidField;  // fused commands
  const u64 size_nlb = namespace_nlb(sqe.nsid);
  if (size_nlb == 0) return kInvalidNamespace;
  if (!is_transfer) return kOk;
  const u64 nlb = sqe_nlb(sqe);
  if ((nlb << info.lba_shift) > info.mdts_nbytes) return kInvalidField;
  if (nlb > size_nlb || sqe_slba(sqe) > size_nlb - nlb) return kLbaOutOfRange;
  return kOk;
}

}  // namespace gio

using gio::Controller;

int gio_controller_info(Controller* controller, gio::ControllerInfo* out) {
  *out = controller->info;
  return 0;
}

uint64_t gio_controller_namespace_nlb(Controller* controller, uint32_t nsid) {
  return controller->namespace_nlb(nsid);
}

int gio_controller_register(Controller* controller, uint64_t address, uint64_t nbytes) {
  return gio::without_exceptions([=] { return controller->memory.add(address, nbytes); });
}

int gio_controller_unregister(Controller* controller, uint64_t address) {
  return controller->memory.remove(address);
}

int gio_controller_attach(Controller* controller, const gio::QueuePair* qp) {
  return gio::without_exceptions([=] { return controller->attach(*qp); });
}

int gio_controller_detach(Controller* controller, const gio::QueuePair* qp, uint64_t timeout_ns) {
  return gio::without_exceptions([=] { return controller->detach(*qp, timeout_ns); });
}

void gio_controller_expect_rings(Controller* controller, int change) {
  controller->expect_rings(change);
}

uint32_t gio_controller_service(Controller* controller, uint64_t timeout_ns) {
  return controller->service(timeout_ns);
}

int gio_controller_start(Controller* controller) { return controller->start(); }

void gio_controller_stop(Controller* controller) { controller->stop(); }

int gio_controller_is_claimed(Controller* controller) { return controller->is_claimed() ? 1 : 0; }

int gio_controller_reset(Controller* controller, uint64_t timeout_ns) {
  return controller->is_claimed() ? -EBUSY : controller->reset(timeout_ns);
}

void gio_controller_destroy(Controller* controller) {
  controller->stop();
  delete controller;
}
