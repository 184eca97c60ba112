// The loops of a step over one head, in plain f32.
//
// Matrices are row-major, V contiguous. `bits` results are the integer pattern of a largest
// magnitude: its order puts NaN above Inf above every finite number. All run along value columns,
// or name their lanes, so that every instruction set gives the same bits; only dot_records(),
// read_records() and a fused update() use fused multiply-adds where the machine has them.
#pragma once

#include <cstdint>

namespace statepack::kernel {

/// The pattern of +Inf: a peak below it means that everything is finite.
inline constexpr std::int32_t kInfBits = 0x7f800000;

/// p_j = sum_i a_i S_ij and r_j = sum_i b_i S_ij, in the order of i: both reads in one pass. With
/// `add` the sums go on from what p and r hold, as if these rows followed those before.
void read_two(const float* S, int K, int V, const float* a, const float* b, float* p, float* r,
              bool add = false);
/// The same from zero, and returns the peak of S.
std::int32_t read_two_and_peak(const float* S, int K, int V, const float* a, const float* b,
                               float* p, float* r);

/// A decay and rank-one updates of a state: d_i S_ij + sum_m k_mi u_mj in the order of m, with
/// d_i = d[i * d_stride] (d_stride 0 or 1).
struct Update {
  const float* d = nullptr;
  int d_stride = 0;
  int n = 0;
  const float* keys = nullptr;  ///< [n] rows, key_stride floats apart
  std::int64_t key_stride = 0;
  const float* values = nullptr;  ///< [n][V]
  /// Fused multiply-adds, for keys whose last bits depend on the instruction set anyway.
  bool fused = false;
};

/// X = the updated S [K][V]; X may be S. Returns the peak of X.
std::int32_t update(const float* S, int K, int V, const Update& by, float* X);

/// with_x[m] = k_m . x and with_y[m] = k_m . y for keys [n][K].
void dot_records(const float* keys, int n, int K, const float* x, const float* y, float* with_x,
                 float* with_y);

/// p_j += sum_m a_m u_mj and r_j += sum_m b_m u_mj in the order of m, for values [n][V].
void read_records(const float* values, int n, int V, const float* a, const float* b, float* p,
                  float* r);

/// u_j = beta (v_j - p_j) and o_j = r_j + kq u_j, each operation rounded. Returns the peak of both.
std::int32_t correct(const float* p, const float* r, const float* v, float beta, float kq, int n,
                     float* u, float* o);

/// sum_i x_i y_i in the order of base/lane_sum.hpp.
float dot(const float* x, const float* y, int n);

/// Peak of |x|.
std::int32_t peak_bits(const float* x, std::int64_t n);

/// y_i = exp(x_i).
void exp_all(const float* x, int n, float* y);

}  // namespace statepack::kernel
