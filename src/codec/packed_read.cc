#include "codec/packed_read.hpp"

// Vectors of SVE and RVV have no compile-time size and cannot stand in the arrays below; SSSE3 and
// the second AVX-512 dialect would do what their neighbours do.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/packed_read.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstring>

#include "base/half.hpp"
#include "base/sum_lanes-inl.hpp"
#include "codec/run_vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace {

static_assert(kRun == kRunLength);

// What a decoder makes of a run: its 16 numbers at places 0..15, place t holding code t, or where
// kPaired code 8 (t % 2) + t / 2: lanes that take turns between the two words of a run need one
// broadcast load and one shift for all their nibbles.

/// Bits [shift_t, ...) of word t % 2 of 8 bytes at every place.
HWY_INLINE void load_nibbles(const std::uint8_t* at, hn::Vec<DU> (&words)[kParts]) {
  std::uint64_t bits;
  std::memcpy(&bits, at, 8);
  const DU du;
#if HWY_TARGET == HWY_SCALAR
  for (int t = 0; t < kParts; ++t) {
    words[t] = hn::Set(du, static_cast<std::uint32_t>(bits >> (32 * (t % 2) + 4 * (t / 2))));
  }
#else
  const hn::Repartition<std::uint64_t, D> d64;
  const auto both = hn::BitCast(du, hn::Set(d64, bits));
  for (int h = 0; h < kParts; ++h) {
    // place t = h kLanes + l wants a shift by 4 (t / 2)
    const auto half_lane = hn::ShiftRight<1>(hn::Iota(du, static_cast<std::uint32_t>(h * kLanes)));
    words[h] = hn::Shr(both, hn::ShiftLeft<2>(half_lane));
  }
#endif
}

/// float(u ^ kFlip) - offset of the low nibble u at every place, where 16 lanes fit out of a
/// table.
template <std::uint32_t kFlip>
HWY_INLINE V nibble_value(hn::Vec<DU> word, V table, V offset) {
  const D d;
  const DU du;
#if HWY_TARGET == HWY_AVX3  // the permutation looks at the low four bits of an index alone
  (void)d, (void)du, (void)offset;
  return hn::TableLookupLanes(table, hn::Indices512<float>{word.raw});
#else
  (void)table;
  auto nibble = hn::And(word, hn::Set(du, 15));
  if constexpr (kFlip != 0) nibble = hn::Xor(nibble, hn::Set(du, kFlip));
  return hn::Sub(hn::ConvertTo(d, hn::BitCast(DI(), nibble)), offset);
#endif
}

template <std::uint32_t kFlip, int kTwiceOffset>
struct Nibbles {
  static constexpr bool kPaired = true;
  static constexpr std::int64_t kHighBytes = 0, kBytes = 8;
  V table, offset;
  Nibbles() {
    const D d;
    HWY_ALIGN float values[kRunLength];
    for (std::uint32_t u = 0; u < kRunLength; ++u) {
      values[u] = static_cast<float>(u ^ kFlip) - 0.5f * kTwiceOffset;
    }
    table = hn::Load(d, values);
    offset = hn::Set(d, 0.5f * kTwiceOffset);
  }
  HWY_INLINE void load(const std::uint8_t* at, const std::uint8_t*, V (&out)[kParts]) const {
    hn::Vec<DU> words[kParts];
    load_nibbles(at, words);
    for (int h = 0; h < kParts; ++h) out[h] = nibble_value<kFlip>(words[h], table, offset);
  }
};

/// Two's complement in two planes: z = low + 16 high, high in [-2, 1].
struct Planes6 {
  static constexpr bool kPaired = true;
  static constexpr std::int64_t kHighBytes = 4, kBytes = 8;
  V low, zero;
  Planes6() {
    const D d;
    HWY_ALIGN float values[kRunLength];
    for (int u = 0; u < kRunLength; ++u) values[u] = static_cast<float>(u);
    low = hn::Load(d, values);
    zero = hn::Zero(d);
  }
  HWY_INLINE void load(const std::uint8_t* at, const std::uint8_t* more, V (&out)[kParts]) const {
    const D d;
    const DU du;
    hn::Vec<DU> words[kParts];
    load_nibbles(at, words);
    std::uint32_t bits;
    std::memcpy(&bits, more, 4);
    for (int h = 0; h < kParts; ++h) {
      // place t holds code 8 (t % 2) + t / 2, whose pair of bits starts at twice that
      const auto t = hn::Iota(du, static_cast<std::uint32_t>(h * kLanes));
      const auto code = hn::Add(hn::ShiftLeft<3>(hn::And(t, hn::Set(du, 1))), hn::ShiftRight<1>(t));
      const auto pair = hn::And(hn::Shr(hn::Set(du, bits), hn::Add(code, code)), hn::Set(du, 3));
      const auto sign = hn::Sub(hn::BitCast(DI(), hn::Xor(pair, hn::Set(du, 2))), hn::Set(DI(), 2));
      out[h] =
          hn::Add(nibble_value<0>(words[h], low, zero), hn::ConvertTo(d, hn::ShiftLeft<4>(sign)));
    }
  }
};

