#include "delta/prefill.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/exp.hpp"
#include "base/lane_sum.hpp"
#include "base/simd_clones.hpp"
#include "delta/small_gemm.hpp"

// docs/models.md 10. Row i is token i of the chunk, G_i = sum_{m<=i} g_m inclusive.
//   A_ij = beta_i (k_i . e^{G_i-G_j} k_j), j < i        P_ij = q_i . e^{G_i-G_j} k_j, j <= i
//   (I + A) D = diag(beta) (V - (e^G K) S)
//   O = (e^G Q) S + P D                                  S <- e^{G_C} S + (e^{G_C-G} K)^T D
// Every exponent is a sum of g over the tokens in between: never positive, and never a difference
// of running totals, which would lose its digits on heads that decay fast. The inner products of K
// K^T and Q K^T are formed for each value head anew: they are a tenth of the work, and value heads
// that share nothing run on different threads.

namespace statepack {
namespace {

constexpr int kC = kPrefillChunk;
constexpr int kSub = 16;  // rows of a sub-block, docs/models.md 10.2; divides kC

struct Scratch {
  Scratch(int K, int V)
      : q(kC * K),
        k(kC * K),
        q_in(kC * K),
        k_in(kC * K),
        k_out(kC * K),
        k_t(kC * K),
        decay(K),
        A(kC * kC),
        P(kC * kC),
        D(kC * V),
        O(kC * V),
        S(std::size_t(K) * V),
        S_next(std::size_t(K) * V),
        sum(std::max(K, kC)),
        row(std::max(K, kC)) {}
  std::vector<float> q, k;               // [C][K]
  std::vector<float> q_in, k_in, k_out;  // e^G q, e^G k, e^{G_C-G} k [C][K]
  std::vector<float> k_t;                // k, decayed or not, transposed [K][kC]
  std::vector<float> decay;              // e^{G_C} [K]
  std::vector<float> A, P;               // [C][kC]; A without its factor beta_i
  std::vector<float> D, O;               // [C][V]
  std::vector<float> S, S_next;          // [K][V]
  std::vector<float> sum, row;           // one exponent or one row at a time
};

// One head's gates: [C][gate_width] at a stride.
struct GateRows {
  const float* g;
  std::int64_t stride;
  const float* operator[](int i) const { return g + i * stride; }
};

int round_up(int n, int m) { return (n + m - 1) / m * m; }

void gather(const float* from, std::int64_t stride, int n, int width, float* to) {
  for (int i = 0; i < n; ++i) std::copy_n(from + i * stride, width, to + std::int64_t{i} * width);
}

// to[d][j] = from[j][d] for j in [0, n), zero up to the next multiple of kSub.
SP_CLONES void transpose(const float* from, int n, int K, float* to) {
  for (int j0 = 0; j0 < n; j0 += kSub) {
    const int rows = std::min(n - j0, kSub);
    for (int d = 0; d < K; ++d) {
      float* out = to + d * kC + j0;
      for (int j = 0; j < rows; ++j) out[j] = from[(j0 + j) * K + d];
      for (int j = rows; j < kSub; ++j) out[j] = 0;
    }
  }
}

SP_CLONES void add_to(float* sum, const float* x, int n) {
  for (int i = 0; i < n; ++i) sum[i] += x[i];
}

SP_CLONES void add_scalar(float* sum, float x, int n) {
  for (int i = 0; i < n; ++i) sum[i] += x;
}

SP_CLONES void scale(const float* x, float a, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = a * x[i];
}

// y = e^s x
SP_CLONES void scale_exp(const float* s, const float* x, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = exp_f32(s[i]) * x[i];
}

// y = e^s y; apart from scale_exp because compilers vectorise it only when they know the aliasing.
SP_CLONES void scale_exp_in_place(const float* s, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] *= exp_f32(s[i]);
}

SP_CLONES void exp_each(const float* s, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = exp_f32(s[i]);
}

SP_CLONES float dot(const float* a, const float* b, int n) { return lane_dot(a, b, n); }

// D = beta (V - X) for one token, X = (e^G K) S.
SP_CLONES void right_side(const float* v, float beta, int V, float* d) {
  for (int c = 0; c < V; ++c) d[c] = beta * (v[c] - d[c]);
}

// S_next = diag(decay) S
SP_CLONES void decay_rows(const float* S, const float* decay, int K, int V, float* S_next) {
  for (int r = 0; r < K; ++r) {
    const float* from = S + std::int64_t{r} * V;
    float* to = S_next + std::int64_t{r} * V;
    for (int c = 0; c < V; ++c) to[c] = decay[r] * from[c];
  }
}

// Rows [r0, r0 + rows) of x times columns [0, n) of k_t, n rounded up to a sub-block.
void products(const float* x, const Scratch& s, int K, int r0, int rows, int n, float* out) {
  small_gemm(rows, round_up(n, kSub), K, x, K, 1, s.k_t.data(), kC, out + r0 * kC, kC, false);
}

// Gated DeltaNet, 10.1: the decay of a pair of tokens is one factor of their inner product.
void scalar_gate(const GateRows& g, int n, int K, Scratch& s) {
  transpose(s.k.data(), n, K, s.k_t.data());
  for (int r0 = 0; r0 < n; r0 += kSub) {
    const int rows = std::min(kSub, n - r0);
    products(&s.k[r0 * K], s, K, r0, rows, r0 + rows, s.A.data());
    products(&s.q[r0 * K], s, K, r0, rows, r0 + rows, s.P.data());
  }
  float* sum = s.sum.data();  // sum[j] = G_i - G_j, growing with i
  std::fill_n(sum, kC, 0.0F);
  float prefix = 0;
  for (int i = 0; i < n; ++i) {
    add_scalar(sum, *g[i], i);
    scale_exp_in_place(sum, i, &s.A[i * kC]);
    scale_exp_in_place(sum, i, &s.P[i * kC]);
    prefix += *g[i];
    const float e = exp_f32(prefix);
    scale(&s.q[i * K], e, K, &s.q_in[i * K]);
    scale(&s.k[i * K], e, K, &s.k_in[i * K]);
  }
  for (int i = 0; i < n; ++i) scale(&s.k[i * K], exp_f32(sum[i]), K, &s.k_out[i * K]);
  std::fill_n(s.decay.data(), K, exp_f32(prefix));
}

// Kimi Delta Attention, 10.2: a factor for each channel, so it stays inside the inner product.
void channel_gate(const GateRows& g, int n, int K, Scratch& s) {
  float* sum = s.sum.data();
  float* row = s.row.data();
  for (int r0 = 0; r0 < n; r0 += kSub) {
    const int rows = std::min(kSub, n - r0);
    if (r0 > 0) {
      // Against earlier sub-blocks, through G at row r0: both factors decay. q_in, k_in and k_out
      // are free until the whole-chunk rows are formed below.
      float* q_hat = s.q_in.data();
      float* k_hat = s.k_in.data();
      float* k_check = s.k_out.data();
      std::fill_n(sum, K, 0.0F);
      for (int i = 0; i < rows; ++i) {  // e^{G_i - G_r0}
        if (i > 0) add_to(sum, g[r0 + i], K);
        exp_each(sum, K, row);
        for (int d = 0; d < K; ++d) {
          q_hat[i * K + d] = row[d] * s.q[(r0 + i) * K + d];
          k_hat[i * K + d] = row[d] * s.k[(r0 + i) * K + d];
        }
      }
      std::fill_n(sum, K, 0.0F);
      for (int j = r0 - 1; j >= 0; --j) {  // e^{G_r0 - G_j}
        add_to(sum, g[j + 1], K);
        scale_exp(sum, &s.k[j * K], K, k_check + j * K);
      }
      transpose(k_check, r0, K, s.k_t.data());
      products(k_hat, s, K, r0, rows, r0, s.A.data());
      products(q_hat, s, K, r0, rows, r0, s.P.data());
    }
    for (int j = r0; j < r0 + rows; ++j) {  // inside the sub-block, pair by pair
      const float* k_j = &s.k[j * K];
      s.P[j * kC + j] = dot(&s.q[j * K], k_j, K);
      std::fill_n(sum, K, 0.0F);
      for (int i = j + 1; i < r0 + rows; ++i) {
        add_to(sum, g[i], K);
        scale_exp(sum, k_j, K, row);
        s.A[i * kC + j] = dot(&s.k[i * K], row, K);
        s.P[i * kC + j] = dot(&s.q[i * K], row, K);
      }
    }
  }
  std::fill_n(sum, K, 0.0F);
  for (int i = 0; i < n; ++i) {
    add_to(sum, g[i], K);
    scale_exp(sum, &s.q[i * K], K, &s.q_in[i * K]);
    scale_exp(sum, &s.k[i * K], K, &s.k_in[i * K]);
  }
  exp_each(sum, K, s.decay.data());
  std::fill_n(sum, K, 0.0F);
  for (int i = n - 1; i >= 0; --i) {
    scale_exp(sum, &s.k[i * K], K, &s.k_out[i * K]);
    add_to(sum, g[i], K);
  }
}

void run_head(const PrefillInput& in, int head, ChunkObserver* observer) {
  const int K = in.shape.K, V = in.shape.V, width = in.shape.gate_width();
  const std::int64_t key_head = in.shape.key_head(head);
  float* S_out = in.S + std::int64_t{head} * K * V;
  Scratch s(K, V);
  std::copy_n(S_out, s.S.size(), s.S.data());

  for (int t = 0; t < in.n_tokens; t += kC) {
    const int n = std::min(kC, in.n_tokens - t);
    const GateRows g{in.g + t * in.g_stride + std::int64_t{head} * width, in.g_stride};
    const float* beta = in.beta + t * in.beta_stride + head;
    const float* v = in.v + t * in.v_stride + std::int64_t{head} * V;
    gather(in.q + t * in.q_stride + key_head * K, in.q_stride, n, K, s.q.data());
    gather(in.k + t * in.k_stride + key_head * K, in.k_stride, n, K, s.k.data());
    if (in.shape.gate == Gate::kScalar) {
      scalar_gate(g, n, K, s);
    } else {
      channel_gate(g, n, K, s);
    }

    // (I + A) D = diag(beta) (V - (e^G K) S), forwards by rows.
    small_gemm(n, V, K, s.k_in.data(), K, 1, s.S.data(), V, s.D.data(), V, false);
    for (int i = 0; i < n; ++i) {
      const float b = beta[i * in.beta_stride];
      float* d = &s.D[std::int64_t{i} * V];
      right_side(v + i * in.v_stride, b, V, d);
      scale(&s.A[i * kC], -b, i, s.row.data());
      small_gemm(1, V, i, s.row.data(), 0, 1, s.D.data(), V, d, V, true);
    }
    // O = (e^G Q) S + P D. Sub-blocks of rows leave out most of P's empty upper triangle; the rest
    // of it is set to zero.
    small_gemm(n, V, K, s.q_in.data(), K, 1, s.S.data(), V, s.O.data(), V, false);
    for (int r0 = 0; r0 < n; r0 += kSub) {
      const int rows = std::min(kSub, n - r0), end = r0 + rows;
      float* P = s.P.data();
      for (int i = r0; i < end; ++i) std::fill(P + i * kC + i + 1, P + i * kC + end, 0.0F);
      small_gemm(rows, V, end, &s.P[r0 * kC], kC, 1, s.D.data(), V, &s.O[std::int64_t{r0} * V], V,
                 true);
    }
    for (int i = 0; i < n; ++i) {
      std::copy_n(&s.O[std::int64_t{i} * V], V,
                  in.out + (t + i) * in.out_stride + std::int64_t{head} * V);
    }
    // S <- e^{G_C} S + (e^{G_C-G} K)^T D
    decay_rows(s.S.data(), s.decay.data(), K, V, s.S_next.data());
    small_gemm(K, V, n, s.k_out.data(), 1, K, s.D.data(), V, s.S_next.data(), V, true);

    if (observer != nullptr) {
      ChunkView view;
      view.layer = in.layer;
      view.value_head = head;
      view.n_tokens = n;
      view.position = in.position + t;
      view.q = s.q.data();
      view.k = s.k.data();
      view.qk_stride = K;
      view.g = g.g;
      view.g_stride = in.g_stride;
      view.beta = beta;
      view.beta_stride = in.beta_stride;
      view.d = s.D.data();
      view.S_before = s.S.data();
      view.S_after = s.S_next.data();
      observer->on_chunk(view);
    }
    std::swap(s.S, s.S_next);
  }
  std::copy_n(s.S.data(), s.S.size(), S_out);
}

}  // namespace

void prefill(const PrefillInput& input, ThreadPool& threads, ChunkObserver* observer) {
  threads.parallel_for(input.shape.n_value_heads, [&](std::int64_t head, int) {
    run_head(input, static_cast<int>(head), observer);
  });
}

}  // namespace statepack
