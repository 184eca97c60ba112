// The loops of LeapQuant's boundary step. Matrices are row-major; rank-major factors [R][n] keep
// vectors along n. 0 <= R <= 8.
#pragma once

#include <cstdint>

namespace statepack::leapquant {

/// out[p][i] = sum_j X[i][j] Q[p][j], through 16 lanes.
void times(const float* X, std::int64_t K, std::int64_t V, const float* Q, int R, float* out);

/// out[p][j] = sum_i A[p][i] X[i][j], from i = 0 upwards.
void transposed_times(const float* X, std::int64_t K, std::int64_t V, const float* A, int R,
                      float* out);

/// Orthonormal columns x[p] [n] of the same span: modified Gram-Schmidt with the projections
/// applied twice. A column within rounding of the span of those before it becomes zero.
void orthonormalise(float* x, std::int64_t n, int R);

/// The halves of n values, saturated at +-65504; `x` becomes what they hold.
void round_to_halves(float* x, std::int64_t n, std::uint16_t* half);

/// e = x - sum_p key[p * stride] value[p][j]: one row of the residual.
void residual_row(const float* x, std::int64_t n, const float* key, std::int64_t stride,
                  const float* value, int R, float* e);

/// y = e / scale and peak = max(peak, |y|).
void smooth_row(const float* e, std::int64_t n, float scale, float* y, float* peak);

/// Codes as int8 bit patterns: z = clamp(rne(y inv_step), -qmax, qmax).
void encode_row(const float* y, const float* inv_step, std::int64_t n, float qmax, std::uint8_t* z);

/// 6-bit codes as a plane of low nibbles [ceil(n/2)] and one of the two high bits [ceil(n/4)], the
/// lowest index in the lowest bits; bits behind the last code are zero.
void pack_planes(const std::uint8_t* z, std::int64_t n, std::uint8_t* low, std::uint8_t* high);
void unpack_planes(const std::uint8_t* low, const std::uint8_t* high, std::int64_t n,
                   std::uint8_t* z);

/// error += (weight (y - step z))^2 with z as encode_row() would choose it.
void add_error_row(const float* y, const float* inv_step, const float* step, std::int64_t n,
                   float qmax, float weight, float* error);

/// x = (scale z) step + sum_p key[p * stride] value[p][j].
void restore_row(const std::uint8_t* z, float scale, const float* step, std::int64_t n,
                 const float* key, std::int64_t stride, const float* value, int R, float* x);

}  // namespace statepack::leapquant
