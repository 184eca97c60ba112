// The page types of full.cuh that keep rows together: see full_pages.cuh.
//
// A warp that reads a token has 64 key rows in two chunks of 32, a thread of it 16 columns of 8
// rows a chunk: (g, t) has columns from 16 g on. Bytes of four rows are transposed into the words
// that are multiplied, and sums over rows are finished across warps.
#pragma once

#include "delta/cuda/full.cuh"
#include "delta/cuda/stepquant_page.cuh"
#include "delta/cuda/uniform_page.cuh"

namespace statepack::cuda {

/// Four words of four rows as four words of one byte each.
__device__ inline void transpose_bytes(std::uint32_t& a, std::uint32_t& b, std::uint32_t& c,
                                       std::uint32_t& d) {
  const std::uint32_t low_ab = __byte_perm(a, b, 0x5140), high_ab = __byte_perm(a, b, 0x7362);
  const std::uint32_t low_cd = __byte_perm(c, d, 0x5140), high_cd = __byte_perm(c, d, 0x7362);
  a = __byte_perm(low_ab, low_cd, 0x5410), b = __byte_perm(low_ab, low_cd, 0x7632);
  c = __byte_perm(high_ab, high_cd, 0x5410), d = __byte_perm(high_ab, high_cd, 0x7632);
}

/// The codes of a thread: [row e][16 codes].
using RowCodes = std::uint32_t[8][4];
struct RawRows {
  RowCodes chunk[2];
};
__device__ inline int chunk_row(const Block& b, int chunk) { return 64 * b.warp + 32 * chunk; }

/// Sums of a thread's 16 columns over the rows of its warp: [column pair][2 (column % 2) + vector].
struct RowSums {
  int c[8][4] = {};

  template <class Multiply>
  __device__ void add_bytes(const RowCodes& raw, Multiply&& multiply) {  // words [8][4]
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t a[4], d[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = raw[e][j], d[e] = raw[4 + e][j];
      transpose_bytes(a[0], a[1], a[2], a[3]);
      transpose_bytes(d[0], d[1], d[2], d[3]);
      multiply(c[2 * j], a[0], a[1], d[0], d[1]);
      multiply(c[2 * j + 1], a[2], a[3], d[2], d[3]);
    }
  }
  template <class Multiply>
  __device__ void add_nibbles(const RowCodes& raw, Multiply&& multiply) {  // words [8][2]
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      std::uint32_t a[4], d[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) a[e] = raw[e][j], d[e] = raw[4 + e][j];
      transpose_bytes(a[0], a[1], a[2], a[3]);
      transpose_bytes(d[0], d[1], d[2], d[3]);
#pragma unroll
      for (int e = 0; e < 4; ++e) multiply(c[4 * j + e], a[e], d[e]);
    }
  }

  /// Over warps: the sums of a thread's columns. The warps meet.
  template <class Space>
  __device__ float4 finish(const Block& b, float weight_k, float weight_q, const Space& s) const {
    const int g = b.lane / 4;
    const bool odd = (b.lane & 1) != 0, upper = (b.lane & 2) != 0;
    float half[4][4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float weight = x % 2 == 0 ? weight_k : weight_q;
        const float first = static_cast<float>(c[pair][x]) * weight,
                    second = static_cast<float>(c[pair + 4][x]) * weight;
        half[pair][x] =
            (odd ? second : first) + __shfl_xor_sync(kAllLanes, odd ? first : second, 1);
      }
    }
    float sums[2][4];  // [vector][column]
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float first = half[pair][x], second = half[pair + 2][x];
        sums[x % 2][2 * pair + x / 2] =
            (upper ? second : first) + __shfl_xor_sync(kAllLanes, upper ? first : second, 2);
      }
    }
    const int column = 16 * g + (odd ? 8 : 0) + (upper ? 4 : 0);
    return sum_warps(b, column, sums, s);
  }
  template <class Space>
  static __device__ float4 sum_warps(const Block& b, int column, const float (&sums)[2][4],
                                     const Space& s) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      *reinterpret_cast<float4*>(s.partial + (2 * b.warp + v) * kMaxWidth + column) =
          make_float4(sums[v][0], sums[v][1], sums[v][2], sums[v][3]);
    }
    __syncthreads();
    const float* from = s.partial + 2 * b.thread;
    const float2 k0 = load_two(from), q0 = load_two(from + kMaxWidth),
                 k1 = load_two(from + 2 * kMaxWidth), q1 = load_two(from + 3 * kMaxWidth);
    return make_float4(k0.x + k1.x, q0.x + q1.x, k0.y + k1.y, q0.y + q1.y);
  }
};

