#include "codec/pace/pace.hpp"

#include <algorithm>
#include <cstring>

#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "codec/options.hpp"
#include "codec/pace/nibbles.hpp"
#include "codec/pack.hpp"
#include "codec/packed_read.hpp"
#include "codec/quantise.hpp"
#include "codec/scale.hpp"
#include "codec/scratch.hpp"
#include "codec/transpose.hpp"

namespace statepack {
namespace {

constexpr int kMaxGroup = 65536;

// Scale and zero point of each column, from the range of its group widened to contain 0:
//   s = f16(max((hi - lo) / L, 2^-24))     z = clamp(rne(-lo / s), 0, L)
SP_CLONES void make_affine(const float* __restrict low, const float* __restrict high,
                           std::int64_t n, int L, std::uint16_t* __restrict stored,
                           float* __restrict value, std::uint8_t* __restrict zero) {
  const float levels = static_cast<float>(L);
  for (std::int64_t j = 0; j < n; ++j) {
    const std::uint16_t half = encode_scale((high[j] - low[j]) / levels);
    const float s = f16_to_f32(half);
    stored[j] = half;
    value[j] = s;
    zero[j] = round_code_u8(-low[j] / s, 0, levels);
  }
}

// Rows 2r and 2r+1 share bytes: even key in the low nibble.
SP_CLONES void pair_rows(const std::uint8_t* __restrict even, const std::uint8_t* __restrict odd,
                         std::int64_t n, std::uint8_t* __restrict out) {
  for (std::int64_t j = 0; j < n; ++j) {
    out[j] = static_cast<std::uint8_t>((even[j] & 15) | (odd[j] << 4));
  }
}

// `sign` 8 extends the sign of two's complement nibbles, 0 leaves unsigned ones.
SP_CLONES void split_rows(const std::uint8_t* __restrict in, std::int64_t n, std::uint8_t sign,
                          std::uint8_t* __restrict even, std::uint8_t* __restrict odd) {
  for (std::int64_t j = 0; j < n; ++j) {
    even[j] = static_cast<std::uint8_t>(((in[j] & 15) ^ sign) - sign);
    odd[j] = static_cast<std::uint8_t>(((in[j] >> 4) ^ sign) - sign);
  }
}

// out[j] += scale[j] (sum[j] - zero[j] along), the share of one group in a read.
SP_CLONES void add_group(const float* __restrict sum, const float* __restrict scale,
                         const std::uint8_t* __restrict zero, float along, std::int64_t n,
                         float* __restrict out) {
  for (std::int64_t j = 0; j < n; ++j) {
    out[j] += scale[j] * (sum[j] - static_cast<float>(zero[j]) * along);
  }
}

// Groups of `group` consecutive keys of one value column; the last may be shorter.
//
// Page: heads in order; in a head columns in order; in a column its K codes, then the f16 scales of
// its groups, then (asymmetric) their zero points, codes and zero points as runs of the head's
// width.
class PaceCodec final : public LayerCodec {
 public:
  PaceCodec(const LayerShape& shape, int group, bool affine, const std::vector<std::uint8_t>& high)
      : shape_(shape),
        group_(std::min(group, shape.K)),
        n_groups_((shape.K + group_ - 1) / group_),
        affine_(affine) {
    std::int64_t offset = 0;
    for (int h = 0; h < shape.n_value_heads; ++h) {
      const int bits = !high.empty() && high[static_cast<std::size_t>(h)] != 0 ? 8 : 4;
      heads_.push_back({offset, bits});
      offset += column_bytes(bits) * shape.V;
    }
  }

  const LayerShape& shape() const override { return shape_; }

  PayloadBytes payload() const override {
    PayloadBytes bytes;
    for (const Head& head : heads_) {
      const std::int64_t all = column_bytes(head.bits) * shape_.V;
      const std::int64_t codes = packed_bytes(std::int64_t{shape_.K} * shape_.V, head.bits);
      const std::int64_t scales = std::int64_t{2} * n_groups_ * shape_.V;
      const std::int64_t zeros =
          affine_ ? packed_bytes(std::int64_t{n_groups_} * shape_.V, head.bits) : 0;
      bytes.codes += codes;
      bytes.scales += scales;
      bytes.zero_points += zeros;
      bytes.padding += all - codes - scales - zeros;  // half-used bytes at the ends of runs
    }
    return bytes;
  }

