// Which unit of a state gets how many bits: the solvers of STEPQuant (stepquant, section 3) and the
// head choice of PACE (pace, section 8). Plain numbers in and out; knows no codec and no model.
//
// A unit is what shares one width: a head where the gate is a scalar, a key row where it is not.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "statepack/status.hpp"

namespace statepack {

/// Width of a unit kept in half precision; charged kPivotCharge bits of the nominal budget.
inline constexpr int kPivotBits = 16;
inline constexpr int kPivotCharge = 8;

/// L = sum_{j < horizon} exp(2 j ell): how long an error of one write is read, when the log decay
/// is `ell` a token on average. 1 for ell = -inf. Errors: kInvalidArgument for ell > 0 or NaN.
Result<double> lifetime_weight(double ell, std::int64_t horizon);

/// w_i = omega_i^(gamma/2), divided by the geometric mean of all, so that the geometric mean of w
/// is 1; omega is floored at 1e-20. `omega` holds the K rows of one head, finite and >= 0.
std::vector<float> row_factors(std::span<const double> omega, double gamma);

/// Multiple choice: every unit takes one width, the widths' sum must not exceed `budget`.
struct AllocationProblem {
  std::vector<int> widths;    ///< candidates, >= 0, strictly ascending, at most 255
  std::vector<double> costs;  ///< [n_units][widths.size()], finite
  std::int64_t budget = 0;

  std::int64_t n_units() const {
    return widths.empty() ? 0 : static_cast<std::int64_t>(costs.size() / widths.size());
  }
  const double* costs_of(std::int64_t unit) const {
    return costs.data() + unit * static_cast<std::int64_t>(widths.size());
  }
};

struct Allocation {
  std::vector<std::uint8_t> bits;  ///< [n_units]
  std::int64_t n_bits = 0;         ///< sum of bits; pivots left out
  double cost = 0;                 ///< sum of the chosen costs; pivots left out
};

using AllocationSolver = Result<Allocation> (*)(const AllocationProblem&);

/// The optimum, by dynamic programming over bits used: O(n budget candidates) time and
/// n * (budget / g + 1) bytes, g the widths' common divisor. Among equal costs the fewest bits win,
/// then the narrower width of the later unit. Errors: kInvalidArgument (budget below the narrowest
/// widths, cost not finite, table above 2 GiB).
Result<Allocation> allocate_exact(const AllocationProblem& problem);

/// One multiplier for all units, found by 80 bisections, and then upgrades by gain a bit while they
/// fit. Always feasible, not always optimal. Errors: as allocate_exact, but for the table.
Result<Allocation> allocate_lagrangian(const AllocationProblem& problem);

/// Marks (1) the `n` units of highest risk; equal risks keep the lower index. 0 <= n <=
/// risk.size(), no NaN.
std::vector<std::uint8_t> top_units(std::span<const double> risk, std::int64_t n);

/// Solves for the units that `pivots` [n_units] does not mark, within problem.budget, and gives the
/// marked ones kPivotBits. Errors: what `solver` says.
Result<Allocation> allocate_rest(const AllocationProblem& problem,
                                 std::span<const std::uint8_t> pivots, AllocationSolver solver);

/// Stationary error energy of a row that is rounded every `period` tokens: energy / (1 - a^(2
/// period)) with a = exp(ell) <= 1 - 1e-7.
double residual_error(double energy, double ell, int period);

}  // namespace statepack
