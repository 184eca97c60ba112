#include "calibrate/calibrate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>

#include "base/progress.hpp"
#include "calibrate/allocate.hpp"
#include "calibrate/error_meter.hpp"
#include "calibrate/run.hpp"
#include "scheme/config.hpp"
#include "scheme/layers.hpp"
#include "synthetic.hpp"

namespace statepack {
namespace {

using ::statepack::testing::random_tokens;
using ::statepack::testing::SyntheticModel;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<LayerShape> kScalar = {{1, 3, 32, 16, Gate::kScalar},
                                         {2, 2, 32, 16, Gate::kScalar}};
const std::vector<LayerShape> kChannel = {{1, 2, 8, 16, Gate::kChannel},
                                          {2, 2, 8, 16, Gate::kChannel}};

Scheme scheme_of(std::string_view name) {
  auto scheme = Scheme::parse(name);
  EXPECT_TRUE(scheme.ok()) << scheme.status().message();
  return scheme.ok() ? *scheme : Scheme{};
}

std::vector<CalibrationText> one_text() { return {{"prose", random_tokens(600, 11)}}; }
std::vector<CalibrationText> two_texts() {
  return {{"prose", random_tokens(600, 11)}, {"code", random_tokens(500, 12, 1000)}};
}

// Small, and so many snapshots that every 8th update is one.
CalibrationOptions small_options() {
  CalibrationOptions options;
  options.n_segments = 3;
  options.segment_tokens = 72;
  options.n_snapshots = 1000;
  return options;
}

struct Fixture {
  explicit Fixture(std::vector<LayerShape> shapes_,
                   std::vector<CalibrationText> texts_ = one_text())
      : shapes(std::move(shapes_)), texts(std::move(texts_)) {}

  std::vector<LayerShape> shapes;
  std::vector<CalibrationText> texts;
  CalibrationOptions options = small_options();
  int n_threads = 2;
  std::vector<std::vector<std::int32_t>> segments;  // what prefill was given, all passes

  Result<Calibration> run(std::string_view scheme) {
    ThreadPool threads(n_threads);
    const SyntheticModel model{shapes};
    const PrefillPass prefill = [&](std::span<const std::int32_t> tokens, ChunkObserver& observer) {
      segments.emplace_back(tokens.begin(), tokens.end());
      model.prefill(tokens, observer, threads);
      return Status();
    };
    return calibrate(scheme_of(scheme), shapes, "model", texts, options, prefill, threads);
  }
};

// Calibration in plain loops over a token recurrence in double: no chunks, no collector, no meter.
struct Oracle {
  struct Head {
    std::vector<double> omega, ell;          // [K] sums
    std::vector<std::vector<double>> error;  // [variant][K] sums
    double n_tokens = 0, n_states = 0;
  };
  std::vector<std::vector<std::vector<Head>>> heads;  // [layer][head][domain]

  using MakePlan = std::function<LayerPlan(int layer, int variant)>;

  Oracle(const Fixture& fixture, std::string_view scheme, std::int64_t interval, int n_variants,
         const MakePlan& plan_of) {
    const SyntheticModel model{fixture.shapes};
    const CodecConfig config = *codec_config(scheme_of(scheme));
    for (int l = 0; l < static_cast<int>(fixture.shapes.size()); ++l) {
      const LayerShape& shape = fixture.shapes[l];
      const int K = shape.K, V = shape.V, width = shape.gate_width();
      std::vector<std::unique_ptr<LayerCodec>> codecs;
      for (int v = 0; v < n_variants; ++v) {
        const LayerPlan plan = plan_of(l, v);
        auto codec = config.info->make(config, shape, &plan);
        EXPECT_TRUE(codec.ok()) << codec.status().message();
        codecs.push_back(std::move(*codec));
      }
      auto& layer = heads.emplace_back();
      for (int h = 0; h < shape.n_value_heads; ++h) {
        Head zero;
        zero.omega.assign(K, 0);
        zero.ell.assign(K, 0);
        zero.error.assign(n_variants, std::vector<double>(K, 0.0));
        auto& domains = layer.emplace_back(fixture.texts.size(), zero);
        for (std::int64_t s = 0; s < fixture.options.n_segments; ++s) {
          const auto& segment = fixture.segments[s];
          Head& head = domains[segment[0] >= 1000 ? 1 : 0];
          const auto in = model.inputs(l, segment);
          const auto n = static_cast<std::int64_t>(segment.size());
          const auto run = model.trace(l, h, in, n);
          for (std::int64_t t = 0; t < n; ++t) {
            const float* q = in.q.data() + t * in.qk_stride + shape.key_head(h) * K;
            const float* k = in.k.data() + t * in.qk_stride + shape.key_head(h) * K;
            const float* g = in.g.data() + t * in.g_stride + h * width;
            const double beta = in.beta[t * in.beta_stride + h];
            double kq = 0;
            for (int i = 0; i < K; ++i) kq += double{k[i]} * q[i];
            for (int i = 0; i < K; ++i) {
              const double gate = g[width == 1 ? 0 : i];
              const double read = std::exp(gate) * (q[i] - beta * k[i] * kq);
              head.omega[i] += read * read;
              head.ell[i] += gate;
            }
            head.n_tokens += 1;
            if ((t + 1) % interval != 0) continue;
            head.n_states += 1;
            const std::vector<float> X(run.S[t + 1].begin(), run.S[t + 1].end());
            for (int v = 0; v < n_variants; ++v) {
              std::vector<std::uint8_t> page(codecs[v]->page_bytes());
              std::vector<std::byte> scratch(codecs[v]->scratch_bytes());
              std::vector<float> restored(X.size());
              codecs[v]->encode(h, X.data(), page.data(), {}, {scratch});
              codecs[v]->decode(h, page.data(), restored.data(), {scratch});
              for (int i = 0; i < K; ++i) {
                for (int j = 0; j < V; ++j) {
                  head.error[v][i] += std::pow(double{restored[i * V + j]} - X[i * V + j], 2);
                }
              }
            }
          }
        }
      }
    }
  }

