// The NVMe formats that gio_uring uses: submission and completion queue entries, opcodes,
// status codes, SGL descriptors.  Names and values: NVM Express Base Specification 2.0
// (sections 3.3.3, 4.1, 4.2) and NVM Command Set Specification 1.0.
#pragma once

#include "gio_uring/atomics.h"

namespace gio {

// Submission queue entry, 64 bytes.  All 16 dwords are written for every command.
struct Sqe {
  u32 cdw0;  // OPC[7:0] FUSE[9:8] PSDT[15:14] CID[31:16]
  u32 nsid;
  u32 cdw2;
  u32 cdw3;
  u64 mptr;
  u64 dptr[2];  // PRP1 and PRP2, or one SGL descriptor
  u32 cdw10;    // SLBA low
  u32 cdw11;    // SLBA high
  u32 cdw12;    // NLB[15:0], 0-based; FUA[30]
  u32 cdw13;
  u32 cdw14;
  u32 cdw15;
};
static_assert(sizeof(Sqe) == 64, "NVMe SQE is 64 bytes");

// Completion queue entry, 16 bytes.
struct Cqe {
  u32 result;
  u32 reserved;
  u32 sq;      // SQHD[15:0] SQID[31:16]
  u32 status;  // CID[15:0] P[16] SC[24:17] SCT[27:25] CRD[29:28] M[30] DNR[31]
};
static_assert(sizeof(Cqe) == 16, "NVMe CQE is 16 bytes");

// SGL descriptor, 16 bytes.
struct SglDescriptor {
  u64 address;
  u32 nbytes;
  u8 reserved[3];
  u8 type;  // type[7:4] subtype[3:0]
};
static_assert(sizeof(SglDescriptor) == 16, "NVMe SGL descriptor is 16 bytes");

// Dataset Management range, 16 bytes.  `nlb` is not 0-based.
struct DsmRange {
  u32 attributes;
  u32 nlb;
  u64 slba;
};
static_assert(sizeof(DsmRange) == 16, "NVMe DSM range is 16 bytes");

enum Opcode : u32 { kFlush = 0x00, kWrite = 0x01, kRead = 0x02, kDatasetManagement = 0x09 };

enum Psdt : u32 { kPsdtPrp = 0, kPsdtSgl = 1 };

enum SglType : u8 {
  kSglDataBlock = 0x00,
  kSglBitBucket = 0x10,
  kSglSegment = 0x20,
  kSglLastSegment = 0x30,
};

constexpr u32 kFua = 1u << 30;           // cdw12
constexpr u32 kDsmDeallocate = 1u << 2;  // cdw11
constexpr u32 kDsmRangesMax = 256;
constexpr u32 kPageNbytes = 4096;  // CC.MPS = 0: the PRP page
constexpr u32 kNlbMax = 1u << 16;  // NLB is 16 bits, 0-based

// Status = SCT << 8 | SC, as one 11-bit number; 0 is success.
enum Status : u32 {
  kOk = 0x000,
  kInvalidOpcode = 0x001,
  kInvalidField = 0x002,
  kDataTransferError = 0x004,
  kInternalError = 0x006,
  kAbortRequested = 0x007,
  kAbortedSqDeletion = 0x008,
  kInvalidNamespace = 0x00b,
  kInvalidSglSegment = 0x00d,
  kInvalidSglCount = 0x00e,
  kSglLengthInvalid = 0x00f,
  kSglTypeInvalid = 0x011,
  kInvalidPrpOffset = 0x013,
  kNamespaceWriteProtected = 0x020,
  kLbaOutOfRange = 0x080,
  kCapacityExceeded = 0x081,
  kWriteToReadOnlyRange = 0x182,
  kWriteFault = 0x280,
  kUnrecoveredRead = 0x281,
  // Vendor-specific (SCT 7): statuses that gio_uring itself reports for a slice.
  kDigestMismatch = 0x7c0,
  kTimedOut = 0x7c1,
  kCancelled = 0x7c2,
  kDeviceGone = 0x7c3,
  kMemberMoved = 0x7c4,
};

GIO_HD u32 make_cdw0(u32 opcode, u32 psdt, u32 cid) { return opcode | (psdt << 14) | (cid << 16); }
GIO_HD u32 sqe_opcode(const Sqe& sqe) { return sqe.cdw0 & 0xffu; }
GIO_HD u32 sqe_psdt(const Sqe& sqe) { return (sqe.cdw0 >> 14) & 3u; }
GIO_HD u32 sqe_cid(const Sqe& sqe) { return sqe.cdw0 >> 16; }
GIO_HD u64 sqe_slba(const Sqe& sqe) {
  return static_cast<u64>(sqe.cdw10) | (static_cast<u64>(sqe.cdw11) << 32);
}
GIO_HD u32 sqe_nlb(const Sqe& sqe) { return (sqe.cdw12 & 0xffffu) + 1u; }

GIO_HD u32 cqe_cid(u32 dw3) { return dw3 & 0xffffu; }
GIO_HD u32 cqe_phase(u32 dw3) { return (dw3 >> 16) & 1u; }
GIO_HD u32 cqe_status(u32 dw3) { return (dw3 >> 17) & 0x7ffu; }
GIO_HD u32 make_cqe_status(u32 cid, u32 phase, u32 status) {
  return cid | (phase << 16) | (status << 17);
}

GIO_HD SglDescriptor sgl_descriptor(u64 address, u32 nbytes, u8 type) {
  SglDescriptor d = {address, nbytes, {0, 0, 0}, type};
  return d;
}

}  // namespace gio
