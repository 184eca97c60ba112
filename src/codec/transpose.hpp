// Transposition of code bytes, for layouts that keep a column together.
#pragma once

#include <cstdint>

namespace statepack {

/// out[c * out_stride + r] = in[r * in_stride + c] for r < n_rows, c < n_columns. No overlap.
void transpose_bytes(const std::uint8_t* in, std::int64_t in_stride, std::int64_t n_rows,
                     std::int64_t n_columns, std::uint8_t* out, std::int64_t out_stride);

}  // namespace statepack
