// Chunked prefill against the literal recurrence in double precision.
#include "delta/prefill.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace statepack {
namespace {

struct Problem {
  LayerShape shape;
  int T = 0;
  std::vector<float> q, k, v, g, beta, S0;
};

// Unit keys and scaled unit queries, as models prepare them. `decay` is the mean log decay of a
// token.
Problem make(LayerShape shape, int T, float decay, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> unit(0, 1);
  Problem p{shape, T, {}, {}, {}, {}, {}, {}};
  const auto rows = [&](int n, int width, float length) {
    std::vector<float> x(std::size_t(n) * width);
    for (int i = 0; i < n; ++i) {
      double norm = 0;
      for (int d = 0; d < width; ++d) {
        x[i * width + d] = normal(rng);
        norm += double{x[i * width + d]} * x[i * width + d];
      }
      for (int d = 0; d < width; ++d) x[i * width + d] *= length / float(std::sqrt(norm));
    }
    return x;
  };
  p.q = rows(T * shape.n_key_heads, shape.K, 1 / std::sqrt(float(shape.K)));
  p.k = rows(T * shape.n_key_heads, shape.K, 1);
  p.v = rows(T * shape.n_value_heads, shape.V, std::sqrt(float(shape.V)));
  p.S0 = rows(shape.n_value_heads * shape.K, shape.V, 1);
  p.beta.resize(std::size_t(T) * shape.n_value_heads);
  for (float& b : p.beta) b = unit(rng);
  p.g.resize(std::size_t(T) * shape.n_value_heads * shape.gate_width());
  for (float& x : p.g) x = 2 * decay * unit(rng);
  return p;
}

struct Answer {
  std::vector<double> out, S;
};

// docs/models.md 5.4 and 7.5, line by line.
Answer recurrence(const Problem& p) {
  const LayerShape& s = p.shape;
  const int K = s.K, V = s.V, width = s.gate_width();
  Answer a{std::vector<double>(std::size_t(p.T) * s.n_value_heads * V),
           std::vector<double>(p.S0.begin(), p.S0.end())};
  for (int t = 0; t < p.T; ++t) {
    for (int h = 0; h < s.n_value_heads; ++h) {
      double* S = &a.S[std::size_t(h) * K * V];
      const float* q = &p.q[(t * s.n_key_heads + s.key_head(h)) * K];
      const float* k = &p.k[(t * s.n_key_heads + s.key_head(h)) * K];
      const int row = t * s.n_value_heads + h;
      for (int i = 0; i < K; ++i) {
        const double e = std::exp(double{p.g[row * width + (width == 1 ? 0 : i)]});
        for (int c = 0; c < V; ++c) S[i * V + c] *= e;
      }
      for (int c = 0; c < V; ++c) {
        double read = 0;
        for (int i = 0; i < K; ++i) read += S[i * V + c] * k[i];
        const double delta = p.beta[row] * (p.v[row * V + c] - read);
        double o = 0;
        for (int i = 0; i < K; ++i) {
          S[i * V + c] += k[i] * delta;
          o += S[i * V + c] * q[i];
        }
        a.out[row * V + c] = o;
      }
    }
  }
  return a;
}

struct Got {
  std::vector<float> out, S;
};

// `cuts` are the lengths of the calls. Rows lie apart, so that strides are tested too.
Got chunked(const Problem& p, const std::vector<int>& cuts, int n_threads,
            ChunkObserver* observer = nullptr) {
  const LayerShape& s = p.shape;
  ThreadPool threads(n_threads);
  Got got{std::vector<float>(std::size_t(p.T) * s.n_value_heads * s.V, NAN), p.S0};
  const auto spread = [&](const std::vector<float>& x, int width) {
    std::vector<float> y(std::size_t(p.T) * (width + 5), NAN);
    for (int t = 0; t < p.T; ++t) std::copy_n(&x[t * width], width, &y[t * (width + 5)]);
    return y;
  };
  const int q_w = s.n_key_heads * s.K, v_w = s.n_value_heads * s.V,
            g_w = s.n_value_heads * s.gate_width(), b_w = s.n_value_heads;
  const auto q = spread(p.q, q_w), k = spread(p.k, q_w), v = spread(p.v, v_w), g = spread(p.g, g_w),
             beta = spread(p.beta, b_w);
  int t = 0;
  for (int n : cuts) {
    PrefillInput in;
    in.shape = s;
    in.layer = 3;
    in.position = 100 + t;
    in.n_tokens = n;
    in.q_stride = in.k_stride = q_w + 5;
    in.v_stride = v_w + 5;
    in.g_stride = g_w + 5;
    in.beta_stride = b_w + 5;
    in.q = q.data() + t * in.q_stride;
    in.k = k.data() + t * in.k_stride;
    in.v = v.data() + t * in.v_stride;
    in.g = g.data() + t * in.g_stride;
    in.beta = beta.data() + t * in.beta_stride;
    in.S = got.S.data();
    in.out = got.out.data() + t * v_w;
    in.out_stride = v_w;
    prefill(in, threads, observer);
    t += n;
  }
  EXPECT_EQ(t, p.T);
  return got;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error / norm);
}

