// File descriptors that a forked child closes at once.
//
// A file's lock lasts as long as any copy of its descriptor, and a ring references its files.
// Otherwise, after the parent was killed, its pool would stay locked while a child lives.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace gio {

class Descriptors {
 public:
  static Descriptors& instance() {
    static auto* const all = new Descriptors();  // used until the process ends
    return *all;
  }

  // Registers `fd` (not negative) to be closed in children.
  void add(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    fds_.push_back(fd);
  }

  void close(int fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto place = std::find(fds_.begin(), fds_.end(), fd);
    if (place != fds_.end()) fds_.erase(place);
    ::close(fd);
  }

 private:
  // The mutex is taken around every fork, so that the list is consistent in the child.
  Descriptors() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().close_copies(); });
  }

  void close_copies() {
    for (const int fd : fds_) ::close(fd);
    fds_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<int> fds_;
};

}  // namespace gio
