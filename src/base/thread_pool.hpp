// Worker threads for loops whose iterations do not depend on one another.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace statepack {

/// A fixed set of threads. Results never depend on their number: callers give every iteration its
/// own output and its own fixed order of arithmetic.
class ThreadPool {
 public:
  /// `n_threads` >= 1 counts the calling thread; 0 takes the cores this process may use.
  explicit ThreadPool(int n_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int n_threads() const;

  /// Runs fn(i, worker) for every i in [0, n), worker in [0, n_threads()). Returns when all are
  /// done. `fn` must not throw. A nested call from inside `fn` runs inline on that worker.
  void parallel_for(std::int64_t n, const std::function<void(std::int64_t, int)>& fn);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace statepack