  Head pooled(int layer, int head) const {
    Head sum = heads[layer][head][0];
    for (std::size_t d = 1; d < heads[layer][head].size(); ++d) {
      const Head& other = heads[layer][head][d];
      for (std::size_t i = 0; i < sum.omega.size(); ++i) {
        sum.omega[i] += other.omega[i];
        sum.ell[i] += other.ell[i];
        for (std::size_t v = 0; v < sum.error.size(); ++v) sum.error[v][i] += other.error[v][i];
      }
      sum.n_tokens += other.n_tokens;
      sum.n_states += other.n_states;
    }
    return sum;
  }

  std::vector<float> row_weight(int layer, int n_heads) const {
    std::vector<float> w;
    for (int h = 0; h < n_heads; ++h) {
      const Head head = pooled(layer, h);
      double log_mean = 0;
      for (double x : head.omega) log_mean += std::log(x / head.n_tokens) / 8;
      log_mean /= static_cast<double>(head.omega.size());
      for (double x : head.omega) {
        w.push_back(static_cast<float>(std::exp(std::log(x / head.n_tokens) / 8 - log_mean)));
      }
    }
    return w;
  }
};

double lifetime(double ell) { return *lifetime_weight(ell, 2048); }

// Plans with all rows of all heads at one width, weights of `weights[layer]`.
Oracle::MakePlan uniform_plans(const Fixture& fixture, const std::vector<int>& widths,
                               const std::vector<std::vector<float>>& weights) {
  return [=, shapes = fixture.shapes](int layer, int variant) {
    const auto n = static_cast<std::size_t>(shapes[layer].n_value_heads * shapes[layer].K);
    LayerPlan plan;
    plan.bits.assign(n, static_cast<std::uint8_t>(widths[variant]));
    plan.row_weight = weights.empty() ? std::vector<float>(n, 1.0f) : weights[layer];
    return plan;
  };
}

void expect_near(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-6f * want[i]);
}

// The oracle's states come from double, rounded once; the collector's are f32 sums, 1e-6 away. At 8
// bits a rounding error is about 1e-2 of the state's, and 1e-6 more of either flips few codes.
void expect_cost(double got, double want) { EXPECT_NEAR(got, want, 1e-3 * want); }

// Rows of a head-wise plan: [global head] -> bits.
std::vector<int> head_bits(const Plan& plan) {
  std::vector<int> bits;
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    const int K = plan.shapes[l].K;
    for (int h = 0; h < plan.shapes[l].n_value_heads; ++h) {
      const auto row = plan.layers[l].bits.begin() + h * K;
      EXPECT_THAT(std::vector<int>(row, row + K), Each(int{*row}));
      bits.push_back(*row);
    }
  }
  return bits;
}

