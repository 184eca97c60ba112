#include "codec/klt/fit.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "codec/scale.hpp"

namespace statepack::klt {
namespace {

// The half next to a column scale. Unlike other scales it may be 0: a column that small restores to
// 0, which is nearer than half a step of the smallest half.
inline std::uint16_t column_half(float x) {
  return static_cast<std::uint16_t>(magnitude_to_f16(clamp_to(x, 0.0f, kMaxScale)));
}

}  // namespace

float granular(Quantiser q, int factor) {
  const float step = kRowFactors[static_cast<std::size_t>(factor)] * q.step;
  return step * step / 12;
}

SP_CLONES void normalise(const float* __restrict z, std::int64_t n, float inverse_r,
                         float inverse_limit, float* __restrict y, float* __restrict sum,
                         float* __restrict most) {
  for (std::int64_t j = 0; j < n; ++j) {
    y[j] = z[j] * inverse_r;
    sum[j] += y[j] * y[j];
    const float beyond = std::fabs(y[j]) * inverse_limit;
    most[j] = beyond > most[j] ? beyond : most[j];
  }
}

SP_CLONES void first_column_scales(const float* __restrict sum, const float* __restrict most,
                                   std::int64_t n, float n_rows, float* __restrict c0,
                                   float* __restrict inverse) {
  for (std::int64_t j = 0; j < n; ++j) {
    const float rms = std::sqrt(sum[j] / n_rows);
    c0[j] = f16_to_f32(column_half(most[j] > rms ? most[j] : rms));
    inverse[j] = c0[j] > 0 ? 1 / c0[j] : 0.0f;
  }
}

float add_parts(const float* p) {
  float s[4];
  for (int l = 0; l < 4; ++l) s[l] = (p[l] + p[l + 8]) + (p[l + 4] + p[l + 12]);
  return (s[0] + s[1]) + (s[2] + s[3]);
}

float squares(const float* c, std::int64_t n) {
  float parts[kSumParts] = {};
  for (std::int64_t j = 0; j < n; ++j) parts[j % kSumParts] += c[j] * c[j];
  return add_parts(parts);
}

int choose_factor(const float* y, const float* c, std::int64_t n, Quantiser q, float c_squares) {
  int best = 0;
  float least = std::numeric_limits<float>::infinity();
  for (int f = 0; f < static_cast<int>(kRowFactors.size()); ++f) {
    const float L = kRowFactors[static_cast<std::size_t>(f)] * reach(q);
    float parts[kSumParts] = {};
    for (std::int64_t j = 0; j < n; ++j) {
      const float over = std::fabs(y[j]) - L * c[j];
      parts[j % kSumParts] += over > 0 ? over * over : 0.0f;
    }
    const float error = add_parts(parts) + granular(q, f) * c_squares;
    if (error < least) {
      least = error;
      best = f;
    }
  }
  return best;
}

SP_CLONES void quantise(const float* __restrict y, const float* __restrict inverse, std::int64_t n,
                        Quantiser q, float weight, std::uint8_t* __restrict u,
                        float* __restrict num, float* __restrict den) {
  const float middle = static_cast<float>(1 << (q.bits - 1)), top = 2 * middle - 1;
  const float inverse_step = 1 / q.step;
  for (std::int64_t j = 0; j < n; ++j) {
    // u = clamp(floor(y / (c0 Delta)) + 2^(b-1), 0, 2^b - 1): nothing below 0 reaches the
    // truncation
    const float place = y[j] * inverse[j] * inverse_step + middle;
    const auto code = static_cast<std::int32_t>(clamp_to(place, 0.0f, top));
    const float v = (static_cast<float>(code) - (middle - 0.5f)) * q.step;
    const float wv = weight * v;
    num[j] += wv * y[j];
    den[j] += wv * v;
    u[j] = static_cast<std::uint8_t>(code);
  }
}

SP_CLONES void feed_back(const float* __restrict z, const float* __restrict b,
                         const float* __restrict error, int n, std::int64_t V,
                         float* __restrict t) {
  constexpr std::int64_t kBlock = 64;  // columns whose sums stay in registers
  std::int64_t j = 0;
  for (; j + kBlock <= V; j += kBlock) {
    float lane[kBlock];
    for (std::int64_t l = 0; l < kBlock; ++l) lane[l] = z[j + l];
    for (int m = 0; m < n; ++m) {
      const float* const e = error + m * V + j;
      for (std::int64_t l = 0; l < kBlock; ++l) lane[l] -= b[m] * e[l];
    }
    for (std::int64_t l = 0; l < kBlock; ++l) t[j + l] = lane[l];
  }
  for (; j < V; ++j) {
    t[j] = z[j];
    for (int m = 0; m < n; ++m) t[j] -= b[m] * error[m * V + j];
  }
}

SP_CLONES void quantise_fed(const float* __restrict t, const float* __restrict z,
                            const float* __restrict c, std::int64_t n, Quantiser q, float r,
                            float weight, std::uint8_t* __restrict u, float* __restrict error,
                            float* __restrict cost) {
  const float middle = static_cast<float>(1 << (q.bits - 1)), top = 2 * middle - 1;
  const float unit = r * q.step;
  for (std::int64_t j = 0; j < n; ++j) {
    const float step = unit * c[j];
    const float place = (step > 0 ? t[j] / step : 0.0f) + middle;
    const auto code = static_cast<std::int32_t>(clamp_to(place, 0.0f, top));
    const float restored = step * (static_cast<float>(code) - (middle - 0.5f));
    const float left = restored - t[j];
    error[j] = restored - z[j];
    cost[j] += weight * (left * left);
    u[j] = static_cast<std::uint8_t>(code);
  }
}

SP_CLONES void add_squares(const float* __restrict z, int n, std::int64_t V,
                           float* __restrict sum) {
  constexpr std::int64_t kBlock = 64;  // columns whose sums stay in registers
  std::int64_t j = 0;
  for (; j + kBlock <= V; j += kBlock) {
    float lane[kBlock] = {};
    for (int i = 0; i < n; ++i) {
      const float* const x = z + i * V + j;
      for (std::int64_t l = 0; l < kBlock; ++l) lane[l] += x[l] * x[l];
    }
    for (std::int64_t l = 0; l < kBlock; ++l) sum[j + l] += lane[l];
  }
  for (int i = 0; i < n; ++i) {
    for (std::int64_t l = j; l < V; ++l) sum[l] += z[i * V + l] * z[i * V + l];
  }
}

float rounding_cost(const float* energy, const float* num, const float* den,
                    const std::uint16_t* half, std::int64_t V) {
  double cost = 0;
  for (std::int64_t j = 0; j < V; ++j) {
    const double c = f16_to_f32(half[j]);
    // Of a column that was kept to the last bit the difference may come out below 0.
    cost += std::max(double{energy[j]} - c * (2 * double{num[j]} - c * double{den[j]}), 0.0);
  }
  return static_cast<float>(cost);
}

SP_CLONES void fit_column_scales(const float* __restrict num, const float* __restrict den,
                                 std::int64_t n, std::uint16_t* __restrict half) {
  for (std::int64_t j = 0; j < n; ++j) {
    const float fitted = num[j] / den[j];  // 0 / 0 without rows is thrown away
    half[j] = column_half(den[j] > 0 ? fitted : 0.0f);
  }
}

SP_CLONES void restore(const std::uint8_t* __restrict u, const float* __restrict c, std::int64_t n,
                       float factor, float times, float offset, float* __restrict x) {
  for (std::int64_t j = 0; j < n; ++j) {
    x[j] = factor * c[j] * (times * static_cast<float>(u[j]) - offset);
  }
}

}  // namespace statepack::klt
