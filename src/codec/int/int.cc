#include "codec/int/int.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "codec/options.hpp"
#include "codec/pack.hpp"
#include "codec/philox.hpp"
#include "codec/quantise.hpp"
#include "codec/scale.hpp"
#include "codec/scratch.hpp"
#include "codec/tiles.hpp"

namespace statepack {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();

// codes[j] = clamp(floor(x[j] / s[j] + u_j), -L, L), u_j = numbers[j] / 2^32 to 24 bits.
SP_CLONES void round_either_way(const float* __restrict x, const float* __restrict s,
                                const std::uint32_t* __restrict numbers, std::int64_t n, float L,
                                std::uint8_t* __restrict codes) {
  for (std::int64_t j = 0; j < n; ++j) {
    const float u = static_cast<float>(static_cast<std::int32_t>(numbers[j] >> 8)) * 0x1p-24f;
    const float y = clamp_to(x[j] / s[j], -L - 1, L) + u;
    const float nearest = rne(y);
    const float below = nearest > y ? nearest - 1.0f : nearest;
    codes[j] = static_cast<std::uint8_t>(static_cast<std::int32_t>(clamp_to(below, -L, L)));
  }
}

// t = x + rho, kept finite whatever bytes rho was read from.
SP_CLONES void add_finite(const float* __restrict x, const float* __restrict rho, std::int64_t n,
                          float* __restrict t) {
  for (std::int64_t j = 0; j < n; ++j) t[j] = clamp_to(x[j] + rho[j], -kLargest, kLargest);
}

// rho = t - s code
SP_CLONES void left_over(const float* __restrict t, const float* __restrict s,
                         const std::uint8_t* __restrict codes, std::int64_t n,
                         float* __restrict rho) {
  for (std::int64_t j = 0; j < n; ++j) {
    rho[j] = t[j] - s[j] * static_cast<float>(static_cast<std::int8_t>(codes[j]));
  }
}

SP_CLONES void round_residual(const float* __restrict x, const float* __restrict s, std::int64_t n,
                              float low, float high, std::uint8_t* __restrict codes) {
  for (std::int64_t j = 0; j < n; ++j) codes[j] = round_code_u8(x[j] / s[j], low, high);
}

enum class Residual : std::uint8_t { kNone, kF32, kF16, kInt8, kInt4, kImplied };

// Sixteenths of a step: |rho| <= s/2 needs -8..8, of which 4 bits hold all but the last.
constexpr float kImpliedSteps = 16, kImpliedLow = -8, kImpliedHigh = 7;

struct Settings {
  int bits = 8;
  bool affine = false;
  ScaleType scale = ScaleType::kF16;
  Rounding rounding = Rounding::kNearest;
  Residual residual = Residual::kNone;
  bool reads_sum = false;
};

// Symmetric  L = 2^(b-1) - 1     s = absmax / L         c = clamp(rne(x / s), -L, L)    x^ = s c
// Affine     L = 2^b - 1         s = (max - min) / L    c = clamp(rne((x - min) / s), 0, L)
//                                                                                 x^ = s c + min
// Feedback   T = X + rho_{t-1}   as symmetric of T      rho_t = T - s c
//            rho is stored, too; the recurrence sees s c alone. With reads=sum it sees s c + rho,
//            and T = X: a state of more bits, the control of what feedback does.
//
// Page: for each head its codes, row-major [K][V] as one run of b-bit numbers (two's complement, or
// unsigned where affine); its scales, row-major over tiles; its minima, likewise; the residual:
// values [K][V], or one run of 8- or 4-bit two's complement numbers and then their scales, by
// tiles.
class IntCodec final : public LayerCodec {
 public:
  IntCodec(const LayerShape& shape, const Tiles& tiles, const Settings& settings)
      : shape_(shape),
        tiles_(tiles),
        settings_(settings),
        limit_(settings.affine ? (1 << settings.bits) - 1 : (1 << (settings.bits - 1)) - 1),
        n_values_(std::int64_t{shape.K} * shape.V),
        scales_at_(packed_bytes(n_values_, settings.bits)),
        minima_at_(scales_at_ + scale_bytes(settings.scale) * tiles.n()),
        residual_at_(minima_at_ + (settings.affine ? scale_bytes(settings.scale) * tiles.n() : 0)),
        residual_scales_at_(residual_at_ + residual_bytes()),
        head_bytes_(residual_scales_at_ +
                    (residual_limit() > 0 ? scale_bytes(settings.scale) * tiles.n() : 0)) {}

