#include "model/dot_kernel.hpp"

// Vectors of these targets have no compile-time size and cannot stand in the arrays below.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "model/dot_kernel.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first.
#include <hwy/highway.h>

#include "base/check.hpp"
#include "base/sum_lanes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = hn::MaxLanes(D());
constexpr std::int64_t kStep = 2 * kLanes;  // values of k that one step of a tile consumes

// A step of a weight row as two f32 vectors. Every type states the order in which it hands out the
// 2 * kLanes values, and pack() brings x into the same order.

// Even elements, then odd ones: a shift and a mask widen them, where the natural order would need a
// lane-crossing shuffle for each vector.
struct WBf16 {
  using Stored = std::uint16_t;
  static HWY_INLINE void load(const std::byte* p, V& a, V& b) {
    const hn::RebindToUnsigned<D> du;
#if HWY_TARGET == HWY_SCALAR
    std::uint32_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    const auto pair = hn::Set(du, bits);
#else
    const hn::Repartition<std::uint16_t, D> dh;
    const auto pair = hn::BitCast(du, hn::LoadU(dh, reinterpret_cast<const std::uint16_t*>(p)));
#endif
    a = hn::BitCast(D(), hn::ShiftLeft<16>(pair));
    b = hn::BitCast(D(), hn::And(pair, hn::Set(du, 0xffff0000U)));
  }
  static HWY_INLINE void pack(const float* x, float* packed) {
    V even, odd;
    hn::LoadInterleaved2(D(), x, even, odd);
    hn::StoreU(even, D(), packed);
    hn::StoreU(odd, D(), packed + kLanes);
  }
};

struct WNatural {
  static HWY_INLINE void pack(const float* x, float* packed) {
    hn::StoreU(hn::LoadU(D(), x), D(), packed);
    hn::StoreU(hn::LoadU(D(), x + kLanes), D(), packed + kLanes);
  }
};

struct WF16 : WNatural {
  using Stored = std::uint16_t;
  static HWY_INLINE void load(const std::byte* p, V& a, V& b) {
    const hn::Rebind<hwy::float16_t, D> dh;
    const auto* h = reinterpret_cast<const hwy::float16_t*>(p);
    a = hn::PromoteTo(D(), hn::LoadU(dh, h));
    b = hn::PromoteTo(D(), hn::LoadU(dh, h + kLanes));
  }
};

struct WF32 : WNatural {
  using Stored = float;
  static HWY_INLINE void load(const std::byte* p, V& a, V& b) {
    const auto* f = reinterpret_cast<const float*>(p);
    a = hn::LoadU(D(), f);
    b = hn::LoadU(D(), f + kLanes);
  }
};

// R rows of x against four rows of w: 4 R accumulators hide the latency of the multiply-adds.
template <class W, int R>
HWY_INLINE void tile(const float* x, std::int64_t width, const std::byte* const* w, std::int64_t K,
                     float* y, std::int64_t y_stride, int n_valid) {
  const D d;
  V acc[R][4];
  for (auto& row : acc) {
    for (V& v : row) v = hn::Zero(d);
  }
  const auto step = [&](const float* xk, const std::byte* const(&wk)[4]) HWY_ATTR {
    V wa[4], wb[4];
    for (int o = 0; o < 4; ++o) W::load(wk[o], wa[o], wb[o]);
    for (int r = 0; r < R; ++r) {
      const V xa = hn::LoadU(d, xk + r * width), xb = hn::LoadU(d, xk + r * width + kLanes);
      for (int o = 0; o < 4; ++o) {
        acc[r][o] = hn::MulAdd(wa[o], xa, acc[r][o]);
        acc[r][o] = hn::MulAdd(wb[o], xb, acc[r][o]);
      }
    }
  };
  constexpr std::int64_t kBytes = sizeof(typename W::Stored);
  std::int64_t k = 0;
  for (; k + kStep <= K; k += kStep) {
    const std::byte* const wk[4] = {w[0] + k * kBytes, w[1] + k * kBytes, w[2] + k * kBytes,
                                    w[3] + k * kBytes};
    step(x + k, wk);
  }
  if (k < K) {  // what lies behind the last weight is not ours to read
    alignas(64) std::byte tail[4][kStep * kBytes] = {};
    for (int o = 0; o < 4; ++o) {
      __builtin_memcpy(tail[o], w[o] + k * kBytes, static_cast<std::size_t>((K - k) * kBytes));
    }
    const std::byte* const wk[4] = {tail[0], tail[1], tail[2], tail[3]};
    step(x + k, wk);
  }
  for (int r = 0; r < R; ++r) {
    if (n_valid == 4) {
      sum_lanes(D(), acc[r], y + r * y_stride);
    } else {
      float four[4];
      sum_lanes(D(), acc[r], four);
      for (int o = 0; o < n_valid; ++o) y[r * y_stride + o] = four[o];
    }
  }
}

