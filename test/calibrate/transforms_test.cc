// Plans of kind "klt" from a synthetic model: what the method promises of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/half.hpp"
#include "calibrate/allocate.hpp"
#include "calibrate/calibrate.hpp"
#include "codec/klt/klt.hpp"
#include "delta/step.hpp"
#include "scheme/config.hpp"
#include "synthetic.hpp"

namespace statepack {
namespace {

using testing::random_tokens;
using testing::SyntheticModel;

const std::vector<LayerShape> kShapes = {{1, 2, 16, 12, Gate::kScalar},
                                         {2, 4, 16, 12, Gate::kScalar}};

struct Made {
  Calibration calibration;
  const Plan& plan() const { return calibration.plan; }
};

/// Texts of one segment each, so that nothing is drawn.
Made make(std::string_view scheme, const std::vector<CalibrationText>& texts, int n_threads = 2,
          const std::vector<LayerShape>& shapes = kShapes) {
  CalibrationOptions options;
  options.segment_tokens = std::ssize(texts[0].tokens);
  options.n_segments = std::ssize(texts);
  options.n_snapshots = std::ssize(texts);
  ThreadPool threads(n_threads);
  const SyntheticModel model{shapes};
  const PrefillPass prefill = [&](std::span<const std::int32_t> tokens, ChunkObserver& observer) {
    model.prefill(tokens, observer, threads);
    return Status();
  };
  auto result =
      calibrate(*Scheme::parse(scheme), shapes, "model", texts, options, prefill, threads);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return {std::move(*result)};
}

std::vector<CalibrationText> two_texts() {
  return {{"a", random_tokens(160, 1)}, {"b", random_tokens(160, 2, 1000)}};
}

double mean_bits(const Plan& plan) {
  double sum = 0, n = 0;
  for (const LayerPlan& layer : plan.layers) {
    for (const std::uint8_t b : layer.bits) sum += b, ++n;
  }
  return sum / n;
}

TEST(Transforms, KeepTheBudgetAndUseIt) {
  for (const char* name : {"klt:1", "klt:2", "klt:2.5", "klt:4", "klt:7.75", "klt:8"}) {
    const Made made = make(name, two_texts());
    const double budget = std::stod(std::string(name).substr(4));
    EXPECT_LE(mean_bits(made.plan()), budget) << name;
    EXPECT_GE(mean_bits(made.plan()), budget - 0.05) << name;
    EXPECT_EQ(made.plan().kind, "klt");
    EXPECT_EQ(made.plan().scheme, name);
    for (std::size_t l = 0; l < kShapes.size(); ++l) {
      const LayerPlan& layer = made.plan().layers[l];
      EXPECT_EQ(std::ssize(layer.transform), kShapes[l].n_key_heads * 16 * 16);
      for (const float x : layer.transform) EXPECT_EQ(x, f16_to_f32(f32_to_f16(x)));
    }
    const auto compiled =
        CompiledScheme::make(*Scheme::parse(name), kShapes, &made.plan(), "model");
    ASSERT_TRUE(compiled.ok()) << compiled.status().message();
    EXPECT_NEAR((*compiled)->bits().payload, mean_bits(made.plan()) + 1,
                1);  // 16 bits / K, at most
  }
}

TEST(Transforms, MoreBitsNeverRaiseTheWeightedError) {
  double last = std::numeric_limits<double>::infinity();
  for (const char* name : {"klt:1", "klt:1.5", "klt:2", "klt:3", "klt:4", "klt:6", "klt:8"}) {
    const Made made = make(name, two_texts());
    EXPECT_LT(made.calibration.cost, last) << name;
    last = made.calibration.cost;
  }
}

// In the coordinates of the plan rows of the states that were seen are uncorrelated, and r is the
// RMS of each.
TEST(Transforms, MakeRowsUncorrelatedAndScaleThem) {
  const std::vector<LayerShape> shapes = {{1, 1, 16, 12, Gate::kScalar}};
  const std::vector<CalibrationText> text = {{"a", random_tokens(320, 3)}};
  const Made made = make("klt:4", text, 2, shapes);
  const LayerPlan& plan = made.plan().layers[0];
  const SyntheticModel model{shapes};
  const SyntheticModel::Trace run = model.trace(0, 0, model.inputs(0, text[0].tokens), 320);
  constexpr int K = 16, V = 12;
  std::vector<double> C(K * K, 0.0);
  int n = 0;
  for (int t = 32; t <= 320; t += 32) {
    for (int j = 0; j < V; ++j, ++n) {
      double z[K], power = 0;
      for (int i = 0; i < K; ++i) {
        z[i] = 0;
        for (int e = 0; e < K; ++e) z[i] += plan.transform[i * K + e] * run.S[t][e * V + j];
        power += z[i] * z[i] / K;
      }
      for (int a = 0; a < K; ++a) {
        for (int b = 0; b < K; ++b) C[a * K + b] += z[a] * z[b] / power;
      }
    }
  }
  for (int a = 0; a < K; ++a) {
    EXPECT_NEAR(std::sqrt(C[a * K + a] / n), plan.row_scale[a], 2e-3 * plan.row_scale[0]) << a;
    EXPECT_LE(plan.row_scale[a], plan.row_scale[std::max(a - 1, 0)] * 1.001);
    for (int b = 0; b < a; ++b) {
      EXPECT_NEAR(C[a * K + b] / n, 0, 4e-3 * plan.row_scale[0] * plan.row_scale[0])
          << a << " " << b;
    }
  }
}

TEST(Transforms, DoNotDependOnThreads) {
  const Made one = make("klt:3", two_texts(), 1), three = make("klt:3", two_texts(), 3);
  EXPECT_EQ(one.plan().fingerprint(), three.plan().fingerprint());
  for (std::size_t l = 0; l < kShapes.size(); ++l) {
    EXPECT_EQ(one.plan().layers[l].guard, three.plan().layers[l].guard);
  }
}

// The guard of a head is near the largest cost of rounding a state of the calibration, and falls
// with the bits.
TEST(Transforms, GuardsAreCostsSeen) {
  const Made three = make("klt:3", two_texts()), eight = make("klt:8", two_texts());
  EXPECT_EQ(three.calibration.n_passes, 3);
  for (std::size_t l = 0; l < kShapes.size(); ++l) {
    const std::vector<float>& low = three.plan().layers[l].guard;
    const std::vector<float>& high = eight.plan().layers[l].guard;
    ASSERT_EQ(std::ssize(low), kShapes[l].n_value_heads);
    for (std::size_t h = 0; h < low.size(); ++h) {
      EXPECT_GT(high[h], 0);
      EXPECT_LT(high[h], 0.1f * low[h]) << l << " " << h;
      EXPECT_LT(low[h], 10);  // columns of Z have RMS 1 on the average
    }
  }
}

// The order of the texts is not part of the method: only f32 sums round differently.
TEST(Transforms, DoNotDependOnTheOrderOfDomains) {
  std::vector<CalibrationText> texts = two_texts();
  const Made forwards = make("klt:3", texts);
  std::swap(texts[0], texts[1]);
  const Made backwards = make("klt:3", texts);
  EXPECT_NEAR(forwards.calibration.cost, backwards.calibration.cost,
              1e-4 * forwards.calibration.cost);
  for (std::size_t l = 0; l < kShapes.size(); ++l) {
    const LayerPlan& a = forwards.plan().layers[l];
    const LayerPlan& b = backwards.plan().layers[l];
    int n_other_bits = 0;
    for (std::size_t i = 0; i < a.bits.size(); ++i) n_other_bits += a.bits[i] != b.bits[i];
    EXPECT_LE(n_other_bits, 2);
    for (std::size_t i = 0; i < a.row_scale.size(); ++i) {
      EXPECT_NEAR(a.row_scale[i], b.row_scale[i], 1e-3 * a.row_scale[0]);
    }
  }
}

// Gates of channels: no transform, but feedback, and the same rules for bits.
TEST(Transforms, GatesOfChannelsGetFeedback) {
  const std::vector<LayerShape> shapes = {{2, 2, 16, 12, Gate::kChannel},
                                          {3, 3, 16, 12, Gate::kChannel}};
  double last = std::numeric_limits<double>::infinity();
  for (const char* name : {"klt:2", "klt:3", "klt:5"}) {
    const Made made = make(name, two_texts(), 2, shapes);
    EXPECT_LT(made.calibration.cost, last) << name;
    last = made.calibration.cost;
    EXPECT_LE(mean_bits(made.plan()), std::stod(std::string(name).substr(4)));
    for (std::size_t l = 0; l < shapes.size(); ++l) {
      const LayerPlan& layer = made.plan().layers[l];
      EXPECT_TRUE(layer.transform.empty());
      ASSERT_EQ(std::ssize(layer.feedback), shapes[l].n_value_heads * 16 * 16);
      double largest = 0;
      for (std::size_t i = 0; i < layer.feedback.size(); ++i) {
        if (i % 16 >= i / 16 % 16) {
          EXPECT_EQ(layer.feedback[i], 0);
        }
        largest = std::max(largest, std::fabs(double{layer.feedback[i]}));
      }
      EXPECT_GT(largest, 0.01);
      for (const float w : layer.row_weight) EXPECT_GT(w, 0);
    }
    EXPECT_TRUE(CompiledScheme::make(*Scheme::parse(name), shapes, &made.plan(), "model").ok());
  }
}

// A text is worth its own widths: what the maximum over domains keeps, one domain alone throws
// away.
TEST(Transforms, EveryDomainCounts) {
  const std::vector<CalibrationText> texts = two_texts();
  const Made both = make("klt:2", texts), first = make("klt:2", {texts[0]});
  EXPECT_GT(both.calibration.cost, first.calibration.cost);
  int n_differ = 0;
  for (std::size_t l = 0; l < kShapes.size(); ++l) {
    for (std::size_t i = 0; i < both.plan().layers[l].bits.size(); ++i) {
      n_differ += both.plan().layers[l].bits[i] != first.plan().layers[l].bits[i];
    }
  }
  EXPECT_GT(n_differ, 0);
}

TEST(Transforms, RefuseWhatTheyCannotServe) {
  ThreadPool threads(1);
  const PrefillPass unused = [](std::span<const std::int32_t>, ChunkObserver&) {
    ADD_FAILURE() << "nothing is read before the options are checked";
    return Status();
  };
  CalibrationOptions options;
  options.n_segments = options.n_snapshots = 1;
  options.segment_tokens = 160;
  const std::vector<CalibrationText> text = {{"a", random_tokens(160, 1)}};
  options.segment_tokens = 20;
  EXPECT_EQ(calibrate(*Scheme::parse("klt:4"), kShapes, "m", text, options, unused, threads)
                .status()
                .code(),
            Code::kInvalidArgument);
}

// Against every allocation of a few rows: where the multiplier meets the budget it is the optimum,
// elsewhere at most one upgrade away from it.
TEST(Transforms, AllocationAgainstExhaustiveSearch) {
  AllocationProblem problem;
  for (const klt::Width& width : klt::kWidths) problem.widths.push_back(width.bits);
  const std::vector<double> energies = {1, 0.3, 40, 0.002, 7};
  for (const double energy : energies) {
    for (const klt::Width& width : klt::kWidths) {
      problem.costs.push_back(energy * width.distortion);
    }
  }
  const int n_widths = static_cast<int>(klt::kWidths.size());
  for (int budget = 0; budget <= 40; ++budget) {
    problem.budget = budget;
    double best = std::numeric_limits<double>::infinity();
    std::vector<int> choice(energies.size(), 0);
    const auto n = static_cast<int>(std::pow(n_widths, energies.size()));
    for (int code = 0; code < n; ++code) {
      int bits = 0;
      double cost = 0;
      for (std::size_t u = 0, rest = static_cast<std::size_t>(code); u < energies.size(); ++u) {
        const klt::Width& width = klt::kWidths[rest % static_cast<std::size_t>(n_widths)];
        rest /= static_cast<std::size_t>(n_widths);
        bits += width.bits;
        cost += energies[u] * width.distortion;
      }
      if (bits <= budget) best = std::min(best, cost);
    }
    const auto exact = allocate_exact(problem);
    ASSERT_TRUE(exact.ok());
    EXPECT_NEAR(exact->cost, best, 1e-12 * best) << budget;
    const auto got = allocate_lagrangian(problem);
    ASSERT_TRUE(got.ok());
    EXPECT_LE(got->n_bits, budget);
    EXPECT_GE(got->cost, best * (1 - 1e-12));
    // The convex hull passes below every feasible point; one step of at most two bits above it.
    if (budget >= 2) {
      problem.budget = budget - 2;
      EXPECT_LE(got->cost, allocate_exact(problem)->cost * (1 + 1e-12)) << budget;
    }
  }
}

}  // namespace
}  // namespace statepack
