// PACE pages: groups of keys of one column, 4 bits symmetric, or 4 and 8 bits with zero points.
// The device's side of codec/pace/pace.cc.
#pragma once

#include "delta/cuda/block.cuh"

namespace statepack::cuda {

template <bool kAffine>
struct PacePage {
  using Columns = SpreadColumns;

  const HeadMap map;
  const int group, n_groups, code_bytes;  // of a column
  std::uint8_t* const staged;

  static int staged_bytes(const LayerView& layer) {
    const int n_groups = (layer.K + layer.codec.group - 1) / layer.codec.group;
    return layer.V * (kAffine ? layer.K + 3 * n_groups : layer.K / 2 + 2 * n_groups);
  }
  __device__ PacePage(const LayerView& layer, int head, std::uint8_t* staged_)
      : map(layer.codec.heads[head]),
        group(layer.codec.group),
        n_groups((layer.K + group - 1) / group),
        code_bytes(layer.K * map.bits / 8),
        staged(staged_) {}

  __device__ void load(const Block& b, const std::uint8_t* page) {
    copy_async(b, staged, page + map.codes, static_cast<int>(map.code_bytes));
  }
  __device__ float row_factor(int i) const { return map.bits == 4 ? step_down(i % 4) : 1.0f; }
  __device__ float key(int, int) const { return 0; }
  __device__ float value(int, int) const { return 0; }
  __device__ int rank() const { return 0; }

  __device__ const std::uint8_t* column_at(const Block& b, int c) const {
    const int j = Columns::column(b, c);
    return staged + (j < b.V ? j : 0) * map.stride;
  }
  // A column starts wherever the one before it ends, at an odd byte when zero points fill one.
  __device__ std::uint32_t load_word(const std::uint8_t* at) const {
    if (map.stride % 4 == 0) return *reinterpret_cast<const std::uint32_t*>(at);
    if (map.stride % 2 == 0) {
      const auto* halves = reinterpret_cast<const std::uint16_t*>(at);
      return halves[0] | static_cast<std::uint32_t>(halves[1]) << 16;
    }
    return at[0] | at[1] << 8 | at[2] << 16 | static_cast<std::uint32_t>(at[3]) << 24;
  }
  __device__ void store_word(std::uint8_t* at, std::uint32_t word) const {
    if (map.stride % 4 == 0) {
      *reinterpret_cast<std::uint32_t*>(at) = word;
    } else if (map.stride % 2 == 0) {
      auto* halves = reinterpret_cast<std::uint16_t*>(at);
      halves[0] = static_cast<std::uint16_t>(word);
      halves[1] = static_cast<std::uint16_t>(word >> 16);
    } else {
      for (int e = 0; e < 4; ++e) at[e] = static_cast<std::uint8_t>(word >> (8 * e));
    }
  }
  __device__ int group_of(const Block& b) const { return b.first_row() / group; }
  __device__ float column_factor(const Block& b, int c) const {
    const std::uint8_t* at = column_at(b, c) + code_bytes + 2 * group_of(b);
    return half_bits_to_float(static_cast<std::uint16_t>(at[0] | at[1] << 8));
  }
  __device__ float zero_point(const Block& b, const std::uint8_t* column) const {
    const int g = group_of(b);
    const std::uint8_t* zeros = column + code_bytes + 2 * n_groups;
    return static_cast<float>(map.bits == 8 ? zeros[g] : (zeros[g / 2] >> (g % 2 * 4)) & 0xf);
  }

