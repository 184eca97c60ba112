#include "calibrate/allocate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>
#include <string>

#include "base/check.hpp"

namespace statepack {
namespace {

constexpr double kOmegaFloor = 1e-20;
constexpr std::int64_t kMaxTableBytes = std::int64_t{2} << 30;
constexpr int kBisections = 80;

Status check_problem(const AllocationProblem& problem) {
  const auto& widths = problem.widths;
  SP_CHECK(
      !widths.empty() && widths.front() >= 0 && widths.back() <= 255 &&
          std::adjacent_find(widths.begin(), widths.end(), std::greater_equal<>()) == widths.end(),
      "candidate widths must ascend within 0..255");
  SP_CHECK(problem.costs.size() % widths.size() == 0, "one cost for every unit and width");
  for (std::size_t i = 0; i < problem.costs.size(); ++i) {
    if (!std::isfinite(problem.costs[i])) {
      return {Code::kInvalidArgument,
              "the cost of unit " + std::to_string(i / widths.size()) + " at " +
                  std::to_string(widths[i % widths.size()]) +
                  " bits is not finite; look for NaN or Inf in the model's states"};
    }
  }
  const std::int64_t least = problem.n_units() * widths.front();
  if (problem.budget < least) {
    return {Code::kInvalidArgument, "a budget of " + std::to_string(problem.budget) +
                                        " bits is too small: " + std::to_string(problem.n_units()) +
                                        " units need at least " + std::to_string(least) +
                                        "; ask for more bits or fewer pivots"};
  }
  return {};
}

// The chosen candidate of every unit becomes widths and sums, in unit order.
Allocation finish(const AllocationProblem& problem, const std::vector<std::uint8_t>& choice) {
  Allocation result;
  result.bits.reserve(choice.size());
  for (std::int64_t u = 0; u < problem.n_units(); ++u) {
    const std::size_t c = choice[static_cast<std::size_t>(u)];
    result.bits.push_back(static_cast<std::uint8_t>(problem.widths[c]));
    result.n_bits += problem.widths[c];
    result.cost += problem.costs_of(u)[c];
  }
  return result;
}

// pick(lambda): per unit the candidate of least cost + lambda * width; ties take fewer bits.
std::int64_t pick(const AllocationProblem& problem, double lambda,
                  std::vector<std::uint8_t>& choice) {
  std::int64_t n_bits = 0;
  for (std::int64_t u = 0; u < problem.n_units(); ++u) {
    const double* costs = problem.costs_of(u);
    std::size_t best = 0;
    double best_cost = costs[0] + lambda * problem.widths[0];
    for (std::size_t c = 1; c < problem.widths.size(); ++c) {
      const double cost = costs[c] + lambda * problem.widths[c];
      if (cost < best_cost) best = c, best_cost = cost;
    }
    choice[static_cast<std::size_t>(u)] = static_cast<std::uint8_t>(best);
    n_bits += problem.widths[best];
  }
  return n_bits;
}

struct Upgrade {
  double gain_per_bit;
  std::int64_t unit;
  std::uint8_t from, to;