void check_scalar(CombineDomains how, const std::vector<CalibrationText>& texts,
                  std::string_view scheme, const std::vector<int>& widths, std::int64_t n_pivots) {
  Fixture fixture{kScalar, texts};
  fixture.options.combine = how;
  fixture.options.n_pivots = n_pivots;
  fixture.options.n_segments = 4;
  auto result = fixture.run(scheme);
  ASSERT_TRUE(result.ok()) << result.status().message();
  const Plan& plan = result->plan;
  EXPECT_EQ(result->n_passes, 1);
  EXPECT_EQ(plan.kind, "stepquant");
  EXPECT_EQ(plan.scheme, scheme);

  std::vector<std::vector<float>> weights;
  const Oracle statistics(fixture, scheme, 8, 0, {});
  for (int l = 0; l < 2; ++l) {
    weights.push_back(statistics.row_weight(l, kScalar[l].n_value_heads));
    expect_near(plan.layers[l].row_weight, weights.back());
    weights.back() = plan.layers[l].row_weight;  // bit-equal input to the codec
  }
  const auto n_widths = static_cast<int>(widths.size());
  const Oracle oracle(fixture, scheme, 8, n_widths, uniform_plans(fixture, widths, weights));
  AllocationProblem problem{widths, {}, 0};
  for (int l = 0; l < 2; ++l) {
    const int K = kScalar[l].K, V = kScalar[l].V;
    for (int h = 0; h < kScalar[l].n_value_heads; ++h) {
      std::vector<Oracle::Head> domains = oracle.heads[l][h];
      if (how == CombineDomains::kMean) domains = {oracle.pooled(l, h)};
      for (int v = 0; v < n_widths; ++v) {
        double most = 0;
        for (const Oracle::Head& head : domains) {
          double d = 0;
          for (int i = 0; i < K; ++i) {
            d += std::pow(double{weights[l][h * K + i]}, 2) * head.error[v][i];
          }
          most =
              std::max(most, lifetime(head.ell[0] / head.n_tokens) * d / (head.n_states * K * V));
        }
        problem.costs.push_back(most);
      }
    }
  }
  const std::int64_t n = problem.n_units();
  const int nominal = scheme.back() - '0';
  problem.budget = nominal * n;
  const Allocation free = *allocate_exact(problem);
  std::vector<double> risk;
  for (std::int64_t u = 0; u < n; ++u) {
    const auto c = std::find(widths.begin(), widths.end(), int{free.bits[u]}) - widths.begin();
    risk.push_back(problem.costs_of(u)[c]);
  }
  problem.budget = nominal * n - 8 * n_pivots;
  const Allocation want = *allocate_rest(problem, top_units(risk, n_pivots), allocate_exact);
  EXPECT_EQ(head_bits(plan), std::vector<int>(want.bits.begin(), want.bits.end()));
  expect_cost(result->cost, want.cost);
}

TEST(Calibrate, HeadWidthsEqualAPlainLoop) {
  check_scalar(CombineDomains::kMean, one_text(), "stepquant:6", {4, 6, 8}, 0);
  check_scalar(CombineDomains::kMean, one_text(), "stepquant:4", {2, 4, 6, 8}, 0);
  check_scalar(CombineDomains::kMean, two_texts(), "stepquant:6", {4, 6, 8}, 1);
  check_scalar(CombineDomains::kMax, two_texts(), "stepquant:6", {4, 6, 8}, 1);
  check_scalar(CombineDomains::kMax, two_texts(), "stepquant:4", {2, 4, 6, 8}, 0);
}

TEST(Calibrate, NominalEightIsEightEverywhereButInPivots) {
  Fixture fixture{kScalar};
  auto result = fixture.run("stepquant:8");
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_THAT(head_bits(result->plan), Each(8));
  fixture.options.n_pivots = 2;
  result = fixture.run("stepquant:8");
  ASSERT_TRUE(result.ok()) << result.status().message();
  const auto bits = head_bits(result->plan);
  EXPECT_EQ(std::count(bits.begin(), bits.end(), 16), 2);
  EXPECT_EQ(std::count(bits.begin(), bits.end(), 8), 3);
}

TEST(Calibrate, RowWidthsEqualAPlainLoop) {
  Fixture fixture{kChannel};
  fixture.options.n_pivots = 3;
  auto result = fixture.run("stepquant:4");
  ASSERT_TRUE(result.ok()) << result.status().message();
  const Plan& plan = result->plan;
  EXPECT_EQ(result->n_passes, 1);

  std::vector<std::vector<float>> weights;
  const Oracle statistics(fixture, "stepquant:4", 8, 0, {});
  for (int l = 0; l < 2; ++l) {
    weights.push_back(statistics.row_weight(l, kChannel[l].n_value_heads));
    expect_near(plan.layers[l].row_weight, weights.back());
    weights.back() = plan.layers[l].row_weight;
  }
  const std::vector<int> widths = {2, 4, 6, 8, 16};
  const auto distortions = [&](const Oracle& oracle, int v, std::vector<double>& all) {
    for (int l = 0; l < 2; ++l) {
      for (int h = 0; h < kChannel[l].n_value_heads; ++h) {
        const Oracle::Head& head = oracle.heads[l][h][0];
        for (int i = 0; i < kChannel[l].K; ++i) {
          all.push_back(lifetime(head.ell[i] / head.n_tokens) * head.error[v][i] /
                        (head.n_states * kChannel[l].V));
        }
      }
    }
  };
  const auto plans = uniform_plans(fixture, widths, weights);
  const Oracle oracle(fixture, "stepquant:4", 8, 5, plans);
  std::vector<double> at_8, at_16, risk;
  distortions(oracle, 3, at_8);
  distortions(oracle, 4, at_16);
  for (std::size_t u = 0; u < at_8.size(); ++u) risk.push_back(at_8[u] - at_16[u]);
  const std::vector<std::uint8_t> pivots = top_units(risk, 3);

  // Once more, the pivots out of the fit of the columns.
  const Oracle again(fixture, "stepquant:4", 8, 4, [&](int layer, int variant) {
    LayerPlan layer_plan = plans(layer, variant);
    const std::size_t first = layer == 0 ? 0 : 16;  // 2 heads of 8 rows in layer 0
    for (std::size_t i = 0; i < layer_plan.bits.size(); ++i) {
      if (pivots[first + i] != 0) layer_plan.bits[i] = 16;
    }
    return layer_plan;
  });
  AllocationProblem problem{{2, 4, 6, 8}, {}, 4 * 32 - 8 * 3};
  std::vector<std::vector<double>> columns(4);
  for (int v = 0; v < 4; ++v) distortions(again, v, columns[v]);
  for (std::size_t u = 0; u < 32; ++u) {
    for (int v = 0; v < 4; ++v) problem.costs.push_back(columns[v][u]);
  }
  const Allocation want = *allocate_rest(problem, pivots, allocate_lagrangian);
  std::vector<std::uint8_t> got = plan.layers[0].bits;
  got.insert(got.end(), plan.layers[1].bits.begin(), plan.layers[1].bits.end());
  EXPECT_EQ(got, want.bits);
  EXPECT_EQ(std::count(got.begin(), got.end(), 16), 3);
  expect_cost(result->cost, want.cost);
}

