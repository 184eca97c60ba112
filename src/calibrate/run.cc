#include "calibrate/run.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numbers>
#include <numeric>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/progress.hpp"
#include "calibrate/draw.hpp"
#include "calibrate/head_statistics.hpp"

namespace statepack {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Part i of n whole things shared out evenly among `parts`; the first get what is over.
std::int64_t share(std::int64_t n, std::int64_t parts, std::int64_t i) {
  return n / parts + (i < n % parts ? 1 : 0);
}

Status stopped() { return {Code::kInterrupted, "calibration was stopped; no plan was made"}; }

double ratio(double a, double b) { return a == b ? 1 : a / b; }

}  // namespace

CalibrationRun::CalibrationRun(const std::vector<LayerShape>& shapes,
                               std::span<const CalibrationText> texts,
                               const CalibrationOptions& options, const PrefillPass& prefill,
                               ThreadPool& threads)
    : shapes_(shapes), texts_(texts), options_(options), prefill_(prefill), threads_(threads) {
  std::int64_t update = 1;
  for (int d = 0; d < n_domains(); ++d) {
    const auto n_tokens = static_cast<std::int64_t>(texts[at(d)].tokens.size());
    for (const std::int64_t start :
         draw_starts(n_tokens, options.segment_tokens, share(options.n_segments, n_domains(), d),
                     derive_seed(options.seed, static_cast<std::uint64_t>(d)))) {
      segments_.push_back({d, start, update});
      update += options.segment_tokens;
    }
  }
}

std::vector<int> CalibrationRun::competing_domains() const {
  if (options_.combine == CombineDomains::kMean) return {kPooled};
  std::vector<int> domains(at(n_domains()));
  std::iota(domains.begin(), domains.end(), 0);
  return domains;
}

Samples CalibrationRun::draw_samples(std::int64_t interval) const {
  Samples samples;
  for (std::size_t l = 0; l < shapes_.size(); ++l) {
    auto& updates = samples.updates.emplace_back();
    auto& domains = samples.domains.emplace_back();
    std::int64_t first = 1;
    for (int d = 0; d < n_domains(); ++d) {
      const std::int64_t n_tokens =
          share(options_.n_segments, n_domains(), d) * options_.segment_tokens;
      // The high half keeps these streams apart from those of the segments' starts.
      const std::uint64_t stream = (std::uint64_t{l} + 1) << 32 | static_cast<std::uint64_t>(d);
      for (const std::int64_t update : draw_multiples(first, first + n_tokens - 1, interval,
                                                      share(options_.n_snapshots, n_domains(), d),
                                                      derive_seed(options_.seed, stream))) {
        updates.push_back(update);
        domains.push_back(d);
      }
      first += n_tokens;
    }
  }
  return samples;
}

Samples CalibrationRun::every(std::int64_t interval) const {
  std::vector<std::int64_t> updates;
  std::vector<int> domains;
  for (const Segment& segment : segments_) {
    for (std::int64_t n = interval; n <= options_.segment_tokens; n += interval) {
      updates.push_back(segment.first_update + n - 1);
      domains.push_back(segment.domain);
    }
  }
  return {std::vector(shapes_.size(), updates), std::vector(shapes_.size(), domains)};
}

Status CalibrationRun::collect(const Samples& samples) {
  SP_RETURN_IF_ERROR(check_samples(samples));
  std::int64_t n_bytes = 0;
  for (std::size_t l = 0; l < shapes_.size(); ++l) {
    n_bytes += static_cast<std::int64_t>(samples.updates[l].size() * sizeof(float)) *
               shapes_[l].n_values();
  }
  if (n_bytes > options_.snapshot_bytes) {
    Collector collector(shapes_, n_domains(),
                        std::vector<std::vector<std::int64_t>>(shapes_.size()), nullptr, true);
    SP_RETURN_IF_ERROR(pass(collector));
    return take_statistics(collector);
  }
  for (std::size_t l = 0; l < shapes_.size(); ++l) {
    kept_.emplace_back(samples.updates[l].size() * at(shapes_[l].n_values()));
  }
  const auto keep = [this](int layer, int head, std::int64_t index, const float* X) {
    const LayerShape& shape = shapes_[at(layer)];
    std::copy(X, X + std::int64_t{shape.K} * shape.V, kept_state(layer, head, index));
  };
  Collector collector(shapes_, n_domains(), samples.updates, keep, true);
  SP_RETURN_IF_ERROR(pass(collector));
  return take_statistics(collector);
}

