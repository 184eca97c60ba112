#include "eval/statistics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/check.hpp"

namespace statepack {
namespace {

// Ranks from 1; equal values share their mean.
std::vector<double> ranks(std::span<const double> values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  std::vector<double> rank(values.size());
  for (std::size_t begin = 0; begin < order.size();) {
    std::size_t end = begin + 1;
    while (end < order.size() && values[order[end]] == values[order[begin]]) ++end;
    for (std::size_t i = begin; i < end; ++i) {
      rank[order[i]] = 0.5 * static_cast<double>(begin + 1 + end);
    }
    begin = end;
  }
  return rank;
}

}  // namespace

double spearman(std::span<const double> x, std::span<const double> y) {
  SP_CHECK(x.size() == y.size(), "pairs");
  const std::vector<double> a = ranks(x), b = ranks(y);
  const double mean = 0.5 * static_cast<double>(x.size() + 1);
  double ab = 0, aa = 0, bb = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean) * (b[i] - mean);
    aa += (a[i] - mean) * (a[i] - mean);
    bb += (b[i] - mean) * (b[i] - mean);
  }
  if (!(aa > 0 && bb > 0)) return std::numeric_limits<double>::quiet_NaN();
  return ab / std::sqrt(aa * bb);
}

Interval wilson(std::int64_t n_right, std::int64_t n) {
  if (n <= 0) return {};
  constexpr double z = 1.959963984540054;  // the normal distribution's 97.5 % point
  const auto size = static_cast<double>(n);
  const double p = static_cast<double>(n_right) / size;
  const double scale = 1 / (1 + z * z / size);
  const double centre = (p + z * z / (2 * size)) * scale;
  const double half = z * scale * std::sqrt(p * (1 - p) / size + z * z / (4 * size * size));
  return {std::max(0.0, centre - half), std::min(1.0, centre + half)};
}

double mcnemar(std::int64_t only_a, std::int64_t only_b) {
  const auto n = static_cast<double>(only_a + only_b);
  const auto fewer = std::min(only_a, only_b);
  double tail = 0;  // P(X <= fewer), X ~ Binomial(n, 1/2)
  for (std::int64_t i = 0; i <= fewer; ++i) {
    const auto x = static_cast<double>(i);
    tail += std::exp(std::lgamma(n + 1) - std::lgamma(x + 1) - std::lgamma(n - x + 1) -
                     n * std::log(2.0));
  }
  return std::min(1.0, 2 * tail);
}

}  // namespace statepack
