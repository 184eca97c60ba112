// Pages of plain values and of integers with one scale a row: fp32, bf16, fp16, int4, int8.
#pragma once

#include "delta/cuda/block.cuh"

namespace statepack::cuda {

// Every page type offers the same to the kernels of kernels.cuh:
//   Columns           which columns a lane has
//   staged_bytes()    shared memory for what load() fetches; on the host
//   load(b, page)     starts fetching one head; done once the block has met after wait_for_copies()
//   fetch(b)          what a thread reads its rows from; see visit_all()
//   visit<Q>(b, raw, f)  f(i, c, z) for rows 4 Q .. 4 Q + 3 of a warp and the columns of a lane; a
//                     value is row_factor(i) z column_factor(b, c) + sum_p key(p, i) value(p, j)
//   encode()          rounds and packs a state; the block meets in it
//   for_each_region() bytes of the page that belong to the head: f(offset, n)

/// Values themselves: T is float, or std::uint16_t for halves of either kind.
template <PageFamily kFamily>
struct DensePage {
  using Columns = NextColumns;
  using Stored = std::conditional_t<kFamily == PageFamily::kF32, float, std::uint16_t>;
  const HeadMap map;
  const Stored* values = nullptr;

  static int staged_bytes(const LayerView&) { return 0; }
  __device__ DensePage(const LayerView& layer, int head, std::uint8_t*)
      : map(layer.codec.heads[head]) {}

  static __device__ float restore(Stored x) {
    if constexpr (kFamily == PageFamily::kF32) {
      return x;
    } else if constexpr (kFamily == PageFamily::kBf16) {
      return bf16_bits_to_float(x);
    } else {
      return half_bits_to_float(x);
    }
  }
  static __device__ Stored round(float x) {
    if constexpr (kFamily == PageFamily::kF32) {
      return x;
    } else if constexpr (kFamily == PageFamily::kBf16) {
      // The few f32 that would round to Inf take the largest finite value instead.
      const std::uint16_t half = float_to_bf16_bits(x);
      return static_cast<std::uint16_t>(half - ((half & 0x7fffu) == 0x7f80u ? 1 : 0));
    } else {
      return saturate_to_half_bits(x);
    }
  }

  __device__ void load(const Block&, const std::uint8_t* page) {
    values = reinterpret_cast<const Stored*>(page + map.codes);
  }
  __device__ float row_factor(int) const { return 1; }
  __device__ float column_factor(const Block&, int) const { return 1; }
  __device__ float key(int, int) const { return 0; }
  __device__ float value(int, int) const { return 0; }
  __device__ int rank() const { return 0; }
  struct Raw {};
  __device__ Raw fetch(const Block&) const { return {}; }
  template <int kQuarter, class F>
  __device__ void visit(const Block& b, const Raw&, F&& f) const {
#pragma unroll
    for (int i = 4 * kQuarter; i < 4 * kQuarter + 4; ++i) {
      const Stored* row = values + (b.first_row() + i) * b.V;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int j = Columns::column(b, c);
        f(i, c, j < b.V ? restore(row[j]) : 0.0f);
      }
    }
  }
  template <class F>
  __device__ void for_each_region(F&& f) const {
    f(map.codes, static_cast<int>(map.code_bytes));
  }
  __device__ void encode(const Block& b, Tile& x, float*, float*, float*, std::uint8_t* page) {
    Stored* to = reinterpret_cast<Stored*>(page + map.codes);
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int j = Columns::column(b, c);
        if (j < b.V) to[(b.first_row() + i) * b.V + j] = round(x[i][c]);
      }
    }
  }
};

/// Two's complement codes [K][V] as one run, then an f16 scale a row.
template <int kBits>
struct IntPage {
  static_assert(kBits == 8 || kBits == 4);
  using Columns = NextColumns;
  static constexpr float kLevels = kBits == 8 ? 127.0f : 7.0f;

  const HeadMap map;
  std::uint8_t* const staged;

  static int staged_bytes(const LayerView& layer) {
    return layer.K * layer.V * kBits / 8 + 2 * layer.K;
  }
  __device__ IntPage(const LayerView& layer, int head, std::uint8_t* staged_)
      : map(layer.codec.heads[head]), staged(staged_) {}

  __device__ void load(const Block& b, const std::uint8_t* page) {
    copy_async(b, staged, page + map.codes, static_cast<int>(map.code_bytes));
  }
  __device__ float row_factor(int i) const {
    const int codes = static_cast<int>(map.row_scales - map.codes);
    return half_bits_to_float(*reinterpret_cast<const std::uint16_t*>(staged + codes + 2 * i));
  }
  __device__ float column_factor(const Block&, int c) const {
    return kBits == 4 ? step_down(c) : 1;
  }
  __device__ float key(int, int) const { return 0; }
  __device__ float value(int, int) const { return 0; }
  __device__ int rank() const { return 0; }

  struct Raw {};
  __device__ Raw fetch(const Block&) const { return {}; }
  template <int kQuarter, class F>
  __device__ void visit(const Block& b, const Raw&, F&& f) const {
    const int j = Columns::column(b, 0) < b.V ? Columns::column(b, 0) : 0;
#pragma unroll
    for (int i = 4 * kQuarter; i < 4 * kQuarter + 4; ++i) {
      const int at = (b.first_row() + i) * b.V + j;
      if constexpr (kBits == 8) {
        const std::uint32_t four =
            *reinterpret_cast<const std::uint32_t*>(staged + at) ^ 0x80808080u;
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) f(i, c, byte_to_float(four, c, 128.0f));
      } else {
        const std::uint32_t four =
            *reinterpret_cast<const std::uint16_t*>(staged + at / 2) ^ 0x8888u;
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) f(i, c, nibble_to_float(four, c, 8.0f));
      }
    }
  }
  template <class F>
  __device__ void for_each_region(F&& f) const {
    f(map.codes, static_cast<int>(map.code_bytes));
  }

  //   s = f16(clamp(absmax / L, 2^-24, 65504))     c = clamp(rne(x / s), -L, L)
  __device__ void encode(const Block& b, Tile& x, float*, float*, float*, std::uint8_t* to) {
    float peak[kWarpRows];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      peak[i] = 0;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) peak[i] = fmaxf(peak[i], fabsf(x[i][c]));
    }
    const float mine = fold_rows(peak, b.lane, Max());
    const std::uint16_t stored = encode_scale(__fdiv_rn(mine, kLevels));
    if (b.lane % 2 == 0) {
      const int row = b.first_row() + b.lane / 2;
      *reinterpret_cast<std::uint16_t*>(to + map.row_scales + 2 * row) = stored;
    }
    const float scale = half_bits_to_float(stored);
    const float inverse = __fdiv_rn(1.0f, scale);
    const int j = Columns::column(b, 0);
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const float s = __shfl_sync(kAllLanes, scale, 2 * i);
      const float r = __shfl_sync(kAllLanes, inverse, 2 * i);
      std::uint32_t four = 0;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const float code = round_code(divide(x[i][c], s, r), kLevels);
        four |= (__float_as_uint(code) & ((1u << kBits) - 1)) << (kBits * c);
      }
      if (j >= b.V) continue;
      const int at = (b.first_row() + i) * b.V + j;
      if constexpr (kBits == 8) {
        *reinterpret_cast<std::uint32_t*>(to + map.codes + at) = four;
      } else {
        *reinterpret_cast<std::uint16_t*>(to + map.codes + at / 2) =
            static_cast<std::uint16_t>(four);
      }
    }
  }
};

}  // namespace statepack::cuda
