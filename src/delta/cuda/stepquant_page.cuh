// STEPQuant pages: the device's side of codec/stepquant/stepquant.cc.
//
// Row means sum in another order than the CPU's, so a scale or a near-midpoint code may differ in
// its last place; the error of what a page restores is the same (test/cuda).
#pragma once

#include "delta/cuda/block.cuh"

namespace statepack::cuda {

/// Scalar gate: every row of a head has one width, tiles are 16 columns wide.
/// Channel gate: every row has its own, tiles are 4 columns wide: those of one lane.
template <Gate kGate>
struct StepquantPage {
  using Columns = NextColumns;
  static constexpr bool kMixed = kGate == Gate::kChannel;
  static constexpr int kPivot = 16;      // bits
  static constexpr int kGroupLanes = 8;  // that share a row scale of 2-bit rows: 32 columns
  // Tiles lie apart by more than they are long, so that lanes of several tiles read other banks.
  static constexpr int kPad = kMixed ? 4 : 16;

  const HeadMap map;
  const RowMap* rows_of_head;  // in global memory
  const int K, V, tile, shift;
  std::uint8_t* const staged;

  static int tile_bytes(const LayerView& layer) { return layer.K * layer.codec.tile * 2; }
  static int n_groups(const LayerView& layer) {
    return kMixed ? 1 : (layer.V + layer.codec.group - 1) / layer.codec.group;
  }
  static int row_scales_bytes(const LayerView& layer) {
    return (2 * layer.K * n_groups(layer) + 15) / 16 * 16 + 16;
  }
  /// The widest that a plan may make a head.
  static int staged_bytes(const LayerView& layer) {
    const int codes = layer.V / layer.codec.tile * (tile_bytes(layer) + kPad) + 16;
    return codes + row_scales_bytes(layer) + 2 * layer.V + 16 +
           layer.K * static_cast<int>(sizeof(RowMap));
  }

  __device__ StepquantPage(const LayerView& layer, int head, std::uint8_t* staged_)
      : map(layer.codec.heads[head]),
        rows_of_head(layer.codec.rows + head * layer.K),
        K(layer.K),
        V(layer.V),
        tile(layer.codec.tile),
        shift(static_cast<int>(map.codes & 3)),
        staged(staged_) {}

  // Shared memory: row maps, column scales, row scales, tiles.
  __device__ const RowMap& row(int i) const { return reinterpret_cast<const RowMap*>(staged)[i]; }
  __device__ std::uint8_t* column_scales() const { return staged + K * sizeof(RowMap); }
  __device__ std::uint8_t* row_scales() const { return column_scales() + 2 * V + 16; }
  __device__ std::uint8_t* tiles() const {
    return row_scales() + (2 * map.n_row_scales + 15) / 16 * 16 + 16;
  }
  __device__ int pitch() const { return map.stride + kPad; }
  __device__ int tile_offset(int t) const { return shift + t * pitch(); }
  __device__ std::uint8_t* tile_at(int t) const { return tiles() + tile_offset(t); }

  /// Whole words around [offset, offset + n) of the page; byte `offset` lands at to + offset % 4.
  static __device__ void load_words(const Block& b, std::uint8_t* to, const std::uint8_t* page,
                                    std::int64_t offset, int n) {
    const int lead = static_cast<int>(offset & 3);
    const std::uint8_t* from = page + offset - lead;
    for (int at = b.thread * 4; at < lead + n; at += b.n_threads * 4) {
      __pipeline_memcpy_async(to + at, from + at, 4);
    }
  }
  __device__ void load(const Block& b, const std::uint8_t* page) {
    copy_async(b, staged, reinterpret_cast<const std::uint8_t*>(rows_of_head),
               K * static_cast<int>(sizeof(RowMap)));
    if (map.n_row_scales > 0) {
      load_words(b, column_scales(), page, map.column_scales, 2 * V);
      load_words(b, row_scales(), page, map.row_scales, 2 * map.n_row_scales);
    }
    const int n_tiles = V / tile;
    if constexpr (kMixed) {
      // A tile starts at any even byte and keeps its place within a word. Words on a border are
      // fetched for both tiles; the pad has room for the stranger's half.
      const int words = (map.stride + 3) / 4 + 1;
      for (int at = b.thread; at < n_tiles * words; at += b.n_threads) {
        const int t = at / words, word = at % words;
        const std::int64_t begin = (map.codes + t * map.stride) & ~std::int64_t{3};
        if (begin + 4 * word >= map.codes + (t + 1) * map.stride) continue;
        const int lands = (shift + t * pitch()) & ~3;
        __pipeline_memcpy_async(tiles() + lands + 4 * word, page + begin + 4 * word, 4);
      }
    } else {
      for (int t = 0; t < n_tiles; ++t) {
        copy_async(b, tile_at(t), page + map.codes + t * map.stride, map.stride);
      }
    }
  }

