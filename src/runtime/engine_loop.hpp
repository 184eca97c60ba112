// The thread that steps an engine, for servers: sleeps when nothing is to be done.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/engine.hpp"

namespace statepack {

/// Owns the thread that calls Engine::step(). While it lives, nobody else steps the engine. All
/// functions may be called from any thread; drain() and stop() not from callbacks. Callbacks and
/// posted functions run on the loop's thread and must not throw.
class EngineLoop {
 public:
  using Clock = std::chrono::steady_clock;

  explicit EngineLoop(Engine& engine);  ///< starts the thread; `engine` must outlive the loop
  ~EngineLoop();                        ///< stop()
  EngineLoop(const EngineLoop&) = delete;
  EngineLoop& operator=(const EngineLoop&) = delete;

  /// Engine::submit(). Errors: as there; kInterrupted once drain() or stop() was called.
  Result<RequestId> submit(Request request, TokenCallback callback);
  void cancel(RequestId id);  ///< Engine::cancel()

  /// Runs `task` on the loop's thread between two steps, where everything of the engine may be
  /// called; returns at once. Tasks posted before stop() all run. Errors: kInterrupted after it.
  Status post(std::function<void()> task);
  /// post() and wait for the end. From the loop's own thread it runs `task` in place.
  Status call(const std::function<void()>& task);

  /// Admits nothing more and waits until the engine is idle; at `deadline` the rest is cancelled
  /// (each request's last event says so). True when every request came to its own end. The loop
  /// goes on for posted tasks.
  bool drain(Clock::time_point deadline);
  /// Cancels what is left, waits for the thread to end. Called again it does nothing.
  void stop();

  bool accepting() const;
  /// What the last failed step said; ok when none failed. Its requests have ended with that error;
  /// the loop goes on.
  Status last_error() const;

 private:
  void run();
  void signal();  ///< under mutex_

  Engine& engine_;
  mutable std::mutex mutex_;      ///< of what follows
  std::condition_variable wake_;  ///< of the loop
  std::condition_variable done_;  ///< of those who wait for it
  std::vector<std::function<void()>> tasks_;
  bool accepting_ = true;
  bool stopping_ = false;
  bool signalled_ = false;  ///< there is something new since the loop last looked
  bool resting_ = false;    ///< the loop found the engine idle and waits
  bool ended_ = false;      ///< the thread has nothing more to do, ever
  Status last_error_;
  std::once_flag joined_;
  std::thread thread_;
};

}  // namespace statepack
