// A library for LD_PRELOAD that makes one call fail: the n-th of those that the native library and
// Python make of the functions below, between failing_arm() and failing_disarm().
//
// Calls of the native library are told by their return address. Allocations are those of its
// `operator new`; system calls are those of anybody but the C library itself, threads included.
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

enum Kind : uint32_t { kNew = 1, kSystem = 2, kInterrupt = 4 };

constexpr size_t kPythonsNbytes = 64 << 10;

std::atomic<uint32_t> armed{0};
std::atomic<int64_t> left{0};     // calls until the one that fails
std::atomic<int64_t> counted{0};  // calls since failing_arm()
std::atomic<int64_t> live{0};     // of the library's allocations, those not freed
std::atomic<int64_t> mapped{0};   // bytes mapped by anybody but the C library, and not unmapped
std::atomic<const char*> failed{nullptr};
uintptr_t library_first = 0;
uintptr_t library_last = 0;

bool is_library(const void* address) {
  const uintptr_t value = reinterpret_cast<uintptr_t>(address);
  return value >= library_first && value < library_last;
}

// Counts a call; true for the one that fails.
bool fails(uint32_t kind, const char* name) {
  if ((armed & kind) == 0) return false;
  ++counted;
  if (--left != 0) return false;
  failed = name;
  return true;
}

bool system_fails(const char* name, int error) {
  if (!fails(kSystem, name)) return false;
  errno = error;
  return true;
}

// Of calls that a signal interrupts as well.
bool wait_fails(const char* name, int error) {
  if (system_fails(name, error)) return true;
  if (!fails(kInterrupt, name)) return false;
  errno = EINTR;
  return true;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int find_library(dl_phdr_info* info, size_t, void*) {
  if (std::strstr(info->dlpi_name, "_native") == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD || (header.p_flags & PF_X) == 0) continue;
    library_first = info->dlpi_addr + header.p_vaddr;
    library_last = library_first + header.p_memsz;
  }
  return 1;
}

// Before all memory of `operator new`: whether the library asked for it.
struct alignas(16) Header {
  bool is_of_library;
};

void* allocate(size_t nbytes, const void* caller) {
  const bool is_of_library = is_library(caller);
  if (is_of_library && fails(kNew, "operator new")) return nullptr;
  auto* header = static_cast<Header*>(std::malloc(sizeof(Header) + nbytes));
  if (header == nullptr) return nullptr;
  header->is_of_library = is_of_library;
  if (is_of_library) ++live;
  return header + 1;
}

void release(void* memory) {
  if (memory == nullptr) return;
  Header* header = static_cast<Header*>(memory) - 1;
  if (header->is_of_library) --live;
  std::free(header);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

// kinds: what to count, of Kind.  n: which call fails, from 1 on; 0 only counts.
EXPORT void failing_arm(int64_t n, uint32_t kinds) {
  dl_iterate_phdr(find_library, nullptr);
  failed = nullptr;
  counted = 0;
  left = n;
  armed = kinds;
}

// How many calls were counted.
EXPORT int64_t failing_disarm() {
  armed = 0;
  return counted;
}

// The name of what failed, or null.
EXPORT const char* failing_what() { return failed; }

// Allocations of the library that were not freed.
EXPORT int64_t failing_live() { return live; }

// Bytes that are mapped.
EXPORT int64_t failing_mapped() { return mapped; }

void* operator new(size_t nbytes) {
  void* memory = allocate(nbytes, CALLER);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t nbytes) {
  void* memory = allocate(nbytes, CALLER);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t nbytes, const std::nothrow_t&) noexcept {
  return allocate(nbytes, CALLER);
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, size_t) noexcept { release(memory); }
void operator delete[](void* memory, size_t) noexcept { release(memory); }

EXPORT int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                          void* argument) {
  if (fails(kSystem, "pthread_create")) return EAGAIN;
  static const auto real =
      next<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  return real(thread, attributes, run, argument);
}

static int open_next(const char* name, const char* path, int flags, mode_t mode) {
  if (wait_fails(name, EMFILE)) return -1;
  return openat(AT_FDCWD, path, flags, mode);
}
static mode_t mode_of(int flags, va_list rest) {
  const bool has_mode = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return has_mode ? va_arg(rest, mode_t) : 0;
}
EXPORT int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = mode_of(flags, rest);
  va_end(rest);
  return open_next("open", path, flags, mode);
}
EXPORT int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = mode_of(flags, rest);
  va_end(rest);
  return open_next("open64", path, flags | O_LARGEFILE, mode);
}

EXPORT void* mmap64(void* address, size_t nbytes, int protection, int flags, int fd, off64_t at) {
  // What is small and not the library's is Python's own: a thread's stack of frames, without which
  // the thread that starts it waits without end.
  const bool is_pythons = nbytes <= kPythonsNbytes && !is_library(CALLER);
  if (!is_pythons && system_fails("mmap", ENOMEM)) return MAP_FAILED;
  const long made = syscall(SYS_mmap, address, nbytes, protection, flags, fd, at);
  if (made != -1) mapped += static_cast<int64_t>(nbytes);
  return reinterpret_cast<void*>(made);
}
EXPORT void* mmap(void* address, size_t nbytes, int protection, int flags, int fd, off_t at) {
  return mmap64(address, nbytes, protection, flags, fd, at);
}
EXPORT int munmap(void* address, size_t nbytes) {
  const int result = static_cast<int>(syscall(SYS_munmap, address, nbytes));
  if (result == 0) mapped -= static_cast<int64_t>(nbytes);
  return result;
}

