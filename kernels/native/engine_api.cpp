// The C functions of the host engine, as tutti/gio_uring/_native.py declares them.
#include "engine.h"
#include "no_throw.h"

using gio::Engine;
using gio::Job;

extern "C" {

int gio_engine_create(const gio::EngineConfig* config, Engine** out) {
  const auto* threads = gio::at<gio::ServiceThreadConfig>(config->threads);
  const auto controller = [=](gio::u32 i) {
    return gio::at<gio::Controller>(threads[i].controller);
  };
  gio::u32 claimed = 0;
  while (claimed < config->n_threads && controller(claimed)->claim()) {
    ++claimed;  // until the service thread ends
  }
  const int result = claimed < config->n_threads ? -EBUSY : gio::without_exceptions([=] {
    *out = new Engine(*config);
    return 0;
  });
  while (result != 0 && claimed-- > 0) controller(claimed)->unclaim();
  return result;
}
int gio_engine_submit(Engine* engine, const gio::JobConfig* config, Job** out) {
  return gio::without_exceptions([=] { return engine->submit(*config, out); });
}
int gio_job_wait_layers(Engine* engine, Job* job, uint32_t layers, uint64_t timeout_ns) {
  return engine->wait_layers(job, layers, timeout_ns);
}
int gio_job_wait_released(Engine* engine, Job* job, uint64_t timeout_ns) {
  return engine->wait_released(job, timeout_ns);
}
void gio_job_open_gate(Engine* engine, Job* job) { engine->open_gate(job); }
int gio_job_grant(Engine* engine, Job* job, uint32_t layers, uint32_t report_at) {
  return gio::without_exceptions([=] {
    engine->grant(job, layers, report_at);
    return 0;
  });
}
void gio_job_cancel(Engine* engine, Job* job) { engine->cancel(job); }
void gio_job_report(const Job* job, gio::JobReport* out) {
  *out = gio::JobReport{job->submitted_ns, job->done_ns,  job->layers_ready,
                        job->done,         job->released, job->status};
}
void gio_job_free(Job* job) { delete job; }
uint64_t gio_engine_next(Engine* engine, uint64_t timeout_ns) {
  return engine->next_released(timeout_ns);
}
int gio_engine_reset(Engine* engine, uint64_t timeout_ns) { return engine->reset(timeout_ns); }
int gio_engine_stop(Engine* engine, uint64_t timeout_ns) { return engine->stop(timeout_ns); }
void gio_engine_stats(const Engine* engine, gio::EngineStats* out) { *out = engine->stats(); }
int gio_engine_window(const Engine* engine, uint32_t thread, gio::WindowStats* out) {
  return engine->window_stats(thread, out) ? 0 : -1;
}
void gio_engine_destroy(Engine* engine) { delete engine; }
}
