// The file controller over an executor that ends NVMe commands with the statuses of a script.
//
// A line is an opcode and statuses, the last of which goes on. The answer: the command's status and
// how often it was handed over.
#include <fcntl.h>

#include <cstdint>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "executor.h"
// The real one is compiled for the meaning of its statuses, and the scripted one takes its place.
#define make_passthrough_executor make_real_executor
#include "executor_passthrough.cpp"
#undef make_passthrough_executor

#include "controller.cpp"
#include "controller_file.cpp"
#include "controller_file_requests.cpp"
#include "executor_device_gone.cpp"
#include "executor_recorder.cpp"
#include "executor_threads.cpp"
#include "executor_uring.cpp"
#include "queue_pair.cpp"

namespace {

std::vector<uint32_t> script;
size_t handed_over = 0;

class Scripted final : public gio::Executor {
 public:
  void submit(gio::Op* op) override { under_way_.push_back(op); }
  void reap(std::vector<gio::Done>* done, gio::u64) override {
    for (gio::Op* op : under_way_) {
      const uint32_t status = script[std::min(handed_over++, script.size() - 1)];
      const long long moved =
          op->kind == gio::OpKind::kFlush ? 0 : static_cast<long long>(op->nbytes);
      done->push_back({op, status == 0 ? moved : gio::result_of_status(status)});
    }
    under_way_.clear();
  }
  void cancel() override {}
  void wake() override {}
  gio::ExecutorKind kind() const override { return gio::kExecutorPassthrough; }

 private:
  std::vector<gio::Op*> under_way_;
};

struct Rings {
  alignas(4096) char data[4096] = {};
  alignas(4096) gio::Sqe sq[4] = {};
  alignas(4096) gio::Cqe cq[4] = {};
  uint32_t sq_doorbell = 0, cq_doorbell = 0, marks[4] = {}, cid_free = 7, completions[4] = {};
  gio::QueuePair pair = {};
};

template <typename T>
uint64_t address(T* place) {
  return reinterpret_cast<uint64_t>(place);
}

}  // namespace

namespace gio {

std::unique_ptr<Executor> make_passthrough_executor(const ExecutorConfig&, int* error) {
  *error = 0;
  return std::make_unique<Scripted>();
}

}  // namespace gio

int main() {
  static Rings rings;
  gio::QueuePair& pair = rings.pair;
  pair.sq = address(rings.sq);
  pair.cq = address(rings.cq);
  pair.sq_doorbell = address(&rings.sq_doorbell);
  pair.cq_doorbell = address(&rings.cq_doorbell);
  pair.marks = address(rings.marks);
  pair.cid_free = address(&rings.cid_free);
  pair.completions = address(rings.completions);
  pair.depth = 4;
  const int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  gio::FileNamespace file = {fd, -1, gio::kFileDirect, 1, 8, 4, 4096};
  gio::FileConfig config = {address(&file), 1, 12, 4096, 4096, 4, gio::kExecutorPassthrough, 1, -1};
  gio::FileController controller;
  if (controller.open(config) != 0 || controller.attach(pair) != 0) return 1;
  if (gio_controller_register(&controller, address(rings.data), sizeof rings.data) != 0) return 1;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    uint32_t opcode = 0;
    words >> opcode;
    script.clear();
    for (uint32_t status = 0; words >> status;) script.push_back(status);
    handed_over = 0;
    const uint32_t cid = gio_qp_cid_acquire(&pair);
    gio::Sqe sqe = {};
    sqe.cdw0 = gio::make_cdw0(opcode, 0, cid);
    sqe.nsid = 1;
    sqe.dptr[0] = opcode == gio::kFlush ? 0 : address(rings.data);
    gio_qp_sq_enqueue(&pair, &sqe);
    gio_qp_sq_ring(&pair);
    for (int turn = 0; turn < 1000 && gio_qp_cq_reap(&pair, 1) == 0; ++turn) controller.service(0);
    const uint32_t word = gio_qp_completion(&pair, cid);
    gio_qp_cid_release(&pair, cid);
    std::cout << (word & ~gio::kCompleted) << " " << handed_over << std::endl;
    if ((word & gio::kCompleted) == 0) return 1;
  }
  close(fd);
  return 0;
}