  const LayerShape& shape() const override { return shape_; }

  PayloadBytes payload() const override {
    const std::int64_t HV = shape_.n_value_heads;
    PayloadBytes bytes;
    bytes.codes = HV * (scales_at_ + residual_bytes());
    bytes.zero_points = HV * (residual_at_ - minima_at_);
    bytes.scales = HV * head_bytes_ - bytes.codes - bytes.zero_points;
    return bytes;
  }

  std::size_t scratch_bytes() const override {
    ScratchSize size;
    Arrays(*this, [&]<class T>(T*&, std::int64_t n) { size.add<T>(n); });
    return size.n_bytes();
  }

  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext& at,
              CodecScratch scratch) const override {
    const Arrays a(*this, scratch);
    const float* T = X;
    if (settings_.rounding == Rounding::kFeedback && !settings_.reads_sum && at.before != nullptr) {
      load_residual(at.before + head * head_bytes_, a);
      add_finite(X, a.rho, n_values_, a.t);
      T = a.t;
    }
    if (settings_.rounding == Rounding::kStochastic) draw(at, head, n_values_, a.numbers);

    std::uint8_t* const out = page + head * head_bytes_;
    std::uint8_t* scale_to = out + scales_at_;
    std::uint8_t* minimum_to = out + minima_at_;
    const std::int64_t step = scale_bytes(settings_.scale) * tiles_.across();
    for (int i = 0; i < shape_.K; i += tiles_.rows, scale_to += step, minimum_to += step) {
      encode_band(T + std::int64_t{i} * shape_.V, i, a, scale_to, minimum_to);
    }
    pack_codes(a.codes, n_values_, settings_.bits, out);
    if (settings_.rounding == Rounding::kFeedback) store_residual(out, a);
  }

  bool encode_rows(int head, RowSource& X, std::uint8_t* page,
                   CodecScratch scratch) const override {
    if (!halves_by_row()) return false;
    const Arrays a(*this, scratch);
    std::uint8_t* const out = page + head * head_bytes_;
    std::uint8_t* const codes = settings_.bits == 8 ? out : a.codes;
    const std::int64_t V = shape_.V;
    for (int i = 0; i < shape_.K; i += RowSource::kMaxRows) {
      const int n_rows = std::min(RowSource::kMaxRows, shape_.K - i);
      const float* const x = X.rows(i, n_rows);
      float peak[RowSource::kMaxRows], scale[RowSource::kMaxRows];
      row_peaks(x, n_rows, V, peak);
      store_scales(ScaleType::kF16, peak, n_rows, static_cast<float>(limit_),
                   out + scales_at_ + 2 * i, scale);
      quantise_by_rows(x, scale, n_rows, V, limit_, codes + i * V);
    }
    if (codes != out) pack_codes(codes, n_values_, settings_.bits, out);
    return true;
  }

  bool decode_rows(int head, const std::uint8_t* page, int begin, int n, float* X) const override {
    if (!halves_by_row() || settings_.bits != 8) return false;
    const std::uint8_t* const in = page + head * head_bytes_;
    float scale[RowSource::kMaxRows];
    load_values(ScaleType::kF16, in + scales_at_ + 2 * begin, n, scale);
    dequantise_by_rows(reinterpret_cast<const std::int8_t*>(in) + std::int64_t{begin} * shape_.V,
                       scale, n, shape_.V, X);
    return true;
  }

  void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const override {
    const Arrays a(*this, scratch);
    const std::uint8_t* const in = page + head * head_bytes_;
    if (settings_.affine) {
      unpack_codes(in, n_values_, settings_.bits, a.codes);
    } else {
      unpack_signed(in, n_values_, settings_.bits, reinterpret_cast<std::int8_t*>(a.codes));
    }
    const std::int64_t step = scale_bytes(settings_.scale) * tiles_.across();
    const std::uint8_t* scale_from = in + scales_at_;
    const std::uint8_t* minimum_from = in + minima_at_;
    for (int i = 0; i < shape_.K; i += tiles_.rows, scale_from += step, minimum_from += step) {
      const std::int64_t from = std::int64_t{i} * shape_.V;
      load_values(settings_.scale, scale_from, tiles_.across(), a.tile);
      const float* const s = tiles_.widen(a.tile, a.scale);
      if (!settings_.affine) {
        dequantise_rows(reinterpret_cast<const std::int8_t*>(a.codes) + from, s,
                        tiles_.band_rows(i), shape_.V, X + from);
        continue;
      }
      load_values(settings_.scale, minimum_from, tiles_.across(), a.high);
      const float* const low = tiles_.widen(a.high, a.minimum);
      for (int row = 0; row < tiles_.band_rows(i); ++row) {
        const std::int64_t e = from + std::int64_t{row} * shape_.V;
        restore_above(a.codes + e, s, low, shape_.V, X + e);
      }
    }
    if (settings_.reads_sum) {
      load_residual(in, a);
      add_finite(X, a.rho, n_values_, a.t);
      std::memcpy(X, a.t, static_cast<std::size_t>(n_values_) * sizeof(float));
    }
  }