template <class Byte, int kTwiceOffset>
struct Bytes {
  static constexpr bool kPaired = false;
  static constexpr std::int64_t kHighBytes = 0, kBytes = 16;
  HWY_INLINE void load(const std::uint8_t* at, const std::uint8_t*, V (&out)[kParts]) const {
    const D d;
    const hn::Rebind<Byte, D> db;
    for (int h = 0; h < kParts; ++h) {
      const auto bytes = hn::LoadU(db, reinterpret_cast<const Byte*>(at) + h * kLanes);
      out[h] = hn::ConvertTo(d, hn::PromoteTo(DI(), bytes));
      if constexpr (kTwiceOffset != 0) out[h] = hn::Sub(out[h], hn::Set(d, 0.5f * kTwiceOffset));
    }
  }
};

/// The two bytes that code t of kBits touches, at the bottom of word t, and its first bit in them.
template <int kBits>
struct TwoBytes {
  alignas(64) std::uint8_t places[4 * kRunLength];
  alignas(64) std::uint32_t shifts[kRunLength];
  constexpr TwoBytes() : places(), shifts() {
    for (int t = 0; t < kRunLength; ++t) {
      const int first = kBits * t / 8;
      places[4 * t] = static_cast<std::uint8_t>(first);
      places[4 * t + 1] = static_cast<std::uint8_t>(first + 1);
      places[4 * t + 2] = places[4 * t + 3] = 128;  // none
      shifts[t] = static_cast<std::uint32_t>(kBits * t % 8);
    }
  }
};

/// 3, 5 or 6 bits; reads 16 bytes, more than its own.
template <int kBits, int kTwiceOffset>
struct AcrossBytes {
  static constexpr bool kPaired = false;
  static constexpr std::int64_t kHighBytes = 0, kBytes = 2 * kBits;
  HWY_INLINE void load(const std::uint8_t* at, const std::uint8_t*, V (&out)[kParts]) const {
    const D d;
    constexpr std::uint32_t kMask = (1u << kBits) - 1;
#if HWY_TARGET == HWY_SCALAR
    for (int t = 0; t < kParts; ++t) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, at + kBits * t / 8, 2);
      out[t] =
          hn::Set(d, static_cast<float>(bits >> (kBits * t % 8) & kMask) - 0.5f * kTwiceOffset);
    }
#else
    const DU du;
    static constexpr TwoBytes<kBits> kTable;
    const hn::Repartition<std::uint8_t, D> d8;
    const auto run = hn::LoadDup128(d8, at);
    for (int h = 0; h < kParts; ++h) {
      const auto places = hn::Load(d8, kTable.places + 4 * h * kLanes);
      const auto words = hn::BitCast(du, hn::TableLookupBytesOr0(run, places));
      const auto shifts = hn::Load(du, kTable.shifts + h * kLanes);
      const auto codes = hn::And(hn::Shr(words, shifts), hn::Set(du, kMask));
      out[h] = hn::Sub(hn::ConvertTo(d, hn::BitCast(DI(), codes)), hn::Set(d, 0.5f * kTwiceOffset));
    }
#endif
  }
};