  /// The codes of a lane's columns, and what is taken off them.
  struct Raw {
    std::uint32_t words[kLaneColumns][kAffine ? 4 : 2];
    float zero[kAffine ? kLaneColumns : 1];
  };
  __device__ Raw fetch(const Block& b) const {
    Raw raw;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const std::uint8_t* column = column_at(b, c);
      const std::uint8_t* from = column + b.first_row() * map.bits / 8;
#pragma unroll
      for (int w = 0; w < 2; ++w) raw.words[c][w] = load_word(from + 4 * w);
      if constexpr (kAffine) {
        raw.zero[c] = zero_point(b, column);
        if (map.bits == 8) {
#pragma unroll
          for (int w = 2; w < 4; ++w) raw.words[c][w] = load_word(from + 4 * w);
        }
      } else {
#pragma unroll
        for (int w = 0; w < 2; ++w) raw.words[c][w] ^= 0x88888888u;
      }
    }
    return raw;
  }
  template <int kQuarter, class F>
  __device__ void visit(const Block&, const Raw& raw, F&& f) const {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if constexpr (kAffine) {
        if (map.bits == 8) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            f(4 * kQuarter + e, c, byte_to_float(raw.words[c][kQuarter], e, raw.zero[c]));
          }
          continue;
        }
      }
      const std::uint32_t four = raw.words[c][kQuarter / 2] >> (kQuarter % 2 * 16);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        f(4 * kQuarter + e, c, nibble_to_float(four, e, kAffine ? raw.zero[c] : 8.0f));
      }
    }
  }
  template <class F>
  __device__ void for_each_region(F&& f) const {
    f(map.codes, static_cast<int>(map.code_bytes));
  }

  // Symmetric:  s = f16(absmax / L)                 c = clamp(rne(x / s), -L, L)
  // Affine:     s = f16((hi - lo) / L)  z = clamp(rne(-lo / s), 0, L)  c = clamp(rne(x / s) + z, 0,
  // L)
  __device__ void encode(const Block& b, Tile& x, float* fold, float*, float*, std::uint8_t* to) {
    const int first_warp = group_of(b) * group / kWarpRows;
    const int last_warp = min((group_of(b) + 1) * group / kWarpRows, b.n_warps);
    const bool wide = map.bits == 8;
    const float levels = static_cast<float>((1 << (kAffine ? map.bits : map.bits - 1)) - 1);
    float low[kLaneColumns], high[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      low[c] = high[c] = 0;
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        high[c] = fmaxf(high[c], kAffine ? x[i][c] : fabsf(x[i][c]));
        if constexpr (kAffine) low[c] = fminf(low[c], x[i][c]);
      }
    }
    fold_columns<Columns>(b, high, first_warp, last_warp, fold, Max());
    if constexpr (kAffine) fold_columns<Columns>(b, low, first_warp, last_warp, fold, Min());
    float* zeros = fold;  // [n_groups][kMaxWidth], for threads that pack two groups in a byte

#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const int j = Columns::column(b, c);
      if (j >= b.V) continue;
      std::uint8_t* column = staged + j * map.stride;
      const std::uint16_t stored = encode_scale(__fdiv_rn(high[c] - low[c], levels));
      const float scale = half_bits_to_float(stored);
      const float inverse = __fdiv_rn(1.0f, scale);
      float zero = 0;
      if constexpr (kAffine) {
        zero = code_value(__fadd_rn(fminf(__fdiv_rn(-low[c], scale), levels), kRound));
      }
      if (b.warp == first_warp) {
        std::uint8_t* at = column + code_bytes + 2 * group_of(b);
        at[0] = static_cast<std::uint8_t>(stored);
        at[1] = static_cast<std::uint8_t>(stored >> 8);
        if constexpr (kAffine) zeros[group_of(b) * kMaxWidth + j] = zero;
      }
      const float below = kAffine ? -zero : -levels, above = kAffine ? levels - zero : levels;
      const auto code = [&](int i) {
        const float y = divide(x[i][c], scale, inverse);
        const float z = __fadd_rn(fminf(fmaxf(y, below), above), kRound);
        return __float_as_uint(__fadd_rn(z, zero));
      };
      if (wide) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          std::uint32_t four = 0;
#pragma unroll
          for (int e = 0; e < 4; ++e) four |= (code(4 * w + e) & 0xffu) << (8 * e);
          store_word(column + b.first_row() + 4 * w, four);
        }
      } else {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          std::uint32_t eight = 0;
#pragma unroll
          for (int e = 0; e < 8; ++e) eight |= (code(8 * w + e) & 0xfu) << (4 * e);
          store_word(column + b.first_row() / 2 + 4 * w, eight);
        }
      }
    }
    __syncthreads();
    if constexpr (kAffine) {
      for (int j = b.thread; j < b.V; j += b.n_threads) {
        std::uint8_t* at = staged + j * map.stride + code_bytes + 2 * n_groups;
        for (int g = 0; g < n_groups; ++g) {
          const auto zero = static_cast<std::uint8_t>(zeros[g * kMaxWidth + j]);
          if (wide) {
            at[g] = zero;
          } else if (g % 2 == 0) {
            at[g / 2] = zero;
          } else {
            at[g / 2] = static_cast<std::uint8_t>(at[g / 2] | zero << 4);
          }
        }
      }
      __syncthreads();
    }
    copy_out(b, to + map.codes, staged, static_cast<int>(map.code_bytes));
  }
};

}  // namespace statepack::cuda
