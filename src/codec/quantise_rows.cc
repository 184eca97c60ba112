// The divisions of codec/quantise.hpp, by reciprocals that are corrected to the last bit.
#include "codec/quantise.hpp"

// Vectors of SVE and RVV have no compile-time size and cannot stand in arrays; SSSE3 and the second
// AVX-512 dialect would do what their neighbours do.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/quantise_rows.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first.
#include <hwy/highway.h>

#include <algorithm>

#include "base/simd_clones.hpp"
#include "codec/run_vectors-inl.hpp"
#include "codec/scale.hpp"

#ifndef SP_CODEC_QUANTISE_ROWS_MATRIX  // this file is read once for each target
#define SP_CODEC_QUANTISE_ROWS_MATRIX
namespace statepack {
namespace {

struct Matrix {
  const float* X;
  const float* scale;
  const std::uint8_t* zero;  // null: symmetric codes -L..L, else 0..L around it
  int n_rows, n_columns;
  float L;
  std::uint8_t* codes;
};

}  // namespace
}  // namespace statepack
#endif

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace {

// n vectors of columns from column j on, rows inside: one division a column.
template <int n>
HWY_INLINE void quantise_columns(const Matrix& m, int j) {
  const D d;
  const DI di;
  const hn::Rebind<std::uint8_t, D> d8;
  V s[n], inverse[n], low[n], high[n];
  hn::Vec<DI> offset[n];
  for (int c = 0; c < n; ++c) {
    s[c] = hn::LoadU(d, m.scale + j + c * kLanes);
    inverse[c] = hn::Div(hn::Set(d, 1.0f), s[c]);
    offset[c] = hn::Zero(di);
    low[c] = hn::Set(d, -m.L);
    high[c] = hn::Set(d, m.L);
    if (m.zero != nullptr) {
      offset[c] = hn::PromoteTo(di, hn::LoadU(d8, m.zero + j + c * kLanes));
      low[c] = hn::Neg(hn::ConvertTo(d, offset[c]));
      high[c] = hn::Add(high[c], low[c]);
    }
  }
  for (int i = 0; i < m.n_rows; ++i) {
    const std::int64_t at = std::int64_t{i} * m.n_columns + j;
    for (int c = 0; c < n; ++c) {
      const V x = divide_by_half(hn::LoadU(d, m.X + at + c * kLanes), s[c], inverse[c]);
      const auto code = hn::Add(hn::NearestInt(clamp(x, low[c], high[c])), offset[c]);
      hn::StoreU(hn::TruncateTo(d8, hn::BitCast(DU(), code)), d8, m.codes + at + c * kLanes);
    }
  }
}

// Returns the first column that is left.
int quantise_vectors(const Matrix& m) {
  int j = 0;
  for (; j + 4 * kLanes <= m.n_columns; j += 4 * kLanes) quantise_columns<4>(m, j);
  for (; j + kLanes <= m.n_columns; j += kLanes) quantise_columns<1>(m, j);
  return j;
}

// Both below return the first column that is left.
int quantise_by_rows_vectors(const Matrix& m) {
  const D d;
  const hn::Rebind<std::uint8_t, D> d8;
  const int n_columns = m.n_columns / kLanes * kLanes;
  const V low = hn::Set(d, -m.L), high = hn::Set(d, m.L);
  for (int i = 0; i < m.n_rows; ++i) {
    const V s = hn::Set(d, m.scale[i]), inverse = hn::Set(d, 1.0f / m.scale[i]);
    for (int j = 0; j < n_columns; j += kLanes) {
      const std::int64_t at = std::int64_t{i} * m.n_columns + j;
      const V x = divide_by_half(hn::LoadU(d, m.X + at), s, inverse);
      const auto code = hn::NearestInt(clamp(x, low, high));
      hn::StoreU(hn::TruncateTo(d8, hn::BitCast(DU(), code)), d8, m.codes + at);
    }
  }
  return n_columns;
}

int row_peaks_vectors(const float* X, int n_rows, int n_columns, float* peak) {
  const D d;
  const int n = n_columns / kLanes * kLanes;
  for (int i = 0; i < n_rows; ++i, X += n_columns) {
    V top = hn::Zero(d);
    for (int j = 0; j < n; j += kLanes) top = hn::Max(top, hn::Abs(hn::LoadU(d, X + j)));
    peak[i] = hn::GetLane(hn::MaxOfLanes(d, top));
  }
  return n;
}

}  // namespace
}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace statepack {

HWY_EXPORT(quantise_vectors);
HWY_EXPORT(quantise_by_rows_vectors);
HWY_EXPORT(row_peaks_vectors);

namespace {

SP_CLONES void divide_columns(const float* X, const float* scale, std::int64_t n_rows,
                              std::int64_t begin, std::int64_t n_columns, float L,
                              std::uint8_t* codes) {
  for (std::int64_t i = 0; i < n_rows; ++i) {
    for (std::int64_t j = begin; j < n_columns; ++j) {
      const std::int64_t at = i * n_columns + j;
      codes[at] = round_code_u8(X[at] / scale[j], -L, L);
    }
  }
}

SP_CLONES void divide_columns_affine(const float* X, const float* scale, const std::uint8_t* zero,
                                     std::int64_t n_rows, std::int64_t begin,
                                     std::int64_t n_columns, float L, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < n_rows; ++i) {
    for (std::int64_t j = begin; j < n_columns; ++j) {
      const std::int64_t at = i * n_columns + j;
      // clamp(rne(x/s) + z, 0, L) = clamp(rne(x/s), -z, L - z) + z, modulo 256 in the byte.
      const float below = -static_cast<float>(zero[j]);
      const int code = round_code_u8(X[at] / scale[j], below, L + below) + zero[j];
      codes[at] = static_cast<std::uint8_t>(code);
    }
  }
}

// Columns that reciprocals took care of: none of a single row, which has as many of them as
// quotients.
std::int64_t by_reciprocals(const float* X, const float* scale, const std::uint8_t* zero,
                            std::int64_t n_rows, std::int64_t n_columns, float L,
                            std::uint8_t* codes) {
  if (n_rows == 1) return 0;
  return HWY_DYNAMIC_DISPATCH(quantise_vectors)(
      {X, scale, zero, static_cast<int>(n_rows), static_cast<int>(n_columns), L, codes});
}

}  // namespace

