#include "calibrate/allocate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <random>

namespace statepack {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double lifetime(double ell, std::int64_t horizon) {
  auto weight = lifetime_weight(ell, horizon);
  EXPECT_TRUE(weight.ok()) << weight.status().message();
  return weight.ok() ? *weight : kNaN;
}

// Golden G2 of the STEPQuant notes.
TEST(LifetimeWeight, Golden) {
  EXPECT_EQ(lifetime(0, 2048), 2048);
  EXPECT_NEAR(lifetime(-0.001, 2048), 492.172294913, 1e-9);
  EXPECT_NEAR(lifetime(-0.05, 2048), 10.5083319448, 1e-10);
  EXPECT_NEAR(lifetime(-0.5, 2048), 1.58197670687, 1e-11);
  EXPECT_EQ(lifetime(-kInf, 2048), 1);
  EXPECT_NEAR(lifetime(-std::log(2.0) / 2, 4), 1.875, 1e-15);
}

TEST(LifetimeWeight, EqualsTheLiteralSum) {
  for (double ell : {-1e-12, -1e-5, -0.003, -0.2, -3.0, -700.0}) {
    double sum = 0;
    for (int j = 0; j < 300; ++j) sum += std::exp(2 * ell * j);
    EXPECT_NEAR(lifetime(ell, 300), sum, 1e-12 * sum) << ell;
  }
  EXPECT_EQ(lifetime(-1e-320, 2048), 2048);  // subnormal
}

TEST(LifetimeWeight, RefusesWhatIsNotADecay) {
  EXPECT_EQ(lifetime_weight(1e-9, 2048).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(lifetime_weight(kNaN, 2048).status().code(), Code::kInvalidArgument);
}

// Golden G2.
TEST(RowFactors, Golden) {
  const std::vector<double> omega = {1, 16, 256, 4096};
  const auto w = row_factors(omega, 0.25);
  for (int i = 0; i < 4; ++i) EXPECT_FLOAT_EQ(w[i], std::exp2(-0.75f + 0.5f * float(i)));
}

TEST(RowFactors, DeadRowsAreFlooredAndTheGeometricMeanIsOne) {
  const std::vector<double> omega = {0, 1e-30, 1, 1e6};
  const auto w = row_factors(omega, 0.25);
  double log_sum = 0;
  for (float x : w) {
    EXPECT_GT(x, 0);
    log_sum += std::log(double{x});
  }
  EXPECT_EQ(w[0], w[1]);  // both at the floor
  EXPECT_NEAR(w[2] / w[0], std::pow(1e20, 0.125), 1e-4);
  EXPECT_NEAR(log_sum, 0, 1e-6);
}

// Golden G3.
AllocationProblem golden_problem(std::int64_t budget) {
  return {{4, 6, 8}, {16, 4, 1.3, 12, 2, 1, 9, 6, 0, 8, 5.2, 3, 2, 1, 0.5}, budget};
}

TEST(Allocate, Golden) {
  struct Case {
    std::int64_t budget;
    std::vector<std::uint8_t> bits;
    double cost;
  };
  for (const Case& c : {Case{24, {6, 6, 4, 4, 4}, 25}, Case{26, {6, 6, 6, 4, 4}, 22},
                        Case{28, {6, 6, 8, 4, 4}, 16}, Case{30, {6, 6, 8, 6, 4}, 13.2}}) {
    auto exact = allocate_exact(golden_problem(c.budget));
    ASSERT_TRUE(exact.ok()) << exact.status().message();
    EXPECT_EQ(exact->bits, c.bits) << c.budget;
    EXPECT_NEAR(exact->cost, c.cost, 1e-12);
    EXPECT_EQ(exact->n_bits, c.budget);
  }
  auto lagrangian = allocate_lagrangian(golden_problem(30));
  ASSERT_TRUE(lagrangian.ok());
  EXPECT_THAT(lagrangian->bits, ElementsAre(6, 6, 8, 6, 4));
}

// Golden G3: nominal 6, one pivot.
TEST(Allocate, GoldenPivot) {
  const AllocationProblem all = golden_problem(6 * 5);
  auto free = allocate_exact(all);
  ASSERT_TRUE(free.ok());
  std::vector<double> risk;
  for (int u = 0; u < 5; ++u) risk.push_back(all.costs_of(u)[(free->bits[u] - 4) / 2]);
  EXPECT_THAT(risk, ElementsAre(4, 2, 0, 5.2, 2));
  const auto pivots = top_units(risk, 1);
  EXPECT_THAT(pivots, ElementsAre(0, 0, 0, 1, 0));

  auto rest = allocate_rest(golden_problem(6 * 5 - 8), pivots, allocate_exact);
  ASSERT_TRUE(rest.ok());
  EXPECT_THAT(rest->bits, ElementsAre(6, 6, 6, 16, 4));
  EXPECT_NEAR(rest->cost, 14, 1e-12);
  EXPECT_EQ(rest->n_bits, 22);
}

// Golden G4: a curve that is not convex hides its middle from the multiplier.
TEST(Allocate, GoldenNonConvex) {
  const AllocationProblem problem{{4, 6, 8}, {10, 9.8, 0, 7, 1, 0.9}, 12};
  auto exact = allocate_exact(problem);
  ASSERT_TRUE(exact.ok());
  EXPECT_THAT(exact->bits, ElementsAre(8, 4));
  EXPECT_NEAR(exact->cost, 7, 1e-12);
  auto lagrangian = allocate_lagrangian(problem);
  ASSERT_TRUE(lagrangian.ok());
  EXPECT_THAT(lagrangian->bits, ElementsAre(6, 6));  // [4,6] before the repair
  EXPECT_NEAR(lagrangian->cost, 10.8, 1e-12);
}

double brute_force(const AllocationProblem& problem, std::int64_t unit, std::int64_t left) {
  if (unit == problem.n_units()) return 0;
  double best = kInf;
  for (std::size_t c = 0; c < problem.widths.size(); ++c) {
    if (problem.widths[c] > left) break;
    best = std::min(
        best, problem.costs_of(unit)[c] + brute_force(problem, unit + 1, left - problem.widths[c]));
  }
  return best;
}

TEST(Allocate, ExactEqualsBruteForceAndTheLagrangianNeverBeatsIt) {
  std::mt19937_64 random(1);
  const std::vector<std::vector<int>> width_sets = {{4, 6, 8}, {2, 4, 6, 8}, {3, 4, 5, 8}, {8}};
  for (int trial = 0; trial < 400; ++trial) {
    AllocationProblem problem;
    problem.widths = width_sets[trial % 4];
    const auto n = 1 + static_cast<std::int64_t>(random() % 6);
    const auto n_costs = static_cast<std::size_t>(n) * problem.widths.size();
    for (std::size_t i = 0; i < n_costs; ++i) {
      problem.costs.push_back(std::ldexp(static_cast<double>(random() % 1000), -int(i % 7)));
    }
    const std::int64_t least = n * problem.widths.front();
    const std::int64_t most = n * problem.widths.back();
    problem.budget = least + static_cast<std::int64_t>(random() % (most - least + 3));

    auto exact = allocate_exact(problem);
    auto lagrangian = allocate_lagrangian(problem);
    ASSERT_TRUE(exact.ok() && lagrangian.ok());
    const double truth = brute_force(problem, 0, problem.budget);
    EXPECT_NEAR(exact->cost, truth, 1e-12 * truth);
    EXPECT_LE(exact->n_bits, problem.budget);
    EXPECT_LE(lagrangian->n_bits, problem.budget);
    EXPECT_GE(lagrangian->cost, exact->cost - 1e-12 * truth);
  }
}

TEST(Allocate, EqualCostsTakeTheFewestBits) {
  const AllocationProblem problem{{2, 4, 6, 8}, {1, 1, 1, 1, 3, 2, 2, 2}, 16};
  for (auto solver : {allocate_exact, allocate_lagrangian}) {
    auto result = solver(problem);
    ASSERT_TRUE(result.ok());
    EXPECT_THAT(result->bits, ElementsAre(2, 4));
  }
}

TEST(Allocate, EqualCostsAndBitsTakeTheNarrowerLaterUnit) {
  auto result = allocate_exact({{4, 6}, {2, 1, 2, 1}, 10});
  ASSERT_TRUE(result.ok());
  EXPECT_THAT(result->bits, ElementsAre(6, 4));
}

// Units that leave the narrowest width at one multiplier, all or none: the repair shares out the
// rest.
TEST(Allocate, RepairSkipsStaleUpgradesAndGoesOnFromNewWidths) {
  // Units 0 and 1 jump to 8; then "4 to 6" of either is stale and must not pull it back.
  auto stale = allocate_lagrangian({{4, 6, 8}, {10, 9, 0, 10, 9, 0, 10, 9, 0}, 22});
  ASSERT_TRUE(stale.ok());
  EXPECT_THAT(stale->bits, ElementsAre(8, 8, 6));
  // Unit 0 jumps, unit 1 cannot any more, unit 2 takes two steps.
  auto steps =
      allocate_lagrangian({{2, 4, 6, 8}, {10, 10, 10, 0, 10, 10, 10, 0, 5, 4, 3.5, 3.4}, 16});
  ASSERT_TRUE(steps.ok());
  EXPECT_THAT(steps->bits, ElementsAre(8, 2, 6));
}

// Curves like those of a codec, D ~ 4^-b: the repair leaves at most one step of one unit unused.
TEST(Allocate, LagrangianIsNearTheOptimumOnConvexCurves) {
  std::mt19937_64 random(2);
  AllocationProblem problem{{2, 4, 6, 8}, {}, 0};
  const std::int64_t n = 500;
  for (std::int64_t u = 0; u < n; ++u) {
    const double scale = std::exp2(static_cast<double>(random() % 2000) / 100 - 10);
    for (int b : problem.widths) problem.costs.push_back(scale * std::exp2(-2.0 * b));
  }
  problem.budget = 4 * n;
  auto exact = allocate_exact(problem);
  auto lagrangian = allocate_lagrangian(problem);
  ASSERT_TRUE(exact.ok() && lagrangian.ok());
  EXPECT_LE(problem.budget - lagrangian->n_bits, 2);
  EXPECT_LE(lagrangian->cost, 1.01 * exact->cost);
}

TEST(Allocate, ALargeModelTakesSeconds) {
  std::mt19937_64 random(3);
  AllocationProblem problem{{4, 6, 8}, {}, 13'568};  // 2,304 heads at 6 bits, 32 pivots
  for (int u = 0; u < 2'272; ++u) {
    const double scale = std::exp2(static_cast<double>(random() % 2000) / 100 - 10);
    for (int b : problem.widths) problem.costs.push_back(scale * std::exp2(-2.0 * b));
  }
  const auto start = std::chrono::steady_clock::now();
  auto exact = allocate_exact(problem);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  ASSERT_TRUE(exact.ok());
  EXPECT_LE(exact->n_bits, problem.budget);
  EXPECT_LT(seconds.count(), 5);  // 0.1 s measured on one core
}

TEST(Allocate, KdaSizeIsSolvedByTheLagrangianAndRefusedByTheTable) {
  std::mt19937_64 random(4);
  const std::int64_t n = 81'920;
  AllocationProblem problem{{2, 4, 6, 8}, {}, 4 * n};
  for (std::int64_t u = 0; u < n; ++u) {
    const double scale = std::exp2(static_cast<double>(random() % 2000) / 100 - 10);
    for (int b : problem.widths) problem.costs.push_back(scale * std::exp2(-2.0 * b));
  }
  auto result = allocate_lagrangian(problem);
  ASSERT_TRUE(result.ok());
  EXPECT_LE(result->n_bits, problem.budget);
  EXPECT_LE(problem.budget - result->n_bits, 2);
  auto refused = allocate_exact(problem);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(), HasSubstr("use the Lagrangian solver"));
}

TEST(Allocate, SaysWhatIsWrong) {
  for (auto solver : {allocate_exact, allocate_lagrangian}) {
    auto tight = solver(golden_problem(19));
    ASSERT_FALSE(tight.ok());
    EXPECT_EQ(tight.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(tight.status().message(),
              "a budget of 19 bits is too small: 5 units need at least 20; ask for more bits or "
              "fewer pivots");
    for (double bad : {kNaN, kInf, -kInf}) {
      AllocationProblem problem = golden_problem(30);
      problem.costs[7] = bad;
      auto result = solver(problem);
      ASSERT_FALSE(result.ok());
      EXPECT_THAT(result.status().message(), HasSubstr("cost of unit 2 at 6 bits is not finite"));
    }
  }
}

TEST(Allocate, AllUnitsPivots) {
  const std::vector<std::uint8_t> pivots(5, 1);
  auto result = allocate_rest(golden_problem(0), pivots, allocate_exact);
  ASSERT_TRUE(result.ok());
  EXPECT_THAT(result->bits, ElementsAre(16, 16, 16, 16, 16));
  EXPECT_EQ(result->cost, 0);
}

TEST(TopUnits, TiesKeepTheLowerIndex) {
  const std::vector<double> risk = {1, 3, 3, 3, 0};
  EXPECT_THAT(top_units(risk, 0), ElementsAre(0, 0, 0, 0, 0));
  EXPECT_THAT(top_units(risk, 2), ElementsAre(0, 1, 1, 0, 0));
  EXPECT_THAT(top_units(risk, 4), ElementsAre(1, 1, 1, 1, 0));
}

TEST(ResidualError, IsTheGeometricSeries) {
  double sum = 0;
  for (int j = 0; j < 4000; ++j) sum += 2.5 * std::exp(2.0 * 8 * -0.01 * j);
  EXPECT_NEAR(residual_error(2.5, -0.01, 8), sum, 1e-12 * sum);
  EXPECT_EQ(residual_error(2.5, -kInf, 8), 2.5);
  EXPECT_NEAR(residual_error(1, 0, 8), 1 / 1.6e-6, 1);  // clamped to a = 1 - 1e-7
}

}  // namespace
}  // namespace statepack
