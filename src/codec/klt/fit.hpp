// The loops of klt over one row of V columns, in the letters of klt.hpp. All in f32, each operation
// rounded, so that every instruction set gives the same bits.
#pragma once

#include <cstdint>

namespace statepack::klt {

/// y = z inverse_r, and sum += y^2.
void normalise(const float* z, std::int64_t n, float inverse_r, float* y, float* sum);

/// c0 = f16(sqrt(sum / n_rows)) and inverse = 1 / c0, 0 where c0 is 0.
void first_column_scales(const float* sum, std::int64_t n, float n_rows, float* inverse);

/// One width, and how a row of it is quantised.
struct Quantiser {
  int bits = 0;
  float step = 0;  ///< Delta of the unit Gaussian
};

/// Codes u of y / c0 and the sums of the refit, num += weight v y and den += weight v^2, for the
/// value v = (u - (2^b - 1) / 2) Delta.
void quantise(const float* y, const float* inverse, std::int64_t n, Quantiser q, float weight,
              std::uint8_t* u, float* num, float* den);

/// t = z - sum over l < n of b_l error_l, in the order of l; error_l is row l of n rows.
void feed_back(const float* z, const float* b, const float* error, int n, std::int64_t V, float* t);

/// Codes u of t / (r c), and what is left: error = r c v - z, cost += weight (r c v - t)^2.
void quantise_fed(const float* t, const float* z, const float* c, std::int64_t n, Quantiser q,
                  float r, float weight, std::uint8_t* u, float* error, float* cost);

/// sum += z^2, for n rows of V columns.
void add_squares(const float* z, int n, std::int64_t V, float* sum);

/// What a column of c keeps of its energy: sum_i (z_i - r_i c v_i)^2 over columns, where energy is
/// sum_i z_i^2 of all rows, kept or not.
float rounding_cost(const float* energy, const float* num, const float* den,
                    const std::uint16_t* half, std::int64_t V);

/// c = f16(num / den), 0 where nothing was summed, and its halves.
void fit_column_scales(const float* num, const float* den, std::int64_t n, std::uint16_t* half);

/// x = (factor c) (times u - offset).
void restore(const std::uint8_t* u, const float* c, std::int64_t n, float factor, float times,
             float offset, float* x);

}  // namespace statepack::klt
