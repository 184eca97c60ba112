#include "codec/int/int.hpp"

#include <algorithm>
#include <cstring>

#include "codec/options.hpp"
#include "codec/pack.hpp"
#include "codec/quantise.hpp"
#include "codec/scratch.hpp"

namespace statepack {
namespace {

constexpr int kMaxGroup = 65536;

// The values that share a scale: a tile of so many rows and columns, smaller at the far edges.
struct Tile {
  int rows, columns;
};

//   L = 2^(b-1) - 1     s = f16(clamp(absmax / L, 2^-24, 65504))     c = clamp(rne(x / s), -L, L)
//
// Page: for each head its codes, row-major [K][V] as one run of b-bit two's complement numbers,
// then its scales as f16, row-major over tiles.
class IntCodec final : public LayerCodec {
 public:
  IntCodec(const LayerShape& shape, int bits, Tile tile)
      : shape_(shape),
        bits_(bits),
        limit_((1 << (bits - 1)) - 1),
        tile_(tile),
        scales_a_row_((shape.V + tile.columns - 1) / tile.columns),
        n_values_(std::int64_t{shape.K} * shape.V),
        code_bytes_(packed_bytes(n_values_, bits)),
        n_scales_(std::int64_t{(shape.K + tile.rows - 1) / tile.rows} * scales_a_row_),
        head_bytes_(code_bytes_ + 2 * n_scales_) {}

  const LayerShape& shape() const override { return shape_; }

  PayloadBytes payload() const override {
    return {.codes = code_bytes_ * shape_.n_value_heads,
            .scales = 2 * n_scales_ * shape_.n_value_heads};
  }

  std::size_t scratch_bytes() const override {
    return ScratchSize()
        .add<std::uint8_t>(n_values_)
        .add<float>(shape_.V)
        .add<float>(shape_.V)
        .add<float>(scales_a_row_)
        .add<std::uint16_t>(n_scales_)
        .n_bytes();
  }

  void encode(int head, const float* X, std::uint8_t* page, std::uint64_t,
              CodecScratch scratch) const override {
    ScratchCursor cursor(scratch);
    std::uint8_t* const codes = cursor.take<std::uint8_t>(n_values_);
    float* const peak = cursor.take<float>(shape_.V);
    float* const scale = cursor.take<float>(shape_.V);
    float* const tile_value = cursor.take<float>(scales_a_row_);
    std::uint16_t* const stored = cursor.take<std::uint16_t>(n_scales_);

    std::uint16_t* next_scale = stored;
    for (int i = 0; i < shape_.K; i += tile_.rows, next_scale += scales_a_row_) {
      const int n_rows = std::min(tile_.rows, shape_.K - i);
      const float* const rows = X + std::int64_t{i} * shape_.V;
      // Peaks of columns, then of the columns of a tile (in place: a tile is never left of its
      // index).
      if (n_rows == 1 && tile_.columns > 1) {
        tile_peaks(rows, peak);
      } else {
        column_peaks(rows, n_rows, shape_.V, peak);
        if (tile_.columns > 1) tile_peaks(peak, peak);
      }
      make_scales(peak, scales_a_row_, static_cast<float>(limit_), next_scale, tile_value);
      quantise_rows(rows, widen(tile_value, scale), n_rows, shape_.V, limit_,
                    codes + std::int64_t{i} * shape_.V);
    }
    std::uint8_t* const out = page + head * head_bytes_;
    pack_codes(codes, n_values_, bits_, out);
    std::memcpy(out + code_bytes_, stored, static_cast<std::size_t>(2 * n_scales_));
  }

