#include "runtime/engine_loop.hpp"

#include <utility>

namespace statepack {
namespace {

/// After a step that could do nothing because others hold every slot: nobody tells us when they let
/// go.
constexpr std::chrono::milliseconds kRetry{20};

}  // namespace

EngineLoop::EngineLoop(Engine& engine) : engine_(engine), thread_([this] { run(); }) {}

EngineLoop::~EngineLoop() { stop(); }

Result<RequestId> EngineLoop::submit(Request request, TokenCallback callback) {
  const std::lock_guard lock(mutex_);
  if (!accepting_) {
    return Status(Code::kInterrupted, "the server is shutting down and takes no more requests");
  }
  Result<RequestId> id = engine_.submit(std::move(request), std::move(callback));
  if (id.ok()) signal();
  return id;
}

void EngineLoop::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  engine_.cancel(id);
  signal();
}

Status EngineLoop::post(std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return {Code::kInterrupted, "the engine has been stopped"};
  tasks_.push_back(std::move(task));
  signal();
  return {};
}

Status EngineLoop::call(const std::function<void()>& task) {
  if (std::this_thread::get_id() == thread_.get_id()) {
    task();
    return {};
  }
  bool done = false;  // under mutex_
  SP_RETURN_IF_ERROR(post([&] {
    task();
    const std::lock_guard lock(mutex_);
    done = true;
    done_.notify_all();
  }));
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return done; });
  return {};
}

bool EngineLoop::drain(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  accepting_ = false;
  const auto at_rest = [&] { return ended_ || (resting_ && !signalled_); };
  if (done_.wait_until(lock, deadline, at_rest)) return true;
  engine_.cancel_all();
  signal();
  done_.wait(lock, at_rest);
  return false;
}

void EngineLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    accepting_ = false;
    if (!std::exchange(stopping_, true)) engine_.cancel_all();
    signal();
  }
  std::call_once(joined_, [this] { thread_.join(); });
}

bool EngineLoop::accepting() const {
  const std::lock_guard lock(mutex_);
  return accepting_;
}

Status EngineLoop::last_error() const {
  const std::lock_guard lock(mutex_);
  return last_error_;
}

void EngineLoop::signal() {
  signalled_ = true;
  wake_.notify_one();
}

void EngineLoop::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!signalled_ && engine_.idle()) {
      resting_ = true;
      ended_ = stopping_;
      done_.notify_all();
      if (ended_) return;
      wake_.wait(lock, [&] { return signalled_; });
      resting_ = false;
    }
    signalled_ = false;
    const std::vector<std::function<void()>> tasks = std::exchange(tasks_, {});
    lock.unlock();
    for (const auto& task : tasks) task();
    // Also when the engine is idle: cancellations of requests that have ended must not pile up.
    Status status = engine_.step();
    if (status.code() == Code::kInterrupted) engine_.cancel_all();
    lock.lock();
    if (status.ok()) continue;
    const bool nothing_done = status.code() == Code::kExhausted;
    last_error_ = std::move(status);
    if (nothing_done) wake_.wait_for(lock, kRetry, [&] { return signalled_; });
  }
}

}  // namespace statepack
