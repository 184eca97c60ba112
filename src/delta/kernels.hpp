// The loops of a step over one head, in plain f32. All run along value columns, or name their
// lanes, so that every instruction set gives the same bits; a faster path replaces these one by
// one.
//
// Matrices are row-major, V contiguous. `bits` results are the integer pattern of a largest
// magnitude: its order puts NaN above Inf above every finite number.
#pragma once

#include <cstdint>

namespace statepack::kernel {

/// The pattern of +Inf: a peak below it means that everything is finite.
inline constexpr std::int32_t kInfBits = 0x7f800000;

/// p_j = sum_i a_i S_ij and r_j = sum_i b_i S_ij, in the order of i: both reads in one pass.
void read_two(const float* S, int K, int V, const float* a, const float* b, float* p, float* r);

/// sum_i x_i y_i in the order of base/lane_sum.hpp.
float dot(const float* x, const float* y, int n);

/// y_i = dot(row i of M, x): M [n][n].
void transform(const float* M, int n, const float* x, float* y);

/// y_j += c x_j.
void add_scaled(float c, const float* x, int n, float* y);

/// X_ij = d_i S_ij + k_i u_j with d_i = d[i * d_stride] (d_stride 0 or 1); X may be S. Returns the
/// peak of X.
std::int32_t decay_and_write(const float* S, int K, int V, const float* d, int d_stride,
                             const float* k, const float* u, float* X);

/// X_ij = d_i S_ij, d as above; X may be S.
void decay(const float* S, int K, int V, const float* d, int d_stride, float* X);

/// X_ij += sum_m k_mi u_mj in the order of m, for keys [n][K] and values [n][V].
void add_records(float* X, int K, int V, int n, const float* keys, const float* values);

/// Peak of |x|.
std::int32_t peak_bits(const float* x, std::int64_t n);

/// y_i = exp(x_i).
void exp_all(const float* x, int n, float* y);

}  // namespace statepack::kernel
