// Values that share a scale, for every codec that gives one to a rectangle of a state.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/codec.hpp"

namespace statepack {

/// A state [K][V] cut into tiles of `rows` x `columns`, smaller at the far edges. A band is a row
/// of tiles: rows i to i + band_rows(i), i a multiple of `rows`.
struct Tiles {
  int K = 0, V = 0;
  int rows = 1, columns = 1;

  int across() const { return (V + columns - 1) / columns; }  ///< tiles of a band
  int bands() const { return (K + rows - 1) / rows; }
  std::int64_t n() const { return std::int64_t{bands()} * across(); }
  int band_rows(int i) const { return std::min(rows, K - i); }

  /// peak[t] = max |x| of each tile of a band. `peak` holds V values, of which across() are
  /// results.
  void peaks(const float* band, int n_rows, float* peak) const;
  /// low[t] and high[t], the least and largest x of each tile; V values each, as above.
  void extremes(const float* band, int n_rows, float* low, float* high) const;
  /// One value a column out of one a tile: `column` [V], or `value` itself where tiles are that
  /// narrow.
  const float* widen(const float* value, float* column) const;
};

/// The options `layout`, `group` and `axis` of a codec: rows, columns, the tensor, or groups of so
/// many values of a row or keys of a column. `layout` may have further words; the codec reads them
/// first. Errors: kInvalidArgument for combinations that mean nothing.
Status check_tiles(const CodecConfig& config);
/// After check_tiles() and check_shape().
Tiles tiles_of(const CodecConfig& config, const LayerShape& shape);

/// What a scale (or a minimum) is stored as.
enum class ScaleType : std::uint8_t { kF16, kF32 };

constexpr std::int64_t scale_bytes(ScaleType type) { return type == ScaleType::kF16 ? 2 : 4; }

/// Stores peak[t] / levels, within [2^-24, 65504] as f16 and [1e-8, 2^120] as f32; value[t] is what
/// was stored.
void store_scales(ScaleType type, const float* peak, std::int64_t n, float levels,
                  std::uint8_t* stored, float* value);
/// Stores x[t] itself, f16 saturating; value[t] is what was stored.
void store_values(ScaleType type, const float* x, std::int64_t n, std::uint8_t* stored,
                  float* value);
void load_values(ScaleType type, const std::uint8_t* stored, std::int64_t n, float* value);

}  // namespace statepack