struct Levels2 {
  static constexpr bool kPaired = false;
  static constexpr std::int64_t kHighBytes = 0, kBytes = 4;
  V table;
  Levels2() {
    HWY_ALIGN float values[kRunLength];
    for (int u = 0; u < kRunLength; ++u) values[u] = static_cast<float>(2 * (u % 4) - 3);
    table = hn::Load(D(), values);
  }
  HWY_INLINE void load(const std::uint8_t* at, const std::uint8_t*, V (&out)[kParts]) const {
    const DU du;
    std::uint32_t bits;
    std::memcpy(&bits, at, 4);
    for (int h = 0; h < kParts; ++h) {
      const auto t = hn::Iota(du, static_cast<std::uint32_t>(h * kLanes));
      const auto pair = hn::Shr(hn::Set(du, bits), hn::Add(t, t));
#if HWY_TARGET == HWY_AVX3  // the table repeats, and an index counts by its low four bits alone
      out[h] = hn::TableLookupLanes(table, hn::Indices512<float>{pair.raw});
#else
      const auto code = hn::And(pair, hn::Set(du, 3));
      const auto twice = hn::BitCast(DI(), hn::Add(code, code));
      out[h] = hn::ConvertTo(D(), hn::Sub(twice, hn::Set(DI(), 3)));
#endif
    }
  }
};

struct Halves {
  static constexpr bool kPaired = false;
  static constexpr std::int64_t kHighBytes = 0, kBytes = 32;
  HWY_INLINE void load(const std::uint8_t* at, const std::uint8_t*, V (&out)[kParts]) const {
    const hn::Rebind<hwy::float16_t, D> dh;
    for (int h = 0; h < kParts; ++h) {
      out[h] = hn::PromoteTo(
          D(), hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(at) + h * kLanes));
    }
  }
};

template <class Fn>
HWY_INLINE void with_decoder(RunCodes codes, Fn&& fn) {
  switch (codes) {
    case RunCodes::kSigned8:
      return fn(Bytes<std::int8_t, 0>());
    case RunCodes::kSigned6:
      return fn(Planes6());
    case RunCodes::kSigned4:
      return fn(Nibbles<8, 16>());
    case RunCodes::kUnsigned8:
      return fn(Bytes<std::uint8_t, 0>());
    case RunCodes::kUnsigned4:
      return fn(Nibbles<0, 0>());
    case RunCodes::kOffset8:
      return fn(Bytes<std::uint8_t, 254>());
    case RunCodes::kOffset6:
      return fn(AcrossBytes<6, 62>());
    case RunCodes::kOffset4:
      return fn(Nibbles<0, 14>());
    case RunCodes::kLevels2:
      return fn(Levels2());
    case RunCodes::kHalf:
      return fn(Halves());
    case RunCodes::kMidrise3:
      return fn(AcrossBytes<3, 7>());
    case RunCodes::kMidrise4:
      return fn(Nibbles<0, 15>());
    case RunCodes::kMidrise5:
      return fn(AcrossBytes<5, 31>());
    case RunCodes::kMidrise6:
      return fn(AcrossBytes<6, 63>());
    case RunCodes::kMidrise8:
      return fn(Bytes<std::uint8_t, 255>());
  }
}

HWY_INLINE void store_columns(const V (&sum_p)[4], const V (&sum_r)[4], int n, float* p, float* r) {
  if (n == 4) {
    sum_lanes(D(), sum_p, p);
    sum_lanes(D(), sum_r, r);
    return;
  }
  float four[2][4];
  sum_lanes(D(), sum_p, four[0]);
  sum_lanes(D(), sum_r, four[1]);
  for (int o = 0; o < n; ++o) p[o] = four[0][o], r[o] = four[1][o];
}

// The scales of group g of four columns.
HWY_INLINE void load_scales(const CodeColumns& columns, int j, int n_valid, int g, float* scale) {
  std::uint16_t half[4];
  for (int o = 0; o < 4; ++o) {
    const std::int64_t column = j + (o < n_valid ? o : 0);
    std::memcpy(&half[o], columns.scales + column * columns.stride + 2 * std::int64_t{g}, 2);
  }
#if HWY_TARGET == HWY_SCALAR
  for (int o = 0; o < 4; ++o) scale[o] = f16_to_f32(half[o]);
#else
  const std::uint64_t four = half[0] | std::uint64_t{half[1]} << 16 | std::uint64_t{half[2]} << 32 |
                             std::uint64_t{half[3]} << 48;
  const hn::Full128<float> d4;
  const hn::Full64<std::uint64_t> bits;
  const auto halves = hn::BitCast(hn::Rebind<hwy::float16_t, decltype(d4)>(), hn::Set(bits, four));
  hn::Store(hn::PromoteTo(d4, halves), d4, scale);
#endif
}

// Codes are asked for this far ahead: about the latency of memory at the speed of the loops below.
// The machine's own prefetcher would start anew in every page of 4 KiB.
constexpr std::int64_t kAhead = 4096;

