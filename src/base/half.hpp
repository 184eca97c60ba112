// IEEE half and bfloat16 by bit arithmetic: the same bits on every machine and compiler.
#pragma once

#include <bit>
#include <cstdint>

namespace statepack {

/// Round to nearest, ties to even; NaN stays NaN (quiet).
inline std::uint16_t f32_to_bf16(float x) {
  std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((u >> 16) | 0x40u);
  u += 0x7fffu + ((u >> 16) & 1u);
  return static_cast<std::uint16_t>(u >> 16);
}

inline float bf16_to_f32(std::uint16_t h) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16);
}

/// Exact, subnormals included. Branch-free so that loops over it vectorise.
inline float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t em = static_cast<std::uint32_t>(h & 0x7fffu) << 13;
  // Place exponent and mantissa in an f32 with a bias of 15, then rescale by 2^112: exact for
  // normals and subnormals. Inf and NaN get the f32 exponent by hand.
  const float scaled = std::bit_cast<float>(em) * 0x1p112f;
  const std::uint32_t special = em | 0x7f800000u;
  const std::uint32_t bits = em >= 0x0f800000u ? special : std::bit_cast<std::uint32_t>(scaled);
  return std::bit_cast<float>(bits | sign);
}

/// Round to nearest, ties to even; overflow gives Inf, NaN stays NaN (quiet).
inline std::uint16_t f32_to_f16(float x) {
  const std::uint32_t u = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (u >> 16) & 0x8000u;
  const std::uint32_t a = u & 0x7fffffffu;
  std::uint32_t h;
  if (a > 0x7f800000u) {
    h = 0x7e00u;
  } else if (a >= 0x477ff000u) {  // rounds to 65536 or more
    h = 0x7c00u;
  } else if (a < 0x38800000u) {  // subnormal half: let an f32 addition do the rounding
    const float sub = std::bit_cast<float>(a) + 0.5f;
    h = std::bit_cast<std::uint32_t>(sub) - 0x3f000000u;
  } else {
    h = (a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
  }
  return static_cast<std::uint16_t>(h | sign);
}

}  // namespace statepack
