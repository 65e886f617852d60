// Threads that share the pieces of an operation with the one that calls.
//
// Not OpenMP's: a step has six operations a layer that are divided, and where a process has more of OpenMP's threads than
// it has processors (each thread that ever computed has its own) they sleep between two of them, which cost a third
// of a step. And pieces are taken one by one, not dealt out: a thread that the system keeps from running has none.
#pragma once

#include <algorithm>
#include <cstdint>

namespace equipoise {

// Calls run(work, first, last) for pieces of `count` things, of `size` each and the last one perhaps smaller, on up to
// `threads` threads, and returns when all are done. Alone where another thread has the others just then.
void share(int64_t threads, int64_t count, int64_t size, void (*run)(const void*, int64_t, int64_t), const void* work);

// As many threads as torch would use in this one.
int64_t team_threads();

// work(first, last) for pieces of at least `grain` of `count` things; about `pieces` a thread, so that all end at about
// the same time.
template <class Work>
void divide(int64_t count, int64_t grain, const Work& work, int64_t pieces = 4) {
  if (count <= 0) return;
  const int64_t threads = count > grain ? team_threads() : 1;
  if (threads <= 1) return work(0, count);
  const int64_t size = std::max(grain, (count + threads * pieces - 1) / (threads * pieces));
  const auto run = [](const void* given, int64_t first, int64_t last) {
    (*static_cast<const Work*>(given))(first, last);
  };
  share(threads, count, size, run, &work);
}

}  // namespace equipoise
