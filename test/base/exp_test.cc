#include "base/exp.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/lane_sum.hpp"

namespace statepack {
namespace {

TEST(Exp, IsWithinTwoUlpOfTheExactValue) {
  double worst = 0;
  for (double x = -87.29; x < 88.3; x += 0.00037) {
    const auto arg = static_cast<float>(x);
    const double want = std::exp(double{arg});
    const auto rounded = static_cast<float>(want);
    const double ulp = double{std::nextafter(rounded, INFINITY)} - rounded;
    worst = std::max(worst, std::fabs(exp_f32(arg) - want) / ulp);
  }
  EXPECT_LT(worst, 2.0);
}

TEST(Exp, EndsOfTheRange) {
  EXPECT_EQ(exp_f32(0.0F), 1.0F);
  EXPECT_EQ(exp_f32(-0.0F), 1.0F);
  EXPECT_EQ(exp_f32(-88.0F), 0.0F);
  EXPECT_EQ(exp_f32(-1e30F), 0.0F);
  EXPECT_EQ(exp_f32(-std::numeric_limits<float>::infinity()), 0.0F);
  EXPECT_TRUE(std::isinf(exp_f32(89.0F)));
  EXPECT_TRUE(std::isinf(exp_f32(1e30F)));
  EXPECT_TRUE(std::isinf(exp_f32(std::numeric_limits<float>::infinity())));
  EXPECT_TRUE(std::isnan(exp_f32(NAN)));
}

TEST(Exp, SigmoidAndSiluOfLargeArguments) {
  EXPECT_EQ(sigmoid_f32(200.0F), 1.0F);
  EXPECT_EQ(sigmoid_f32(-200.0F), 0.0F);
  EXPECT_EQ(sigmoid_f32(0.0F), 0.5F);
  EXPECT_EQ(silu_f32(200.0F), 200.0F);
  EXPECT_EQ(silu_f32(-200.0F), 0.0F);
  EXPECT_TRUE(std::isnan(silu_f32(NAN)));
}

TEST(LaneDot, IsTheSumAtEveryLength) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (int n : {0, 1, 15, 16, 17, 33, 128, 1000}) {
    std::vector<float> a(std::size_t(n) + 1), b(a.size());
    for (float& x : a) x = normal(rng);
    for (float& x : b) x = normal(rng);
    double sum = 0, magnitude = 0;
    for (int i = 0; i < n; ++i) {
      sum += double{a[std::size_t(i)]} * b[std::size_t(i)];
      magnitude += std::fabs(double{a[std::size_t(i)]} * b[std::size_t(i)]);
    }
    EXPECT_NEAR(lane_dot(a.data(), b.data(), n), sum, (n / 16 + 6) * 0x1p-24 * magnitude);
  }
}

}  // namespace
}  // namespace statepack
