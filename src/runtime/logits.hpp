// Arithmetic over one row of logits that sampling and evaluation share. Fixed orders of summation:
// the same bits for every vector width.
#pragma once

#include <cstdint>
#include <span>

namespace statepack {

/// The largest logit; the lowest index on ties.
struct LogitPeak {
  std::int32_t index = -1;
  float value = 0;
  bool finite = false;  ///< false when a logit is NaN or +Inf, or all are -Inf: nothing to sample
};
LogitPeak peak(std::span<const float> logits);

/// out[i] = exp((logits[i] - shift) * scale), within 2 ulp; (logits[i] - shift) * scale must not be
/// positive, and below -87 gives 0. Returns the sum. `out` may be `logits`.
double exp_sum(std::span<const float> logits, float shift, float scale, float* out);

/// sum_i weights[i] * (a[i] - b[i]), f64; all of one length.
double weighted_difference(std::span<const float> weights, std::span<const float> a,
                           std::span<const float> b);

}  // namespace statepack