HWY_INLINE void prefetch(const std::uint8_t* at, std::int64_t n_bytes) {
  for (std::int64_t e = 0; e < n_bytes; e += 64) hwy::Prefetch(at + e);
}

// Four columns against a and b: eight sums hide the latency of the multiply-adds, and a and b are
// loaded once for the four.
template <bool kScaled, class Decoder>
HWY_INLINE void columns_block(const Decoder& decoder, const CodeColumns& columns, int j,
                              const float* a, const float* b, float* p, float* r) {
  const D d;
  const int n_valid = columns.V - j < 4 ? columns.V - j : 4;
  const std::uint8_t* at[4];
  const std::uint8_t* high[4];
  for (int o = 0; o < 4; ++o) {
    const std::int64_t column = j + (o < n_valid ? o : 0);
    at[o] = columns.first + column * columns.stride;
    high[o] = columns.high + column * columns.high_stride;
  }
  prefetch(at[3] + kAhead, 4 * columns.stride);
  V scaled_p[4], scaled_r[4];
  for (int o = 0; o < 4; ++o) scaled_p[o] = scaled_r[o] = hn::Zero(d);
  for (int g = 0, begin = 0; begin < columns.K; ++g, begin += columns.group) {
    const int end = columns.K - begin < columns.group ? columns.K : begin + columns.group;
    V sum_p[4], sum_r[4];
    for (int o = 0; o < 4; ++o) sum_p[o] = sum_r[o] = hn::Zero(d);
    for (int i = begin; i < end; i += kRunLength) {
      V va[kParts], vb[kParts];
      for (int h = 0; h < kParts; ++h) {
        va[h] = hn::Load(d, a + i + h * kLanes);
        vb[h] = hn::Load(d, b + i + h * kLanes);
      }
      for (int o = 0; o < 4; ++o) {
        V c[kParts];
        decoder.load(at[o], high[o], c);
        at[o] += Decoder::kBytes;
        high[o] += Decoder::kHighBytes;
        for (int h = 0; h < kParts; ++h) {
          sum_p[o] = hn::MulAdd(va[h], c[h], sum_p[o]);
          sum_r[o] = hn::MulAdd(vb[h], c[h], sum_r[o]);
        }
      }
    }
    if constexpr (kScaled) {
      HWY_ALIGN float scale[4];
      load_scales(columns, j, n_valid, g, scale);
      for (int o = 0; o < 4; ++o) {
        scaled_p[o] = hn::MulAdd(hn::Set(d, scale[o]), sum_p[o], scaled_p[o]);
        scaled_r[o] = hn::MulAdd(hn::Set(d, scale[o]), sum_r[o], scaled_r[o]);
      }
    } else {
      const std::int64_t to = std::int64_t{g} * columns.V + j;
      store_columns(sum_p, sum_r, n_valid, p + to, r + to);
    }
  }
  if constexpr (kScaled) store_columns(scaled_p, scaled_r, n_valid, p + j, r + j);
}

// x in the order in which a decoder hands out the codes of a run.
HWY_INLINE void arrange(bool paired, const float* x, int K, float* out) {
  if (!paired) {
    std::memcpy(out, x, static_cast<std::size_t>(K) * sizeof(float));
    return;
  }
  for (int i = 0; i < K; i += kRunLength) {
    for (int t = 0; t < kRunLength; ++t) out[i + t] = x[i + 8 * (t % 2) + t / 2];
  }
}

void read_columns_kernel(const CodeColumns& columns, const float* a, const float* b, float* packed,
                         float* p, float* r) {
  with_decoder(columns.codes, [&](const auto decoder) HWY_ATTR {
    float* const pa = packed;
    float* const pb = packed + columns.K;
    arrange(decoder.kPaired, a, columns.K, pa);
    arrange(decoder.kPaired, b, columns.K, pb);
    if (columns.scales == nullptr) {
      for (int j = 0; j < columns.V; j += 4)
        columns_block<false>(decoder, columns, j, pa, pb, p, r);
    } else {
      for (int j = 0; j < columns.V; j += 4) columns_block<true>(decoder, columns, j, pa, pb, p, r);
    }
  });
}

// The sums of a tile in the order of its columns.
HWY_INLINE void store_tile(bool paired, const V (&sum)[kParts], float* out) {
  const D d;
  if (!paired) {
    for (int h = 0; h < kParts; ++h) hn::StoreU(sum[h], d, out + h * kLanes);
    return;
  }
  HWY_ALIGN float places[kRunLength];
  for (int h = 0; h < kParts; ++h) hn::Store(sum[h], d, places + h * kLanes);
  for (int t = 0; t < kRunLength; ++t) out[8 * (t % 2) + t / 2] = places[t];
}

