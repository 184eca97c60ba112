#include "codec/stepquant/tile_fit.hpp"

// Vectors of SVE and RVV have no compile-time size and cannot stand in the arrays below; SSSE3 and
// the second AVX-512 dialect would do what their neighbours do.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/stepquant/tile_fit.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first.
#include <hwy/highway.h>

#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/simd_clones.hpp"
#include "codec/run_vectors-inl.hpp"
#include "codec/scale.hpp"

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace {

void row_sums_kernel(const float* X, int n_rows, int V_, int width, float* sums) {
  const D d;
  for (int i = 0; i < n_rows; ++i) {
    for (int begin = 0; begin < V_; begin += width) {
      const int end = V_ - begin < width ? V_ : begin + width;
      V lanes[kParts];
      for (V& lane : lanes) lane = hn::Zero(d);
      for (int j = begin; j < end; j += kRun) {
        for (int h = 0; h < kParts; ++h) {
          lanes[h] = hn::Add(lanes[h], hn::Abs(hn::LoadU(d, X + j + h * kLanes)));
        }
      }
      *sums++ = sum_of_run(lanes);
    }
    X += V_;
  }
}

// Runs body(number of runs, first column) over all columns: blocks of kBlock runs, whose sums stay
// in registers while rows pass by, then single runs.
template <int kBlock, class Body>
HWY_INLINE void for_runs(int V_, Body&& body) {
  int j = 0;
  for (; j + kBlock * kRun <= V_; j += kBlock * kRun)
    body(std::integral_constant<int, kBlock>(), j);
  for (; j < V_; j += kRun) body(std::integral_constant<int, 1>(), j);
}
#if HWY_TARGET <= HWY_AVX3
constexpr int kBlockRuns = 4;
#else
constexpr int kBlockRuns = 1;
#endif

// The groups of the runs of a block.
template <int kRuns>
struct Groups {
  int of[kRuns];
  Groups(int begin, int width) {
    for (int c = 0; c < kRuns; ++c) of[c] = (begin + c * kRun) / width;
  }
};

template <bool kFindTiny>
HWY_INLINE bool normalise(const float* X, const float* r, const float* inverse, int n_rows, int V_,
                          int width, float* y, float* peak) {
  const D d;
  const DU du;
  const int n_groups = (V_ + width - 1) / width;
  auto smallest = hn::Set(du, 0xffffffffU);  // of |x| as bits, less 1: zero becomes the largest
  const auto block = [&](auto n_runs, int begin) HWY_ATTR {
    constexpr int kRuns = decltype(n_runs)::value;
    const Groups<kRuns> groups(begin, width);
    V top[kRuns][kParts];
    for (int c = 0; c < kRuns; ++c) {
      for (int h = 0; h < kParts; ++h) {
        top[c][h] = hn::LoadU(d, peak + begin + c * kRun + h * kLanes);
      }
    }
    for (int i = 0; i < n_rows; ++i) {
      const std::int64_t at = std::int64_t{i} * V_ + begin;
      for (int c = 0; c < kRuns; ++c) {
        const V scale = hn::Set(d, r[i * n_groups + groups.of[c]]);
        const V one_over = hn::Set(d, inverse[i * n_groups + groups.of[c]]);
        for (int h = 0; h < kParts; ++h) {
          const std::int64_t e = at + c * kRun + h * kLanes;
          const V x = hn::LoadU(d, X + e);
          const V quotient = divide_by_half(x, scale, one_over);
          hn::StoreU(quotient, d, y + e);
          top[c][h] = hn::Max(top[c][h], hn::Abs(quotient));
          if constexpr (kFindTiny) {
            smallest = hn::Min(smallest, hn::Sub(hn::BitCast(du, hn::Abs(x)), hn::Set(du, 1)));
          }
        }
      }
    }
    for (int c = 0; c < kRuns; ++c) {
      for (int h = 0; h < kParts; ++h) {
        hn::StoreU(top[c][h], d, peak + begin + c * kRun + h * kLanes);
      }
    }
  };
  for_runs<kBlockRuns>(V_, block);
  constexpr std::uint32_t kTiny = (127 - 100) << 23;  // 2^-100
  return hn::AllFalse(du, hn::Lt(smallest, hn::Set(du, kTiny - 1)));
}

void normalise_rows_kernel(const float* X, const float* r, const float* inverse, int n_rows, int V_,
                           float* y, float* peak) {
  normalise<false>(X, r, inverse, n_rows, V_, V_, y, peak);
}

bool normalise_groups_kernel(const float* X, const float* r, const float* inverse, int n_rows,
                             int V_, int width, float* y, float* peak) {
  return normalise<true>(X, r, inverse, n_rows, V_, width, y, peak);
}

template <bool kSigned>
HWY_INLINE void accumulate(const float* y, const float* c0, const float* weight, int K, int V_,
                           int width, float Q, float* num, float* den) {
  const D d;
  const int n_groups = (V_ + width - 1) / width;
  const V limit = hn::Set(d, Q), minus_limit = hn::Set(d, -Q);
  const auto block = [&](auto n_runs, int begin) HWY_ATTR {
    constexpr int kRuns = decltype(n_runs)::value;
    const Groups<kRuns> groups(begin, width);
    V scale[kRuns][kParts], inverse[kRuns][kParts], n[kRuns][kParts], s[kRuns][kParts];
    for (int c = 0; c < kRuns; ++c) {
      for (int h = 0; h < kParts; ++h) {
        scale[c][h] = hn::LoadU(d, c0 + begin + c * kRun + h * kLanes);
        inverse[c][h] = hn::Div(hn::Set(d, 1.0f), scale[c][h]);
        n[c][h] = s[c][h] = hn::Zero(d);
      }
    }
    for (int i = 0; i < K; ++i) {
      const float* const row = y + std::int64_t{i} * V_ + begin;
      for (int c = 0; c < kRuns; ++c) {
        const V w = hn::Set(d, weight[i * n_groups + groups.of[c]]);
        for (int h = 0; h < kParts; ++h) {
          const V value = hn::LoadU(d, row + c * kRun + h * kLanes);
          V z;
          if constexpr (kSigned) {
            // |y / c| rounds to 2 or more exactly where |y| >= 2 c: the next float below 2 c is
            // (2 - 2^-23) c, whose quotient rounds to less.
            const auto outer = hn::Ge(hn::Abs(value), hn::Add(scale[c][h], scale[c][h]));
            const V level = hn::IfThenElse(outer, hn::Set(d, 3.0f), hn::Set(d, 1.0f));
            z = hn::IfThenElse(hn::Lt(value, hn::Zero(d)), hn::Neg(level), level);
          } else {
            z = round_even(
                clamp(divide_by_half(value, scale[c][h], inverse[c][h]), minus_limit, limit));
          }
          const V wz = hn::Mul(w, z);
          n[c][h] = hn::Add(n[c][h], hn::Mul(wz, value));
          s[c][h] = hn::Add(s[c][h], hn::Mul(wz, z));
        }
      }
    }
    for (int c = 0; c < kRuns; ++c) {
      for (int h = 0; h < kParts; ++h) {
        hn::StoreU(n[c][h], d, num + begin + c * kRun + h * kLanes);
        hn::StoreU(s[c][h], d, den + begin + c * kRun + h * kLanes);
      }
    }
  };
  for_runs<kBlockRuns>(V_, block);
}

void accumulate_columns_kernel(const float* y, const float* c0, const float* weight, int K, int V_,
                               int width, float Q, float* num, float* den) {
  if (Q == 0) return accumulate<true>(y, c0, weight, K, V_, width, Q, num, den);
  accumulate<false>(y, c0, weight, K, V_, width, Q, num, den);
}

#if HWY_TARGET == HWY_AVX3
// The first kBytes bytes of each word of a block, one behind the other.
template <int kBytes>
constexpr std::array<std::uint8_t, 16> quad_bytes() {
  std::array<std::uint8_t, 16> order{};
  for (int e = 0; e < 4 * kBytes; ++e) {
    order[static_cast<std::size_t>(e)] = static_cast<std::uint8_t>(4 * (e / kBytes) + e % kBytes);
  }
  return order;
}
// The first kWords words of each block, one behind the other.
template <int kWords>
constexpr std::array<std::int32_t, 16> run_words() {
  std::array<std::int32_t, 16> order{};
  for (int e = 0; e < 4 * kWords; ++e) {
    order[static_cast<std::size_t>(e)] = 4 * (e / kWords) + e % kWords;
  }
  return order;
}
#endif

// The low bytes of the words of four rows of a run, packed to kBits each: 4 runs of 2 kBits bytes.
template <int kBits>
HWY_INLINE void pack_rows(const hn::Vec<DU> (&rows)[4][kParts], std::uint32_t offset,
                          std::uint8_t* to) {
#if HWY_TARGET == HWY_SCALAR
  for (int row = 0; row < 4; ++row) {
    std::uint8_t* const run = to + 2 * kBits * row;
    std::memset(run, 0, 2 * kBits);
    for (int t = 0; t < kRun; ++t) {
      const std::uint32_t u = (hn::GetLane(rows[row][t]) + offset) & 0xff;
      const std::uint32_t bits = u << (kBits * t % 8);
      run[kBits * t / 8] = static_cast<std::uint8_t>(run[kBits * t / 8] | bits);
      if (bits > 0xff) run[kBits * t / 8 + 1] = static_cast<std::uint8_t>(bits >> 8);
    }
  }
#else
  const DU du;
  const hn::Repartition<std::uint8_t, D> d8;
  const auto low = hn::Set(du, 0xff);
  alignas(16) static constexpr std::uint8_t kTranspose[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                              2, 6, 10, 14, 3, 7, 11, 15};
  const auto transpose = hn::LoadDup128(d8, kTranspose);
  const auto add = hn::Set(d8, static_cast<std::uint8_t>(offset));
#if HWY_TARGET != HWY_AVX3
  HWY_ALIGN std::uint32_t words[4][4];  // [row][columns 4 q .. 4 q + 3]
#endif
  for (int h = 0; h < kParts; ++h) {
    // Byte r of a word from row r; then, in blocks of four words, byte and word change places.
    auto word = hn::And(rows[0][h], low);
    word = hn::OrAnd(word, hn::ShiftLeft<8>(rows[1][h]), hn::Set(du, 0xff00));
    word = hn::OrAnd(word, hn::ShiftLeft<16>(rows[2][h]), hn::Set(du, 0xff0000));
    word = hn::Or(word, hn::ShiftLeft<24>(rows[3][h]));
    auto quad =
        hn::BitCast(du, hn::Add(hn::TableLookupBytes(hn::BitCast(d8, word), transpose), add));
    if constexpr (kBits < 8) {  // gaps close between bytes, then between pairs
      quad = hn::OrAnd(hn::And(quad, hn::Set(du, 0x00ff00ff)), hn::ShiftRight<8 - kBits>(quad),
                       hn::Set(du, 0x00ff00ffU << kBits));
      quad = hn::OrAnd(hn::And(quad, hn::Set(du, 0xffff)), hn::ShiftRight<16 - 2 * kBits>(quad),
                       hn::Set(du, 0xffffU << (2 * kBits)));
    }
#if HWY_TARGET == HWY_AVX3
    // Quads of a row side by side in a block, their bits at its bottom, blocks behind one another.
    constexpr int kQuadBytes = kBits / 2, kRunWords = kBits / 2;
    alignas(64) static constexpr std::int32_t kGather[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                             2, 6, 10, 14, 3, 7, 11, 15};
    alignas(16) static constexpr auto kSqueeze = quad_bytes<kQuadBytes>();
    alignas(64) static constexpr auto kJoin = run_words<kRunWords>();
    quad = hn::TableLookupLanes(quad, hn::SetTableIndices(du, kGather));
    if constexpr (kBits < 8) {
      quad = hn::BitCast(
          du, hn::TableLookupBytes(hn::BitCast(d8, quad), hn::LoadDup128(d8, kSqueeze.data())));
      quad = hn::TableLookupLanes(quad, hn::SetTableIndices(du, kJoin.data()));
    }
    if constexpr (kBits == 8) {
      hn::StoreU(quad, du, reinterpret_cast<std::uint32_t*>(to));
    } else {
      const hn::Half<DU> du8;
      const hn::Half<decltype(du8)> du4;
      if constexpr (kBits >= 4) {
        hn::StoreU(hn::LowerHalf(du8, quad), du8, reinterpret_cast<std::uint32_t*>(to));
      }
      if constexpr (kBits == 6) {
        hn::StoreU(hn::LowerHalf(du4, hn::UpperHalf(du8, quad)), du4,
                   reinterpret_cast<std::uint32_t*>(to + 32));
      }
      if constexpr (kBits == 2) {
        hn::StoreU(hn::LowerHalf(du4, hn::LowerHalf(du8, quad)), du4,
                   reinterpret_cast<std::uint32_t*>(to));
      }
    }
  }
#else
    HWY_ALIGN std::uint32_t some[kLanes];
    hn::Store(quad, du, some);
    for (int l = 0; l < kLanes; ++l) words[l % 4][h * (kLanes / 4) + l / 4] = some[l];
  }
  for (int row = 0; row < 4; ++row) {
    std::uint64_t run[2] = {};
    for (int q = 0; q < 4; ++q) {
      const std::uint64_t bits = words[row][q];
      const int at = 4 * kBits * q;
      run[at / 64] |= bits << at % 64;
      if (at % 64 + 4 * kBits > 64) run[1] |= bits >> (64 - at % 64);
    }
    std::memcpy(to + 2 * kBits * row, run, 2 * kBits);
  }
#endif
#endif
}