  __device__ float row_scale(int index) const {
    const auto* halves =
        reinterpret_cast<const std::uint16_t*>(row_scales() + (map.row_scales & 3));
    return half_bits_to_float(halves[index]);
  }
  static __device__ float norm(int bits) {
    return kMixed ? static_cast<float>(1 << (8 - bits)) : 1.0f;
  }
  __device__ float row_factor(int i) const {
    const RowMap& r = row(i);
    if (r.bits == kPivot || map.signed_levels) return 1;
    return row_scale(r.scale) * norm(r.bits);
  }
  __device__ float column_scale(const Block& b, int c) const {
    const int j = Columns::column(b, c);
    const auto* halves =
        reinterpret_cast<const std::uint16_t*>(column_scales() + (map.column_scales & 3));
    return half_bits_to_float(halves[j < V ? j : 0]);
  }
  __device__ float column_factor(const Block& b, int c) const {
    if (kMixed || map.bits == kPivot)
      return 1;  // mixed rows: in visit(), past which pivots have none
    return column_scale(b, c);
  }
  __device__ float key(int, int) const { return 0; }
  __device__ float value(int, int) const { return 0; }
  __device__ int rank() const { return 0; }

  /// 32 bits of the tiles from any byte on.
  __device__ std::uint32_t bits_at(int offset) const {
    const auto* words = reinterpret_cast<const std::uint32_t*>(tiles()) + offset / 4;
    return __funnelshift_r(words[0], words[1], static_cast<unsigned>(offset % 4) * 8);
  }
  static __device__ float half_of(std::uint32_t word, int upper) {
    return half_bits_to_float(static_cast<std::uint16_t>(word >> (16 * upper)));
  }
  /// Four codes in the low bits of a word, whatever lies above them, spread to a byte each; and
  /// back.
  static __device__ std::uint32_t spread(std::uint32_t four, int bits) {
    switch (bits) {
      case 4:
        four = (four & 0xffu) | (four << 8 & 0x00ff0000u);
        return (four | four << 4) & 0x0f0f0f0fu;
      case 6:
        four = (four & 0xfffu) | (four << 4 & 0x0fff0000u);
        return (four & 0x003f003fu) | (four << 2 & 0x3f003f00u);
      case 2:
        four = (four & 0xfu) | (four << 12 & 0x000f0000u);
        return (four | four << 6) & 0x03030303u;
      default:
        return four;
    }
  }
  static __device__ std::uint32_t squeeze(std::uint32_t bytes, int bits) {
    switch (bits) {
      case 4:
        bytes = (bytes | bytes >> 4) & 0x00ff00ffu;
        return (bytes | bytes >> 8) & 0xffffu;
      case 6:
        bytes = (bytes & 0x003f003fu) | (bytes >> 2 & 0x0fc00fc0u);
        return (bytes & 0xfffu) | (bytes >> 4 & 0xfff000u);
      case 2:
        bytes = (bytes | bytes >> 6) & 0x000f000fu;
        return (bytes | bytes >> 12) & 0xffu;
      default:
        return bytes;
    }
  }

