// The short depthwise causal convolution with SiLU in front of the delta rule.
#pragma once

#include <cstdint>
#include <vector>

namespace statepack {

/// c_t[ch] = SiLU(sum_j w[j][ch] u_{t - kernel + 1 + j}[ch])     (docs/models.md 5.2)
/// History is the last kernel - 1 rows of u, oldest first: [kernel - 1][channels].
class ShortConv {
 public:
  ShortConv() = default;
  /// `weight` as checkpoints store it: [channels][kernel].
  ShortConv(const std::vector<float>& weight, std::int64_t channels, int kernel);

  std::int64_t channels() const { return channels_; }
  int n_history() const { return kernel_ - 1; }
  std::int64_t history_floats() const { return n_history() * channels_; }

  /// One row c [channels] from `kernel` consecutive rows of u, oldest first.
  void apply(const float* u, float* c) const;
  /// One row c from the history and the new u [channels]; the history moves on by one row.
  void step(float* history, const float* u, float* c) const;

 private:
  std::int64_t channels_ = 0;
  int kernel_ = 0;
  std::vector<float> weight_;  // [kernel][channels]
};

}  // namespace statepack
