#include "codec/minifloat/minifloat.hpp"

#include <cstring>
#include <limits>

#include "base/simd_clones.hpp"
#include "codec/minifloat/formats.hpp"
#include "codec/options.hpp"
#include "codec/pack.hpp"
#include "codec/philox.hpp"
#include "codec/quantise.hpp"
#include "codec/scratch.hpp"
#include "codec/tiles.hpp"

namespace statepack {
namespace {

// What an element of a state becomes: loops over a row with one step a column.
struct Element {
  int bits;
  float largest;
  int exponent;  // floor(log2 largest)
  void (*encode)(const float* x, const float* step, std::int64_t n, float largest,
                 std::uint8_t* codes);
  void (*encode_either)(const float* x, const float* step, const std::uint32_t* numbers,
                        std::int64_t n, float largest, std::uint8_t* codes);
  void (*decode)(const std::uint8_t* codes, const float* step, std::int64_t n, float* x);
};

// target_clones does not go with templates, hence one set of plain functions a format.
#define SP_ELEMENT_LOOPS(Format)                                                                  \
  SP_CLONES void encode_##Format(const float* __restrict x, const float* __restrict step,         \
                                 std::int64_t n, float largest, std::uint8_t* __restrict codes) { \
    for (std::int64_t j = 0; j < n; ++j) {                                                        \
      codes[j] = static_cast<std::uint8_t>(Format::encode(x[j] / step[j], largest));              \
    }                                                                                             \
  }                                                                                               \
  SP_CLONES void encode_either_##Format(const float* __restrict x, const float* __restrict step,  \
                                        const std::uint32_t* __restrict numbers, std::int64_t n,  \
                                        float largest, std::uint8_t* __restrict codes) {          \
    for (std::int64_t j = 0; j < n; ++j) {                                                        \
      codes[j] =                                                                                  \
          static_cast<std::uint8_t>(Format::encode_either(x[j] / step[j], largest, numbers[j]));  \
    }                                                                                             \
  }                                                                                               \
  SP_CLONES void decode_##Format(const std::uint8_t* __restrict codes,                            \
                                 const float* __restrict step, std::int64_t n,                    \
                                 float* __restrict x) {                                           \
    for (std::int64_t j = 0; j < n; ++j) x[j] = step[j] * Format::decode(codes[j]);               \
  }                                                                                               \
  constexpr Element kElement##Format = {                                                          \
      Format::kBits,   kMax##Format,           kExponent##Format,                                 \
      encode_##Format, encode_either_##Format, decode_##Format};

constexpr int kExponentE4m3 = 8, kExponentE5m2 = 15, kExponentE2m3 = 2, kExponentE2m1 = 2;
SP_ELEMENT_LOOPS(E4m3)
SP_ELEMENT_LOOPS(E5m2)
SP_ELEMENT_LOOPS(E2m3)
SP_ELEMENT_LOOPS(E2m1)
#undef SP_ELEMENT_LOOPS

enum class TileScale : std::uint8_t {
  kF16,       // absmax / target
  kF32,       // the same
  kPower,     // 2^e, e = floor(log2 absmax) - exponent of the element, as e + 127 in a byte
  kTwoLevel,  // s t: t = absmax of the head / (448 largest) in f32, s = e4m3(absmax / (largest t))
};

std::int64_t tile_scale_bytes(TileScale scale) {
  return scale == TileScale::kF16 ? 2 : scale == TileScale::kF32 ? 4 : 1;
}

constexpr std::int32_t kPowerBias = 127;

// The stored byte of 2^e for e in [-127, 127], whose least is subnormal as f32.
std::uint8_t power_for(float peak, int element_exponent) {
  const std::int32_t e = (std::bit_cast<std::int32_t>(peak) >> 23) - kPowerBias - element_exponent;
  return static_cast<std::uint8_t>(std::max(e, -kPowerBias) + kPowerBias);
}
float power_value(std::uint8_t stored) {
  return stored == 0 ? 0x1p-127f : std::bit_cast<float>(std::int32_t{stored} << 23);
}