  // Only what kernels elsewhere know.
  std::optional<PageMap> page_map() const override {
    if (!halves_by_row()) return std::nullopt;
    PageMap map{.family = PageFamily::kInt};
    for (int h = 0; h < shape_.n_value_heads; ++h) {
      map.heads.push_back({.codes = h * head_bytes_,
                           .code_bytes = head_bytes_,
                           .row_scales = h * head_bytes_ + scales_at_,
                           .n_row_scales = static_cast<std::int32_t>(tiles_.n()),
                           .bits = settings_.bits});
    }
    return map;
  }

 private:
  /// The usual layout: symmetric codes rounded to nearest, one f16 scale a row.
  bool halves_by_row() const {
    return tiles_.rows == 1 && tiles_.columns == shape_.V && !settings_.affine &&
           settings_.scale == ScaleType::kF16 && settings_.rounding == Rounding::kNearest;
  }

  struct Arrays {
    std::uint8_t* codes;     // [K][V]
    float* peak;             // [V] of a band: peaks or minima
    float* high;             // [V]
    float* tile;             // [V] scales of a band
    float* scale;            // [V]
    float* minimum;          // [V]
    std::uint32_t* numbers;  // [K][V], stochastic
    float* t;                // [K][V], feedback, like the rest
    float* rho;              // [K][V]
    std::uint8_t* residual;  // [K][V]

    template <class Take>
    Arrays(const IntCodec& codec, Take&& take) {
      const std::int64_t V = codec.shape_.V, n = codec.n_values_;
      const bool feedback = codec.settings_.rounding == Rounding::kFeedback;
      take(codes, n);
      for (float** row : {&peak, &high, &tile, &scale, &minimum}) take(*row, V);
      take(numbers, codec.settings_.rounding == Rounding::kStochastic ? drawn(n) : 0);
      take(t, feedback ? n : 0);
      take(rho, feedback ? n : 0);
      take(residual, feedback ? n : 0);
    }
    Arrays(const IntCodec& codec, CodecScratch scratch)
        : Arrays(codec, [cursor = ScratchCursor(scratch)]<class T>(
                            T*& array, std::int64_t n) mutable { array = cursor.take<T>(n); }) {}
  };

  void encode_band(const float* band, int i, const Arrays& a, std::uint8_t* scale_to,
                   std::uint8_t* minimum_to) const {
    const int n_rows = tiles_.band_rows(i), V = shape_.V;
    const std::int64_t n = tiles_.across(), from = std::int64_t{i} * V;
    const float L = static_cast<float>(limit_);
    std::uint8_t* const codes = a.codes + from;
    if (settings_.affine) {
      tiles_.extremes(band, n_rows, a.peak, a.high);
      for (std::int64_t t = 0; t < n; ++t) a.high[t] -= a.peak[t];
      store_scales(settings_.scale, a.high, n, L, scale_to, a.tile);
      store_values(settings_.scale, a.peak, n, minimum_to, a.high);
      const float* const s = tiles_.widen(a.tile, a.scale);
      const float* const low = tiles_.widen(a.high, a.minimum);
      for (int row = 0; row < n_rows; ++row) {
        quantise_above(band + std::int64_t{row} * V, s, low, V, limit_,
                       codes + std::int64_t{row} * V);
      }
      return;
    }
    tiles_.peaks(band, n_rows, a.peak);
    store_scales(settings_.scale, a.peak, n, L, scale_to, a.tile);
    const float* const s = tiles_.widen(a.tile, a.scale);
    if (settings_.rounding != Rounding::kStochastic && settings_.scale == ScaleType::kF16) {
      quantise_rows(band, s, n_rows, V, limit_, codes);
    }
    for (int row = 0; row < n_rows; ++row) {
      const std::int64_t e = std::int64_t{row} * V;
      if (settings_.rounding == Rounding::kStochastic) {
        round_either_way(band + e, s, a.numbers + from + e, V, L, codes + e);
      } else if (settings_.scale == ScaleType::kF32) {
        quantise_rows(band + e, s, 1, V, limit_, codes + e);  // several rows would need f16 scales
      }
      if (settings_.rounding == Rounding::kFeedback) {
        left_over(band + e, s, codes + e, V, a.rho + from + e);
      }
    }
  }