#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kRowsAtOnce = 4;  // 8 kParts sums
#else
constexpr int kRowsAtOnce = 2;
#endif

// Row i goes into sum i mod kRowsAtOnce, so that the multiply-adds of neighbouring rows do not wait
// for one another.
template <class Decoder>
HWY_INLINE void read_tile(const Decoder& decoder, const std::uint8_t* at, int K, const float* a,
                          const float* b, float* p, float* r) {
  const D d;
  V sum_p[kRowsAtOnce][kParts], sum_r[kRowsAtOnce][kParts];
  for (int row = 0; row < kRowsAtOnce; ++row) {
    for (int h = 0; h < kParts; ++h) sum_p[row][h] = sum_r[row][h] = hn::Zero(d);
  }
  const auto add = [&](int row, const std::uint8_t* run, float ai, float bi) HWY_ATTR {
    V c[kParts];
    decoder.load(run, nullptr, c);
    const V va = hn::Set(d, ai), vb = hn::Set(d, bi);
    for (int h = 0; h < kParts; ++h) {
      sum_p[row][h] = hn::MulAdd(va, c[h], sum_p[row][h]);
      sum_r[row][h] = hn::MulAdd(vb, c[h], sum_r[row][h]);
    }
  };
  int i = 0;
  for (; i + kRowsAtOnce <= K; i += kRowsAtOnce, at += kRowsAtOnce * Decoder::kBytes) {
    for (int row = 0; row < kRowsAtOnce; ++row) {
      add(row, at + row * Decoder::kBytes, a[i + row], b[i + row]);
    }
  }
  for (; i < K; ++i, at += Decoder::kBytes) add(i % kRowsAtOnce, at, a[i], b[i]);
  for (int h = 0; h < kParts; ++h) {
    for (int width = kRowsAtOnce / 2; width > 0; width /= 2) {
      for (int row = 0; row < width; ++row) {
        sum_p[row][h] = hn::Add(sum_p[row][h], sum_p[row + width][h]);
        sum_r[row][h] = hn::Add(sum_r[row][h], sum_r[row + width][h]);
      }
    }
  }
  store_tile(Decoder::kPaired, sum_p[0], p);
  store_tile(Decoder::kPaired, sum_r[0], r);
}

// The vectors of a paired run in the order of its codes.
HWY_INLINE void unpair(V (&v)[kParts]) {
  const D d;
#if HWY_TARGET == HWY_SCALAR
  V places[kParts];
  for (int t = 0; t < kParts; ++t) places[t] = v[t];
  for (int t = 0; t < kParts; ++t) v[8 * (t % 2) + t / 2] = places[t];
  (void)d;
#else
  if constexpr (kParts == 1) {
    alignas(64) static constexpr std::int32_t kOrder[kRunLength] = {0, 2, 4, 6, 8, 10, 12, 14,
                                                                    1, 3, 5, 7, 9, 11, 13, 15};
    v[0] = hn::TableLookupLanes(v[0], hn::SetTableIndices(d, kOrder));
  } else {
    V even[kParts / 2], odd[kParts / 2];
    for (int h = 0; h < kParts / 2; ++h) {
      even[h] = hn::ConcatEven(d, v[2 * h + 1], v[2 * h]);
      odd[h] = hn::ConcatOdd(d, v[2 * h + 1], v[2 * h]);
    }
    for (int h = 0; h < kParts / 2; ++h) v[h] = even[h], v[kParts / 2 + h] = odd[h];
  }
#endif
}

void restore_tiles_kernel(const CodeTiles& tiles, const float* r, int r_stride, const float* c,
                          float* X, int X_stride, const std::int32_t* places) {
  const D d;
  with_decoder(tiles.codes, [&](const auto decoder) HWY_ATTR {
    for (int t = 0; t < tiles.n_tiles; ++t) {
      const std::uint8_t* at = tiles.first + t * tiles.stride;
      V column[kParts];
      for (int h = 0; h < kParts; ++h) column[h] = hn::LoadU(d, c + t * kRunLength + h * kLanes);
      for (int i = 0; i < tiles.K; ++i, at += decoder.kBytes) {
        const std::int64_t place = places == nullptr ? i : places[i];
        float* const x = X + place * X_stride + t * kRunLength;
        V z[kParts];
        decoder.load(at, nullptr, z);
        if constexpr (decoder.kPaired) unpair(z);
        const V row = hn::Set(d, r[i * r_stride]);
        for (int h = 0; h < kParts; ++h) {
          hn::StoreU(hn::Mul(hn::Mul(row, column[h]), z[h]), d, x + h * kLanes);
        }
      }
    }
  });
}

