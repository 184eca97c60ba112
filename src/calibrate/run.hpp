// One calibration in progress: the drawn text, passes of the model over it, what they showed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.hpp"
#include "calibrate/calibrate.hpp"
#include "calibrate/collector.hpp"
#include "calibrate/error_meter.hpp"

namespace statepack {

/// At which updates states are looked at, and to which domain each belongs.
struct Samples {
  std::vector<std::vector<std::int64_t>> updates;  ///< [layer], ascending, from 1
  std::vector<std::vector<int>> domains;           ///< [layer], one for each update
};

class CalibrationRun {
 public:
  /// In place of a domain: all of them as one.
  static constexpr int kPooled = -1;

  /// Draws the segments. All arguments outlive the run and have been checked.
  CalibrationRun(const std::vector<LayerShape>& shapes, std::span<const CalibrationText> texts,
                 const CalibrationOptions& options, const PrefillPass& prefill,
                 ThreadPool& threads);

  const std::vector<LayerShape>& shapes() const { return shapes_; }
  const CalibrationOptions& options() const { return options_; }
  /// The option, or what a kind of plan takes when none is given.
  std::int64_t horizon(std::int64_t otherwise) const {
    return options_.horizon > 0 ? options_.horizon : otherwise;
  }
  int n_domains() const { return static_cast<int>(texts_.size()); }
  /// The domains whose costs compete: each alone, or the pool.
  std::vector<int> competing_domains() const;

  /// `n_snapshots` of the multiples of `interval`, for each layer anew, shared out over domains.
  Samples draw_samples(std::int64_t interval) const;
  /// Every `interval` tokens of each segment, the same in every layer.
  Samples every(std::int64_t interval) const;

  /// The first pass: statistics, and the states at `samples`, kept if they fit the memory option.
  Status collect(const Samples& samples);
  /// The first pass, the states shown to `meter` at once.
  Status collect(const Samples& samples, ErrorMeter& meter);
  /// After collect(samples): shows the states to `meter`, from memory or by another pass. These are
  /// the same states in the same order for each head, so the sums are the same.
  /// Errors: kInterrupted, what prefill says, kInvalidArgument when a domain had no sample.
  Status measure(const Samples& samples, ErrorMeter& meter);

  /// One pass of the model over all segments. Errors: kInterrupted, what prefill and observer say.
  Status pass(SegmentObserver& observer);
  ThreadPool& threads() const { return threads_; }

  /// Means over the tokens of a domain. A mean log decay may be -inf, never NaN or above 0; omega
  /// is finite.
  double omega(int layer, int head, int row, int domain) const;
  double log_decay(int layer, int head, int row, int domain) const;
  /// The meter's sums of a domain.
  ErrorMeter::Sums sums(const ErrorMeter& meter, int layer, int head, int domain) const;

  int n_passes() const { return n_passes_; }
  double prefill_s() const { return prefill_s_; }
  double distortion_s() const { return distortion_s_; }

 private:
  struct Segment {
    int domain;
    std::int64_t start;         // in its text
    std::int64_t first_update;  // of its first token, counted through all segments
  };

  Status take_statistics(const Collector& collector);
  Status check_samples(const Samples& samples) const;
  float* kept_state(int layer, int head, std::int64_t index);
  double mean(int layer, int head, int domain, std::vector<double> ReadStatistics::*field,
              int width, int i) const;

  const std::vector<LayerShape>& shapes_;
  std::span<const CalibrationText> texts_;
  const CalibrationOptions& options_;
  const PrefillPass& prefill_;
  ThreadPool& threads_;
  std::vector<Segment> segments_;
  std::vector<std::vector<ReadStatistics>> statistics_;  // [layer][domain]
  std::vector<std::vector<float>> kept_;                 // [layer][index][head][K][V], or empty
  int n_passes_ = 0;
  double prefill_s_ = 0, distortion_s_ = 0;
};

/// What a layer looks like. `variant_of(head, row)` names the meter's variant that the plan chose
/// for a row, -1 where nothing is lost. mean_bits is left to the caller.
LayerSummary summarise_layer(const CalibrationRun& run, const ErrorMeter& meter, int layer,
                             const std::function<int(int head, int row)>& variant_of);

/// The makers of plans, one for each kind. They fill plan.layers, plan.settings and layers.
Status make_row_bits(const CodecConfig& config, CalibrationRun& run, Calibration& result);
Status make_protected_rows(const CodecConfig& config, CalibrationRun& run, Calibration& result);
Status make_transforms(const CodecConfig& config, CalibrationRun& run, Calibration& result);
Status make_high_heads(const CodecConfig& config, int period, CalibrationRun& run,
                       Calibration& result);

}  // namespace statepack
