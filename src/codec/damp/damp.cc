#include "codec/damp/damp.hpp"

#include <algorithm>
#include <cstring>

#include "base/half.hpp"
#include "codec/options.hpp"
#include "codec/pack.hpp"
#include "codec/quantise.hpp"
#include "codec/rotated/hadamard.hpp"
#include "codec/scale.hpp"
#include "codec/scratch.hpp"
#include "codec/tiles.hpp"

namespace statepack {
namespace {

constexpr int kProtectedBits = 16;  // what a plan gives to the rows that stay in half precision
constexpr int kGroup = 32;

// Low rows  y = H x along the value axis, then with L = 2^b - 1
//   groups of 32   s = f16((max - min) / L)   c = clamp(rne((y - f16(min)) / s), 0, L)
//                  y^ = s c + f16(min)
//   lean           one group a row that reaches 0: z = clamp(rne(-min / s), 0, L)
//                  c = clamp(rne(y / s) + z, 0, L)   y^ = s (c - z)
//   x^ = H y^
//
// Page: for each head its protected rows as halves, in order; the codes of the others as one run;
// their f16 scales, row by row; their f16 minima likewise, or (lean) their zero points, a byte
// each.
class DampCodec final : public LayerCodec {
 public:
  DampCodec(const LayerShape& shape, int bits, bool lean, const std::vector<std::uint8_t>& widths)
      : shape_(shape), bits_(bits), lean_(lean), low_{1, shape.V, 1, shape.V} {
    if (!lean) low_.columns = std::min(kGroup, shape.V);
    const std::int64_t K = shape.K, V = shape.V;
    for (std::int64_t at = 0; at < K * shape.n_value_heads; ++at) {
      is_protected_.push_back(widths[static_cast<std::size_t>(at)] == kProtectedBits);
    }
    std::int64_t begin = 0;
    for (std::int64_t h = 0; h < shape.n_value_heads; ++h) {
      const auto rows = is_protected_.begin() + h * K;
      Head head;
      head.n_low = std::count(rows, rows + K, false);
      head.begin = begin;
      head.codes = begin + 2 * (K - head.n_low) * V;
      head.scales = head.codes + packed_bytes(head.n_low * V, bits);
      head.zeros = head.scales + 2 * head.n_low * low_.across();
      begin = head.zeros + (lean ? 1 : 2) * head.n_low * low_.across();
      heads_.push_back(head);
      payload_.pivots += head.codes - head.begin;
      payload_.codes += head.scales - head.codes;
      payload_.scales += head.zeros - head.scales;
      payload_.zero_points += begin - head.zeros;
    }
  }

  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override { return payload_; }
  std::size_t scratch_bytes() const override {
    ScratchSize size;
    Arrays(*this, [&]<class T>(T*&, std::int64_t n) { size.add<T>(n); });
    return size.n_bytes();
  }

  void encode(int h, const float* X, std::uint8_t* page, const RoundingContext&,
              CodecScratch scratch) const override {
    const Arrays a(*this, scratch);
    const std::int64_t V = shape_.V, n_groups = low_.across();
    const Head& head = heads_[static_cast<std::size_t>(h)];
    const int L = (1 << bits_) - 1;
    std::uint8_t* half_to = page + head.begin;
    std::int64_t row = 0;
    for (std::int64_t i = 0; i < shape_.K; ++i) {
      const float* const x = X + i * V;
      if (is_protected(h, i)) {
        store_values(ScaleType::kF16, x, V, half_to, a.y);
        half_to += 2 * V;
        continue;
      }
      bound(x, V, a.y);
      hadamard(a.y, V);
      low_.extremes(a.y, 1, a.low, a.high);
      if (lean_) a.low[0] = std::min(a.low[0], 0.0f), a.high[0] = std::max(a.high[0], 0.0f);
      for (std::int64_t g = 0; g < n_groups; ++g) a.high[g] -= a.low[g];
      store_scales(ScaleType::kF16, a.high, n_groups, static_cast<float>(L),
                   page + head.scales + 2 * n_groups * row, a.tile);
      const float* const s = low_.widen(a.tile, a.scale);
      std::uint8_t* const codes = a.codes + row * V;
      if (lean_) {
        const std::uint8_t zero = round_code_u8(-a.low[0] / a.tile[0], 0.0f, static_cast<float>(L));
        page[head.zeros + row] = zero;
        std::fill_n(a.zero, V, zero);
        quantise_rows_affine(a.y, s, a.zero, 1, V, L, codes);
      } else {
        store_values(ScaleType::kF16, a.low, n_groups, page + head.zeros + 2 * n_groups * row,
                     a.high);
        quantise_above(a.y, s, low_.widen(a.high, a.minimum), V, L, codes);
      }
      ++row;
    }
    pack_codes(a.codes, head.n_low * V, bits_, page + head.codes);
  }

