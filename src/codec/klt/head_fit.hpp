// klt's fit where 16 divides V: the loops of fit.hpp a head at a time, to the same bits.
//
// "Kept" rows are those with bits, in ascending order, n of them.
#pragma once

#include <array>
#include <cstdint>

#include "codec/klt/fit.hpp"

namespace statepack::klt {

/// How one kept row is quantised.
struct RowFit {
  static constexpr std::size_t kFactors = kRowFactors.size();
  float inverse_r = 0;
  float inverse_limit = 0;  ///< 1 / most_beyond()
  float middle = 0;         ///< 2^(b-1)
  float weight = 0;         ///< r^2
  std::int32_t place = 0;   ///< where its codes go: rows of one width lie together, widest first
  // For each f of kRowFactors:
  std::array<float, kFactors> reach = {};         ///< f L
  std::array<float, kFactors> granular = {};      ///< (f Delta)^2 / 12
  std::array<float, kFactors> step = {};          ///< f Delta
  std::array<float, kFactors> inverse_step = {};  ///< 1 / (f Delta)

  RowFit() = default;
  RowFit(Quantiser q, float r, float weight_, std::int32_t place_);
};

/// normalise() of n rows of V columns in their order; y's row i comes from row from[i] of z.
void normalise_rows(const float* z, const std::int32_t* from, const RowFit* rows, int n, int V,
                    float* y, float* sum, float* most);

/// choose_factor() of the kept rows y [n][V].
void choose_factors(const float* y, const RowFit* rows, const float* c0, float c_squares, int n,
                    int V, std::uint8_t* factors);

/// Codes of the kept rows y [n][V] under their factors and the sums of the refit, num and den [V],
/// in their order. `codes` is [V / 16][n][16], rows by `place`: a tile's codes of one width are one
/// run of bytes.
void quantise_rows(const float* y, const RowFit* rows, const std::uint8_t* factors,
                   const float* inverse, int n, int V, std::uint8_t* codes, float* num, float* den);

/// The codes of n rows of a tile, [n][16], packed to `bits` each: 2 n bits bytes. Up to 12 bytes
/// behind them are overwritten.
void pack_tile(const std::uint8_t* codes, int n, int bits, std::uint8_t* to);

}  // namespace statepack::klt