void check_pace(std::vector<LayerShape> shapes, CombineDomains how) {
  Fixture fixture{shapes, two_texts()};
  fixture.options.interval = 24;
  fixture.options.combine = how;
  fixture.options.n_segments = 4;
  auto result = fixture.run("pace:4/8");
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->plan.kind, "pace-high");
  const Oracle oracle(fixture, "pace:4/8", 24, 1, [&](int layer, int) {
    LayerPlan plan;
    plan.high.assign(shapes[layer].n_value_heads, 0);
    return plan;
  });
  double low = 0;
  for (std::size_t l = 0; l < shapes.size(); ++l) {
    std::vector<double> risk;
    for (int h = 0; h < shapes[l].n_value_heads; ++h) {
      std::vector<Oracle::Head> domains = oracle.heads[l][h];
      if (how == CombineDomains::kMean) domains = {oracle.pooled(int(l), h)};
      double most = 0;
      for (const Oracle::Head& head : domains) {
        double energy = 0;
        for (int i = 0; i < shapes[l].K; ++i) {
          const double a = std::exp(head.ell[i] / head.n_tokens);
          energy += head.error[0][i] / head.n_states / (1 - std::pow(a, 16));
        }
        most = std::max(most, energy);
      }
      risk.push_back(most);
    }
    EXPECT_EQ(result->plan.layers[l].high, top_units(risk, 1)) << l;  // ceil(2/4), ceil(3/4)
    low += std::accumulate(risk.begin(), risk.end(), 0.0) -
           *std::max_element(risk.begin(), risk.end());
  }
  expect_cost(result->cost, low);
}

void check_damp(std::vector<LayerShape> shapes, CombineDomains how) {
  Fixture fixture{shapes, two_texts()};
  fixture.options.interval = 24;
  fixture.options.segment_tokens = 48;
  fixture.options.combine = how;
  fixture.options.n_segments = 4;
  fixture.options.n_snapshots = 1000;  // all
  auto result = fixture.run("damp:4");
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->plan.kind, "damp-rows");
  const Oracle oracle(fixture, "damp:4", 24, 1, [&](int layer, int) {
    const LayerShape& s = shapes[layer];
    LayerPlan plan;
    plan.bits.assign(s.n_value_heads * s.K, 4);
    return plan;
  });
  double low = 0;
  for (std::size_t l = 0; l < shapes.size(); ++l) {
    std::vector<std::uint8_t> expected;
    for (int h = 0; h < shapes[l].n_value_heads; ++h) {
      std::vector<Oracle::Head> domains = oracle.heads[l][h];
      if (how == CombineDomains::kMean) domains = {oracle.pooled(int(l), h)};
      std::vector<double> risk(shapes[l].K, 0.0);
      for (const Oracle::Head& head : domains) {
        for (int i = 0; i < shapes[l].K; ++i) {
          double lifetime = 0, kept = 1;
          for (int tau = 0; tau <= 256; ++tau) {
            lifetime += kept;
            kept *= std::exp(2 * head.ell[i] / head.n_tokens);
          }
          risk[i] = std::max(risk[i], head.error[0][i] / head.n_states * lifetime);
        }
      }
      for (const std::uint8_t chosen : top_units(risk, shapes[l].K / 8)) {
        if (chosen == 0) low += risk[expected.size() % shapes[l].K];
        expected.push_back(chosen != 0 ? 16 : 4);
      }
    }
    EXPECT_EQ(result->plan.layers[l].bits, expected) << l;
  }
  expect_cost(result->cost, low);
  const auto compiled =
      CompiledScheme::make(Scheme::parse("damp:4").value(), shapes, &result->plan, "");
  EXPECT_TRUE(compiled.ok()) << compiled.status().message();
}

