// The page types of full.cuh. Each offers, for K = V = 128:
//   General          the page type of kernels.cuh for the same bytes
//   kKeysMinor       key rows lie along the minor axis of Frags, or columns do
//   column(b)        the first of the two of a thread that reads a token
//   place(i)         where the digits of key row i lie
//   row_factor, row_factors, column_factor   what key row i, it and the next, and column j are
//                    multiplied with beside their codes
//   kStepBlocks      of full_step_kernel that fit a multiprocessor's registers
//   prefetch         asks for a page, of which fetch() leaves some for later
//   fetch, read      the codes that a warp multiplies, from global memory; sums over the first of
//   the
//                    thread's columns along key and query, and over the second
//   load             the codes that a thread has in Frags; decode's `codes`
//   decode, encode   between a page and Frags; `rows` and `columns` are factors in shared memory,
//   of
//                    the minor axis at minor_place(). encode's room: encoder_bytes(). The block
//                    meets in encode
//   rank, factors    compensators
#pragma once

#include "delta/cuda/full.cuh"
#include "delta/cuda/leapquant_page.cuh"
#include "delta/cuda/pace_page.cuh"

namespace statepack::cuda {

/// In pages that keep columns together a warp has 64 of them: 32 even and 32 odd ones.
__device__ inline int paired_column(int warp, int column, int odd) {
  return warp * 64 + 2 * column + odd;
}
__device__ inline int thread_column(const Block& b) {
  return paired_column(b.warp, finished_column(b.lane), 0);
}

/// f32 scales, one round of the fit, 4 or 8 compensators; other pages are left to the general
/// kernels.
template <int kBits>
struct LeapquantFull {
  using General = LeapquantPage<kBits>;
  static constexpr int kStepBlocks = 10;
  // Of a thread's four tiles of codes: those of the others are loaded when they are multiplied,
  // which leaves registers for more blocks.
  static constexpr int kEarlyTiles = kBits == 6 ? 1 : 2;
  static constexpr bool kKeysMinor = true;
  static constexpr int kColumnBytes = kMaxWidth * (kBits == 8 ? 8 : 4) / 8;
  static constexpr int kHighBytes = kMaxWidth / 4;
  static constexpr float kLevels = General::kLevels;
  // Codes are multiplied where they lie in a byte.
  static constexpr float kCodeUnit = kBits == 8 ? 1.0f : kBits == 6 ? 0.25f : 0x1p-4f;

  const CodecView& codec;
  const HeadMap map;

  __device__ LeapquantFull(const LayerView& layer, int head)
      : codec(layer.codec), map(layer.codec.heads[head]) {}

  static __device__ int column(const Block& b) { return thread_column(b); }
  static __device__ int place(int i) {
    if constexpr (kBits == 8) return i;
    return digit_place(i % 32 / 8, i / 32, by_parity(i % 8));
  }
  static __device__ float scale_at(const std::uint8_t* section, int i) {
    return reinterpret_cast<const float*>(section)[i];
  }
  static __device__ float2 scales_at(const std::uint8_t* section, int i) {
    return load_two(reinterpret_cast<const float*>(section) + i);
  }
  __device__ float row_factor(const std::uint8_t* page, int i) const {
    return scale_at(page + map.row_scales, i);
  }
  __device__ float2 row_factors(const std::uint8_t* page, int i) const {
    return scales_at(page + map.row_scales, i);
  }
  __device__ float column_factor(const std::uint8_t* page, int j) const {
    return scale_at(page + map.column_scales, j) * (1.0f / kLevels);
  }
  __device__ int rank() const { return codec.rank; }
  __device__ const std::uint16_t* factors(const std::uint8_t* page, int p) const {
    return reinterpret_cast<const std::uint16_t*>(page + map.codes + codec.compensators) +
           p * 2 * kMaxWidth;
  }

  __device__ void prefetch(const Block& b, const std::uint8_t* page) const {
    if (b.thread == 0) prefetch_bytes(page + map.codes, static_cast<int>(map.code_bytes));
  }

