// Statistics of a model on text -> the plan of a scheme.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"
#include "calibrate/collector.hpp"
#include "scheme/plan.hpp"
#include "statepack/scheme.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// One kind of text, as token ids of the model's tokenizer, no special tokens added.
struct CalibrationText {
  std::string name;
  std::vector<std::int32_t> tokens;
};

/// How domains (texts) become one cost: `kMean` pools all tokens, as the papers do with their one
/// text; `kMax` takes the domain in which a unit costs most. Row weights always pool.
enum class CombineDomains : std::uint8_t { kMean, kMax };

/// Defaults are the papers' (stepquant, section 11; pace, section 8).
struct CalibrationOptions {
  std::int64_t n_segments = 32;        ///< shared out evenly over the texts, at least one each
  std::int64_t segment_tokens = 2048;  ///< each from a zero state
  std::uint64_t seed = 0;
  std::int64_t n_snapshots = 64;  ///< stepquant, damp: states a layer, shared out over the texts
  /// Tokens between two states that may be taken; 0: 8 for stepquant and damp, counted through all
  /// segments, 256 for pace and 32 for klt, counted in each segment (which take every one).
  std::int64_t interval = 0;
  double gamma = 0.25;  ///< row weight = omega^(gamma / 2)
  /// Tokens over which an error is counted; -1: the paper's, 2048 for stepquant, 256 for damp.
  std::int64_t horizon = -1;
  /// Units kept in half precision; -1: the paper's share, 32 of 2,304 heads or 512 of 81,920 rows,
  /// rounded (none for a small model).
  std::int64_t n_pivots = -1;
  std::optional<CombineDomains> combine;  ///< unset: kMax for klt, kMean for the others
  /// Snapshots are kept in memory up to this size and one pass over the text is enough; above it
  /// they are made again by further passes. The plan is the same.
  std::int64_t snapshot_bytes = std::int64_t{1} << 30;
  bool progress = false;  ///< a bar on stderr, when that is a terminal
};

/// What one layer's heads look like and were given; for people. For klt rows are those of Z, omega
/// is what all later reads see of a key channel, and the error is weighted by its cost.
struct LayerSummary {
  double mean_bits = 0;                         ///< of codes, pivots counted as 16
  double half_life_min = 0, half_life_max = 0;  ///< tokens, over heads or rows
  double omega_spread = 0;  ///< median over heads of the 90th to the 10th percentile of omega
  double row_peak = 0;      ///< median over heads of the largest to the median row RMS
  double column_peak = 0;   ///< the same of columns
  double relative_error =
      0;  ///< RMS of one rounding's error to the state's RMS; pivots count as exact
  std::string text() const;  ///< one line
};

struct Calibration {
  Plan plan;
  std::vector<LayerSummary> layers;
  /// What the plan leaves of what its kind minimises: sum of L_u d_u(b_u) over units that are no
  /// pivots, sum of E_h over heads at low width, or sum of E_i D(b_i) over rows. Compares plans of
  /// one kind, model and text.
  double cost = 0;
  double prefill_s = 0;     ///< passes over the text, collector included
  double distortion_s = 0;  ///< codecs on kept snapshots
  int n_passes = 0;
};

/// Runs the model over one segment from a zero state and shows every chunk to the observer, in the
/// order that ChunkObserver states. The same tokens must give the same chunks each time.
using PrefillPass = std::function<Status(std::span<const std::int32_t>, ChunkObserver&)>;

/// Calibrates `scheme` (one that needs a plan) for recurrent layers of these shapes. Work runs on
/// `threads`, also used by `prefill`; the result depends on neither their number nor the memory
/// option. Errors: kInvalidArgument (scheme without a plan, options, text shorter than a segment,
/// budget), kUnsupported (layers of mixed kinds), kNotFinite, kInterrupted, what `prefill` says.
Result<Calibration> calibrate(const Scheme& scheme, const std::vector<LayerShape>& shapes,
                              const std::string& model_fingerprint,
                              std::span<const CalibrationText> texts,
                              const CalibrationOptions& options, const PrefillPass& prefill,
                              ThreadPool& threads);

}  // namespace statepack
