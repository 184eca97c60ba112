// Sums over one row in sixteen named lanes: they vectorise inside SP_CLONES functions, and their
// order is fixed, so every instruction set gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace statepack {

/// sum_i a[i] b[i], f32: lane l takes i = l mod 16, then the lanes are added pairwise.
[[gnu::always_inline]] inline float lane_dot(const float* a, const float* b, std::int64_t n) {
  typedef float Lanes __attribute__((vector_size(64)));
  Lanes acc = {};
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    Lanes x, y;
    std::memcpy(&x, a + i, sizeof x);
    std::memcpy(&y, b + i, sizeof y);
    acc += x * y;
  }
  float lanes[16];
  std::memcpy(lanes, &acc, sizeof lanes);
  for (std::int64_t l = 0; i + l < n; ++l) lanes[l] += a[i + l] * b[i + l];
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace statepack
