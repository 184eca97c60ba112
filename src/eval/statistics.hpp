// Intervals and tests for counts of right answers.
#pragma once

#include <cstdint>
#include <span>

namespace statepack {

struct Interval {
  double low = 0, high = 1;
};

/// Wilson's score interval of a share, 95 % (E. B. Wilson, 1927). [0, 1] for n = 0.
Interval wilson(std::int64_t n_right, std::int64_t n);

/// Spearman's rank correlation of n pairs, equal values sharing their mean rank; NaN where n < 2 or
/// a side is constant.
double spearman(std::span<const double> x, std::span<const double> y);

/// Two-sided exact McNemar test of two methods on the same samples: the chance of a split of the
/// discordant samples at least as uneven as (only_a, only_b) if both were equally good.
double mcnemar(std::int64_t only_a, std::int64_t only_b);

}  // namespace statepack