  void decode(int h, const std::uint8_t* page, float* X, CodecScratch scratch) const override {
    const Arrays a(*this, scratch);
    const std::int64_t V = shape_.V, n_groups = low_.across();
    const Head& head = heads_[static_cast<std::size_t>(h)];
    unpack_codes(page + head.codes, head.n_low * V, bits_, a.codes);
    const std::uint8_t* half_from = page + head.begin;
    std::int64_t row = 0;
    for (std::int64_t i = 0; i < shape_.K; ++i) {
      float* const x = X + i * V;
      if (is_protected(h, i)) {
        load_values(ScaleType::kF16, half_from, V, x);
        half_from += 2 * V;
        continue;
      }
      load_values(ScaleType::kF16, page + head.scales + 2 * n_groups * row, n_groups, a.tile);
      const float* const s = low_.widen(a.tile, a.scale);
      const std::uint8_t* const codes = a.codes + row * V;
      if (lean_) {
        std::fill_n(a.zero, V, page[head.zeros + row]);
        dequantise_rows_affine(codes, s, a.zero, 1, V, x);
      } else {
        load_values(ScaleType::kF16, page + head.zeros + 2 * n_groups * row, n_groups, a.high);
        restore_above(codes, s, low_.widen(a.high, a.minimum), V, x);
      }
      hadamard(x, V);
      ++row;
    }
  }

 private:
  struct Head {
    std::int64_t begin = 0, codes = 0, scales = 0, zeros = 0;  // offsets in a page
    std::int64_t n_low = 0;                                    // rows that are not protected
  };

  struct Arrays {
    std::uint8_t* codes;  // [K][V]
    float* y;             // [V], like the rest
    float* low;
    float* high;
    float* tile;
    float* scale;
    float* minimum;
    std::uint8_t* zero;

    template <class Take>
    Arrays(const DampCodec& codec, Take&& take) {
      const std::int64_t V = codec.shape_.V;
      take(codes, codec.shape_.K * V);
      for (float** row : {&y, &low, &high, &tile, &scale, &minimum}) take(*row, V);
      take(zero, V);
    }
    Arrays(const DampCodec& codec, CodecScratch scratch)
        : Arrays(codec, [cursor = ScratchCursor(scratch)]<class T>(
                            T*& array, std::int64_t n) mutable { array = cursor.take<T>(n); }) {}
  };

  bool is_protected(int head, std::int64_t row) const {
    return is_protected_[static_cast<std::size_t>(std::int64_t{head} * shape_.K + row)];
  }

  LayerShape shape_;
  int bits_;
  bool lean_;
  Tiles low_;                       // of one low row
  std::vector<bool> is_protected_;  // [HV][K]
  std::vector<Head> heads_;
  PayloadBytes payload_;
};

Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan* plan) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  if (plan == nullptr) {
    return Status(Code::kInvalidArgument,
                  codec_label(config) +
                      ": needs a plan that names the protected rows; make one with `statepack "
                      "calibrate --scheme " +
                      codec_label(config) + "`");
  }
  const std::int64_t n_rows = std::int64_t{shape.n_value_heads} * shape.K;
  if (static_cast<std::int64_t>(plan->bits.size()) != n_rows) {
    return Status(Code::kMismatch, codec_label(config) + ": the plan describes " +
                                       std::to_string(plan->bits.size()) +
                                       " rows of a layer, the model has " + std::to_string(n_rows) +
                                       "; calibrate a plan on this model");
  }
  return std::unique_ptr<LayerCodec>(std::make_unique<DampCodec>(
      shape, config.arg[0] - '0', config.arg.ends_with("lean"), plan->bits));
}

}  // namespace

const CodecInfo kDampInfo = {
    .name = "damp",
    .id = 21,
    .help = "planned key rows in half precision, the others transformed integers",
    .args = {"8", "4", "4-lean"},
    .options = {},
    .plan_kind = [](const CodecConfig&) -> std::string_view { return "damp-rows"; },
    .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
    .default_option = [](const CodecConfig&, std::string_view) { return std::string(); },
    .validate = [](const CodecConfig&) { return Status(); },
    .make = make,
};

}  // namespace statepack
