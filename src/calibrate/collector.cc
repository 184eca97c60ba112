#include "calibrate/collector.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/check.hpp"

namespace statepack {
namespace {

void add_statistics(const ChunkView& chunk, const LayerShape& shape, ReadStatistics& sums) {
  const int K = shape.K, gate_width = shape.gate_width();
  double* omega = sums.omega.data() + std::int64_t{chunk.value_head} * K;
  double* log_decay = sums.log_decay.data() + std::int64_t{chunk.value_head} * gate_width;
  for (int t = 0; t < chunk.n_tokens; ++t) {
    const float* q = chunk.q + t * chunk.qk_stride;
    const float* k = chunk.k + t * chunk.qk_stride;
    const float* g = chunk.g + t * chunk.g_stride;
    double kq = 0;
    for (int i = 0; i < K; ++i) kq += double{k[i]} * q[i];
    // g_i = d_i (q_i - beta k_i (k . q));  omega_i += g_i^2
    const double beta_kq = chunk.beta[t * chunk.beta_stride] * kq;
    double decay = gate_width == 1 ? std::exp(double{g[0]}) : 0;
    for (int i = 0; i < K; ++i) {
      if (gate_width != 1) decay = std::exp(double{g[i]});
      const double read = decay * (q[i] - k[i] * beta_kq);
      omega[i] += read * read;
    }
    for (int i = 0; i < gate_width; ++i) log_decay[i] += g[i];
  }
  sums.n_tokens[static_cast<std::size_t>(chunk.value_head)] += chunk.n_tokens;
}

}  // namespace

void state_inside_chunk(const ChunkView& chunk, const LayerShape& shape, int tau, float* X) {
  const std::int64_t K = shape.K, V = shape.V;
  SP_CHECK(tau >= 0 && tau < chunk.n_tokens, "a token of the chunk");
  if (tau == chunk.n_tokens - 1) {
    std::copy(chunk.S_after, chunk.S_after + K * V, X);
    return;
  }
  // weight[j][i] = exp(g_{j+1,i} + ... + g_{tau,i}) k_{j,i}, from the last record backwards
  const bool scalar = shape.gate == Gate::kScalar;
  std::vector<float> weight(static_cast<std::size_t>((tau + 1) * K));
  std::vector<double> later(static_cast<std::size_t>(K), 0.0);
  std::vector<float> factor(static_cast<std::size_t>(K), 1.0f);
  for (std::int64_t j = tau; j >= 0; --j) {
    const float* k = chunk.k + j * chunk.qk_stride;
    const float* g = chunk.g + j * chunk.g_stride;
    for (std::int64_t i = 0; i < K; ++i) {
      const auto at = static_cast<std::size_t>(i);
      weight[static_cast<std::size_t>(j * K + i)] = factor[at] * k[i];
      later[at] += g[scalar ? 0 : i];
      factor[at] = scalar && i > 0 ? factor[0] : static_cast<float>(std::exp(later[at]));
    }
  }
  for (std::int64_t i = 0; i < K; ++i) {
    float* x = X + i * V;
    const float* before = chunk.S_before + i * V;
    const float decay = factor[static_cast<std::size_t>(i)];
    for (std::int64_t v = 0; v < V; ++v) x[v] = decay * before[v];
    for (std::int64_t j = 0; j <= tau; ++j) {
      const float w = weight[static_cast<std::size_t>(j * K + i)];
      const float* d = chunk.d + j * V;
      for (std::int64_t v = 0; v < V; ++v) x[v] += w * d[v];
    }
  }
}

Collector::Collector(const std::vector<LayerShape>& shapes, int n_domains,
                     std::vector<std::vector<std::int64_t>> updates, StateVisitor visitor,
                     bool with_statistics)
    : visitor_(std::move(visitor)), with_statistics_(with_statistics) {
  SP_CHECK(updates.size() == shapes.size(), "a list of updates for each layer");
  for (std::size_t l = 0; l < shapes.size(); ++l) {
    SP_CHECK(std::is_sorted(updates[l].begin(), updates[l].end()), "updates ascend");
    const LayerShape& shape = shapes[l];
    const auto heads = static_cast<std::size_t>(shape.n_value_heads);
    ReadStatistics zero;
    zero.omega.assign(heads * static_cast<std::size_t>(shape.K), 0.0);
    zero.log_decay.assign(heads * static_cast<std::size_t>(shape.gate_width()), 0.0);
    zero.n_tokens.assign(heads, 0);
    layers_.push_back({shape, std::move(updates[l]),
                       std::vector<ReadStatistics>(static_cast<std::size_t>(n_domains), zero)});
  }
}

void Collector::begin_segment(int domain, std::int64_t first_update) {
  domain_ = domain;
  first_update_ = first_update;
}

void Collector::on_chunk(const ChunkView& chunk) {
  Layer& layer = layers_[static_cast<std::size_t>(chunk.layer)];
  if (with_statistics_) {
    add_statistics(chunk, layer.shape, layer.domains[static_cast<std::size_t>(domain_)]);
  }
  const std::int64_t first = first_update_ + chunk.position;
  auto next = std::lower_bound(layer.updates.begin(), layer.updates.end(), first);
  if (next == layer.updates.end() || *next >= first + chunk.n_tokens) return;
  std::vector<float> X(static_cast<std::size_t>(layer.shape.K) *
                       static_cast<std::size_t>(layer.shape.V));
  for (; next != layer.updates.end() && *next < first + chunk.n_tokens; ++next) {
    state_inside_chunk(chunk, layer.shape, static_cast<int>(*next - first), X.data());
    if (std::all_of(X.begin(), X.end(), [](float x) { return std::isfinite(x); })) {
      visitor_(chunk.layer, chunk.value_head, next - layer.updates.begin(), X.data());
    } else {
      not_finite_ = true;
    }
  }
}

Status Collector::end_segment() {
  if (!not_finite_) return {};
  return {Code::kNotFinite,
          "a recurrent state became NaN or Inf while calibrating; check the checkpoint (the fp32 "
          "scheme must run the same text)"};
}

const ReadStatistics& Collector::statistics(int layer, int domain) const {
  return layers_[static_cast<std::size_t>(layer)].domains[static_cast<std::size_t>(domain)];
}

}  // namespace statepack