  // ---- The residual

  std::int64_t residual_bytes() const {
    switch (settings_.residual) {
      case Residual::kNone:
        return 0;
      case Residual::kF32:
        return 4 * n_values_;
      case Residual::kF16:
        return 2 * n_values_;
      case Residual::kInt8:
        return n_values_;
      case Residual::kInt4:
      case Residual::kImplied:
        break;
    }
    return packed_bytes(n_values_, 4);
  }
  /// Of codes with scales of their own, else 0.
  int residual_limit() const {
    return settings_.residual == Residual::kInt8   ? 127
           : settings_.residual == Residual::kInt4 ? 7
                                                   : 0;
  }

  // From a.rho, behind a head's codes and scales.
  void store_residual(std::uint8_t* out, const Arrays& a) const {
    std::uint8_t* const to = out + residual_at_;
    if (settings_.residual == Residual::kF32 || settings_.residual == Residual::kF16) {
      const bool f16 = settings_.residual == Residual::kF16;
      store_values(f16 ? ScaleType::kF16 : ScaleType::kF32, a.rho, n_values_, to, a.t);
      return;
    }
    const std::int64_t step = scale_bytes(settings_.scale) * tiles_.across();
    const std::uint8_t* scale_from = out + scales_at_;
    std::uint8_t* scale_to = out + residual_scales_at_;
    for (int i = 0; i < shape_.K; i += tiles_.rows, scale_from += step, scale_to += step) {
      const int n_rows = tiles_.band_rows(i);
      const std::int64_t from = std::int64_t{i} * shape_.V;
      const float* const rho = a.rho + from;
      float low = kImpliedLow, high = kImpliedHigh;
      if (settings_.residual == Residual::kImplied) {
        load_values(settings_.scale, scale_from, tiles_.across(), a.tile);
        for (int t = 0; t < tiles_.across(); ++t) a.tile[t] /= kImpliedSteps;
      } else {
        high = static_cast<float>(residual_limit()), low = -high;
        tiles_.peaks(rho, n_rows, a.peak);
        store_scales(settings_.scale, a.peak, tiles_.across(), high, scale_to, a.tile);
      }
      const float* const s = tiles_.widen(a.tile, a.scale);
      for (int row = 0; row < n_rows; ++row) {
        const std::int64_t e = std::int64_t{row} * shape_.V;
        round_residual(rho + e, s, shape_.V, low, high, a.residual + from + e);
      }
    }
    pack_codes(a.residual, n_values_, settings_.residual == Residual::kInt8 ? 8 : 4, to);
  }

  // Into a.rho.
  void load_residual(const std::uint8_t* in, const Arrays& a) const {
    const std::uint8_t* const from = in + residual_at_;
    if (settings_.residual == Residual::kF32 || settings_.residual == Residual::kF16) {
      const bool f16 = settings_.residual == Residual::kF16;
      load_values(f16 ? ScaleType::kF16 : ScaleType::kF32, from, n_values_, a.rho);
      return;
    }
    unpack_signed(from, n_values_, settings_.residual == Residual::kInt8 ? 8 : 4,
                  reinterpret_cast<std::int8_t*>(a.residual));
    const bool implied = settings_.residual == Residual::kImplied;
    const std::int64_t step = scale_bytes(settings_.scale) * tiles_.across();
    const std::uint8_t* scale_from = in + (implied ? scales_at_ : residual_scales_at_);
    for (int i = 0; i < shape_.K; i += tiles_.rows, scale_from += step) {
      const std::int64_t at = std::int64_t{i} * shape_.V;
      load_values(settings_.scale, scale_from, tiles_.across(), a.tile);
      if (implied) {
        for (int t = 0; t < tiles_.across(); ++t) a.tile[t] /= kImpliedSteps;
      }
      dequantise_rows(reinterpret_cast<const std::int8_t*>(a.residual) + at,
                      tiles_.widen(a.tile, a.scale), tiles_.band_rows(i), shape_.V, a.rho + at);
    }
  }