Status CalibrationRun::collect(const Samples& samples, ErrorMeter& meter) {
  SP_RETURN_IF_ERROR(check_samples(samples));
  const auto show = [&](int layer, int head, std::int64_t index, const float* X) {
    meter.add(layer, head, samples.domains[at(layer)][at(index)], X);
  };
  Collector collector(shapes_, n_domains(), samples.updates, show, true);
  SP_RETURN_IF_ERROR(pass(collector));
  return take_statistics(collector);
}

Status CalibrationRun::measure(const Samples& samples, ErrorMeter& meter) {
  const auto show = [&](int layer, int head, std::int64_t index, const float* X) {
    meter.add(layer, head, samples.domains[at(layer)][at(index)], X);
  };
  if (kept_.empty()) {
    Collector collector(shapes_, n_domains(), samples.updates, show, false);
    return pass(collector);
  }
  const double start = now_s();
  std::vector<std::pair<int, int>> heads;
  for (int l = 0; l < static_cast<int>(shapes_.size()); ++l) {
    for (int h = 0; h < shapes_[at(l)].n_value_heads; ++h) heads.emplace_back(l, h);
  }
  threads_.parallel_for(static_cast<std::int64_t>(heads.size()), [&](std::int64_t i, int) {
    const auto [layer, head] = heads[at(i)];
    const auto n = static_cast<std::int64_t>(samples.updates[at(layer)].size());
    for (std::int64_t index = 0; index < n && !interrupted(); ++index) {
      show(layer, head, index, kept_state(layer, head, index));
    }
  });
  if (interrupted()) return stopped();
  distortion_s_ += now_s() - start;
  return {};
}

double CalibrationRun::omega(int layer, int head, int row, int domain) const {
  return mean(layer, head, domain, &ReadStatistics::omega, shapes_[at(layer)].K, row);
}

double CalibrationRun::log_decay(int layer, int head, int row, int domain) const {
  const int width = shapes_[at(layer)].gate_width();
  return mean(layer, head, domain, &ReadStatistics::log_decay, width, width == 1 ? 0 : row);
}

ErrorMeter::Sums CalibrationRun::sums(const ErrorMeter& meter, int layer, int head,
                                      int domain) const {
  if (domain != kPooled) return meter.sums(layer, head, domain);
  ErrorMeter::Sums all = meter.sums(layer, head, 0);
  for (int d = 1; d < n_domains(); ++d) all.add(meter.sums(layer, head, d));
  return all;
}

Status CalibrationRun::pass(SegmentObserver& observer) {
  const double start = now_s();
  ++n_passes_;
  const auto n_segments = static_cast<std::int64_t>(segments_.size());
  Progress progress(n_passes_ == 1 ? "calibrate" : "calibrate, pass " + std::to_string(n_passes_),
                    n_segments * options_.segment_tokens, options_.progress);
  for (const Segment& segment : segments_) {
    if (interrupted()) return stopped();
    observer.begin_segment(segment.domain, segment.first_update);
    const std::span<const std::int32_t> tokens = texts_[at(segment.domain)].tokens;
    SP_RETURN_IF_ERROR(
        prefill_(tokens.subspan(at(segment.start), at(options_.segment_tokens)), observer));
    SP_RETURN_IF_ERROR(observer.end_segment());
    progress.advance(options_.segment_tokens);
  }
  prefill_s_ += now_s() - start;
  return {};
}

