#include "model/short_conv.hpp"

#include <algorithm>
#include <cstring>

#include "base/exp.hpp"
#include "base/simd_clones.hpp"

namespace statepack {
namespace {

SP_CLONES void multiply(const float* w, const float* u, std::int64_t n, float* sum) {
  for (std::int64_t i = 0; i < n; ++i) sum[i] = w[i] * u[i];
}
SP_CLONES void multiply_add(const float* w, const float* u, std::int64_t n, float* sum) {
  for (std::int64_t i = 0; i < n; ++i) sum[i] += w[i] * u[i];
}
SP_CLONES void silu(float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = silu_f32(x[i]);
}

// ShortConv::step() for the kernel that models have, in one pass; the same operations in the same
// order.
SP_CLONES void step_of_4(const float* __restrict w, float* __restrict history,
                         const float* __restrict u, std::int64_t n, float* __restrict c) {
  float* __restrict h0 = history;
  float* __restrict h1 = history + n;
  float* __restrict h2 = history + 2 * n;
  for (std::int64_t i = 0; i < n; ++i) {
    const float first = h0[i], second = h1[i], third = h2[i], newest = u[i];
    float sum = w[i] * first;
    sum += w[n + i] * second;
    sum += w[2 * n + i] * third;
    sum += w[3 * n + i] * newest;
    c[i] = silu_f32(sum);
    h0[i] = second;
    h1[i] = third;
    h2[i] = newest;
  }
}

}  // namespace

ShortConv::ShortConv(const std::vector<float>& weight, std::int64_t channels, int kernel)
    : channels_(channels), kernel_(kernel), weight_(weight.size()) {
  for (std::int64_t ch = 0; ch < channels; ++ch) {
    for (int j = 0; j < kernel; ++j) {
      weight_[static_cast<std::size_t>(j * channels + ch)] =
          weight[static_cast<std::size_t>(ch * kernel + j)];
    }
  }
}

void ShortConv::apply(const float* u, float* c) const {
  multiply(weight_.data(), u, channels_, c);
  for (int j = 1; j < kernel_; ++j) {
    multiply_add(weight_.data() + j * channels_, u + j * channels_, channels_, c);
  }
  silu(c, channels_);
}

void ShortConv::step(float* history, const float* u, float* c) const {
  if (kernel_ == 4) return step_of_4(weight_.data(), history, u, channels_, c);
  const int last = kernel_ - 1;
  multiply(weight_.data(), history, channels_, c);
  for (int j = 1; j < last; ++j) {
    multiply_add(weight_.data() + j * channels_, history + j * channels_, channels_, c);
  }
  multiply_add(weight_.data() + last * channels_, u, channels_, c);
  silu(c, channels_);
  std::memmove(history, history + channels_,
               static_cast<std::size_t>((last - 1) * channels_) * sizeof(float));
  std::copy_n(u, channels_, history + (last - 1) * channels_);
}

}  // namespace statepack
