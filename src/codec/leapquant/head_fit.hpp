// LeapQuant's boundary step a head at a time: the loops of fit.hpp, to the same bits, where K and V
// are multiples of 16. Matrices and factors as there.
#pragma once

#include <cstdint>

namespace statepack::leapquant {

/// out[p][i] = sum_j X[i][j] Q[p][j], through 16 lanes.
void times_head(const float* X, std::int64_t K, std::int64_t V, const float* Q, int R, float* out);

/// out[p][j] = sum_i A[p][i] X[i][j], from i = 0 upwards.
void transposed_times_head(const float* X, std::int64_t K, std::int64_t V, const float* A, int R,
                           float* out);

/// e = x - sum_p key[p * stride] value[p][j] of n_rows rows of X, key pointing to the first of
/// them, and sums[i] = sum |e_i| through 16 lanes.
void residual_rows(const float* X, int n_rows, int V, const float* key, int stride,
                   const float* value, int R, float* e, float* sums);

/// y = e / scale[i] and peak_j = max(peak_j, |y_ij|) for n_rows rows; inverse[i] = 1 / scale[i].
void smooth_rows(const float* e, int n_rows, int V, const float* scale, const float* inverse,
                 float* y, float* peak);

/// z[j][i] = clamp(rne(y_ij inv_step_j), -qmax, qmax) as int8 bit patterns, value-major [V][K].
void encode_columns(const float* y, int K, int V, const float* inv_step, float qmax,
                    std::uint8_t* z);

/// Rows begin to begin + n_rows (both multiples of 16) of x = (s_k[i] z) step[j] + sum_p key[p][i]
/// value[p][j] out of value-major codes z [V][K]; X holds those rows alone.
void restore_rows(const std::uint8_t* z, int K, int V, int begin, int n_rows, const float* s_k,
                  const float* step, const float* key, const float* value, int R, float* X);

}  // namespace statepack::leapquant
