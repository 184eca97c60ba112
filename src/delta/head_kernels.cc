#include "delta/kernels.hpp"

// Vectors of SVE and RVV have no compile-time size and cannot stand in the arrays below; SSSE3 and
// the second AVX-512 dialect would do what their neighbours do.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "delta/head_kernels.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first.
#include <hwy/highway.h>

#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using One = hn::CappedTag<float, 1>;

#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kManyRegisters = 1;  // 32
#else
constexpr int kManyRegisters = 0;  // 16
#endif

// Runs body(tag, number of vectors, first column) over all columns: blocks of kBlock vectors, then
// vectors, then single columns.
template <int kBlock, class Body>
HWY_INLINE void for_columns(int V, Body&& body) {
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
  int j = 0;
  for (; j + kBlock * kLanes <= V; j += kBlock * kLanes) {
    body(D(), std::integral_constant<int, kBlock>(), j);
  }
  for (; j + kLanes <= V; j += kLanes) body(D(), std::integral_constant<int, 1>(), j);
  for (; j < V; ++j) body(One(), std::integral_constant<int, 1>(), j);
}

template <class DV>
HWY_INLINE hn::Vec<hn::RebindToSigned<DV>> magnitude_bits(DV d, hn::Vec<DV> x) {
  (void)d;
  return hn::BitCast(hn::RebindToSigned<DV>(), hn::Abs(x));
}

// Largest magnitudes by their bits, of whole vectors and of single columns. Integer maxima may be
// taken in any order.
struct Peak {
  hn::Vec<hn::RebindToSigned<D>> whole;
  hn::Vec<hn::RebindToSigned<One>> single;

  HWY_INLINE Peak() {  // written out: an implicit one would lack the target's instructions
    whole = hn::Zero(hn::RebindToSigned<D>());
    single = hn::Zero(hn::RebindToSigned<One>());
  }

  template <class DV>
  HWY_INLINE void add(DV d, hn::Vec<DV> x) {
    if constexpr (std::is_same_v<DV, D>) {
      whole = hn::Max(whole, magnitude_bits(d, x));
    } else {
      single = hn::Max(single, magnitude_bits(d, x));
    }
  }
  HWY_INLINE std::int32_t value() const {
    HWY_ALIGN std::int32_t lanes[hn::MaxLanes(D())];
    hn::Store(whole, hn::RebindToSigned<D>(), lanes);
    std::int32_t top = hn::GetLane(single);
    for (const std::int32_t lane : lanes) top = lane > top ? lane : top;
    return top;
  }
};

// Both sums of a block of columns stay in registers while the rows pass by.
template <bool kPeak>
HWY_INLINE std::int32_t read_two(const float* S, int K, int V, const float* a, const float* b,
                                 float* p, float* r, bool add) {
  Peak peak;
  const auto block = [&](auto d, auto n, int j) HWY_ATTR {
    constexpr int kVectors = decltype(n)::value;
    const int lanes = static_cast<int>(hn::MaxLanes(d));
    hn::Vec<decltype(d)> sum_p[kVectors], sum_r[kVectors];
    for (int c = 0; c < kVectors; ++c) {
      sum_p[c] = add ? hn::LoadU(d, p + j + c * lanes) : hn::Zero(d);
      sum_r[c] = add ? hn::LoadU(d, r + j + c * lanes) : hn::Zero(d);
    }
    const float* s = S + j;
    for (int i = 0; i < K; ++i, s += V) {
      const auto va = hn::Set(d, a[i]), vb = hn::Set(d, b[i]);
      for (int c = 0; c < kVectors; ++c) {
        const auto x = hn::LoadU(d, s + c * lanes);
        sum_p[c] = hn::Add(sum_p[c], hn::Mul(va, x));
        sum_r[c] = hn::Add(sum_r[c], hn::Mul(vb, x));
        if constexpr (kPeak) peak.add(d, x);
      }
    }
    for (int c = 0; c < kVectors; ++c) {
      hn::StoreU(sum_p[c], d, p + j + c * lanes);
      hn::StoreU(sum_r[c], d, r + j + c * lanes);
    }
  };
  for_columns<kManyRegisters ? 8 : 4>(V, block);
  return peak.value();
}

void read_two_kernel(const float* S, int K, int V, const float* a, const float* b, float* p,
                     float* r, bool add) {
  read_two<false>(S, K, V, a, b, p, r, add);
}

std::int32_t read_two_and_peak_kernel(const float* S, int K, int V, const float* a, const float* b,
                                      float* p, float* r) {
  return read_two<true>(S, K, V, a, b, p, r, false);
}

