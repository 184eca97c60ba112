// What calibration sees of a model: how strongly every key row is read, how long it is kept, and
// states at chosen updates.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "delta/prefill.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// Sums over the tokens of one domain for one recurrent layer, f64. Divide by n_tokens of the head.
struct ReadStatistics {
  std::vector<double> omega;           ///< [HV][K] g_i^2, g = D (q - beta k (k . q))
  std::vector<double> log_decay;       ///< [HV][gate_width]
  std::vector<std::int64_t> n_tokens;  ///< [HV]
};

/// Observes prefill over any number of segments, each from a zero state.
class SegmentObserver : public ChunkObserver {
 public:
  /// The next chunks belong to a segment of `domain` whose first token is update `first_update`.
  /// Between runs of prefill only.
  virtual void begin_segment(int domain, std::int64_t first_update) = 0;
  /// After the segment's last chunk. An error ends the calibration.
  virtual Status end_segment() = 0;
};

/// The state after token `tau` of a chunk, X [K][V] f32:
///   S_tau = exp(G_tau) S_before + sum_{j <= tau} exp(G_tau - G_j) k_j d_j^T
/// with every exponent formed as a sum of later gates, never as a difference of totals.
void state_inside_chunk(const ChunkView& chunk, const LayerShape& shape, int tau, float* X);

/// Takes all it needs from the solved chunks, so that calibration costs one prefill and no token
/// loop; nothing is fed back. Updates (tokens) are counted from 1 through all segments.
///
/// Thread-safe as ChunkObserver asks: each (layer, head) has its own sums, added up in token order,
/// so results do not depend on threads. Memory: 8 HV (K + gate_width + 1) bytes a layer and domain,
/// and one state while a visit lasts.
class Collector : public SegmentObserver {
 public:
  /// Receives the state X [K][V], finite, of one head after a chosen update; `index` counts the
  /// chosen updates of its layer from 0. Called from the observing threads: at the same time for
  /// different (layer, head), in order of index for one.
  using StateVisitor = std::function<void(int layer, int head, std::int64_t index, const float* X)>;

  /// `updates` [layer]: ascending numbers of the updates after which `visitor` sees the state.
  /// Without statistics the sums stay zero: for a second run that only visits.
  Collector(const std::vector<LayerShape>& shapes, int n_domains,
            std::vector<std::vector<std::int64_t>> updates, StateVisitor visitor,
            bool with_statistics);

  void begin_segment(int domain, std::int64_t first_update) override;
  void on_chunk(const ChunkView& chunk) override;
  /// kNotFinite when a state at a chosen update was not finite (it was not handed on).
  Status end_segment() override;

  const ReadStatistics& statistics(int layer, int domain) const;

 private:
  struct Layer {
    LayerShape shape;
    std::vector<std::int64_t> updates;
    std::vector<ReadStatistics> domains;
  };

  std::vector<Layer> layers_;
  StateVisitor visitor_;
  bool with_statistics_;
  int domain_ = 0;
  std::int64_t first_update_ = 1;
  std::atomic<bool> not_finite_{false};
};

}  // namespace statepack