// x^ = step * element(x / step), step from the tile's scale.
//
// Page: for each head its codes, row-major [K][V] as one run (sign in the highest bit), then its
// scales, row-major over tiles; with two levels t behind them.
class MiniFloatCodec final : public LayerCodec {
 public:
  /// `target`: what absmax becomes, for kF16 and kF32.
  MiniFloatCodec(const LayerShape& shape, const Tiles& tiles, const Element& element,
                 TileScale scale, float target, Rounding rounding)
      : shape_(shape),
        tiles_(tiles),
        element_(element),
        scale_(scale),
        target_(target),
        stochastic_(rounding == Rounding::kStochastic),
        n_values_(std::int64_t{shape.K} * shape.V),
        code_bytes_(packed_bytes(n_values_, element.bits)),
        head_scale_at_(code_bytes_ + tile_scale_bytes(scale) * tiles.n()),
        head_bytes_(head_scale_at_ + (scale == TileScale::kTwoLevel ? 4 : 0)) {}

  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override {
    return {.codes = code_bytes_ * shape_.n_value_heads,
            .scales = (head_bytes_ - code_bytes_) * shape_.n_value_heads};
  }
  std::size_t scratch_bytes() const override {
    ScratchSize size;
    Arrays(*this, [&]<class T>(T*&, std::int64_t n) { size.add<T>(n); });
    return size.n_bytes();
  }

  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext& at,
              CodecScratch scratch) const override {
    const Arrays a(*this, scratch);
    if (stochastic_) draw(at, head, n_values_, a.numbers);
    std::uint8_t* const out = page + head * head_bytes_;
    float t = 0;
    if (scale_ == TileScale::kTwoLevel) {
      const float peak = peak_of(X, n_values_);
      store_scales(ScaleType::kF32, &peak, 1, kMaxE4m3 * element_.largest, out + head_scale_at_,
                   &t);
    }
    std::uint8_t* scale_to = out + code_bytes_;
    for (int i = 0; i < shape_.K; i += tiles_.rows) {
      const std::int64_t from = std::int64_t{i} * shape_.V;
      tiles_.peaks(X + from, tiles_.band_rows(i), a.peak);
      store_tile_scales(a.peak, t, scale_to, a.tile);
      scale_to += tile_scale_bytes(scale_) * tiles_.across();
      for (int k = 0; k < tiles_.across(); ++k) {
        if (a.tile[k] == 0) a.tile[k] = std::numeric_limits<float>::infinity();  // a block of zeros
      }
      const float* const step = tiles_.widen(a.tile, a.step);
      for (int row = 0; row < tiles_.band_rows(i); ++row) {
        const std::int64_t e = from + std::int64_t{row} * shape_.V;
        if (stochastic_) {
          element_.encode_either(X + e, step, a.numbers + e, shape_.V, element_.largest,
                                 a.codes + e);
        } else {
          element_.encode(X + e, step, shape_.V, element_.largest, a.codes + e);
        }
      }
    }
    pack_codes(a.codes, n_values_, element_.bits, out);
  }

  void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const override {
    const Arrays a(*this, scratch);
    const std::uint8_t* const in = page + head * head_bytes_;
    unpack_codes(in, n_values_, element_.bits, a.codes);
    float t = 0;
    if (scale_ == TileScale::kTwoLevel) load_values(ScaleType::kF32, in + head_scale_at_, 1, &t);
    const std::uint8_t* scale_from = in + code_bytes_;
    for (int i = 0; i < shape_.K; i += tiles_.rows) {
      load_tile_scales(scale_from, t, a.tile);
      scale_from += tile_scale_bytes(scale_) * tiles_.across();
      const float* const step = tiles_.widen(a.tile, a.step);
      for (int row = 0; row < tiles_.band_rows(i); ++row) {
        const std::int64_t e = (std::int64_t{i} + row) * shape_.V;
        element_.decode(a.codes + e, step, shape_.V, X + e);
      }
    }
  }

 private:
  struct Arrays {
    std::uint8_t* codes;     // [K][V]
    float* peak;             // [V] of a band
    float* tile;             // [V] steps of a band
    float* step;             // [V]
    std::uint32_t* numbers;  // [K][V], stochastic

    template <class Take>
    Arrays(const MiniFloatCodec& codec, Take&& take) {
      take(codes, codec.n_values_);
      for (float** row : {&peak, &tile, &step}) take(*row, codec.shape_.V);
      take(numbers, codec.stochastic_ ? drawn(codec.n_values_) : 0);
    }
    Arrays(const MiniFloatCodec& codec, CodecScratch scratch)
        : Arrays(codec, [cursor = ScratchCursor(scratch)]<class T>(
                            T*& array, std::int64_t n) mutable { array = cursor.take<T>(n); }) {}
  };

  // Of one band: from its peaks to what is stored and the steps that follow from that.
  void store_tile_scales(const float* peak, float t, std::uint8_t* stored, float* step) const {
    const int n = tiles_.across();
    switch (scale_) {
      case TileScale::kF16:
        return store_scales(ScaleType::kF16, peak, n, target_, stored, step);
      case TileScale::kF32:
        return store_scales(ScaleType::kF32, peak, n, target_, stored, step);
      case TileScale::kPower:
        for (int k = 0; k < n; ++k) stored[k] = power_for(peak[k], element_.exponent);
        break;
      case TileScale::kTwoLevel:
        for (int k = 0; k < n; ++k) {
          stored[k] =
              static_cast<std::uint8_t>(E4m3::encode(peak[k] / (element_.largest * t), kMaxE4m3));
        }
        break;
    }
    load_tile_scales(stored, t, step);
  }

  void load_tile_scales(const std::uint8_t* stored, float t, float* step) const {
    const int n = tiles_.across();
    switch (scale_) {
      case TileScale::kF16:
        return load_values(ScaleType::kF16, stored, n, step);
      case TileScale::kF32:
        return load_values(ScaleType::kF32, stored, n, step);
      case TileScale::kPower:
        for (int k = 0; k < n; ++k) step[k] = power_value(stored[k]);
        return;
      case TileScale::kTwoLevel:
        for (int k = 0; k < n; ++k) step[k] = E4m3::decode(stored[k]) * t;
        return;
    }
  }

  LayerShape shape_;
  Tiles tiles_;
  Element element_;
  TileScale scale_;
  float target_;
  bool stochastic_;
  std::int64_t n_values_, code_bytes_, head_scale_at_, head_bytes_;  // of a head
};