  struct Raw {
    uint4 low[4][2][kBits == 8 ? 2 : 1];  // [2 odd + tile][half]
    uint2 high[kBits == 6 ? 4 : 1][2];
  };
  template <int kFirst, int kEnd>
  __device__ void fetch_tiles(const Block& b, const std::uint8_t* page, Raw& raw) const {
    const int g = b.lane / 4, t = b.lane % 4;
#pragma unroll
    for (int tile = kFirst; tile < kEnd; ++tile) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int j = paired_column(b.warp, tile % 2 * 16 + h * 8 + g, tile / 2);
        const auto* from = reinterpret_cast<const uint4*>(page + map.codes + j * kColumnBytes) + t;
        raw.low[tile][h][0] = from[0];
        if constexpr (kBits == 8) raw.low[tile][h][1] = from[4];
        if constexpr (kBits == 6) {
          raw.high[tile][h] = reinterpret_cast<const uint2*>(page + map.codes + codec.high_bits +
                                                             j * kHighBytes)[t];
        }
      }
    }
  }
  __device__ Raw fetch(const Block& b, const std::uint8_t* page) const {
    Raw raw;
    fetch_tiles<0, kEarlyTiles>(b, page, raw);
    return raw;
  }
  template <class Space>
  __device__ float4 read(const Block& b, const Raw& raw, const std::uint8_t* page, const Space& s,
                         float inverse_k, float inverse_q) const {
    Raw late;
    fetch_tiles<kEarlyTiles, 4>(b, page, late);
    const Digits of(s.digits, b.lane);
    float sums[4][4];
    const float weight_k = digit_weight(b.lane, inverse_k),
                weight_q = digit_weight(b.lane, inverse_q);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      int c[4] = {};
      const auto& low = tile < kEarlyTiles ? raw.low[tile] : late.low[tile];
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if constexpr (kBits == 8) {
          const std::uint32_t* first = &low[0][step / 2].x + step % 2 * 2;
          const std::uint32_t* second = &low[1][step / 2].x + step % 2 * 2;
          mma_s8(c, first[0], second[0], first[1], second[1], of.b[step][0], of.b[step][1]);
        } else {
          const std::uint32_t first = (&low[0][0].x)[step], second = (&low[1][0].x)[step];
          if constexpr (kBits == 4) {
            constexpr std::uint32_t kMask = 0xf0f0f0f0u;
            mma_s8(c, first << 4 & kMask, second << 4 & kMask, first & kMask, second & kMask,
                   of.b[step][0], of.b[step][1]);
          } else {
            constexpr std::uint32_t kMask = 0x3c3c3c3cu;
            mma_s8(c, first << 2 & kMask, second << 2 & kMask, first >> 2 & kMask,
                   second >> 2 & kMask, of.b[step][0], of.b[step][1]);
          }
        }
      }
      if constexpr (kBits == 6) {
        // The two high bits: a byte has rows 4 b + r, so every fourth row of 16 is in one mask.
        constexpr std::uint32_t kMask = 0xc0c0c0c0u;
        const auto& high = tile < kEarlyTiles ? raw.high[tile] : late.high[tile];
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const std::uint32_t first = w == 0 ? high[0].x : high[0].y;
          const std::uint32_t second = w == 0 ? high[1].x : high[1].y;
          const auto rows = [&](int r) {
            return __byte_perm(of.b[2 * w][r % 2], of.b[2 * w + 1][r % 2],
                               r < 2 ? 0x6420u : 0x7531u);
          };
          mma_s8(c, first << 6 & kMask, second << 6 & kMask, first << 4 & kMask,
                 second << 4 & kMask, rows(0), rows(1));
          mma_s8(c, first << 2 & kMask, second << 2 & kMask, first & kMask, second & kMask, rows(2),
                 rows(3));
        }
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        sums[tile][x] = static_cast<float>(c[x]) * (x % 2 == 0 ? weight_k : weight_q);
      }
    }
    const float2 first = finish_digits(sums[0], sums[1], b.lane),
                 second = finish_digits(sums[2], sums[3], b.lane);
    const float2 scale = scales_at(page + map.column_scales, column(b));
    const float unit = kCodeUnit / kLevels;
    return make_float4(unit * scale.x * first.x, unit * scale.x * first.y,
                       unit * scale.y * second.x, unit * scale.y * second.y);
  }

  struct Codes {
    std::uint32_t low[2][kBits == 8 ? 8 : 4], high[2][2];  // [half]
  };
  __device__ Codes load(const Block& b, const std::uint8_t* page) const {
    Codes codes;
    const int g = b.lane / 4, t = b.lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = b.warp * 16 + h * 8 + g;
      constexpr int kLoads = kBits == 8 ? 2 : 1;
      const auto* from =
          reinterpret_cast<const uint4*>(page + map.codes + j * kColumnBytes) + kLoads * t;
#pragma unroll
      for (int w = 0; w < kLoads; ++w) {
        const uint4 four = from[w];
        codes.low[h][4 * w] = four.x, codes.low[h][4 * w + 1] = four.y;
        codes.low[h][4 * w + 2] = four.z, codes.low[h][4 * w + 3] = four.w;
      }
      if constexpr (kBits == 6) {
        const uint2 two =
            reinterpret_cast<const uint2*>(page + map.codes + codec.high_bits + j * kHighBytes)[t];
        codes.high[h][0] = two.x ^ 0xaaaaaaaau, codes.high[h][1] = two.y ^ 0xaaaaaaaau;
      }
    }
    return codes;
  }
  __device__ void decode(const Block& b, const Codes& codes, const std::uint8_t*, const float* rows,
                         const float* columns, Frags& x) const {
    const int g = b.lane / 4, t = b.lane % 4;
    rows += minor_place(32 * t);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float column = columns[b.warp * 16 + h * 8 + g];
      const auto& words = codes.low[h];
      const auto& high = codes.high[h];
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        const float4 four = *reinterpret_cast<const float4*>(rows + 4 * q);
        const float row[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float z;
          if constexpr (kBits == 8) {
            z = byte_to_float(words[q] ^ 0x80808080u, e, 128.0f);
          } else {
            const std::uint32_t nibble =
                (words[q / 2] ^ (kBits == 4 ? 0x88888888u : 0u)) >> (16 * (q % 2) + 4 * e) & 0xfu;
            z = kBits == 4 ? integer_to_float(nibble, 8.0f)
                           : integer_to_float(
                                 nibble | (high[q / 4] >> (8 * (q % 4) + 2 * e) & 3u) << 4, 32.0f);
          }
          at(x, h, 4 * q + e) = z * (row[e] * column);
        }
      }
    }
  }

  // --- The fit. -------------------------------------------------------------------------------

  // The state in f32, [V][kStatePitch], key rows at minor_place(): read across it.
  static constexpr int kStatePitch = 152;
  static constexpr int kVectorPitch = 148;  // of one of 8 vectors

  static __host__ __device__ int encoder_bytes(const LayerView&) {
    return 4 * (kMaxWidth * kStatePitch + 2 * kMaxRank * kVectorPitch + 8 * kMaxWidth +
                4 * kPairPitch + 40);
  }

  /// to[p][i] = sum_j x_ij value[p][j], for the 16 key rows of a warp.
  template <bool kExact>
  static __device__ void times(const Block& b, const float* state, const float* value, float* to) {
    const int g = b.lane / 4, t = b.lane % 4, row = b.warp * 16 + g;
    const float* from = state + t * kStatePitch;
    float c[3][4] = {};
#pragma unroll
    for (int j = 0; j < kMaxWidth; j += 8) {
      const float* first = from + j * kStatePitch;
      const float a[4] = {first[minor_place(row)], first[minor_place(row + 8)],
                          first[4 * kStatePitch + minor_place(row)],
                          first[4 * kStatePitch + minor_place(row + 8)]};
      const float b0 = value[g * kVectorPitch + j + t], b1 = value[g * kVectorPitch + j + t + 4];
      if constexpr (kExact) {
        mma_tf32_twice(c, a, b0, b1);
      } else {
        mma_tf32(c[j / 8 % 2], a, b0, b1);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[(2 * t + e % 2) * kVectorPitch + minor_place(row + e / 2 * 8)] =
          c[0][e] + (c[1][e] + c[2][e]);
    }
  }
  /// to[p][j] = sum_i key[p][i] x_ij, for the 16 columns of a warp.
  static __device__ void transposed_times(const Block& b, const Frags& x, const float* key,
                                          float* to) {
    const int g = b.lane / 4, t = b.lane % 4;
    const float* from = key + g * kVectorPitch + minor_place(32 * t);
    float c[3][4] = {};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(from + 2 * n);
      const float a[4] = {x[n][0], x[n][2], x[n][1], x[n][3]};
      mma_tf32_twice(c, a, two.x, two.y);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[(2 * t + e % 2) * kVectorPitch + b.warp * 16 + g + e / 2 * 8] =
          c[0][e] + (c[1][e] + c[2][e]);
    }
  }

  /// Makes the first `rank` of 8 vectors orthonormal, in place; element i lies at place(i). One
  /// that depends on those before it becomes zero. The block meets before and afterwards.
  template <int R, class Place>
  static __device__ void orthonormalise(const Block& b, float* x, float* gram, int n_passes,
                                        Place&& place) {
    constexpr float kMinRemainder = 1e-6f;  // of a squared length; below lies rounding noise
#pragma unroll 1
    for (int pass = 0; pass < n_passes; ++pass) {
#pragma unroll
      for (int round = 0; round < (R * (R + 1) / 2 + 7) / 8; ++round) {
        const int pair = b.warp + 8 * round;
        if (pair >= R * (R + 1) / 2) break;
        int p = 0, q = pair;
        while (q > p) q -= ++p;  // pair = p (p + 1) / 2 + q
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = place(b.lane + 32 * i);
          sum += x[p * kVectorPitch + at] * x[q * kVectorPitch + at];
        }
        sum = warp_sum(sum);
        if (b.lane == 0) gram[pair] = sum;
      }
      __syncthreads();
      if (b.thread < kMaxWidth) {
        float lower[R][R], inverse[R];  // x^T x = L L^T, so x L^-T is orthonormal
#pragma unroll
        for (int q = 0; q < R; ++q) {
          const float square = gram[q * (q + 1) / 2 + q];
          float rest = square;
#pragma unroll
          for (int r = 0; r < q; ++r) rest -= lower[q][r] * lower[q][r];
          inverse[q] = rest > kMinRemainder * square && rest > 1e-30f ? rsqrtf(rest) : 0.0f;
#pragma unroll
          for (int p = q + 1; p < R; ++p) {
            float product = gram[p * (p + 1) / 2 + q];
#pragma unroll
            for (int r = 0; r < q; ++r) product -= lower[p][r] * lower[q][r];
            lower[p][q] = product * inverse[q];
          }
        }
        const int at = place(b.thread);
        float row[R];
#pragma unroll
        for (int p = 0; p < R; ++p) {
          float value = x[p * kVectorPitch + at];
#pragma unroll
          for (int q = 0; q < p; ++q) value -= lower[p][q] * row[q];
          row[p] = value * inverse[p];
          x[p * kVectorPitch + at] = row[p];
        }
      }
      __syncthreads();
    }
  }
  // Two sizes are compiled: a rank between them is filled up with zero vectors.
  template <class Place>
  __device__ void orthonormalise(const Block& b, float* x, float* gram, int n_passes,
                                 Place&& place) const {
    if (rank() <= 4) {
      orthonormalise<4>(b, x, gram, n_passes, place);
    } else {
      orthonormalise<8>(b, x, gram, n_passes, place);
    }
  }

  __device__ void encode(const Block& b, Frags& x, unsigned char* room, std::uint8_t* to) const {
    const int g = b.lane / 4, t = b.lane % 4;
    std::uint8_t* const checkpoint = to + map.codes;
    float* const state = reinterpret_cast<float*>(room);
    float* const key = state + kMaxWidth * kStatePitch;      // [8][kVectorPitch], at minor_place()
    float* const value = key + kMaxRank * kVectorPitch;      // [8][kVectorPitch]
    float* const partial = value + kMaxRank * kVectorPitch;  // [8][kMaxWidth]
    auto* const pairs = reinterpret_cast<std::uint32_t*>(partial + 8 * kMaxWidth);
    float* const gram = reinterpret_cast<float*>(pairs + 4 * kPairPitch);
    if (rank() > 0) {
      // A1 = orth(S Q0),  Qv = orth(S^T A1),  U = S Qv
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* row = state + (b.warp * 16 + h * 8 + g) * kStatePitch + minor_place(32 * t);
#pragma unroll
        for (int q = 0; q < 8; ++q) {
          *reinterpret_cast<float4*>(row + 4 * q) = make_float4(
              at(x, h, 4 * q), at(x, h, 4 * q + 1), at(x, h, 4 * q + 2), at(x, h, 4 * q + 3));
        }
      }
      for (int i = b.thread; i < kMaxRank * kMaxWidth; i += b.n_threads) {
        const int p = i / kMaxWidth;
        value[p * kVectorPitch + i % kMaxWidth] = p < rank() ? codec.start[i] : 0.0f;
      }
      __syncthreads();
      // Of A1 only the span counts, and that roughly: Qv lies in the span of S^T whatever it is.
      times<false>(b, state, value, key);
      __syncthreads();
      orthonormalise(b, key, gram, 1, minor_place);
      transposed_times(b, x, key, value);
      __syncthreads();
      orthonormalise(b, value, gram, 2, [](int i) { return i; });
      times<true>(b, state, value, key);
      __syncthreads();
      // Ktil = fp16(U),  Util = fp16(Qv)
      auto* factors = reinterpret_cast<std::uint16_t*>(checkpoint + codec.compensators);
      {
        const int i = b.thread % kMaxWidth;
        const bool keys = b.thread < kMaxWidth;
        const float* from = keys ? key + minor_place(i) : value + i;
#pragma unroll
        for (int p = 0; p < kMaxRank; p += 2) {
          const std::uint16_t first = saturate_to_half_bits(from[p * kVectorPitch]);
          const std::uint16_t second = saturate_to_half_bits(from[(p + 1) * kVectorPitch]);
          const int where = i + (keys ? 0 : kMaxWidth);
          if (p < rank()) factors[p * 2 * kMaxWidth + where] = first;
          if (p + 1 < rank()) factors[(p + 1) * 2 * kMaxWidth + where] = second;
          // Values go in place of their f32, which nobody reads any more.
          std::uint32_t* pair =
              keys ? pairs + p / 2 * kPairPitch + pair_place(i)
                   : reinterpret_cast<std::uint32_t*>(partial) + p / 2 * kPairPitch + i;
          *pair = first | static_cast<std::uint32_t>(second) << 16;
        }
      }
      __syncthreads();
      // E = S - Ktil Util^T
      const auto* values =
          reinterpret_cast<const std::uint32_t*>(partial) + t * kPairPitch + b.warp * 16 + g;
      const std::uint32_t a0 = values[0] ^ 0x80008000u, a1 = values[8] ^ 0x80008000u;
#pragma unroll
      for (int n = 0; n < 16; ++n) mma_f16(x[n], a0, a1, pairs[t * kPairPitch + tile_place(n) + g]);
      __syncthreads();
    }

    // s_k[c] = sqrt(mean_v |E[c,v]|),  s_v[v] = max_c |E[c,v]| / s_k[c]
    {
      float sum[32];
#pragma unroll
      for (int f = 0; f < 32; ++f) sum[f] = fabsf(at(x, 0, f)) + fabsf(at(x, 1, f));
      fold_minor(sum, b.lane, Add());
      *reinterpret_cast<float4*>(partial + b.warp * kMaxWidth + folded_index(b.lane)) =
          make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    __syncthreads();
    bool finite = true;
    if (b.thread < kMaxWidth) {
      float mean = 0;
#pragma unroll
      for (int w = 0; w < 8; ++w) mean += partial[w * kMaxWidth + b.thread];
      mean *= 1.0f / kMaxWidth;
      finite = is_finite(mean);
      key[minor_place(b.thread)] = mean;
    }
    // A state so large that its fit is not finite is kept as zero, as the CPU keeps it.
    if (__syncthreads_or(!finite)) {
      for (int i = b.thread * 4; i < static_cast<int>(map.code_bytes); i += b.n_threads * 4) {
        *reinterpret_cast<std::uint32_t*>(checkpoint + i) = 0;
      }
      return;
    }
    if (b.thread < kMaxWidth) {
      float& mean = key[minor_place(b.thread)];
      mean = 1.0f / store_scale(__fsqrt_rn(mean), to + map.row_scales, b.thread, true);
    }
    __syncthreads();
    float peak[2] = {};
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const float4 four = *reinterpret_cast<const float4*>(key + minor_place(32 * t) + 4 * q);
      const float row[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          at(x, h, 4 * q + e) *= row[e];
          peak[h] = fmaxf(peak[h], fabsf(at(x, h, 4 * q + e)));
        }
      }
    }
    // Z[v][c] = clamp( rint( qmax E[c,v] / (s_k[c] s_v[v]) ), -qmax, qmax )
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      peak[h] = fmaxf(peak[h], __shfl_xor_sync(kAllLanes, peak[h], 1));
      peak[h] = fmaxf(peak[h], __shfl_xor_sync(kAllLanes, peak[h], 2));
      const int j = b.warp * 16 + h * 8 + g;
      const float s_v = store_scale(peak[h], to + map.column_scales, j, t == 0);
      pack_column(x, h, j, t, kLevels / s_v, checkpoint);
    }
  }

 private:
  /// Returns what was stored.
  static __device__ float store_scale(float scale, std::uint8_t* section, int i, bool store) {
    const float stored = fmaxf(scale, 1e-12f);
    if (store) reinterpret_cast<float*>(section)[i] = stored;
    return stored;
  }
  /// 32 codes of column j.
  __device__ void pack_column(const Frags& x, int h, int j, int t, float factor,
                              std::uint8_t* to) const {
    // As an unsigned number with an even offset, which leaves ties as they are. No clamp: the scale
    // is at least the peak.
    constexpr float kOffset = kBits == 8 ? 128.0f : kBits == 6 ? 32.0f : 8.0f;
    std::uint32_t z[32];
#pragma unroll
    for (int f = 0; f < 32; ++f) {
      z[f] = __float_as_uint(__fmaf_rn(at(x, h, f), factor, kRound + kOffset));
    }
    uint4* low = reinterpret_cast<uint4*>(to + j * kColumnBytes) + (kBits == 8 ? 2 : 1) * t;
    if constexpr (kBits == 8) {
      std::uint32_t words[8];
#pragma unroll
      for (int w = 0; w < 8; ++w) {
        words[w] = __byte_perm(__byte_perm(z[4 * w], z[4 * w + 1], 0x0040),
                               __byte_perm(z[4 * w + 2], z[4 * w + 3], 0x0040), 0x5410) ^
                   0x80808080u;
      }
      low[0] = make_uint4(words[0], words[1], words[2], words[3]);
      low[1] = make_uint4(words[4], words[5], words[6], words[7]);
    } else {
      std::uint32_t words[4], high[2] = {};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        std::uint32_t two[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const std::uint32_t first = z[8 * w + 2 * e], second = z[8 * w + 2 * e + 1];
          two[e] = (kBits == 4 ? first : first & 0xfu) + (second << 4);
        }
        words[w] = __byte_perm(__byte_perm(two[0], two[1], 0x0040),
                               __byte_perm(two[2], two[3], 0x0040), 0x5410) ^
                   (kBits == 4 ? 0x88888888u : 0u);
      }
      *low = make_uint4(words[0], words[1], words[2], words[3]);
      if constexpr (kBits == 6) {
#pragma unroll
        for (int f = 0; f < 32; ++f) high[f / 16] |= (z[f] >> 4 & 3u) << (2 * (f % 16));
        reinterpret_cast<uint2*>(to + codec.high_bits + j * kHighBytes)[t] =
            make_uint2(high[0] ^ 0xaaaaaaaau, high[1] ^ 0xaaaaaaaau);
      }
    }
  }
};

