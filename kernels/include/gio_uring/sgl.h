// Builds a command's data pointer: an SGL if the controller supports it, else PRPs.
//
// Both builders get the command's memory as a sequence of extents.  Adjacent extents are joined, so
// contiguous memory becomes one SGL descriptor.
#pragma once

#include "gio_uring/nvme_spec.h"

namespace gio {

// Memory for one command's descriptor list, which the controller can read.
struct ListMemory {
  u64 address;  // as the submitter addresses it
  u64 dma;      // as the controller addresses it
  u32 nbytes;   // 16 bytes per SGL descriptor, 8 per PRP entry
};

// Collects SGL descriptors.  One extent becomes a data block in DPTR; several become one last
// segment, limited by ListMemory: no chains of segments are built.
struct SglBuilder {
  ListMemory list;
  u32 count;
  SglDescriptor last;  // not yet written: it may grow

  GIO_HD explicit SglBuilder(const ListMemory& memory)
      : list(memory), count(0), last(sgl_descriptor(0, 0, kSglDataBlock)) {}

  GIO_HD u32 add(u64 address, u32 nbytes) {
    if (count != 0 && last.address + last.nbytes == address && last.nbytes + nbytes > nbytes) {
      last.nbytes += nbytes;
      return kOk;
    }
    if ((count + 1) * sizeof(SglDescriptor) > list.nbytes) return kInvalidSglCount;
    if (count != 0) at<SglDescriptor>(list.address)[count - 1] = last;
    last = sgl_descriptor(address, nbytes, kSglDataBlock);
    ++count;
    return kOk;
  }

  GIO_HD u32 finish(Sqe* sqe) {
    SglDescriptor head = last;
    if (count > 1) {
      at<SglDescriptor>(list.address)[count - 1] = last;
      head = sgl_descriptor(list.dma, count * static_cast<u32>(sizeof(SglDescriptor)),
                            kSglLastSegment);
    }
    sqe->dptr[0] = head.address;
    sqe->dptr[1] = static_cast<u64>(head.nbytes) | (static_cast<u64>(head.type) << 56);
    return kOk;
  }
};

// Collects PRP entries.  Only the first may have an offset, and every extent but the last must end
// on a page boundary; if not, the status is kInvalidPrpOffset and the caller needs staging.
struct PrpBuilder {
  ListMemory list;
  u64 prp1;
  u64 end;    // where the next extent must continue, or any page boundary
  u32 count;  // pages, the first included

  GIO_HD explicit PrpBuilder(const ListMemory& memory) : list(memory), prp1(0), end(0), count(0) {}

  GIO_HD u32 add(u64 address, u32 nbytes) {
    const u64 mask = kPageNbytes - 1;
    if (nbytes == 0) return kOk;
    u64 next = address;
    if (count == 0) {
      if (address & 3u) return kInvalidPrpOffset;
      prp1 = address;
      count = 1;
      next = (address & ~mask) + kPageNbytes;
    } else if ((end & mask) != 0) {
      if (end != address) return kInvalidPrpOffset;
      next = (end & ~mask) + kPageNbytes;
    } else if ((address & mask) != 0) {
      return kInvalidPrpOffset;
    }
    end = address + nbytes;
    for (; next < end; next += kPageNbytes) {
      const u64 room = kPageNbytes - (list.dma & mask);
      if (static_cast<u64>(count) * 8 > (list.nbytes < room ? list.nbytes : room)) {
        return kInvalidSglCount;
      }
      at<u64>(list.address)[count - 1] = next;
      ++count;
    }
    return kOk;
  }

  GIO_HD u32 finish(Sqe* sqe) {
    sqe->dptr[0] = prp1;
    sqe->dptr[1] = count <= 1 ? 0 : count == 2 ? at<u64>(list.address)[0] : list.dma;
    return kOk;
  }
};

}  // namespace gio
