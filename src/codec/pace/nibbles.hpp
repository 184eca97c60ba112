// Symmetric 4-bit columns between packed page and state, for whole runs of 16 keys and 16 columns.
#pragma once

#include <cstdint>

namespace statepack::pace {

/// Codes clamp(rne(X[i][j] / scale[j]), -7, 7) of n_rows rows of X [n_rows][V], column j at
/// out + j * stride, even key in the low nibble. n_rows and V are multiples of 16, scales values of
/// stored halves.
void pack_columns(const float* X, const float* scale, int n_rows, int V, std::uint8_t* out,
                  std::int64_t stride);

/// X[i][j] = scale[j] code, of columns as pack_columns() writes them.
void restore_columns(const std::uint8_t* in, std::int64_t stride, const float* scale, int n_rows,
                     int V, float* X);

}  // namespace statepack::pace
