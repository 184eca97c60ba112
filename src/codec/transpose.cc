#include "codec/transpose.hpp"

#include <algorithm>
#include <cstring>

namespace statepack {
namespace {

constexpr int kBlock = 16;
typedef std::uint8_t Bytes __attribute__((vector_size(kBlock)));

// The low (high) halves of two vectors, interleaved byte by byte.
inline Bytes zip_low(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Bytes zip_high(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}

// Zipping rows r and r + 8 of a 16x16 block rotates the eight bits of a byte's place (row, column)
// left by one; four rounds exchange row and column.
void transpose_block(const std::uint8_t* in, std::int64_t in_stride, std::uint8_t* out,
                     std::int64_t out_stride) {
  Bytes a[kBlock], b[kBlock];
  for (int r = 0; r < kBlock; ++r) std::memcpy(&a[r], in + r * in_stride, kBlock);
  for (int round = 0; round < 4; round += 2) {
    for (int r = 0; r < kBlock / 2; ++r) {
      b[2 * r] = zip_low(a[r], a[r + kBlock / 2]);
      b[2 * r + 1] = zip_high(a[r], a[r + kBlock / 2]);
    }
    for (int r = 0; r < kBlock / 2; ++r) {
      a[2 * r] = zip_low(b[r], b[r + kBlock / 2]);
      a[2 * r + 1] = zip_high(b[r], b[r + kBlock / 2]);
    }
  }
  for (int r = 0; r < kBlock; ++r) std::memcpy(out + r * out_stride, &a[r], kBlock);
}

}  // namespace

void transpose_bytes(const std::uint8_t* in, std::int64_t in_stride, std::int64_t n_rows,
                     std::int64_t n_columns, std::uint8_t* out, std::int64_t out_stride) {
  for (std::int64_t r = 0; r < n_rows; r += kBlock) {
    for (std::int64_t c = 0; c < n_columns; c += kBlock) {
      const std::uint8_t* from = in + r * in_stride + c;
      std::uint8_t* to = out + c * out_stride + r;
      if (r + kBlock <= n_rows && c + kBlock <= n_columns) {
        transpose_block(from, in_stride, to, out_stride);
        continue;
      }
      const std::int64_t rows = std::min<std::int64_t>(kBlock, n_rows - r);
      const std::int64_t columns = std::min<std::int64_t>(kBlock, n_columns - c);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < columns; ++j) to[j * out_stride + i] = from[i * in_stride + j];
      }
    }
  }
}

}  // namespace statepack