/// b of the one instruction along a chunk of rows.
__device__ inline uint2 row_digits(const Block& b, int chunk, const std::uint8_t* digits) {
  return *reinterpret_cast<const uint2*>(digits + b.lane / 4 * kDigitPitch + chunk_row(b, chunk) +
                                         b.lane % 4 * 8);
}

/// Two's complement codes [K][V] as one run, then an f16 scale a row.
template <int kBits>
struct IntFull {
  using General = IntPage<kBits>;
  static constexpr int kStepBlocks = 8;
  static constexpr bool kKeysMinor = false;
  static constexpr int kRowBytes = kMaxWidth * kBits / 8;
  static constexpr float kLevels = General::kLevels;

  const HeadMap map;

  __device__ IntFull(const LayerView& layer, int head) : map(layer.codec.heads[head]) {}

  static __host__ __device__ int encoder_bytes(const LayerView&) { return 0; }
  static __device__ int column(const Block& b) { return 2 * b.thread; }
  static __device__ int place(int i) { return i / 32 * 32 + i % 4 * 8 + i % 32 / 4; }
  __device__ float row_factor(const std::uint8_t* page, int i) const {
    return half_bits_to_float(reinterpret_cast<const std::uint16_t*>(page + map.row_scales)[i]);
  }
  __device__ float2 row_factors(const std::uint8_t* page, int i) const {
    return two_halves(*reinterpret_cast<const std::uint32_t*>(page + map.row_scales + 2 * i));
  }
  __device__ float column_factor(const std::uint8_t*, int) const { return 1; }
  __device__ int rank() const { return 0; }
  __device__ const std::uint16_t* factors(const std::uint8_t*, int) const { return nullptr; }

  __device__ void prefetch(const Block&, const std::uint8_t*) const {}  // row scales come first

  using Raw = RawRows;
  __device__ Raw fetch(const Block& b, const std::uint8_t* page) const {
    Raw all;
    const int g = b.lane / 4, t = b.lane % 4;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      RowCodes& raw = all.chunk[chunk];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const std::uint8_t* from =
            page + map.codes + (chunk_row(b, chunk) + 4 * e + t) * kRowBytes + g * 2 * kBits;
        if constexpr (kBits == 8) {
          const uint4 four = *reinterpret_cast<const uint4*>(from);
          raw[e][0] = four.x, raw[e][1] = four.y, raw[e][2] = four.z, raw[e][3] = four.w;
        } else {
          const uint2 two = *reinterpret_cast<const uint2*>(from);
          raw[e][0] = two.x, raw[e][1] = two.y;
        }
      }
    }
    return all;
  }
  template <class Space>
  __device__ float4 read(const Block& b, const Raw& all, const std::uint8_t*, const Space& s,
                         float inverse_k, float inverse_q) const {
    RowSums sums;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      const uint2 of = row_digits(b, chunk, s.digits);
      if constexpr (kBits == 8) {
        sums.add_bytes(all.chunk[chunk],
                       [&](int(&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                           std::uint32_t a3) { mma_s8(c, a0, a1, a2, a3, of.x, of.y); });
      } else {
        constexpr std::uint32_t kMask = 0xf0f0f0f0u;  // 16 times a code
        sums.add_nibbles(all.chunk[chunk], [&](int(&c)[4], std::uint32_t a, std::uint32_t d) {
          mma_s8(c, a << 4 & kMask, a & kMask, d << 4 & kMask, d & kMask, of.x, of.y);
        });
      }
    }
    const float unit = kBits == 8 ? 1.0f : 0x1p-4f;
    return sums.finish(b, digit_weight(b.lane, unit * inverse_k),
                       digit_weight(b.lane, unit * inverse_q), s);
  }

  struct Codes {
    uint4 words[2][kBits / 4];  // [half]
  };
  __device__ Codes load(const Block& b, const std::uint8_t* page) const {
    Codes codes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = b.warp * 16 + h * 8 + b.lane / 4;
      const auto* from =
          reinterpret_cast<const uint4*>(page + map.codes + i * kRowBytes + b.lane % 4 * 4 * kBits);
#pragma unroll
      for (int w = 0; w < kBits / 4; ++w) codes.words[h][w] = from[w];
    }
    return codes;
  }
  __device__ void decode(const Block& b, const Codes& codes, const std::uint8_t*, const float* rows,
                         const float*, Frags& x) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = rows[b.warp * 16 + h * 8 + b.lane / 4];
