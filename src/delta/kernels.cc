#include "delta/kernels.hpp"

#include <cstring>

#include "base/exp.hpp"
#include "base/lane_sum.hpp"
#include "base/simd_clones.hpp"

// X is S or does not overlap it: value j depends on value j alone.
#if defined(__clang__)
#define SP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define SP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace statepack::kernel {
namespace {

std::int32_t magnitude_bits(float x) {
  std::int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}

}  // namespace

SP_CLONES void read_two(const float* __restrict S, int K, int V, const float* a, const float* b,
                        float* __restrict p, float* __restrict r) {
  for (int j = 0; j < V; ++j) p[j] = r[j] = 0;
  // Eight rows at a time: the sums pass through memory once for eight rows of S, in the same order.
  int i = 0;
  for (; i + 8 <= K; i += 8) {
    const float* s = S + std::int64_t{i} * V;
    const std::int64_t n = V;
    const float a0 = a[i], a1 = a[i + 1], a2 = a[i + 2], a3 = a[i + 3];
    const float a4 = a[i + 4], a5 = a[i + 5], a6 = a[i + 6], a7 = a[i + 7];
    const float b0 = b[i], b1 = b[i + 1], b2 = b[i + 2], b3 = b[i + 3];
    const float b4 = b[i + 4], b5 = b[i + 5], b6 = b[i + 6], b7 = b[i + 7];
    for (int j = 0; j < V; ++j) {
      float x = p[j], y = r[j];
      const float s0 = s[j], s1 = s[n + j], s2 = s[2 * n + j], s3 = s[3 * n + j];
      const float s4 = s[4 * n + j], s5 = s[5 * n + j], s6 = s[6 * n + j], s7 = s[7 * n + j];
      x += a0 * s0, y += b0 * s0;
      x += a1 * s1, y += b1 * s1;
      x += a2 * s2, y += b2 * s2;
      x += a3 * s3, y += b3 * s3;
      x += a4 * s4, y += b4 * s4;
      x += a5 * s5, y += b5 * s5;
      x += a6 * s6, y += b6 * s6;
      x += a7 * s7, y += b7 * s7;
      p[j] = x;
      r[j] = y;
    }
  }
  for (; i < K; ++i) {
    const float* s = S + std::int64_t{i} * V;
    for (int j = 0; j < V; ++j) {
      p[j] += a[i] * s[j];
      r[j] += b[i] * s[j];
    }
  }
}

SP_CLONES float dot(const float* x, const float* y, int n) { return lane_dot(x, y, n); }

void transform(const float* M, int n, const float* x, float* y) {
  for (int i = 0; i < n; ++i) y[i] = dot(M + std::int64_t{i} * n, x, n);
}

SP_CLONES void add_scaled(float c, const float* __restrict x, int n, float* __restrict y) {
  for (int j = 0; j < n; ++j) y[j] += c * x[j];
}

SP_CLONES std::int32_t decay_and_write(const float* S, int K, int V, const float* d, int d_stride,
                                       const float* k, const float* u, float* X) {
  std::int32_t peak = 0;
  for (int i = 0; i < K; ++i) {
    const float* s = S + std::int64_t{i} * V;
    float* x = X + std::int64_t{i} * V;
    const float decay = d[std::int64_t{i} * d_stride];
    const float key = k[i];
    SP_INDEPENDENT
    for (int j = 0; j < V; ++j) {
      const float value = decay * s[j] + key * u[j];
      x[j] = value;
      const std::int32_t bits = magnitude_bits(value);
      peak = bits > peak ? bits : peak;
    }
  }
  return peak;
}

SP_CLONES void decay(const float* S, int K, int V, const float* d, int d_stride, float* X) {
  for (int i = 0; i < K; ++i) {
    const float* s = S + std::int64_t{i} * V;
    float* x = X + std::int64_t{i} * V;
    const float factor = d[std::int64_t{i} * d_stride];
    SP_INDEPENDENT
    for (int j = 0; j < V; ++j) x[j] = factor * s[j];
  }
}

SP_CLONES void add_records(float* __restrict X, int K, int V, int n, const float* keys,
                           const float* __restrict values) {
  for (int i = 0; i < K; ++i) {
    float* x = X + std::int64_t{i} * V;
    int m = 0;
    for (; m + 4 <= n; m += 4) {  // four records a pass, in the same order
      const float* key = keys + std::int64_t{m} * K + i;
      const float* u = values + std::int64_t{m} * V;
      const float k0 = key[0], k1 = key[K], k2 = key[2 * std::int64_t{K}];
      const float k3 = key[3 * std::int64_t{K}];
      for (int j = 0; j < V; ++j) {
        float sum = x[j];
        sum += k0 * u[j];
        sum += k1 * u[V + j];
        sum += k2 * u[2 * V + j];
        sum += k3 * u[3 * V + j];
        x[j] = sum;
      }
    }
    for (; m < n; ++m) {
      const float key = keys[std::int64_t{m} * K + i];
      const float* u = values + std::int64_t{m} * V;
      for (int j = 0; j < V; ++j) x[j] += key * u[j];
    }
  }
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
