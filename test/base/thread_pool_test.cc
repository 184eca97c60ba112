#include "base/thread_pool.hpp"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

namespace statepack {
namespace {

TEST(ThreadPool, EveryIterationRunsOnce) {
  for (const int n_threads : {1, 2, 3, 8}) {
    ThreadPool pool(n_threads);
    EXPECT_EQ(pool.n_threads(), n_threads);
    for (const int n : {0, 1, 2, 3, 31, 1000, 100003}) {
      std::vector<int> count(static_cast<std::size_t>(n), 0);
      std::atomic<bool> worker_in_range{true};
      pool.parallel_for(n, [&](std::int64_t i, int worker) {
        ++count[static_cast<std::size_t>(i)];
        if (worker < 0 || worker >= n_threads) worker_in_range = false;
      });
      EXPECT_EQ(std::accumulate(count.begin(), count.end(), 0), n);
      EXPECT_TRUE(std::all_of(count.begin(), count.end(), [](int c) { return c == 1; }));
      EXPECT_TRUE(worker_in_range);
    }
  }
}

TEST(ThreadPool, NegativeCountRunsNothing) {
  ThreadPool pool(2);
  bool ran = false;
  pool.parallel_for(-5, [&](std::int64_t, int) { ran = true; });
  EXPECT_FALSE(ran);
}

// A worker's number is its own: scratch indexed by it needs no lock (ThreadSanitizer watches).
TEST(ThreadPool, WorkerNumbersAreExclusive) {
  ThreadPool pool(4);
  std::vector<std::int64_t> sum(4, 0);
  for (int round = 0; round < 2000; ++round) {
    pool.parallel_for(
        16, [&](std::int64_t i, int worker) { sum[static_cast<std::size_t>(worker)] += i; });
  }
  EXPECT_EQ(std::accumulate(sum.begin(), sum.end(), std::int64_t{0}), 2000 * 120);
}

// The caller sees all that the workers wrote, also when workers sleep between the loops.
TEST(ThreadPool, ResultsAreVisibleAfterEachOfManyLoops) {
  ThreadPool pool(3);
  std::vector<int> data(64, 0);
  for (int round = 1; round <= 3000; ++round) {
    pool.parallel_for(64, [&](std::int64_t i, int) { ++data[static_cast<std::size_t>(i)]; });
    for (const int value : data) ASSERT_EQ(value, round);
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST(ThreadPool, NestedLoopsRunInlineOnTheSameWorker) {
  ThreadPool pool(4);
  std::atomic<int> n_inner{0};
  std::atomic<bool> same{true};
  pool.parallel_for(32, [&](std::int64_t, int worker) {
    const auto thread = std::this_thread::get_id();
    pool.parallel_for(5, [&](std::int64_t, int inner) {
      if (inner != worker || std::this_thread::get_id() != thread) same = false;
      pool.parallel_for(1, [&](std::int64_t, int) { ++n_inner; });
    });
  });
  EXPECT_EQ(n_inner, 32 * 5);
  EXPECT_TRUE(same);
}

TEST(ThreadPool, PoolsNestInOneAnother) {
  ThreadPool outer(2);
  ThreadPool inner(2);
  std::atomic<int> n{0};
  outer.parallel_for(8, [&](std::int64_t, int) {
    inner.parallel_for(8, [&](std::int64_t, int) { ++n; });
    outer.parallel_for(2, [&](std::int64_t, int) { ++n; });  // still known as a nested call
  });
  EXPECT_EQ(n, 8 * 8 + 8 * 2);
}

TEST(ThreadPool, CallersFromManyThreadsTakeTurns) {
  ThreadPool pool(3);
  std::vector<int> scratch(3, 0);
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        pool.parallel_for(
            10, [&](std::int64_t, int worker) { ++scratch[static_cast<std::size_t>(worker)]; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(std::accumulate(scratch.begin(), scratch.end(), 0), 4 * 300 * 10);
}

TEST(ThreadPool, SlowIterationDoesNotHoldUpTheOthers) {
  ThreadPool pool(2);
  std::atomic<int> n_quick{0};
  // Iteration 0 waits for all others: only a dynamic distribution lets them finish first.
  pool.parallel_for(20, [&](std::int64_t i, int) {
    if (i > 0) {
      ++n_quick;
      return;
    }
    while (n_quick < 19) std::this_thread::yield();
  });
  EXPECT_EQ(n_quick, 19);
}

TEST(ThreadPool, ManyPoolsStartAndStop) {
  for (int round = 0; round < 50; ++round) {
    ThreadPool pool(4);
    if (round % 2 == 0) pool.parallel_for(4, [](std::int64_t, int) {});
  }
}

TEST(ThreadPool, ZeroTakesTheCoresOfTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_GE(ThreadPool().n_threads(), 1);
  EXPECT_LE(ThreadPool().n_threads(), CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &before)) ++cpu;
  CPU_SET(cpu, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(ThreadPool().n_threads(), 1);
  ASSERT_EQ(::sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace
}  // namespace statepack