#pragma unroll
      for (int w = 0; w < kBits / 4; ++w) {
        const uint4 four = codes.words[h][w];
        const std::uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const std::uint32_t word = words[q] ^ (kBits == 8 ? 0x80808080u : 0x88888888u);
          if constexpr (kBits == 8) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              at(x, h, 16 * w + 4 * q + e) = scale * byte_to_float(word, e, 128.0f);
            }
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              at(x, h, 8 * q + e) = scale * integer_to_float(word >> (4 * e) & 0xfu, 8.0f);
            }
          }
        }
      }
    }
  }

  //   s = f16(clamp(absmax / L, 2^-24, 65504))     c = clamp(rne(x / s), -L, L)
  __device__ void encode(const Block& b, Frags& x, unsigned char*, std::uint8_t* to) const {
    const int g = b.lane / 4, t = b.lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float peak = 0;
#pragma unroll
      for (int f = 0; f < 32; ++f) peak = fmaxf(peak, fabsf(at(x, h, f)));
      peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 1));
      peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 2));
      const int i = b.warp * 16 + h * 8 + g;
      const std::uint16_t stored = encode_scale(__fdiv_rn(peak, kLevels));
      if (t == 0) reinterpret_cast<std::uint16_t*>(to + map.row_scales)[i] = stored;
      const float scale = half_bits_to_float(stored);
      const float inverse = __fdiv_rn(1.0f, scale);
      // With an offset that makes them unsigned, taken off below.
      constexpr float kOffset = kBits == 8 ? 128.0f : 8.0f;
      const auto code = [&](int f) {
        const float y = divide(at(x, h, f), scale, inverse);
        return __float_as_uint(__fadd_rn(fminf(fmaxf(y, -kLevels), kLevels), kRound) + kOffset);
      };
      std::uint32_t words[kBits];
#pragma unroll
      for (int w = 0; w < kBits; ++w) {
        std::uint32_t bytes[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kBits == 8) {
            bytes[e] = code(4 * w + e);
          } else {
            bytes[e] = code(8 * w + 2 * e) + (code(8 * w + 2 * e + 1) << 4);
          }
        }
        words[w] = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040),
                               __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410) ^
                   (kBits == 8 ? 0x80808080u : 0x88888888u);
      }
      auto* at_row = reinterpret_cast<uint4*>(to + map.codes + i * kRowBytes + t * 4 * kBits);
#pragma unroll
      for (int w = 0; w < kBits / 4; ++w) {
        at_row[w] = make_uint4(words[4 * w], words[4 * w + 1], words[4 * w + 2], words[4 * w + 3]);
      }
    }
  }
};

/// Heads of a scalar gate: one width a head, tiles of 16 columns, rows of a tile together.
struct StepquantFull {
  using General = StepquantPage<Gate::kScalar>;
  static constexpr int kStepBlocks = 8;
  static constexpr bool kKeysMinor = false;
  static constexpr int kPivot = General::kPivot;
  static constexpr int kGroups = kMaxWidth / 32;  // row scales of a row of 2-bit codes

  const HeadMap map;
  const RowMap* rows_of_head;

  __device__ StepquantFull(const LayerView& layer, int head)
      : map(layer.codec.heads[head]), rows_of_head(layer.codec.rows + head * kMaxWidth) {}

  static __host__ __device__ int encoder_bytes(const LayerView&) {
    return 4 * (8 * 2 * kMaxWidth + kMinorRoom);
  }
  static __device__ int column(const Block& b) { return 2 * b.thread; }
  /// Rows that a thread reads lie together in the page: 16 bytes of them as far as they fill any.
  __device__ int place(int i) const {
    const int within = i % 32, chunk = i - within;
    switch (map.bits) {
      case 4:
        return chunk + within % 8 / 2 * 8 + within / 8 * 2 + within % 2;
      case 6:
        return chunk + within % 16 / 4 * 8 + within / 16 * 4 + within % 4;
      default:
        return chunk + within % 4 * 8 + within / 4;
    }
  }
  __device__ float row_scale(const std::uint8_t* page, int index) const {
    return half_bits_to_float(reinterpret_cast<const std::uint16_t*>(page + map.row_scales)[index]);
  }
  __device__ float row_factor(const std::uint8_t* page, int i) const {
    return map.bits == kPivot || map.signed_levels ? 1.0f : row_scale(page, i);
  }
  __device__ float2 row_factors(const std::uint8_t* page, int i) const {
    return make_float2(row_factor(page, i), row_factor(page, i + 1));
  }
  __device__ float column_factor(const std::uint8_t* page, int j) const {
    if (map.bits == kPivot) return 1;
    return half_bits_to_float(reinterpret_cast<const std::uint16_t*>(page + map.column_scales)[j]);
  }
  __device__ int rank() const { return 0; }
  __device__ const std::uint16_t* factors(const std::uint8_t*, int) const { return nullptr; }
  __device__ const std::uint8_t* tile_at(const std::uint8_t* page, int tile) const {
    return page + map.codes + tile * (kMaxWidth * 2) * map.bits;
  }