// Unit keys keep |I + A| and its inverse small; each value is a few sums of at most K + 64 terms,
// so its error stays within a small multiple of sqrt(K + 64) 2^-24, about 1e-6.
constexpr double kTolerance = 3e-6;

constexpr LayerShape kShapes[] = {
    {2, 4, 128, 128, Gate::kScalar}, {1, 2, 64, 128, Gate::kScalar},
    {1, 1, 128, 64, Gate::kScalar},  {3, 3, 96, 192, Gate::kScalar},
    {1, 2, 24, 20, Gate::kScalar},   {2, 2, 128, 128, Gate::kChannel},
    {1, 2, 64, 128, Gate::kChannel}, {1, 1, 96, 192, Gate::kChannel},
    {1, 2, 24, 20, Gate::kChannel},
};

std::string name(const LayerShape& s) {
  return std::to_string(s.K) + "x" + std::to_string(s.V) +
         (s.gate == Gate::kScalar ? " scalar" : " channel");
}

TEST(Prefill, EqualsTheRecurrenceAtEveryLength) {
  for (const LayerShape& shape : kShapes) {
    for (int T : {1, 2, 3, 15, 16, 17, 63, 64, 65, 130}) {
      const Problem p = make(shape, T, -0.05F, unsigned(T));
      const Answer want = recurrence(p);
      const Got got = chunked(p, {T}, 1);
      EXPECT_LT(relative_error(got.out, want.out), kTolerance) << name(shape) << " T " << T;
      EXPECT_LT(relative_error(got.S, want.S), kTolerance) << name(shape) << " T " << T;
    }
  }
}

TEST(Prefill, SplitAnywhereEqualsWhole) {
  for (Gate gate : {Gate::kScalar, Gate::kChannel}) {
    const Problem p = make({1, 2, 64, 96, gate}, 130, -0.1F, 5);
    const Answer want = recurrence(p);
    for (int cut : {1, 2, 3, 15, 17, 63, 64, 65, 128, 129}) {
      const Got got = chunked(p, {cut, 130 - cut}, 2);
      EXPECT_LT(relative_error(got.out, want.out), kTolerance) << cut;
      EXPECT_LT(relative_error(got.S, want.S), kTolerance) << cut;
    }
  }
}

TEST(Prefill, StrongDecayStaysFinite) {
  for (Gate gate : {Gate::kScalar, Gate::kChannel}) {
    Problem p = make({1, 2, 64, 64, gate}, 130, -0.1F, 9);
    std::fill(p.g.begin(), p.g.end(), -80.0F);
    const Answer want = recurrence(p);
    const Got got = chunked(p, {130}, 1);
    EXPECT_LT(relative_error(got.out, want.out), kTolerance);
    EXPECT_LT(relative_error(got.S, want.S), kTolerance);
  }
}

