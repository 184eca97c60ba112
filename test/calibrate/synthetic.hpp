// A made-up recurrent model for calibration tests: token ids choose q, k, v, gate and beta of every
// layer and head; the delta rule runs token by token in double; chunks are cut from that.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "base/thread_pool.hpp"
#include "delta/prefill.hpp"

namespace statepack::testing {

struct SyntheticModel {
  std::vector<LayerShape> shapes;
  std::vector<int> chunks = {kPrefillChunk};  ///< chunk sizes, cycled through

  /// Inputs of one segment of one layer; q, k are padded so that strides matter.
  struct Inputs {
    std::vector<float> q, k, v, g, beta;
    std::int64_t qk_stride = 0, g_stride = 0, beta_stride = 0;
  };

  Inputs inputs(int layer, std::span<const std::int32_t> tokens) const {
    const LayerShape& shape = shapes[static_cast<std::size_t>(layer)];
    const int K = shape.K, V = shape.V, H = shape.n_key_heads, HV = shape.n_value_heads;
    Inputs in;
    in.qk_stride = H * K + 3;
    in.g_stride = HV * shape.gate_width() + 1;
    in.beta_stride = HV + 2;
    for (std::int32_t token : tokens) {
      std::mt19937_64 random(static_cast<std::uint64_t>(token) * 1000003 + unsigned(layer));
      const auto unit = [&] { return static_cast<float>(random() >> 40) * 0x1p-24f - 0.5f; };
      for (auto* x : {&in.q, &in.k}) {
        for (int h = 0; h < H; ++h) {
          std::vector<float> row(static_cast<std::size_t>(K));
          float sum = 1e-6f;
          for (int i = 0; i < K; ++i) {
            row[i] = unit() * std::exp2(float(i % 5 - 2));
            sum += row[i] * row[i];
          }
          const float scale = (x == &in.q ? 1 / std::sqrt(float(K)) : 1.0f) / std::sqrt(sum);
          for (float y : row) x->push_back(y * scale);
        }
        x->resize(x->size() + 3, NAN);
      }
      for (int i = 0; i < HV * V; ++i) {  // tokens from 1000 on speak to head 0, others to the rest
        const float loud = (token >= 1000) == (i / V == 0) ? 1.0f : 0x1p-6f;
        in.v.push_back(loud * unit() * std::exp2(float(i % 7 - 3)));
      }
      for (int h = 0; h < HV; ++h) {
        for (int i = 0; i < shape.gate_width(); ++i) {
          in.g.push_back((unit() - 0.5f) * std::exp2(float(-2 - 2 * h - i % 4)));
        }
      }
      in.g.push_back(NAN);
      for (int h = 0; h < HV; ++h) in.beta.push_back(0.5f + unit());
      in.beta.resize(in.beta.size() + 2, NAN);
    }
    return in;
  }

  /// Literal recurrence of one head: S [K][V] after every token, u [V] of every token.
  struct Trace {
    std::vector<std::vector<double>> S;  ///< [T + 1], S[0] is the zero state
    std::vector<double> u;               ///< [T][V]
  };

  Trace trace(int layer, int head, const Inputs& in, std::int64_t n_tokens) const {
    const LayerShape& shape = shapes[static_cast<std::size_t>(layer)];
    const int K = shape.K, V = shape.V, width = shape.gate_width();
    Trace trace;
    trace.S.emplace_back(static_cast<std::size_t>(K) * V, 0.0);
    for (std::int64_t t = 0; t < n_tokens; ++t) {
      const float* k = in.k.data() + t * in.qk_stride + shape.key_head(head) * K;
      const float* v = in.v.data() + (t * shape.n_value_heads + head) * V;
      const float* g = in.g.data() + t * in.g_stride + head * width;
      const double beta = in.beta[t * in.beta_stride + head];
      std::vector<double> S = trace.S.back();
      for (int i = 0; i < K; ++i) {
        for (int j = 0; j < V; ++j) S[i * V + j] *= std::exp(double{g[width == 1 ? 0 : i]});
      }
      for (int j = 0; j < V; ++j) {
        double read = 0;
        for (int i = 0; i < K; ++i) read += S[i * V + j] * k[i];
        const double u = beta * (v[j] - read);
        trace.u.push_back(u);
        for (int i = 0; i < K; ++i) S[i * V + j] += k[i] * u;
      }
      trace.S.push_back(std::move(S));
    }
    return trace;
  }

