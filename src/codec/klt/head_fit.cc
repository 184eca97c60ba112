#include "codec/klt/head_fit.hpp"

// Vectors of SVE and RVV have no compile-time size and cannot stand in the arrays below; SSSE3 and
// the second AVX-512 dialect would do what their neighbours do.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/klt/head_fit.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first.
#include <hwy/highway.h>

#include <cstring>
#include <limits>
#include <type_traits>

#include "codec/pack.hpp"
#include "codec/run_vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace {

// Runs body(number of runs, first column) over all columns: blocks whose sums stay in registers
// while rows pass by, then single runs.
template <int kBlock, class Body>
HWY_INLINE void for_runs(int V_, Body&& body) {
  int j = 0;
  for (; j + kBlock * kRun <= V_; j += kBlock * kRun)
    body(std::integral_constant<int, kBlock>(), j);
  for (; j < V_; j += kRun) body(std::integral_constant<int, 1>(), j);
}
#if HWY_TARGET <= HWY_AVX3
constexpr int kSumRuns = 8, kFitRuns = 4;
#else
constexpr int kSumRuns = 1, kFitRuns = 1;
#endif

void normalise_rows_kernel(const float* z, const std::int32_t* from, const klt::RowFit* rows, int n,
                           int V_, float* y, float* sum, float* most) {
  const D d;
  const auto block = [&](auto n_runs, int begin) HWY_ATTR {
    constexpr int kVectors = decltype(n_runs)::value * kParts;
    V total[kVectors], peak[kVectors];
    for (int c = 0; c < kVectors; ++c) {
      total[c] = hn::LoadU(d, sum + begin + c * kLanes);
      peak[c] = hn::LoadU(d, most + begin + c * kLanes);
    }
    for (int i = 0; i < n; ++i) {
      const float* const in = z + std::int64_t{from[i]} * V_ + begin;
      float* const out = y + std::int64_t{i} * V_ + begin;
      const V factor = hn::Set(d, rows[i].inverse_r), limit = hn::Set(d, rows[i].inverse_limit);
      for (int c = 0; c < kVectors; ++c) {
        const V value = hn::Mul(hn::LoadU(d, in + c * kLanes), factor);
        hn::StoreU(value, d, out + c * kLanes);
        total[c] = hn::Add(total[c], hn::Mul(value, value));
        peak[c] = hn::Max(peak[c], hn::Mul(hn::Abs(value), limit));
      }
    }
    for (int c = 0; c < kVectors; ++c) {
      hn::StoreU(total[c], d, sum + begin + c * kLanes);
      hn::StoreU(peak[c], d, most + begin + c * kLanes);
    }
  };
  for_runs<kSumRuns>(V_, block);
}

// What clipping at reach[f] costs a row, for kCount factors from `first` on: costs[f].
template <int kCount>
HWY_INLINE void clipping_costs(const float* y, const klt::RowFit& row, const float* c0, int V_,
                               int first, float* costs) {
  const D d;
  V reach[kCount], cost[kCount][kParts];
  for (int f = 0; f < kCount; ++f) {
    reach[f] = hn::Set(d, row.reach[static_cast<std::size_t>(first + f)]);
    for (int p = 0; p < kParts; ++p) cost[f][p] = hn::Zero(d);
  }
  for (int j = 0; j < V_; j += kRun) {
    for (int p = 0; p < kParts; ++p) {
      const V value = hn::Abs(hn::LoadU(d, y + j + p * kLanes));
      const V c = hn::LoadU(d, c0 + j + p * kLanes);
      for (int f = 0; f < kCount; ++f) {
        const V over = hn::Max(hn::Sub(value, hn::Mul(reach[f], c)), hn::Zero(d));
        cost[f][p] = hn::Add(cost[f][p], hn::Mul(over, over));
      }
    }
  }
  HWY_ALIGN float parts[kRun];
  for (int f = 0; f < kCount; ++f) {
    for (int p = 0; p < kParts; ++p) hn::Store(cost[f][p], d, parts + p * kLanes);
    costs[first + f] = klt::add_parts(parts);
  }
}