  std::size_t scratch_bytes() const override {
    const std::int64_t K = shape_.K, V = shape_.V;
    return ScratchSize()
        .add<std::uint8_t>((K + 1) * V)
        .add<std::uint8_t>((K + 1) / 2 * V)
        .add<std::uint16_t>(n_groups_ * V)
        .add<std::uint8_t>(n_groups_ * V)
        .add<std::uint8_t>(n_groups_)
        .add<float>(V)
        .add<float>(V)
        .add<float>(V)
        .add<float>(2 * n_groups_ * V)
        .add<float>(2 * K)
        .n_bytes();
  }

  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext&,
              CodecScratch scratch) const override {
    const Head& at = heads_[static_cast<std::size_t>(head)];
    const Work work(*this, scratch);
    const std::int64_t V = shape_.V;
    for (int g = 0; g < n_groups_; ++g) {
      const std::int64_t row = std::int64_t{g} * group_;
      const std::int64_t n_rows = std::min<std::int64_t>(group_, shape_.K - row);
      std::uint16_t* const stored = work.stored + g * V;
      if (affine_) {
        std::uint8_t* const zero = work.zero + g * V;
        const int L = (1 << at.bits) - 1;
        column_ranges(X + row * V, n_rows, V, work.low, work.high);
        make_affine(work.low, work.high, V, L, stored, work.scale, zero);
        quantise_rows_affine(X + row * V, work.scale, zero, n_rows, V, L, work.codes + row * V);
      } else {
        const int L = (1 << (at.bits - 1)) - 1;
        column_peaks(X + row * V, n_rows, V, work.high);
        make_scales(work.high, V, static_cast<float>(L), stored, work.scale);
        if (whole_runs(at)) {
          pace::pack_columns(X + row * V, work.scale, static_cast<int>(n_rows), shape_.V,
                             page + at.offset + row / 2, column_bytes(at.bits));
          continue;
        }
        quantise_rows(X + row * V, work.scale, n_rows, V, L, work.codes + row * V);
      }
    }
    write_page(at, work, page + at.offset);
  }

  void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const override {
    const Head& at = heads_[static_cast<std::size_t>(head)];
    const Work work(*this, scratch);
    const std::int64_t V = shape_.V;
    if (whole_runs(at)) {
      read_scales(at, page + at.offset + packed_bytes(shape_.K, at.bits), work);
    } else {
      read_page(at, page + at.offset, work);
    }
    for (int g = 0; g < n_groups_; ++g) {
      const std::int64_t row = std::int64_t{g} * group_;
      const std::int64_t n_rows = std::min<std::int64_t>(group_, shape_.K - row);
      const std::uint8_t* const codes = work.codes + row * V;
      load_scales(work.stored + g * V, V, work.scale);
      if (whole_runs(at)) {
        pace::restore_columns(page + at.offset + row / 2, column_bytes(at.bits), work.scale,
                              static_cast<int>(n_rows), shape_.V, X + row * V);
      } else if (affine_) {
        dequantise_rows_affine(codes, work.scale, work.zero + g * V, n_rows, V, X + row * V);
      } else {
        dequantise_rows(reinterpret_cast<const std::int8_t*>(codes), work.scale, n_rows, V,
                        X + row * V);
      }
    }
  }

  std::optional<PageMap> page_map() const override {
    PageMap map{.family = PageFamily::kPace, .group = group_, .affine = affine_};
    for (const Head& head : heads_) {
      const std::int64_t stride = column_bytes(head.bits);
      map.heads.push_back({.codes = head.offset,
                           .code_bytes = stride * shape_.V,
                           .stride = static_cast<std::int32_t>(stride),
                           .bits = head.bits});
    }
    return map;
  }

