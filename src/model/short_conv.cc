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

void ShortConv::prefetch(const float* history) const {
  constexpr std::int64_t kLine = 16;
  for (std::int64_t i = 0; i < history_floats(); i += kLine) __builtin_prefetch(history + i, 1);
}

void ShortConv::step(float* history, const float* u, float* c) const {
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
