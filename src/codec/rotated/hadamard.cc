#include "codec/rotated/hadamard.hpp"

#include <cmath>

#include "base/simd_clones.hpp"
#include "codec/philox.hpp"
#include "codec/scale.hpp"

namespace statepack {
namespace {

constexpr float kBound = 0x1p100f;
constexpr std::uint64_t kSeed = 0x526f7461'74653031u;  // "Rotate01"

// One pass of butterflies over pairs `width` apart.
template <int kWidth>
[[gnu::always_inline]] inline void narrow_pass(float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += 2 * kWidth) {
    for (int j = 0; j < kWidth; ++j) {
      const float a = x[i + j], b = x[i + j + kWidth];
      x[i + j] = a + b;
      x[i + j + kWidth] = a - b;
    }
  }
}

SP_CLONES void transform(float* x, std::int64_t n, std::int64_t block, float factor) {
  if (block > 1) narrow_pass<1>(x, n);
  if (block > 2) narrow_pass<2>(x, n);
  if (block > 4) narrow_pass<4>(x, n);
  if (block > 8) narrow_pass<8>(x, n);
  for (std::int64_t width = 16; width < block; width *= 2) {
    for (std::int64_t i = 0; i < n; i += 2 * width) {
      float* const a = x + i;
      float* const b = a + width;
      for (std::int64_t j = 0; j < width; ++j) {
        const float sum = a[j] + b[j], difference = a[j] - b[j];
        a[j] = sum;
        b[j] = difference;
      }
    }
  }
  for (std::int64_t j = 0; j < n; ++j) x[j] *= factor;
}

}  // namespace

SP_CLONES void bound(const float* x, std::int64_t n, float* out) {
  for (std::int64_t j = 0; j < n; ++j) out[j] = clamp_to(x[j], -kBound, kBound);
}

SP_CLONES void flip_signs(const float* x, const float* signs, std::int64_t n, float* out) {
  for (std::int64_t j = 0; j < n; ++j) out[j] = signs[j] * clamp_to(x[j], -kBound, kBound);
}

void hadamard(float* x, std::int64_t n) {
  const std::int64_t block = hadamard_block(n);
  transform(x, n, block, static_cast<float>(1 / std::sqrt(static_cast<double>(block))));
}

std::vector<float> random_signs(std::int64_t n, std::uint64_t stream) {
  std::vector<float> signs(static_cast<std::size_t>(n));
  for (std::int64_t j = 0; j < n; ++j) {
    const auto numbers =
        philox({static_cast<std::uint32_t>(j / 32), static_cast<std::uint32_t>(stream),
                static_cast<std::uint32_t>(stream >> 32), 0},
               {static_cast<std::uint32_t>(kSeed), static_cast<std::uint32_t>(kSeed >> 32)});
    signs[static_cast<std::size_t>(j)] = (numbers[0] >> (j % 32) & 1u) != 0 ? -1.0f : 1.0f;
  }
  return signs;
}

}  // namespace statepack