  LayerShape shape_;
  Tiles tiles_;
  Settings settings_;
  int limit_;                                                              // L
  std::int64_t n_values_;                                                  // of a head
  std::int64_t scales_at_, minima_at_, residual_at_, residual_scales_at_;  // in a head's bytes
  std::int64_t head_bytes_;
};

Status validate(const CodecConfig& config) {
  SP_RETURN_IF_ERROR(check_tiles(config));
  for (const std::string_view key : {"code", "scale", "residual", "reads"}) {
    SP_RETURN_IF_ERROR(check_choice(config, key));
  }
  if (config.rounding != Rounding::kNearest && option(config, "code") == "affine") {
    return {Code::kUnsupported, codec_label(config) +
                                    ": code=affine rounds to nearest only; drop rounding= or use "
                                    "code=symmetric"};
  }
  const bool feedback = config.rounding == Rounding::kFeedback;
  if (feedback == (option(config, "residual") == "none")) {
    return {
        Code::kInvalidArgument,
        codec_label(config) + (feedback ? ": rounding=feedback keeps a residual; residual=none "
                                          "is not allowed with it"
                                        : ": residual= keeps what rounding=feedback carries on; "
                                          "add that or drop it")};
  }
  if (!feedback && option(config, "reads") != "code") {
    return {Code::kInvalidArgument, codec_label(config) +
                                        ": reads=sum adds the residual of rounding=feedback; add "
                                        "that or drop it"};
  }
  return {};
}

Residual residual_of(const std::string& word) {
  if (word == "f32") return Residual::kF32;
  if (word == "f16") return Residual::kF16;
  if (word == "int8") return Residual::kInt8;
  if (word == "int4") return Residual::kInt4;
  return word == "implied" ? Residual::kImplied : Residual::kNone;
}

template <int kBits>
Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  SP_RETURN_IF_ERROR(validate(config));
  Settings settings;
  settings.bits = kBits;
  settings.affine = option(config, "code") == "affine";
  settings.scale = option(config, "scale") == "f32" ? ScaleType::kF32 : ScaleType::kF16;
  settings.rounding = config.rounding;
  settings.residual = residual_of(option(config, "residual"));
  settings.reads_sum = option(config, "reads") == "sum";
  return std::unique_ptr<LayerCodec>(
      std::make_unique<IntCodec>(shape, tiles_of(config, shape), settings));
}

// Published error feedback has one f32 scale a value channel and a 4-bit residual.
std::string default_option(const CodecConfig& config, std::string_view key) {
  const bool feedback = config.rounding == Rounding::kFeedback;
  if (key == "layout") return feedback ? "column" : "row";
  if (key == "group") return "none";
  if (key == "axis") return "value";
  if (key == "code") return "symmetric";
  if (key == "scale") return feedback ? "f32" : "f16";
  if (key == "residual") return feedback ? "int4" : "none";
  return "code";
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
                  {"axis", "value|key", "a group runs along values of a row or keys of a column"},
                  {"code", "symmetric|affine", "around zero, or above the group's least value"},
                  {"scale", "f16|f32", "how scales (and least values) are stored"},
                  {"residual", "none|f32|f16|int8|int4|implied",
                   "how rounding=feedback keeps what is left over; implied: in 1/16 of a step"},
                  {"reads", "code|sum",
                   "with rounding=feedback, what the recurrence sees: the codes, or the residual "
                   "too"}},
      .plan_kind = [](const CodecConfig&) -> std::string_view { return ""; },
      .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
      .default_option = default_option,
      .validate = validate,
      .make = make<kBits>,
      .roundings = {Rounding::kNearest, Rounding::kStochastic, Rounding::kFeedback},
  };
}

}  // namespace

const CodecInfo kInt8Info = int_info<8>("int8", 4, "8-bit integers, absmax scale a row");
const CodecInfo kInt6Info = int_info<6>("int6", 5, "6-bit integers, absmax scale a row");
const CodecInfo kInt5Info = int_info<5>("int5", 6, "5-bit integers, absmax scale a row");
const CodecInfo kInt4Info = int_info<4>("int4", 7, "4-bit integers, absmax scale a row");

}  // namespace statepack
