#include "codec/leapquant/fit.hpp"

#include <algorithm>
#include <cmath>

#include "base/half.hpp"
#include "base/lane_sum.hpp"
#include "base/simd_clones.hpp"
#include "codec/scale.hpp"

namespace statepack::leapquant {
namespace {

// Below this share of its length, what is left of a column is rounding noise of the projections
// (about 2^-24 sqrt(n)), and without it the state loses less than the halves of the factors do.
// Columns whose squares leave the range of f32 become zero too; halves could not hold them either.
constexpr float kMinRemainder = 1e-5f;

// sum_p key[p * stride] value[p][j] onto (sign +1) or off (sign -1) x[j], for a constant R.
template <int R>
[[gnu::always_inline]] inline void low_rank_row(const float* __restrict key, std::int64_t stride,
                                                const float* __restrict value, std::int64_t n,
                                                float sign, float* __restrict x) {
  float k[std::max(R, 1)] = {};
  for (int p = 0; p < R; ++p) k[p] = sign * key[p * stride];
  for (std::int64_t j = 0; j < n; ++j) {
    float sum = x[j];
    for (int p = 0; p < R; ++p) sum += k[p] * value[p * n + j];
    x[j] = sum;
  }
}

[[gnu::always_inline]] inline void low_rank_row(const float* key, std::int64_t stride,
                                                const float* value, std::int64_t n, int R,
                                                float sign, float* x) {
  switch (R) {
    case 1:
      return low_rank_row<1>(key, stride, value, n, sign, x);
    case 2:
      return low_rank_row<2>(key, stride, value, n, sign, x);
    case 3:
      return low_rank_row<3>(key, stride, value, n, sign, x);
    case 4:
      return low_rank_row<4>(key, stride, value, n, sign, x);
    case 5:
      return low_rank_row<5>(key, stride, value, n, sign, x);
    case 6:
      return low_rank_row<6>(key, stride, value, n, sign, x);
    case 7:
      return low_rank_row<7>(key, stride, value, n, sign, x);
    case 8:
      return low_rank_row<8>(key, stride, value, n, sign, x);
    default:
      return;
  }
}

}  // namespace

SP_CLONES void times(const float* X, std::int64_t K, std::int64_t V, const float* Q, int R,
                     float* out) {
  for (std::int64_t i = 0; i < K; ++i) {
    for (int p = 0; p < R; ++p) out[p * K + i] = lane_dot(X + i * V, Q + p * V, V);
  }
}

SP_CLONES void transposed_times(const float* __restrict X, std::int64_t K, std::int64_t V,
                                const float* __restrict A, int R, float* __restrict out) {
  for (std::int64_t j = 0; j < R * V; ++j) out[j] = 0;
  for (std::int64_t i = 0; i < K; ++i) {
    for (int p = 0; p < R; ++p) {
      const float a = A[p * K + i];
      for (std::int64_t j = 0; j < V; ++j) out[p * V + j] += a * X[i * V + j];
    }
  }
}

SP_CLONES void orthonormalise(float* x, std::int64_t n, int R) {
  for (int p = 0; p < R; ++p) {
    float* __restrict column = x + p * n;
    const float before = std::sqrt(lane_dot(column, column, n));
    for (int pass = 0; pass < 2; ++pass) {
      for (int q = 0; q < p; ++q) {
        const float* __restrict other = x + q * n;
        const float along = lane_dot(other, column, n);
        for (std::int64_t j = 0; j < n; ++j) column[j] -= along * other[j];
      }
    }
    const float norm = std::sqrt(lane_dot(column, column, n));
    const float inverse = norm > kMinRemainder * before ? 1.0f / norm : 0.0f;
    for (std::int64_t j = 0; j < n; ++j) column[j] *= inverse;
  }
}

SP_CLONES void round_to_halves(float* __restrict x, std::int64_t n,
                               std::uint16_t* __restrict half) {
  for (std::int64_t j = 0; j < n; ++j) {
    half[j] = saturate_to_f16(x[j]);
    x[j] = f16_to_f32(half[j]);
  }
}

SP_CLONES void residual_row(const float* __restrict x, std::int64_t n, const float* key,
                            std::int64_t stride, const float* value, int R, float* __restrict e) {
  for (std::int64_t j = 0; j < n; ++j) e[j] = x[j];
  low_rank_row(key, stride, value, n, R, -1.0f, e);
}

SP_CLONES void smooth_row(const float* e, std::int64_t n, float scale, float* y, float* peak) {
  for (std::int64_t j = 0; j < n; ++j) {
    y[j] = e[j] / scale;
    const float a = std::fabs(y[j]);
    peak[j] = a > peak[j] ? a : peak[j];
  }
}

SP_CLONES void encode_row(const float* __restrict y, const float* __restrict inv_step,
                          std::int64_t n, float qmax, std::uint8_t* __restrict z) {
  for (std::int64_t j = 0; j < n; ++j) z[j] = round_code_u8(y[j] * inv_step[j], -qmax, qmax);
}

SP_CLONES void pack_planes(const std::uint8_t* __restrict z, std::int64_t n,
                           std::uint8_t* __restrict low, std::uint8_t* __restrict high) {
  const std::int64_t n_quads = n / 4;
  for (std::int64_t q = 0; q < n_quads; ++q) {
    const std::uint32_t a = z[4 * q], b = z[4 * q + 1], c = z[4 * q + 2], d = z[4 * q + 3];
    low[2 * q] = static_cast<std::uint8_t>((a & 15) | (b << 4));
    low[2 * q + 1] = static_cast<std::uint8_t>((c & 15) | (d << 4));
    high[q] = static_cast<std::uint8_t>((a >> 4 & 3) | (b >> 2 & 12) | (c & 48) | (d << 2 & 192));
  }
  for (std::int64_t e = 4 * n_quads; e < n; ++e) {
    if (e % 2 == 0) low[e / 2] = 0;
    if (e % 4 == 0) high[e / 4] = 0;
    low[e / 2] = static_cast<std::uint8_t>(low[e / 2] | (z[e] & 15) << (e % 2 * 4));
    high[e / 4] = static_cast<std::uint8_t>(high[e / 4] | (z[e] >> 4 & 3) << (e % 4 * 2));
  }
}

SP_CLONES void unpack_planes(const std::uint8_t* __restrict low,
                             const std::uint8_t* __restrict high, std::int64_t n,
                             std::uint8_t* __restrict z) {
  const auto join = [](std::uint32_t four, std::uint32_t two) {  // (c ^ 32) - 32 extends the sign
    return static_cast<std::uint8_t>((((four & 15) | (two & 3) << 4) ^ 32) - 32);
  };
  const std::int64_t n_quads = n / 4;
  for (std::int64_t q = 0; q < n_quads; ++q) {
    const std::uint32_t ab = low[2 * q], cd = low[2 * q + 1], h = high[q];
    z[4 * q] = join(ab, h);
    z[4 * q + 1] = join(ab >> 4, h >> 2);
    z[4 * q + 2] = join(cd, h >> 4);
    z[4 * q + 3] = join(cd >> 4, h >> 6);
  }
  for (std::int64_t e = 4 * n_quads; e < n; ++e) {
    z[e] = join(static_cast<std::uint32_t>(low[e / 2]) >> (e % 2 * 4),
                static_cast<std::uint32_t>(high[e / 4]) >> (e % 4 * 2));
  }
}

SP_CLONES void add_error_row(const float* __restrict y, const float* __restrict inv_step,
                             const float* __restrict step, std::int64_t n, float qmax, float weight,
                             float* __restrict error) {
  for (std::int64_t j = 0; j < n; ++j) {
    const float e = weight * (y[j] - step[j] * round_code(y[j] * inv_step[j], -qmax, qmax));
    error[j] += e * e;
  }
}

SP_CLONES void restore_row(const std::uint8_t* __restrict z, float scale,
                           const float* __restrict step, std::int64_t n, const float* key,
                           std::int64_t stride, const float* value, int R, float* __restrict x) {
  for (std::int64_t j = 0; j < n; ++j) {
    x[j] = scale * static_cast<float>(static_cast<std::int8_t>(z[j])) * step[j];
  }
  low_rank_row(key, stride, value, n, R, 1.0f, x);
}

}  // namespace statepack::leapquant
