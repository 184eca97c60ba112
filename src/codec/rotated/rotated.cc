#include "codec/rotated/rotated.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "base/lane_sum.hpp"
#include "base/simd_clones.hpp"
#include "codec/options.hpp"
#include "codec/pack.hpp"
#include "codec/quantise.hpp"
#include "codec/rotated/hadamard.hpp"
#include "codec/scale.hpp"
#include "codec/scratch.hpp"
#include "codec/tiles.hpp"

namespace statepack {
namespace {

// Positive codewords for 2, 3, ..., 8 bits, one set behind the other: b bits start at 2^(b-1) - 2.
constexpr float kCodewords[] = {
#include "codec/rotated/lloyd_max.inc"
};
static_assert(std::size(kCodewords) == 254);

const float* codewords(int bits) { return kCodewords + (1 << (bits - 1)) - 2; }

SP_CLONES float norm_squared(const float* x, std::int64_t n) { return lane_dot(x, x, n); }

SP_CLONES void divide(float* x, float by, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) x[j] /= by;
}

SP_CLONES void multiply_by(float* x, float by, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) x[j] *= by;
}

// z[j] = signs[j] x[j] factor
SP_CLONES void flip_and_scale(const float* x, const float* signs, float factor, std::int64_t n,
                              float* z) {
  for (std::int64_t j = 0; j < n; ++j) z[j] = signs[j] * x[j] * factor;
}

// codes[j] = the nearest codeword of y[j]: sign in the highest bit, then the index of the magnitude
// among the positive words, found by halving. thresholds[i] lies between words i and i + 1; a
// magnitude on it takes the upper.
SP_CLONES void nearest_words(const float* y, std::int64_t n, const float* thresholds, int bits,
                             std::uint8_t* codes) {
  for (std::int64_t j = 0; j < n; ++j) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(y[j]);
    const float a = std::bit_cast<float>(u & 0x7fffffffu);
    int index = 0;
    for (int half = 1 << (bits - 2); half > 0; half /= 2) {
      index += a >= thresholds[index + half - 1] ? half : 0;
    }
    codes[j] =
        static_cast<std::uint8_t>((u >> 31) << (bits - 1) | static_cast<std::uint32_t>(index));
  }
}