  void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const override {
    ScratchCursor cursor(scratch);
    std::int8_t* const codes = cursor.take<std::int8_t>(n_values_);
    cursor.take<float>(shape_.V);
    float* const scale = cursor.take<float>(shape_.V);
    float* const tile_value = cursor.take<float>(scales_a_row_);
    std::uint16_t* const stored = cursor.take<std::uint16_t>(n_scales_);

    const std::uint8_t* const in = page + head * head_bytes_;
    unpack_signed(in, n_values_, bits_, codes);
    std::memcpy(stored, in + code_bytes_, static_cast<std::size_t>(2 * n_scales_));
    const std::uint16_t* next_scale = stored;
    for (int i = 0; i < shape_.K; i += tile_.rows, next_scale += scales_a_row_) {
      load_scales(next_scale, scales_a_row_, tile_value);
      dequantise_rows(codes + std::int64_t{i} * shape_.V, widen(tile_value, scale),
                      std::min(tile_.rows, shape_.K - i), shape_.V, X + std::int64_t{i} * shape_.V);
    }
  }

  // Only one scale a row, which is what kernels elsewhere know.
  std::optional<PageMap> page_map() const override {
    if (tile_.rows != 1 || tile_.columns != shape_.V) return std::nullopt;
    PageMap map{.family = PageFamily::kInt};
    for (int h = 0; h < shape_.n_value_heads; ++h) {
      map.heads.push_back({.codes = h * head_bytes_,
                           .code_bytes = head_bytes_,
                           .row_scales = h * head_bytes_ + code_bytes_,
                           .n_row_scales = static_cast<std::int32_t>(n_scales_),
                           .bits = bits_});
    }
    return map;
  }

 private:
  void tile_peaks(const float* row, float* peak) const {
    for (int t = 0; t < scales_a_row_; ++t) {
      const int j = t * tile_.columns;
      peak[t] = peak_of(row + j, std::min(tile_.columns, shape_.V - j));
    }
  }

  // One scale a column out of one a tile.
  const float* widen(const float* tile_value, float* scale) const {
    if (tile_.columns == 1) return tile_value;
    for (int t = 0; t < scales_a_row_; ++t) {
      const int j = t * tile_.columns;
      std::fill(scale + j, scale + std::min(j + tile_.columns, shape_.V), tile_value[t]);
    }
    return scale;
  }

  LayerShape shape_;
  int bits_;
  int limit_;  // L
  Tile tile_;
  int scales_a_row_;
  std::int64_t n_values_, code_bytes_, n_scales_, head_bytes_;  // of a head
};

Status validate(const CodecConfig& config) {
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

template <int kBits>
Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  SP_RETURN_IF_ERROR(validate(config));
  const std::string& layout = option(config, "layout");
  Tile tile{1, shape.V};  // row
  if (layout == "column") tile = {shape.K, 1};
  if (layout == "tensor") tile = {shape.K, shape.V};
  if (layout == "group") {
    SP_ASSIGN_OR_RETURN(const int width, int_option(config, "group", 1, kMaxGroup));
    tile = option(config, "axis") == "value" ? Tile{1, std::min(width, shape.V)}
                                             : Tile{std::min(width, shape.K), 1};
  }
  return std::unique_ptr<LayerCodec>(std::make_unique<IntCodec>(shape, kBits, tile));
}

template <int kBits>
CodecInfo int_info(std::string_view name, std::uint16_t id, std::string_view help) {
  return {
      .name = name,
      .id = id,
      .help = help,
      .args = {},
      .options = {{"layout", "row|column|tensor|group", "the values that share a scale"},
                  {"group", "none|1..65536", "width of a group, with layout=group"},
                  {"axis", "value|key", "a group runs along values of a row or keys of a column"}},
      .plan_kind = [](const CodecConfig&) -> std::string_view { return ""; },
      .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
      .default_option =
          [](std::string_view, std::string_view key) {
            return std::string(key == "layout" ? "row" : key == "group" ? "none" : "value");
          },
      .validate = validate,
      .make = make<kBits>,
  };
}

}  // namespace

const CodecInfo kInt8Info = int_info<8>("int8", 4, "8-bit integers, absmax scale a row");
const CodecInfo kInt6Info = int_info<6>("int6", 5, "6-bit integers, absmax scale a row");
const CodecInfo kInt5Info = int_info<5>("int5", 6, "5-bit integers, absmax scale a row");
const CodecInfo kInt4Info = int_info<4>("int4", 7, "4-bit integers, absmax scale a row");

}  // namespace statepack
