// Floats of 4 to 8 bits: sign, exponent, mantissa, without infinities; NaN patterns are not
// written.
//
// For biases below f32's. All functions are branch-free, so that loops over them vectorise to the
// same bits on every ISA.
#pragma once

#include <bit>
#include <cstdint>

#include "codec/scale.hpp"

namespace statepack {

template <int kExponentBits, int kMantissaBits, int kBias>
struct MiniFloat {
  static constexpr int kBits = 1 + kExponentBits + kMantissaBits;

  /// The reciprocal of the unit in the last place at magnitude `a`, so that `a` times it is the
  /// significand, in [0, 2^(m+1)).
  static float per_unit(float a) {
    const std::int32_t exponent = std::bit_cast<std::int32_t>(a) >> 23;
    const std::int32_t least = 128 - kBias;  // of the smallest normal
    const std::int32_t field = exponent > least ? exponent : least;
    return std::bit_cast<float>((254 + kMantissaBits - field) << 23);
  }

  /// The bits of significand `q` (a whole number up to 2^(m+1)) at the unit of magnitude `a`: a
  /// carry runs into the exponent as it should.
  static std::uint32_t magnitude(float a, float q) {
    const std::int32_t exponent = std::bit_cast<std::int32_t>(a) >> 23;
    const std::int32_t least = 128 - kBias;
    const std::int32_t above = exponent > least ? exponent - least : 0;
    return static_cast<std::uint32_t>((above << kMantissaBits) + static_cast<std::int32_t>(q));
  }

  static std::uint32_t sign_of(float x) {
    return (std::bit_cast<std::uint32_t>(x) >> 31) << (kBits - 1);
  }
  static float size_of(float x, float largest) {
    const float a = std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0x7fffffffu);
    return a < largest ? a : largest;
  }

  /// Nearest, ties to the even mantissa; beyond +-`largest` (a value of the format) that.
  static std::uint32_t encode(float x, float largest) {
    const float a = size_of(x, largest);
    return sign_of(x) | magnitude(a, rne(a * per_unit(a)));
  }

  /// One of the two neighbours, the upper (in magnitude) with the chance of x's nearness to it.
  /// Random bits are as many as an f32 has behind the mantissa, so that the sum is exact.
  static std::uint32_t encode_either(float x, float largest, std::uint32_t number) {
    constexpr int kRandomBits = 23 - kMantissaBits;
    const float u = static_cast<float>(static_cast<std::int32_t>(number >> (32 - kRandomBits))) *
                    std::bit_cast<float>((127 - kRandomBits) << 23);
    const float a = size_of(x, largest);
    const float y = a * per_unit(a) + u;
    const float nearest = rne(y);
    return sign_of(x) | magnitude(a, nearest > y ? nearest - 1.0f : nearest);
  }

  static float decode(std::uint32_t code) {
    constexpr std::uint32_t kMagnitude = (1u << (kBits - 1)) - 1;
    const float scaled = std::bit_cast<float>((code & kMagnitude) << (23 - kMantissaBits)) *
                         std::bit_cast<float>((254 - kBias) << 23);  // from this bias to f32's
    const std::uint32_t sign = (code >> (kBits - 1)) << 31;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
  }
};

using E4m3 = MiniFloat<4, 3, 7>;   // 448 is the largest; only its all-ones pattern is NaN
using E5m2 = MiniFloat<5, 2, 15>;  // 57344; the exponent of all ones is not finite
using E2m3 = MiniFloat<2, 3, 1>;   // 7.5
using E2m1 = MiniFloat<2, 1, 1>;   // 6
using F16 = MiniFloat<5, 10, 15>;  // 65504

inline constexpr float kMaxE4m3 = 448.0f, kMaxE5m2 = 57344.0f, kMaxE2m3 = 7.5f, kMaxE2m1 = 6.0f;

}  // namespace statepack
