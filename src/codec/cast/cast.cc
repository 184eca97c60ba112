#include "codec/cast/cast.hpp"

#include <algorithm>
#include <cstring>

#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "codec/minifloat/formats.hpp"
#include "codec/options.hpp"
#include "codec/philox.hpp"
#include "codec/scale.hpp"
#include "codec/scratch.hpp"

namespace statepack {
namespace {

// Halves go through memcpy: a page need not be aligned, and the loops vectorise all the same.

// Nearest even; the few f32 that would round to Inf take the largest finite value instead.
SP_CLONES void to_bf16(const float* __restrict x, std::int64_t n, std::uint8_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(x[i]);
    const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const std::uint32_t is_inf = (rounded & 0x7fffu) == 0x7f80u ? 1u : 0u;
    const std::uint16_t half = static_cast<std::uint16_t>(rounded - is_inf);
    std::memcpy(out + 2 * i, &half, 2);
  }
}

SP_CLONES void from_bf16(const std::uint8_t* __restrict in, std::int64_t n, float* __restrict x) {
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint16_t half;
    std::memcpy(&half, in + 2 * i, 2);
    x[i] = bf16_to_f32(half);
  }
}

SP_CLONES void to_fp16(const float* __restrict x, std::int64_t n, std::uint8_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint16_t half = saturate_to_f16(x[i]);
    std::memcpy(out + 2 * i, &half, 2);
  }
}

SP_CLONES void from_fp16(const std::uint8_t* __restrict in, std::int64_t n, float* __restrict x) {
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint16_t half;
    std::memcpy(&half, in + 2 * i, 2);
    x[i] = f16_to_f32(half);
  }
}

// Either neighbour: 16 random bits are added to those that bfloat16 drops, which are then cut off.
SP_CLONES void to_bf16_either(const float* __restrict x, const std::uint32_t* __restrict numbers,
                              std::int64_t n, std::uint8_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(x[i]);
    const std::uint32_t rounded = (u + (numbers[i] >> 16)) >> 16;
    const std::uint32_t is_inf = (rounded & 0x7fffu) == 0x7f80u ? 1u : 0u;
    const std::uint16_t half = static_cast<std::uint16_t>(rounded - is_inf);
    std::memcpy(out + 2 * i, &half, 2);
  }
}

SP_CLONES void to_fp16_either(const float* __restrict x, const std::uint32_t* __restrict numbers,
                              std::int64_t n, std::uint8_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint16_t half =
        static_cast<std::uint16_t>(F16::encode_either(x[i], kMaxScale, numbers[i]));
    std::memcpy(out + 2 * i, &half, 2);
  }
}

/// What makes a format.
struct Cast {
  PageFamily family;
  void (*pack)(const float*, std::int64_t, std::uint8_t*);
  void (*pack_either)(const float*, const std::uint32_t*, std::int64_t, std::uint8_t*);
  void (*unpack)(const std::uint8_t*, std::int64_t, float*);
};
constexpr Cast kBf16 = {PageFamily::kBf16, to_bf16, to_bf16_either, from_bf16};
constexpr Cast kFp16 = {PageFamily::kF16, to_fp16, to_fp16_either, from_fp16};

// Page: 16-bit values [HV][K][V].
class CastCodec final : public LayerCodec {
 public:
  CastCodec(const LayerShape& shape, const Cast& cast, Rounding rounding)
      : shape_(shape),
        cast_(cast),
        stochastic_(rounding == Rounding::kStochastic),
        n_values_(std::int64_t{shape.K} * shape.V) {}

  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override { return {.codes = 2 * n_values_ * shape_.n_value_heads}; }
  std::size_t scratch_bytes() const override {
    return stochastic_ ? ScratchSize().add<std::uint32_t>(drawn(n_values_)).n_bytes() : 0;
  }

  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext& at,
              CodecScratch scratch) const override {
    std::uint8_t* const out = page + 2 * n_values_ * head;
    if (!stochastic_) return cast_.pack(X, n_values_, out);
    std::uint32_t* const numbers = ScratchCursor(scratch).take<std::uint32_t>(drawn(n_values_));
    draw(at, head, n_values_, numbers);
    cast_.pack_either(X, numbers, n_values_, out);
  }
  bool encode_rows(int head, RowSource& X, std::uint8_t* page, CodecScratch) const override {
    if (stochastic_) return false;
    std::uint8_t* out = page + 2 * n_values_ * head;
    for (int i = 0; i < shape_.K; i += RowSource::kMaxRows) {
      const int n_rows = std::min(RowSource::kMaxRows, shape_.K - i);
      const std::int64_t n = std::int64_t{n_rows} * shape_.V;
      cast_.pack(X.rows(i, n_rows), n, out);
      out += 2 * n;
    }
    return true;
  }
  void decode(int head, const std::uint8_t* page, float* X, CodecScratch) const override {
    cast_.unpack(page + 2 * n_values_ * head, n_values_, X);
  }
  bool decode_rows(int head, const std::uint8_t* page, int begin, int n, float* X) const override {
    const std::int64_t V = shape_.V;
    cast_.unpack(page + 2 * (n_values_ * head + begin * V), n * V, X);
    return true;
  }
  std::optional<PageMap> page_map() const override {
    if (stochastic_) return std::nullopt;
    PageMap map{.family = cast_.family};
    for (int h = 0; h < shape_.n_value_heads; ++h) {
      map.heads.push_back({.codes = 2 * n_values_ * h, .code_bytes = 2 * n_values_, .bits = 16});
    }
    return map;
  }

 private:
  LayerShape shape_;
  Cast cast_;
  bool stochastic_;
  std::int64_t n_values_;  // of a head
};

template <const Cast& kCast>
Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  return std::unique_ptr<LayerCodec>(std::make_unique<CastCodec>(shape, kCast, config.rounding));
}

CodecInfo cast_info(std::string_view name, std::uint16_t id, std::string_view help,
                    decltype(CodecInfo::make) make_codec) {
  return {
      .name = name,
      .id = id,
      .help = help,
      .args = {},
      .options = {},
      .plan_kind = [](const CodecConfig&) -> std::string_view { return ""; },
      .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
      .default_option = [](const CodecConfig&, std::string_view) { return std::string(); },
      .validate = [](const CodecConfig&) { return Status(); },
      .make = make_codec,
      .roundings = {Rounding::kNearest, Rounding::kStochastic},
  };
}

}  // namespace

const CodecInfo kBf16Info = cast_info("bf16", 2, "every value rounded to bfloat16", make<kBf16>);
const CodecInfo kFp16Info =
    cast_info("fp16", 3, "every value rounded to half, saturating at 65504", make<kFp16>);

}  // namespace statepack
