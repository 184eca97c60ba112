#include "codec/stepquant/stepquant.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/hash.hpp"
#include "codec/stepquant/fit.hpp"
#include "states.hpp"

namespace statepack {
namespace {

using test::State;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

constexpr float kTiny = 0x1p-24f;

LayerShape shape_of(int heads, int K, int V, Gate gate) { return {heads, heads, K, V, gate}; }

LayerPlan plan_of(std::vector<std::uint8_t> bits, std::vector<float> weights = {}) {
  LayerPlan plan;
  plan.bits = std::move(bits);
  plan.row_weight = std::move(weights);
  if (plan.row_weight.empty()) plan.row_weight.assign(plan.bits.size(), 1.0f);
  return plan;
}

LayerPlan uniform_plan(int n_rows, int bits) {
  return plan_of(
      std::vector<std::uint8_t>(static_cast<std::size_t>(n_rows), static_cast<std::uint8_t>(bits)));
}

std::unique_ptr<StepquantCodec> make(const LayerShape& shape, const LayerPlan& plan,
                                     int group = 32) {
  auto codec = StepquantCodec::make(shape, &plan, group);
  if (!codec.ok()) throw std::runtime_error(codec.status().message());
  return std::unique_ptr<StepquantCodec>(static_cast<StepquantCodec*>(codec.value().release()));
}

// w_i = omega_i^(gamma/2), over its geometric mean; gamma = 1/4.
std::vector<float> weights_of(const std::vector<double>& omega) {
  std::vector<double> a;
  for (double o : omega) a.push_back(std::log(std::max(o, 1e-20)) * 0.125);
  const double mean = std::accumulate(a.begin(), a.end(), 0.0) / static_cast<double>(a.size());
  std::vector<float> w;
  for (double x : a) w.push_back(static_cast<float>(std::exp(x - mean)));
  return w;
}

std::vector<int> row(const std::vector<int>& z, int V, int i) {
  return {z.begin() + i * V, z.begin() + (i + 1) * V};
}
std::vector<float> row(const State& x, int V, int i) {
  return {x.begin() + i * V, x.begin() + (i + 1) * V};
}

testing::Matcher<float> near(double x) { return testing::FloatNear(static_cast<float>(x), 6e-7f); }

// The codec as its equations stand, one value at a time; sums in the order that the format fixes.
struct Plain {
  std::vector<int> z;
  std::vector<float> r, c, restored;
};

float plain_mean(const float* x, int n) {
  float lane[16] = {};
  for (int j = 0; j < n; ++j) lane[j % 16] += std::fabs(x[j]);
  for (int w = 8; w > 0; w /= 2) {
    for (int l = 0; l < w; ++l) lane[l] += lane[l + w];
  }
  return lane[0] / static_cast<float>(n);
}

Plain plain_stepquant(const State& X, int K, int V, Gate gate, const std::uint8_t* bits,
                      const float* w, int group) {
  Plain out;
  const bool magnitude = gate == Gate::kScalar && bits[0] == 2;
  const int G = magnitude ? std::min(group, V) : V;
  const int n_groups = (V + G - 1) / G;
  const std::size_t n = X.size();
  out.z.resize(n);
  out.restored.resize(n);
  out.r.resize(static_cast<std::size_t>(K * n_groups));
  std::vector<float> Y(n);
  const auto at = [&](int i, int j) { return static_cast<std::size_t>(i * V + j); };
  const auto r = [&](int i, int j) -> float& {
    return out.r[static_cast<std::size_t>(i * n_groups + j / G)];
  };
  const auto norm = [&](int i) {
    return gate == Gate::kChannel ? static_cast<float>(std::exp2(8 - bits[i])) : 1.0f;
  };
  const auto Q = [&](int i) {
    return magnitude ? 3.0f : static_cast<float>(std::exp2(bits[i] - 1) - 1);
  };
  const auto enc = [&](int i, float y) {
    if (magnitude) return (y < 0 ? -1 : 1) * (std::fabs(y) >= 2 ? 3 : 1);
    return static_cast<int>(std::clamp(std::nearbyint(y), -Q(i), Q(i)));
  };
  bool integer_rows = false;
  for (int i = 0; i < K; ++i) {
    if (bits[i] == 16) continue;
    integer_rows = true;
    for (int g = 0; g < n_groups; ++g) {
      const float m = plain_mean(&X[at(i, g * G)], std::min(G, V - g * G));
      r(i, g * G) = h16(std::sqrt(std::max(m, 1e-20f) / w[i]));
    }
    for (int j = 0; j < V; ++j) Y[at(i, j)] = X[at(i, j)] / (r(i, j) * norm(i));
  }
  for (int j = 0; integer_rows && j < V; ++j) {
    float peak = 0;
    for (int i = 0; i < K; ++i) {
      if (bits[i] != 16) peak = std::max(peak, std::fabs(Y[at(i, j)]) / Q(i));
    }
    const float c0 = h16(peak);
    float num = 0, den = 0;
    for (int i = 0; i < K; ++i) {
      if (bits[i] == 16) continue;
      const float wrn = w[i] * (r(i, j) * norm(i));
      const float z = static_cast<float>(enc(i, Y[at(i, j)] / c0));
      num += wrn * wrn * z * Y[at(i, j)];
      den += wrn * wrn * z * z;
    }
    out.c.push_back(den > 0 ? h16(num / std::max(den, 1e-30f)) : c0);
  }
  for (int i = 0; i < K; ++i) {
    for (int j = 0; j < V; ++j) {
      const std::size_t e = at(i, j);
      if (bits[i] == 16) {
        out.restored[e] = f16_to_f32(f32_to_f16(std::clamp(X[e], -65504.0f, 65504.0f)));
        continue;
      }
      const float c = out.c[static_cast<std::size_t>(j)];
      out.z[e] = enc(i, Y[e] / c);
      out.restored[e] = static_cast<float>(double{r(i, j)} * c * norm(i) * out.z[e]);
    }
  }
  return out;
}

// One code of a page, by the address formula of the page layout alone.
int code_at(std::span<const std::uint8_t> page, std::int64_t run, int column, int bits) {
  int code = 0;
  for (int k = 0; k < bits; ++k) {
    const std::int64_t bit = std::int64_t{column} * bits + k;
    code |= ((page[static_cast<std::size_t>(run + bit / 8)] >> (bit % 8)) & 1) << k;
  }
  return code;
}

// ---- G5: the 4 x 4 state ----------------------------------------------------------------------

const State kSmall = {1, -2, 0.5f, 4, 0.25f, 0.75f, -1.5f, 0, 3, -6, 1, 12, 0, 0, 0, 0};
const std::vector<float> kSmallWeights = {1, 2, 0.5f, 1};

struct Small {
  explicit Small(Gate gate, std::vector<std::uint8_t> bits, State X = kSmall)
      : codec(make(shape_of(1, 4, 4, gate), plan_of(std::move(bits), kSmallWeights), 2)),
        page(test::encode(*codec, X)),
        dump(codec->dump(0, page)),
        restored(test::decode(*codec, page)) {}
  std::unique_ptr<StepquantCodec> codec;
  std::vector<std::uint8_t> page;
  StepquantCodec::Dump dump;
  State restored;
};

TEST(StepquantGolden, ScalarGate4Bits) {
  const Small s(Gate::kScalar, {4, 4, 4, 4});
  EXPECT_THAT(s.dump.r, ElementsAre(1.369140625f, 0.55908203125f, 3.31640625f, kTiny));
  EXPECT_THAT(s.dump.c,
              ElementsAre(near(.127929688), near(.255371094), near(.379394531), near(.506835938)));
  EXPECT_THAT(s.dump.z, ElementsAre(6, -6, 1, 6, 3, 5, -7, 0, 7, -7, 1, 7, 0, 0, 0, 0));
  EXPECT_THAT(row(s.restored, 4, 0),
              ElementsAre(near(1.050922), near(-2.097834), near(.519444), near(4.163578)));
  EXPECT_NEAR(test::mean_square_error(kSmall, s.restored), .0105943288, 1e-8);
}

TEST(StepquantGolden, ScalarGate6Bits) {
  const Small s(Gate::kScalar, {6, 6, 6, 6});
  EXPECT_THAT(s.dump.c, ElementsAre(near(.0292358398), near(.058380127), near(.0869140625),
                                    near(.116760254)));
  EXPECT_THAT(s.dump.z, ElementsAre(25, -25, 4, 25, 15, 23, -31, 0, 31, -31, 3, 31, 0, 0, 0, 0));
  EXPECT_NEAR(test::mean_square_error(kSmall, s.restored), .00118793309, 1e-9);
}

TEST(StepquantGolden, ScalarGate2BitsHasFourLevelsAndGroupScales) {
  const Small s(Gate::kScalar, {2, 2, 2, 2});
  EXPECT_THAT(s.dump.r, ElementsAre(near(1.22460938), 1.5f, .5f, near(.612304688), 3.0f,
                                    near(3.60546875), kTiny, kTiny));
  EXPECT_THAT(s.dump.c,
              ElementsAre(near(.314453125), near(.592773438), near(.666992188), near(.989257812)));
  EXPECT_THAT(s.dump.z, ElementsAre(3, -3, 1, 3, 1, 3, -3, 1, 3, -3, 1, 3, 1, 1, 1, 1));
}

TEST(StepquantGolden, ChannelGateMixesWidthsInAHead) {
  const Small s(Gate::kChannel, {4, 8, 2, 16});
  EXPECT_THAT(s.dump.c, ElementsAre(near(.0143966675), near(.0288238525), near(.0211639404),
                                    near(.0577392578)));
  EXPECT_THAT(row(s.dump.z, 4, 0), ElementsAre(3, -3, 1, 3));
  EXPECT_THAT(row(s.dump.z, 4, 1), ElementsAre(31, 47, -127, 0));
  EXPECT_THAT(row(s.dump.z, 4, 2), ElementsAre(1, -1, 0, 1));
  EXPECT_THAT(row(s.restored, 4, 2), ElementsAre(near(3.055693), near(-6.117863), 0.0f,
                                                 testing::FloatNear(12.255157f, 1e-6f)));
  EXPECT_THAT(row(s.restored, 4, 3), ElementsAre(0, 0, 0, 0));
  EXPECT_NEAR(test::mean_square_error(kSmall, s.restored), .0712359, 5e-8);
}

TEST(StepquantGolden, ChannelGateRestoresPivotsExactly) {
  const Small s(Gate::kChannel, {6, 6, 16, 4});
  EXPECT_THAT(s.dump.c, ElementsAre(near(.00588989258), near(.0118484497), near(.0216674805),
                                    near(.0235595703)));
  EXPECT_THAT(row(s.dump.z, 4, 0), ElementsAre(31, -31, 4, 31));
  EXPECT_THAT(row(s.dump.z, 4, 1), ElementsAre(19, 28, -31, 0));
  EXPECT_THAT(row(s.restored, 4, 2), ElementsAre(3, -6, 1, 12));
  EXPECT_THAT(row(s.restored, 4, 3), ElementsAre(0, 0, 0, 0));
}

TEST(StepquantGolden, APivotRowChangesNothingElse) {
  State scaled = kSmall;
  for (int j = 0; j < 4; ++j) scaled[static_cast<std::size_t>(8 + j)] *= 1000;
  const Small a(Gate::kChannel, {6, 6, 16, 4}), b(Gate::kChannel, {6, 6, 16, 4}, scaled);
  EXPECT_EQ(a.dump.z, b.dump.z);
  EXPECT_EQ(a.dump.r, b.dump.r);
  EXPECT_EQ(a.dump.c, b.dump.c);
  EXPECT_THAT(row(b.restored, 4, 2), ElementsAre(3000, -6000, 1000, 12000));
}

// ---- G6, G7: bits and pages --------------------------------------------------------------------

TEST(StepquantGolden, PacksCodesAsPublished) {
  const Small mixed(Gate::kChannel, {4, 8, 2, 16});
  const std::array<std::uint8_t, 7> runs = {0x4A, 0xA8, 0x9E, 0xAE, 0x00, 0x7F, 0x92};
  EXPECT_EQ(std::memcmp(mixed.page.data(), runs.data(), runs.size()), 0);
  const Small two(Gate::kScalar, {2, 2, 2, 2});
  EXPECT_EQ(two.page[0], 0xE3);  // z = 3, -3, 1, 3
}

TEST(StepquantGolden, PageOfMixedRows) {
  const auto codec = make(shape_of(1, 4, 8, Gate::kChannel), plan_of({2, 4, 8, 16}));
  EXPECT_EQ(codec->tile(), 4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(codec->run_offset(0, i, 0), (std::array{0, 1, 3, 8}[static_cast<std::size_t>(i)]));
    EXPECT_EQ(codec->run_offset(0, i, 4), codec->run_offset(0, i, 0) + 16);
  }
  EXPECT_EQ(codec->row_scales(0), 32);
  EXPECT_EQ(codec->column_scales(0), 38);
  EXPECT_EQ(codec->page_bytes(), 54);
  const PayloadBytes bytes = codec->payload();
  EXPECT_EQ(bytes.codes, 2 + 4 + 8);
  EXPECT_EQ(bytes.pivots, 16);
  EXPECT_EQ(bytes.padding, 2);
  EXPECT_EQ(bytes.scales, 6 + 16);

  std::vector<std::uint8_t> page = test::encode(*codec, test::normal_state(32, 1));
  page[18] = static_cast<std::uint8_t>((page[18] & 0xF0) | 12);  // element (1, 6)
  EXPECT_EQ(codec->dump(0, page).z[1 * 8 + 6], 12 - 7);
}

TEST(StepquantGolden, PageOfAUniformHead) {
  const auto codec = make(shape_of(1, 4, 32, Gate::kScalar), uniform_plan(4, 6));
  EXPECT_EQ(codec->tile(), 16);
  EXPECT_EQ(codec->run_offset(0, 1, 0), 12);
  EXPECT_EQ(codec->run_offset(0, 0, 16), 48);
  EXPECT_EQ(codec->row_scales(0), 96);
  EXPECT_EQ(codec->column_scales(0), 104);
  EXPECT_EQ(codec->page_bytes(), 168);
  EXPECT_EQ(codec->payload().padding, 0);
}

// ---- G8: a large state -------------------------------------------------------------------------

struct LargeFigures {
  double mse, weighted_mse;
  long sum_z;
};

std::vector<float> large_weights(int K) {
  std::vector<double> omega;
  for (int i = 0; i < K; ++i) omega.push_back(std::exp2(-(i % 9)));
  return weights_of(omega);
}

LargeFigures large_figures(Gate gate, const std::vector<std::uint8_t>& bits) {
  const State X = test::large_state(128, 128);
  const std::vector<float> w = large_weights(128);
  const auto codec = make(shape_of(1, 128, 128, gate), plan_of(bits, w));
  const auto page = test::encode(*codec, X);
  const State restored = test::decode(*codec, page);
  LargeFigures f{test::mean_square_error(X, restored), 0, 0};
  for (std::size_t e = 0; e < X.size(); ++e) {
    f.weighted_mse += std::pow(w[e / 128] * (double{X[e]} - restored[e]), 2) / 16384;
  }
  for (int z : codec->dump(0, page).z) f.sum_z += std::abs(z);
  return f;
}

void expect_figures(const LargeFigures& got, const LargeFigures& want) {
  EXPECT_NEAR(got.mse, want.mse, want.mse * 1e-3);
  EXPECT_NEAR(got.weighted_mse, want.weighted_mse, want.weighted_mse * 1e-3);
  EXPECT_NEAR(static_cast<double>(got.sum_z), static_cast<double>(want.sum_z), 5);
}

TEST(StepquantGolden, LargeStateIsThePublishedOne) {
  const State X = test::large_state(128, 128);
  EXPECT_NEAR(X[0], -.00823576562, 1e-11);
  EXPECT_NEAR(test::mean_square_error(X, State(X.size(), 0.0f)), 4.2198874, 5e-8);
  const std::vector<float> w = large_weights(128);
  EXPECT_NEAR(w[0], 1.4075284, 5e-8);
  const auto codec =
      make(shape_of(1, 128, 128, Gate::kScalar), plan_of(std::vector<std::uint8_t>(128, 6), w));
  const auto dump = codec->dump(0, test::encode(*codec, X));
  EXPECT_THAT(dump.r[0], near(.31738281));
  EXPECT_THAT(dump.r[1], near(.45605469));
}

TEST(StepquantGolden, LargeStateErrorsAndCodes) {
  const auto uniform = [](int bits) {
    return std::vector<std::uint8_t>(128, static_cast<std::uint8_t>(bits));
  };
  const LargeFigures four{.031806927, .031515675, 31401}, six{.001683318, .0016803962, 138888},
      eight{9.8038e-5, 9.7642e-5, 569382};
  expect_figures(large_figures(Gate::kScalar, uniform(2)), {.51415526, .51813758, 20012});
  expect_figures(large_figures(Gate::kChannel, uniform(2)), {.85463318, .85847495, 4530});
  for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
    expect_figures(large_figures(gate, uniform(4)), four);
    expect_figures(large_figures(gate, uniform(6)), six);
    expect_figures(large_figures(gate, uniform(8)), eight);
  }
  std::vector<std::uint8_t> mixed(128);
  for (int i = 0; i < 128; ++i) {
    mixed[static_cast<std::size_t>(i)] =
        static_cast<std::uint8_t>(i % 17 == 0 ? 16 : 4 + 2 * (i % 3));
  }
  expect_figures(large_figures(Gate::kChannel, mixed), {.0091130739, .010226872, 204621});
}

TEST(StepquantGolden, RowAbsmaxOfTheLargeState) {
  const State X = test::large_state(128, 128);
  for (const auto& [bits, mse] : {std::pair{4, .076349719}, {6, .005310623}, {8, .00030753786}}) {
    EXPECT_NEAR(test::mean_square_error(X, test::absmax_rows(X, 128, bits)), mse, mse * 1e-3);
  }
}

// A format: these bytes are the same with every compiler, instruction set and sanitizer.
TEST(StepquantGolden, PagesAreBitIdenticalOnEveryMachine) {
  const auto hash = [](Gate gate, int bits) {
    std::vector<std::uint8_t> widths(128, static_cast<std::uint8_t>(bits));
    for (int i = 0; bits == 0 && i < 128; ++i) {
      widths[static_cast<std::size_t>(i)] =
          std::array<std::uint8_t, 5>{2, 8, 16, 6, 4}[static_cast<std::size_t>(i % 5)];
    }
    const auto codec = make(shape_of(1, 128, 96, gate), plan_of(widths, large_weights(128)));
    const auto page = test::encode(*codec, test::large_state(128, 96));
    return to_hex(xxh3_128(std::as_bytes(std::span(page))));
  };
  EXPECT_EQ(hash(Gate::kScalar, 2), "085ac526f9d3b0483db1120b7b674bf1");
  EXPECT_EQ(hash(Gate::kScalar, 4), "1213b445c55803e886fcebeeb9befe4c");
  EXPECT_EQ(hash(Gate::kScalar, 6), "c49f95b0f415bad89396fe0e9a1c4a0e");
  EXPECT_EQ(hash(Gate::kScalar, 8), "8300a153db96735662ae5d32d9fb401d");
  EXPECT_EQ(hash(Gate::kChannel, 0), "7cf5b9d2f738cc557bf77ce6d03b73fe");
}

// ---- G9: closed loop ---------------------------------------------------------------------------

struct Token {
  std::vector<double> q, k, v;
};

std::vector<Token> closed_loop_tokens(int n_tokens, int K, int V) {
  test::Lcg lcg(7);
  std::vector<Token> tokens;
  const auto draw = [&](int n, int period, int centre) {
    std::vector<double> x;
    for (int i = 0; i < n; ++i) x.push_back(std::ldexp(lcg.centred(), i % period - centre));
    return x;
  };
  const auto normalise = [](std::vector<double>& x, double scale) {
    const double sum = std::inner_product(x.begin(), x.end(), x.begin(), 1e-6);
    for (double& e : x) e *= scale / std::sqrt(sum);
  };
  for (int t = 0; t < n_tokens; ++t) {
    Token token;
    token.q = draw(K, 5, 2);
    token.k = draw(K, 5, 2);
    token.v = draw(V, 7, 3);
    normalise(token.q, 1 / std::sqrt(static_cast<double>(K)));
    normalise(token.k, 1);
    tokens.push_back(std::move(token));
  }
  return tokens;
}

// R = d S, e = v - R^T k, X = R + beta k e^T, y = X^T q. Rounds the state through `store` after
// each token; returns all readouts.
template <class Store>
std::vector<double> run_closed_loop(const std::vector<Token>& tokens, int K, int V,
                                    const std::vector<double>& d, Store&& store) {
  std::vector<double> outputs;
  State S(static_cast<std::size_t>(K * V));
  std::vector<float> delta(static_cast<std::size_t>(V)), y(static_cast<std::size_t>(V));
  for (const Token& token : tokens) {
    for (int j = 0; j < V; ++j)
      delta[static_cast<std::size_t>(j)] = static_cast<float>(token.v[static_cast<std::size_t>(j)]);
    for (int i = 0; i < K; ++i) {
      const auto di = static_cast<float>(d[static_cast<std::size_t>(i)]);
      const auto k = static_cast<float>(token.k[static_cast<std::size_t>(i)]);
      float* s = S.data() + i * V;
      for (int j = 0; j < V; ++j) {
        s[j] *= di;
        delta[static_cast<std::size_t>(j)] -= k * s[j];
      }
    }
    std::fill(y.begin(), y.end(), 0.0f);
    for (int i = 0; i < K; ++i) {
      const auto q = static_cast<float>(token.q[static_cast<std::size_t>(i)]);
      const auto k = static_cast<float>(0.5 * token.k[static_cast<std::size_t>(i)]);
      float* s = S.data() + i * V;
      for (int j = 0; j < V; ++j) {
        s[j] += k * delta[static_cast<std::size_t>(j)];
        y[static_cast<std::size_t>(j)] += q * s[j];
      }
    }
    outputs.insert(outputs.end(), y.begin(), y.end());
    store(S);
  }
  return outputs;
}

TEST(StepquantGolden, ClosedLoopReadoutErrors) {
  constexpr int K = 128, V = 128, kTokens = 512;
  const std::vector<Token> tokens = closed_loop_tokens(kTokens, K, V);
  struct Case {
    Gate gate;
    std::array<double, 3> absmax, stepquant;  // at 4, 6, 8 bits
  };
  for (const Case& c : {Case{Gate::kScalar, {.703, .192, .0564}, {.463, .122, .0298}},
                        Case{Gate::kChannel, {.812, .218, .0640}, {.507, .138, .0342}}}) {
    std::vector<double> d(K, 1 - 1.0 / 128);
    for (int i = 0; c.gate == Gate::kChannel && i < K; ++i) {
      d[static_cast<std::size_t>(i)] = 1 - std::exp2(-(5 + i % 6));
    }
    // omega_i = mean g_i^2, g_i = d_i (q_i - beta k_i (k . q))
    std::vector<double> omega(K);
    for (const Token& t : tokens) {
      const double kq = std::inner_product(t.k.begin(), t.k.end(), t.q.begin(), 0.0);
      for (std::size_t i = 0; i < K; ++i) {
        omega[i] += std::pow(d[i] * (t.q[i] - 0.5 * t.k[i] * kq), 2) / kTokens;
      }
    }
    const std::vector<float> w = weights_of(omega);
    const std::vector<double> exact = run_closed_loop(tokens, K, V, d, [](State&) {});
    const auto readout_error = [&](auto&& store) {
      const std::vector<double> got = run_closed_loop(tokens, K, V, d, store);
      double error = 0, power = 0;
      for (std::size_t e = std::size_t{kTokens / 2} * V; e < exact.size(); ++e) {
        error += std::pow(got[e] - exact[e], 2);
        power += std::pow(exact[e], 2);
      }
      return std::sqrt(error / power);
    };
    for (std::size_t n = 0; n < 3; ++n) {
      const int bits = 4 + 2 * static_cast<int>(n);
      const auto codec =
          make(shape_of(1, K, V, c.gate),
               plan_of(std::vector<std::uint8_t>(K, static_cast<std::uint8_t>(bits)), w));
      auto scratch = test::scratch_for(*codec);
      std::vector<std::uint8_t> page(static_cast<std::size_t>(codec->page_bytes()));
      const double stepquant = readout_error([&](State& S) {
        codec->encode(0, S.data(), page.data(), {}, {scratch});
        codec->decode(0, page.data(), S.data(), {scratch});
      });
      const double absmax = readout_error([&](State& S) { S = test::absmax_rows(S, V, bits); });
      EXPECT_NEAR(stepquant, c.stepquant[n], .06 * c.stepquant[n]) << bits;
      EXPECT_NEAR(absmax, c.absmax[n], .06 * c.absmax[n]) << bits;
    }
  }
}

// ---- G10: bytes --------------------------------------------------------------------------------

struct Spending {
  int pivots;                             // units of 16 bits
  std::array<std::pair<int, int>, 3> of;  // {bits, units}
};

struct Bytes {
  std::int64_t codes, pivots, scales;
};

// `unit_rows` neighbouring rows share a width; widths go round-robin over units so that they mix.
PayloadBytes account(Gate gate, int layers, int heads, int unit_rows, const Spending& spending,
                     int group) {
  std::vector<std::uint8_t> widths;
  const auto add = [&](int bits, int n) {
    widths.insert(widths.end(), static_cast<std::size_t>(n), static_cast<std::uint8_t>(bits));
  };
  add(16, spending.pivots);
  for (const auto& [bits, n] : spending.of) add(bits, n);
  const std::size_t n_units = widths.size();
  EXPECT_EQ(n_units * static_cast<std::size_t>(unit_rows),
            static_cast<std::size_t>(layers * heads * 128));
  PayloadBytes sum;
  std::size_t unit = 0;
  for (int l = 0; l < layers; ++l) {
    LayerPlan plan;
    while (plan.bits.size() < static_cast<std::size_t>(heads * 128)) {
      const std::size_t step = 7919;  // prime, so every unit is taken once
      plan.bits.insert(plan.bits.end(), static_cast<std::size_t>(unit_rows),
                       widths[unit * step % n_units]);
      ++unit;
    }
    plan.row_weight.assign(plan.bits.size(), 1.0f);
    const PayloadBytes p = make(shape_of(heads, 128, 128, gate), plan, group)->payload();
    sum.codes += p.codes;
    sum.pivots += p.pivots;
    sum.scales += p.scales;
    sum.padding += p.padding;
    EXPECT_EQ(p.zero_points + p.compensators, 0);
  }
  return sum;
}

void expect_bytes(const PayloadBytes& got, std::int64_t codes, std::int64_t pivots,
                  std::int64_t row_scales, std::int64_t column_scales) {
  EXPECT_EQ(got.codes, codes);
  EXPECT_EQ(got.pivots, pivots);
  EXPECT_EQ(got.scales, row_scales + column_scales);
}

TEST(StepquantGolden, BytesOfQwen27B) {
  constexpr int kLayers = 48, kHeads = 48;
  const auto at = [](Spending s, int group = 32) {
    return account(Gate::kScalar, kLayers, kHeads, 128, s, group);
  };
  const PayloadBytes six = at({32, {{{4, 32}, {6, 2240}, {8, 0}}}});
  expect_bytes(six, 27'787'264, 1'048'576, 581'632, 581'632);
  EXPECT_EQ(six.total(), 29'999'104);
  EXPECT_EQ(six.padding, 0);
  EXPECT_NEAR(8.0 * 29'999'104 / 37'748'736, 6.3576, 5e-5);
  // The paper also counts the scale slots that pivot heads would have.
  EXPECT_EQ(six.total() + 32 * 2 * (128 + 128), 30'015'488);

  const PayloadBytes eight = at({32, {{{8, 2272}, {6, 0}, {4, 0}}}});
  expect_bytes(eight, 37'224'448, 1'048'576, 581'632, 581'632);
  EXPECT_EQ(eight.total(), 39'436'288);

  // Nominal 4 spends 8,960 units of bits on 2,272 heads, so at least 64 heads get 2 bits; with one
  // group a row they cost no more scales than others.
  const Spending four{32, {{{2, 64}, {4, 2208}, {8, 0}}}};
  const PayloadBytes whole_rows = at(four, 128);
  expect_bytes(whole_rows, 18'350'080, 1'048'576, 581'632, 581'632);
  EXPECT_EQ(whole_rows.total(), 20'561'920);
  EXPECT_EQ(at(four, 32).total(), 20'561'920 + 64 * 768);
  // The paper's 4-bit total, at 16 columns a group.
  const PayloadBytes paper = at({32, {{{2, 684}, {4, 1278}, {8, 310}}}}, 16);
  EXPECT_EQ(paper.total() + 32 * 2 * (128 + 128), 21'804'032);
}

TEST(StepquantGolden, BytesOfKimi48B) {
  const auto at = [](Spending s) { return account(Gate::kChannel, 20, 32, 1, s, 32); };
  // B_int = nominal * 81,920 - 8 * 512 over 81,408 rows.
  const PayloadBytes four = at({512, {{{2, 3072}, {4, 77312}, {8, 1024}}}});
  expect_bytes(four, 5'177'344, 131'072, 162'816, 163'840);
  EXPECT_EQ(four.total() - four.padding, 5'635'072);
  const PayloadBytes six = at({512, {{{4, 1536}, {6, 78848}, {8, 1024}}}});
  expect_bytes(six, 7'798'784, 131'072, 162'816, 163'840);
  EXPECT_EQ(six.total() - six.padding, 8'256'512);
  const PayloadBytes eight = at({512, {{{8, 81408}, {4, 0}, {6, 0}}}});
  expect_bytes(eight, 10'420'224, 131'072, 162'816, 163'840);
  EXPECT_EQ(eight.total() - eight.padding, 10'877'952);
  // At most one byte a tile for each pivot and one for the head's stride.
  EXPECT_LE(six.padding, 32 * (512 + 640));
}

// ---- The codec against its equations and the page against its addresses
// --------------------------

struct Layer {
  LayerShape shape;
  LayerPlan plan;
  int group = 32;
};

Layer mixed_layer(int heads, int K, int V, Gate gate, int group, unsigned seed) {
  Layer layer{shape_of(heads, K, V, gate), {}, group};
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> log_weight(-2, 2);
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < K; ++i) {
      const bool new_width = i == 0 || gate == Gate::kChannel;
      layer.plan.bits.push_back(new_width
                                    ? std::array<std::uint8_t, 5>{2, 4, 6, 8, 16}[random() % 5]
                                    : layer.plan.bits.back());
      layer.plan.row_weight.push_back(std::exp2(log_weight(random)));
    }
  }
  return layer;
}

class StepquantShapes : public testing::TestWithParam<std::tuple<std::array<int, 2>, Gate>> {};

TEST_P(StepquantShapes, EqualTheirEquationsBitForBit) {
  const auto [KV, gate] = GetParam();
  const auto [K, V] = KV;
  for (unsigned seed = 0; seed < 6; ++seed) {
    const Layer layer = mixed_layer(3, K, V, gate, seed % 2 ? 16 : 32, seed);
    const auto codec = make(layer.shape, layer.plan, layer.group);
    State heads = test::normal_state(3 * K * V, seed);
    for (std::size_t e = 0; e < heads.size(); ++e)
      heads[e] = std::ldexp(heads[e], static_cast<int>(e % 11) - 6);
    const auto page = test::encode(*codec, heads);
    EXPECT_EQ(page, test::encode(*codec, heads, 0)) << "every byte is written";
    const State restored = test::decode(*codec, page);
    const int period_of[] = {0, 0, 4, 0, 2, 0, 4, 0, 1};
    std::int64_t next_scale = codec->row_scales(0);
    for (int h = 0; h < 3; ++h) {
      const std::size_t first = static_cast<std::size_t>(h * K * V);
      const State X(heads.begin() + h * K * V, heads.begin() + (h + 1) * K * V);
      const std::uint8_t* bits = layer.plan.bits.data() + h * K;
      const Plain plain =
          plain_stepquant(X, K, V, gate, bits, layer.plan.row_weight.data() + h * K, layer.group);
      const auto dump = codec->dump(h, page);
      EXPECT_EQ(dump.z, plain.z);
      EXPECT_EQ(dump.r, plain.r);
      EXPECT_EQ(dump.c, plain.c);
      EXPECT_EQ(std::memcmp(&restored[first], plain.restored.data(), X.size() * sizeof(float)), 0);

      // The published addresses: rows in order within a tile, tiles behind each other.
      const int T = std::min(gate == Gate::kScalar ? 16 : 4, V);
      std::int64_t tile_start = codec->run_offset(h, 0, 0);
      EXPECT_EQ(tile_start % 2, 0);
      for (int begin = 0; begin < V; begin += T) {
        const int n = std::min(T, V - begin);
        std::int64_t local = 0;
        for (int i = 0; i < K; ++i) {
          if (bits[i] == 16) local += local & 1;
          ASSERT_EQ(codec->run_offset(h, i, begin), tile_start + local);
          for (int j = 0; j < n; ++j) {
            const std::size_t e = static_cast<std::size_t>(i * V + begin + j);
            if (bits[i] == 16) {
              std::uint16_t half;
              std::memcpy(&half, &page[static_cast<std::size_t>(tile_start + local + 2 * j)], 2);
              ASSERT_EQ(f16_to_f32(half), plain.restored[e]);
            } else {
              const int u = code_at(page, tile_start + local, j, bits[i]);
              const int Q = (1 << (bits[i] - 1)) - 1;
              const bool magnitude = gate == Gate::kScalar && bits[i] == 2;
              ASSERT_EQ(magnitude ? 2 * u - 3 : u - Q, plain.z[e]);
              ASSERT_TRUE(magnitude || u < (1 << bits[i]) - 1);
            }
          }
          const int period = bits[i] == 16 ? 1 : period_of[bits[i]];
          local += (n + period - 1) / period * period * bits[i] / 8;
        }
        tile_start += local + (local & 1);
      }
      EXPECT_EQ(codec->row_scales(h), next_scale);
      next_scale +=
          2 *
          static_cast<std::int64_t>(std::count_if(bits, bits + K, [](int b) { return b != 16; })) *
          codec->groups(h);
    }
    EXPECT_EQ(codec->column_scales(0), next_scale);
  }
}

TEST_P(StepquantShapes, WriteTheirOwnHeadOnlyAndDecodeZeroPages) {
  const auto [KV, gate] = GetParam();
  const auto [K, V] = KV;
  const Layer layer = mixed_layer(3, K, V, gate, 32, 99);
  const auto codec = make(layer.shape, layer.plan, layer.group);
  const State heads = test::normal_state(3 * K * V, 5);
  const auto whole = test::encode(*codec, heads);
  auto scratch = test::scratch_for(*codec);
  std::vector<std::uint8_t> page(whole.size(), 0x77);
  for (int h : {2, 0, 1}) {
    const std::vector<std::uint8_t> before = page;
    codec->encode(h, heads.data() + h * K * V, page.data(), {}, {scratch});
    for (std::size_t b = 0; b < page.size(); ++b) {
      ASSERT_TRUE(page[b] == before[b] || page[b] == whole[b]);
    }
  }
  EXPECT_EQ(page, whole);

  for (float x : test::decode(*codec, std::vector<std::uint8_t>(whole.size()))) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(x), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    , StepquantShapes,
    testing::Combine(testing::Values(std::array{128, 128}, std::array{64, 128}, std::array{128, 64},
                                     std::array{96, 192}, std::array{4, 4}, std::array{7, 3},
                                     std::array{5, 1}, std::array{1, 37}, std::array{12, 102}),
                     testing::Values(Gate::kScalar, Gate::kChannel)));

// ---- Edge cases, in the order of the published table
// ---------------------------------------------

class StepquantEdges : public testing::TestWithParam<Gate> {
 protected:
  static constexpr int K = 16, V = 32;
  State encode_rows(int bits, const State& X) {
    codec_ = make(shape_of(1, K, V, GetParam()), uniform_plan(K, bits), 16);
    page_ = test::encode(*codec_, X);
    dump_ = codec_->dump(0, page_);
    return test::decode(*codec_, page_);
  }
  State random(float scale = 1) { return test::normal_state(K * V, 3, scale); }
  bool signed_magnitude(int bits) { return bits == 2 && GetParam() == Gate::kScalar; }
  std::unique_ptr<StepquantCodec> codec_;
  std::vector<std::uint8_t> page_;
  StepquantCodec::Dump dump_;
};

INSTANTIATE_TEST_SUITE_P(, StepquantEdges, testing::Values(Gate::kScalar, Gate::kChannel));

TEST_P(StepquantEdges, ZeroRow) {
  for (int bits : {2, 4, 6, 8}) {
    State X = random();
    std::fill_n(X.begin() + 3 * V, V, 0.0f);
    const State got = encode_rows(bits, X);
    EXPECT_EQ(dump_.r[static_cast<std::size_t>(3 * codec_->groups(0))], kTiny);
    for (int j = 0; j < V; ++j) {
      const float restored = got[static_cast<std::size_t>(3 * V + j)];
      if (signed_magnitude(bits)) {
        EXPECT_EQ(dump_.z[static_cast<std::size_t>(3 * V + j)], 1);
        EXPECT_EQ(restored, kTiny * dump_.c[static_cast<std::size_t>(j)]);
      } else {
        EXPECT_EQ(restored, 0.0f);
      }
    }
  }
}

TEST_P(StepquantEdges, ZeroColumn) {
  for (int bits : {4, 6, 8}) {
    State X = random();
    for (int i = 0; i < K; ++i) X[static_cast<std::size_t>(i * V + 5)] = 0;
    const State got = encode_rows(bits, X);
    EXPECT_EQ(dump_.c[5], kTiny);
    for (int i = 0; i < K; ++i) EXPECT_EQ(got[static_cast<std::size_t>(i * V + 5)], 0.0f);
  }
}

TEST_P(StepquantEdges, ZeroState) {
  for (int bits : {2, 4, 6, 8, 16}) {
    for (float x : encode_rows(bits, State(K * V))) EXPECT_LT(std::fabs(x), 1e-10f);
  }
}

TEST_P(StepquantEdges, ZeroEntryOfATwoBitHead) {
  State X = random();
  X[7] = 0;
  const State got = encode_rows(2, X);
  EXPECT_EQ(got[7], signed_magnitude(2) ? dump_.r[0] * dump_.c[7] : 0.0f);
}

TEST_P(StepquantEdges, HeadOfPivotsHasNoScales) {
  const State X = random();
  const State got = encode_rows(16, X);
  EXPECT_EQ(codec_->page_bytes(), 2 * K * V);
  EXPECT_EQ(codec_->payload().scales, 0);
  EXPECT_TRUE(dump_.c.empty());
  for (std::size_t e = 0; e < X.size(); ++e) EXPECT_NEAR(got[e], X[e], std::fabs(X[e]) * 0x1p-11);
}

TEST_P(StepquantEdges, TinyValuesKeepTheSmallestScales) {
  for (int bits : {4, 6, 8}) {
    const State got = encode_rows(bits, random(1e-16f));  // sqrt(m) is below 2^-24
    for (float r : dump_.r) EXPECT_EQ(r, kTiny);
    for (float x : got) EXPECT_LT(std::fabs(x), 1e-12f);
    encode_rows(bits, random(1e-38f));
    for (float c : dump_.c) EXPECT_EQ(c, kTiny);
  }
}

TEST_P(StepquantEdges, SmallWeightsMeetTheFloorOfTheMean) {
  LayerPlan plan = uniform_plan(K, 4);
  plan.row_weight[2] = 0x1p-20f;
  const auto codec = make(shape_of(1, K, V, GetParam()), plan);
  EXPECT_EQ(codec->dump(0, test::encode(*codec, State(K * V))).r[2], h16(1e-10f * 0x1p10f));
}

TEST_P(StepquantEdges, LargeScalesClampAndCodesSaturate) {
  for (int bits : {4, 6, 8}) {
    State X(K * V, 3e38f);
    for (std::size_t e = 0; e < X.size(); e += 2) X[e] = -X[e];
    const int Q = (1 << (bits - 1)) - 1;
    const State got = encode_rows(bits, X);
    for (float r : dump_.r) EXPECT_EQ(r, 65504.0f);
    for (float c : dump_.c) EXPECT_EQ(c, 65504.0f);
    for (std::size_t e = 0; e < X.size(); ++e) {
      EXPECT_EQ(dump_.z[e], e % 2 ? Q : -Q);
      EXPECT_TRUE(std::isfinite(got[e]));
    }
  }
}

TEST_P(StepquantEdges, FittedScaleMayBeBelowTheFirstOneAndClampOutliers) {
  State X(K * V, 1.0f);
  X[0] = 8.5f;  // 7 c0 holds it exactly; the fit of the others pulls c down
  encode_rows(4, X);
  EXPECT_EQ(dump_.z[0], 7);
  const float r0 = dump_.r[0], n = GetParam() == Gate::kChannel ? 16.0f : 1.0f;
  EXPECT_LT(dump_.c[0], h16(8.5f / (r0 * n) / 7));
}

TEST_P(StepquantEdges, PivotsSaturateAtTheLargestHalf) {
  State X = random();
  X[0] = 1e9f;
  X[1] = -70000;
  X[2] = 65519;
  const State got = encode_rows(16, X);
  EXPECT_THAT(row(got, 3, 0), ElementsAre(65504, -65504, 65504));
}

TEST_P(StepquantEdges, NanCountsAsZeroAndInfinityAsTheLargestFloat) {
  for (int bits : {2, 4, 6, 8, 16}) {
    State X = random(), replaced = X;
    X[5] = std::numeric_limits<float>::quiet_NaN();
    replaced[5] = 0;
    X[40] = std::numeric_limits<float>::infinity();
    replaced[40] = std::numeric_limits<float>::max();
    X[80] = -X[40];
    replaced[80] = -replaced[40];
    encode_rows(bits, replaced);
    const auto want = page_;
    for (float x : encode_rows(bits, X)) EXPECT_TRUE(std::isfinite(x));
    EXPECT_EQ(page_, want);
  }
}

// A column's scale follows the hot row, so the bound of the others is in steps, not in their size.
TEST_P(StepquantEdges, OneHotRow) {
  for (int bits : {4, 6, 8}) {
    const int Q = (1 << (bits - 1)) - 1;
    const float n = GetParam() == Gate::kChannel ? std::exp2(8.0f - static_cast<float>(bits)) : 1;
    State X = random(1e-3f);
    for (int j = 0; j < V; ++j) X[static_cast<std::size_t>(2 * V + j)] *= 3e5f;
    const State got = encode_rows(bits, X);
    for (std::size_t e = 0; e < X.size(); ++e) {
      const float half_step = 0.5f * n * dump_.r[e / V] * dump_.c[e % V];
      if (std::abs(dump_.z[e]) < Q) {
        EXPECT_LE(std::fabs(got[e] - X[e]), half_step * (1 + 0x1p-18f));
      }
    }
    EXPECT_LT(test::mean_square_error(row(X, V, 2), row(got, V, 2)), 1e5 / (Q * Q));
  }
}

TEST_P(StepquantEdges, RankOneState) {
  State X;
  const State a = test::normal_state(K, 1), b = test::normal_state(V, 2);
  for (float x : a) {
    for (float y : b) X.push_back(x * y);
  }
  // |Y| is the same in a column for all rows, up to sqrt of the row factor: fitted well.
  EXPECT_LT(test::mean_square_error(X, encode_rows(8, X)),
            1e-4 * test::mean_square_error(X, State(X.size())));
}

TEST(Stepquant, RoundsHalvesToEvenAndTwoBitMagnitudesAtTwo) {
  const std::vector<float> y = {-9, -7.5f, -1.5f, -0.5f, 0, 0.5f, 1.5f, 2.5f, 7.4f, 1e30f};
  const std::vector<float> ones(y.size(), 1.0f);
  std::vector<std::uint8_t> u(y.size());
  stepquant::encode(y.data(), ones.data(), static_cast<std::int64_t>(y.size()), 7, u.data());
  EXPECT_THAT(u, ElementsAre(0, 0, 5, 7, 7, 7, 9, 9, 14, 14));

  const float below = std::nextafter(2.0f, 0.0f);
  const std::vector<float> m = {-2, -below, -0.0f, 0, below, 2};
  stepquant::encode_signed(m.data(), ones.data(), static_cast<std::int64_t>(m.size()), u.data());
  u.resize(m.size());
  EXPECT_THAT(u, ElementsAre(0, 1, 2, 2, 2, 3));
}

// ---- Plans that are refused
// ----------------------------------------------------------------------

std::string refusal(const LayerShape& shape, const LayerPlan* plan, Code code,
                    const std::map<std::string, std::string>& options = {}) {
  const CodecConfig config = test::configure(kStepquantInfo, "6", options);
  auto codec = kStepquantInfo.make(config, shape, plan);
  EXPECT_FALSE(codec.ok());
  EXPECT_EQ(codec.status().code(), code);
  return codec.status().message();
}

TEST(Stepquant, RefusesWhatItCannotHold) {
  const LayerShape scalar = shape_of(2, 4, 8, Gate::kScalar);
  EXPECT_THAT(refusal(scalar, nullptr, Code::kMismatch), HasSubstr("statepack calibrate"));
  const LayerPlan other = uniform_plan(4, 6);
  EXPECT_THAT(refusal(scalar, &other, Code::kMismatch), HasSubstr("2 heads x 4 rows"));
  const LayerPlan mixed = plan_of({4, 4, 6, 4, 4, 4, 4, 4});
  EXPECT_THAT(refusal(scalar, &mixed, Code::kCorrupt), HasSubstr("mixed rows in head 0"));
  for (int bits : {0, 1, 3, 5, 7, 9, 32}) {
    LayerPlan odd = uniform_plan(8, 6);
    odd.bits[5] = static_cast<std::uint8_t>(bits);
    EXPECT_THAT(refusal(scalar, &odd, Code::kCorrupt), HasSubstr("row 1 of head 1"));
  }
  for (float w : {0.0f, -1.0f, NAN, INFINITY, 1e-30f, 1e30f}) {
    LayerPlan odd = uniform_plan(8, 6);
    odd.row_weight[2] = w;
    EXPECT_THAT(refusal(scalar, &odd, Code::kCorrupt), HasSubstr("row 2 of head 0"));
  }
  const LayerPlan good = uniform_plan(8, 6);
  EXPECT_THAT(refusal(shape_of(2, 0, 8, Gate::kScalar), &good, Code::kUnsupported),
              HasSubstr("cannot be packed"));
  for (const char* group : {"0", "-1", "x", "32 ", "", "65537"}) {
    EXPECT_THAT(refusal(scalar, &good, Code::kInvalidArgument, {{"group", group}}),
                HasSubstr("group="));
    EXPECT_FALSE(
        kStepquantInfo.validate(test::configure(kStepquantInfo, "6", {{"group", group}})).ok());
  }
}

TEST(Stepquant, IsListedWithItsPlanAndDefaults) {
  EXPECT_EQ(find_codec("stepquant"), &kStepquantInfo);
  const CodecConfig config = test::configure(kStepquantInfo, "4");
  EXPECT_EQ(kStepquantInfo.plan_kind(config), "stepquant");
  const SchemeDefaults defaults = kStepquantInfo.defaults(config);
  EXPECT_EQ(defaults.period, 1);
  EXPECT_EQ(defaults.records, "bf16");
  EXPECT_EQ(defaults.phase, "handover");
  EXPECT_EQ(defaults.prefill, "once");
  const LayerPlan plan = uniform_plan(8, 2);
  const LayerShape shape = shape_of(2, 4, 64, Gate::kScalar);
  auto codec =
      kStepquantInfo.make(test::configure(kStepquantInfo, "4", {{"group", "16"}}), shape, &plan);
  ASSERT_TRUE(codec.ok());
  EXPECT_EQ((*codec)->payload().scales, 2 * (8 * 4 + 2 * 64));
}

// ---- On a trained model's state
// ------------------------------------------------------------------

TEST(Stepquant, BeatsRowAbsmaxOnTrainedStatesAndGainsWithEveryWidth) {
  const State heads = test::trained_states();
  for (int h = 0; h < 4; ++h) {
    const State X(heads.begin() + h * 128 * 128, heads.begin() + (h + 1) * 128 * 128);
    for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
      double last = INFINITY;
      for (int bits : {2, 4, 6, 8, 16}) {
        const auto codec = make(shape_of(1, 128, 128, gate), uniform_plan(128, bits));
        const double error = test::mean_square_error(X, test::round_trip(*codec, X));
        EXPECT_LT(error, last) << bits << " bits, head " << h;
        if (bits >= 4 && bits <= 8) {
          EXPECT_LT(error, test::mean_square_error(X, test::absmax_rows(X, 128, bits)));
        }
        last = error;
      }
    }
  }
}

// A higher weight buys its row a smaller error.
TEST(Stepquant, WeightsShiftErrorBetweenRows) {
  const State heads = test::trained_states();
  const State X(heads.begin(), heads.begin() + 128 * 128);
  const auto row_error = [&](float weight) {
    LayerPlan plan = uniform_plan(128, 4);
    plan.row_weight[64] = weight;
    const State got = test::round_trip(*make(shape_of(1, 128, 128, Gate::kScalar), plan), X);
    return test::mean_square_error(row(X, 128, 64), row(got, 128, 64));
  };
  EXPECT_LT(row_error(4), row_error(1));
  EXPECT_LT(row_error(1), row_error(0.25f));
}

}  // namespace
}  // namespace statepack
