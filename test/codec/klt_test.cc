// klt: pages of the independent script, the identities of the transform, and what the fit promises.
#include "codec/klt/klt.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "../simd_targets.hpp"
#include "base/matrix.hpp"
#include "codec/klt/fit.hpp"
#include "codec/klt/head_fit.hpp"
#include "codec/pack.hpp"
#include "codec_cases.hpp"
#include "golden_hex.hpp"
#include "states.hpp"

namespace statepack {
namespace {

using nlohmann::json;
using testing::floats;
using testing::from_hex;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

LayerPlan uniform_plan(const LayerShape& shape, int bits) {
  LayerPlan plan;
  plan.bits.assign(at(shape.n_value_heads) * at(shape.K), static_cast<std::uint8_t>(bits));
  plan.row_scale.assign(plan.bits.size(), 1.0f);
  return plan;
}

std::unique_ptr<LayerCodec> make(const LayerShape& shape, const LayerPlan& plan) {
  auto codec = kKltInfo.make(testing::config_of("klt", "4"), shape, &plan);
  EXPECT_TRUE(codec.ok()) << codec.status().message();
  return std::move(codec).value();
}

TEST(Klt, PagesAndRestoredStatesMatchTheIndependentScript) {
  std::ifstream file(std::string(SP_SOURCE_DIR) + "/test/data/klt_goldens.json");
  const json document = json::parse(file);
  int n_cases = 0;
  for (const json& golden : document["cases"]) {
    const json& state = document["states"][golden["state"].get<std::size_t>()];
    const std::string label =
        golden["widths"].get<std::string>() + ", " + state["name"].get<std::string>();
    // The golden is the second of two heads, so that a page offset is in play.
    const LayerShape shape{1, 2, state["K"], state["V"], Gate::kScalar};
    LayerPlan plan;
    for (int h = 0; h < 2; ++h) {
      for (const json& b : golden["bits"]) plan.bits.push_back(b.get<std::uint8_t>());
      for (const json& r : golden["row_scale"]) plan.row_scale.push_back(r.get<float>());
    }
    testing::Packed packed(make(shape, plan));
    const std::vector<std::uint8_t> want = from_hex(golden["page"]);
    ASSERT_EQ(packed.page.size(), 2 * want.size()) << label;
    packed.encode(1, floats(state["values"]));
    const std::vector<std::uint8_t> got(packed.page.end() - std::ssize(want), packed.page.end());
    EXPECT_EQ(got, want) << label;
    const std::vector<float> restored = floats(golden["restored"]), back = packed.decode(1);
    ASSERT_EQ(back.size(), restored.size()) << label;
    for (std::size_t i = 0; i < back.size(); ++i) {
      ASSERT_EQ(back[i], restored[i]) << label << " value " << i;
    }
    ++n_cases;
  }
  EXPECT_EQ(n_cases, 48);
}

// Z = M S read at M^-T x gives S^T x, and the delta rule written at M k keeps Z = M S: both in
// double, to 1e-12, with the matrix that calibration uses for M^-1.
TEST(Klt, TransformIdentitiesInDouble) {
  constexpr int K = 24, V = 17;
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  std::vector<double> M(K * K), inverse(K * K), S(K * V), Z(K * V, 0.0);
  for (double& x : M) x = normal(random);
  ASSERT_TRUE(invert(M, K, inverse));
  for (double& x : S) x = normal(random);
  const auto multiply = [&](const std::vector<double>& A, bool transposed,
                            const std::vector<double>& x) {
    std::vector<double> y(K, 0.0);
    for (int i = 0; i < K; ++i) {
      for (int j = 0; j < K; ++j) y[at(i)] += A[at(transposed ? j * K + i : i * K + j)] * x[at(j)];
    }
    return y;
  };
  for (int i = 0; i < K; ++i) {
    for (int l = 0; l < K; ++l) {
      for (int j = 0; j < V; ++j) Z[at(i * V + j)] += M[at(i * K + l)] * S[at(l * V + j)];
    }
  }
  const auto read = [&](const std::vector<double>& X, const std::vector<double>& x, int j) {
    double sum = 0;
    for (int i = 0; i < K; ++i) sum += X[at(i * V + j)] * x[at(i)];
    return sum;
  };
  for (int t = 0; t < 60; ++t) {
    std::vector<double> q(K), k(K);
    double norm = 0;
    for (double& x : q) x = normal(random);
    for (double& x : k) {
      x = normal(random);
      norm += x * x;
    }
    for (double& x : k) x /= std::sqrt(norm);
    const double a = std::exp(-0.1 * std::fabs(normal(random))), b = 0.5 + 0.01 * t;
    const std::vector<double> read_k = multiply(inverse, true, k);
    const std::vector<double> read_q = multiply(inverse, true, q);
    const std::vector<double> write_k = multiply(M, false, k);
    for (int j = 0; j < V; ++j) {
      const double v = normal(random);
      const double u = b * (v - a * read(S, k, j)), uz = b * (v - a * read(Z, read_k, j));
      ASSERT_NEAR(u, uz, 1e-12 * (1 + std::fabs(u))) << t;
      for (int i = 0; i < K; ++i) {
        S[at(i * V + j)] = a * S[at(i * V + j)] + k[at(i)] * u;
        Z[at(i * V + j)] = a * Z[at(i * V + j)] + write_k[at(i)] * uz;
      }
      const double o = read(S, q, j);
      ASSERT_NEAR(o, read(Z, read_q, j), 1e-12 * (1 + std::fabs(o))) << t;
    }
  }
}

// What the step is given: M^-1 M = I to the precision of f32, for a transform of halves.
TEST(Klt, ReadTransformIsTheInverseOfTheWriteTransform) {
  const LayerShape shape{2, 4, 32, 16, Gate::kScalar};
  for (const int n : {shape.n_key_heads, shape.n_value_heads}) {
    LayerPlan plan = uniform_plan(shape, 4);
    std::mt19937 random(5);
    std::uniform_int_distribution<int> eighths(-8, 8);
    for (int m = 0; m < n; ++m) {
      for (int i = 0; i < shape.K * shape.K; ++i) {
        plan.transform.push_back(0.125f * static_cast<float>(eighths(random)) +
                                 (i % (shape.K + 1) == 0 ? 4.0f : 0.0f));
      }
    }
    const auto codec = make(shape, plan);
    for (int h = 0; h < shape.n_value_heads; ++h) {
      const float* Mt = codec->write_transform(h);
      const float* inverse = codec->read_transform(h);
      // Value heads 0 and 1 share key head 0.
      EXPECT_EQ(Mt == codec->write_transform(h ^ 1), n == shape.n_key_heads);
      for (int i = 0; i < shape.K; ++i) {
        for (int j = 0; j < shape.K; ++j) {
          double sum = 0;
          for (int l = 0; l < shape.K; ++l) {
            sum += double{inverse[i * shape.K + l]} * Mt[j * shape.K + l];
          }
          ASSERT_NEAR(sum, i == j ? 1 : 0, 2e-6) << h << " " << i << " " << j;
        }
      }
    }
  }
  EXPECT_EQ(make(shape, uniform_plan(shape, 4))->read_transform(0), nullptr);
}

// The steps and the D(b) that calibration allocates with belong together.
TEST(Klt, AGaussianStateLosesTheDistortionOfItsWidth) {
  const LayerShape shape{1, 1, 128, 256, Gate::kScalar};
  const std::vector<float> X = test::normal_state(128 * 256, 1, 3.0f);
  double power = 0;
  for (const float x : X) power += double{x} * x;
  double last = std::numeric_limits<double>::infinity();
  for (const klt::Width& width : klt::kWidths) {
    testing::Packed packed(make(shape, uniform_plan(shape, width.bits)));
    packed.encode(0, X);
    const double error =
        test::mean_square_error(X, packed.decode(0)) * static_cast<double>(X.size()) / power;
    // Row factors follow the rows at hand, which gains most where the step is fine.
    EXPECT_LT(error, 1.02 * width.distortion) << width.bits;
    EXPECT_GT(error, 0.65 * width.distortion) << width.bits;
    EXPECT_LT(error, last);  // more bits never hurt
    last = error;
  }
}

// |Z - Zhat| of a value whose code is not at an end: half a step of the first scale, and what the
// refit moved. c0 and f are the definition's, in double; f16 rounds c0 by 2^-11.
TEST(Klt, EveryRowStaysWithinItsBound) {
  const LayerShape shape{1, 1, 64, 48, Gate::kScalar};
  for (const testing::TestState& state : testing::test_states(shape.K, shape.V)) {
    double peak = 0;
    for (const float x : state.values) peak = std::max(peak, std::fabs(double{x}));
    if (peak == 0 || peak < 1e-3 || peak > 1e5) continue;  // column scales saturate
    const CodecConfig config = testing::config_of("klt", "4");
    const LayerPlan plan = testing::test_plan(shape, config);
    testing::Packed packed(make(shape, plan));
    packed.encode(0, state.values);
    const std::vector<float> back = packed.decode(0);
    std::vector<double> f(at(shape.K));
    std::size_t n_factors = 0;
    const auto step_of = [&](int row) {
      for (const klt::Width& width : klt::kWidths) {
        if (width.bits == plan.bits[at(row)]) return width.step;
      }
      return 0.0f;
    };
    const std::int64_t n_kept = std::count_if(plan.bits.begin(), plan.bits.begin() + shape.K,
                                              [](std::uint8_t b) { return b > 0; });
    const std::size_t factor_bytes = at((n_kept + 3) / 4);
    const std::uint8_t* const end = packed.page.data() + packed.page.size();
    for (const int b : {8, 6, 5, 4, 3, 2}) {
      for (int i = 0; i < shape.K; ++i) {
        if (plan.bits[at(i)] != b) continue;
        const std::uint8_t byte = (end - factor_bytes)[n_factors / 4];
        f[at(i)] = double{klt::kRowFactors[byte >> (2 * (n_factors % 4)) & 3]};
        ++n_factors;
      }
    }
    int n_checked = 0;
    for (int j = 0; j < shape.V; ++j) {
      double sum = 0, most = 0;
      int n = 0;
      for (int i = 0; i < shape.K; ++i) {
        if (plan.bits[at(i)] == 0) continue;
        const double y = double{state.values[at(i * shape.V + j)]} / plan.row_scale[at(i)];
        sum += y * y, ++n;
        most =
            std::max(most, std::fabs(y) / double{klt::most_beyond({plan.bits[at(i)], step_of(i)})});
      }
      const double c0 = std::max(std::sqrt(sum / n), most);
      std::uint16_t half;
      std::memcpy(&half, end - factor_bytes - at(2 * (shape.V - j)), 2);
      const double c = f16_to_f32(half);
      if (c0 < 0x1p-13) continue;  // subnormal halves
      for (int i = 0; i < shape.K; ++i) {
        const int b = plan.bits[at(i)];
        const double r = plan.row_scale[at(i)], z = state.values[at(i * shape.V + j)];
        if (b == 0) {
          ASSERT_EQ(back[at(i * shape.V + j)], 0.0f);
          continue;
        }
        const double step = f[at(i)] * double{step_of(i)};
        const double reach = r * c0 * step * std::exp2(b - 1);
        if (std::fabs(z) > reach * 0.999) continue;  // clipped
        const double v = std::fabs(double{back[at(i * shape.V + j)]}) / (r * std::max(c, 1e-30));
        const double bound = r * (c0 * step / 2 + v * (std::fabs(c - c0) + 0x1p-10 * c0));
        ASSERT_LE(std::fabs(z - back[at(i * shape.V + j)]), bound * (1 + 0x1p-9))
            << state.name << " row " << i << " column " << j << " bits " << b;
        ++n_checked;
      }
    }
    EXPECT_GT(n_checked, 30) << state.name;
  }
}

// A row half as large again as calibration saw, and a column as large in one row alone, are kept as
// well as others.
TEST(Klt, FollowsRowsAndColumnsThatCalibrationDidNotSee) {
  const LayerShape shape{1, 1, 64, 128, Gate::kScalar};
  const std::vector<float> X = test::normal_state(64 * 128, 12);
  std::vector<float> Y = X;
  for (int j = 0; j < 128; ++j) Y[at(5 * 128 + j)] *= 1.5f;
  Y[at(9 * 128 + 17)] = 12;
  testing::Packed packed(make(shape, uniform_plan(shape, 4)));
  const auto errors = [&](const std::vector<float>& of) {
    packed.encode(0, of);
    const std::vector<float> back = packed.decode(0);
    double row = 0, value = std::fabs(double{back[at(9 * 128 + 17)]} - of[at(9 * 128 + 17)]);
    for (int j = 0; j < 128; ++j) {
      row += std::pow(double{back[at(5 * 128 + j)]} - of[at(5 * 128 + j)], 2) / 128;
    }
    return std::pair(row, value);
  };
  // A step 1.5 times as wide costs 2.25 times as much; what is clipped would cost 4 times.
  EXPECT_LT(errors(Y).first, 2.6 * errors(X).first);
  // 12 of a column's 1: without its larger scale, 2.5 would be left of it.
  EXPECT_LT(errors(Y).second, 1.5);
}

// The refit leaves every column at most its energy, in the kept rows and in f32.
TEST(Klt, AColumnNeverLosesMoreThanItself) {
  const LayerShape shape{1, 4, 33, 50, Gate::kScalar};
  const LayerPlan plan = testing::test_plan(shape, testing::config_of("klt", "4"));
  testing::Packed packed(make(shape, plan));
  for (const testing::TestState& state : testing::test_states(shape.K, shape.V)) {
    for (int h = 0; h < shape.n_value_heads; ++h) {
      packed.encode(h, state.values);
      const std::vector<float> back = packed.decode(h);
      for (int j = 0; j < shape.V; ++j) {
        double energy = 0, error = 0;
        for (int i = 0; i < shape.K; ++i) {
          const double x = state.values[at(i * shape.V + j)];
          energy += x * x;
          error += std::pow(x - back[at(i * shape.V + j)], 2);
        }
        EXPECT_LE(error, energy * (1 + 1e-5)) << state.name << " head " << h << " column " << j;
      }
    }
  }
}

// The short way to a row's factor is the long one's, whichever factor wins and whatever the row
// holds.
TEST(Klt, FactorsOfAHeadAreThoseOfItsRows) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  testing::for_each_simd_target([&] {
    constexpr int V = 128;
    std::vector<std::int64_t> won(klt::RowFit::kFactors);
    for (const klt::Width& width : klt::kWidths) {
      std::vector<float> y, c0(at(V), 0.5f);
      c0[7] = 0;
      c0[9] = 1e-30f;
      for (const float scale :
           {0.0f, 0.1f, 0.3f, 0.5f, 0.7f, 0.9f, 1.1f, 1.5f, 2.0f, 5.0f, 1e20f}) {
        const std::vector<float> row =
            test::normal_state(V, static_cast<std::uint32_t>(y.size()), scale);
        y.insert(y.end(), row.begin(), row.end());
        y[y.size() - V + 7] = y[y.size() - V + 9] = 0;
      }
      for (const float odd : {kInf, -kInf, kNan, 1e-40f}) {
        const std::vector<float> row = test::normal_state(V, 3, 0.5f);
        y.insert(y.end(), row.begin(), row.end());
        y[y.size() - V + 5] = odd;
      }
      y.resize(y.size() + V,
               0.5f * 1.5f * klt::reach({width.bits, width.step}));  // all at one edge
      const int n = static_cast<int>(y.size()) / V;
      const klt::Quantiser q{width.bits, width.step};
      const std::vector<klt::RowFit> rows(at(n), klt::RowFit(q, 1, 1, 0));
      const float c_squares = klt::squares(c0.data(), V);
      std::vector<std::uint8_t> factors(at(n));
      klt::choose_factors(y.data(), rows.data(), c0.data(), c_squares, n, V, factors.data());
      for (int i = 0; i < n; ++i) {
        ASSERT_EQ(factors[at(i)], klt::choose_factor(y.data() + i * V, c0.data(), V, q, c_squares))
            << width.bits << " bits, row " << i;
        ++won[factors[at(i)]];
      }
    }
    for (const std::int64_t n : won) EXPECT_GT(n, 5);
  });
}

// A head at a time gives the codes, sums and bytes of a row at a time, on every instruction set.
TEST(Klt, FitsOfAHeadAreThoseOfItsRows) {
  testing::for_each_simd_target([] {
    for (const int V : {16, 48, 128}) {
      constexpr int n = 23;
      const std::vector<float> y = test::normal_state(n * V, 4, 2.0f);
      std::vector<float> inverse(at(V), 0.7f), num(at(V)), den(at(V));
      inverse[3] = 0;  // a column whose scale is 0
      std::vector<klt::RowFit> rows(n);
      std::vector<int> bits;
      for (int i = 0; i < n; ++i) {  // widths change from row to row, codes lie in reverse
        const klt::Width& width = klt::kWidths[at(1 + i % 6)];
        bits.push_back(width.bits);
        rows[at(i)] = klt::RowFit({width.bits, width.step}, 1 + 0.25f * static_cast<float>(i % 4),
                                  0.1f * static_cast<float>(i + 1), n - 1 - i);
      }
      std::vector<float> c0(at(V), 1 / 0.7f);
      c0[3] = 0;
      c0[5] = 0.1f;  // where most values are clipped
      const float c_squares = klt::squares(c0.data(), V);
      std::vector<std::uint8_t> factors(n);
      klt::choose_factors(y.data(), rows.data(), c0.data(), c_squares, n, V, factors.data());
      std::vector<std::uint8_t> codes(at(n * V)), row_codes(at(V));
      klt::quantise_rows(y.data(), rows.data(), factors.data(), inverse.data(), n, V, codes.data(),
                         num.data(), den.data());
      std::vector<float> row_num(at(V)), row_den(at(V));
      for (int i = 0; i < n; ++i) {
        const klt::Quantiser plain{bits[at(i)], klt::kWidths[at(1 + i % 6)].step};
        ASSERT_EQ(factors[at(i)],
                  klt::choose_factor(y.data() + i * V, c0.data(), V, plain, c_squares));
        klt::quantise(y.data() + i * V, inverse.data(), V,
                      {plain.bits, klt::kRowFactors[factors[at(i)]] * plain.step},
                      rows[at(i)].weight, row_codes.data(), row_num.data(), row_den.data());
        for (int j = 0; j < V; ++j) {
          ASSERT_EQ(codes[at((j / 16 * n + n - 1 - i) * 16 + j % 16)], row_codes[at(j)])
              << V << " row " << i << " column " << j;
        }
      }
      EXPECT_EQ(num, row_num);
      std::vector<std::int32_t> from(n);
      for (int i = 0; i < n; ++i) from[at(i)] = (7 * i) % n;
      std::vector<float> sum(at(V), 0.5f), row_sum = sum, scaled(y.size()), row_scaled = scaled;
      std::vector<float> most(at(V), 0.5f), row_most = most;
      klt::normalise_rows(y.data(), from.data(), rows.data(), n, V, scaled.data(), sum.data(),
                          most.data());
      for (int i = 0; i < n; ++i) {
        klt::normalise(y.data() + from[at(i)] * V, V, rows[at(i)].inverse_r,
                       rows[at(i)].inverse_limit, row_scaled.data() + i * V, row_sum.data(),
                       row_most.data());
      }
      EXPECT_EQ(scaled, row_scaled);
      EXPECT_EQ(sum, row_sum);
      EXPECT_EQ(most, row_most);
      EXPECT_EQ(den, row_den);
      for (const klt::Width& width : klt::kWidths) {
        if (width.bits == 0) continue;
        std::vector<std::uint8_t> low(codes.begin(), codes.begin() + n * 16);
        for (std::uint8_t& u : low) u = static_cast<std::uint8_t>(u & ((1 << width.bits) - 1));
        const std::size_t size = at(packed_bytes(n * 16, width.bits));
        std::vector<std::uint8_t> packed(size), tile(size + 13, 0xa5);
        pack_codes(low.data(), n * 16, width.bits, packed.data());
        klt::pack_tile(low.data(), n, width.bits, tile.data());
        EXPECT_TRUE(std::equal(packed.begin(), packed.end(), tile.begin())) << width.bits;
        EXPECT_EQ(tile.back(), 0xa5) << width.bits;  // 12 bytes more at most
      }
    }
  });
}

// What a rounding is said to cost is what it lost, rows without bits included.
TEST(Klt, CostOfARoundingIsItsSquaredError) {
  for (const int V : {32, 33}) {
    const LayerShape shape{1, 3, 40, V, Gate::kScalar};
    LayerPlan plan = testing::test_plan(shape, testing::config_of("klt", "4"));
    std::fill_n(plan.bits.begin() + 80, 40, std::uint8_t{0});  // the last head keeps nothing
    plan.guard = {0.25f, 0.0f, 3.0f};
    const auto codec = make(shape, plan);
    const std::vector<float> X = test::normal_state(40 * V, 9, 1.5f);
    std::vector<std::uint8_t> page(at(codec->page_bytes()));
    std::vector<std::byte> scratch(codec->scratch_bytes());
    for (int h = 0; h < 3; ++h) {
      EXPECT_EQ(codec->guard(h), klt::kGuardFactor * plan.guard[at(h)]);
      float cost = -1;
      codec->encode(h, X.data(), page.data(), {}, {scratch, &cost});
      std::vector<float> back(X.size());
      codec->decode(h, page.data(), back.data(), {scratch});
      EXPECT_NEAR(cost, test::mean_square_error(X, back), 1e-4 * cost) << V << " head " << h;
    }
    plan.guard.pop_back();
    EXPECT_EQ(kKltInfo.make(testing::config_of("klt", "4"), shape, &plan).status().code(),
              Code::kMismatch);
    plan.guard.clear();
    EXPECT_EQ(make(shape, plan)->guard(0), 0);
  }
}

// Errors that what reads the state sees together are made to cancel: eps^T W eps for a W whose rows
// are far from independent, W = (I + B)^T diag(w) (I + B).
TEST(Klt, FeedbackLowersTheWeightedError) {
  constexpr int K = 32, V = 48;
  const LayerShape shape{1, 1, K, V, Gate::kChannel};
  LayerPlan plan = uniform_plan(shape, 4);
  plan.bits[5] = 0;
  std::vector<double> W(K * K);
  for (int i = 0; i < K; ++i) {
    for (int j = 0; j < K; ++j) W[at(i * K + j)] = std::pow(0.95, std::abs(i - j));
  }
  plan.feedback.assign(K * K, 0.0f);
  plan.row_weight.assign(K, 0.0f);
  std::vector<double> rest = W;
  for (int i = K - 1; i >= 0; --i) {
    const double w = rest[at(i * K + i)];
    plan.row_weight[at(i)] = static_cast<float>(w);
    for (int l = 0; l < i; ++l) {
      plan.feedback[at(i * K + l)] = static_cast<float>(rest[at(i * K + l)] / w);
      for (int m = 0; m < i; ++m) {
        rest[at(l * K + m)] -= rest[at(i * K + l)] * rest[at(i * K + m)] / w;
      }
    }
  }
  const std::vector<float> X = test::normal_state(K * V, 6);
  const auto error_of = [&](const LayerCodec& codec, float* cost) {
    std::vector<std::uint8_t> page(at(codec.page_bytes()));
    std::vector<std::byte> scratch(codec.scratch_bytes());
    codec.encode(0, X.data(), page.data(), {}, {scratch, cost});
    std::vector<float> back(X.size());
    codec.decode(0, page.data(), back.data(), {scratch});
    double sum = 0;
    for (int j = 0; j < V; ++j) {
      for (int a = 0; a < K; ++a) {
        for (int b = 0; b < K; ++b) {
          sum += W[at(a * K + b)] * (double{back[at(a * V + j)]} - X[at(a * V + j)]) *
                 (double{back[at(b * V + j)]} - X[at(b * V + j)]);
        }
      }
    }
    return sum;
  };
  float cost = 0;
  const double fed = error_of(*make(shape, plan), &cost);
  EXPECT_NEAR(double{cost} * K * V, fed, 1e-3 * fed);
  LayerPlan plain = plan;
  plain.feedback.clear();
  EXPECT_LT(fed, 0.5 * error_of(*make(shape, plain), nullptr));
  plan.row_weight.pop_back();
  EXPECT_EQ(kKltInfo.make(testing::config_of("klt", "4"), shape, &plan).status().code(),
            Code::kMismatch);
}

TEST(Klt, ZeroColumnsAndRowsRestoreToZero) {
  const LayerShape shape{1, 1, 16, 32, Gate::kScalar};
  testing::Packed packed(make(shape, uniform_plan(shape, 2)));
  std::vector<float> X = test::normal_state(16 * 32, 2);
  for (int i = 0; i < 16; ++i) X[at(i * 32 + 7)] = 0;
  packed.encode(0, X);
  const std::vector<float> back = packed.decode(0);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(back[at(i * 32 + 7)], 0.0f);
    EXPECT_NE(back[at(i * 32 + 8)], 0.0f);
  }
  packed.encode(0, std::vector<float>(16 * 32, 0.0f));
  for (const float x : packed.decode(0)) EXPECT_EQ(x, 0.0f);
}