void quantise_rows(const float* X, const float* scale, std::int64_t n_rows, std::int64_t n_columns,
                   int L, std::uint8_t* codes) {
  const float limit = static_cast<float>(L);
  const std::int64_t done = by_reciprocals(X, scale, nullptr, n_rows, n_columns, limit, codes);
  divide_columns(X, scale, n_rows, done, n_columns, limit, codes);
}

void quantise_by_rows(const float* X, const float* scale, std::int64_t n_rows,
                      std::int64_t n_columns, int L, std::uint8_t* codes) {
  const float limit = static_cast<float>(L);
  const std::int64_t done = HWY_DYNAMIC_DISPATCH(quantise_by_rows_vectors)(
      {X, scale, nullptr, static_cast<int>(n_rows), static_cast<int>(n_columns), limit, codes});
  for (std::int64_t i = 0; done < n_columns && i < n_rows; ++i) {
    for (std::int64_t j = done; j < n_columns; ++j) {
      const std::int64_t at = i * n_columns + j;
      codes[at] = round_code_u8(X[at] / scale[i], -limit, limit);
    }
  }
}

void row_peaks(const float* X, std::int64_t n_rows, std::int64_t n_columns, float* peak) {
  const std::int64_t done = HWY_DYNAMIC_DISPATCH(row_peaks_vectors)(
      X, static_cast<int>(n_rows), static_cast<int>(n_columns), peak);
  for (std::int64_t i = 0; done < n_columns && i < n_rows; ++i) {
    peak[i] = std::max(peak[i], peak_of(X + i * n_columns + done, n_columns - done));
  }
}

void quantise_rows_affine(const float* X, const float* scale, const std::uint8_t* zero,
                          std::int64_t n_rows, std::int64_t n_columns, int L, std::uint8_t* codes) {
  const float limit = static_cast<float>(L);
  const std::int64_t done = by_reciprocals(X, scale, zero, n_rows, n_columns, limit, codes);
  divide_columns_affine(X, scale, zero, n_rows, done, n_columns, limit, codes);
}

}  // namespace statepack
#endif
