// What all kernels share: who a thread is, and sums and peaks over rows and columns.
//
// A head's state is cut into row blocks of 16 key rows; a warp works on one at a time, every lane
// on four value columns of it. Sums run in one fixed order, so a row's result does not depend on
// the batch.
#pragma once

#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include "delta/cuda/view.hpp"

namespace statepack::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;

using Tile = float[kWarpRows][kLaneColumns];

struct Block {
  int K, V;
  int thread, warp, lane, n_threads, n_warps;
  int row_block;  // that the warp is at

  __device__ Block(int K_, int V_, int n_warps_)
      : K(K_),
        V(V_),
        thread(static_cast<int>(threadIdx.x)),
        // Shuffled so that the compiler knows it to be one number a warp.
        warp(__shfl_sync(kAllLanes, thread / 32, 0)),
        lane(thread % 32),
        n_threads(32 * n_warps_),
        n_warps(n_warps_),
        row_block(warp) {}
  __device__ int n_row_blocks() const { return K / kWarpRows; }
  __device__ int first_row() const { return row_block * kWarpRows; }
};

/// Columns of a lane: four in a row, for formats that keep rows together ...
struct NextColumns {
  static __device__ int column(const Block& b, int c) { return b.lane * kLaneColumns + c; }
};
/// ... or every 32nd, for formats that keep columns together: neighbouring lanes then read
/// neighbouring columns, whose pitch in shared memory is chosen free of bank conflicts.
struct SpreadColumns {
  static __device__ int column(const Block& b, int c) { return b.lane + 32 * c; }
};

__device__ inline float half_bits_to_float(std::uint16_t h) {
  return __half2float(__ushort_as_half(h));
}
__device__ inline std::uint16_t float_to_half_bits(float x) {
  return __half_as_ushort(__float2half_rn(x));
}
/// The f16 bits of a stored scale, as codec/scale.hpp has them: clamped to [2^-24, 65504].
__device__ inline std::uint16_t encode_scale(float x) {
  return float_to_half_bits(fminf(fmaxf(x, 0x1p-24f), 65504.0f));
}
__device__ inline std::uint16_t saturate_to_half_bits(float x) {
  return float_to_half_bits(fminf(fmaxf(x, -65504.0f), 65504.0f));
}
__device__ inline std::uint16_t float_to_bf16_bits(float x) {
  std::uint32_t u = __float_as_uint(x);
  u += 0x7fffu + ((u >> 16) & 1u);
  return static_cast<std::uint16_t>(u >> 16);
}
__device__ inline float bf16_bits_to_float(std::uint32_t h) { return __uint_as_float(h << 16); }

/// x / y correctly rounded, given inverse = 1 / y correctly rounded and no overflow or underflow on
/// the way (Markstein): what the CPU's division gives, for a third of its instructions.
__device__ inline float divide(float x, float y, float inverse) {
  const float quotient = __fmul_rn(x, inverse);
  return __fmaf_rn(__fmaf_rn(-quotient, y, x), inverse, quotient);
}

inline constexpr float kRound = 12582912.0f;  // 1.5 2^23: a sum with it has a last place of 1

/// clamp(rne(x), -limit, limit), then the bits of that integer below a float's exponent.
__device__ inline float round_code(float x, float limit) {
  return __fadd_rn(fminf(fmaxf(x, -limit), limit), kRound);
}
__device__ inline float code_value(float rounded) { return __fadd_rn(rounded, -kRound); }

/// A small non-negative integer in the low bits of `magic`, as its float: adding 2^23 to an integer
/// only sets an exponent, and the subtraction is exact.
__device__ inline float integer_to_float(std::uint32_t bits, float offset) {
  return __fadd_rn(__uint_as_float(0x4b000000u | bits), -(8388608.0f + offset));
}

/// Byte `index` of a word less an offset.
__device__ inline float byte_to_float(std::uint32_t word, int index, float offset) {
  return __fadd_rn(
      __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + static_cast<unsigned>(index))),
      -(8388608.0f + offset));
}
/// 16^-index, exactly.
__device__ constexpr float step_down(int index) {
  return index == 0 ? 1.0f : index == 1 ? 0x1p-4f : index == 2 ? 0x1p-8f : 0x1p-12f;
}
/// 16^index (nibble `index` less an offset), index 0..3 of the low 16 bits: masked where it lies, a
/// nibble costs no shift. Whoever uses it multiplies by step_down(index), which is exact.
__device__ inline float nibble_to_float(std::uint32_t word, int index, float offset) {
  const float power = index == 0 ? 1.0f : index == 1 ? 16.0f : index == 2 ? 256.0f : 4096.0f;
  return __fadd_rn(__uint_as_float((word & (0xfu << (4 * index))) | 0x4b000000u),
                   -(8388608.0f + power * offset));
}