TEST(Calibrate, ProtectedRowsEqualAPlainLoop) {
  for (auto how : {CombineDomains::kMean, CombineDomains::kMax}) {
    check_damp(kScalar, how);
    check_damp({{1, 3, 32, 16, Gate::kChannel}, {2, 2, 32, 16, Gate::kChannel}}, how);
  }
}

TEST(Calibrate, HighHeadsEqualAPlainLoop) {
  for (auto how : {CombineDomains::kMean, CombineDomains::kMax}) {
    check_pace(kScalar, how);
    check_pace({{1, 3, 32, 16, Gate::kChannel}, {2, 2, 32, 16, Gate::kChannel}}, how);
  }
}

TEST(Calibrate, AQuarterOfTheHeadsRoundedUpIsHigh) {
  for (const auto& [n_heads, n_high] : {std::pair(1, 1), {4, 1}, {5, 2}, {8, 2}, {9, 3}}) {
    Fixture fixture({{1, n_heads, 32, 16, Gate::kScalar}});
    fixture.options.interval = 24;
    fixture.options.n_segments = 1;
    auto result = fixture.run("pace:4/8");
    ASSERT_TRUE(result.ok()) << result.status().message();
    const auto& high = result->plan.layers[0].high;
    EXPECT_EQ(std::count(high.begin(), high.end(), 1), n_high) << n_heads;
  }
}

std::string bytes_of(const Plan& plan) {
  const std::string path = (std::filesystem::path(::testing::TempDir()) /
                            ("plan_" + std::to_string(::getpid()) + ".safetensors"))
                               .string();
  const Status saved = plan.save(path);
  EXPECT_TRUE(saved.ok()) << saved.message();
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  return bytes;
}

struct Made {
  std::string_view scheme;
  std::vector<LayerShape> shapes;
  std::int64_t n_pivots;
  int n_passes_without_memory;
};
const std::vector<Made> kMade = {{"stepquant:6", kScalar, 1, 2},
                                 {"stepquant:4", kChannel, 3, 3},
                                 {"stepquant:6", kChannel, 0, 2},
                                 {"pace:4/8", kScalar, -1, 1}};

TEST(Calibrate, SamePlanForAnyThreadsAndMemory) {
  for (const Made& made : kMade) {
    Fixture fixture{made.shapes, two_texts()};
    fixture.options.n_pivots = made.n_pivots;
    fixture.options.n_snapshots = 7;  // a true choice
    fixture.options.interval = made.scheme == "pace:4/8" ? 24 : 0;
    fixture.n_threads = 1;
    auto first = fixture.run(made.scheme);
    ASSERT_TRUE(first.ok()) << first.status().message();
    EXPECT_EQ(first->n_passes, 1);
    const std::string bytes = bytes_of(first->plan);
    for (int n_threads : {2, 3}) {
      fixture.n_threads = n_threads;
      EXPECT_EQ(bytes_of(fixture.run(made.scheme)->plan), bytes) << made.scheme;
    }
    fixture.options.snapshot_bytes = 0;
    auto streamed = fixture.run(made.scheme);
    ASSERT_TRUE(streamed.ok());
    EXPECT_EQ(streamed->n_passes, made.n_passes_without_memory);
    EXPECT_EQ(bytes_of(streamed->plan), bytes) << made.scheme;
    fixture.options.seed = 1;
    auto other = fixture.run(made.scheme);
    ASSERT_TRUE(other.ok());
    EXPECT_EQ(other->plan.settings["seed"], "1");
    EXPECT_NE(bytes_of(other->plan), bytes);
  }
}

TEST(Calibrate, PlansLoadAndCompile) {
  for (const Made& made : kMade) {
    Fixture fixture{made.shapes};
    fixture.options.n_pivots = made.n_pivots;
    fixture.options.interval = made.scheme == "pace:4/8" ? 24 : 0;
    auto result = fixture.run(made.scheme);
    ASSERT_TRUE(result.ok()) << result.status().message();
    const std::string bytes = bytes_of(result->plan);
    auto plan = Plan::parse(std::as_bytes(std::span(bytes)), "plan");
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(plan->settings, result->plan.settings);
    EXPECT_THAT(plan->settings["layer.0"], HasSubstr("half-life"));
    EXPECT_EQ(plan->settings["text.0.sha256"].size(), 64u);
    auto compiled = CompiledScheme::make(scheme_of(made.scheme), made.shapes, &*plan, "model");
    ASSERT_TRUE(compiled.ok()) << compiled.status().message();
    double code_bits = 0, n_values = 0;
    for (std::size_t l = 0; l < made.shapes.size(); ++l) {
      const auto n = static_cast<double>(made.shapes[l].n_values());
      code_bits += result->layers[l].mean_bits * n;
      n_values += n;
    }
    const SchemeBits bits = (*compiled)->bits();
    EXPECT_NEAR(8.0 * static_cast<double>(bits.parts.codes + bits.parts.pivots), code_bits, 1e-6);
    EXPECT_GT(bits.payload, code_bits / n_values);
  }
}

