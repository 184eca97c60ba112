// The loops of klt over one row of V columns, in the letters of klt.hpp. All in f32, each operation
// rounded, so that every instruction set gives the same bits.
#pragma once

#include <array>
#include <cstdint>

namespace statepack::klt {

/// One width, and how a row of it is quantised.
struct Quantiser {
  int bits = 0;
  float step = 0;  ///< Delta of the unit Gaussian, times f of the row
};

/// What a row's scale may be multiplied with at a flush: f, 2 bits a row.
inline constexpr std::array<float, 4> kRowFactors = {0.5f, 0.75f, 1.0f, 1.5f};
inline constexpr int kRowFactorBits = 2;

/// The largest value that codes of a width tell apart, L = (2^b - 1)/2 Delta.
inline float reach(Quantiser q) { return 0.5f * static_cast<float>((1 << q.bits) - 1) * q.step; }
/// The largest |y| / c0 that a row of a width is left with: a column where it is larger gets a
/// larger scale. Widths that reach far take some clipping of rare values; those that do not would
/// pay for it with a coarser step, so they are asked for no more than a Gaussian column has anyway.
inline float most_beyond(Quantiser q) {
  const float limit = reach(q) / 0.65f;
  return limit > 3.8f ? limit : 3.8f;
}

/// y = z inverse_r, sum += y^2 and most = max(most, |y| inverse_limit).
void normalise(const float* z, std::int64_t n, float inverse_r, float inverse_limit, float* y,
               float* sum, float* most);

/// c0 = f16(max(sqrt(sum / n_rows), most)), 0 stays 0, and inverse = 1 / c0 or 0.
void first_column_scales(const float* sum, const float* most, std::int64_t n, float n_rows,
                         float* c0, float* inverse);

/// The sums over columns below have 16 parts, column j in part j mod 16, which are added up as
/// ((p_l + p_(l+8)) + (p_(l+4) + p_(l+12))) for l = 0..3, then ((0 + 1) + (2 + 3)).
inline constexpr int kSumParts = 16;
float add_parts(const float* parts);

/// sum_j c_j^2.
float squares(const float* c, std::int64_t n);

/// (f Delta)^2 / 12, the mean squared error of a step.
float granular(Quantiser q, int factor);

/// Index in kRowFactors of the f with the least
///   sum_j max(|y_j| - f L c_j, 0)^2 + (f Delta)^2 / 12 sum_j c_j^2:
/// what clipping costs, and what the step does. `c_squares` is squares(c).
int choose_factor(const float* y, const float* c, std::int64_t n, Quantiser q, float c_squares);

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
