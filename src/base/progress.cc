#include "base/progress.hpp"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <utility>

namespace statepack {
namespace {

std::atomic<bool> g_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "set inside a signal handler");

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// "1:02:03" or "02:03".
std::string clock_text(double seconds) {
  const auto s = static_cast<std::int64_t>(std::clamp(seconds, 0.0, 359999.0));
  char text[32];
  if (s >= 3600) {
    std::snprintf(text, sizeof text, "%d:%02d:%02d", static_cast<int>(s / 3600),
                  static_cast<int>(s / 60 % 60), static_cast<int>(s % 60));
  } else {
    std::snprintf(text, sizeof text, "%02d:%02d", static_cast<int>(s / 60),
                  static_cast<int>(s % 60));
  }
  return text;
}

}  // namespace

Progress::Progress(std::string label, std::int64_t n_total, bool enabled)
    : label_(std::move(label)),
      n_total_(n_total),
      enabled_(enabled && ::isatty(STDERR_FILENO) == 1),
      start_s_(now_s()) {
  if (enabled_) draw(false);
}

Progress::~Progress() {
  if (enabled_) draw(true);
}

void Progress::advance(std::int64_t n) {
  n_done_ += n;
  if (enabled_ && now_s() - drawn_s_ >= 0.1) draw(false);
}

void Progress::note(const std::string& text) {
  note_ = text;
  if (enabled_ && now_s() - drawn_s_ >= 0.1) draw(false);
}

void Progress::draw(bool last) {
  drawn_s_ = now_s();
  const double elapsed_s = drawn_s_ - start_s_;
  const double done = static_cast<double>(n_done_);
  const double total = static_cast<double>(std::max<std::int64_t>(n_total_, 1));
  const double fraction = std::clamp(done / total, 0.0, 1.0);
  const double rate = elapsed_s > 0 ? done / elapsed_s : 0;
  constexpr int kWidth = 24;
  const auto n_full = static_cast<std::size_t>(fraction * kWidth);
  const std::string bar = std::string(n_full, '#') + std::string(kWidth - n_full, '.');
  std::string time = clock_text(elapsed_s);
  if (!last && rate > 0) time += ", " + clock_text((total - done) / rate) + " left";
  // \x1b[K clears what a longer line left behind.
  std::fprintf(stderr, "\r%s [%s] %3d%%  %lld/%lld  %.4g/s  %s%s%s\x1b[K%s", label_.c_str(),
               bar.c_str(), static_cast<int>(100 * fraction), static_cast<long long>(n_done_),
               static_cast<long long>(n_total_), rate, time.c_str(), note_.empty() ? "" : "  ",
               note_.c_str(), last ? "\n" : "");
  std::fflush(stderr);
}

void install_interrupt_handler() {
  struct sigaction action {};
  action.sa_handler = [](int) { g_interrupted.store(true, std::memory_order_relaxed); };
  // SA_RESETHAND: the second signal ends the process. No SA_RESTART: a read that waits for the
  // user returns at once.
  action.sa_flags = SA_RESETHAND;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return g_interrupted.load(std::memory_order_relaxed); }

}  // namespace statepack