TEST(Calibrate, DefaultPivotsFollowThePapersShares) {
  // 72 heads: 32/2304 of them is 1.
  Fixture heads(std::vector<LayerShape>(2, {12, 36, 4, 16, Gate::kScalar}));
  heads.options.n_segments = 1;
  EXPECT_EQ(heads.run("stepquant:6")->plan.settings["pivots"], "1");
  Fixture rows(std::vector<LayerShape>{
      {20, 20, 8, 16, Gate::kChannel}});  // 160 rows: 512/81920 of them is 1
  rows.options.n_segments = 1;
  EXPECT_EQ(rows.run("stepquant:6")->plan.settings["pivots"], "1");
  Fixture small{kScalar};
  EXPECT_EQ(small.run("stepquant:6")->plan.settings["pivots"], "0");
}

TEST(Calibrate, SegmentsAreSharedOutOverTheTexts) {
  Fixture fixture{kScalar, two_texts()};
  ASSERT_TRUE(fixture.run("stepquant:6").ok());
  ASSERT_EQ(fixture.segments.size(), 3u);
  for (std::size_t s = 0; s < 3; ++s) {
    EXPECT_EQ(fixture.segments[s].size(), 72u);
    const auto& text = fixture.texts[s == 2 ? 1 : 0].tokens;
    EXPECT_NE(std::search(text.begin(), text.end(), fixture.segments[s].begin(),
                          fixture.segments[s].end()),
              text.end());
  }
}

TEST(Calibrate, SaysWhatIsWrong) {
  struct Case {
    std::string_view scheme;
    std::function<void(Fixture&)> spoil;
    Code code;
    std::string message;
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<Case> cases = {
      {"pace:4", [](Fixture&) {}, Code::kInvalidArgument, "scheme pace:4 needs no plan"},
      {"int8", [](Fixture&) {}, Code::kInvalidArgument, "needs no plan"},
      {"stepquant:6", [](Fixture& f) { f.texts.clear(); }, Code::kInvalidArgument,
       "there is no text to calibrate on"},
      {"stepquant:6", [](Fixture& f) { f.texts[0].tokens.resize(71); }, Code::kInvalidArgument,
       "text 'prose' has 71 tokens, fewer than one segment of 72"},
      {"stepquant:6", [](Fixture& f) { f.options.n_segments = 0; }, Code::kInvalidArgument,
       "the number of segments is 0; take 1 to 1048576"},
      {"stepquant:6", [](Fixture& f) { f.options.n_snapshots = 0; }, Code::kInvalidArgument,
       "the number of snapshots is 0"},
      {"stepquant:6", [](Fixture& f) { f.texts = two_texts(), f.options.n_snapshots = 1; },
       Code::kInvalidArgument, "the number of snapshots is 1; take 2"},
      {"stepquant:6", [](Fixture& f) { f.options.segment_tokens = -4; }, Code::kInvalidArgument,
       "the length of a segment in tokens is -4"},
      {"stepquant:6", [](Fixture& f) { f.options.interval = 1000; }, Code::kInvalidArgument,
       "no state can be sampled from text 'prose'"},
      {"pace:4/8", [](Fixture&) {}, Code::kInvalidArgument,  // every 256 of 72 tokens
       "no state can be sampled from text 'prose'"},
      {"stepquant:6", [](Fixture& f) { f.options.gamma = 2; }, Code::kInvalidArgument,
       "gamma is 2"},
      {"stepquant:6", [=](Fixture& f) { f.options.gamma = nan; }, Code::kInvalidArgument, "gamma"},
      {"stepquant:6", [](Fixture& f) { f.options.horizon = 0; }, Code::kInvalidArgument,
       "the horizon in tokens is 0"},
      {"stepquant:6", [](Fixture& f) { f.options.n_pivots = 4; }, Code::kInvalidArgument,
       "4 pivots do not fit the budget of 5 heads at 6 bits (a pivot is charged 8)"},
      {"stepquant:6", [](Fixture& f) { f.options.n_pivots = 1'000'000; }, Code::kInvalidArgument,
       "1000000 pivots do not fit"},
      {"stepquant:6", [](Fixture& f) { f.options.n_pivots = -2; }, Code::kInvalidArgument,
       "the number of pivots (-1: the paper's share) is -2"},
      {"stepquant:6", [](Fixture& f) { f.shapes.clear(); }, Code::kInvalidArgument,
       "the model has no recurrent layer"},
      {"stepquant:6", [](Fixture& f) { f.shapes.push_back(kChannel[0]); }, Code::kUnsupported,
       "recurrent layers of different widths"},
  };
  for (const Case& c : cases) {
    Fixture fixture{kScalar};
    c.spoil(fixture);
    auto result = fixture.run(c.scheme);
    ASSERT_FALSE(result.ok()) << c.message;
    EXPECT_EQ(result.status().code(), c.code) << result.status().message();
    EXPECT_THAT(result.status().message(), HasSubstr(c.message));
    EXPECT_TRUE(fixture.segments.empty()) << "refused before the model ran: " << c.message;
  }
}

// Shows one chunk of constants for every 8 tokens of every head; the state is S all the time.
Status constant_prefill(const std::vector<LayerShape>& shapes, std::span<const std::int32_t> tokens,
                        ChunkObserver& observer, float q, float g, const std::vector<float>& S) {
  for (int l = 0; l < static_cast<int>(shapes.size()); ++l) {
    const std::vector<float> queries(S.size(), q), keys(S.size(), 0.1f), gates(S.size(), g);
    for (int h = 0; h < shapes[l].n_value_heads; ++h) {
      for (std::size_t t = 0; t < tokens.size(); t += 8) {
        ChunkView chunk;
        chunk.layer = l, chunk.value_head = h;
        chunk.n_tokens = 8, chunk.position = static_cast<std::int64_t>(t);
        chunk.q = queries.data(), chunk.k = keys.data(), chunk.g = gates.data();
        chunk.beta = keys.data(), chunk.d = keys.data();
        chunk.S_before = chunk.S_after = S.data();
        observer.on_chunk(chunk);
      }
    }
  }
  return {};
}

TEST(Calibrate, RefusesWhatIsNotFiniteAndLivesWithExtremes) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  ThreadPool threads(1);
  const auto run = [&](float q, float g, float state) {
    return calibrate(
        scheme_of("stepquant:6"), kScalar, "", one_text(), small_options(),
        [&](std::span<const std::int32_t> tokens, ChunkObserver& observer) {
          return constant_prefill(kScalar, tokens, observer, q, g,
                                  std::vector<float>(32 * 16, state));
        },
        threads);
  };
  EXPECT_EQ(run(1, -1, nan).status().code(), Code::kNotFinite);
  EXPECT_EQ(run(1, -1, inf).status().code(), Code::kNotFinite);
  EXPECT_THAT(run(nan, -1, 1).status().message(), HasSubstr("layer 0, head 0, row 0"));
  EXPECT_EQ(run(inf, -1, 1).status().code(), Code::kNotFinite);
  EXPECT_EQ(run(1, nan, 1).status().code(), Code::kNotFinite);
  EXPECT_EQ(run(1, 0.01f, 1).status().code(), Code::kNotFinite);  // grows
  for (float state : {0.0f, 1e-30f, 1e4f}) {
    for (float g : {0.0f, -1e-6f, -1000.0f, -inf}) {
      auto result = run(0, g, state);
      ASSERT_TRUE(result.ok()) << state << " " << g << ": " << result.status().message();
      const auto bits = head_bits(result->plan);
      EXPECT_LE(std::accumulate(bits.begin(), bits.end(), 0), 6 * 5);
      for (float w : result->plan.layers[0].row_weight) EXPECT_FLOAT_EQ(w, 1);
      EXPECT_FALSE(result->layers[0].text().empty());
    }
  }
}

