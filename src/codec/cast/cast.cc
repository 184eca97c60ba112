#include "codec/cast/cast.hpp"

#include <cstring>

#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "codec/options.hpp"
#include "codec/scale.hpp"

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

// Page: 16-bit values [HV][K][V].
class CastCodec final : public LayerCodec {
 public:
  using Pack = void (*)(const float*, std::int64_t, std::uint8_t*);
  using Unpack = void (*)(const std::uint8_t*, std::int64_t, float*);

  CastCodec(const LayerShape& shape, PageFamily family, Pack pack, Unpack unpack)
      : shape_(shape),
        family_(family),
        n_values_(std::int64_t{shape.K} * shape.V),
        pack_(pack),
        unpack_(unpack) {}

  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override { return {.codes = 2 * n_values_ * shape_.n_value_heads}; }
  std::size_t scratch_bytes() const override { return 0; }

  void encode(int head, const float* X, std::uint8_t* page, std::uint64_t,
              CodecScratch) const override {
    pack_(X, n_values_, page + 2 * n_values_ * head);
  }
  void decode(int head, const std::uint8_t* page, float* X, CodecScratch) const override {
    unpack_(page + 2 * n_values_ * head, n_values_, X);
  }
  std::optional<PageMap> page_map() const override {
    PageMap map{.family = family_};
    for (int h = 0; h < shape_.n_value_heads; ++h) {
      map.heads.push_back({.codes = 2 * n_values_ * h, .code_bytes = 2 * n_values_, .bits = 16});
    }
    return map;
  }

 private:
  LayerShape shape_;
  PageFamily family_;
  std::int64_t n_values_;  // of a head
  Pack pack_;
  Unpack unpack_;
};

template <PageFamily kFamily, CastCodec::Pack kPack, CastCodec::Unpack kUnpack>
Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  return std::unique_ptr<LayerCodec>(std::make_unique<CastCodec>(shape, kFamily, kPack, kUnpack));
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
      .default_option = [](std::string_view, std::string_view) { return std::string(); },
      .validate = [](const CodecConfig&) { return Status(); },
      .make = make_codec,
  };
}

}  // namespace

const CodecInfo kBf16Info = cast_info("bf16", 2, "every value rounded to bfloat16",
                                      make<PageFamily::kBf16, to_bf16, from_bf16>);
const CodecInfo kFp16Info = cast_info("fp16", 3, "every value rounded to half, saturating at 65504",
                                      make<PageFamily::kF16, to_fp16, from_fp16>);

}  // namespace statepack
