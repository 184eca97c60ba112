#include "calibrate/readout.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.hpp"
#include "base/simd_clones.hpp"

namespace statepack {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// row_i += sum_j c_j x_ji, x [n][width] at `stride`. Blocks of columns stay in registers.
SP_CLONES void add_rows(const double* __restrict c, std::int64_t c_stride,
                        const double* __restrict x, int n, int width, double* __restrict row) {
  constexpr int kBlock = 32;
  int i = 0;
  for (; i + kBlock <= width; i += kBlock) {
    double sum[kBlock];
    for (int l = 0; l < kBlock; ++l) sum[l] = row[i + l];
    for (int j = 0; j < n; ++j) {
      const double factor = c[j * c_stride];
      const double* const from = x + std::int64_t{j} * width + i;
      for (int l = 0; l < kBlock; ++l) sum[l] += factor * from[l];
    }
    for (int l = 0; l < kBlock; ++l) row[i + l] = sum[l];
  }
  for (; i < width; ++i) {
    for (int j = 0; j < n; ++j) row[i] += c[j * c_stride] * x[std::int64_t{j} * width + i];
  }
}

SP_CLONES void scale(double c, int n, double* __restrict x) {
  for (int i = 0; i < n; ++i) x[i] *= c;
}

double dot(const double* x, const double* y, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

/// One chunk of the backward pass. All arrays are [C][K] unless said.
class Chunk {
 public:
  explicit Chunk(int K)
      : K_(K), k_(size()), y_(size()), g_(size()), T_(size()), Q_(size()), R_(at(kC * kC)) {}

  /// W becomes W before tokens first to first + n - 1.
  void go_back(const HeadTokens& tokens, std::int64_t first, int n, double* W) {
    for (int j = 0; j < n; ++j) {
      std::copy_n(tokens.k + (first + j) * tokens.qk_stride, K_, row(k_, j));
      decay_[j] = std::exp(double{tokens.g[(first + j) * tokens.g_stride]});
      beta_[j] = tokens.beta[(first + j) * tokens.beta_stride];
    }
    // Rows of G: q_r taken back through A_r, A_(r-1), ..., the chunk's first.
    for (int r = 0; r < n; ++r) {
      double* const g = row(g_, r);
      std::copy_n(tokens.q + (first + r) * tokens.qk_stride, K_, g);
      for (int j = r; j >= 0; --j) {
        const double along = -beta_[j] * dot(row(k_, j), g, K_);
        add_rows(&along, 0, row(k_, j), 1, K_, g);
        scale(decay_[j], K_, g);
      }
    }
    // y_j = beta_j (k_j - sum_(l<j) (k_j . k_l) y_l):  A_n ... A_1 = gamma (I - sum_j k_j y_j^T)
    double gamma = 1;
    for (int j = 0; j < n; ++j) {
      double* const y = row(y_, j);
      std::copy_n(row(k_, j), K_, y);
      for (int l = 0; l < j; ++l) {
        const double along = -dot(row(k_, j), row(k_, l), K_);
        add_rows(&along, 0, row(y_, l), 1, K_, y);
      }
      scale(beta_[j], K_, y);
      gamma *= decay_[j];
    }
    // W' = W - Y^T Q - Q^T Y with T = K W, Q = T - R Y / 2, R = T K^T
    std::fill_n(T_.begin(), std::int64_t{n} * K_, 0.0);
    for (int j = 0; j < n; ++j) add_rows(row(k_, j), 1, W, K_, K_, row(T_, j));
    for (int j = 0; j < n; ++j) {
      for (int l = 0; l < n; ++l) R_[at(j * kC + l)] = -0.5 * dot(row(T_, j), row(k_, l), K_);
    }
    std::copy_n(T_.begin(), std::int64_t{n} * K_, Q_.begin());
    for (int j = 0; j < n; ++j) add_rows(&R_[at(j * kC)], 1, y_.data(), n, K_, row(Q_, j));
    scale(-1, n * K_, Q_.data());
    for (int i = 0; i < K_; ++i) {
      double* const w = W + std::int64_t{i} * K_;
      add_rows(y_.data() + i, K_, Q_.data(), n, K_, w);
      add_rows(Q_.data() + i, K_, y_.data(), n, K_, w);
      scale(gamma * gamma, K_, w);
      add_rows(g_.data() + i, K_, g_.data(), n, K_, w);
    }
  }

 private:
  static constexpr int kC = kGramianInterval;
  std::size_t size() const { return at(std::int64_t{kC} * K_); }
  double* row(std::vector<double>& of, int j) { return of.data() + std::int64_t{j} * K_; }

  int K_;
  std::vector<double> k_, y_, g_, T_, Q_;
  std::vector<double> R_;  // [C][C]
  double decay_[kC] = {}, beta_[kC] = {};
};

// W becomes W before one token with channel gates: D (N + k a^T + a k^T) D, N = W + q q^T and
// a = b^2 (k^T N k) k / 2 - b N k. `N`, `a` and `D` [K] are scratch.
SP_CLONES void go_back_one(const float* __restrict q, const float* __restrict k,
                           const float* __restrict g, double beta, int K, double* __restrict W,
                           double* __restrict Nk, double* __restrict a, double* __restrict D) {
  double qk = 0;
  for (int i = 0; i < K; ++i) qk += double{q[i]} * k[i];
  for (int i = 0; i < K; ++i) Nk[i] = q[i] * qk;
  for (int j = 0; j < K; ++j) {  // W is symmetric
    const double* const w = W + std::int64_t{j} * K;
    const double factor = k[j];
    for (int i = 0; i < K; ++i) Nk[i] += factor * w[i];
  }
  double kNk = 0;
  for (int i = 0; i < K; ++i) kNk += k[i] * Nk[i];
  for (int i = 0; i < K; ++i) {
    a[i] = 0.5 * beta * beta * kNk * k[i] - beta * Nk[i];
    D[i] = std::exp(double{g[i]});
  }
  for (int i = 0; i < K; ++i) {
    double* const w = W + std::int64_t{i} * K;
    const double qi = q[i], ki = k[i], ai = a[i], Di = D[i];
    for (int j = 0; j < K; ++j) {
      w[j] = Di * D[j] * (w[j] + qi * double{q[j]} + ki * a[j] + ai * double{k[j]});
    }
  }
}

}  // namespace

std::int64_t add_gramians(const HeadTokens& tokens, std::int64_t last_token, double* sum) {
  const int K = tokens.K;
  std::vector<double> W(at(std::int64_t{K} * K), 0.0);
  Chunk chunk(K);
  std::vector<double> scratch(at(std::int64_t{3} * K));
  std::int64_t n_samples = 0;
  // `t` tokens are not taken back yet: W is W_t.
  for (std::int64_t t = tokens.n_tokens; t > 0;) {
    if (t % kGramianInterval == 0 && t <= last_token) {
      for (std::size_t e = 0; e < W.size(); ++e) sum[e] += W[e];
      ++n_samples;
    }
    const std::int64_t first = (t - 1) / kGramianInterval * kGramianInterval;
    if (tokens.gate == Gate::kChannel) {
      for (; t > first; --t) {
        go_back_one(tokens.q + (t - 1) * tokens.qk_stride, tokens.k + (t - 1) * tokens.qk_stride,
                    tokens.g + (t - 1) * tokens.g_stride,
                    double{tokens.beta[(t - 1) * tokens.beta_stride]}, K, W.data(), scratch.data(),
                    scratch.data() + K, scratch.data() + std::int64_t{2} * K);
      }
      continue;
    }
    chunk.go_back(tokens, first, static_cast<int>(t - first), W.data());
    t = first;
  }
  return n_samples;
}

ReadoutCollector::ReadoutCollector(const std::vector<LayerShape>& shapes, int n_domains,
                                   std::int64_t segment_tokens, ThreadPool& threads)
    : segment_tokens_(segment_tokens), threads_(threads) {
  for (const LayerShape& shape : shapes) {
    const std::int64_t H = shape.n_key_heads, HV = shape.n_value_heads, K = shape.K;
    Layer& layer = layers_.emplace_back();
    layer.shape = shape;
    layer.q.resize(at(segment_tokens * H * K));
    layer.k.resize(at(segment_tokens * H * K));
    layer.g.resize(at(segment_tokens * HV * shape.gate_width()));
    layer.beta.resize(at(segment_tokens * HV));
    layer.n_tokens.assign(at(HV), 0);
    layer.log_decay.assign(at(HV), 0.0);
    Domain zero;
    zero.W.assign(at(HV * K * K), 0.0);
    zero.readout.assign(at(HV * shape.V), 0.0);
    layer.domains.assign(at(n_domains), zero);
  }
}

void ReadoutCollector::begin_segment(int domain, std::int64_t /*first_update*/) {
  domain_ = domain;
  for (Layer& layer : layers_) std::fill(layer.n_tokens.begin(), layer.n_tokens.end(), 0);
}

void ReadoutCollector::on_chunk(const ChunkView& chunk) {
  Layer& layer = layers_[at(chunk.layer)];
  const LayerShape& shape = layer.shape;
  const std::int64_t H = shape.n_key_heads, HV = shape.n_value_heads, K = shape.K;
  const int head = chunk.value_head, key_head = shape.key_head(head);
  SP_CHECK(chunk.position + chunk.n_tokens <= segment_tokens_, "no more tokens than a segment");
  for (std::int64_t t = 0; t < chunk.n_tokens; ++t) {
    const std::int64_t token = chunk.position + t;
    if (head % shape.group() == 0) {  // keys once, from their first value head
      std::copy_n(chunk.q + t * chunk.qk_stride, K, &layer.q[at((token * H + key_head) * K)]);
      std::copy_n(chunk.k + t * chunk.qk_stride, K, &layer.k[at((token * H + key_head) * K)]);
    }
    std::copy_n(chunk.g + t * chunk.g_stride, shape.gate_width(),
                &layer.g[at((token * HV + head) * shape.gate_width())]);
    layer.beta[at(token * HV + head)] = chunk.beta[t * chunk.beta_stride];
  }
  layer.n_tokens[at(head)] += chunk.n_tokens;
}

void ReadoutCollector::on_readout(const ReadoutView& view) {
  Layer& layer = layers_[at(view.layer)];
  Domain& domain = layer.domains[at(domain_)];
  const std::int64_t HV = layer.shape.n_value_heads, V = layer.shape.V;
  threads_.parallel_for(HV, [&](std::int64_t h, int) {
    for (std::int64_t t = 0; t < view.n_tokens; ++t) {
      const float* const o = view.o + (t * HV + h) * V;
      const float* const gain = view.gain + (t * HV + h) * V;
      double power = 0;
      for (std::int64_t j = 0; j < V; ++j) power += double{o[j]} * o[j];
      const double inverse = 1 / (power / static_cast<double>(V) + view.eps);
      for (std::int64_t j = 0; j < V; ++j) {
        domain.readout[at(h * V + j)] +=
            double{gain[j]} * gain[j] * inverse * view.out_power[h * V + j];
      }
    }
  });
  for (std::int64_t i = 0; i < view.n_tokens * view.hidden; ++i) {
    domain.residual += double{view.residual[i]} * view.residual[i];
  }
  domain.n_residuals += view.n_tokens * view.hidden;
  domain.n_readouts += view.n_tokens;
  domain.hidden = view.hidden;
}

Status ReadoutCollector::end_segment() {
  std::vector<std::pair<int, int>> heads;
  for (int l = 0; l < static_cast<int>(layers_.size()); ++l) {
    for (int h = 0; h < layers_[at(l)].shape.n_value_heads; ++h) heads.emplace_back(l, h);
  }
  const std::int64_t last = segment_tokens_ * 3 / 4;
  threads_.parallel_for(static_cast<std::int64_t>(heads.size()), [&](std::int64_t i, int) {
    const auto [l, h] = heads[at(i)];
    Layer& layer = layers_[at(l)];
    const LayerShape& shape = layer.shape;
    SP_CHECK(layer.n_tokens[at(h)] == segment_tokens_, "prefill must show every token of a head");
    const std::int64_t K = shape.K, key_head = shape.key_head(h);
    HeadTokens tokens;
    tokens.K = shape.K;
    tokens.n_tokens = segment_tokens_;
    tokens.q = layer.q.data() + key_head * K;
    tokens.k = layer.k.data() + key_head * K;
    tokens.qk_stride = shape.n_key_heads * K;
    tokens.g = layer.g.data() + std::int64_t{h} * shape.gate_width();
    tokens.g_stride = std::int64_t{shape.n_value_heads} * shape.gate_width();
    tokens.gate = shape.gate;
    tokens.beta = layer.beta.data() + h;
    tokens.beta_stride = shape.n_value_heads;
    Domain& domain = layer.domains[at(domain_)];
    const std::int64_t n = add_gramians(tokens, last, domain.W.data() + h * K * K);
    if (h == 0) domain.n_gramians += n;
    for (std::int64_t t = 0; t < segment_tokens_; ++t) {
      double sum = 0;
      for (int c = 0; c < shape.gate_width(); ++c) sum += tokens.g[t * tokens.g_stride + c];
      layer.log_decay[at(h)] += sum / shape.gate_width();
    }
  });
  for (const auto& [l, h] : heads) {
    Layer& layer = layers_[at(l)];
    if (h == 0) layer.n_decays += segment_tokens_;
    const Domain& domain = layer.domains[at(domain_)];
    const std::int64_t n = std::int64_t{layer.shape.K} * layer.shape.K;
    for (std::int64_t e = h * n; e < (h + 1) * n; ++e) {
      if (std::isfinite(domain.W[at(e)])) continue;
      return {Code::kNotFinite, "recurrent layer " + std::to_string(l) + ", head " +
                                    std::to_string(h) +
                                    ": what later queries read is not finite; check the "
                                    "checkpoint: q, k and gates must be finite, log decays <= 0"};
    }
  }
  return {};
}

std::vector<double> ReadoutCollector::gramian(int layer, int head, int domain) const {
  const Layer& from = layers_[at(layer)];
  const Domain& sums = from.domains[at(domain)];
  SP_CHECK(sums.n_gramians > 0, "a segment of 22 tokens or more in every domain");
  const std::int64_t n = std::int64_t{from.shape.K} * from.shape.K;
  std::vector<double> W(sums.W.begin() + head * n, sums.W.begin() + (head + 1) * n);
  for (double& w : W) w /= static_cast<double>(sums.n_gramians);
  return W;
}

std::vector<double> ReadoutCollector::sensitivity(int layer, int domain) const {
  const Domain& sums = layers_[at(layer)].domains[at(domain)];
  SP_CHECK(sums.n_readouts > 0, "prefill must show the readouts");
  // s = E[(gain / rms)^2] |W_out|^2 / (hidden E[h^2])
  const double power = sums.residual / static_cast<double>(sums.n_residuals);
  const double factor = 1 / (static_cast<double>(sums.n_readouts) *
                             static_cast<double>(sums.hidden) * std::max(power, 1e-30));
  std::vector<double> s = sums.readout;
  for (double& x : s) x *= factor;
  return s;
}

double ReadoutCollector::log_decay(int layer, int head) const {
  const Layer& from = layers_[at(layer)];
  return from.log_decay[at(head)] / static_cast<double>(from.n_decays);
}

}  // namespace statepack