void read_tiles_kernel(const CodeTiles& tiles, const float* a, const float* b, float* p, float* r) {
  with_decoder(tiles.codes, [&](const auto decoder) HWY_ATTR {
    for (int t = 0; t < tiles.n_tiles; ++t) {
      prefetch(tiles.first + t * tiles.stride + kAhead, tiles.stride);
      read_tile(decoder, tiles.first + t * tiles.stride, tiles.K, a, b, p + t * kRunLength,
                r + t * kRunLength);
    }
  });
}

// Halves as f32: whole vectors, then single values.
template <class DV>
HWY_INLINE hn::Vec<DV> load_halves(DV d, const std::uint8_t* halves, std::int64_t i) {
  const hn::Rebind<hwy::float16_t, DV> dh;
  return hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(halves) + i));
}

template <class DV>
HWY_INLINE void add_factor(DV d, const std::uint8_t* value, int j, float along_a, float along_b,
                           float* p, float* r) {
  const auto v = load_halves(d, value, j);
  hn::StoreU(hn::MulAdd(hn::Set(d, along_a), v, hn::LoadU(d, p + j)), d, p + j);
  hn::StoreU(hn::MulAdd(hn::Set(d, along_b), v, hn::LoadU(d, r + j)), d, r + j);
}

void read_low_rank_kernel(const std::uint8_t* factors, int rank, int K, int V_, const float* a,
                          const float* b, float* p, float* r) {
  const D d;
  const hn::CappedTag<float, 1> one;
  for (int m = 0; m < rank; ++m, factors += 2 * (std::int64_t{K} + V_)) {
    V sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};  // even and odd vectors
    int i = 0;
    for (int odd = 0; i + kLanes <= K; i += kLanes, odd ^= 1) {
      const V key = load_halves(d, factors, i);
      sums[odd] = hn::MulAdd(hn::LoadU(d, a + i), key, sums[odd]);
      sums[2 + odd] = hn::MulAdd(hn::LoadU(d, b + i), key, sums[2 + odd]);
    }
    float along[4];
    sum_lanes(D(), sums, along);
    float along_a = along[0] + along[1], along_b = along[2] + along[3];
    for (; i < K; ++i) {
      const float key = hn::GetLane(load_halves(one, factors, i));
      along_a += a[i] * key;
      along_b += b[i] * key;
    }
    const std::uint8_t* const value = factors + 2 * std::int64_t{K};
    int j = 0;
    for (; j + kLanes <= V_; j += kLanes) add_factor(d, value, j, along_a, along_b, p, r);
    for (; j < V_; ++j) add_factor(one, value, j, along_a, along_b, p, r);
  }
}

}  // namespace
}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace statepack {

HWY_EXPORT(read_columns_kernel);
HWY_EXPORT(read_tiles_kernel);
HWY_EXPORT(restore_tiles_kernel);
HWY_EXPORT(read_low_rank_kernel);

void read_columns(const CodeColumns& columns, const float* a, const float* b, float* packed,
                  float* p, float* r) {
  HWY_DYNAMIC_DISPATCH(read_columns_kernel)(columns, a, b, packed, p, r);
}

void read_tiles(const CodeTiles& tiles, const float* a, const float* b, float* p, float* r) {
  HWY_DYNAMIC_DISPATCH(read_tiles_kernel)(tiles, a, b, p, r);
}

void restore_tiles(const CodeTiles& tiles, const float* r, int r_stride, const float* c, float* X,
                   int X_stride, const std::int32_t* places) {
  HWY_DYNAMIC_DISPATCH(restore_tiles_kernel)(tiles, r, r_stride, c, X, X_stride, places);
}

void read_low_rank(const std::uint8_t* factors, int rank, int K, int V, const float* a,
                   const float* b, float* p, float* r) {
  HWY_DYNAMIC_DISPATCH(read_low_rank_kernel)(factors, rank, K, V, a, b, p, r);
}

}  // namespace statepack
#endif
