// Threads made at start that run a piece of host work together.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "../engram.h"

struct engram_workers {
 public:
  explicit engram_workers(int32_t device) : device_(device) {}
  ~engram_workers();

  // Starts up to num_threads; throws std::system_error.
  void start(int32_t num_threads);

  // Runs job(context, 0) on the calling thread and job(context, i) on others, i < count (at most
  // one more than there are threads), and waits for all. One call at a time.
  void run(void (*job)(void* context, int worker), void* context, int count);

  int num_threads() const { return static_cast<int>(threads_.size()); }

 private:
  void serve(int worker);

  const int32_t device_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int count_ = 0, running_ = 0;
  uint64_t turn_ = 0;
  bool is_over_ = false;
};
