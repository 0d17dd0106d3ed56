// Integer types, memory order and doorbell stores, once for the host and once for the GPU.
//
// Compiled by g++ into the native library, by g++ with a fiber scheduler and the sanitizers
// into tests (which define GIO_SCHED_POINT), and by NVRTC for the GPU.  No std headers.
//
// There are two kinds of words.  Words shared with a controller or another processor (ring entries,
// doorbells, layer words) have one writer each and are only loaded and stored, because a GPU has no
// atomic read-modify-write on pinned host memory.  Accesses to them have system scope.  A
// processor's own words are in its memory, and no other processor uses them at the same time:
// `own_...` and all read-modify-writes have the scope of one GPU.  tests/native/test_ptx_orders.py
// derives from PTX's axioms that this is sufficient.
#pragma once

#ifndef GIO_HD
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GIO_HD __host__ __device__ __forceinline__
#else
#define GIO_HD inline __attribute__((always_inline))
#endif
#endif

#if defined(__CUDA_ARCH__)
#define GIO_DEVICE 1
#else
#define GIO_DEVICE 0
#endif

#ifndef GIO_SCHED_POINT
#define GIO_SCHED_POINT() ((void)0)
#endif

// The host's store to a drive's register; tests replace it to emulate a BAR page.
#ifndef GIO_MMIO_STORE
// Pairs with the drive's fetch of the submission queue after it saw the doorbell.
#define GIO_MMIO_STORE(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#endif

namespace gio {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "fixed-width integers");

// Typed view of a 64-bit address held in a device-visible struct.
template <typename T>
GIO_HD T* at(u64 address) {
  return reinterpret_cast<T*>(address);
}

// Pairs with: store_release by the other side of the word.
GIO_HD u32 load_acquire(const u32* p) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  u32 v;
  // Pairs with store_release; system scope because the writer may be a CPU or a drive.
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
#else
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);  // pairs with store_release
#endif
}

// Pairs with: load_acquire by the other side of the word.
GIO_HD void store_release(u32* p, u32 v) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  // Pairs with load_acquire; system scope because the reader may be a CPU thread.
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#else
  __atomic_store_n(p, v, __ATOMIC_RELEASE);  // pairs with load_acquire
#endif
}

// A word that another processor may write; orders nothing else.
GIO_HD u32 load_relaxed(const u32* p) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  u32 v;
  // Orders nothing, pairs with nothing: volatile only keeps the load in place.
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
#else
  return __atomic_load_n(p, __ATOMIC_RELAXED);  // pairs with nothing
#endif
}

GIO_HD void store_relaxed(u32* p, u32 v) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  // Orders nothing, pairs with nothing: volatile only keeps the store in place.
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#else
  __atomic_store_n(p, v, __ATOMIC_RELAXED);  // pairs with nothing
#endif
}

// The four functions above for a processor's own word: on a GPU, with GPU scope.
//
// Pairs with: own_store_release by another thread of this processor.
GIO_HD u32 own_load_acquire(const u32* p) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  u32 v;
  // Pairs with own_store_release.
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
#else
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);  // pairs with own_store_release
#endif
}

// Pairs with: own_load_acquire by another thread of this processor.
GIO_HD void own_store_release(u32* p, u32 v) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  // Pairs with own_load_acquire.
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#else
  __atomic_store_n(p, v, __ATOMIC_RELEASE);  // pairs with own_load_acquire
#endif
}

GIO_HD u32 own_load(const u32* p) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  u32 v;
  // Orders nothing, pairs with nothing: volatile only keeps the load in place.
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
#else
  return __atomic_load_n(p, __ATOMIC_RELAXED);  // pairs with nothing
#endif
}

GIO_HD void own_store(u32* p, u32 v) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  // Orders nothing, pairs with nothing: volatile only keeps the store in place.
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#else
  __atomic_store_n(p, v, __ATOMIC_RELAXED);  // pairs with nothing
#endif
}

