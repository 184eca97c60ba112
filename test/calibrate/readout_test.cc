// The Gramian of later reads against products written out, and against what injected errors do.
#include "calibrate/readout.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "synthetic.hpp"

namespace statepack {
namespace {

using testing::random_tokens;
using testing::SyntheticModel;

/// Random tokens of one head; strides wider than K.
struct Stream {
  int K;
  std::int64_t n;
  Gate gate;
  std::vector<float> q, k, g, beta;  // g [n] or [n][K]

  Stream(int K_, std::int64_t n_, unsigned seed, Gate gate_) : K(K_), n(n_), gate(gate_) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t t = 0; t < n; ++t) {
      for (auto* x : {&q, &k}) {
        std::vector<float> row(static_cast<std::size_t>(K));
        float sum = 0;
        for (float& e : row) e = normal(random), sum += e * e;
        for (float e : row) x->push_back(e / std::sqrt(sum));
        x->push_back(NAN);
      }
      for (int i = 0; i < gate_width(); ++i) {
        g.push_back(t % 11 == 3 ? -4.0f : -0.1f * std::fabs(normal(random)));
      }
      beta.push_back(t % 7 == 0 ? 1.0f : 0.5f + 0.4f * std::sin(static_cast<float>(t)));
    }
  }
  int gate_width() const { return gate == Gate::kScalar ? 1 : K; }
  HeadTokens tokens() const {
    return {.K = K,
            .n_tokens = n,
            .q = q.data(),
            .k = k.data(),
            .qk_stride = K + 1,
            .g = g.data(),
            .g_stride = gate_width(),
            .gate = gate,
            .beta = beta.data(),
            .beta_stride = 1};
  }
  /// x <- A_t x (token t from 0), or A_t^T x.
  void apply(std::int64_t t, bool transposed, std::vector<double>& x) const {
    const auto decay = [&] {
      for (int i = 0; i < K; ++i) {
        x[i] *= std::exp(double{g[t * gate_width() + (gate == Gate::kScalar ? 0 : i)]});
      }
    };
    if (!transposed) decay();  // A = (I - b k k^T) D
    double along = 0;
    for (int i = 0; i < K; ++i) along += k[t * (K + 1) + i] * x[i];
    for (int i = 0; i < K; ++i) x[i] -= double{beta[t]} * along * k[t * (K + 1) + i];
    if (transposed) decay();
  }
};

// W_t = sum_r g g^T with g = A_(t+1) ... A_r q_r, one product after the other.
std::vector<double> brute_force(const Stream& s, std::int64_t t) {
  std::vector<double> W(static_cast<std::size_t>(s.K * s.K), 0.0);
  for (std::int64_t r = t; r < s.n; ++r) {
    std::vector<double> g(s.q.begin() + r * (s.K + 1), s.q.begin() + r * (s.K + 1) + s.K);
    for (std::int64_t m = r; m >= t; --m) s.apply(m, true, g);
    for (int i = 0; i < s.K; ++i) {
      for (int j = 0; j < s.K; ++j) W[i * s.K + j] += g[i] * g[j];
    }
  }
  return W;
}

TEST(Gramian, EqualsTheProductsWrittenOut) {
  for (const int K : {1, 5, 16, 37}) {
    for (const std::int64_t n : {16, 31, 32, 48, 75}) {
      const Gate gate = n % 2 == 0 && K != 5 ? Gate::kScalar : Gate::kChannel;
      const Stream s(K, n, static_cast<unsigned>(K + n), gate);
      const std::int64_t last = n * 3 / 4;
      std::vector<double> expected(static_cast<std::size_t>(K * K), 0.0), sum = expected;
      std::int64_t n_samples = 0;
      for (std::int64_t t = kGramianInterval; t <= last; t += kGramianInterval, ++n_samples) {
        const std::vector<double> W = brute_force(s, t);
        for (std::size_t e = 0; e < W.size(); ++e) expected[e] += W[e];
      }
      EXPECT_EQ(add_gramians(s.tokens(), last, sum.data()), n_samples);
      double peak = 1e-30;
      for (const double w : expected) peak = std::max(peak, std::fabs(w));
      for (std::size_t e = 0; e < sum.size(); ++e) {
        ASSERT_NEAR(sum[e], expected[e], 1e-11 * peak) << K << " " << n << " " << e;
      }
    }
  }
}

