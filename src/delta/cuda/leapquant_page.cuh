// LeapQuant pages: the device's side of codec/leapquant/leapquant.cc.
//
// The fit sums in other orders than the CPU's and orthonormalises by CholeskyQR run twice, so codes
// differ in a few last places; the error of what a page restores is the same (test/cuda).
#pragma once

#include "delta/cuda/block.cuh"

namespace statepack::cuda {

/// Makes the R columns x[p][0..n) (kMaxWidth apart, in shared memory) orthonormal, in place. A
/// column that depends on those before it becomes zero. `gram` [R (R + 1) / 2]. The block meets.
template <int R>
__device__ inline void orthonormalise(const Block& b, float* x, int n, float* gram) {
  // Below this share of its squared length a remainder is rounding noise of the products.
  constexpr float kMinRemainder = 1e-6f;
  for (int pass = 0; pass < 2; ++pass) {
    for (int pair = b.warp; pair < R * (R + 1) / 2; pair += b.n_warps) {
      int p = 0, q = pair;
      while (q > p) q -= ++p;  // pair = p (p + 1) / 2 + q
      float sum = 0;
      for (int i = b.lane; i < n; i += 32) sum += x[p * kMaxWidth + i] * x[q * kMaxWidth + i];
      sum = warp_sum(sum);
      if (b.lane == 0) gram[pair] = sum;
    }
    __syncthreads();
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
    for (int i = b.thread; i < n; i += b.n_threads) {
      float row[R];
#pragma unroll
      for (int p = 0; p < R; ++p) {
        float value = x[p * kMaxWidth + i];
#pragma unroll
        for (int q = 0; q < p; ++q) value -= lower[p][q] * row[q];
        row[p] = value * inverse[p];
        x[p * kMaxWidth + i] = row[p];
      }
    }
    __syncthreads();
  }
}

__device__ inline void orthonormalise(const Block& b, float* x, int n, int R, float* gram) {
  switch (R) {
    case 1:
      return orthonormalise<1>(b, x, n, gram);
    case 2:
      return orthonormalise<2>(b, x, n, gram);
    case 3:
      return orthonormalise<3>(b, x, n, gram);
    case 4:
      return orthonormalise<4>(b, x, n, gram);
    case 5:
      return orthonormalise<5>(b, x, n, gram);
    case 6:
      return orthonormalise<6>(b, x, n, gram);
    case 7:
      return orthonormalise<7>(b, x, n, gram);
    case 8:
      return orthonormalise<8>(b, x, n, gram);
    default:
      return;
  }
}

template <int kBits>
struct LeapquantPage {
  static_assert(kBits == 8 || kBits == 6 || kBits == 4);
  using Columns = SpreadColumns;
  static constexpr int kLowBits = kBits == 6 ? 4 : kBits;
  static constexpr float kLevels = static_cast<float>((1 << (kBits - 1)) - 1);
  // Columns lie apart by an odd number of 16-byte steps, so that lanes read different banks.
  static constexpr int kPad = 16;

  const CodecView& codec;
  const HeadMap map;
  const int K, V;
  const int low_bytes, high_bytes;  // of a column
  std::uint8_t* const staged;

  static int staged_bytes(const LayerView& layer) {
    const int codes = layer.V * (layer.K * kLowBits / 8 + kPad) +
                      (kBits == 6 ? layer.V * (layer.K / 4 + kPad) : 0);
    // Behind the codes lies the rest of the page. A fit needs all of it for partial sums.
    const int rest = (layer.codec.f16_scales ? 2 : 4) * (layer.K + layer.V) + 3 * 128 +
                     2 * layer.codec.rank * (layer.K + layer.V);
    const int fit = layer.codec.rank * (layer.K / kWarpRows) * kMaxWidth * 4;
    return codes + rest > fit ? codes + rest : fit;
  }
  __device__ LeapquantPage(const LayerView& layer, int head, std::uint8_t* staged_)
      : codec(layer.codec),
        map(codec.heads[head]),
        K(layer.K),
        V(layer.V),
        low_bytes(K * kLowBits / 8),
        high_bytes(kBits == 6 ? K / 4 : 0),
        staged(staged_) {}

