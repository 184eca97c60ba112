#include "eval/statistics.hpp"

#include <algorithm>
#include <cmath>

namespace statepack {

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
