#include "runtime/logits.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>

#include "base/simd_clones.hpp"

namespace statepack {
namespace {

constexpr std::size_t kLanes =
    16;  // one AVX-512 register of f32; narrower machines use two or four

// exp(y) for y in [-87, 0]: y = n ln 2 + r with |r| <= ln(2)/2, and the polynomial of Cephes' expf
// (S. Moshier, 1989) for exp(r). No branch, so that loops over it vectorise.
inline float exp_nonpositive(float y) {
  const float clamped = y < -87.0F ? -87.0F : y;
  const float shifted = clamped * 1.44269504F + 12582912.0F;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0F;
  float r = clamped - n * 0.693359375F;
  r = r + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  const std::uint32_t exponent = (std::bit_cast<std::uint32_t>(shifted) - 0x4b400000U + 127U) << 23;
  const float value = p * std::bit_cast<float>(exponent);
  return y < -87.0F ? 0.0F : value;
}

SP_CLONES
float max_value(const float* x, std::size_t n, bool* has_nan) {
  float best[kLanes];
  std::uint32_t nan[kLanes] = {};
  std::fill(best, best + kLanes, -std::numeric_limits<float>::infinity());
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t l = 0; l < kLanes; ++l) {
      best[l] = x[i + l] > best[l] ? x[i + l] : best[l];
      nan[l] |= x[i + l] == x[i + l] ? 0U : 1U;
    }
  }
  for (std::size_t l = 0; i + l < n; ++l) {
    best[l] = x[i + l] > best[l] ? x[i + l] : best[l];
    nan[l] |= x[i + l] == x[i + l] ? 0U : 1U;
  }
  float result = best[0];
  std::uint32_t any = nan[0];
  for (std::size_t l = 1; l < kLanes; ++l) {
    result = best[l] > result ? best[l] : result;
    any |= nan[l];
  }
  *has_nan = any != 0;
  return result;
}

// The first i with x[i] == value, or n: whole blocks are passed over without a branch a value.
SP_CLONES
std::size_t find_value(const float* x, std::size_t n, float value) {
  constexpr std::size_t kBlock = 8 * kLanes;
  std::size_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    std::uint32_t hit = 0;
    for (std::size_t l = 0; l < kBlock; ++l) hit |= x[i + l] == value ? 1U : 0U;
    if (hit != 0) break;
  }
  while (i < n && x[i] != value) ++i;
  return i;
}

SP_CLONES
double exp_sum_lanes(const float* x, std::size_t n, float shift, float scale, float* out) {
  double sum[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t l = 0; l < kLanes; ++l) {
      const float e = exp_nonpositive((x[i + l] - shift) * scale);
      out[i + l] = e;
      sum[l] += static_cast<double>(e);
    }
  }
  for (std::size_t l = 0; i + l < n; ++l) {
    const float e = exp_nonpositive((x[i + l] - shift) * scale);
    out[i + l] = e;
    sum[l] += static_cast<double>(e);
  }
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t l = 0; l < width; ++l) sum[l] += sum[l + width];
  }
  return sum[0];
}

SP_CLONES
double weighted_difference_lanes(const float* w, const float* a, const float* b, std::size_t n) {
  double sum[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t l = 0; l < kLanes; ++l) {
      sum[l] += static_cast<double>(w[i + l]) *
                (static_cast<double>(a[i + l]) - static_cast<double>(b[i + l]));
    }
  }
  for (std::size_t l = 0; i + l < n; ++l) {
    sum[l] += static_cast<double>(w[i + l]) *
              (static_cast<double>(a[i + l]) - static_cast<double>(b[i + l]));
  }
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t l = 0; l < width; ++l) sum[l] += sum[l + width];
  }
  return sum[0];
}

}  // namespace

LogitPeak peak(std::span<const float> logits) {
  bool has_nan = false;
  const float value = max_value(logits.data(), logits.size(), &has_nan);
  LogitPeak result;
  result.value = value;
  result.finite = !has_nan && value > -std::numeric_limits<float>::infinity() &&
                  value < std::numeric_limits<float>::infinity();
  if (!has_nan && !logits.empty()) {
    result.index = static_cast<std::int32_t>(find_value(logits.data(), logits.size(), value));
  }
  return result;
}

double exp_sum(std::span<const float> logits, float shift, float scale, float* out) {
  return exp_sum_lanes(logits.data(), logits.size(), shift, scale, out);
}

double weighted_difference(std::span<const float> weights, std::span<const float> a,
                           std::span<const float> b) {
  return weighted_difference_lanes(weights.data(), a.data(), b.data(), weights.size());
}

}  // namespace statepack
