#include "delta/kernels.hpp"

#include <cstring>

#include "base/exp.hpp"
#include "base/lane_sum.hpp"
#include "base/simd_clones.hpp"

namespace statepack::kernel {
namespace {

std::int32_t magnitude_bits(float x) {
  std::int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}

}  // namespace

SP_CLONES float dot(const float* x, const float* y, int n) { return lane_dot(x, y, n); }

SP_CLONES std::int32_t correct(const float* __restrict p, const float* __restrict r,
                               const float* __restrict v, float beta, float kq, int n,
                               float* __restrict u, float* __restrict o) {
  std::int32_t peak = 0;
  for (int j = 0; j < n; ++j) {
    const float correction = beta * (v[j] - p[j]);
    const float out = r[j] + kq * correction;
    u[j] = correction;
    o[j] = out;
    const std::int32_t u_bits = magnitude_bits(correction), o_bits = magnitude_bits(out);
    const std::int32_t larger = u_bits > o_bits ? u_bits : o_bits;
    peak = larger > peak ? larger : peak;
  }
  return peak;
}

SP_CLONES std::int32_t peak_bits(const float* x, std::int64_t n) {
  std::int32_t peak = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t bits = magnitude_bits(x[i]);
    peak = bits > peak ? bits : peak;
  }
  return peak;
}

SP_CLONES void exp_all(const float* x, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = exp_f32(x[i]);
}

}  // namespace statepack::kernel
