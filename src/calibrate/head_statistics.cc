#include "calibrate/head_statistics.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "calibrate/allocate.hpp"
#include "calibrate/collector.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kHorizon = 2048;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Sums of squares of one head's rows and columns over the states that were looked at.
struct Powers {
  std::vector<double> rows, columns;
  std::int64_t n_states = 0;
};

double ratio(double a, double b) { return a == b ? 1 : a / b; }

}  // namespace

double percentile(std::vector<double> values, double p) {
  std::sort(values.begin(), values.end());
  const double position = p * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, values.size() - 1);
  const double share = position - static_cast<double>(below);
  return share == 0 ? values[below] : std::lerp(values[below], values[above], share);
}

double peak_to_median(const std::vector<double>& power) {
  return std::sqrt(ratio(percentile(power, 1), percentile(power, 0.5)));
}

void add_powers(const float* X, const LayerShape& shape, std::vector<double>& rows,
                std::vector<double>& columns) {
  for (std::int64_t i = 0; i < shape.K; ++i) {
    for (std::int64_t j = 0; j < shape.V; ++j) {
      const double power = std::pow(double{X[i * shape.V + j]}, 2);
      rows[at(i)] += power;
      columns[at(j)] += power;
    }
  }
}

Result<std::vector<std::vector<HeadStatistics>>> measure_heads(
    const std::vector<LayerShape>& shapes, std::span<const std::vector<std::int32_t>> segments,
    std::int64_t interval, const PrefillPass& prefill) {
  std::vector<std::int64_t> updates;
  std::int64_t n_tokens = 0;
  for (const std::vector<std::int32_t>& segment : segments) {
    for (std::int64_t n = interval; n <= std::ssize(segment); n += interval) {
      updates.push_back(n_tokens + n);
    }
    n_tokens += std::ssize(segment);
  }
  if (updates.empty()) {
    return Status(Code::kInvalidArgument, "a text shorter than " + std::to_string(interval) +
                                              " tokens says nothing about a state; give more");
  }
  std::vector<std::vector<Powers>> powers;
  powers.reserve(shapes.size());
  for (const LayerShape& shape : shapes) {
    powers.emplace_back(at(shape.n_value_heads), Powers{std::vector<double>(at(shape.K)),
                                                        std::vector<double>(at(shape.V)), 0});
  }
  // Calls for one head never overlap.
  const auto look = [&](int layer, int head, std::int64_t, const float* X) {
    Powers& p = powers[at(layer)][at(head)];
    add_powers(X, shapes[at(layer)], p.rows, p.columns);
    ++p.n_states;
  };
  Collector collector(shapes, 1, std::vector(shapes.size(), updates), look, true);
  std::int64_t first = 1;
  for (const std::vector<std::int32_t>& segment : segments) {
    collector.begin_segment(0, first);
    SP_RETURN_IF_ERROR(prefill(segment, collector));
    SP_RETURN_IF_ERROR(collector.end_segment());
    first += std::ssize(segment);
  }

  std::vector<std::vector<HeadStatistics>> result;
  for (std::size_t l = 0; l < shapes.size(); ++l) {
    const LayerShape& shape = shapes[l];
    const ReadStatistics& sums = collector.statistics(static_cast<int>(l), 0);
    auto& heads = result.emplace_back();
    for (int h = 0; h < shape.n_value_heads; ++h) {
      const auto n = static_cast<double>(sums.n_tokens[at(h)]);
      std::vector<double> half_lives, lifetimes;
      for (int i = 0; i < shape.gate_width(); ++i) {
        const double ell = sums.log_decay[at(std::int64_t{h} * shape.gate_width() + i)] / n;
        half_lives.push_back(ell == 0 ? INFINITY : -std::numbers::ln2 / ell);
        SP_ASSIGN_OR_RETURN(const double lifetime, lifetime_weight(ell, kHorizon));
        lifetimes.push_back(lifetime);
      }
      const auto omega = sums.omega.begin() + std::int64_t{h} * shape.K;
      const std::vector<double> impact(omega, omega + shape.K);
      const Powers& p = powers[l][at(h)];
      HeadStatistics& head = heads.emplace_back();
      head.half_life = percentile(half_lives, 0.5);
      head.lifetime = percentile(lifetimes, 0.5);
      const auto [least, most] = std::minmax_element(half_lives.begin(), half_lives.end());
      head.half_life_min = *least;
      head.half_life_max = *most;
      head.omega_spread = ratio(percentile(impact, 0.9), percentile(impact, 0.1));
      head.row_peak = peak_to_median(p.rows);
      head.column_peak = peak_to_median(p.columns);
      head.rms = std::sqrt(std::accumulate(p.rows.begin(), p.rows.end(), 0.0) /
                           (static_cast<double>(p.n_states) * shape.K * shape.V));
    }
  }
  return result;
}

}  // namespace statepack