  // std::priority_queue pops the greatest: most gain, then lower unit, old width, new width.
  bool operator<(const Upgrade& other) const {
    if (gain_per_bit != other.gain_per_bit) return gain_per_bit < other.gain_per_bit;
    if (unit != other.unit) return unit > other.unit;
    if (from != other.from) return from > other.from;
    return to > other.to;
  }
};

// Spends what is left of the budget: the best improving upgrade that fits, until none does.
void repair(const AllocationProblem& problem, std::int64_t left,
            std::vector<std::uint8_t>& choice) {
  const auto& widths = problem.widths;
  std::priority_queue<Upgrade> heap;
  const auto push_upgrades = [&](std::int64_t unit) {
    const double* costs = problem.costs_of(unit);
    const std::size_t from = choice[static_cast<std::size_t>(unit)];
    for (std::size_t to = from + 1; to < widths.size(); ++to) {
      const double gain = costs[from] - costs[to];
      if (gain > 0) {
        heap.push({gain / (widths[to] - widths[from]), unit, static_cast<std::uint8_t>(from),
                   static_cast<std::uint8_t>(to)});
      }
    }
  };
  for (std::int64_t u = 0; u < problem.n_units(); ++u) push_upgrades(u);
  while (!heap.empty()) {
    const Upgrade best = heap.top();
    heap.pop();
    std::uint8_t& current = choice[static_cast<std::size_t>(best.unit)];
    const int extra = widths[best.to] - widths[best.from];
    if (current != best.from || extra > left) continue;  // stale, or will never fit again
    current = best.to;
    left -= extra;
    push_upgrades(best.unit);
  }
}

}  // namespace

Result<double> lifetime_weight(double ell, std::int64_t horizon) {
  if (!(ell <= 0)) {
    return Status(Code::kInvalidArgument, "a mean log decay of " + std::to_string(ell) +
                                              " is not a decay; gates must be <= 0");
  }
  // x = 2 ell;  L = expm1(H x) / expm1(x)
  const double x = 2 * ell;
  if (x == 0) return static_cast<double>(horizon);
  return std::expm1(static_cast<double>(horizon) * x) / std::expm1(x);
}

std::vector<float> row_factors(std::span<const double> omega, double gamma) {
  std::vector<double> a(omega.size());
  double mean = 0;
  for (std::size_t i = 0; i < omega.size(); ++i) {
    a[i] = std::log(std::max(omega[i], kOmegaFloor)) * gamma / 2;
    mean += a[i];
  }
  mean /= static_cast<double>(omega.size());
  std::vector<float> w(omega.size());
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(std::exp(a[i] - mean));
  return w;
}

Result<Allocation> allocate_exact(const AllocationProblem& problem) {
  SP_RETURN_IF_ERROR(check_problem(problem));
  const std::int64_t n = problem.n_units();
  int unit_bits = 0;  // widths are counted in multiples of their common divisor
  for (int width : problem.widths) unit_bits = std::gcd(unit_bits, width);
  const std::int64_t budget = std::min(problem.budget, n * problem.widths.back()) / unit_bits;
  const std::int64_t row = budget + 1;
  if (n > 0 && row > kMaxTableBytes / n) {
    return Status(Code::kInvalidArgument, "the exact allocation of " + std::to_string(n) +
                                              " units needs a table of " + std::to_string(n) +
                                              " x " + std::to_string(row) +
                                              " bytes, more than 2 GiB; use the Lagrangian solver");
  }

  // best[b]: least cost of the units so far when they use exactly b; taken[u][b]: how unit u got
  // there.
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  std::vector<double> best(static_cast<std::size_t>(row), kInfinite);
  std::vector<double> next(best.size());
  std::vector<std::uint8_t> taken(static_cast<std::size_t>(n * row));
  best[0] = 0;
  for (std::int64_t u = 0; u < n; ++u) {
    std::fill(next.begin(), next.end(), kInfinite);
    std::uint8_t* taken_u = taken.data() + u * row;
    for (std::size_t c = 0; c < problem.widths.size(); ++c) {
      const std::int64_t width = problem.widths[c] / unit_bits;
      const double cost = problem.costs_of(u)[c];
      for (std::int64_t b = width; b < row; ++b) {
        const double total = best[static_cast<std::size_t>(b - width)] + cost;
        if (total < next[static_cast<std::size_t>(b)]) {
          next[static_cast<std::size_t>(b)] = total;
          taken_u[b] = static_cast<std::uint8_t>(c);
        }
      }
    }
    best.swap(next);
  }

  std::int64_t used = std::min_element(best.begin(), best.end()) - best.begin();
  std::vector<std::uint8_t> choice(static_cast<std::size_t>(n));
  for (std::int64_t u = n - 1; u >= 0; --u) {
    const std::uint8_t c = taken[static_cast<std::size_t>(u * row + used)];
    choice[static_cast<std::size_t>(u)] = c;
    used -= problem.widths[c] / unit_bits;
  }
  SP_CHECK(used == 0, "backtracking must end where the sums began");
  return finish(problem, choice);
}

Result<Allocation> allocate_lagrangian(const AllocationProblem& problem) {
  SP_RETURN_IF_ERROR(check_problem(problem));
  std::vector<std::uint8_t> choice(static_cast<std::size_t>(problem.n_units()));
  if (pick(problem, 0, choice) <= problem.budget) return finish(problem, choice);

  // At `hi` no unit gains enough to leave the narrowest width, so all of them there is the start.
  double hi = 1e-30;
  for (std::int64_t u = 0; u < problem.n_units(); ++u) {
    const double* costs = problem.costs_of(u);
    const auto [least, most] = std::minmax_element(costs, costs + problem.widths.size());
    hi = std::max(hi, *most - *least);
  }
  double lo = 0;
  std::vector<std::uint8_t> candidate(choice.size());
  std::int64_t n_bits = problem.n_units() * problem.widths.front();
  std::fill(choice.begin(), choice.end(), std::uint8_t{0});
  for (int i = 0; i < kBisections; ++i) {
    const double mid = 0.5 * (lo + hi);
    const std::int64_t n_mid = pick(problem, mid, candidate);
    if (n_mid > problem.budget) {
      lo = mid;
    } else {
      hi = mid;
      n_bits = n_mid;
      choice.swap(candidate);
    }
  }
  repair(problem, problem.budget - n_bits, choice);
  return finish(problem, choice);
}

std::vector<std::uint8_t> top_units(std::span<const double> risk, std::int64_t n) {
  SP_CHECK(n >= 0 && n <= static_cast<std::int64_t>(risk.size()), "no more units than there are");
  std::vector<std::size_t> order(risk.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return risk[a] > risk[b]; });
  std::vector<std::uint8_t> marked(risk.size(), 0);
  for (std::int64_t i = 0; i < n; ++i) marked[order[static_cast<std::size_t>(i)]] = 1;
  return marked;
}

Result<Allocation> allocate_rest(const AllocationProblem& problem,
                                 std::span<const std::uint8_t> pivots, AllocationSolver solver) {
  SP_CHECK(static_cast<std::int64_t>(pivots.size()) == problem.n_units(), "one mark a unit");
  AllocationProblem rest{problem.widths, {}, problem.budget};
  rest.costs.reserve(problem.costs.size());
  for (std::int64_t u = 0; u < problem.n_units(); ++u) {
    if (pivots[static_cast<std::size_t>(u)] != 0) continue;
    const double* costs = problem.costs_of(u);
    rest.costs.insert(rest.costs.end(), costs, costs + problem.widths.size());
  }
  SP_ASSIGN_OR_RETURN(Allocation result, solver(rest));
  std::vector<std::uint8_t> bits(pivots.size());
  auto next = result.bits.begin();
  for (std::size_t u = 0; u < bits.size(); ++u) {
    bits[u] = pivots[u] != 0 ? static_cast<std::uint8_t>(kPivotBits) : *next++;
  }
  result.bits = std::move(bits);
  return result;
}

double residual_error(double energy, double ell, int period) {
  // E = e / (1 - a^(2 dP)); the clamp keeps a head that never decays finite.
  const double log_a = std::min(ell, std::log1p(-1e-7));
  return energy / -std::expm1(2.0 * period * log_a);
}

}  // namespace statepack
