#include "model/norms.hpp"

#include <cmath>

#include "base/lane_sum.hpp"
#include "base/simd_clones.hpp"

namespace statepack {

SP_CLONES void rms_norm(const float* x, const float* scale, std::int64_t n, float eps, float* y) {
  const float mean = lane_dot(x, x, n) / static_cast<float>(n);
  const float inverse = 1.0F / std::sqrt(mean + eps);
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] * inverse * scale[i];
}

SP_CLONES void l2_norm(float* x, std::int64_t n, float factor) {
  const float a = factor / std::sqrt(lane_dot(x, x, n) + 1e-6F);
  for (std::int64_t i = 0; i < n; ++i) x[i] *= a;
}

}  // namespace statepack
