// The loops that the uniform codecs share, over row-major matrices [n_rows][n_columns].
//
// Vectors run along rows, so one scale a column costs no reduction across lanes. Every loop gives
// the same bits on every instruction set.
#pragma once

#include <cstdint>

namespace statepack {

/// peak[j] = max_i |X[i][j]|.
void column_peaks(const float* X, std::int64_t n_rows, std::int64_t n_columns, float* peak);

/// low[j] = min(0, min_i X[i][j]) and high[j] = max(0, max_i X[i][j]).
void column_ranges(const float* X, std::int64_t n_rows, std::int64_t n_columns, float* low,
                   float* high);

/// max_j |x[j]|.
float peak_of(const float* x, std::int64_t n);

/// sum_j |x[j]| in f32, in a fixed order: 16 interleaved partial sums, then a tree over them.
float sum_of_magnitudes(const float* x, std::int64_t n);

/// stored[j] = f16 of clamp(peak[j] / levels, 2^-24, 65504); value[j] = the value stored.
void make_scales(const float* peak, std::int64_t n, float levels, std::uint16_t* stored,
                 float* value);

/// value[j] = the value of the half stored[j].
void load_scales(const std::uint16_t* stored, std::int64_t n, float* value);

/// y[j] += x[j].
void add(const float* x, std::int64_t n, float* y);

/// out[j] = x[j] y[j]; `out` may be either.
void multiply(const float* x, const float* y, std::int64_t n, float* out);

/// codes[i][j] = clamp(rne(X[i][j] / scale[j]), -L, L), as int8 bit patterns; L <= 127. With more
/// than one row, scales are values of stored halves, here and below.
void quantise_rows(const float* X, const float* scale, std::int64_t n_rows, std::int64_t n_columns,
                   int L, std::uint8_t* codes);

/// The same with a scale a row, the value of a stored half: codes[i][j] = clamp(rne(X[i][j] /
/// scale[i]), -L, L).
void quantise_by_rows(const float* X, const float* scale, std::int64_t n_rows,
                      std::int64_t n_columns, int L, std::uint8_t* codes);

/// peak[i] = max_j |X[i][j]|.
void row_peaks(const float* X, std::int64_t n_rows, std::int64_t n_columns, float* peak);

/// X[i][j] = scale[i] * codes[i][j].
void dequantise_by_rows(const std::int8_t* codes, const float* scale, std::int64_t n_rows,
                        std::int64_t n_columns, float* X);

/// X[i][j] = scale[j] * codes[i][j].
void dequantise_rows(const std::int8_t* codes, const float* scale, std::int64_t n_rows,
                     std::int64_t n_columns, float* X);

/// codes[i][j] = clamp(rne(X[i][j] / scale[j]) + zero[j], 0, L); zero[j] in [0, L], L <= 255.
void quantise_rows_affine(const float* X, const float* scale, const std::uint8_t* zero,
                          std::int64_t n_rows, std::int64_t n_columns, int L, std::uint8_t* codes);

/// codes[j] = clamp(rne((x[j] - low[j]) / scale[j]), 0, L), L <= 255.
void quantise_above(const float* x, const float* scale, const float* low, std::int64_t n, int L,
                    std::uint8_t* codes);
/// x[j] = scale[j] * codes[j] + low[j].
void restore_above(const std::uint8_t* codes, const float* scale, const float* low, std::int64_t n,
                   float* x);

/// X[i][j] = scale[j] * (codes[i][j] - zero[j]).
void dequantise_rows_affine(const std::uint8_t* codes, const float* scale, const std::uint8_t* zero,
                            std::int64_t n_rows, std::int64_t n_columns, float* X);

}  // namespace statepack