  /// The codes of a thread, a byte each, or its pivots.
  struct Raw {
    std::uint32_t words[kWarpRows];
  };
  __device__ Raw fetch(const Block& b) const {
    Raw raw;
    const int column = Columns::column(b, 0) < V ? Columns::column(b, 0) : 0;
    const int at = tile_offset(column / tile);
    if constexpr (kMixed) {
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const RowMap& r = row(b.first_row() + i);
        // A lane's pivots do not fit a word: visit() reads them.
        if (r.bits != kPivot) raw.words[i] = spread(bits_at(at + r.offset), r.bits);
      }
      return raw;
    }
    const int within = column % tile;
    const std::uint8_t* from =
        tiles() + at + (within * map.bits >> 3) + b.first_row() * 2 * map.bits;
    switch (map.bits) {
      case 4:
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
          raw.words[i] = spread(*reinterpret_cast<const std::uint16_t*>(from + i * 8), 4);
        }
        break;
      case 6:
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
          raw.words[i] = spread(bits_at(at + within / 4 * 3 + (b.first_row() + i) * 12), 6);
        }
        break;
      case 8:
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) {
          raw.words[i] = *reinterpret_cast<const std::uint32_t*>(from + i * 16);
        }
        break;
      case 2:
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) raw.words[i] = spread(from[i * 4], 2);
        break;
      default:  // pivots: see above
        break;
    }
    return raw;
  }
  template <int kQuarter, class F>
  __device__ void visit(const Block& b, const Raw& raw, F&& f) const {
    constexpr int kBegin = 4 * kQuarter, kEnd = kBegin + 4;
    const int column = Columns::column(b, 0) < V ? Columns::column(b, 0) : 0;
    const int at = tile_offset(column / tile);
    if constexpr (kMixed) {
      float scale[kLaneColumns] = {};
      if (map.n_row_scales > 0) {
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) scale[c] = column_scale(b, c);
      }
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        const RowMap& r = row(b.first_row() + i);
        if (r.bits == kPivot) {
          const std::uint32_t words[2] = {bits_at(at + r.offset), bits_at(at + r.offset + 4)};
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c) f(i, c, half_of(words[c / 2], c % 2));
        } else {
          const float offset = static_cast<float>((1 << (r.bits - 1)) - 1);
#pragma unroll
          for (int c = 0; c < kLaneColumns; ++c) {
            f(i, c, scale[c] * byte_to_float(raw.words[i], c, offset));
          }
        }
      }
      return;
    }
    if (map.bits == kPivot) {
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        const auto* words = reinterpret_cast<const std::uint32_t*>(
            tiles() + at + (b.first_row() + i) * 32 + column % tile * 2);
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) f(i, c, half_of(words[c / 2], c % 2));
      }
      return;
    }
    if (map.signed_levels) {  // levels -3, -1, 1, 3 and a row scale for every group of columns
#pragma unroll
      for (int i = kBegin; i < kEnd; ++i) {
        const float scale =
            row_scale(row(b.first_row() + i).scale + column / (kLaneColumns * kGroupLanes));
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          f(i, c, scale * (2.0f * byte_to_float(raw.words[i], c, 0.0f) - 3.0f));
        }
      }
      return;
    }
    const float offset = static_cast<float>((1 << (map.bits - 1)) - 1);
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) f(i, c, byte_to_float(raw.words[i], c, offset));
    }
  }
  template <class F>
  __device__ void for_each_region(F&& f) const {
    f(map.codes, static_cast<int>(map.code_bytes));
    if (map.n_row_scales == 0) return;
    f(map.row_scales, 2 * map.n_row_scales);
    f(map.column_scales, 2 * V);
  }

  static __device__ float signed_level(float y) {
    return copysignf(fabsf(y) >= 2.0f ? 3.0f : 1.0f, y < 0.0f ? -1.0f : 1.0f);
  }

  //   1  r_i = h16( sqrt( max(m_i, 1e-20) / w_i ) )        2  Y_ij = X_ij / (r_i n_i)
  //   3  c0_j = h16( max_i |Y_ij| / Q_i )                  4  z_ij = enc(Y_ij / c0_j)
  //   5  num_j = sum_i (w_i r_i n_i)^2 z_ij Y_ij,  den_j = sum_i (w_i r_i n_i)^2 z_ij^2
  //      c_j = den_j > 0 ? h16( num_j / den_j ) : c0_j     6  z_ij = enc(Y_ij / c_j)
  /// `weights` and `inverses` [groups of a row, at most 4][kMaxWidth].
  __device__ void encode(const Block& b, Tile& x, float* fold, float* weights, float* inverses,
                         std::uint8_t* to) {
    if (!kMixed && map.signed_levels) {
      fit<true>(b, x, fold, weights, inverses, to);
    } else {
      fit<false>(b, x, fold, weights, inverses, to);
    }
  }

 private:
  template <bool kSigned>
  __device__ void fit(const Block& b, Tile& x, float* fold, float* weights, float* inverses,
                      std::uint8_t* to) {
    float column[kLaneColumns] = {};
    if (map.n_row_scales > 0) {
      const int g = kSigned ? b.lane / kGroupLanes * kMaxWidth : 0;
      if constexpr (kSigned) {
        grouped_row_scales(b, x, to, weights, inverses);
      } else {
        row_scales_of(b, x, to, weights, inverses);
      }
      __syncwarp();
      const float one_level = kMixed ? 1.0f : level(0);
      float num[kLaneColumns] = {}, den[kLaneColumns] = {};
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const int line = b.first_row() + i;
        if (kMixed && is_pivot(line)) continue;
        const float inverse = inverses[g + line];
        const float per_level = kMixed ? __fdividef(1.0f, level(line)) : 1.0f;
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          x[i][c] *= inverse;
          column[c] = fmaxf(column[c], fabsf(x[i][c]) * per_level);
        }
      }
      fold_columns<Columns>(b, column, 0, b.n_warps, fold, Max());
      float per_column[kLaneColumns];
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        column[c] = half_bits_to_float(encode_scale(__fdividef(column[c], one_level)));
        per_column[c] = __fdividef(1.0f, column[c]);
      }
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const int line = b.first_row() + i;
        if (kMixed && is_pivot(line)) continue;
        const float weight = weights[g + line];
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          float z;
          if constexpr (kSigned) {
            z = signed_level(x[i][c] * per_column[c]);
          } else {  // no clamp: c0 is the peak's own scale, so no code passes Q by half a step
            z = code_value(__fmaf_rn(x[i][c], per_column[c], kRound));
          }
          const float wz = weight * z;
          num[c] = __fmaf_rn(wz, x[i][c], num[c]);
          den[c] = __fmaf_rn(wz, z, den[c]);
        }
      }
      fold_columns<Columns>(b, num, 0, b.n_warps, fold, Add());
      fold_columns<Columns>(b, den, 0, b.n_warps, fold, Add());
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const float fitted = den[c] > 0 ? __fdiv_rn(num[c], den[c]) : column[c];
        const std::uint16_t stored = encode_scale(fitted);
        const int j = Columns::column(b, c);
        if (b.warp == 0 && j < V) {
          reinterpret_cast<std::uint16_t*>(to + map.column_scales)[j] = stored;
        }
        column[c] = __fdividef(1.0f, half_bits_to_float(stored));
      }
    }
    pack<kSigned>(b, x, column, to);
  }

  __device__ int bits_of(int line) const { return kMixed ? row(line).bits : map.bits; }
  __device__ bool is_pivot(int line) const { return bits_of(line) == kPivot; }
  /// Q of the codes.
  __device__ float level(int line) const {
    return map.signed_levels ? 3.0f : static_cast<float>((1 << (bits_of(line) - 1)) - 1);
  }

  /// Stores a row scale and leaves what the fit needs of it: (w r n)^2 and 1 / (r n).
  __device__ void set_row_scale(std::uint8_t* to, const RowMap& r, int g, float mean, bool store,
                                float& weight, float& inverse) const {
    const std::uint16_t stored = encode_scale(__fsqrt_rn(__fdiv_rn(fmaxf(mean, 1e-20f), r.weight)));
    if (store) reinterpret_cast<std::uint16_t*>(to + map.row_scales)[r.scale + g] = stored;
    const float rn = half_bits_to_float(stored) * norm(r.bits);
    weight = (r.weight * rn) * (r.weight * rn);
    inverse = __fdiv_rn(1.0f, rn);
  }

  __device__ void row_scales_of(const Block& b, const Tile& x, std::uint8_t* to, float* weights,
                                float* inverses) const {
    float mean[kWarpRows];
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      mean[i] = 0;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) mean[i] += fabsf(x[i][c]);
    }
    const float m = fold_rows(mean, b.lane, Add()) / static_cast<float>(V);
    const int line = b.first_row() + b.lane / 2;
    if (b.lane % 2 == 0 && !is_pivot(line)) {
      set_row_scale(to, row(line), 0, m, true, weights[line], inverses[line]);
    }
  }

  __device__ void grouped_row_scales(const Block& b, const Tile& x, std::uint8_t* to,
                                     float* weights, float* inverses) const {
    const int g = b.lane / kGroupLanes;
    const int n = min(V - g * kGroupLanes * kLaneColumns, kGroupLanes * kLaneColumns);
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      float sum = 0;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sum += fabsf(x[i][c]);
      for (int step = kGroupLanes / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, step);
      }
      const int line = b.first_row() + i;
      if (b.lane % kGroupLanes != 0) continue;
      const int at = g * kMaxWidth + line;
      set_row_scale(to, row(line), g, sum / static_cast<float>(max(n, 1)), n > 0, weights[at],
                    inverses[at]);
    }
  }

  /// Step 6 into shared memory, then to the page. `x` holds Y, but X itself in pivot rows.
  template <bool kSigned>
  __device__ void pack(const Block& b, const Tile& x, const float (&inverse)[kLaneColumns],
                       std::uint8_t* to) const {
    const int column = Columns::column(b, 0);
    std::uint8_t* const lane_tile = tile_at((column < V ? column : 0) / tile);
    const int within = column % tile;
    if constexpr (kMixed) {  // bytes of a tile that no row owns are zero
      __syncthreads();
      for (int at = b.thread; at < V / tile * pitch() / 4 + 1; at += b.n_threads) {
        reinterpret_cast<std::uint32_t*>(tiles())[at] = 0;
      }
      __syncthreads();
    }
    const auto store_pivots = [&](int i, std::uint8_t* at) {
      auto* halves = reinterpret_cast<std::uint16_t*>(at);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) halves[c] = saturate_to_half_bits(x[i][c]);
    };
    const auto codes = [&](int i, float Q) {  // a byte each
      std::uint32_t u[kLaneColumns];
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        if constexpr (kSigned) {
          u[c] = static_cast<std::uint32_t>((signed_level(x[i][c] * inverse[c]) + 3.0f) * 0.5f);
        } else {  // z + 128: an even offset leaves ties as they are
          const float z = __fmaf_rn(x[i][c], inverse[c], kRound + 128.0f);
          u[c] = __float_as_uint(fminf(fmaxf(z, kRound + 128.0f - Q), kRound + 128.0f + Q));
        }
      }
      const std::uint32_t four =
          __byte_perm(__byte_perm(u[0], u[1], 0x0040), __byte_perm(u[2], u[3], 0x0040), 0x5410);
      return kSigned ? four : four - (128u - static_cast<std::uint32_t>(Q)) * 0x01010101u;
    };
    if constexpr (kMixed) {
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const RowMap& r = row(b.first_row() + i);
        std::uint8_t* at = lane_tile + r.offset;
        if (column >= V) continue;
        if (r.bits == kPivot) {
          store_pivots(i, at);
          continue;
        }
        const std::uint32_t four =
            squeeze(codes(i, static_cast<float>((1 << (r.bits - 1)) - 1)), r.bits);
        for (int byte = 0; byte < r.bits / 2; ++byte) {
          at[byte] = static_cast<std::uint8_t>(four >> (8 * byte));
        }
      }
    } else {
      const float Q = level(0);
      std::uint8_t* from = lane_tile + (within * map.bits >> 3) + b.first_row() * 2 * map.bits;
      const bool inside = column < V;
      switch (map.bits) {
        case 4:
#pragma unroll
          for (int i = 0; i < kWarpRows; ++i) {
            const auto four = static_cast<std::uint16_t>(squeeze(codes(i, Q), 4));
            if (inside) *reinterpret_cast<std::uint16_t*>(from + i * 8) = four;
          }
          break;
        case 6: {
          // Four lanes fill three words: each of the first three ends its word with its
          // neighbour's.
          const int quarter = within / 4;
          auto* words = reinterpret_cast<std::uint32_t*>(lane_tile + b.first_row() * 12) + quarter;
#pragma unroll
          for (int i = 0; i < kWarpRows; ++i) {
            const std::uint32_t four = squeeze(codes(i, Q), 6);
            const std::uint32_t next = __shfl_down_sync(kAllLanes, four, 1);
            const std::uint32_t word = four >> (8 * quarter) | next << (24 - 8 * quarter);
            if (inside && quarter < 3) words[3 * i] = word;
          }
          break;
        }
        case 8:
#pragma unroll
          for (int i = 0; i < kWarpRows; ++i) {
            const std::uint32_t four = codes(i, Q);
            if (inside) *reinterpret_cast<std::uint32_t*>(from + i * 16) = four;
          }
          break;
        case 2:
#pragma unroll
          for (int i = 0; i < kWarpRows; ++i) {
            const auto four = static_cast<std::uint8_t>(squeeze(codes(i, Q), 2));
            if (inside) from[i * 4] = four;
          }
          break;
        default:
#pragma unroll
          for (int i = 0; i < kWarpRows; ++i) {
            if (inside) store_pivots(i, from + i * 32);
          }
      }
    }
    __syncthreads();
    if constexpr (kMixed) {  // neighbouring heads share words, never pairs of bytes
      const int pairs = map.stride / 2;
      for (int at = b.thread; at < V / tile * pairs; at += b.n_threads) {
        const int t = at / pairs, pair = at % pairs;
        reinterpret_cast<std::uint16_t*>(to + map.codes + t * map.stride)[pair] =
            reinterpret_cast<const std::uint16_t*>(tile_at(t))[pair];
      }
    } else {
      for (int t = 0; t < V / tile; ++t) {
        std::uint8_t* out = to + map.codes + t * map.stride;
        for (int at = b.thread * 16; at < map.stride; at += b.n_threads * 16) {
          *reinterpret_cast<uint4*>(out + at) = *reinterpret_cast<const uint4*>(tile_at(t) + at);
        }
      }
    }
  }
};

}  // namespace statepack::cuda