#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kTileRows = 4;  // 32 registers
#else
constexpr int kTileRows = 2;  // 16 registers: 8 accumulators, 4 of w, 2 of x
#endif

template <class W>
void dots(const float* packed, std::int64_t n_rows, const std::byte* const* w_rows,
          std::int64_t n_out, std::int64_t K, float* y, std::int64_t y_stride) {
  // A block of rows stays in the first-level cache while all outputs pass over it.
  constexpr std::int64_t kRowBlock = 16;
  const std::int64_t width = packed_width(K);
  for (std::int64_t r0 = 0; r0 < n_rows; r0 += kRowBlock) {
    const std::int64_t r1 = r0 + kRowBlock < n_rows ? r0 + kRowBlock : n_rows;
    for (std::int64_t n = 0; n < n_out; n += 4) {
      const int n_valid = n_out - n < 4 ? static_cast<int>(n_out - n) : 4;
      const std::byte* w[4];
      for (int o = 0; o < 4; ++o) w[o] = w_rows[n + (o < n_valid ? o : 0)];
      std::int64_t r = r0;
      for (; r + kTileRows <= r1; r += kTileRows) {
        tile<W, kTileRows>(packed + r * width, width, w, K, y + r * y_stride + n, y_stride,
                           n_valid);
      }
      const float* x = packed + r * width;
      float* out = y + r * y_stride + n;
      switch (r1 - r) {
        case 3:
          tile<W, 3>(x, width, w, K, out, y_stride, n_valid);
          break;
        case 2:
          tile<W, 2>(x, width, w, K, out, y_stride, n_valid);
          break;
        case 1:
          tile<W, 1>(x, width, w, K, out, y_stride, n_valid);
          break;
        default:
          break;
      }
    }
  }
}

template <class W>
void pack(const float* x, std::int64_t K, float* packed) {
  std::int64_t k = 0;
  for (; k + kStep <= K; k += kStep) W::pack(x + k, packed + k);
  if (k < K) {
    alignas(64) float tail[kStep] = {};
    __builtin_memcpy(tail, x + k, static_cast<std::size_t>(K - k) * sizeof(float));
    W::pack(tail, packed + k);
  }
}

void dot_rows_kernel(DType dtype, const float* packed, std::int64_t n_rows,
                     const std::byte* const* w_rows, std::int64_t n_out, std::int64_t K, float* y,
                     std::int64_t y_stride) {
  switch (dtype) {
    case DType::kBF16:
      return dots<WBf16>(packed, n_rows, w_rows, n_out, K, y, y_stride);
    case DType::kF16:
      return dots<WF16>(packed, n_rows, w_rows, n_out, K, y, y_stride);
    default:
      return dots<WF32>(packed, n_rows, w_rows, n_out, K, y, y_stride);
  }
}

void pack_row_kernel(DType dtype, const float* x, std::int64_t K, float* packed) {
  if (dtype == DType::kBF16) return pack<WBf16>(x, K, packed);
  pack<WNatural>(x, K, packed);
}

}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace statepack {

HWY_EXPORT(dot_rows_kernel);
HWY_EXPORT(pack_row_kernel);

std::int64_t packed_width(std::int64_t K) { return (K + 31) / 32 * 32; }

void pack_row(DType dtype, const float* x, std::int64_t K, float* packed) {
  const std::int64_t width = packed_width(K);
  for (std::int64_t k = K; k < width; ++k) packed[k] = 0;
  HWY_DYNAMIC_DISPATCH(pack_row_kernel)(dtype, x, K, packed);
}

void dot_rows(DType dtype, const float* packed, std::int64_t n_rows, const std::byte* const* w_rows,
              std::int64_t n_out, std::int64_t K, float* y, std::int64_t y_stride) {
  SP_CHECK(dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32, "weight dtype");
  HWY_DYNAMIC_DISPATCH(dot_rows_kernel)(dtype, packed, n_rows, w_rows, n_out, K, y, y_stride);
}

}  // namespace statepack
#endif
