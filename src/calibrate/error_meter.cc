#include "calibrate/error_meter.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.hpp"

namespace statepack {
namespace {

template <class T>
std::vector<T> slice(const std::vector<T>& all, int head, int n_heads) {
  const std::size_t width = all.size() / static_cast<std::size_t>(n_heads);
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(width) * head;
  return {begin, begin + static_cast<std::ptrdiff_t>(width)};
}

LayerPlan head_plan(const LayerPlan& plan, int head, int n_heads) {
  LayerPlan one;
  one.bits = slice(plan.bits, head, n_heads);
  one.row_weight = slice(plan.row_weight, head, n_heads);
  one.high = slice(plan.high, head, n_heads);
  return one;
}

void add_to(std::vector<double>& sums, const std::vector<double>& other) {
  SP_CHECK(sums.size() == other.size(), "sums of the same rows");
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += other[i];
}

}  // namespace

void ErrorMeter::Sums::add(const Sums& other) {
  n_states += other.n_states;
  for (std::size_t v = 0; v < row_error.size(); ++v) add_to(row_error[v], other.row_error[v]);
  add_to(row_power, other.row_power);
  add_to(column_power, other.column_power);
}

Result<ErrorMeter> ErrorMeter::make(const CodecConfig& config,
                                    const std::vector<LayerShape>& shapes,
                                    const std::vector<std::vector<LayerPlan>>& variants,
                                    int n_domains) {
  ErrorMeter meter;
  meter.shapes_ = shapes;
  for (std::size_t l = 0; l < shapes.size(); ++l) {
    const LayerShape& shape = shapes[l];
    const LayerShape one_head{1, 1, shape.K, shape.V, shape.gate};
    Sums zero;
    zero.row_error.assign(variants.size(),
                          std::vector<double>(static_cast<std::size_t>(shape.K), 0.0));
    zero.row_power.assign(static_cast<std::size_t>(shape.K), 0.0);
    zero.column_power.assign(static_cast<std::size_t>(shape.V), 0.0);
    std::vector<Head>& heads = meter.heads_.emplace_back();
    for (int h = 0; h < shape.n_value_heads; ++h) {
      Head& head = heads.emplace_back();
      head.domains.assign(static_cast<std::size_t>(n_domains), zero);
      for (const std::vector<LayerPlan>& variant : variants) {
        const LayerPlan plan = head_plan(variant[l], h, shape.n_value_heads);
        auto codec = config.info->make(config, one_head, &plan);
        if (!codec.ok()) {
          return Status(codec.status().code(), "recurrent layer " + std::to_string(l) + ", head " +
                                                   std::to_string(h) + ": " +
                                                   codec.status().message());
        }
        head.codecs.push_back(std::move(*codec));
      }
    }
  }
  return meter;
}

void ErrorMeter::add(int layer, int head, int domain, const float* X) {
  const LayerShape& shape = shapes_[static_cast<std::size_t>(layer)];
  const auto K = static_cast<std::size_t>(shape.K), V = static_cast<std::size_t>(shape.V);
  Head& h = heads_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(head)];
  Sums& sums = h.domains[static_cast<std::size_t>(domain)];

  std::vector<float> restored(K * V);
  for (std::size_t v = 0; v < h.codecs.size(); ++v) {
    const LayerCodec& codec = *h.codecs[v];
    std::vector<std::uint8_t> page(static_cast<std::size_t>(codec.page_bytes()));
    std::vector<std::byte> scratch(codec.scratch_bytes());
    codec.encode(0, X, page.data(), {}, {scratch});
    codec.decode(0, page.data(), restored.data(), {scratch});
    for (std::size_t i = 0; i < K; ++i) {
      double error = 0;
      for (std::size_t j = 0; j < V; ++j) {
        const double e = double{restored[i * V + j]} - X[i * V + j];
        error += e * e;
      }
      sums.row_error[v][i] += error;
    }
  }
  for (std::size_t i = 0; i < K; ++i) {
    for (std::size_t j = 0; j < V; ++j) {
      const double power = double{X[i * V + j]} * X[i * V + j];
      sums.row_power[i] += power;
      sums.column_power[j] += power;
    }
  }
  ++sums.n_states;
}

const ErrorMeter::Sums& ErrorMeter::sums(int layer, int head, int domain) const {
  return heads_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(head)]
      .domains[static_cast<std::size_t>(domain)];
}

}  // namespace statepack
