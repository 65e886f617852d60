// See team.h.
#include "team.h"

#include <ATen/Parallel.h>
#include <immintrin.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

namespace equipoise {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread looks for the next operation before it sleeps: longer than what a step does between two of them,
// shorter than what lies between two steps.
constexpr auto kLooking = std::chrono::microseconds(30);

struct Job {
  void (*const run)(const void*, int64_t, int64_t);
  const void* const work;
  const int64_t count, size, threads;
  std::atomic<int64_t> next{0};

  void take_pieces() {
    for (int64_t first; (first = next.fetch_add(size, std::memory_order_relaxed)) < count;) {
      run(work, first, std::min(first + size, count));
    }
  }
};

// One caller's job at a time. Helpers are counted while they may look at it, so that the caller, which takes pieces too
// and withdraws the job when there are none left, waits for those alone that have one: never for a helper that sleeps.
class Team {
 public:
  // Lives as long as the process: helpers are never ended. A forked process has none of them, and begins anew.
  static Team& of_process() {
    static Team* team = new Team;
    static const int forked = pthread_atfork(nullptr, nullptr, [] { team = new Team; });
    (void)forked;
    return *team;
  }

  bool do_together(Job& job) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return false;
    try {
      for (; helpers_ + 1 < job.threads; ++helpers_) std::thread([this, number = helpers_] { help(number); }).detach();
    } catch (const std::system_error&) {  // no more threads to be had: those there are share the pieces
    }
    job_.store(&job);
    calls_.fetch_add(1);
    calls_.notify_all();
    job.take_pieces();
    job_.store(nullptr);
    while (looking_.load() != 0) _mm_pause();
    return true;
  }

 private:
  void help(int64_t number) {
    pthread_setname_np(pthread_self(), "kernels");
    for (uint32_t seen = 0;;) {
      seen = next_call(seen);
      looking_.fetch_add(1);
      Job* const job = job_.load();
      if (job && number + 1 < job->threads) job->take_pieces();
      looking_.fetch_sub(1);
    }
  }

  uint32_t next_call(uint32_t seen) const {
    const auto until = Clock::now() + kLooking;
    do {
      for (int i = 0; i < 64; ++i, _mm_pause()) {
        if (const uint32_t calls = calls_.load(std::memory_order_relaxed); calls != seen) return calls;
      }
    } while (Clock::now() < until);
    calls_.wait(seen);
    return calls_.load();
  }

  std::mutex mutex_;
  int64_t helpers_ = 0;
  alignas(64) std::atomic<uint32_t> calls_{0};
  alignas(64) std::atomic<Job*> job_{nullptr};
  alignas(64) std::atomic<int64_t> looking_{0};
};

}  // namespace

int64_t team_threads() { return at::get_num_threads(); }

void share(int64_t threads, int64_t count, int64_t size, void (*run)(const void*, int64_t, int64_t), const void* work) {
  Job job{run, work, count, size, threads};
  if (!Team::of_process().do_together(job)) run(work, 0, count);
}

}  // namespace equipoise