// Values stay in registers while all updates are added to them: of one row, or of kRows, which then
// share the loads of u.
template <int kRows, bool kFused>
HWY_INLINE void update_rows(const float* S, int V, int i, const kernel::Update& by, float* X,
                            Peak& peak) {
  const auto block = [&](auto d, auto n_vectors, int j) HWY_ATTR {
    constexpr int kVectors = decltype(n_vectors)::value;
    const int lanes = static_cast<int>(hn::MaxLanes(d));
    hn::Vec<decltype(d)> sum[kRows][kVectors];
    for (int row = 0; row < kRows; ++row) {
      const auto decay = hn::Set(d, by.d[std::int64_t{i + row} * by.d_stride]);
      const float* const s = S + std::int64_t{i + row} * V + j;
      for (int c = 0; c < kVectors; ++c) {
        sum[row][c] = hn::Mul(decay, hn::LoadU(d, s + c * lanes));
      }
    }
    for (int m = 0; m < by.n; ++m) {
      const float* const keys = by.keys + m * by.key_stride + i;
      const float* const u = by.values + std::int64_t{m} * V + j;
      for (int c = 0; c < kVectors; ++c) {
        const auto value = hn::LoadU(d, u + c * lanes);
        for (int row = 0; row < kRows; ++row) {
          const auto key = hn::Set(d, keys[row]);
          if constexpr (kFused) {
            sum[row][c] = hn::MulAdd(key, value, sum[row][c]);
          } else {
            sum[row][c] = hn::Add(sum[row][c], hn::Mul(key, value));
          }
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      float* const x = X + std::int64_t{i + row} * V + j;
      for (int c = 0; c < kVectors; ++c) {
        hn::StoreU(sum[row][c], d, x + c * lanes);
        peak.add(d, sum[row][c]);
      }
    }
  };
  for_columns<8>(V, block);
}

std::int32_t update_kernel(const float* S, int K, int V, const kernel::Update& by, float* X) {
  Peak peak;
  int i = 0;
  if (by.fused) {
    if constexpr (kManyRegisters) {
      for (; i + 2 <= K; i += 2) update_rows<2, true>(S, V, i, by, X, peak);
    }
    for (; i < K; ++i) update_rows<1, true>(S, V, i, by, X, peak);
  }
  for (; i < K; ++i) update_rows<1, false>(S, V, i, by, X, peak);
  return peak.value();
}

// Even and odd vectors are summed apart, so that the multiply-adds do not wait for one another.
void dot_records_kernel(const float* keys, int n, int K, const float* x, const float* y,
                        float* with_x, float* with_y) {
  const D d;
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
  for (int m = 0; m < n; ++m) {
    const float* const key = keys + std::int64_t{m} * K;
    auto x0 = hn::Zero(d), x1 = hn::Zero(d), y0 = hn::Zero(d), y1 = hn::Zero(d);
    int i = 0;
    for (; i + 2 * kLanes <= K; i += 2 * kLanes) {
      const auto k0 = hn::LoadU(d, key + i), k1 = hn::LoadU(d, key + i + kLanes);
      x0 = hn::MulAdd(k0, hn::LoadU(d, x + i), x0);
      x1 = hn::MulAdd(k1, hn::LoadU(d, x + i + kLanes), x1);
      y0 = hn::MulAdd(k0, hn::LoadU(d, y + i), y0);
      y1 = hn::MulAdd(k1, hn::LoadU(d, y + i + kLanes), y1);
    }
    float sum_x = hn::GetLane(hn::SumOfLanes(d, hn::Add(x0, x1)));
    float sum_y = hn::GetLane(hn::SumOfLanes(d, hn::Add(y0, y1)));
    for (; i < K; ++i) {
      sum_x += key[i] * x[i];
      sum_y += key[i] * y[i];
    }
    with_x[m] = sum_x;
    with_y[m] = sum_y;
  }
}

void read_records_kernel(const float* values, int n, int V, const float* a, const float* b,
                         float* p, float* r) {
  const auto block = [&](auto d, auto n_vectors, int j) HWY_ATTR {
    constexpr int kVectors = decltype(n_vectors)::value;
    const int lanes = static_cast<int>(hn::MaxLanes(d));
    hn::Vec<decltype(d)> sum_p[kVectors], sum_r[kVectors];
    for (int c = 0; c < kVectors; ++c) {
      sum_p[c] = hn::LoadU(d, p + j + c * lanes);
      sum_r[c] = hn::LoadU(d, r + j + c * lanes);
    }
    for (int m = 0; m < n; ++m) {
      const auto va = hn::Set(d, a[m]), vb = hn::Set(d, b[m]);
      const float* const u = values + std::int64_t{m} * V + j;
      for (int c = 0; c < kVectors; ++c) {
        const auto x = hn::LoadU(d, u + c * lanes);
        sum_p[c] = hn::MulAdd(va, x, sum_p[c]);
        sum_r[c] = hn::MulAdd(vb, x, sum_r[c]);
      }
    }
    for (int c = 0; c < kVectors; ++c) {
      hn::StoreU(sum_p[c], d, p + j + c * lanes);
      hn::StoreU(sum_r[c], d, r + j + c * lanes);
    }
  };
  for_columns<4>(V, block);
}

}  // namespace
}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace statepack::kernel {

HWY_EXPORT(read_two_kernel);
HWY_EXPORT(read_two_and_peak_kernel);
HWY_EXPORT(update_kernel);
HWY_EXPORT(dot_records_kernel);
HWY_EXPORT(read_records_kernel);

void read_two(const float* S, int K, int V, const float* a, const float* b, float* p, float* r,
              bool add) {
  HWY_DYNAMIC_DISPATCH(read_two_kernel)(S, K, V, a, b, p, r, add);
}

std::int32_t read_two_and_peak(const float* S, int K, int V, const float* a, const float* b,
                               float* p, float* r) {
  return HWY_DYNAMIC_DISPATCH(read_two_and_peak_kernel)(S, K, V, a, b, p, r);
}

std::int32_t update(const float* S, int K, int V, const Update& by, float* X) {
  return HWY_DYNAMIC_DISPATCH(update_kernel)(S, K, V, by, X);
}

void dot_records(const float* keys, int n, int K, const float* x, const float* y, float* with_x,
                 float* with_y) {
  HWY_DYNAMIC_DISPATCH(dot_records_kernel)(keys, n, K, x, y, with_x, with_y);
}

void read_records(const float* values, int n, int V, const float* a, const float* b, float* p,
                  float* r) {
  HWY_DYNAMIC_DISPATCH(read_records_kernel)(values, n, V, a, b, p, r);
}

}  // namespace statepack::kernel

namespace statepack {

std::string_view simd_target() {
  // One bit a target; the lowest is the best, and the one that dispatch takes.
  const std::int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(targets & -targets);
}

}  // namespace statepack
#endif
