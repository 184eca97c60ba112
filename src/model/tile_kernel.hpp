// Inner products of many activation rows with many bf16 weight rows on the matrix unit of newer
// x86-64 processors (AMX).
//
// The unit multiplies bf16 and adds in f32. A bf16 weight fits as it is; an f32 activation goes in
// as two bf16 numbers, the nearest one and the nearest one to what it leaves, which keep it within
// 2^-17 of its size (a third would make it exact and cost half as much time again). Products of the
// two are exact and sums are rounded to f32. So the value is that of f32 arithmetic on activations
// of 17 bits, at several times the speed of f32 multiply-adds: 512 multiply-adds a cycle / 2
// against 32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace statepack::tile_kernel {

/// Rows of x that are packed together.
inline constexpr std::int64_t kGroup = 16;
/// Weight rows that are packed together.
inline constexpr std::int64_t kBlock = 16;

/// Whether this processor and this system have the unit. The first call asks the system to grant
/// tile registers to the process.
bool available();

/// Bytes of a packed group of rows.
std::int64_t group_bytes(std::int64_t K);
/// Splits x[K] into its two bf16 numbers and writes them to row r of a group, which is 64-byte
/// aligned and has group_bytes(K). Rows that are not there may be left alone.
void pack_row(const float* x, std::int64_t K, std::int64_t r, std::byte* group);

/// Bytes of n_out packed weight rows: a whole number of blocks of equal size.
std::int64_t weight_bytes(std::int64_t n_out, std::int64_t K);
/// Brings the n_out bf16 weight rows that `rows` points to, of K values each, into the order of
/// the unit. `packed` is 64-byte aligned and has weight_bytes(n_out, K).
void pack_weights(const std::byte* const* rows, std::int64_t n_out, std::int64_t K,
                  std::byte* packed);

/// y[r * y_stride + n] = sum_k x[r][k] w[n][k] for the first n_rows rows of packed groups and the
/// first n_out rows of packed weights. The value of one (r, n) is a fixed sequence of operations on
/// x[r] and w[n] alone. Subnormal numbers count as zero; an x that is not finite,
/// or within 2^-17 of leaving f32, gives NaN or Inf.
void dot_rows(const std::byte* groups, std::int64_t n_rows, const std::byte* weights,
              std::int64_t n_out, std::int64_t K, float* y, std::int64_t y_stride);

}  // namespace statepack::tile_kernel