template <int kBits>
HWY_INLINE void encode_tile(const float* y, const float* c, int K, int V_, std::uint8_t* to) {
  const D d;
  const DU du;
  constexpr float Q = static_cast<float>((1 << (kBits - 1)) - 1);
  const V limit = hn::Set(d, Q), minus_limit = hn::Set(d, -Q);
  V scale[kParts], inverse[kParts];
  for (int h = 0; h < kParts; ++h) {
    scale[h] = hn::LoadU(d, c + h * kLanes);
    inverse[h] = hn::Div(hn::Set(d, 1.0f), scale[h]);
  }
  for (int i = 0; i < K; i += 4) {
    const int n_rows = K - i < 4 ? K - i : 4;
    hn::Vec<DU> words[4][kParts];
    for (int row = 0; row < 4; ++row) {
      const float* const from = y + std::int64_t{i + (row < n_rows ? row : 0)} * V_;
      for (int h = 0; h < kParts; ++h) {
        const V value = hn::LoadU(d, from + h * kLanes);
        if constexpr (kBits == 2) {  // u = (z + 3) / 2: 0, 1, 2, 3 for -3, -1, 1, 3
          const auto outer = hn::Ge(hn::Abs(value), hn::Add(scale[h], scale[h]));
          const auto size = hn::IfThenElseZero(hn::RebindMask(du, outer), hn::Set(du, 1));
          const auto negative = hn::RebindMask(du, hn::Lt(value, hn::Zero(d)));
          words[row][h] = hn::IfThenElse(negative, hn::Sub(hn::Set(du, 1), size),
                                         hn::Add(hn::Set(du, 2), size));
        } else {
          const V code = clamp(divide_by_half(value, scale[h], inverse[h]), minus_limit, limit);
          words[row][h] = hn::BitCast(du, with_magic(code));
        }
      }
    }
    constexpr std::uint32_t kOffset = kBits == 2 ? 0 : (1 << (kBits - 1)) - 1;
    if (n_rows == 4) {
      pack_rows<kBits>(words, kOffset, to);
    } else {
      std::uint8_t runs[8 * kBits];
      pack_rows<kBits>(words, kOffset, runs);
      std::memcpy(to, runs, static_cast<std::size_t>(2 * kBits * n_rows));
    }
    to += 8 * kBits;
  }
}

