#include "codec/fp32/fp32.hpp"

#include <cstring>

#include "codec/options.hpp"

namespace statepack {
namespace {

// Page: f32 [HV][K][V]; it must start at a multiple of 4 bytes for in_place().
class Fp32Codec final : public LayerCodec {
 public:
  explicit Fp32Codec(const LayerShape& shape)
      : shape_(shape), head_bytes_(std::int64_t{shape.K} * shape.V * 4) {}

  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override { return {.codes = head_bytes_ * shape_.n_value_heads}; }
  std::size_t scratch_bytes() const override { return 0; }

  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext&,
              CodecScratch) const override {
    // A step that works in place hands the page itself back.
    std::memmove(page + head * head_bytes_, X, static_cast<std::size_t>(head_bytes_));
  }
  void decode(int head, const std::uint8_t* page, float* X, CodecScratch) const override {
    std::memmove(X, page + head * head_bytes_, static_cast<std::size_t>(head_bytes_));
  }
  float* in_place(int head, std::uint8_t* page) const override {
    return reinterpret_cast<float*>(page + head * head_bytes_);
  }
  std::optional<PageMap> page_map() const override {
    PageMap map{.family = PageFamily::kF32};
    for (int h = 0; h < shape_.n_value_heads; ++h) {
      map.heads.push_back({.codes = h * head_bytes_, .code_bytes = head_bytes_, .bits = 32});
    }
    return map;
  }

 private:
  LayerShape shape_;
  std::int64_t head_bytes_;
};

Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  return std::unique_ptr<LayerCodec>(std::make_unique<Fp32Codec>(shape));
}

}  // namespace

const CodecInfo kFp32Info = {
    .name = "fp32",
    .id = 1,
    .help = "the state in f32, unrounded: the reference",
    .args = {},
    .options = {},
    .plan_kind = [](const CodecConfig&) -> std::string_view { return ""; },
    .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
    .default_option = [](const CodecConfig&, std::string_view) { return std::string(); },
    .validate = [](const CodecConfig&) { return Status(); },
    .make = make,
};

}  // namespace statepack