// Takes or releases a lock word.  "Mark, then try the lock" and "unlock, then read the marks" need
// no fence: both sides read-modify-write the lock, so one exchange reads what the other wrote.
GIO_HD u32 exchange(u32* p, u32 v) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  u32 old;
  // Pairs with the other submitters' exchange of the same lock word.
  asm volatile("atom.exch.acq_rel.gpu.global.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
#else
  return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL);  // pairs with the other side's exchange
#endif
}

GIO_HD u32 fetch_add(u32* p, u32 v) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  u32 old;
  // Pairs with the other submitters' fetch_add on the same counter.
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
#else
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);  // pairs with the others' fetch_add
#endif
}

GIO_HD u32 fetch_or(u32* p, u32 v) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  u32 old;
  // Releases a CID; pairs with the fetch_and that takes it again.
  asm volatile("atom.or.acq_rel.gpu.global.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
#else
  return __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL);  // pairs with fetch_and
#endif
}

GIO_HD u32 fetch_and(u32* p, u32 v) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  u32 old;
  // Takes a CID; pairs with the fetch_or that released it.
  asm volatile("atom.and.acq_rel.gpu.global.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
#else
  return __atomic_fetch_and(p, v, __ATOMIC_ACQ_REL);  // pairs with fetch_or
#endif
}

// Stores `v` if the word is 0, and returns whether it did.  Keeps the first of several errors.
GIO_HD bool set_if_zero(u32* p, u32 v) {
  GIO_SCHED_POINT();
#if GIO_DEVICE
  u32 old;
  // Pairs with the other writers' try, of which one succeeds, and orders nothing else.
  asm volatile("atom.cas.relaxed.gpu.global.b32 %0, [%1], 0, %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old == 0;
#else
  u32 none = 0;
  // Pairs with the other writers' try, of which one succeeds, and orders nothing else.
  return __atomic_compare_exchange_n(p, &none, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
#endif
}

GIO_HD u32 lowest_bit(u32 v) {
#if GIO_DEVICE
  return static_cast<u32>(__ffs(static_cast<int>(v))) - 1u;
#else
  return static_cast<u32>(__builtin_ctz(v));
#endif
}

// How a queue pair's doorbells are rung: a template parameter, so that the protocol exists once.
//
// `ring` publishes submission queue entries.  `ring_head` frees completion queue entries: they were
// loaded with acquire, so the store needs no order of its own.
//
// WordDoorbell: a word that software polls (tier T0), or a drive's register written by an x86 CPU.
struct WordDoorbell {
  GIO_HD static void ring(u32* doorbell, u32 value) {
    store_release(doorbell, value);  // pairs with load_acquire in controller_queue.h
  }
  GIO_HD static void ring_head(u32* doorbell, u32 value) {
    store_relaxed(doorbell, value);  // pairs with load_acquire in controller_queue.h
  }
};

// MmioDoorbell: a register in BAR0 of a drive (tiers T1 to T3).  An mmio store is always relaxed
// (PTX ISA, st.mmio), so `ring` has a fence.
struct MmioDoorbell {
  GIO_HD static void ring(u32* doorbell, u32 value) {
    GIO_SCHED_POINT();
#if GIO_DEVICE
    // Pairs with the drive's fetch of the submission queue after it saw the doorbell.
    asm volatile("fence.acq_rel.sys;\n\tst.mmio.relaxed.sys.global.u32 [%0], %1;" ::"l"(doorbell),
                 "r"(value)
                 : "memory");
#else
    GIO_MMIO_STORE(doorbell, value);
#endif
  }
  GIO_HD static void ring_head(u32* doorbell, u32 value) {
    GIO_SCHED_POINT();
#if GIO_DEVICE
    // Pairs with the drive's use of the entries that it releases.
    asm volatile("st.mmio.relaxed.sys.global.u32 [%0], %1;" ::"l"(doorbell), "r"(value) : "memory");
#else
    GIO_MMIO_STORE(doorbell, value);
#endif
  }
};

}  // namespace gio
