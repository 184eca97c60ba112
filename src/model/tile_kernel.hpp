// Inner products of many activation rows with many bf16 weight rows on the matrix unit of newer
// x86-64 processors (AMX), as exact as f32 arithmetic.
//
// The unit multiplies bf16 and adds in f32. A bf16 weight fits as it is; an f32 activation is the
// exact sum of three bf16 numbers (24 bits = 3 * 8), so three passes of the unit give
// sum_k x_k w_k with every product exact and sums rounded to f32. Even so it is several times
// ahead of f32 multiply-adds: 512 multiply-adds a cycle / 3 against 32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace statepack::tile_kernel {

/// Rows of x that are packed together: the columns of one tile.
inline constexpr std::int64_t kGroup = 16;
/// Most weight rows of one call of dot_rows().
inline constexpr std::int64_t kMaxOutputs = 64;

/// Whether this processor and this system have the unit. The first call asks the system to grant
/// tile registers to the process.
bool available();

/// Floats of kGroup packed rows (or fewer).
std::int64_t packed_floats(std::int64_t K);

/// Splits and packs n_rows <= kGroup rows of x, x_stride floats apart. `packed` is 64-byte aligned
/// and has packed_floats(K).
void pack_rows(const float* x, std::int64_t x_stride, std::int64_t n_rows, std::int64_t K,
               float* packed);

/// Floats of the scratch memory of dot_rows().
std::int64_t scratch_floats(std::int64_t K);

/// y[r * y_stride + n] = sum_k x[r][k] w[n][k] for n_rows packed rows, kGroup at a time and
/// packed_floats(K) apart, and the n_out <= kMaxOutputs bf16 weight rows that `w_rows` points to.
/// The value of one (r, n) is a fixed sequence of operations on x[r] and w[n] alone. Subnormal
/// numbers count as zero; an infinite x gives NaN. `scratch` is 64-byte aligned.
void dot_rows(const float* packed, std::int64_t n_rows, const std::byte* const* w_rows,
              std::int64_t n_out, std::int64_t K, float* y, std::int64_t y_stride, float* scratch);

}  // namespace statepack::tile_kernel