// An error in the state after a token changes the later readouts by exactly what W says.
void expect_prediction(Gate gate) {
  constexpr int K = 24;
  const Stream s(K, 31, 9, gate);
  std::vector<double> W(K * K, 0.0);
  ASSERT_EQ(add_gramians(s.tokens(), 16, W.data()), 1);
  std::mt19937 random(4);
  std::normal_distribution<double> normal;
  double measured = 0, trace = 0;
  constexpr int kDraws = 4000;
  for (int i = 0; i < K; ++i) trace += W[i * K + i];
  for (int draw = 0; draw < kDraws; ++draw) {
    std::vector<double> eps(K);
    for (double& e : eps) e = 0.1 * normal(random);
    double cost = 0, change = 0;
    for (int i = 0; i < K; ++i) {
      for (int j = 0; j < K; ++j) cost += eps[i] * W[i * K + j] * eps[j];
    }
    for (std::int64_t t = 16; t < s.n; ++t) {  // the recurrence is linear in the state
      s.apply(t, false, eps);
      double o = 0;
      for (int i = 0; i < K; ++i) o += s.q[t * (K + 1) + i] * eps[i];
      change += o * o;
    }
    ASSERT_NEAR(change, cost, 1e-11 * (1 + cost));
    measured += change;
  }
  EXPECT_NEAR(measured / kDraws, 0.01 * trace, 0.05 * 0.01 * trace);  // white noise costs tr W
}
TEST(Gramian, PredictsWhatAnErrorDoesToLaterReadouts) { expect_prediction(Gate::kScalar); }
TEST(Gramian, PredictsItWithGatesOfChannels) { expect_prediction(Gate::kChannel); }

// The collector's W is that of the tokens that the chunks showed, whatever their lengths, and its s
// is the formula.
TEST(Readout, CollectsWhatTheChunksShow) {
  const std::vector<LayerShape> shapes = {{1, 2, 12, 6, Gate::kScalar},
                                          {2, 2, 12, 6, Gate::kScalar}};
  for (const int n_threads : {1, 3}) {
    ThreadPool threads(n_threads);
    SyntheticModel model{shapes};
    model.chunks = {7, 64, 16, 1};
    constexpr std::int64_t kTokens = 80;
    ReadoutCollector collector(shapes, 2, kTokens, threads);
    const std::vector<std::int32_t> texts[] = {random_tokens(kTokens, 1),
                                               random_tokens(kTokens, 2, 1000)};
    for (int d = 0; d < 2; ++d) {
      collector.begin_segment(d, 1 + d * kTokens);
      model.prefill(texts[d], collector, threads);
      ASSERT_TRUE(collector.end_segment().ok());
    }
    for (int l = 0; l < 2; ++l) {
      const LayerShape& shape = shapes[l];
      for (int d = 0; d < 2; ++d) {
        const SyntheticModel::Inputs in = model.inputs(l, texts[d]);
        for (int h = 0; h < shape.n_value_heads; ++h) {
          const HeadTokens tokens{.K = shape.K,
                                  .n_tokens = kTokens,
                                  .q = in.q.data() + shape.key_head(h) * shape.K,
                                  .k = in.k.data() + shape.key_head(h) * shape.K,
                                  .qk_stride = in.qk_stride,
                                  .g = in.g.data() + h,
                                  .g_stride = in.g_stride,
                                  .beta = in.beta.data() + h,
                                  .beta_stride = in.beta_stride};
          std::vector<double> W(static_cast<std::size_t>(shape.K * shape.K), 0.0);
          const double n = double(add_gramians(tokens, 60, W.data()));
          for (double& w : W) w /= n;
          EXPECT_EQ(collector.gramian(l, h, d), W);
          // s = mean gain^2 / (mean o^2 + eps) * 2 / (8 * 1)
          const SyntheticModel::Trace run = model.trace(l, h, in, kTokens);
          std::vector<double> s(static_cast<std::size_t>(shape.V), 0.0);
          for (std::int64_t t = 0; t < kTokens; ++t) {
            double power = 0;
            for (int j = 0; j < shape.V; ++j) {
              double o = 0;
              for (int i = 0; i < shape.K; ++i) {
                o += tokens.q[t * in.qk_stride + i] * run.S[t + 1][i * shape.V + j];
              }
              power += o * o / shape.V;
            }
            for (int j = 0; j < shape.V; ++j) {
              const double gain = 1 + double(j) / shape.V;
              s[j] += gain * gain / (power + 1e-6) * 0.25 / kTokens;
            }
          }
          const std::vector<double> got = collector.sensitivity(l, d);
          for (int j = 0; j < shape.V; ++j) {
            EXPECT_NEAR(got[h * shape.V + j], s[j], 1e-4 * s[j]) << l << d << h << j;
          }
        }
      }
    }
  }
}

TEST(Readout, RefusesWhatIsNotFinite) {
  const std::vector<LayerShape> shapes = {{1, 1, 4, 4, Gate::kScalar}};
  ThreadPool threads(1);
  ReadoutCollector collector(shapes, 1, 64, threads);
  collector.begin_segment(0, 1);
  const std::vector<float> q(64 * 4, NAN), k(64 * 4, 0.5f), g(64, -0.1f), beta(64, 0.5f);
  ChunkView view;
  view.n_tokens = 64;
  view.q = q.data(), view.k = k.data(), view.g = g.data(), view.beta = beta.data();
  view.qk_stride = 4, view.g_stride = view.beta_stride = 1;
  collector.on_chunk(view);
  EXPECT_EQ(collector.end_segment().code(), Code::kNotFinite);
}

}  // namespace
}  // namespace statepack