Status CalibrationRun::take_statistics(const Collector& collector) {
  const std::int64_t n_tokens =
      static_cast<std::int64_t>(segments_.size()) * options_.segment_tokens;
  for (int l = 0; l < static_cast<int>(shapes_.size()); ++l) {
    const LayerShape& shape = shapes_[at(l)];
    auto& domains = statistics_.emplace_back();
    for (int d = 0; d < n_domains(); ++d) domains.push_back(collector.statistics(l, d));
    for (int h = 0; h < shape.n_value_heads; ++h) {
      std::int64_t n = 0;
      for (const ReadStatistics& sums : domains) n += sums.n_tokens[at(h)];
      SP_CHECK(n == n_tokens, "prefill must show every token of every head");
      for (int i = 0; i < shape.K; ++i) {
        // A mean log decay of -inf is a head that remembers nothing; that is sound.
        const double impact = omega(l, h, i, kPooled), ell = log_decay(l, h, i, kPooled);
        if (std::isfinite(impact) && ell <= 0) continue;
        return {Code::kNotFinite,
                "recurrent layer " + std::to_string(l) + ", head " + std::to_string(h) + ", row " +
                    std::to_string(i) + " has read impact " + std::to_string(impact) +
                    " and mean log decay " + std::to_string(ell) +
                    "; check the checkpoint: q, k and gates must be finite, log decays <= 0"};
      }
    }
  }
  return {};
}

Status CalibrationRun::check_samples(const Samples& samples) const {
  for (int d = 0; d < n_domains(); ++d) {
    for (const std::vector<int>& domains : samples.domains) {
      if (std::find(domains.begin(), domains.end(), d) != domains.end()) continue;
      return {Code::kInvalidArgument,
              "no state can be sampled from text '" + texts_[at(d)].name +
                  "': the sampling interval is longer than its segments; take a shorter interval "
                  "or longer segments"};
    }
  }
  return {};
}

float* CalibrationRun::kept_state(int layer, int head, std::int64_t index) {
  const LayerShape& shape = shapes_[at(layer)];
  return kept_[at(layer)].data() +
         (index * shape.n_value_heads + head) * std::int64_t{shape.K} * shape.V;
}

double CalibrationRun::mean(int layer, int head, int domain,
                            std::vector<double> ReadStatistics::*field, int width, int i) const {
  double sum = 0;
  std::int64_t n = 0;
  for (int d = 0; d < n_domains(); ++d) {
    if (domain != kPooled && domain != d) continue;
    const ReadStatistics& sums = statistics_[at(layer)][at(d)];
    sum += (sums.*field)[at(std::int64_t{head} * width + i)];
    n += sums.n_tokens[at(head)];
  }
  return sum / static_cast<double>(n);
}

LayerSummary summarise_layer(const CalibrationRun& run, const ErrorMeter& meter, int layer,
                             const std::function<int(int head, int row)>& variant_of) {
  constexpr int kPooled = CalibrationRun::kPooled;
  const LayerShape& shape = run.shapes()[at(layer)];
  std::vector<double> half_lives, spreads, row_peaks, column_peaks;
  double error = 0, power = 0;
  for (int h = 0; h < shape.n_value_heads; ++h) {
    std::vector<double> omega;
    omega.reserve(at(shape.K));
    for (int i = 0; i < shape.K; ++i) omega.push_back(run.omega(layer, h, i, kPooled));
    spreads.push_back(ratio(percentile(omega, 0.9), percentile(omega, 0.1)));
    for (int i = 0; i < shape.gate_width(); ++i) {
      half_lives.push_back(std::numbers::ln2 / -run.log_decay(layer, h, i, kPooled));
    }
    const ErrorMeter::Sums sums = run.sums(meter, layer, h, kPooled);
    row_peaks.push_back(peak_to_median(sums.row_power));
    column_peaks.push_back(peak_to_median(sums.column_power));
    for (int i = 0; i < shape.K; ++i) {
      if (const int variant = variant_of(h, i); variant >= 0) {
        error += sums.row_error[at(variant)][at(i)];
      }
      power += sums.row_power[at(i)];
    }
  }
  LayerSummary summary;
  const auto [shortest, longest] = std::minmax_element(half_lives.begin(), half_lives.end());
  summary.half_life_min = std::abs(*shortest);  // ln 2 / -0 is -inf
  summary.half_life_max = std::abs(*longest);
  summary.omega_spread = percentile(spreads, 0.5);
  summary.row_peak = percentile(row_peaks, 0.5);
  summary.column_peak = percentile(column_peaks, 0.5);
  summary.relative_error = power > 0 ? std::sqrt(error / power) : 0;
  return summary;
}

}  // namespace statepack
