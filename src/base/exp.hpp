// exp and its relatives for loops over many values: branch-free, so that SP_CLONES loops vectorise,
// and plain f32 arithmetic, so that every instruction set gives the same bits.
#pragma once

#include <bit>
#include <cstdint>

namespace statepack {

/// e^x within 2 ulp. Exactly 0 below -87.3 (subnormal results are flushed), +inf above 88.37, NaN
/// for NaN, 1 for 0.
[[gnu::always_inline]] inline float exp_f32(float x) {
  // x = n ln2 + r with |r| <= ln2 / 2; adding 1.5 * 2^23 rounds to the integer n in the low bits.
  const float c = x > 88.5F ? 88.5F : x;
  const float shifted = c * 1.44269504F + 12582912.0F;
  const float n = shifted - 12582912.0F;
  const float r = (c - n * 0.693359375F) + n * 2.12194440e-4F;  // ln2 in two parts (Cody and Waite)
  // Cephes expf: e^r = 1 + r + r^2 p(r).
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const float e = p * (r * r) + r + 1.0F;
  const float scale =
      std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) << 23) + 0x3f800000U);
  return x < -87.3F ? 0.0F : e * scale;
}

[[gnu::always_inline]] inline float sigmoid_f32(float x) { return 1.0F / (1.0F + exp_f32(-x)); }
[[gnu::always_inline]] inline float silu_f32(float x) { return x / (1.0F + exp_f32(-x)); }

}  // namespace statepack
