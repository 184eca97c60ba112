// What the heads of a model's recurrent layers are like on a text: how long they remember, how
// unevenly their rows are read, and how far their largest rows and columns stand out.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.hpp"
#include "calibrate/calibrate.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// The value below which a share p in [0, 1] lies, linear between neighbours; `values` not empty.
double percentile(std::vector<double> values, double p);

/// Largest to median RMS of rows or columns with these sums of squares; 1 when all are zero.
double peak_to_median(const std::vector<double>& power);

struct HeadStatistics {
  // With a gate a key channel: the median over rows.
  double half_life = 0;  ///< tokens, ln 2 / -mean log decay; +inf for a gate that never closes
  double lifetime = 0;   ///< sum_{j < 2048} exp(2 j mean log decay): how often an error is read
  double half_life_min = 0, half_life_max = 0;  ///< over rows
  double omega_spread = 0;                      ///< read impact of rows, 90th to 10th percentile
  double row_peak = 0, column_peak = 0;
  double rms = 0;  ///< of state values
};

/// Shares rows and columns of a state [K][V] out into peaks and RMS. Adds to sums of squares.
void add_powers(const float* X, const LayerShape& shape, std::vector<double>& rows,
                std::vector<double>& columns);

/// One pass over every segment, each from a zero state; states are looked at every `interval`
/// tokens. Returns [layer][head]. Errors: kInvalidArgument (no segment of `interval` tokens),
/// kNotFinite, what `prefill` says.
Result<std::vector<std::vector<HeadStatistics>>> measure_heads(
    const std::vector<LayerShape>& shapes, std::span<const std::vector<std::int32_t>> segments,
    std::int64_t interval, const PrefillPass& prefill);

}  // namespace statepack