  // X^T a = sum over groups g of s_g (C_g^T a_g - z_g sum(a_g))
  bool read_two(int head, const std::uint8_t* page, const float* a, const float* b, float* p,
                float* r, CodecScratch scratch) const override {
    const std::int64_t K = shape_.K, V = shape_.V;
    if (K % kRunLength != 0 || group_ % kRunLength != 0) return false;
    const Head& at = heads_[static_cast<std::size_t>(head)];
    const Work work(*this, scratch);
    CodeColumns columns;
    if (affine_) {
      columns.codes = at.bits == 8 ? RunCodes::kUnsigned8 : RunCodes::kUnsigned4;
    } else {
      columns.codes = at.bits == 8 ? RunCodes::kSigned8 : RunCodes::kSigned4;
    }
    columns.first = page + at.offset;
    columns.stride = column_bytes(at.bits);
    columns.K = shape_.K;
    columns.V = shape_.V;
    columns.group = group_;
    const std::uint8_t* const scales = columns.first + packed_bytes(K, at.bits);
    if (!affine_) {
      columns.scales = scales;
      read_columns(columns, a, b, work.vectors, p, r);
      return true;
    }
    float* const sum_p = work.sums;
    float* const sum_r = sum_p + n_groups_ * V;
    read_columns(columns, a, b, work.vectors, sum_p, sum_r);
    read_scales(at, scales, work);
    std::fill_n(p, V, 0.0f);
    std::fill_n(r, V, 0.0f);
    for (int g = 0; g < n_groups_; ++g) {
      const std::int64_t begin = std::int64_t{g} * group_;
      const std::int64_t end = std::min<std::int64_t>(K, begin + group_);
      float along_a = 0, along_b = 0;
      for (std::int64_t i = begin; i < end; ++i) along_a += a[i], along_b += b[i];
      load_scales(work.stored + g * V, V, work.scale);
      const std::uint8_t* const zero = work.zero + g * V;
      add_group(sum_p + g * V, work.scale, zero, along_a, V, p);
      add_group(sum_r + g * V, work.scale, zero, along_b, V, r);
    }
    return true;
  }

 private:
  struct Head {
    std::int64_t offset;  // of its bytes in the page
    int bits;
  };

  // A head between state and page, key-major: codes [K][V] one a byte (a spare row makes K even),
  // row pairs [K/2][V] as nibbles, scales and zero points [groups][V].
  struct Work {
    Work(const PaceCodec& codec, CodecScratch scratch) {
      const std::int64_t K = codec.shape_.K, V = codec.shape_.V;
      ScratchCursor cursor(scratch);
      codes = cursor.take<std::uint8_t>((K + 1) * V);
      pairs = cursor.take<std::uint8_t>((K + 1) / 2 * V);
      stored = cursor.take<std::uint16_t>(codec.n_groups_ * V);
      zero = cursor.take<std::uint8_t>(codec.n_groups_ * V);
      column_zero = cursor.take<std::uint8_t>(codec.n_groups_);
      low = cursor.take<float>(V);
      high = cursor.take<float>(V);
      scale = cursor.take<float>(V);
      sums = cursor.take<float>(2 * codec.n_groups_ * V);
      vectors = cursor.take<float>(2 * K);
    }
    std::uint8_t *codes, *pairs;
    std::uint16_t* stored;
    std::uint8_t *zero, *column_zero;
    float *low, *high, *scale;
    float *sums, *vectors;  // of a read: [2][groups][V] and [2][K]
  };

  // Whether pace/nibbles.hpp writes and reads this head's codes.
  bool whole_runs(const Head& head) const {
    return !affine_ && head.bits == 4 && shape_.V % kRunLength == 0 && shape_.K % kRunLength == 0 &&
           group_ % kRunLength == 0;
  }

  std::int64_t column_bytes(int bits) const {
    const std::int64_t zeros = affine_ ? packed_bytes(n_groups_, bits) : 0;
    return packed_bytes(shape_.K, bits) + 2 * n_groups_ + zeros;
  }

  void write_page(const Head& head, const Work& work, std::uint8_t* out) const {
    const std::int64_t K = shape_.K, V = shape_.V, stride = column_bytes(head.bits);
    if (head.bits == 8) {
      transpose_bytes(work.codes, V, K, V, out, stride);
    } else if (!whole_runs(head)) {
      if (K % 2 != 0) std::memset(work.codes + K * V, 0, static_cast<std::size_t>(V));
      for (std::int64_t r = 0; r < (K + 1) / 2; ++r) {
        const std::uint8_t* const even = work.codes + 2 * r * V;
        pair_rows(even, even + V, V, work.pairs + r * V);
      }
      transpose_bytes(work.pairs, V, (K + 1) / 2, V, out, stride);
    }
    out += packed_bytes(K, head.bits);
    for (std::int64_t j = 0; j < V; ++j, out += stride) {
      for (int g = 0; g < n_groups_; ++g) std::memcpy(out + 2 * g, work.stored + g * V + j, 2);
      if (affine_) {
        for (int g = 0; g < n_groups_; ++g) work.column_zero[g] = work.zero[g * V + j];
        pack_codes(work.column_zero, n_groups_, head.bits, out + 2 * n_groups_);
      }
    }
  }