// The factors in the middle first: mostly one of them wins, and their costs say so. Clipping costs
// no less at a smaller factor and the step no less at a larger one, in rounded arithmetic, too, so
// the two bounds below are bounds of what choose_factor() would compute.
void choose_factors_kernel(const float* y, const klt::RowFit* rows, const float* c0,
                           float c_squares, int n, int V_, std::uint8_t* factors) {
  static_assert(kRun == klt::kSumParts);
  static_assert(klt::RowFit::kFactors == 4);
  for (int i = 0; i < n; ++i) {
    const klt::RowFit& row = rows[i];
    const float* const from = y + std::int64_t{i} * V_;
    const auto step_cost = [&](int f) {
      return row.granular[static_cast<std::size_t>(f)] * c_squares;
    };
    float clipping[4];
    clipping_costs<2>(from, row, c0, V_, 1, clipping);
    // Of equal errors the smaller factor's counts, and no error that is not below infinity.
    int best = 0;
    float least = std::numeric_limits<float>::infinity();
    const auto consider = [&](int f, bool first_of_equals) {
      const float error = clipping[f] + step_cost(f);
      if (error < least || (first_of_equals && error == least)) {
        least = error;
        best = f;
      }
    };
    consider(1, false);
    consider(2, false);
    if (!(step_cost(3) >= least)) {
      clipping_costs<1>(from, row, c0, V_, 3, clipping);
      consider(3, false);
    }
    if (!(clipping[1] + step_cost(0) > least)) {
      clipping_costs<1>(from, row, c0, V_, 0, clipping);
      consider(0, true);
    }
    factors[i] = static_cast<std::uint8_t>(best);
  }
}

void quantise_rows_kernel(const float* y, const klt::RowFit* rows, const std::uint8_t* factors,
                          const float* inverse, int n, int V_, std::uint8_t* codes, float* num,
                          float* den) {
  const D d;
  const DI di;
  const hn::Rebind<std::uint8_t, D> d8;
  const std::int64_t tile = std::int64_t{n} * kRun;
  const auto block = [&](auto n_runs, int begin) HWY_ATTR {
    constexpr int kVectors = decltype(n_runs)::value * kParts;
    V scale[kVectors], sum_y[kVectors], sum_v[kVectors];
    for (int c = 0; c < kVectors; ++c) {
      scale[c] = hn::LoadU(d, inverse + begin + c * kLanes);
      sum_y[c] = sum_v[c] = hn::Zero(d);
    }
    for (int i = 0; i < n; ++i) {
      const klt::RowFit& row = rows[i];
      const V inverse_step = hn::Set(d, row.inverse_step[factors[i]]);
      const V middle = hn::Set(d, row.middle);
      const V top = hn::Set(d, 2 * row.middle - 1), offset = hn::Set(d, row.middle - 0.5f);
      const V step = hn::Set(d, row.step[factors[i]]), weight = hn::Set(d, row.weight);
      const float* const from = y + std::int64_t{i} * V_ + begin;
      std::uint8_t* const to = codes + begin / kRun * tile + std::int64_t{row.place} * kRun;
      for (int c = 0; c < kVectors; ++c) {
        const V value = hn::LoadU(d, from + c * kLanes);
        const V place = hn::Add(hn::Mul(hn::Mul(value, scale[c]), inverse_step), middle);
        const auto code = hn::ConvertTo(di, clamp(place, hn::Zero(d), top));
        const V v = hn::Mul(hn::Sub(hn::ConvertTo(d, code), offset), step);
        const V wv = hn::Mul(weight, v);
        sum_y[c] = hn::Add(sum_y[c], hn::Mul(wv, value));
        sum_v[c] = hn::Add(sum_v[c], hn::Mul(wv, v));
        hn::StoreU(hn::TruncateTo(d8, hn::BitCast(DU(), code)), d8,
                   to + c / kParts * tile + c % kParts * kLanes);
      }
    }
    for (int c = 0; c < kVectors; ++c) {
      hn::StoreU(sum_y[c], d, num + begin + c * kLanes);
      hn::StoreU(sum_v[c], d, den + begin + c * kLanes);
    }
  };
  for_runs<kFitRuns>(V_, block);
}

#if HWY_TARGET != HWY_SCALAR