  /// Four 6-bit codes in the low bits of a word, spread to a byte each.
  static __device__ std::uint32_t spread(std::uint32_t four) {
    four = (four & 0xfffu) | (four << 4 & 0x0fff0000u);
    return (four & 0x003f003fu) | (four << 2 & 0x3f003f00u);
  }
  static __device__ void spread_row(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                    std::uint32_t (&bytes)[4]) {
    bytes[0] = spread(a);
    bytes[1] = spread(__funnelshift_r(a, b, 24));
    bytes[2] = spread(__funnelshift_r(b, c, 16));
    bytes[3] = spread(c >> 8);
  }

  __device__ void prefetch(const Block& b, const std::uint8_t* page) const {
    if (map.n_row_scales == 0) return;
    if (b.thread == 0) prefetch_bytes(page + map.column_scales, 2 * kMaxWidth);
    if (b.thread == 32) prefetch_bytes(page + map.row_scales, 2 * map.n_row_scales);
  }

  using Raw = RawRows;  // rows of 4 words at 8 bits, 3 at 6, 2 at 4, 1 at 2; pivots: none
  __device__ void fetch_chunk(const Block& b, const std::uint8_t* page, int chunk,
                              RowCodes& raw) const {
    const int g = b.lane / 4, t = b.lane % 4;
    const std::uint8_t* from = tile_at(page, g) + chunk_row(b, chunk) * 2 * map.bits;
    switch (map.bits) {
      case 8:
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const uint4 four = *reinterpret_cast<const uint4*>(from + (4 * e + t) * 16);
          raw[e][0] = four.x, raw[e][1] = four.y;
          raw[e][2] = four.z, raw[e][3] = four.w;
        }
        break;
      case 6:
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto* four = reinterpret_cast<const uint4*>(from + (16 * i + 4 * t) * 12);
          const uint4 x = four[0], y = four[1], z = four[2];
          const std::uint32_t words[12] = {x.x, x.y, x.z, x.w, y.x, y.y,
                                           y.z, y.w, z.x, z.y, z.z, z.w};
#pragma unroll
          for (int w = 0; w < 12; ++w) raw[4 * i + w / 3][w % 3] = words[w];
        }
        break;
      case 4:
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 four = *reinterpret_cast<const uint4*>(from + (8 * i + 2 * t) * 8);
          raw[2 * i][0] = four.x, raw[2 * i][1] = four.y;
          raw[2 * i + 1][0] = four.z, raw[2 * i + 1][1] = four.w;
        }
        break;
      case 2:
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          raw[e][0] = *reinterpret_cast<const std::uint32_t*>(from + (4 * e + t) * 4);
        }
        break;
      default:
        break;
    }
  }
  __device__ Raw fetch(const Block& b, const std::uint8_t* page) const {
    Raw raw;
    fetch_chunk(b, page, 0, raw.chunk[0]);
    fetch_chunk(b, page, 1, raw.chunk[1]);
    return raw;
  }
  template <class Space>
  __device__ float4 read(const Block& b, const Raw& all, const std::uint8_t* page, const Space& s,
                         float inverse_k, float inverse_q) const {
    if (map.bits == kPivot) return read_pivots(b, page, s);
    float4 along;
    if (map.signed_levels) {
      along = read_signed(b, all, page, s);
    } else {
      RowSums sums;
#pragma unroll
      for (int chunk = 0; chunk < 2; ++chunk) {
        const RowCodes& raw = all.chunk[chunk];
        const uint2 of = row_digits(b, chunk, s.digits);
        {  // codes are stored with an offset of Q
          constexpr std::uint32_t kOnes = 0x01010101u;
          int total[4] = {};
          mma_u8(total, kOnes, kOnes, kOnes, kOnes, of.x, of.y);
          const int Q = (1 << (map.bits - 1)) - 1;
#pragma unroll
          for (int pair = 0; pair < 8; ++pair) {
#pragma unroll
            for (int x = 0; x < 4; ++x) sums.c[pair][x] -= Q * total[x];
          }
        }
        const auto multiply = [&](int(&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                  std::uint32_t a3) { mma_u8(c, a0, a1, a2, a3, of.x, of.y); };
        if (map.bits == 4) {
          constexpr std::uint32_t kMask = 0x0f0f0f0fu;
          sums.add_nibbles(raw, [&](int(&c)[4], std::uint32_t a, std::uint32_t d) {
            multiply(c, a & kMask, a >> 4 & kMask, d & kMask, d >> 4 & kMask);
          });
        } else if (map.bits == 8) {
          sums.add_bytes(raw, multiply);
        } else {
          RowCodes bytes;
#pragma unroll
          for (int e = 0; e < 8; ++e) spread_row(raw[e][0], raw[e][1], raw[e][2], bytes[e]);
          sums.add_bytes(bytes, multiply);
        }
      }
      along = sums.finish(b, digit_weight(b.lane, inverse_k), digit_weight(b.lane, inverse_q), s);
    }
    const float first = column_factor(page, column(b)), second = column_factor(page, column(b) + 1);
    return make_float4(first * along.x, first * along.y, second * along.z, second * along.w);
  }

  struct Codes {
    uint4 words[2][2];  // [half][tile]: bits / 2 words; pivots: see decode()
    float scale[2];     // of 2-bit rows
  };
  __device__ const std::uint8_t* row_at(const Block& b, const std::uint8_t* page, int h,
                                        int tile) const {
    const int i = b.warp * 16 + h * 8 + b.lane / 4;
    return tile_at(page, b.lane % 4 * 2 + tile) + i * 2 * map.bits;
  }
  __device__ Codes load(const Block& b, const std::uint8_t* page) const {
    Codes codes;
    for_each_constant<4>([&](auto which) {
      constexpr int h = decltype(which)::value / 2, tile = decltype(which)::value % 2;
      const std::uint8_t* from = row_at(b, page, h, tile);
      uint4& to = codes.words[h][tile];
      switch (map.bits) {
        case 8:
          to = *reinterpret_cast<const uint4*>(from);
          break;
        case 6: {
          const auto* words = reinterpret_cast<const std::uint32_t*>(from);
          to.x = words[0], to.y = words[1], to.z = words[2];
          break;
        }
        case 4: {
          const uint2 two = *reinterpret_cast<const uint2*>(from);
          to.x = two.x, to.y = two.y;
          break;
        }
        case 2:
          to.x = *reinterpret_cast<const std::uint32_t*>(from);
          break;
        default:
          break;
      }
      if (map.signed_levels && tile == 0) {
        const int i = b.warp * 16 + h * 8 + b.lane / 4;
        codes.scale[h] = row_scale(page, i * kGroups + b.lane % 4);
      }
    });
    return codes;
  }
  __device__ void decode(const Block& b, const Codes& codes, const std::uint8_t* page,
                         const float* rows, const float* columns, Frags& x) const {
    columns += minor_place(b.lane % 4 * 32);
    const float Q = map.bits == kPivot ? 0.0f : static_cast<float>((1 << (map.bits - 1)) - 1);
    for_each_constant<4>([&](auto which) {
      constexpr int h = decltype(which)::value / 2, tile = decltype(which)::value % 2;
      float row = rows[b.warp * 16 + h * 8 + b.lane / 4];
      if (map.bits == kPivot) {
        const auto* from = reinterpret_cast<const uint4*>(row_at(b, page, h, tile));
        const uint4 first = from[0], second = from[1];
        const std::uint32_t words[8] = {first.x,  first.y,  first.z,  first.w,
                                        second.x, second.y, second.z, second.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float2 two = two_halves(words[e]);
          at(x, h, 16 * tile + 2 * e) = row * two.x;
          at(x, h, 16 * tile + 2 * e + 1) = row * two.y;
        }
        return;
      }
      if (map.signed_levels) row *= codes.scale[h];
      const uint4 raw = codes.words[h][tile];
      std::uint32_t bytes[4];
      switch (map.bits) {
        case 8:
          bytes[0] = raw.x, bytes[1] = raw.y, bytes[2] = raw.z, bytes[3] = raw.w;
          break;
        case 6:
          spread_row(raw.x, raw.y, raw.z, bytes);
          break;
        case 4: {
          const std::uint32_t even_a = raw.x & 0x0f0f0f0fu, odd_a = raw.x >> 4 & 0x0f0f0f0fu;
          const std::uint32_t even_b = raw.y & 0x0f0f0f0fu, odd_b = raw.y >> 4 & 0x0f0f0f0fu;
          bytes[0] = __byte_perm(even_a, odd_a, 0x5140),
          bytes[1] = __byte_perm(even_a, odd_a, 0x7362);
          bytes[2] = __byte_perm(even_b, odd_b, 0x5140),
          bytes[3] = __byte_perm(even_b, odd_b, 0x7362);
          break;
        }
        default:
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const std::uint32_t four = raw.x >> (8 * w) & 0xffu;
            bytes[w] = (four | four << 6 | four << 12 | four << 18) & 0x03030303u;
          }
          break;
      }
      // u - Q, or 2 u - 3.
      const float unit = map.signed_levels ? 2.0f * row : row;
      const float middle = map.signed_levels ? 1.5f : Q;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float4 four = *reinterpret_cast<const float4*>(columns + 16 * tile + 4 * w);
        const float column[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          at(x, h, 16 * tile + 4 * w + e) =
              (byte_to_float(bytes[w], e, 0.0f) - middle) * (unit * column[e]);
        }
      }
    });
  }

  //   1  r_i = h16( sqrt( max(m_i, 1e-20) / w_i ) )        2  Y_ij = X_ij / r_i
  //   3  c0_j = h16( max_i |Y_ij| / Q )                    4  z_ij = enc(Y_ij / c0_j)
  //   5  num_j = sum_i (w_i r_i)^2 z_ij Y_ij,  den_j = sum_i (w_i r_i)^2 z_ij^2
  //      c_j = den_j > 0 ? h16( num_j / den_j ) : c0_j     6  z_ij = enc(Y_ij / c_j)
  __device__ void encode(const Block& b, Frags& x, unsigned char* room, std::uint8_t* to) const {
    if (map.bits == kPivot) return store_pivots(b, x, to);
    float* partial = reinterpret_cast<float*>(room);  // [8][2][kMaxWidth]
    if (map.signed_levels) {
      fit<true>(b, x, partial, to);
    } else {
      fit<false>(b, x, partial, to);
    }
  }

 private:
  /// 4^c u, for 2-bit code c of the lowest four.
  static __device__ float code_in_place(std::uint32_t bits, int c) {
    return __fadd_rn(__uint_as_float((bits & (3u << (2 * c))) | 0x4b000000u), -8388608.0f);
  }

  /// Levels 2 u - 3 with a row scale for every group of 32 columns: in f32, since no one vector
  /// serves all groups. Codes are used where they lie in a byte, 4^c times too large.
  template <class Space>
  __device__ float4 read_signed(const Block& b, const Raw& all, const std::uint8_t* page,
                                const Space& s) const {
    const int g = b.lane / 4, t = b.lane % 4;
    float sum_k[16] = {}, sum_q[16] = {}, all_k = 0, all_q = 0;
    const float gamma = s.gamma[0];
#pragma unroll
    for (int e = 0; e < 16; ++e) {
      const int i = chunk_row(b, e / 8) + e % 8 * 4 + t;
      const float scale = gamma * row_scale(page, i * kGroups + g / 2);
      const float k = scale * s.read_k[i], q = scale * s.read_q[i];
      all_k += k;
      all_q += q;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const std::uint32_t four = all.chunk[e / 8][e % 8][0] >> (8 * byte);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float z = code_in_place(four, c);
          sum_k[4 * byte + c] = __fmaf_rn(z, k, sum_k[4 * byte + c]);
          sum_q[4 * byte + c] = __fmaf_rn(z, q, sum_q[4 * byte + c]);
        }
      }
    }
    const bool odd = (b.lane & 1) != 0, upper = (b.lane & 2) != 0;
    float sums[2][4];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      float(&sum)[16] = v == 0 ? sum_k : sum_q;
      const float all = v == 0 ? all_k : all_q;
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        constexpr float kUnits[4] = {2.0f, 0.5f, 0.125f, 0.03125f};
        sum[c] = __fmaf_rn(kUnits[c % 4], sum[c], -3.0f * all);
      }
      float half[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        half[c] =
            (odd ? sum[8 + c] : sum[c]) + __shfl_xor_sync(kAllLanes, odd ? sum[c] : sum[8 + c], 1);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[v][c] = (upper ? half[4 + c] : half[c]) +
                     __shfl_xor_sync(kAllLanes, upper ? half[c] : half[4 + c], 2);
      }
    }
    return RowSums::sum_warps(b, 16 * g + (odd ? 8 : 0) + (upper ? 4 : 0), sums, s);
  }
  template <class Space>
  __device__ float4 read_pivots(const Block& b, const std::uint8_t* page, const Space& s) const {
    const auto* from =
        reinterpret_cast<const std::uint32_t*>(tile_at(page, b.thread / 8)) + b.thread % 8;
    float4 along{0, 0, 0, 0};
#pragma unroll 8
    for (int i = 0; i < kMaxWidth; ++i) {
      const float2 x = two_halves(from[8 * i]);
      const float k = s.read_k[i], q = s.read_q[i];
      along.x = __fmaf_rn(x.x, k, along.x), along.y = __fmaf_rn(x.x, q, along.y);
      along.z = __fmaf_rn(x.y, k, along.z), along.w = __fmaf_rn(x.y, q, along.w);
    }
    const float gamma = s.gamma[0];
    return make_float4(gamma * along.x, gamma * along.y, gamma * along.z, gamma * along.w);
  }

  __device__ void store_pivots(const Block& b, const Frags& x, std::uint8_t* to) const {
    const int g = b.lane / 4, t = b.lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        std::uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int f = 8 * w + 2 * e;
          words[e] = saturate_to_half_bits(at(x, h, f)) |
                     static_cast<std::uint32_t>(saturate_to_half_bits(at(x, h, f + 1))) << 16;
        }
        std::uint8_t* row = to + map.codes + (2 * t + w / 2) * (kMaxWidth * 2) * kPivot +
                            (b.warp * 16 + h * 8 + g) * 2 * kPivot;
        reinterpret_cast<uint4*>(row)[w % 2] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  template <bool kSigned>
  __device__ void fit(const Block& b, Frags& x, float* partial, std::uint8_t* to) const {
    const int g = b.lane / 4, t = b.lane % 4;
    const float Q = kSigned ? 3.0f : static_cast<float>((1 << (map.bits - 1)) - 1);
    float* const columns = partial + 8 * 2 * kMaxWidth;  // [kMinorRoom]
    float weight[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = b.warp * 16 + h * 8 + g;
      float sum = 0;
#pragma unroll
      for (int f = 0; f < 32; ++f) sum += fabsf(at(x, h, f));
      if constexpr (!kSigned) {
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
      }
      const float mean = sum * (1.0f / (kSigned ? 32 : kMaxWidth)), w = rows_of_head[i].weight;
      const std::uint16_t stored = encode_scale(__fsqrt_rn(__fdiv_rn(fmaxf(mean, 1e-20f), w)));
      auto* scales = reinterpret_cast<std::uint16_t*>(to + map.row_scales);
      if constexpr (kSigned) {
        scales[i * kGroups + t] = stored;
      } else if (t == 0) {
        scales[i] = stored;
      }
      const float r = half_bits_to_float(stored), inverse = __fdiv_rn(1.0f, r);
      weight[h] = (w * r) * (w * r);
#pragma unroll
      for (int f = 0; f < 32; ++f) at(x, h, f) *= inverse;
    }
    {
      float peak[32];
#pragma unroll
      for (int f = 0; f < 32; ++f) peak[f] = fmaxf(fabsf(at(x, 0, f)), fabsf(at(x, 1, f)));
      fold_minor(peak, b.lane, Max());
      *reinterpret_cast<float4*>(partial + b.warp * kMaxWidth + folded_index(b.lane)) =
          make_float4(peak[0], peak[1], peak[2], peak[3]);
    }
    __syncthreads();
    float first = 0;  // c0 of column b.thread
    if (b.thread < kMaxWidth) {
#pragma unroll
      for (int w = 0; w < 8; ++w) first = fmaxf(first, partial[w * kMaxWidth + b.thread]);
      first = half_bits_to_float(encode_scale(__fdividef(first, Q)));
      columns[minor_place(b.thread)] = __fdividef(1.0f, first);
    }
    __syncthreads();
    for_each_constant<2>([&](auto which) {
      constexpr int half = decltype(which)::value;
      float both[32];  // num, then den, of 16 columns
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float4 four =
            *reinterpret_cast<const float4*>(columns + minor_place(32 * t) + 16 * half + 4 * q);
        const float inverse[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float num = 0, den = 0;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float y = at(x, h, 16 * half + 4 * q + e);
            // No clamp: c0 is the peak's own scale, so no code passes Q by half a step.
            const float z = kSigned ? signed_level(y * inverse[e])
                                    : code_value(__fmaf_rn(y, inverse[e], kRound));
            const float wz = weight[h] * z;
            num = __fmaf_rn(wz, y, num);
            den = __fmaf_rn(wz, z, den);
          }
          both[4 * q + e] = num;
          both[16 + 4 * q + e] = den;
        }
      }
      fold_minor(both, b.lane, Add());
      float* const sums = partial + (2 * b.warp + (b.lane & 16) / 16) * kMaxWidth;
      *reinterpret_cast<float4*>(sums + 32 * t + 16 * half + (b.lane & 12)) =
          make_float4(both[0], both[1], both[2], both[3]);
    });
    __syncthreads();
    if (b.thread < kMaxWidth) {
      float num = 0, den = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        num += partial[2 * w * kMaxWidth + b.thread];
        den += partial[(2 * w + 1) * kMaxWidth + b.thread];
      }
      const std::uint16_t stored = encode_scale(den > 0 ? __fdiv_rn(num, den) : first);
      reinterpret_cast<std::uint16_t*>(to + map.column_scales)[b.thread] = stored;
      columns[minor_place(b.thread)] = __fdividef(1.0f, half_bits_to_float(stored));
    }
    __syncthreads();
    for_each_constant<4>([&](auto which) {
      constexpr int h = decltype(which)::value / 2, half = decltype(which)::value % 2;
      std::uint8_t* row = to + map.codes + (2 * t + half) * (kMaxWidth * 2) * map.bits +
                          (b.warp * 16 + h * 8 + g) * 2 * map.bits;
      std::uint32_t u[16];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float4 four =
            *reinterpret_cast<const float4*>(columns + minor_place(32 * t) + 16 * half + 4 * q);
        const float inverse[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float y = at(x, h, 16 * half + 4 * q + e);
          if constexpr (kSigned) {
            u[4 * q + e] = static_cast<std::uint32_t>((signed_level(y * inverse[e]) + 3.0f) * 0.5f);
          } else {
            // With an even offset of Q + 1, which leaves ties as they are.
            const float middle = kRound + Q + 1.0f;
            u[4 * q + e] = __float_as_uint(
                fminf(fmaxf(__fmaf_rn(y, inverse[e], middle), middle - Q), middle + Q));
          }
        }
      }
      store_row<kSigned>(u, row);
    });
  }
  /// 16 codes; those of levels about 0 are one too large.
  template <bool kSigned>
  __device__ void store_row(const std::uint32_t (&u)[16], std::uint8_t* row) const {
    if constexpr (kSigned) {
      std::uint32_t word = 0;
#pragma unroll
      for (int c = 0; c < 16; ++c) word |= u[c] << (2 * c);
      *reinterpret_cast<std::uint32_t*>(row) = word;
      return;
    }
    if (map.bits == 8) {
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = __byte_perm(__byte_perm(u[4 * w], u[4 * w + 1], 0x0040),
                               __byte_perm(u[4 * w + 2], u[4 * w + 3], 0x0040), 0x5410) -
                   0x01010101u;
      }
      *reinterpret_cast<uint4*>(row) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if (map.bits == 4) {
      std::uint32_t words[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        std::uint32_t two[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) two[e] = u[8 * w + 2 * e] + (u[8 * w + 2 * e + 1] << 4);
        words[w] = __byte_perm(__byte_perm(two[0], two[1], 0x0040),
                               __byte_perm(two[2], two[3], 0x0040), 0x5410) -
                   0x11111111u;
      }
      *reinterpret_cast<uint2*>(row) = make_uint2(words[0], words[1]);
    } else {  // 6
      std::uint32_t four[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // Bit 22 of kRound is in the way of the first code alone: others are shifted past bit 24.
        four[w] = u[4 * w] + (u[4 * w + 1] << 6) + (u[4 * w + 2] << 12) + (u[4 * w + 3] << 18) -
                  (0x400000u + 0x041041u);
      }
      auto* words = reinterpret_cast<std::uint32_t*>(row);
      words[0] = __byte_perm(four[0], four[1], 0x4210);
      words[1] = __byte_perm(four[1], four[2], 0x5421);
      words[2] = __byte_perm(four[2], four[3], 0x6542);
    }
  }
  static __device__ float signed_level(float y) {
    return copysignf(fabsf(y) >= 2.0f ? 3.0f : 1.0f, y < 0.0f ? -1.0f : 1.0f);
  }
};

}  // namespace statepack::cuda
