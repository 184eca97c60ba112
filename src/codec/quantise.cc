#include "codec/quantise.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "codec/scale.hpp"

namespace statepack {

SP_CLONES void column_peaks(const float* __restrict X, std::int64_t n_rows, std::int64_t n_columns,
                            float* __restrict peak) {
  for (std::int64_t j = 0; j < n_columns; ++j) peak[j] = 0;
  for (std::int64_t i = 0; i < n_rows; ++i) {
    const float* __restrict row = X + i * n_columns;
    for (std::int64_t j = 0; j < n_columns; ++j) {
      const float magnitude = std::fabs(row[j]);
      peak[j] = magnitude > peak[j] ? magnitude : peak[j];
    }
  }
}

SP_CLONES void column_ranges(const float* __restrict X, std::int64_t n_rows, std::int64_t n_columns,
                             float* __restrict low, float* __restrict high) {
  for (std::int64_t j = 0; j < n_columns; ++j) low[j] = high[j] = 0;
  for (std::int64_t i = 0; i < n_rows; ++i) {
    const float* __restrict row = X + i * n_columns;
    for (std::int64_t j = 0; j < n_columns; ++j) {
      const float x = row[j];
      low[j] = x < low[j] ? x : low[j];
      high[j] = x > high[j] ? x : high[j];
    }
  }
}

SP_CLONES float peak_of(const float* x, std::int64_t n) {
  // Magnitudes of floats order as their bits do; an integer maximum may be split over lanes freely.
  std::int32_t peak = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    const std::int32_t bits = std::bit_cast<std::int32_t>(x[j]) & 0x7fffffff;
    peak = bits > peak ? bits : peak;
  }
  return std::bit_cast<float>(peak);
}

SP_CLONES float sum_of_magnitudes(const float* x, std::int64_t n) {
  constexpr int kLanes = 16;
  float lane[kLanes] = {};
  std::int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] += std::fabs(x[j + l]);
  }
  for (int l = 0; j + l < n; ++l) lane[l] += std::fabs(x[j + l]);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0];
}

SP_CLONES void make_scales(const float* __restrict peak, std::int64_t n, float levels,
                           std::uint16_t* __restrict stored, float* __restrict value) {
  for (std::int64_t j = 0; j < n; ++j) {
    const std::uint16_t half = encode_scale(peak[j] / levels);
    stored[j] = half;
    value[j] = f16_to_f32(half);
  }
}

SP_CLONES void load_scales(const std::uint16_t* __restrict stored, std::int64_t n,
                           float* __restrict value) {
  for (std::int64_t j = 0; j < n; ++j) value[j] = f16_to_f32(stored[j]);
}

SP_CLONES void add(const float* __restrict x, std::int64_t n, float* __restrict y) {
  for (std::int64_t j = 0; j < n; ++j) y[j] += x[j];
}

SP_CLONES void multiply(const float* x, const float* y, std::int64_t n, float* out) {
  for (std::int64_t j = 0; j < n; ++j) out[j] = x[j] * y[j];
}

SP_CLONES void dequantise_by_rows(const std::int8_t* __restrict codes,
                                  const float* __restrict scale, std::int64_t n_rows,
                                  std::int64_t n_columns, float* __restrict X) {
  for (std::int64_t i = 0; i < n_rows; ++i) {
    const float s = scale[i];
    for (std::int64_t j = 0; j < n_columns; ++j) {
      X[i * n_columns + j] = s * static_cast<float>(codes[i * n_columns + j]);
    }
  }
}

SP_CLONES void dequantise_rows(const std::int8_t* __restrict codes, const float* __restrict scale,
                               std::int64_t n_rows, std::int64_t n_columns, float* __restrict X) {
  for (std::int64_t i = 0; i < n_rows; ++i) {
    for (std::int64_t j = 0; j < n_columns; ++j) {
      const std::int64_t at = i * n_columns + j;
      X[at] = scale[j] * static_cast<float>(codes[at]);
    }
  }
}

SP_CLONES void quantise_above(const float* __restrict x, const float* __restrict scale,
                              const float* __restrict low, std::int64_t n, int L,
                              std::uint8_t* __restrict codes) {
  const float limit = static_cast<float>(L);
  for (std::int64_t j = 0; j < n; ++j) {
    codes[j] = round_code_u8((x[j] - low[j]) / scale[j], 0.0f, limit);
  }
}

SP_CLONES void restore_above(const std::uint8_t* __restrict codes, const float* __restrict scale,
                             const float* __restrict low, std::int64_t n, float* __restrict x) {
  for (std::int64_t j = 0; j < n; ++j) {
    x[j] = scale[j] * static_cast<float>(codes[j]) + low[j];
  }
}

SP_CLONES void dequantise_rows_affine(const std::uint8_t* __restrict codes,
                                      const float* __restrict scale,
                                      const std::uint8_t* __restrict zero, std::int64_t n_rows,
                                      std::int64_t n_columns, float* __restrict X) {
  for (std::int64_t i = 0; i < n_rows; ++i) {
    for (std::int64_t j = 0; j < n_columns; ++j) {
      const std::int64_t at = i * n_columns + j;
      X[at] = scale[j] * static_cast<float>(static_cast<int>(codes[at]) - zero[j]);
    }
  }
}

}  // namespace statepack
