#include "codec/dsq/dsq.hpp"

#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "codec/options.hpp"
#include "codec/pack.hpp"
#include "codec/quantise.hpp"
#include "codec/scale.hpp"
#include "codec/scratch.hpp"

namespace statepack {
namespace {

// total[j] += |x[j]|
SP_CLONES void add_magnitudes(const float* __restrict x, std::int64_t n, float* __restrict total) {
  for (std::int64_t j = 0; j < n; ++j) total[j] += std::fabs(x[j]);
}

// peak[j] = max(peak[j], |x[j]| / scale)
SP_CLONES void raise_peaks(const float* __restrict x, float scale, std::int64_t n,
                           float* __restrict peak) {
  for (std::int64_t j = 0; j < n; ++j) {
    const float magnitude = std::fabs(x[j]) / scale;
    peak[j] = magnitude > peak[j] ? magnitude : peak[j];
  }
}

// y[j] = x[j] / scale[j]
SP_CLONES void divide(const float* __restrict x, const float* __restrict scale, std::int64_t n,
                      float* __restrict y) {
  for (std::int64_t j = 0; j < n; ++j) y[j] = x[j] / scale[j];
}

// step[j] = a * scale[j], exact: halves have 11 significant bits.
SP_CLONES void multiply(float a, const float* __restrict scale, std::int64_t n,
                        float* __restrict step) {
  for (std::int64_t j = 0; j < n; ++j) step[j] = a * scale[j];
}

float read_half(const std::uint8_t* at) {
  std::uint16_t half;
  std::memcpy(&half, at, 2);
  return f16_to_f32(half);
}

// Two scale vectors a head; L = 2^(b-1) - 1 and h16 rounds to a stored scale:
//
//   r_i = h16(sqrt(mean_j |X_ij|))     c_j = h16(max_i (|X_ij| / r_i) / L)
//   code_ij = clamp(rne(X_ij / (r_i c_j)), -L, L)     X^_ij = r_i c_j code_ij
//
// `swapped` exchanges rows and columns: r from columns, c from rows.
//
// Page: for each head its codes, row-major [K][V] as one run of b-bit two's complement numbers,
// then the f16 scales of its rows [K] and of its columns [V].
class DsqCodec final : public LayerCodec {
 public:
  DsqCodec(const LayerShape& shape, int bits, bool swapped)
      : shape_(shape),
        bits_(bits),
        limit_((1 << (bits - 1)) - 1),
        swapped_(swapped),
        n_values_(std::int64_t{shape.K} * shape.V),
        code_bytes_(packed_bytes(n_values_, bits)),
        head_bytes_(code_bytes_ + 2 * (std::int64_t{shape.K} + shape.V)) {}

  const LayerShape& shape() const override { return shape_; }

  PayloadBytes payload() const override {
    return {.codes = code_bytes_ * shape_.n_value_heads,
            .scales = (head_bytes_ - code_bytes_) * shape_.n_value_heads};
  }

