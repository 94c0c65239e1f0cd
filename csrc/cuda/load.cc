// File -> two pinned stages -> device: one stage is read by several threads while the other is on
// its way. Pages read are dropped behind (the file may be as large as the memory it is read into).
#include <cuda_runtime.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "../status.h"

using engram::fail;

namespace {

constexpr int64_t kSlice = 4 << 20;  // what one reader takes at a time

struct File {
  int fd;
  explicit File(const char* path) : fd(open(path, O_RDONLY | O_CLOEXEC)) {}
  ~File() {
    if (fd >= 0) close(fd);
  }
};

// An event pair that is destroyed on every way out.
struct Events {
  cudaEvent_t done[2] = {nullptr, nullptr};
  cudaError_t create() {
    for (cudaEvent_t& event : done)
      if (const cudaError_t status = cudaEventCreateWithFlags(&event, cudaEventDisableTiming))
        return status;
    return cudaSuccess;
  }
  ~Events() {
    for (cudaEvent_t event : done)
      if (event != nullptr) cudaEventDestroy(event);
  }
};

// Reads num_bytes at offset into `to`; 0, an errno, or -1 at an early end of the file.
int read_slice(int fd, char* to, int64_t num_bytes, int64_t offset) {
  while (num_bytes > 0) {
    const ssize_t got = pread(fd, to, static_cast<size_t>(num_bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return -1;
    to += got, offset += got, num_bytes -= got;
  }
  return 0;
}

int read_stage(int fd, char* to, int64_t num_bytes, int64_t offset, int num_threads) {
  std::atomic<int64_t> next{0};
  std::atomic<int> failure{0};
  auto reader = [&] {
    for (;;) {
      const int64_t begin = next.fetch_add(kSlice, std::memory_order_relaxed);
      if (begin >= num_bytes || failure.load(std::memory_order_relaxed) != 0) return;
      const int status =
          read_slice(fd, to + begin, std::min(kSlice, num_bytes - begin), offset + begin);
      if (status != 0) failure.store(status, std::memory_order_relaxed);
    }
  };
  std::vector<std::thread> readers;
  for (int i = 1; i < num_threads; ++i) readers.emplace_back(reader);
  reader();
  for (std::thread& thread : readers) thread.join();
  return failure.load();
}

engram_status load_stages(const engram_load_params& p, int fd, const Events& events) {
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  int turn = 0;
  for (int64_t done = 0; done < p.num_bytes; turn ^= 1) {
    const int64_t count = std::min(p.stage_bytes, p.num_bytes - done);
    char* stage = static_cast<char*>(p.stages) + turn * p.stage_bytes;
    ENGRAM_CUDA(cudaEventSynchronize(events.done[turn]));
    const int status = read_stage(fd, stage, count, p.offset + done, p.num_threads);
    if (status != 0)
      return fail(ENGRAM_IO_ERROR, "%s: %s after %lld of %lld bytes", p.path,
                  status < 0 ? "ends early" : strerror(status), static_cast<long long>(done),
                  static_cast<long long>(p.num_bytes));
    ENGRAM_CUDA(cudaMemcpyAsync(static_cast<char*>(p.to) + done, stage, static_cast<size_t>(count),
                                cudaMemcpyHostToDevice, stream));
    ENGRAM_CUDA(cudaEventRecord(events.done[turn], stream));
    if (!p.keep_pages) posix_fadvise(fd, p.offset + done, count, POSIX_FADV_DONTNEED);
    done += count;
    if (p.progress != nullptr && p.progress(p.context, done) != 0)
      return fail(ENGRAM_CANCELLED, "%s: cancelled after %lld bytes", p.path,
                  static_cast<long long>(done));
  }
  return ENGRAM_OK;
}

}  // namespace

engram_status engram_load(const engram_load_params* params) {
  ENGRAM_REQUIRE(params->path != nullptr && params->offset >= 0 && params->num_bytes >= 0,
                 "load: expected a path, offset and num_bytes >= 0");
  ENGRAM_REQUIRE(params->stages != nullptr && params->stage_bytes > 0 && params->num_threads >= 1,
                 "load: expected two stages and at least one thread");
  File file(params->path);
  if (file.fd < 0) return fail(ENGRAM_IO_ERROR, "%s: %s", params->path, strerror(errno));
  posix_fadvise(file.fd, params->offset, params->num_bytes, POSIX_FADV_SEQUENTIAL);
  Events events;
  ENGRAM_CUDA(events.create());
  const engram_status status = load_stages(*params, file.fd, events);
  // The stages belong to the caller again only when no copy reads them any more.
  const cudaError_t drained = cudaStreamSynchronize(static_cast<cudaStream_t>(params->stream));
  if (status != ENGRAM_OK) return status;
  ENGRAM_CUDA(drained);
  return ENGRAM_OK;
}
