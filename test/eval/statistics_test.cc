#include "eval/statistics.hpp"

#include <gtest/gtest.h>

#include <cmath>

namespace statepack {
namespace {

TEST(Wilson, KnownIntervals) {
  // The formula in 30 decimal digits.
  const Interval a = wilson(81, 263);
  EXPECT_NEAR(a.low, 0.255288519878274, 1e-12);
  EXPECT_NEAR(a.high, 0.366209576982800, 1e-12);
  const Interval none = wilson(0, 20);
  EXPECT_EQ(none.low, 0);
  EXPECT_NEAR(none.high, 0.161125158052819, 1e-12);
  const Interval all = wilson(20, 20);
  EXPECT_NEAR(all.low, 1 - 0.161125158052819, 1e-12);
  EXPECT_EQ(all.high, 1);
  EXPECT_EQ(wilson(0, 0).low, 0);
  EXPECT_EQ(wilson(0, 0).high, 1);
}

TEST(McNemar, ExactTails) {
  EXPECT_EQ(mcnemar(0, 0), 1);
  EXPECT_EQ(mcnemar(3, 3), 1);
  EXPECT_NEAR(mcnemar(0, 5), 2.0 / 32, 1e-12);
  EXPECT_NEAR(mcnemar(5, 0), 2.0 / 32, 1e-12);
  EXPECT_NEAR(mcnemar(1, 9), 2.0 * 11 / 1024, 1e-12);
}

TEST(Statistics, SpearmanCountsRanksAndSharesThoseOfEquals) {
  const double x[] = {1, 2, 3, 4, 5}, rising[] = {1, 10, 100, 1000, 1e9},
               falling[] = {5, 4, 3, 2, 1};
  EXPECT_DOUBLE_EQ(spearman(x, rising), 1);
  EXPECT_DOUBLE_EQ(spearman(x, falling), -1);
  // Ranks 1 2.5 2.5 4 5 and 2 1 3 5 4: sums by hand, 7 / sqrt(9.5 * 10).
  const double tied[] = {1, 2, 2, 3, 4}, other[] = {20, 10, 30, 50, 40};
  EXPECT_NEAR(spearman(tied, other), 7 / std::sqrt(95.0), 1e-12);
  const double constant[] = {3, 3, 3, 3, 3};
  EXPECT_TRUE(std::isnan(spearman(x, constant)));
  EXPECT_TRUE(std::isnan(spearman({}, {})));
}

}  // namespace
}  // namespace statepack