  std::size_t scratch_bytes() const override {
    return ScratchSize()
        .add<std::uint8_t>(n_values_)
        .add<std::uint16_t>(shape_.K)
        .add<std::uint16_t>(shape_.V)
        .add<float>(shape_.K)
        .add<float>(shape_.V)
        .add<float>(shape_.V)
        .n_bytes();
  }

  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext&,
              CodecScratch scratch) const override {
    ScratchCursor cursor(scratch);
    std::uint8_t* const codes = cursor.take<std::uint8_t>(n_values_);
    std::uint16_t* const row_half = cursor.take<std::uint16_t>(shape_.K);
    std::uint16_t* const column_half = cursor.take<std::uint16_t>(shape_.V);
    float* const row_scale = cursor.take<float>(shape_.K);
    float* const column_scale = cursor.take<float>(shape_.V);
    float* const work = cursor.take<float>(shape_.V);
    const std::int64_t K = shape_.K, V = shape_.V;
    const float L = static_cast<float>(limit_);

    if (!swapped_) {
      for (std::int64_t i = 0; i < K; ++i) {
        const float mean = sum_of_magnitudes(X + i * V, V) / static_cast<float>(V);
        row_half[i] = encode_scale(std::sqrt(mean));
        row_scale[i] = f16_to_f32(row_half[i]);
      }
      std::memset(work, 0, static_cast<std::size_t>(V) * sizeof(float));
      for (std::int64_t i = 0; i < K; ++i) raise_peaks(X + i * V, row_scale[i], V, work);
      make_scales(work, V, L, column_half, column_scale);
    } else {
      std::memset(work, 0, static_cast<std::size_t>(V) * sizeof(float));
      for (std::int64_t i = 0; i < K; ++i) add_magnitudes(X + i * V, V, work);
      for (std::int64_t j = 0; j < V; ++j) work[j] = std::sqrt(work[j] / static_cast<float>(K));
      make_scales(work, V, 1.0f, column_half, column_scale);
      for (std::int64_t i = 0; i < K; ++i) {
        divide(X + i * V, column_scale, V, work);
        row_half[i] = encode_scale(peak_of(work, V) / L);
        row_scale[i] = f16_to_f32(row_half[i]);
      }
    }
    for (std::int64_t i = 0; i < K; ++i) {
      multiply(row_scale[i], column_scale, V, work);
      quantise_rows(X + i * V, work, 1, V, limit_, codes + i * V);
    }

    std::uint8_t* out = page + head * head_bytes_;
    pack_codes(codes, n_values_, bits_, out);
    out += code_bytes_;
    std::memcpy(out, row_half, static_cast<std::size_t>(2 * K));
    std::memcpy(out + 2 * K, column_half, static_cast<std::size_t>(2 * V));
  }

  void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const override {
    ScratchCursor cursor(scratch);
    std::int8_t* const codes = cursor.take<std::int8_t>(n_values_);
    cursor.take<std::uint16_t>(shape_.K);
    std::uint16_t* const column_half = cursor.take<std::uint16_t>(shape_.V);
    cursor.take<float>(shape_.K);
    float* const column_scale = cursor.take<float>(shape_.V);
    float* const step = cursor.take<float>(shape_.V);
    const std::int64_t K = shape_.K, V = shape_.V;

    const std::uint8_t* in = page + head * head_bytes_;
    unpack_signed(in, n_values_, bits_, codes);
    in += code_bytes_;
    std::memcpy(column_half, in + 2 * K, static_cast<std::size_t>(2 * V));
    load_scales(column_half, V, column_scale);
    for (std::int64_t i = 0; i < K; ++i) {
      multiply(read_half(in + 2 * i), column_scale, V, step);
      dequantise_rows(codes + i * V, step, 1, V, X + i * V);
    }
  }

 private:
  LayerShape shape_;
  int bits_;
  int limit_;  // L
  bool swapped_;
  std::int64_t n_values_, code_bytes_, head_bytes_;  // of a head
};

Status validate(const CodecConfig& config) { return check_choice(config, "axes"); }

Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  SP_RETURN_IF_ERROR(validate(config));
  const int bits = config.arg[0] - '0';
  const bool swapped = option(config, "axes") == "column-row";
  return std::unique_ptr<LayerCodec>(std::make_unique<DsqCodec>(shape, bits, swapped));
}

}  // namespace

const CodecInfo kDsqInfo = {
    .name = "dsq",
    .id = 8,
    .help = "dual-axis scales of Q-Mamba: root mean of one axis, peak of the other",
    .args = {"8", "6", "4"},
    .options = {{"axes", "row-column|column-row", "axis of the root mean, then axis of the peak"}},
    .plan_kind = [](const CodecConfig&) -> std::string_view { return ""; },
    .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
    .default_option = [](const CodecConfig&,
                         std::string_view) { return std::string("row-column"); },
    .validate = validate,
    .make = make,
};

}  // namespace statepack