// Mean bits of the rows; 16 bits a column and 2 a row with bits where a head keeps anything.
TEST(Klt, CountsItsBytes) {
  const LayerShape shape{1, 2, 128, 64, Gate::kScalar};
  LayerPlan plan = uniform_plan(shape, 0);
  EXPECT_EQ(make(shape, plan)->page_bytes(), 0);
  for (int i = 0; i < 96; ++i) plan.bits[at(128 + i)] = i < 32 ? 3 : 5;  // the second head
  const PayloadBytes payload = make(shape, plan)->payload();
  EXPECT_EQ(payload.codes, 64 * (32 * 3 + 64 * 5) / 8);
  EXPECT_EQ(payload.scales, 64 * 2 + 96 / 4);
  EXPECT_EQ(payload.total(), payload.codes + payload.scales);
}

TEST(Klt, ArgumentsAreQuartersInTheirOnlySpelling) {
  for (const char* good : {"1", "1.25", "2.5", "3", "4.75", "7.75", "8"}) {
    EXPECT_TRUE(kKltInfo.allows_arg(good)) << good;
  }
  for (const char* bad :
       {"", "0", "0.5", "9", "8.25", "2.50", "2.", "2.1", "02", "4.0", "+4", "4 "}) {
    EXPECT_FALSE(kKltInfo.allows_arg(bad)) << bad;
  }
  EXPECT_TRUE(find_codec("stepquant")->allows_arg("4"));
  EXPECT_FALSE(find_codec("stepquant")->allows_arg("2.5"));
}

