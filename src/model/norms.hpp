// Norms over one row, f32, the same bits on every instruction set.
#pragma once

#include <cstdint>

namespace statepack {

/// y = scale x / sqrt(mean(x^2) + eps), over n values. A zero-centred norm has scale = 1 + weight.
/// y may be x.
void rms_norm(const float* x, const float* scale, std::int64_t n, float eps, float* y);

/// x = factor x / sqrt(sum(x^2) + 1e-6) in place: the fixed epsilon of docs/models.md 5.3.
void l2_norm(float* x, std::int64_t n, float factor);

}  // namespace statepack
