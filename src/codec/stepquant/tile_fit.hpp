// STEPQuant's fit where tiles are whole runs of 16 columns and all rows have one width: the loops
// of fit.hpp a head at a time, to the same bits. Letters as there; V and `width` are multiples of
// 16, `width` columns share a row scale, and G = ceil(V / width).
#pragma once

#include <cstdint>

namespace statepack::stepquant {

inline constexpr float kMinMean = 1e-20f;  // floor of m

/// sums[i][g] = sum |x| over row i of X [n_rows][V] and group g, through 16 lanes. A value that is
/// not finite makes its sum so.
void row_sums(const float* X, int n_rows, int V, int width, float* sums);

/// Step 1: stored[e] = h16(sqrt(max(sums[e] / n_columns, kMinMean) / weight[e])), r[e] its value
/// and inverse[e] = 1 / r[e], for e < n.
void row_scales(const float* sums, const float* weight, int n, float n_columns,
                std::uint16_t* stored, float* r, float* inverse);

/// Step 2: y = x / r and peak_j = max(peak_j, |y_ij|), for r, inverse [n_rows]. Finite X, integer
/// codes.
void normalise_rows(const float* X, const float* r, const float* inverse, int n_rows, int V,
                    float* y, float* peak);
/// The same for r, inverse [n_rows][G] and the levels -3, -1, 1, 3. False when an x other than 0 is
/// below 2^-100, whose quotient may differ from a division's in its last bit: these levels could
/// show it, integer codes cannot.
bool normalise_groups(const float* X, const float* r, const float* inverse, int n_rows, int V,
                      int width, float* y, float* peak);

/// Step 3: c0_j = h16(peak_j / Q).
void first_column_scales(const float* peak, int V, float Q, float* c0);

/// out[e] = (weight[e] r[e])^2, the weights of step 5.
void squared_weights(const float* weight, const float* r, int n, float* out);

/// Steps 4 and 5 over Y [K][V]: weight [K][G], num and den [V]. `Q` 0: the levels -3, -1, 1, 3.
void accumulate_columns(const float* y, const float* c0, const float* weight, int K, int V,
                        int width, float Q, float* num, float* den);

/// Step 6: the runs of all tiles of Y [K][V], `stride` bytes from tile to tile; bits 2, 4, 6 or 8.
void encode_tiles(const float* y, const float* c, int K, int V, int bits, std::uint8_t* tiles,
                  std::int64_t stride);

}  // namespace statepack::stepquant
