// Progress of long work: a bar on stderr when it is a terminal, nothing otherwise; and SIGINT.
#pragma once

#include <cstdint>
#include <string>

namespace statepack {

/// Call advance() as often as convenient; it redraws at most ten times a second, with rate and time
/// left. The destructor ends the line.
class Progress {
 public:
  Progress(std::string label, std::int64_t n_total, bool enabled = true);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void advance(std::int64_t n);
  void note(const std::string& text);  ///< a word behind the bar

 private:
  void draw(bool last);
  std::string label_;
  std::string note_;
  std::int64_t n_total_;
  std::int64_t n_done_ = 0;
  bool enabled_;
  double start_s_;
  double drawn_s_ = 0;
};

/// Installs a SIGINT/SIGTERM handler that sets a flag (a second signal ends the process at once).
void install_interrupt_handler();
/// True once the user asked to stop: long work returns kInterrupted at its next safe point.
bool interrupted();

}  // namespace statepack