// ---------------------------------------------------------------------------------------------
// fp8

constexpr int kTileColumns = 32;
constexpr float kTileTarget = 240.0f;  // below 448, so that a tile's next values have room

Status validate_fp8(const CodecConfig& config) {
  SP_RETURN_IF_ERROR(check_tiles(config));
  for (const std::string_view key : {"format", "scale"}) {
    SP_RETURN_IF_ERROR(check_choice(config, key));
  }
  if (option(config, "layout") == "tile" && option(config, "format") != "e4m3") {
    return {Code::kUnsupported, codec_label(config) +
                                    ": layout=tile leaves head room that is defined for e4m3 only; "
                                    "use another layout"};
  }
  return {};
}

Result<std::unique_ptr<LayerCodec>> make_fp8(const CodecConfig& config, const LayerShape& shape,
                                             const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  SP_RETURN_IF_ERROR(validate_fp8(config));
  const bool e4m3 = option(config, "format") == "e4m3";
  const Element& element = e4m3 ? kElementE4m3 : kElementE5m2;
  Tiles tiles = tiles_of(config, shape);
  float target = element.largest;
  if (option(config, "layout") == "tile") {
    tiles.rows = shape.K;
    tiles.columns = std::min(kTileColumns, shape.V);
    target = kTileTarget;
  }
  const TileScale scale = option(config, "scale") == "f32" ? TileScale::kF32 : TileScale::kF16;
  return std::unique_ptr<LayerCodec>(
      std::make_unique<MiniFloatCodec>(shape, tiles, element, scale, target, config.rounding));
}

// ---------------------------------------------------------------------------------------------
// Blocks

constexpr int kMaxBlock = 65536;