__device__ inline bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7fffffffu) < 0x7f800000u;
}

/// All of a thread's values, a quarter of its rows at a time: see uniform_page.cuh.
template <class Page, class Raw, class F>
__device__ inline void visit_all(const Block& b, const Page& page, const Raw& raw, F&& f) {
  page.template visit<0>(b, raw, f);
  page.template visit<1>(b, raw, f);
  page.template visit<2>(b, raw, f);
  page.template visit<3>(b, raw, f);
}

__device__ inline float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ inline float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
/// Sums of a and b over a warp: lanes below 16 return that of a, the others that of b.
__device__ inline float warp_sum_two(float a, float b, int lane) {
  const bool upper = (lane & 16) != 0;
  float x = upper ? b : a;
  x += __shfl_xor_sync(kAllLanes, upper ? a : b, 16);
  for (int step = 8; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Min {
  __device__ float operator()(float a, float b) const { return fminf(a, b); }
};

/// Folds each of 16 per-lane values over a warp; lane l returns that of row (l / 2). Halving the
/// rows at every step takes 16 exchanges, not 80.
template <class Op>
__device__ inline float fold_rows(float (&x)[kWarpRows], int lane, Op op) {
#pragma unroll
  for (int width = 8; width > 0; width /= 2) {
    const bool upper = (lane & (2 * width)) != 0;
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const float send = upper ? x[i] : x[i + width];
      const float keep = upper ? x[i + width] : x[i];
      x[i] = op(keep, __shfl_xor_sync(kAllLanes, send, 2 * width));
    }
  }
  return op(x[0], __shfl_xor_sync(kAllLanes, x[0], 1));
}

/// Folds four column values a lane over the warps [begin, end) of a block. `scratch` [n_warps][V].
/// The block meets twice.
template <class Columns, class Op>
__device__ inline void fold_columns(const Block& b, float (&x)[kLaneColumns], int begin, int end,
                                    float* scratch, Op op) {
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    scratch[b.warp * kMaxWidth + Columns::column(b, c)] = x[c];
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    const float* from = scratch + Columns::column(b, c);
    float sum = from[begin * kMaxWidth];
    for (int w = begin + 1; w < end; ++w) sum = op(sum, from[w * kMaxWidth]);
    x[c] = sum;
  }
  __syncthreads();
}

/// Copies n bytes, both ends at multiples of 16, without passing registers: see wait_for_copies().
__device__ inline void copy_async(const Block& b, std::uint8_t* to, const std::uint8_t* from,
                                  int n) {
  for (int at = b.thread * 16; at < n; at += b.n_threads * 16) {
    __pipeline_memcpy_async(to + at, from + at, 16);
  }
}
/// The same for rows of `width` bytes that come to lie `pitch` apart.
__device__ inline void copy_rows_async(const Block& b, std::uint8_t* to, const std::uint8_t* from,
                                       int n_rows, int width, int pitch) {
  const int chunks = width / 16;
  for (int at = b.thread; at < n_rows * chunks; at += b.n_threads) {
    const int row = at / chunks, chunk = at % chunks;
    __pipeline_memcpy_async(to + row * pitch + chunk * 16, from + at * 16, 16);
  }
}
/// This thread's copies have landed; the block must still meet before others read them.
__device__ inline void wait_for_copies() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

/// Copies n bytes from shared memory to a page, 16 at a time where both ends allow it.
__device__ inline void copy_out(const Block& b, std::uint8_t* to, const std::uint8_t* from, int n) {
  if (((reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) & 15) == 0) {
    const int whole = n & ~15;
    for (int at = b.thread * 16; at < whole; at += b.n_threads * 16) {
      *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
    }
    for (int at = whole + b.thread; at < n; at += b.n_threads) to[at] = from[at];
    return;
  }
  for (int at = b.thread; at < n; at += b.n_threads) to[at] = from[at];
}

}  // namespace statepack::cuda