// A pivot is worth what half precision saves: nothing where values lie beyond its range.
TEST(Calibrate, RowsBeyondHalfPrecisionAreNoPivots) {
  std::vector<float> S;
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 16; ++j) {
      const float x = 1 + 0.01f * float((i * 7 + j * 3) % 11);
      S.push_back(i == 2 ? 1e6f * x : i == 5 ? 100 * x : x);
    }
  }
  CalibrationOptions options = small_options();
  options.n_pivots = 1;
  ThreadPool threads(1);
  const std::vector<LayerShape> shapes = {{1, 1, 8, 16, Gate::kChannel}};
  auto result = calibrate(
      scheme_of("stepquant:6"), shapes, "", one_text(), options,
      [&](std::span<const std::int32_t> tokens, ChunkObserver& observer) {
        return constant_prefill(shapes, tokens, observer, 1, -1, S);
      },
      threads);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->plan.layers[0].bits[5], 16);
  EXPECT_NE(result->plan.layers[0].bits[2], 16);
}

TEST(CalibrationRun, SamplesEveryIntervalOfEachSegment) {
  const auto texts = two_texts();
  CalibrationOptions options = small_options();
  options.segment_tokens = 10;
  ThreadPool threads(1);
  const PrefillPass none;
  const CalibrationRun run(kScalar, texts, options, none, threads);
  const Samples samples = run.every(4);
  EXPECT_THAT(samples.updates,
              ElementsAre(ElementsAre(4, 8, 14, 18, 24, 28), ElementsAre(4, 8, 14, 18, 24, 28)));
  EXPECT_THAT(samples.domains[0], ElementsAre(0, 0, 0, 0, 1, 1));
}