TEST(Klt, RefusesBadPlans) {
  const LayerShape shape{1, 2, 8, 16, Gate::kScalar};
  const auto refusal = [&](const LayerPlan* plan, Code code) {
    const auto codec = kKltInfo.make(testing::config_of("klt", "3"), shape, plan);
    EXPECT_FALSE(codec.ok());
    EXPECT_EQ(codec.status().code(), code);
    return codec.status().message();
  };
  EXPECT_NE(refusal(nullptr, Code::kMismatch).find("statepack calibrate"), std::string::npos);
  LayerPlan plan = uniform_plan({1, 1, 8, 16, Gate::kScalar}, 4);
  EXPECT_NE(refusal(&plan, Code::kMismatch).find("8 widths"), std::string::npos);
  for (const int bits : {1, 7, 9, 16}) {
    plan = uniform_plan(shape, 4);
    plan.bits[11] = static_cast<std::uint8_t>(bits);
    EXPECT_NE(refusal(&plan, Code::kCorrupt).find("row 3 of head 1"), std::string::npos);
  }
  for (const float r : {0.0f, -1.0f, NAN, INFINITY, 1e-20f}) {
    plan = uniform_plan(shape, 4);
    plan.row_scale[2] = r;
    EXPECT_NE(refusal(&plan, Code::kCorrupt).find("row 2 of head 0"), std::string::npos);
  }
  plan = uniform_plan(shape, 4);
  plan.transform.assign(3 * 64, 1.0f);
  EXPECT_NE(refusal(&plan, Code::kMismatch).find("192 values"), std::string::npos);
  plan.transform.assign(64, 1.0f);  // all ones: singular
  EXPECT_NE(refusal(&plan, Code::kCorrupt).find("cannot be inverted"), std::string::npos);
}

}  // namespace
}  // namespace statepack