  __device__ std::uint8_t* low_at(int column) const { return staged + column * (low_bytes + kPad); }
  __device__ std::uint8_t* high_at(int column) const {
    return staged + V * (low_bytes + kPad) + column * (high_bytes + kPad);
  }
  __device__ std::uint8_t* rest() const {  // from the row scales on
    return staged + V * (low_bytes + kPad) + (kBits == 6 ? V * (high_bytes + kPad) : 0);
  }

  __device__ static void load_plane(const Block& b, std::uint8_t* to, const std::uint8_t* from,
                                    int n_columns, int width) {
    if (width % 16 == 0) {
      copy_rows_async(b, to, from, n_columns, width, width + kPad);
      return;
    }
    const int words = width / 4;
    for (int at = b.thread; at < n_columns * words; at += b.n_threads) {
      const int column = at / words, word = at % words;
      __pipeline_memcpy_async(to + column * (width + kPad) + 4 * word, from + 4 * at, 4);
    }
  }
  __device__ void load(const Block& b, const std::uint8_t* page) {
    const std::uint8_t* from = page + map.codes;
    load_plane(b, staged, from, V, low_bytes);
    if constexpr (kBits == 6) load_plane(b, high_at(0), from + codec.high_bits, V, high_bytes);
    const std::int64_t scales = map.row_scales - map.codes;
    copy_async(b, rest(), from + scales, static_cast<int>(map.code_bytes - scales));
  }

  __device__ float scale_at(std::int64_t section, int i) const {
    const std::uint8_t* at = rest() + (section - map.row_scales);
    return codec.f16_scales ? half_bits_to_float(reinterpret_cast<const std::uint16_t*>(at)[i])
                            : reinterpret_cast<const float*>(at)[i];
  }
  __device__ float row_factor(int i) const {
    return scale_at(map.row_scales, i) * (kBits == 4 ? step_down(i % 4) : 1.0f);
  }
  __device__ float column_factor(const Block& b, int c) const {
    const int j = Columns::column(b, c);
    return scale_at(map.column_scales, j < V ? j : 0) * (1.0f / kLevels);
  }
  __device__ int rank() const { return codec.rank; }
  __device__ const std::uint16_t* factors(int p) const {
    const std::int64_t at = codec.compensators - (map.row_scales - map.codes);
    return reinterpret_cast<const std::uint16_t*>(rest() + at) + p * (K + V);
  }
  __device__ float key(int p, int i) const { return half_bits_to_float(factors(p)[i]); }
  __device__ float value(int p, int j) const { return half_bits_to_float(factors(p)[K + j]); }

