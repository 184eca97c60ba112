#include "base/thread_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <fstream>
#include <limits>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/check.hpp"

namespace statepack {
namespace {

constexpr int kMaxThreads = 1024;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

/// The cores that the control group's quota (cpu.max of it and its parents) pays for.
int cgroup_cores() {
  std::ifstream membership("/proc/self/cgroup");
  std::string line;
  std::string group;
  while (std::getline(membership, line)) {
    if (line.starts_with("0::")) group = line.substr(3);
  }
  int n_cores = std::numeric_limits<int>::max();
  for (;;) {
    std::ifstream limit("/sys/fs/cgroup" + group + "/cpu.max");
    double quota_us = 0;  // the word "max" leaves it 0
    double period_us = 0;
    if (limit >> quota_us >> period_us && quota_us > 0 && period_us > 0) {
      const double cores = std::max(1.0, quota_us / period_us);
      if (cores < n_cores) n_cores = static_cast<int>(cores);
    }
    if (group.empty() || group == "/") return n_cores;
    group.resize(std::min(group.rfind('/'), group.size()));
  }
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int n_affinity = ::sched_getaffinity(0, sizeof set, &set) == 0
                             ? CPU_COUNT(&set)
                             : static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, std::min(n_affinity, cgroup_cores()));
}

}  // namespace

// One loop at a time. The caller publishes it by opening the gate under a new number; workers that
// see the gate open enter it, take chunks from a shared counter and leave. When the counter runs
// out the caller shuts the gate and waits for those inside. A worker that was asleep and comes late
// finds the gate shut and is not waited for, so short loops never pay for a slow wake-up.
struct ThreadPool::Impl {
  // The gate: the loop's number in the upper half, then one bit "open", then how many are inside.
  static constexpr std::uint64_t kOpen = std::uint64_t{1} << 31;
  static constexpr std::uint64_t kInside = kOpen - 1;
  static std::uint64_t number(std::uint64_t gate) { return gate >> 32; }

  std::atomic<std::uint64_t> gate{0};
  std::atomic<bool> stopping{false};

  // The loop: written while the gate is shut and empty, read only by those inside.
  const std::function<void(std::int64_t, int)>* fn = nullptr;
  std::int64_t n = 0;
  std::int64_t chunk = 1;
  alignas(64) std::atomic<std::int64_t> next{0};

  // Sleepers announce themselves before they look at the gate for the last time; whoever changes
  // the gate looks at the announcements afterwards. Both sides are sequentially consistent, so one
  // of them sees the other.
  alignas(64) std::atomic<int> n_sleeping{0};
  std::atomic<bool> caller_sleeping{false};
  std::mutex sleep;
  std::condition_variable work_ready;
  std::condition_variable all_left;

  std::mutex one_caller;
  std::vector<std::thread> threads;
  int n_threads = 1;
  int n_spins = 0;

  void run_chunks(int worker) {
    for (;;) {
      const std::int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= n) return;
      const std::int64_t end = std::min(n, begin + chunk);
      for (std::int64_t i = begin; i < end; ++i) (*fn)(i, worker);
    }
  }

  bool news(std::uint64_t seen) const { return number(gate.load()) != seen || stopping.load(); }

  void wait_for_news(std::uint64_t seen) {
    for (int i = 0; i < n_spins; ++i) {
      if (news(seen)) return;
      pause();
    }
    std::unique_lock lock(sleep);
    n_sleeping.fetch_add(1);
    work_ready.wait(lock, [&] { return news(seen); });
    n_sleeping.fetch_sub(1);
  }

  void work(int worker);

  void wait_until_empty() {
    for (int i = 0; i < n_spins; ++i) {
      if ((gate.load(std::memory_order_acquire) & kInside) == 0) return;
      pause();
    }
    std::unique_lock lock(sleep);
    caller_sleeping.store(true);
    all_left.wait(lock, [&] { return (gate.load() & kInside) == 0; });
    caller_sleeping.store(false);
  }
};

namespace {

/// Where this thread is inside a loop, for nested calls.
struct Inside {
  const void* pool = nullptr;
  int worker = 0;
};
thread_local Inside t_inside;

}  // namespace

void ThreadPool::Impl::work(int worker) {
  t_inside = {this, worker};
  std::uint64_t seen = 0;
  for (;;) {
    wait_for_news(seen);
    if (stopping.load()) return;
    std::uint64_t g = gate.load();
    seen = number(g);
    while ((g & kOpen) != 0 && number(g) == seen) {
      if (!gate.compare_exchange_weak(g, g + 1)) continue;
      run_chunks(worker);
      gate.fetch_sub(1);
      if (caller_sleeping.load()) {
        const std::lock_guard lock(sleep);
        all_left.notify_one();
      }
      break;
    }
  }
}

ThreadPool::ThreadPool(int n_threads) : impl_(std::make_unique<Impl>()) {
  SP_CHECK(n_threads >= 0, "a negative number of threads");
  const int n_cores = usable_cores();
  const int n_wanted = std::min(n_threads == 0 ? n_cores : n_threads, kMaxThreads);
  // About 50 microseconds of waiting before sleep: longer than the serial work between two loops of
  // a decode step, shorter than anybody notices. With more threads than cores a spinning thread
  // only keeps a working one from its core.
  impl_->n_spins = n_wanted <= n_cores ? 2000 : 0;
  for (int worker = 1; worker < n_wanted; ++worker) {
    try {
      impl_->threads.emplace_back([impl = impl_.get(), worker] { impl->work(worker); });
    } catch (const std::system_error&) {
      break;  // the system has no more threads to give: fewer do the same work
    }
  }
  impl_->n_threads = static_cast<int>(impl_->threads.size()) + 1;
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(impl_->sleep);
    impl_->stopping.store(true);
  }
  impl_->work_ready.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
}

int ThreadPool::n_threads() const { return impl_->n_threads; }

void ThreadPool::parallel_for(std::int64_t n, const std::function<void(std::int64_t, int)>& fn) {
  Impl& pool = *impl_;
  if (t_inside.pool == &pool) {
    for (std::int64_t i = 0; i < n; ++i) fn(i, t_inside.worker);
    return;
  }
  if (n <= 0) return;
  const std::lock_guard caller(pool.one_caller);
  const Inside outer = t_inside;
  t_inside = {&pool, 0};
  if (n == 1 || pool.n_threads == 1) {
    for (std::int64_t i = 0; i < n; ++i) fn(i, 0);
    t_inside = outer;
    return;
  }
  pool.fn = &fn;
  pool.n = n;
  // Single iterations while they are few; past that, chunks small enough to even out the ends.
  pool.chunk = std::max<std::int64_t>(1, n / (std::int64_t{16} * pool.n_threads));
  pool.next.store(0, std::memory_order_relaxed);
  const std::uint64_t number = (Impl::number(pool.gate.load()) + 1) & 0xffffffffU;
  pool.gate.store(number << 32 | Impl::kOpen);
  if (pool.n_sleeping.load() > 0) {
    const std::lock_guard lock(pool.sleep);
    pool.work_ready.notify_all();
  }
  pool.run_chunks(0);
  pool.gate.fetch_and(~Impl::kOpen);
  pool.wait_until_empty();
  t_inside = outer;
}

}  // namespace statepack
