// The loops of STEPQuant's fit, over one row (or one group of its columns) at a time. Steps and
// letters are those of stepquant.hpp's source: x one row of X, r n its divisor, c the column
// scales.
#pragma once

#include <cstdint>

namespace statepack::stepquant {

/// Step 1: mean |x| of n values. NaN counts as 0 and an infinity as the largest float, here and in
/// normalise() and saturate().
float mean_abs(const float* x, std::int64_t n);

/// Step 2: y = x / divisor; and peak = max(peak, |y|) for step 3.
void normalise(const float* x, std::int64_t n, float divisor, float* y, float* peak);

/// Steps 4 and 5: z = enc(y / c0), num += weight z y, den += weight z z. Integer codes in [-Q, Q].
void accumulate(const float* y, const float* c0, std::int64_t n, float Q, float weight, float* num,
                float* den);
/// The same for the levels -3, -1, 1, 3.
void accumulate_signed(const float* y, const float* c0, std::int64_t n, float weight, float* num,
                       float* den);

/// Step 5: c_j = den_j > 0 ? h16(num_j / den_j) : c_j, and its halves.
void fit_column_scales(const float* num, const float* den, std::int64_t n, std::uint16_t* half,
                       float* c);

/// Step 6: the unsigned code u = enc(y / c) + Q of each value.
void encode(const float* y, const float* c, std::int64_t n, float Q, std::uint8_t* u);
/// The same for the levels -3, -1, 1, 3: u = (z + 3) / 2.
void encode_signed(const float* y, const float* c, std::int64_t n, std::uint8_t* u);

/// x = scale c z with z = step u - offset.
void restore(const std::uint8_t* u, const float* c, std::int64_t n, float scale, float step,
             float offset, float* x);

/// Pivots: halves, saturated at +-65504.
void saturate(const float* x, std::int64_t n, std::uint16_t* half);

}  // namespace statepack::stepquant
