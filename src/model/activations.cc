#include "model/activations.hpp"

#include <cmath>

#include "base/exp.hpp"
#include "base/simd_clones.hpp"

namespace statepack {

SP_CLONES void silu_times(float* gate, const float* up, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) gate[i] = silu_f32(gate[i]) * up[i];
}

SP_CLONES void times_silu(float* y, const float* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] *= silu_f32(z[i]);
}

SP_CLONES void times_sigmoid(float* y, const float* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] *= sigmoid_f32(z[i]);
}

SP_CLONES void sigmoid(const float* x, std::int64_t n, float* y) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = sigmoid_f32(x[i]);
}

SP_CLONES void add(float* y, const float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += x[i];
}

SP_CLONES void add_scaled(float* y, float a, const float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += a * x[i];
}

void softplus_decay(const float* x, const float* bias, float rate, std::int64_t n, float* g) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float t = x[i] + bias[i];
    g[i] = -rate * (t > 20 ? t : std::log1p(exp_f32(t)));
  }
}

SP_CLONES void bounded_decay(const float* x, const float* bias, float rate, float bound,
                             std::int64_t n, float* g) {
  for (std::int64_t i = 0; i < n; ++i) g[i] = bound * sigmoid_f32(rate * (x[i] + bias[i]));
}

}  // namespace statepack
