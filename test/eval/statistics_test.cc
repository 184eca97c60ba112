#include "eval/statistics.hpp"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace statepack
