// Inner products of many activation rows with many stored weight rows: the one kernel behind every
// batch-invariant linear layer and the scores of decode attention.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/safetensors.hpp"

namespace statepack {

/// Floats of one packed row: K rounded up so that no kernel meets a tail of x.
std::int64_t packed_width(std::int64_t K);

/// Copies x[K] into the lane order that weights of `dtype` (F32, F16 or BF16) want; zeros behind K.
void pack_row(DType dtype, const float* x, std::int64_t K, float* packed);

/// y[r * y_stride + n] = sum_k x[r][k] w[n][k] for n_rows packed rows (packed_width(K) apart) and
/// the n_out weight rows that `w_rows` points to, stored as `dtype`, element-aligned. Numerics:
/// f32, fused multiply-add where the machine has it. The value of one (r, n) is a fixed sequence of
/// operations on x[r] and w[n] alone: it depends neither on n_rows nor on n_out.
void dot_rows(DType dtype, const float* packed, std::int64_t n_rows, const std::byte* const* w_rows,
              std::int64_t n_out, std::int64_t K, float* y, std::int64_t y_stride);

}  // namespace statepack