// A function of the C library with its name, its error, and what it does: the next one's work.
#define WRAPPED(result, name, parameters, arguments, check, error) \
  EXPORT result name parameters {                                  \
    if (check(#name, error)) return -1;                            \
    static const auto real = next<result parameters>(#name);       \
    return real arguments;                                         \
  }

WRAPPED(int, madvise, (void* a, size_t n, int advice), (a, n, advice), system_fails, EAGAIN)
WRAPPED(int, ftruncate, (int fd, off_t n), (fd, n), wait_fails, EIO)
WRAPPED(int, ftruncate64, (int fd, off64_t n), (fd, n), wait_fails, EIO)
WRAPPED(int, fallocate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n), wait_fails,
        ENOSPC)
WRAPPED(int, fallocate64, (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n), wait_fails,
        ENOSPC)
WRAPPED(int, fsync, (int fd), (fd), wait_fails, EIO)
WRAPPED(int, fdatasync, (int fd), (fd), wait_fails, EIO)
WRAPPED(int, flock, (int fd, int operation), (fd, operation), wait_fails, ENOLCK)
WRAPPED(int, eventfd, (unsigned value, int flags), (value, flags), system_fails, EMFILE)
WRAPPED(int, fstat, (int fd, struct stat* out), (fd, out), system_fails, EIO)
WRAPPED(int, fstat64, (int fd, struct stat64* out), (fd, out), system_fails, EIO)
WRAPPED(int, fstatfs, (int fd, struct statfs* out), (fd, out), wait_fails, EIO)
WRAPPED(int, fstatfs64, (int fd, struct statfs64* out), (fd, out), wait_fails, EIO)
WRAPPED(int, stat, (const char* path, struct stat* out), (path, out), system_fails, EIO)
WRAPPED(int, stat64, (const char* path, struct stat64* out), (path, out), system_fails, EIO)
WRAPPED(int, lstat, (const char* path, struct stat* out), (path, out), system_fails, EIO)
WRAPPED(int, lstat64, (const char* path, struct stat64* out), (path, out), system_fails, EIO)
WRAPPED(int, statx, (int fd, const char* path, int flags, unsigned mask, struct statx* out),
        (fd, path, flags, mask, out), system_fails, EIO)
WRAPPED(off_t, lseek, (int fd, off_t at, int whence), (fd, at, whence), system_fails, EIO)
WRAPPED(off64_t, lseek64, (int fd, off64_t at, int whence), (fd, at, whence), system_fails, EIO)
WRAPPED(ssize_t, read, (int fd, void* to, size_t n), (fd, to, n), wait_fails, EIO)
WRAPPED(ssize_t, pread, (int fd, void* to, size_t n, off_t at), (fd, to, n, at), wait_fails, EIO)
WRAPPED(ssize_t, pread64, (int fd, void* to, size_t n, off64_t at), (fd, to, n, at), wait_fails,
        EIO)
WRAPPED(ssize_t, pwrite, (int fd, const void* from, size_t n, off_t at), (fd, from, n, at),
        wait_fails, ENOSPC)
WRAPPED(ssize_t, pwrite64, (int fd, const void* from, size_t n, off64_t at), (fd, from, n, at),
        wait_fails, ENOSPC)
WRAPPED(ssize_t, preadv, (int fd, const iovec* iov, int n, off_t at), (fd, iov, n, at), wait_fails,
        EIO)
WRAPPED(ssize_t, preadv64, (int fd, const iovec* iov, int n, off64_t at), (fd, iov, n, at),
        wait_fails, EIO)
WRAPPED(ssize_t, pwritev2, (int fd, const iovec* iov, int n, off_t at, int flags),
        (fd, iov, n, at, flags), wait_fails, EIO)
WRAPPED(ssize_t, pwritev64v2, (int fd, const iovec* iov, int n, off64_t at, int flags),
        (fd, iov, n, at, flags), wait_fails, EIO)
WRAPPED(ssize_t, readlink, (const char* path, char* to, size_t n), (path, to, n), system_fails, EIO)
WRAPPED(int, sync_file_range, (int fd, off64_t at, off64_t n, unsigned flags), (fd, at, n, flags),
        system_fails, EIO)

EXPORT int posix_fallocate(int fd, off_t at, off_t n) {
  if (wait_fails("posix_fallocate", ENOSPC)) return errno;
  static const auto real = next<int(int, off_t, off_t)>("posix_fallocate");
  return real(fd, at, n);
}
EXPORT int posix_fallocate64(int fd, off64_t at, off64_t n) {
  if (wait_fails("posix_fallocate", ENOSPC)) return errno;
  static const auto real = next<int(int, off64_t, off64_t)>("posix_fallocate64");
  return real(fd, at, n);
}

// What these take beside the descriptor and the command is one word.
EXPORT int fcntl(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* const argument = va_arg(rest, void*);
  va_end(rest);
  if (system_fails("fcntl", EMFILE)) return -1;
  static const auto real = next<int(int, int, ...)>("fcntl");
  return real(fd, command, argument);
}
EXPORT int fcntl64(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* const argument = va_arg(rest, void*);
  va_end(rest);
  if (system_fails("fcntl", EMFILE)) return -1;
  static const auto real = next<int(int, int, ...)>("fcntl64");
  return real(fd, command, argument);
}

// Of the calls by number only io_uring's fail: setup, enter, register.
EXPORT long syscall(long number, ...) {
  va_list rest;
  va_start(rest, number);
  long word[6];
  for (long& one : word) one = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_io_uring_setup && system_fails("io_uring_setup", ENOMEM)) return -1;
  if (number == SYS_io_uring_enter && wait_fails("io_uring_enter", ENOMEM)) return -1;
  if (number == SYS_io_uring_register && system_fails("io_uring_register", ENOMEM)) return -1;
  static const auto real = next<long(long, ...)>("syscall");
  return real(number, word[0], word[1], word[2], word[3], word[4], word[5]);
}
