#include "runtime/logits.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace statepack {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> normal(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(0.0F, 5.0F);
  std::vector<float> x(n);
  for (float& v : x) v = draw(random);
  return x;
}

TEST(Peak, FindsTheLargestAtEveryPlaceAndLength) {
  for (const std::size_t n : {1, 2, 15, 16, 17, 31, 33, 100, 8192}) {
    for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
      std::vector<float> x(n, -3.0F);
      x[at] = -2.5F;
      const LogitPeak p = peak(x);
      EXPECT_TRUE(p.finite);
      EXPECT_EQ(p.index, static_cast<std::int32_t>(at)) << n;
      EXPECT_EQ(p.value, -2.5F);
    }
  }
}

TEST(Peak, TiesGoToTheLowestIndex) {
  std::vector<float> x(100, 0.0F);
  x[90] = x[33] = x[34] = 7.0F;
  EXPECT_EQ(peak(x).index, 33);
  x.assign(1000, -1.0F);
  x[900] = x[300] = x[320] = 7.0F;
  EXPECT_EQ(peak(x).index, 300);
}

TEST(Peak, NotFiniteIsSeenAnywhere) {
  for (const std::size_t at : {0, 15, 16, 40, 99}) {
    for (const float bad : {kNan, kInf}) {
      std::vector<float> x = normal(100, 1);
      x[at] = bad;
      EXPECT_FALSE(peak(x).finite) << at << " " << bad;
    }
  }
  EXPECT_FALSE(peak(std::vector<float>(20, -kInf)).finite);
  std::vector<float> masked(20, -kInf);  // masks are fine while something is left
  masked[7] = -1.0F;
  EXPECT_TRUE(peak(masked).finite);
  EXPECT_EQ(peak(masked).index, 7);
  EXPECT_FALSE(peak({}).finite);
}

TEST(ExpSum, IsExpWithinTwoUlp) {
  std::vector<float> y;
  for (float v = 0; v > -86.9F; v -= 0.00317F) y.push_back(v);
  std::vector<float> out(y.size());
  const double sum = exp_sum(y, 0.0F, 1.0F, out.data());
  double exact_sum = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double exact = std::exp(static_cast<double>(y[i]));
    exact_sum += exact;
    ASSERT_NEAR(static_cast<double>(out[i]) / exact, 1.0, 2 * 0x1p-23) << y[i];
  }
  EXPECT_NEAR(sum / exact_sum, 1.0, 2 * 0x1p-23);
}

TEST(ExpSum, EndsOfTheRange) {
  const std::vector<float> x = {0.0F, -87.5F, -1e30F, -kInf};
  std::vector<float> out(4);
  EXPECT_EQ(exp_sum(x, 0.0F, 1.0F, out.data()), 1.0);
  EXPECT_EQ(out, (std::vector<float>{1, 0, 0, 0}));
}

TEST(WeightedDifference, MatchesPlainSum) {
  for (const std::size_t n : {1, 17, 1000}) {
    const auto w = normal(n, 2);
    const auto a = normal(n, 3);
    const auto b = normal(n, 4);
    double exact = 0;
    double size = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const double term =
          static_cast<double>(w[i]) * (static_cast<double>(a[i]) - static_cast<double>(b[i]));
      exact += term;
      size += std::fabs(term);
    }
    EXPECT_NEAR(weighted_difference(w, a, b), exact, size * static_cast<double>(n) * 0x1p-52);
  }
}

}  // namespace
}  // namespace statepack