/// Symmetric 4-bit pages, of groups of 64 keys; others are left to the general kernels.
struct PaceFull {
  using General = PacePage<false>;
  static constexpr int kStepBlocks = 10;
  static constexpr bool kKeysMinor = true;
  static constexpr float kLevels = 7.0f;
  static constexpr int kGroup = 64;

  const HeadMap map;

  __device__ PaceFull(const LayerView& layer, int head) : map(layer.codec.heads[head]) {}

  static __host__ __device__ int encoder_bytes(const LayerView&) { return 0; }
  static __device__ int column(const Block& b) { return thread_column(b); }
  static __device__ int place(int i) { return digit_place(i / 32, i % 32 / 8, by_parity(i % 8)); }
  __device__ float row_factor(const std::uint8_t*, int) const { return 1; }
  __device__ float2 row_factors(const std::uint8_t*, int) const { return make_float2(1, 1); }
  __device__ float column_factor(const std::uint8_t*, int) const { return 1; }
  __device__ int rank() const { return 0; }
  __device__ const std::uint16_t* factors(const std::uint8_t*, int) const { return nullptr; }

  __device__ const std::uint8_t* column_at(const std::uint8_t* page, int j) const {
    return page + map.codes + j * map.stride;
  }
  static __device__ std::uint32_t load_word(const std::uint8_t* from) {
    return *reinterpret_cast<const std::uint32_t*>(from);
  }
  static __device__ float scale_at(const std::uint8_t* column, int index) {
    return half_bits_to_float(
        reinterpret_cast<const std::uint16_t*>(column + kMaxWidth / 2)[index]);
  }