TEST(CalibrationRun, DrawsSnapshotsFromEachTextAndForEachLayerAnew) {
  const auto texts = two_texts();
  CalibrationOptions options = small_options();
  options.n_snapshots = 5;
  ThreadPool threads(1);
  const PrefillPass none;
  const CalibrationRun run(kScalar, texts, options, none, threads);
  const Samples samples = run.draw_samples(8);
  for (int l = 0; l < 2; ++l) {
    EXPECT_THAT(samples.domains[l], ElementsAre(0, 0, 0, 1, 1));
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_EQ(samples.updates[l][i] % 8, 0);
      EXPECT_EQ(samples.updates[l][i] > 144, samples.domains[l][i] == 1);  // 2 segments of 72
      EXPECT_LE(samples.updates[l][i], 216);
    }
  }
  EXPECT_NE(samples.updates[0], samples.updates[1]);
}

// Each head is compiled alone; a codec of the whole layer must leave the same errors.
TEST(ErrorMeter, EqualsTheCodecOfTheWholeLayer) {
  const LayerShape shape{1, 3, 8, 16, Gate::kChannel};
  std::mt19937_64 random(3);
  std::vector<std::vector<LayerPlan>> variants(2);
  for (auto& variant : variants) {
    LayerPlan plan;
    for (int i = 0; i < 3 * 8; ++i) {
      plan.bits.push_back(static_cast<std::uint8_t>(2 + 2 * (random() % 4)));
      plan.row_weight.push_back(std::exp2(static_cast<float>(random() % 7) - 3));
    }
    variant.push_back(plan);
  }
  const CodecConfig config = *codec_config(scheme_of("stepquant:4"));
  auto meter = ErrorMeter::make(config, {shape}, variants, 2);
  ASSERT_TRUE(meter.ok()) << meter.status().message();
  for (int h = 0; h < 3; ++h) {
    std::vector<std::vector<double>> error(2, std::vector<double>(8));
    std::vector<double> rows(8), columns(16);
    for (int n = 0; n < 3; ++n) {
      std::vector<float> X(8 * 16);
      for (float& x : X) x = static_cast<float>(random() >> 40) * 0x1p-24f - 0.5f;
      meter->add(0, h, n % 2, X.data());
      for (int v = 0; v < 2; ++v) {
        auto codec = *config.info->make(config, shape, &variants[v][0]);
        std::vector<std::uint8_t> page(codec->page_bytes());
        std::vector<std::byte> scratch(codec->scratch_bytes());
        std::vector<float> restored(X.size());
        codec->encode(h, X.data(), page.data(), {}, {scratch});
        codec->decode(h, page.data(), restored.data(), {scratch});
        for (int i = 0; i < 8; ++i) {
          for (int j = 0; j < 16; ++j) {
            error[v][i] += std::pow(double{restored[i * 16 + j]} - X[i * 16 + j], 2);
          }
        }
      }
      for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 16; ++j) {
          rows[i] += std::pow(double{X[i * 16 + j]}, 2);
          columns[j] += std::pow(double{X[i * 16 + j]}, 2);
        }
      }
    }
    ErrorMeter::Sums all = meter->sums(0, h, 0);
    EXPECT_EQ(all.n_states, 2);
    all.add(meter->sums(0, h, 1));
    EXPECT_EQ(all.n_states, 3);
    for (int i = 0; i < 8; ++i) {
      for (int v = 0; v < 2; ++v) {
        EXPECT_NEAR(all.row_error[v][i], error[v][i], 1e-12 * error[v][i]) << h << " " << v;
      }
      EXPECT_NEAR(all.row_power[i], rows[i], 1e-12 * rows[i]);
    }
    for (int j = 0; j < 16; ++j) EXPECT_NEAR(all.column_power[j], columns[j], 1e-12 * columns[j]);
  }
}

TEST(Calibrate, HandsOnWhatPrefillSays) {
  ThreadPool threads(1);
  int n_calls = 0;
  auto result = calibrate(
      scheme_of("stepquant:6"), kScalar, "", one_text(), small_options(),
      [&](std::span<const std::int32_t>, ChunkObserver&) {
        ++n_calls;
        return Status(Code::kInterrupted, "stopped inside");
      },
      threads);
  EXPECT_EQ(result.status().code(), Code::kInterrupted);
  EXPECT_EQ(result.status().message(), "stopped inside");
  EXPECT_EQ(n_calls, 1);
}

// In a child process, because the flag stays up.
TEST(CalibrateDeathTest, StopsBetweenSegmentsWhenInterrupted) {
  EXPECT_EXIT(
      {
        install_interrupt_handler();
        ThreadPool threads(1);
        int n_calls = 0;
        auto result = calibrate(
            scheme_of("stepquant:6"), kScalar, "", one_text(), small_options(),
            [&](std::span<const std::int32_t> tokens, ChunkObserver& observer) {
              if (++n_calls == 2) std::raise(SIGINT);
              return constant_prefill(kScalar, tokens, observer, 1, -1,
                                      std::vector<float>(32 * 16, 1));
            },
            threads);
        std::fprintf(stderr, "%s after %d", result.status().message().c_str(), n_calls);
        std::exit(result.status().code() == Code::kInterrupted ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "calibration was stopped; no plan was made after 2");
}

}  // namespace
}  // namespace statepack
