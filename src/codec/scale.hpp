// Scales as they are stored, and the one rounding that every quantiser uses.
//
// All functions are branch-free, so that loops over them vectorise to the same bits on every ISA.
#pragma once

#include <bit>
#include <cstdint>

#include "base/half.hpp"

namespace statepack {

/// Stored scales lie in [2^-24, 65504]: the positive finite halves. A zero group gets the smallest
/// one, so quantisers never divide by zero; only a page that was never written holds scale 0.
inline constexpr float kMinScale = 0x1p-24f;
inline constexpr float kMaxScale = 65504.0f;

/// x clamped to [lo, hi]; NaN gives lo.
inline float clamp_to(float x, float lo, float hi) {
  const float above = x > lo ? x : lo;
  return above < hi ? above : hi;
}

/// The f16 bits of a magnitude in [0, 65504], rounded to nearest, ties to even.
inline std::uint32_t magnitude_to_f16(float x) {
  const std::uint32_t a = std::bit_cast<std::uint32_t>(x);
  // Below 2^-14 halves are multiples of 2^-24: adding 1/2 leaves exactly those bits of an f32.
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(x + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
  return a < 0x38800000u ? subnormal : normal;
}

/// The f16 bits of any finite value, beyond +-65504 the largest half.
inline std::uint16_t saturate_to_f16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const float magnitude = std::bit_cast<float>(u & 0x7fffffffu);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  return static_cast<std::uint16_t>(
      magnitude_to_f16(magnitude < kMaxScale ? magnitude : kMaxScale) | sign);
}

/// The f16 bits of a scale: clamped to [2^-24, 65504], then rounded to nearest, ties to even.
inline std::uint16_t encode_scale(float x) {
  return static_cast<std::uint16_t>(magnitude_to_f16(clamp_to(x, kMinScale, kMaxScale)));
}

/// The value that a stored scale has: quantise with this, never with the scale before rounding.
inline float h16(float x) { return f16_to_f32(encode_scale(x)); }

/// Round to nearest, ties to even, for |x| <= 2^22: the sum has a unit in the last place of 1.
inline float rne(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

/// clamp(rne(x), lo, hi) for integers lo <= hi within +-2^22 and any x but NaN: clamping first does
/// not change it, and brings x into the range of rne.
inline float round_code(float x, float lo, float hi) { return rne(clamp_to(x, lo, hi)); }

/// The same as an int8 bit pattern: below the sum's exponent its mantissa is the two's complement.
inline std::uint8_t round_code_u8(float x, float lo, float hi) {
  return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(clamp_to(x, lo, hi) + 0x1.8p23f));
}

}  // namespace statepack