  void read_page(const Head& head, const std::uint8_t* in, const Work& work) const {
    const std::int64_t K = shape_.K, V = shape_.V, stride = column_bytes(head.bits);
    if (head.bits == 8) {
      transpose_bytes(in, stride, V, K, work.codes, V);
    } else {
      transpose_bytes(in, stride, V, (K + 1) / 2, work.pairs, V);
      for (std::int64_t r = 0; r < (K + 1) / 2; ++r) {
        std::uint8_t* const even = work.codes + 2 * r * V;
        split_rows(work.pairs + r * V, V, affine_ ? 0 : 8, even, even + V);
      }
    }
    read_scales(head, in + packed_bytes(K, head.bits), work);
  }

  // `in`: behind the codes of the first column.
  void read_scales(const Head& head, const std::uint8_t* in, const Work& work) const {
    const std::int64_t V = shape_.V, stride = column_bytes(head.bits);
    for (std::int64_t j = 0; j < V; ++j, in += stride) {
      for (int g = 0; g < n_groups_; ++g) std::memcpy(work.stored + g * V + j, in + 2 * g, 2);
      if (affine_) {
        unpack_codes(in + 2 * n_groups_, n_groups_, head.bits, work.column_zero);
        for (int g = 0; g < n_groups_; ++g) work.zero[g * V + j] = work.column_zero[g];
      }
    }
  }

  LayerShape shape_;
  int group_;
  int n_groups_;  // of a column
  bool affine_;
  std::vector<Head> heads_;
};

bool is_mixed(const CodecConfig& config) { return config.arg == "4/8"; }

Status validate(const CodecConfig& config) {
  return int_option(config, "group", 1, kMaxGroup).status();
}

Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan* plan) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  SP_ASSIGN_OR_RETURN(const int group, int_option(config, "group", 1, kMaxGroup));
  std::vector<std::uint8_t> high;
  if (is_mixed(config)) {
    if (plan == nullptr || plan->high.empty()) {
      return Status(Code::kInvalidArgument,
                    codec_label(config) +
                        ": needs a plan that names the 8-bit heads; make one with "
                        "`statepack calibrate --scheme pace:4/8`");
    }
    high = plan->high;
    if (high.size() != static_cast<std::size_t>(shape.n_value_heads)) {
      return Status(Code::kMismatch, codec_label(config) + ": the plan describes " +
                                         std::to_string(high.size()) + " value heads of a layer, " +
                                         "the model has " + std::to_string(shape.n_value_heads) +
                                         "; calibrate a plan on this model");
    }
    if (std::any_of(high.begin(), high.end(), [](std::uint8_t flag) { return flag > 1; })) {
      return Status(Code::kCorrupt, codec_label(config) +
                                        ": the plan's map of 8-bit heads holds a number other than "
                                        "0 and 1; calibrate the plan again");
    }
  }
  return std::unique_ptr<LayerCodec>(
      std::make_unique<PaceCodec>(shape, group, is_mixed(config), high));
}

}  // namespace

const CodecInfo kPaceInfo = {
    .name = "pace",
    .id = 9,
    .help = "key-axis groups, rounded every 8 tokens: 4 bits, or 8 bits for a quarter of the heads",
    .args = {"4", "4/8"},
    .options = {{"group", "1..65536", "keys of a column that share a scale (64; 32 for 4/8)"}},
    .plan_kind = [](const CodecConfig& config) -> std::string_view {
      return is_mixed(config) ? "pace-high" : "";
    },
    .defaults =
        [](const CodecConfig&) {
          return SchemeDefaults{
              .period = 8, .records = "int8", .phase = "handover", .prefill = "256"};
        },
    .default_option = [](const CodecConfig& config,
                         std::string_view) { return std::string(is_mixed(config) ? "32" : "64"); },
    .validate = validate,
    .make = make,
};

}  // namespace statepack
