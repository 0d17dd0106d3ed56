// Lists of jobs for the engine's thread, which must not need memory: each job brings the links.
#pragma once

#include <cstddef>

namespace gio {

struct Job;

// A job's place in one list at a time.
struct JobLink {
  Job* previous = nullptr;
  Job* next = nullptr;
  const void* list = nullptr;  // that holds the job, or null
};

// A queue; `Link` names which of a job's links it uses.  Every call takes constant time.
template <auto Link>
class JobList {
 public:
  JobList() = default;
  JobList(const JobList&) = delete;
  JobList& operator=(const JobList&) = delete;

  bool empty() const { return first_ == nullptr; }
  Job* front() const { return first_; }
  bool contains(const Job* job) const { return (job->*Link).list == this; }
  static Job* after(const Job* job) { return (job->*Link).next; }

  void push_back(Job* job) { insert(job, last_, nullptr); }
  void push_front(Job* job) { insert(job, nullptr, first_); }

  // The first job, no longer listed; null when there is none.
  Job* pop_front() {
    Job* job = first_;
    if (job != nullptr) remove(job);
    return job;
  }

  // A job of this list.
  void remove(Job* job) {
    JobLink& link = job->*Link;
    (link.previous != nullptr ? (link.previous->*Link).next : first_) = link.next;
    (link.next != nullptr ? (link.next->*Link).previous : last_) = link.previous;
    link = JobLink{};
  }

 private:
  void insert(Job* job, Job* previous, Job* next) {
    job->*Link = JobLink{previous, next, this};
    (previous != nullptr ? (previous->*Link).next : first_) = job;
    (next != nullptr ? (next->*Link).previous : last_) = job;
  }

  Job* first_ = nullptr;
  Job* last_ = nullptr;
};

}  // namespace gio