  /// Shows every chunk of every layer and head to `observer`, heads in parallel, and then the
  /// layer's readouts: gains of 1 to 2 by column, output columns of squared length 2, a residual
  /// stream of ones, 8 wide.
  void prefill(std::span<const std::int32_t> tokens, ChunkObserver& observer,
               ThreadPool& threads) const {
    const auto n_tokens = static_cast<std::int64_t>(tokens.size());
    for (int l = 0; l < static_cast<int>(shapes.size()); ++l) {
      const LayerShape& shape = shapes[static_cast<std::size_t>(l)];
      const Inputs in = inputs(l, tokens);
      const std::int64_t n_out = std::int64_t{shape.n_value_heads} * shape.V;
      std::vector<float> o(static_cast<std::size_t>(n_tokens * n_out));
      threads.parallel_for(shape.n_value_heads, [&](std::int64_t h, int) {
        const int head = static_cast<int>(h);
        const Trace run = trace(l, head, in, n_tokens);
        const std::vector<float> d(run.u.begin(), run.u.end());
        for (std::int64_t t = 0; t < n_tokens; ++t) {
          const float* q = in.q.data() + t * in.qk_stride + shape.key_head(head) * shape.K;
          for (int j = 0; j < shape.V; ++j) {
            double sum = 0;
            for (int i = 0; i < shape.K; ++i) sum += q[i] * run.S[t + 1][i * shape.V + j];
            o[t * n_out + head * shape.V + j] = static_cast<float>(sum);
          }
        }
        std::size_t c = 0;
        for (std::int64_t t = 0; t < n_tokens; ++c) {
          const std::int64_t n = std::min<std::int64_t>(chunks[c % chunks.size()], n_tokens - t);
          const std::vector<float> before(run.S[t].begin(), run.S[t].end());
          const std::vector<float> after(run.S[t + n].begin(), run.S[t + n].end());
          ChunkView view;
          view.layer = l;
          view.value_head = head;
          view.n_tokens = static_cast<int>(n);
          view.position = t;
          view.q = in.q.data() + t * in.qk_stride + shape.key_head(head) * shape.K;
          view.k = in.k.data() + t * in.qk_stride + shape.key_head(head) * shape.K;
          view.qk_stride = in.qk_stride;
          view.g = in.g.data() + t * in.g_stride + head * shape.gate_width();
          view.g_stride = in.g_stride;
          view.beta = in.beta.data() + t * in.beta_stride + head;
          view.beta_stride = in.beta_stride;
          view.d = d.data() + t * shape.V;
          view.S_before = before.data();
          view.S_after = after.data();
          observer.on_chunk(view);
          t += n;
        }
      });
      std::vector<float> gain(o.size()), power(static_cast<std::size_t>(n_out), 2.0f);
      for (std::size_t e = 0; e < gain.size(); ++e)
        gain[e] = 1 + float(e % shape.V) / float(shape.V);
      const std::vector<float> residual(static_cast<std::size_t>(8 * n_tokens), 1.0f);
      ReadoutView view;
      view.layer = l;
      view.n_tokens = static_cast<int>(n_tokens);
      view.o = o.data();
      view.gain = gain.data();
      view.eps = 1e-6f;
      view.out_power = power.data();
      view.residual = residual.data();
      view.hidden = 8;
      observer.on_readout(view);
    }
  }
};

/// Ids first..first+999.
inline std::vector<std::int32_t> random_tokens(std::size_t n, std::uint64_t seed, int first = 0) {
  std::mt19937_64 random(seed);
  std::vector<std::int32_t> tokens(n);
  for (auto& token : tokens) token = first + static_cast<std::int32_t>(random() % 1000);
  return tokens;
}

}  // namespace statepack::testing