// R is a sign flip and a Hadamard transform, other signs for each head: random to the data, and
// fixed.
//
//   turboquant   n = f16(||x||)   y = R x / n   code = nearest word of sqrt(V) y
//                x^ = n R^T (word / sqrt(V))
//   quarot       y = R x   s = f16(absmax y / L)   c = clamp(rne(y / s), -L, L)   x^ = R^T (s c)
//
// A row without length has norm 0 and restores to 0.
//
// Page: for each head its codes, row-major [K][V] as one run (turboquant: sign and index; quarot:
// two's complement), then f16 norms or scales [K].
class RotatedCodec final : public LayerCodec {
 public:
  RotatedCodec(const LayerShape& shape, int bits, bool words)
      : shape_(shape),
        bits_(bits),
        words_(words),
        n_values_(std::int64_t{shape.K} * shape.V),
        code_bytes_(packed_bytes(n_values_, bits)),
        head_bytes_(code_bytes_ + 2 * std::int64_t{shape.K}) {
    for (int h = 0; h < shape.n_value_heads; ++h) {
      signs_.push_back(random_signs(shape.V, static_cast<std::uint64_t>(h)));
    }
    if (!words) return;
    const float* const word = codewords(bits);
    for (int i = 0; i + 1 < 1 << (bits - 1); ++i) {
      thresholds_.push_back(0.5f * (word[i] + word[i + 1]));
    }
    const float root = std::sqrt(static_cast<float>(shape.V));
    for (int code = 0; code < 1 << bits; ++code) {
      const float size = word[code & ((1 << (bits - 1)) - 1)] / root;
      restored_.push_back(code >> (bits - 1) != 0 ? -size : size);
    }
  }

  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override {
    return {.codes = code_bytes_ * shape_.n_value_heads,
            .scales = (head_bytes_ - code_bytes_) * shape_.n_value_heads};
  }
  std::size_t scratch_bytes() const override {
    return ScratchSize()
        .add<std::uint8_t>(n_values_)
        .add<float>(shape_.V)
        .add<float>(shape_.V)
        .n_bytes();
  }

  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext&,
              CodecScratch scratch) const override {
    ScratchCursor cursor(scratch);
    std::uint8_t* const codes = cursor.take<std::uint8_t>(n_values_);
    float* const y = cursor.take<float>(shape_.V);
    float* const step = cursor.take<float>(shape_.V);
    const std::int64_t V = shape_.V;
    const float* const signs = signs_[static_cast<std::size_t>(head)].data();
    std::uint8_t* const out = page + head * head_bytes_;
    for (std::int64_t i = 0; i < shape_.K; ++i) {
      flip_signs(X + i * V, signs, V, y);
      std::uint16_t half;
      if (words_) {
        half = saturate_to_f16(std::sqrt(norm_squared(y, V)));
        const float norm = f16_to_f32(half);
        if (norm > 0) divide(y, norm, V);
        hadamard(y, V);
        multiply_by(y, std::sqrt(static_cast<float>(V)), V);
        nearest_words(y, V, thresholds_.data(), bits_, codes + i * V);
      } else {
        hadamard(y, V);
        const float L = static_cast<float>((1 << (bits_ - 1)) - 1);
        half = encode_scale(peak_of(y, V) / L);
        std::fill_n(step, V, f16_to_f32(half));
        quantise_rows(y, step, 1, V, static_cast<int>(L), codes + i * V);
      }
      std::memcpy(out + code_bytes_ + 2 * i, &half, sizeof half);
    }
    pack_codes(codes, n_values_, bits_, out);
  }

  void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const override {
    ScratchCursor cursor(scratch);
    std::uint8_t* const codes = cursor.take<std::uint8_t>(n_values_);
    float* const y = cursor.take<float>(shape_.V);
    float* const step = cursor.take<float>(shape_.V);
    const std::int64_t V = shape_.V;
    const std::uint8_t* const in = page + head * head_bytes_;
    if (words_) {
      unpack_codes(in, n_values_, bits_, codes);
    } else {
      unpack_signed(in, n_values_, bits_, reinterpret_cast<std::int8_t*>(codes));
    }
    const float* const signs = signs_[static_cast<std::size_t>(head)].data();
    for (std::int64_t i = 0; i < shape_.K; ++i) {
      std::uint16_t half;
      std::memcpy(&half, in + code_bytes_ + 2 * i, sizeof half);
      const float scale = f16_to_f32(half);
      if (words_) {
        for (std::int64_t j = 0; j < V; ++j) y[j] = restored_[codes[i * V + j]];
      } else {
        std::fill_n(step, V, scale);
        dequantise_rows(reinterpret_cast<const std::int8_t*>(codes) + i * V, step, 1, V, y);
      }
      hadamard(y, V);
      flip_and_scale(y, signs, words_ ? scale : 1.0f, V, X + i * V);
    }
  }

 private:
  LayerShape shape_;
  int bits_;
  bool words_;                                       // turboquant
  std::int64_t n_values_, code_bytes_, head_bytes_;  // of a head
  std::vector<std::vector<float>> signs_;            // [HV][V]
  std::vector<float> thresholds_;                    // between positive codewords
  std::vector<float> restored_;                      // [2^bits] codeword / sqrt(V) of each code
};

template <bool kWords>
Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  return std::unique_ptr<LayerCodec>(
      std::make_unique<RotatedCodec>(shape, config.arg[0] - '0', kWords));
}

CodecInfo rotated_info(std::string_view name, std::uint16_t id, std::string_view help,
                       std::vector<std::string_view> args, decltype(CodecInfo::make) make_codec) {
  return {
      .name = name,
      .id = id,
      .help = help,
      .args = std::move(args),
      .options = {},
      .plan_kind = [](const CodecConfig&) -> std::string_view { return ""; },
      .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
      .default_option = [](const CodecConfig&, std::string_view) { return std::string(); },
      .validate = [](const CodecConfig&) { return Status(); },
      .make = make_codec,
  };
}

}  // namespace

const CodecInfo kTurboquantInfo =
    rotated_info("turboquant", 19, "rotated rows, norms, and one least-squares codebook",
                 {"4", "8", "6", "5", "3", "2"}, make<true>);
const CodecInfo kQuarotInfo = rotated_info(
    "quarot", 20, "rotated rows, integers, absmax scale a row", {"4", "8", "6", "5"}, make<false>);

}  // namespace statepack