  __device__ void prefetch(const Block& b, const std::uint8_t* page) const {
    if (b.thread == 0) prefetch_bytes(page + map.codes, static_cast<int>(map.code_bytes));
  }

  struct Raw {
    std::uint32_t words[4][2][4];  // [2 odd + tile][half][step]
  };
  __device__ Raw fetch(const Block& b, const std::uint8_t* page) const {
    Raw raw;
    const int g = b.lane / 4, t = b.lane % 4;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const std::uint8_t* from =
            column_at(page, paired_column(b.warp, tile % 2 * 16 + h * 8 + g, tile / 2));
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          raw.words[tile][h][step] = load_word(from + 16 * step + 4 * t);
        }
      }
    }
    return raw;
  }
  template <class Space>
  __device__ float4 read(const Block& b, const Raw& raw, const std::uint8_t* page, const Space& s,
                         float inverse_k, float inverse_q) const {
    const Digits of(s.digits, b.lane);
    const int g = b.lane / 4;
    float sums[4][4] = {};
    int c[4][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
        constexpr std::uint32_t kMask = 0xf0f0f0f0u;  // 16 times a code
        const std::uint32_t first = raw.words[tile][0][step], second = raw.words[tile][1][step];
        mma_s8(c[tile], first << 4 & kMask, second << 4 & kMask, first & kMask, second & kMask,
               of.b[step][0], of.b[step][1]);
      }
      if ((step + 1) * 32 % kGroup != 0) continue;
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale =
              scale_at(column_at(page, paired_column(b.warp, tile % 2 * 16 + h * 8 + g, tile / 2)),
                       step * 32 / kGroup);
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            int& sum = c[tile][2 * h + v];
            sums[tile][2 * h + v] =
                __fmaf_rn(scale, static_cast<float>(sum), sums[tile][2 * h + v]);
            sum = 0;
          }
        }
      }
    }
    const float weight_k = digit_weight(b.lane, 0x1p-4f * inverse_k),
                weight_q = digit_weight(b.lane, 0x1p-4f * inverse_q);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int x = 0; x < 4; ++x) sums[tile][x] *= x % 2 == 0 ? weight_k : weight_q;
    }
    const float2 first = finish_digits(sums[0], sums[1], b.lane),
                 second = finish_digits(sums[2], sums[3], b.lane);
    return make_float4(first.x, first.y, second.x, second.y);
  }

  struct Codes {
    std::uint32_t words[2][4];  // [half]
    float scale[2];
  };
  __device__ Codes load(const Block& b, const std::uint8_t* page) const {
    Codes codes;
    const int g = b.lane / 4, t = b.lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::uint8_t* column = column_at(page, b.warp * 16 + h * 8 + g);
#pragma unroll
      for (int w = 0; w < 4; ++w) codes.words[h][w] = load_word(column + 16 * t + 4 * w);
      codes.scale[h] = scale_at(column, 32 * t / kGroup);
    }
    return codes;
  }
  __device__ void decode(const Block& b, const Codes& codes, const std::uint8_t*, const float* rows,
                         const float*, Frags& x) const {
    rows += minor_place(b.lane % 4 * 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int q = 0; q < 8; ++q) {
        const std::uint32_t word = codes.words[h][q / 2] ^ 0x88888888u;
        const float4 four = *reinterpret_cast<const float4*>(rows + 4 * q);
        const float row[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float z = integer_to_float(word >> (16 * (q % 2) + 4 * e) & 0xfu, 8.0f);
          at(x, h, 4 * q + e) = z * (row[e] * codes.scale[h]);
        }
      }
    }
  }

  //   s = f16(absmax / L)     c = clamp(rne(x / s), -L, L)
  __device__ void encode(const Block& b, Frags& x, unsigned char*, std::uint8_t* to) const {
    const int g = b.lane / 4, t = b.lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float peak = 0;
#pragma unroll
      for (int f = 0; f < 32; ++f) peak = fmaxf(peak, fabsf(at(x, h, f)));
      peak = fmaxf(peak, __shfl_xor_sync(kAllLanes, peak, 1));  // two threads share a group
      std::uint8_t* column = to + map.codes + (b.warp * 16 + h * 8 + g) * map.stride;
      const std::uint16_t stored = encode_scale(__fdiv_rn(peak, kLevels));
      if (32 * t % kGroup == 0) {
        reinterpret_cast<std::uint16_t*>(column + kMaxWidth / 2)[32 * t / kGroup] = stored;
      }
      const float scale = half_bits_to_float(stored);
      const float inverse = __fdiv_rn(1.0f, scale);
      // As unsigned numbers, with an offset of 8 that is taken off below.
      const auto code = [&](int f) {
        const float y = divide(at(x, h, f), scale, inverse);
        return __float_as_uint(
            __fadd_rn(__fadd_rn(fminf(fmaxf(y, -kLevels), kLevels), kRound), 8.0f));
      };
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        std::uint32_t two[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) two[e] = code(8 * w + 2 * e) + (code(8 * w + 2 * e + 1) << 4);
        *reinterpret_cast<std::uint32_t*>(column + 16 * t + 4 * w) =
            __byte_perm(__byte_perm(two[0], two[1], 0x0040), __byte_perm(two[2], two[3], 0x0040),
                        0x5410) ^
            0x88888888u;
      }
    }
  }
};

}  // namespace statepack::cuda
