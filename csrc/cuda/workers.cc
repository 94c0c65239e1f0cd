#include "workers.h"

#include <cuda_runtime.h>

#include <memory>
#include <system_error>

#include "../status.h"

void engram_workers::start(int32_t num_threads) {
  for (int i = 1; i <= num_threads; ++i) threads_.emplace_back([this, i] { serve(i); });
}

engram_workers::~engram_workers() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_over_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void engram_workers::run(void (*job)(void*, int), void* context, int count) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    job_ = job, context_ = context, count_ = count;
    running_ = count - 1;
    ++turn_;
  }
  if (count > 1) wake_.notify_all();
  job(context, 0);
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return running_ == 0; });
}

void engram_workers::serve(int worker) {
  cudaSetDevice(device_);  // a failure shows at the first launch
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return is_over_ || turn_ != seen; });
    if (is_over_) return;
    seen = turn_;
    if (worker >= count_) continue;
    void (*const job)(void*, int) = job_;
    void* const context = context_;
    lock.unlock();
    job(context, worker);
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

engram_status engram_workers_create(int32_t num_threads, int32_t device, engram_workers** workers) {
  ENGRAM_REQUIRE(num_threads >= 0 && num_threads <= 64, "workers: expected 0..64 threads, got %d",
                 num_threads);
  auto made = std::make_unique<engram_workers>(device);
  try {
    made->start(num_threads);
  } catch (const std::system_error& error) {
    return engram::fail(ENGRAM_UNSUPPORTED, "workers: cannot start %d threads: %s", num_threads,
                        error.what());
  }
  *workers = made.release();
  return ENGRAM_OK;
}

engram_status engram_workers_destroy(engram_workers* workers) {
  delete workers;
  return ENGRAM_OK;
}