  /// The codes of a lane's columns, signs turned into an offset.
  struct Raw {
    std::uint32_t low[kLaneColumns][kBits == 8 ? 4 : 2];
    std::uint32_t high[kBits == 6 ? kLaneColumns : 1];
  };
  __device__ Raw fetch(const Block& b) const {
    Raw raw;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const int j = Columns::column(b, c) < V ? Columns::column(b, c) : 0;
      if constexpr (kBits == 8) {
        const uint4 all = *reinterpret_cast<const uint4*>(low_at(j) + b.first_row());
        raw.low[c][0] = all.x ^ 0x80808080u, raw.low[c][1] = all.y ^ 0x80808080u;
        raw.low[c][2] = all.z ^ 0x80808080u, raw.low[c][3] = all.w ^ 0x80808080u;
      } else {
        const std::uint32_t sign = kBits == 4 ? 0x88888888u : 0u;
        const uint2 low = *reinterpret_cast<const uint2*>(low_at(j) + b.first_row() / 2);
        raw.low[c][0] = low.x ^ sign, raw.low[c][1] = low.y ^ sign;
        if constexpr (kBits == 6) {
          raw.high[c] =
              *reinterpret_cast<const std::uint32_t*>(high_at(j) + b.first_row() / 4) ^ 0xaaaaaaaau;
        }
      }
    }
    return raw;
  }
  template <int kQuarter, class F>
  __device__ void visit(const Block&, const Raw& raw, F&& f) const {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      if constexpr (kBits == 8) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          f(4 * kQuarter + e, c, byte_to_float(raw.low[c][kQuarter], e, 128.0f));
        }
      } else {
        const std::uint32_t four = raw.low[c][kQuarter / 2] >> (kQuarter % 2 * 16);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (kBits == 4) {
            f(4 * kQuarter + e, c, nibble_to_float(four, e, 8.0f));
          } else {
            const std::uint32_t high = (raw.high[c] >> (2 * (4 * kQuarter + e))) & 3u;
            f(4 * kQuarter + e, c, integer_to_float(((four >> (4 * e)) & 0xfu) | high << 4, 32.0f));
          }
        }
      }
    }
  }
  template <class F>
  __device__ void for_each_region(F&& f) const {
    f(map.codes, static_cast<int>(map.code_bytes));
  }

  // to[p][i] = sum_j x_ij value[p][j]
  __device__ void times(const Block& b, const Tile& x, const float* value, float* to) const {
    for (int p = 0; p < rank(); ++p) {
      float w[kLaneColumns];
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int j = Columns::column(b, c);
        w[c] = j < V ? value[p * kMaxWidth + j] : 0.0f;
      }
      float sum[kWarpRows];
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        sum[i] = 0;
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) sum[i] += x[i][c] * w[c];
      }
      const float mine = fold_rows(sum, b.lane, Add());
      if (b.lane % 2 == 0) to[p * kMaxWidth + b.first_row() + b.lane / 2] = mine;
    }
    __syncthreads();
  }
  // to[p][j] = sum_i key[p][i] x_ij
  __device__ void transposed_times(const Block& b, const Tile& x, const float* key,
                                   float* to) const {
    float* partial = reinterpret_cast<float*>(staged);  // [rank][n_warps][kMaxWidth]
    for (int p = 0; p < rank(); ++p) {
      float sum[kLaneColumns] = {};
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const float k = key[p * kMaxWidth + b.first_row() + i];
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) sum[c] += k * x[i][c];
      }
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        partial[(p * b.n_warps + b.warp) * kMaxWidth + Columns::column(b, c)] = sum[c];
      }
    }
    __syncthreads();
    for (int at = b.thread; at < rank() * V; at += b.n_threads) {
      const int p = at / V, j = at % V;
      float sum = 0;
      for (int w = 0; w < b.n_warps; ++w) sum += partial[(p * b.n_warps + w) * kMaxWidth + j];
      to[p * kMaxWidth + j] = sum;
    }
    __syncthreads();
  }

  /// `fold` [n_warps][kMaxWidth]; `key` and `value` [rank][kMaxWidth].
  __device__ void encode(const Block& b, Tile& x, float* fold, float* key, float* value,
                         std::uint8_t* to) {
    std::uint8_t* const checkpoint = to + map.codes;
    // A1 = orth(S Q0),  Qv = orth(S^T A1);  again for more rounds.  U = S Qv
    for (int at = b.thread; at < rank() * V; at += b.n_threads) {
      value[at / V * kMaxWidth + at % V] = codec.start[at];
    }
    __syncthreads();
    if (rank() > 0) {
      for (int round = 0; round < codec.rounds; ++round) {
        times(b, x, value, key);
        orthonormalise(b, key, K, rank(), fold);
        transposed_times(b, x, key, value);
        orthonormalise(b, value, V, rank(), fold);
      }
      times(b, x, value, key);
    }
    // Ktil = fp16(U),  Util = fp16(Qv)
    auto* factors = reinterpret_cast<std::uint16_t*>(checkpoint + codec.compensators);
    for (int at = b.thread; at < rank() * (K + V); at += b.n_threads) {
      const int p = at / (K + V), i = at % (K + V);
      float& factor = i < K ? key[p * kMaxWidth + i] : value[p * kMaxWidth + i - K];
      const std::uint16_t half = saturate_to_half_bits(factor);
      factors[at] = half;
      factor = half_bits_to_float(half);
    }
    __syncthreads();

    // E = S - Ktil Util^T,  s_k[c] = sqrt(mean_v |E[c,v]|),  s_v[v] = max_c |E[c,v]| / s_k[c]
    for (int p = 0; p < rank(); ++p) {
      float w[kLaneColumns];
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int j = Columns::column(b, c);
        w[c] = j < V ? value[p * kMaxWidth + j] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const float k = key[p * kMaxWidth + b.first_row() + i];
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) x[i][c] -= k * w[c];
      }
    }
    float mean[kWarpRows];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      mean[i] = 0;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) mean[i] += fabsf(x[i][c]);
    }
    const float row_mean = fold_rows(mean, b.lane, Add()) / static_cast<float>(V);
    // A state so large that its fit is not finite is kept as zero, as the CPU keeps it.
    if (__syncthreads_or(!is_finite(row_mean))) {
      for (int at = b.thread * 4; at < static_cast<int>(map.code_bytes); at += b.n_threads * 4) {
        *reinterpret_cast<std::uint32_t*>(checkpoint + at) = 0;
      }
      return;
    }
    const float s_k = store_scale(__fsqrt_rn(row_mean), to + map.row_scales,
                                  b.first_row() + b.lane / 2, b.lane % 2 == 0);
    const float inverse = 1.0f / s_k;
    float peak[kLaneColumns] = {};
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const float r = __shfl_sync(kAllLanes, inverse, 2 * i);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        x[i][c] *= r;
        peak[c] = fmaxf(peak[c], fabsf(x[i][c]));
      }
    }
    fold_columns<Columns>(b, peak, 0, b.n_warps, fold, Max());

    // Z[v][c] = clamp( rint( qmax E[c,v] / (s_k[c] s_v[v]) ), -qmax, qmax )
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const int j = Columns::column(b, c);
      if (j >= V) continue;
      const float s_v = store_scale(peak[c], to + map.column_scales, j, b.warp == 0);
      pack_column(b, x, c, j, kLevels / s_v);
    }
    __syncthreads();
    copy_plane(b, checkpoint, staged, low_bytes);
    if constexpr (kBits == 6) copy_plane(b, checkpoint + codec.high_bits, high_at(0), high_bytes);
  }

 private:
  /// Clamps a scale to what its format holds; returns what was stored.
  __device__ float store_scale(float scale, std::uint8_t* section, int i, bool store) const {
    if (codec.f16_scales) {
      const std::uint16_t half = encode_scale(scale);
      if (store) reinterpret_cast<std::uint16_t*>(section)[i] = half;
      return half_bits_to_float(half);
    }
    const float stored = fmaxf(scale, 1e-12f);
    if (store) reinterpret_cast<float*>(section)[i] = stored;
    return stored;
  }
  __device__ void pack_column(const Block& b, const Tile& x, int c, int j, float factor) const {
    std::uint32_t z[kWarpRows];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      z[i] = __float_as_uint(round_code(x[i][c] * factor, kLevels));
    }
    if constexpr (kBits == 8) {
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = __byte_perm(__byte_perm(z[4 * w], z[4 * w + 1], 0x0040),
                               __byte_perm(z[4 * w + 2], z[4 * w + 3], 0x0040), 0x5410);
      }
      *reinterpret_cast<uint4*>(low_at(j) + b.first_row()) =
          make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      std::uint32_t low[2] = {}, high = 0;
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        low[i / 8] |= (z[i] & 0xfu) << (4 * (i % 8));
        if constexpr (kBits == 6) high |= ((z[i] >> 4) & 3u) << (2 * i);
      }
      *reinterpret_cast<uint2*>(low_at(j) + b.first_row() / 2) = make_uint2(low[0], low[1]);
      if constexpr (kBits == 6) {
        *reinterpret_cast<std::uint32_t*>(high_at(j) + b.first_row() / 4) = high;
      }
    }
  }
  __device__ void copy_plane(const Block& b, std::uint8_t* to, const std::uint8_t* from,
                             int width) const {
    const int words = width / 4;
    for (int at = b.thread; at < V * words; at += b.n_threads) {
      const int column = at / words, word = at % words;
      *reinterpret_cast<std::uint32_t*>(to + 4 * at) =
          *reinterpret_cast<const std::uint32_t*>(from + column * (width + kPad) + 4 * word);
    }
  }
};

}  // namespace statepack::cuda
