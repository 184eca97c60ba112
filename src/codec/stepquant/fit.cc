#include "codec/stepquant/fit.hpp"

#include <cmath>
#include <limits>

#include "base/simd_clones.hpp"
#include "codec/scale.hpp"

namespace statepack::stepquant {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

inline float finite(float x) { return clamp_to(x == x ? x : 0.0f, -kLargest, kLargest); }
inline float larger(float a, float b) { return a > b ? a : b; }

// enc(y): sign(y) * (|y| >= 2 ? 3 : 1), with sign(0) = +1.
inline float signed_level(float y) {
  const float magnitude = std::fabs(y) >= 2.0f ? 3.0f : 1.0f;
  return y < 0.0f ? -magnitude : magnitude;
}

}  // namespace

SP_CLONES float mean_abs(const float* x, std::int64_t n) {
  float lane[16] = {};
  const std::int64_t n_whole = n / 16 * 16;
  for (std::int64_t j = 0; j < n_whole; j += 16) {
    for (int l = 0; l < 16; ++l) lane[l] += std::fabs(finite(x[j + l]));
  }
  for (std::int64_t j = n_whole; j < n; ++j) lane[j - n_whole] += std::fabs(finite(x[j]));
  for (int width = 8; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0] / static_cast<float>(n);
}

SP_CLONES void normalise(const float* __restrict x, std::int64_t n, float divisor,
                         float* __restrict y, float* __restrict peak) {
  for (std::int64_t j = 0; j < n; ++j) {
    y[j] = finite(x[j]) / divisor;
    peak[j] = larger(peak[j], std::fabs(y[j]));
  }
}

SP_CLONES void accumulate(const float* __restrict y, const float* __restrict c0, std::int64_t n,
                          float Q, float weight, float* __restrict num, float* __restrict den) {
  for (std::int64_t j = 0; j < n; ++j) {
    const float z = round_code(y[j] / c0[j], -Q, Q);
    num[j] += weight * z * y[j];
    den[j] += weight * z * z;
  }
}

SP_CLONES void accumulate_signed(const float* __restrict y, const float* __restrict c0,
                                 std::int64_t n, float weight, float* __restrict num,
                                 float* __restrict den) {
  for (std::int64_t j = 0; j < n; ++j) {
    const float z = signed_level(y[j] / c0[j]);
    num[j] += weight * z * y[j];
    den[j] += weight * z * z;
  }
}

SP_CLONES void fit_column_scales(const float* __restrict num, const float* __restrict den,
                                 std::int64_t n, std::uint16_t* __restrict half,
                                 float* __restrict c) {
  for (std::int64_t j = 0; j < n; ++j) {
    const float fitted = num[j] / den[j];  // 0 / 0 in a column of zeros is thrown away
    half[j] = encode_scale(den[j] > 0 ? fitted : c[j]);
    c[j] = f16_to_f32(half[j]);
  }
}

SP_CLONES void encode(const float* __restrict y, const float* __restrict c, std::int64_t n, float Q,
                      std::uint8_t* __restrict u) {
  const auto offset = static_cast<std::uint8_t>(Q);
  for (std::int64_t j = 0; j < n; ++j) {
    u[j] = static_cast<std::uint8_t>(round_code_u8(y[j] / c[j], -Q, Q) + offset);
  }
}

SP_CLONES void encode_signed(const float* __restrict y, const float* __restrict c, std::int64_t n,
                             std::uint8_t* __restrict u) {
  for (std::int64_t j = 0; j < n; ++j) {
    u[j] = static_cast<std::uint8_t>(static_cast<int>(signed_level(y[j] / c[j]) + 3.0f) / 2);
  }
}

SP_CLONES void restore(const std::uint8_t* __restrict u, const float* __restrict c, std::int64_t n,
                       float scale, float step, float offset, float* __restrict x) {
  for (std::int64_t j = 0; j < n; ++j) {
    x[j] = scale * c[j] * (step * static_cast<float>(u[j]) - offset);
  }
}

SP_CLONES void saturate(const float* __restrict x, std::int64_t n, std::uint16_t* __restrict half) {
  for (std::int64_t j = 0; j < n; ++j) {
    half[j] = saturate_to_f16(finite(x[j]));
  }
}

}  // namespace statepack::stepquant