// Eight codes a word: the gaps between bytes, then pairs, then quads close; then the two words of a
// run move together.
template <int kBits>
HWY_INLINE void pack_runs(const std::uint8_t* codes, int n, std::uint8_t* to) {
  const hn::ScalableTag<std::uint8_t> d8;
  const hn::Repartition<std::uint64_t, decltype(d8)> d64;
  constexpr int kRunsAtOnce = static_cast<int>(hn::MaxLanes(d8)) / kRun;
  constexpr int kGap = 8 - kBits;
  constexpr std::uint64_t kBytes = 0x00ff00ff00ff00ffu, kPairs = 0x0000ffff0000ffffu;
  alignas(16) std::uint8_t order[16];
  for (int e = 0; e < 16; ++e) {
    const int from = e < kBits ? e : 8 + e - kBits;
    order[e] = static_cast<std::uint8_t>(e < 2 * kBits ? from : 0x80);
  }
  const auto join = hn::LoadDup128(d8, order);
  HWY_ALIGN std::uint8_t runs[hn::MaxLanes(d8)];
  int i = 0;
  const auto pack = [&](const std::uint8_t* from) HWY_ATTR {
    auto x = hn::BitCast(d64, hn::LoadU(d8, from));
    x = hn::Or(hn::And(x, hn::Set(d64, kBytes)),
               hn::ShiftRight<kGap>(hn::And(x, hn::Set(d64, ~kBytes))));
    x = hn::Or(hn::And(x, hn::Set(d64, kPairs)),
               hn::ShiftRight<2 * kGap>(hn::And(x, hn::Set(d64, ~kPairs))));
    x = hn::Or(hn::And(x, hn::Set(d64, 0xffffffffu)),
               hn::ShiftRight<4 * kGap>(hn::And(x, hn::Set(d64, ~std::uint64_t{0xffffffffu}))));
    hn::Store(hn::TableLookupBytes(hn::BitCast(d8, x), join), d8, runs);
  };
  for (; i + kRunsAtOnce <= n; i += kRunsAtOnce) {
    pack(codes + i * kRun);
    for (int e = 0; e < kRunsAtOnce; ++e, to += 2 * kBits) std::memcpy(to, runs + e * kRun, kRun);
  }
  for (; i < n; ++i, to += 2 * kBits) {
    HWY_ALIGN std::uint8_t last[hn::MaxLanes(d8)] = {};
    std::memcpy(last, codes + i * kRun, kRun);
    pack(last);
    std::memcpy(to, runs, kRun);
  }
}

void pack_tile_kernel(const std::uint8_t* codes, int n, int bits, std::uint8_t* to) {
  switch (bits) {
    case 2:
      return pack_runs<2>(codes, n, to);
    case 3:
      return pack_runs<3>(codes, n, to);
    case 4:
      return pack_runs<4>(codes, n, to);
    case 5:
      return pack_runs<5>(codes, n, to);
    case 6:
      return pack_runs<6>(codes, n, to);
    default:
      std::memcpy(to, codes, static_cast<std::size_t>(n) * kRun);
  }
}

#else

void pack_tile_kernel(const std::uint8_t* codes, int n, int bits, std::uint8_t* to) {
  pack_codes(codes, std::int64_t{n} * kRun, bits, to);
}

#endif

}  // namespace
}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace statepack::klt {

HWY_EXPORT(normalise_rows_kernel);
HWY_EXPORT(choose_factors_kernel);
HWY_EXPORT(quantise_rows_kernel);
HWY_EXPORT(pack_tile_kernel);

RowFit::RowFit(Quantiser q, float r, float weight_, std::int32_t place_)
    : inverse_r(1 / r),
      inverse_limit(1 / most_beyond(q)),
      middle(static_cast<float>(1 << (q.bits - 1))),
      weight(weight_),
      place(place_) {
  for (std::size_t f = 0; f < kFactors; ++f) {
    reach[f] = kRowFactors[f] * klt::reach(q);
    granular[f] = klt::granular(q, static_cast<int>(f));
    step[f] = kRowFactors[f] * q.step;
    inverse_step[f] = 1 / step[f];
  }
}

void normalise_rows(const float* z, const std::int32_t* from, const RowFit* rows, int n, int V,
                    float* y, float* sum, float* most) {
  HWY_DYNAMIC_DISPATCH(normalise_rows_kernel)(z, from, rows, n, V, y, sum, most);
}

void choose_factors(const float* y, const RowFit* rows, const float* c0, float c_squares, int n,
                    int V, std::uint8_t* factors) {
  HWY_DYNAMIC_DISPATCH(choose_factors_kernel)(y, rows, c0, c_squares, n, V, factors);
}

void quantise_rows(const float* y, const RowFit* rows, const std::uint8_t* factors,
                   const float* inverse, int n, int V, std::uint8_t* codes, float* num,
                   float* den) {
  HWY_DYNAMIC_DISPATCH(quantise_rows_kernel)
  (y, rows, factors, inverse, n, V, codes, num, den);
}

void pack_tile(const std::uint8_t* codes, int n, int bits, std::uint8_t* to) {
  HWY_DYNAMIC_DISPATCH(pack_tile_kernel)(codes, n, bits, to);
}

}  // namespace statepack::klt
#endif
