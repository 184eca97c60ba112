#include "codec/tiles.hpp"

#include <bit>
#include <cstring>

#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "codec/options.hpp"
#include "codec/quantise.hpp"
#include "codec/scale.hpp"

namespace statepack {
namespace {

constexpr int kMaxGroup = 65536;
constexpr float kMinScaleF32 = 1e-8f;
constexpr float kMaxScaleF32 = 0x1p120f;  // times any code it stays finite

// Floats in the order of integers, -0 before +0: an integer minimum may be split over lanes freely.
std::int32_t ordered(float x) {
  const std::int32_t bits = std::bit_cast<std::int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
float from_ordered(std::int32_t bits) {
  return std::bit_cast<float>(bits ^ ((bits >> 31) & 0x7fffffff));
}

SP_CLONES void extremes_of(const float* x, std::int64_t n, float* low, float* high) {
  std::int32_t least = ordered(x[0]), most = least;
  for (std::int64_t j = 1; j < n; ++j) {
    const std::int32_t bits = ordered(x[j]);
    least = bits < least ? bits : least;
    most = bits > most ? bits : most;
  }
  *low = from_ordered(least);
  *high = from_ordered(most);
}

SP_CLONES void column_extremes(const float* __restrict X, std::int64_t n_rows,
                               std::int64_t n_columns, float* __restrict low,
                               float* __restrict high) {
  for (std::int64_t j = 0; j < n_columns; ++j) low[j] = high[j] = X[j];
  for (std::int64_t i = 1; i < n_rows; ++i) {
    const float* __restrict row = X + i * n_columns;
    for (std::int64_t j = 0; j < n_columns; ++j) {
      low[j] = row[j] < low[j] ? row[j] : low[j];
      high[j] = row[j] > high[j] ? row[j] : high[j];
    }
  }
}

}  // namespace

void Tiles::peaks(const float* band, int n_rows, float* peak) const {
  const float* row = band;
  if (n_rows > 1 || columns == 1) {
    column_peaks(band, n_rows, V, peak);
    if (columns == 1) return;
    row = peak;
  }
  // In place where `row` is `peak`: a tile is never left of its index.
  for (int t = 0; t < across(); ++t) {
    const int j = t * columns;
    peak[t] = peak_of(row + j, std::min(columns, V - j));
  }
}

void Tiles::extremes(const float* band, int n_rows, float* low, float* high) const {
  const float* lows = band;
  const float* highs = band;
  if (n_rows > 1 || columns == 1) {
    column_extremes(band, n_rows, V, low, high);
    lows = low, highs = high;
  }
  for (int t = 0; t < across(); ++t) {
    const int j = t * columns, n = std::min(columns, V - j);
    float least, most, other;
    extremes_of(lows + j, n, &least, &other);
    extremes_of(highs + j, n, &other, &most);
    low[t] = least + 0.0f;  // not -0, whichever zero came first
    high[t] = most + 0.0f;
  }
}

const float* Tiles::widen(const float* value, float* column) const {
  if (columns == 1) return value;
  for (int t = 0; t < across(); ++t) {
    const int j = t * columns;
    std::fill(column + j, column + std::min(j + columns, V), value[t]);
  }
  return column;
}

Status check_tiles(const CodecConfig& config) {
  for (const std::string_view key : {"layout", "axis"}) {
    SP_RETURN_IF_ERROR(check_choice(config, key));
  }
  const std::string& layout = option(config, "layout");
  const std::string& group = option(config, "group");
  if (layout == "group") {
    if (group == "none") {
      return {Code::kInvalidArgument, codec_label(config) +
                                          ": layout=group needs the width of a group; add group=32 "
                                          "or another width"};
    }
    return int_option(config, "group", 1, kMaxGroup).status();
  }
  if (group != "none") {
    return {Code::kInvalidArgument, codec_label(config) + ": group=" + group +
                                        " is not allowed with layout=" + layout +
                                        "; drop it or use layout=group"};
  }
  if (option(config, "axis") != "value") {
    return {Code::kInvalidArgument, codec_label(config) + ": axis=" + option(config, "axis") +
                                        " is not allowed with layout=" + layout +
                                        "; drop it or use layout=group"};
  }
  return {};
}

Tiles tiles_of(const CodecConfig& config, const LayerShape& shape) {
  const std::string& layout = option(config, "layout");
  Tiles tiles{shape.K, shape.V, 1, shape.V};  // row
  if (layout == "column") tiles.rows = shape.K, tiles.columns = 1;
  if (layout == "tensor") tiles.rows = shape.K;
  if (layout == "group") {
    const int width = int_option(config, "group", 1, kMaxGroup).value();
    if (option(config, "axis") == "value") {
      tiles.columns = std::min(width, shape.V);
    } else {
      tiles.rows = std::min(width, shape.K);
      tiles.columns = 1;
    }
  }
  return tiles;
}

void store_scales(ScaleType type, const float* peak, std::int64_t n, float levels,
                  std::uint8_t* stored, float* value) {
  for (std::int64_t t = 0; t < n; ++t) {
    if (type == ScaleType::kF16) {
      const std::uint16_t half = encode_scale(peak[t] / levels);
      std::memcpy(stored + 2 * t, &half, sizeof half);
      value[t] = f16_to_f32(half);
    } else {
      value[t] = clamp_to(peak[t] / levels, kMinScaleF32, kMaxScaleF32);
      std::memcpy(stored + 4 * t, &value[t], sizeof value[t]);
    }
  }
}

void store_values(ScaleType type, const float* x, std::int64_t n, std::uint8_t* stored,
                  float* value) {
  for (std::int64_t t = 0; t < n; ++t) {
    if (type == ScaleType::kF16) {
      const std::uint16_t half = saturate_to_f16(x[t]);
      std::memcpy(stored + 2 * t, &half, sizeof half);
      value[t] = f16_to_f32(half);
    } else {
      value[t] = x[t];
      std::memcpy(stored + 4 * t, &value[t], sizeof value[t]);
    }
  }
}

void load_values(ScaleType type, const std::uint8_t* stored, std::int64_t n, float* value) {
  if (type == ScaleType::kF32) {
    std::memcpy(value, stored, static_cast<std::size_t>(4 * n));
    return;
  }
  for (std::int64_t t = 0; t < n; ++t) {
    std::uint16_t half;
    std::memcpy(&half, stored + 2 * t, sizeof half);
    value[t] = f16_to_f32(half);
  }
}

}  // namespace statepack