// A factor formed as e^{G_i} e^{-G_j} or from rounded running totals is wrong here: some channels
// or tokens decay by e^-80, others hardly.
TEST(Prefill, MixedDecayKeepsItsDigits) {
  for (Gate gate : {Gate::kScalar, Gate::kChannel}) {
    Problem p = make({1, 2, 64, 64, gate}, 130, -0.01F, 11);
    for (std::size_t i = 0; i < p.g.size(); ++i) {
      if (i % 7 == 0) p.g[i] = -80.0F;
    }
    const Answer want = recurrence(p);
    const Got got = chunked(p, {130}, 1);
    EXPECT_LT(relative_error(got.out, want.out), kTolerance);
    EXPECT_LT(relative_error(got.S, want.S), kTolerance);
  }
}

TEST(Prefill, NoDecayAndZeroInputs) {
  for (Gate gate : {Gate::kScalar, Gate::kChannel}) {
    Problem p = make({1, 2, 32, 48, gate}, 70, 0, 13);
    Got got = chunked(p, {70}, 1);
    EXPECT_LT(relative_error(got.out, recurrence(p).out), kTolerance);
    for (auto* x : {&p.q, &p.k, &p.v, &p.beta}) std::fill(x->begin(), x->end(), 0.0F);
    got = chunked(p, {70}, 1);
    EXPECT_EQ(got.S, p.S0);
    EXPECT_EQ(*std::max_element(got.out.begin(), got.out.end()), 0.0F);
  }
}

TEST(Prefill, ThreadsDoNotChangeABit) {
  for (Gate gate : {Gate::kScalar, Gate::kChannel}) {
    const Problem p = make({2, 6, 64, 96, gate}, 130, -0.1F, 17);
    const Got one = chunked(p, {130}, 1);
    for (int n : {2, 3}) {
      const Got many = chunked(p, {130}, n);
      EXPECT_EQ(one.out, many.out);
      EXPECT_EQ(one.S, many.S);
    }
  }
}

// S_tau = e^{G_tau} S_0 + sum_j e^{G_tau - G_j} k_j d_j^T at the end of a chunk gives S_after.
class Rebuild : public ChunkObserver {
 public:
  explicit Rebuild(const LayerShape& shape) : shape_(shape), next_(shape.n_value_heads, 100) {}
  void on_chunk(const ChunkView& c) override {
    const int K = shape_.K, V = shape_.V, width = shape_.gate_width();
    std::vector<double> S(c.S_before, c.S_before + K * V);
    for (int t = 0; t < c.n_tokens; ++t) {
      for (int i = 0; i < K; ++i) {
        const double e = std::exp(double{c.g[t * c.g_stride + (width == 1 ? 0 : i)]});
        for (int v = 0; v < V; ++v) {
          S[i * V + v] = e * S[i * V + v] + double{c.k[t * c.qk_stride + i]} * c.d[t * V + v];
        }
      }
    }
    const std::vector<float> after(c.S_after, c.S_after + K * V);
    const std::lock_guard lock(mutex_);
    EXPECT_LT(relative_error(after, S), kTolerance);
    EXPECT_EQ(c.layer, 3);
    EXPECT_EQ(c.position, next_[c.value_head]);
    next_[c.value_head] += c.n_tokens;
    last_q_ = std::vector<float>(c.q, c.q + K);
    last_beta_ = c.beta[0];
    ++n_calls;
  }
  int n_calls = 0;
  std::vector<float> last_q_;
  float last_beta_ = 0;

 private:
  LayerShape shape_;
  std::vector<std::int64_t> next_;
  std::mutex mutex_;
};

TEST(Prefill, ObserverSeesEveryChunkInOrder) {
  for (Gate gate : {Gate::kScalar, Gate::kChannel}) {
    const LayerShape shape{1, 2, 32, 48, gate};
    const Problem p = make(shape, 130, -0.1F, 19);
    Rebuild observer(shape);
    chunked(p, {130}, 2, &observer);
    EXPECT_EQ(observer.n_calls, 2 * 3);
    EXPECT_EQ(observer.last_q_, std::vector<float>(&p.q[128 * 32], &p.q[129 * 32]));
    EXPECT_TRUE(observer.last_beta_ == p.beta[128 * 2] ||
                observer.last_beta_ == p.beta[128 * 2 + 1]);
  }
}

}  // namespace
}  // namespace statepack
