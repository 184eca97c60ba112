// Intervals and tests for counts of right answers.
#pragma once

#include <cstdint>

namespace statepack {

struct Interval {
  double low = 0, high = 1;
};

/// Wilson's score interval of a share, 95 % (E. B. Wilson, 1927). [0, 1] for n = 0.
Interval wilson(std::int64_t n_right, std::int64_t n);

/// Two-sided exact McNemar test of two methods on the same samples: the chance of a split of the
/// discordant samples at least as uneven as (only_a, only_b) if both were equally good.
double mcnemar(std::int64_t only_a, std::int64_t only_b);

}  // namespace statepack
