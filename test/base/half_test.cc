// f16 and bf16 against slow definitions: all 65536 halves, and floats around every rounding border.
#include "base/half.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace statepack {
namespace {

/// The format's definition: sign, exponent, fraction, by multiplication in double.
double f16_value(std::uint16_t h) {
  const double sign = (h & 0x8000) != 0 ? -1 : 1;
  const int exponent = h >> 10 & 31;
  const int fraction = h & 1023;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

/// Nearest half by search over all of them: ties to the even one, past the border to infinity.
std::uint16_t f16_nearest(float x) {
  static const std::vector<double> values = [] {
    std::vector<double> all(0x7c00);
    for (std::size_t h = 0; h < all.size(); ++h) all[h] = f16_value(static_cast<std::uint16_t>(h));
    all.push_back(65536);  // where the next half would be: decides what overflows
    return all;
  }();
  const double a = std::fabs(static_cast<double>(x));
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  if (a >= 65536) return sign | 0x7c00;
  const auto above = std::lower_bound(values.begin(), values.end(), a);
  auto h = static_cast<std::uint16_t>(above - values.begin());
  if (*above != a) {
    const double to_upper = *above - a;
    const double to_lower = a - above[-1];
    if (to_lower < to_upper || (to_lower == to_upper && h % 2 == 1)) --h;
  }
  return sign | h;
}

TEST(Half, EveryF16WidensToItsDefinition) {
  for (int i = 0; i < 65536; ++i) {
    const auto h = static_cast<std::uint16_t>(i);
    const double want = f16_value(h);
    const float got = f16_to_f32(h);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << i;
      continue;
    }
    ASSERT_EQ(static_cast<double>(got), want) << i;
    ASSERT_EQ(std::signbit(got), (h & 0x8000) != 0) << i;
    ASSERT_EQ(f32_to_f16(got), h) << i;
  }
}

TEST(Half, F32RoundsToTheNearestF16) {
  std::vector<float> samples = {
      0.0F,      -0.0F,    65504,           65519.996F,
      65520,     65536,    3e38F,           -65520,
      0x1p-24F,  0x1p-25F, 0x1.000002p-25F, 0x1p-26F,
      0x1p-149F, INFINITY, -INFINITY,       std::numeric_limits<float>::min()};
  // The border between every two halves, and its neighbours: ties and all subnormals.
  for (int h = 0; h < 0x7c00; ++h) {
    const double lower = f16_value(static_cast<std::uint16_t>(h));
    const double upper = h == 0x7bff ? 65536 : f16_value(static_cast<std::uint16_t>(h + 1));
    const auto middle = static_cast<float>((lower + upper) / 2);
    samples.insert(samples.end(), {middle, std::nextafter(middle, 0.0F),
                                   std::nextafter(middle, INFINITY), -middle});
  }
  std::mt19937 random(1);
  while (samples.size() < 500000) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isnan(x)) samples.push_back(x);
  }
  for (const float x : samples) ASSERT_EQ(f32_to_f16(x), f16_nearest(x)) << x;
}

TEST(Half, F32RoundsToTheNearestBf16) {
  std::mt19937 random(2);
  std::vector<std::uint32_t> samples = {0,          0x80000000, 0x7f7fffff, 0x7f7f8000,
                                        0x7f7f7fff, 0x7f800000, 0xff800000, 1,
                                        0x8000,     0x8001,     0x18000};
  for (std::uint32_t high = 0; high < 0x7f80; ++high) samples.push_back(high << 16 | 0x8000);
  while (samples.size() < 500000) samples.push_back(static_cast<std::uint32_t>(random()));
  for (const std::uint32_t u : samples) {
    const auto x = std::bit_cast<float>(u);
    if (std::isnan(x)) continue;
    // Integer arithmetic on the pattern: values of one sign are ordered as their patterns are.
    const std::uint32_t lower = u >> 16;
    const std::uint32_t rest = u & 0xffff;
    const bool up = rest > 0x8000 || (rest == 0x8000 && lower % 2 == 1);
    ASSERT_EQ(f32_to_bf16(x), lower + (up ? 1 : 0)) << u;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(bf16_to_f32(f32_to_bf16(x))) & 0xffff, 0U);
  }
}

TEST(Half, NanStaysQuietNan) {
  for (const std::uint32_t u : {0x7f800001U, 0x7fc00000U, 0xffffffffU, 0xff800001U, 0x7f80ffffU}) {
    const auto x = std::bit_cast<float>(u);
    EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(x)))) << u;
    EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(x)))) << u;
    EXPECT_NE(f32_to_f16(x) & 0x0200, 0) << u;
    EXPECT_NE(f32_to_bf16(x) & 0x0040, 0) << u;
  }
}

}  // namespace
}  // namespace statepack