Status validate_blocks(const CodecConfig& config) {
  SP_RETURN_IF_ERROR(int_option(config, "group", 1, kMaxBlock).status());
  return check_choice(config, "axis");
}

template <const Element& kElement, TileScale kScale>
Result<std::unique_ptr<LayerCodec>> make_blocks(const CodecConfig& config, const LayerShape& shape,
                                                const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  SP_RETURN_IF_ERROR(validate_blocks(config));
  SP_ASSIGN_OR_RETURN(const int group, int_option(config, "group", 1, kMaxBlock));
  Tiles tiles{shape.K, shape.V, 1, std::min(group, shape.V)};
  if (option(config, "axis") == "key") {
    tiles.rows = std::min(group, shape.K);
    tiles.columns = 1;
  }
  return std::unique_ptr<LayerCodec>(
      std::make_unique<MiniFloatCodec>(shape, tiles, kElement, kScale, 0.0f, config.rounding));
}

template <const Element& kElement, TileScale kScale>
CodecInfo block_info(std::string_view name, std::uint16_t id, std::string_view help) {
  return {
      .name = name,
      .id = id,
      .help = help,
      .args = {},
      .options = {{"group", "1..65536", "values that share a scale"},
                  {"axis", "value|key", "a group runs along values of a row or keys of a column"}},
      .plan_kind = [](const CodecConfig&) -> std::string_view { return ""; },
      .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
      .default_option =
          [](const CodecConfig&, std::string_view key) {
            return std::string(key == "axis"                    ? "value"
                               : kScale == TileScale::kTwoLevel ? "16"
                                                                : "32");
          },
      .validate = validate_blocks,
      .make = make_blocks<kElement, kScale>,
      .roundings = {Rounding::kNearest, Rounding::kStochastic},
  };
}

}  // namespace

const CodecInfo kFp8Info = {
    .name = "fp8",
    .id = 13,
    .help = "8-bit floats (E4M3 or E5M2), absmax scale a tile of 32 columns, row, column or group",
    .args = {},
    .options = {{"layout", "tile|row|column|tensor|group",
                 "the values that share a scale; tile: 32 columns, with head room"},
                {"group", "none|1..65536", "width of a group, with layout=group"},
                {"axis", "value|key", "a group runs along values of a row or keys of a column"},
                {"format", "e4m3|e5m2", "exponent and mantissa bits"},
                {"scale", "f16|f32", "how scales are stored"}},
    .plan_kind = [](const CodecConfig&) -> std::string_view { return ""; },
    .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
    .default_option =
        [](const CodecConfig& config, std::string_view key) {
          if (key == "layout") return std::string("tile");
          if (key == "group") return std::string("none");
          if (key == "axis") return std::string("value");
          if (key == "format") return std::string("e4m3");
          const std::string& layout = option(config, "layout");
          return std::string(layout == "tile" || layout == "tensor" ? "f32" : "f16");
        },
    .validate = validate_fp8,
    .make = make_fp8,
    .roundings = {Rounding::kNearest, Rounding::kStochastic},
};

const CodecInfo kMxfp8Info = block_info<kElementE4m3, TileScale::kPower>(
    "mxfp8", 14, "8-bit floats (E4M3), a power of two for 32 values");
const CodecInfo kMxfp6Info = block_info<kElementE2m3, TileScale::kPower>(
    "mxfp6", 15, "6-bit floats (E2M3), a power of two for 32 values");
const CodecInfo kMxfp4Info = block_info<kElementE2m1, TileScale::kPower>(
    "mxfp4", 16, "4-bit floats (E2M1), a power of two for 32 values");
const CodecInfo kNvfp6Info = block_info<kElementE2m3, TileScale::kTwoLevel>(
    "nvfp6", 17, "6-bit floats (E2M3), an E4M3 scale for 16 values and one f32 scale a head");
const CodecInfo kNvfp4Info = block_info<kElementE2m1, TileScale::kTwoLevel>(
    "nvfp4", 18, "4-bit floats (E2M1), an E4M3 scale for 16 values and one f32 scale a head");

}  // namespace statepack
