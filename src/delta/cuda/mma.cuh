// Tensor core instructions, and how vectors are cut into what they multiply.
//
// A warp's fragments follow PTX: with g = lane / 4 and t = lane % 4, a thread has rows g and g + 8
// of a 16-row tile and, of an 8-column result, columns 2 t and 2 t + 1. Which index of a sum a
// fragment slot means is free, as long as both factors agree; layouts here choose it so that a
// thread's codes lie together in a page.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>
#include <utility>

#include "delta/cuda/block.cuh"

namespace statepack::cuda {

/// Asks the L2 cache for n bytes, and for those that share 16 with them.
__device__ inline void prefetch_bytes(const std::uint8_t* from, int n) {
  const int lead = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) & 15);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from - lead),
               "r"((lead + n + 15) / 16 * 16));
#else
  for (int at = -lead; at < n; at += 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
  }
#endif
}

/// c += a b, a [16][32] signed bytes, b [32][8] signed bytes. Sums of integers: exact, in any
/// order.
__device__ inline void mma_s8(int (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                              std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
/// The same for unsigned bytes of a.
__device__ inline void mma_u8(int (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                              std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
/// a [16][16], b [16][8] in bf16.
__device__ inline void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// a [16][8], b [8][8] in f16.
__device__ inline void mma_f16(float (&c)[4], std::uint32_t a0, std::uint32_t a1,
                               std::uint32_t b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
/// a [16][8], b [8][8]; of an f32 the machine sees the upper 19 bits.
__device__ inline void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
/// What mma_tf32 drops of x.
__device__ inline float tf32_rest(float x) {
  return x - __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}
/// mma_tf32 with 21 bits of both factors, into three sums that do not wait for one another.
__device__ inline void mma_tf32_twice(float (&c)[3][4], const float (&a)[4], float b0, float b1) {
  const float rest[4] = {tf32_rest(a[0]), tf32_rest(a[1]), tf32_rest(a[2]), tf32_rest(a[3])};
  mma_tf32(c[0], a, b0, b1);
  mma_tf32(c[1], rest, b0, b1);
  mma_tf32(c[2], a, tf32_rest(b0), tf32_rest(b1));
}

/// Two f32 as two bf16 each: `low` holds what `high` misses.
struct Split {
  std::uint32_t high, low;
};
__device__ inline std::uint32_t pack_bf16(float first, float second) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const std::uint32_t*>(&two);
}
__device__ inline Split split_bf16(float first, float second) {
  const std::uint32_t high = pack_bf16(first, second);
  return {high, pack_bf16(first - __uint_as_float(high << 16),
                          second - __uint_as_float(high & 0xffff0000u))};
}

// ---------------------------------------------------------------------------------------------
// A vector against codes: 30 bits of it below its peak, as four signed bytes. Column 2 p + v of b
// is byte p of vector v, so one instruction serves the key and the query.

inline constexpr int kDigitPitch = 192;  // bytes between columns: free of bank conflicts
inline constexpr int kDigitBytes = 8 * kDigitPitch;

/// The scale of such a vector, from the bits of its largest magnitude. A peak that is not finite
/// makes the inverse NaN.
struct FixedPoint {
  float scale, inverse;
  __device__ explicit FixedPoint(std::uint32_t peak_bits) {
    const std::uint32_t exponent = peak_bits >> 23;
    const std::uint32_t e = exponent > 30u ? 283u - exponent : 253u;
    scale = __uint_as_float(e << 23);
    inverse = exponent < 255u ? __uint_as_float((254u - e) << 23) : __uint_as_float(0x7fc00000u);
  }
};
/// Byte `at` of columns 2 p + v.
__device__ inline void store_digits(std::uint8_t* digits, int at, int v, float scaled) {
  const int x = __float2int_rn(scaled);
  // Bytes are made signed from below: each but the last borrows 128.
  const std::uint32_t bytes = (static_cast<std::uint32_t>(x) + 0x00808080u) ^ 0x00808080u;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    digits[(2 * p + v) * kDigitPitch + at] = static_cast<std::uint8_t>(bytes >> (8 * p));
  }
}
/// What byte p = lane % 4 of a vector counts.
__device__ inline float digit_weight(int lane, float inverse) {
  return __uint_as_float((127u + 8u * static_cast<unsigned>(lane % 4)) << 23) * inverse;
}
/// b of all four instructions along 128 rows: [step][register].
struct Digits {
  std::uint32_t b[4][2];
  __device__ Digits(const std::uint8_t* digits, int lane) {
    const std::uint8_t* from = digits + lane / 4 * kDigitPitch + lane % 4 * 16;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + 64 * c);
      b[2 * c][0] = four.x, b[2 * c][1] = four.y;
      b[2 * c + 1][0] = four.z, b[2 * c + 1][1] = four.w;
    }
  }
};
/// Where the e-th of the 8 rows that slot t sees in a step lies.
__device__ constexpr int digit_place(int step, int t, int e) {
  return 64 * (step / 2) + 16 * t + 8 * (step % 2) + e;
}
/// Nibbles are masked out of a word by parity: the order of eight of them.
__device__ constexpr int by_parity(int e) { return (e & 1) * 4 + e / 2; }

/// Adds up the digits of 32 columns over the lanes that hold them: first[2 h + v] of column 8 h +
/// g, second of 16 columns on. Returns those of column finished_column(lane).
__device__ inline float2 finish_digits(const float (&first)[4], const float (&second)[4],
                                       int lane) {
  const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
  float tile[4];
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    tile[x] =
        (odd ? second[x] : first[x]) + __shfl_xor_sync(kAllLanes, odd ? first[x] : second[x], 1);
  }
  float2 both;
  both.x = (upper ? tile[2] : tile[0]) + __shfl_xor_sync(kAllLanes, upper ? tile[0] : tile[2], 2);
  both.y = (upper ? tile[3] : tile[1]) + __shfl_xor_sync(kAllLanes, upper ? tile[1] : tile[3], 2);
  return both;
}
__device__ inline int finished_column(int lane) {
  return 16 * (lane & 1) + 4 * (lane & 2) + lane / 4;
}