void encode_tiles_kernel(const float* y, const float* c, int K, int V_, int bits,
                         std::uint8_t* tiles, std::int64_t stride) {
  for (int j = 0; j < V_; j += kRun, tiles += stride) {
    switch (bits) {
      case 2:
        encode_tile<2>(y + j, c + j, K, V_, tiles);
        break;
      case 4:
        encode_tile<4>(y + j, c + j, K, V_, tiles);
        break;
      case 6:
        encode_tile<6>(y + j, c + j, K, V_, tiles);
        break;
      default:
        encode_tile<8>(y + j, c + j, K, V_, tiles);
        break;
    }
  }
}

}  // namespace
}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace statepack::stepquant {

HWY_EXPORT(row_sums_kernel);
HWY_EXPORT(normalise_rows_kernel);
HWY_EXPORT(normalise_groups_kernel);
HWY_EXPORT(accumulate_columns_kernel);
HWY_EXPORT(encode_tiles_kernel);

void row_sums(const float* X, int n_rows, int V, int width, float* sums) {
  HWY_DYNAMIC_DISPATCH(row_sums_kernel)(X, n_rows, V, width, sums);
}

SP_CLONES void row_scales(const float* sums, const float* weight, int n, float n_columns,
                          std::uint16_t* stored, float* r, float* inverse) {
  for (int e = 0; e < n; ++e) {
    const float mean = sums[e] / n_columns;
    const std::uint16_t half =
        encode_scale(std::sqrt((mean > kMinMean ? mean : kMinMean) / weight[e]));
    stored[e] = half;
    r[e] = f16_to_f32(half);
    inverse[e] = 1.0f / r[e];
  }
}

SP_CLONES void first_column_scales(const float* peak, int V, float Q, float* c0) {
  for (int j = 0; j < V; ++j) c0[j] = h16(peak[j] / Q);
}

SP_CLONES void squared_weights(const float* weight, const float* r, int n, float* out) {
  for (int e = 0; e < n; ++e) {
    const float wr = weight[e] * r[e];
    out[e] = wr * wr;
  }
}

void normalise_rows(const float* X, const float* r, const float* inverse, int n_rows, int V,
                    float* y, float* peak) {
  HWY_DYNAMIC_DISPATCH(normalise_rows_kernel)(X, r, inverse, n_rows, V, y, peak);
}

bool normalise_groups(const float* X, const float* r, const float* inverse, int n_rows, int V,
                      int width, float* y, float* peak) {
  return HWY_DYNAMIC_DISPATCH(normalise_groups_kernel)(X, r, inverse, n_rows, V, width, y, peak);
}

void accumulate_columns(const float* y, const float* c0, const float* weight, int K, int V,
                        int width, float Q, float* num, float* den) {
  HWY_DYNAMIC_DISPATCH(accumulate_columns_kernel)(y, c0, weight, K, V, width, Q, num, den);
}

void encode_tiles(const float* y, const float* c, int K, int V, int bits, std::uint8_t* tiles,
                  std::int64_t stride) {
  HWY_DYNAMIC_DISPATCH(encode_tiles_kernel)(y, c, K, V, bits, tiles, stride);
}

}  // namespace statepack::stepquant
#endif