// ---------------------------------------------------------------------------------------------
// A state in registers: eight warps, each 16 of the major axis (rows g and g + 8 of its tile); a
// thread has 32 consecutive of the minor axis, from 32 t on.

using Frags = float[16][4];

/// Element f = 0..31 along the minor axis, of half h = 0, 1 of the major one.
__device__ inline float& at(Frags& x, int h, int f) { return x[f / 2][2 * h + f % 2]; }
__device__ inline float at(const Frags& x, int h, int f) { return x[f / 2][2 * h + f % 2]; }

/// Where index i of a vector along the minor axis lies in shared memory so that the four threads of
/// a row read different banks; kMinorRoom floats.
__device__ constexpr int minor_place(int i) { return i + i / 32 * 4; }
inline constexpr int kMinorRoom = 144;

/// f(0), f(1), ... with each index a constant: what lies in registers can only be named by those.
template <int N, class F>
__device__ inline void for_each_constant(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) { (f(std::integral_constant<int, I>()), ...); }
  (std::make_integer_sequence<int, N>());
}

/// Folds x[32] over the rows of a warp; x[0..3] are then those of folded_index(lane) + 0..3.
template <class Op>
__device__ inline void fold_minor(float (&x)[32], int lane, Op op) {
  for_each_constant<3>([&](auto step) {
    constexpr int kWidth = 16 >> decltype(step)::value;
    const bool upper = (lane & kWidth) != 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float send = upper ? x[i] : x[i + kWidth];
      const float keep = upper ? x[i + kWidth] : x[i];
      x[i] = op(keep, __shfl_xor_sync(kAllLanes, send, kWidth));
    }
  });
}
__device__ inline int folded_index(int lane) { return 32 * (lane % 4) + (lane & 28); }

// Records as pairs: word [p][i] holds records 2 p and 2 p + 1 of index i, in two bf16 parts.
inline constexpr int kPairPitch = 148;  // Splits

/// Where an index of the minor axis lies among pairs: those of a tile of 8 columns together, and
/// every other tile 16 bytes further, so that whoever writes four indices meets no bank twice.
__device__ constexpr int tile_place(int n) { return 8 * n + n / 2 * 2; }
__device__ constexpr int pair_place(int i) { return tile_place(i % 32 / 2) + i / 32 * 2 + i % 2; }
/// The same of the major axis: 16 bytes after every 16 indices.
__device__ constexpr int major_place(int i) { return i + i / 16 * 2; }

/// x += sum over 16 n_steps records of major[record][row] minor[record][column].
__device__ inline void add_pairs(int warp, int lane, int n_steps, const Split* major,
                                 const Split* minor, Frags& x) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int step = 0; step < n_steps; ++step) {
    std::uint32_t high[4], low[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const Split s =
          major[(8 * step + t + r / 2 * 4) * kPairPitch + major_place(16 * warp) + g + r % 2 * 8];
      high[r] = s.high, low[r] = s.low;
    }
    const Split* from = minor + (8 * step + t) * kPairPitch + g;
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const Split first = from[tile_place(n)], second = from[4 * kPairPitch + tile_place(n)];
      mma_bf16(x[n], low, first.high, second.high);
      mma_bf16(x[n], high, first.low, second.low);
      mma_bf16(x[n], high, first.high, second.high);
    }
  }
}

}  // namespace statepack::cuda
