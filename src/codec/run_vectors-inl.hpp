// For Highway sources of this folder, once for each target: vectors of at most 16 floats, so that a
// run of 16 columns is always kParts whole vectors, and the arithmetic that codes must not round
// differently on any of them.
#include <cstdint>

#include <hwy/highway.h>

#if defined(SP_CODEC_RUN_VECTORS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef SP_CODEC_RUN_VECTORS_INL_HPP
#undef SP_CODEC_RUN_VECTORS_INL_HPP
#else
#define SP_CODEC_RUN_VECTORS_INL_HPP
#endif

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kRun = 16;
using D = hn::CappedTag<float, kRun>;
using DU = hn::RebindToUnsigned<D>;
using DI = hn::RebindToSigned<D>;
using V = hn::Vec<D>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));
constexpr int kParts = kRun / kLanes;

/// x / d as IEEE rounds it, given inverse = 1 / d so rounded, for a d of at most 12 significant
/// bits (a half, times a power of two) and 2^-100 <= |x / d| < 2^127, |x| >= 2^-100; 0 for 0.
///
/// q = x inverse is off by less than 1.5 units in the last place, x - q d is exact in a fused
/// multiply-add, and adding its share leaves an error below 2^-22 units before the last rounding.
/// The quotient itself is never that close to the middle of two floats: x / d - m, m of 25 bits, is
/// a non-zero multiple of 2^-36 of the quotient.
///
/// Below that range the last bit may be wrong. Every scale here is at least 2^-40, so such a
/// quotient is below 2^-60: its code is 0, and it is no column's peak unless that peak is below the
/// smallest scale too.
HWY_INLINE V divide_by_half(V x, V d, V inverse) {
#if HWY_NATIVE_FMA
  const V q = hn::Mul(x, inverse);
  return hn::MulAdd(hn::NegMulAdd(q, d, x), inverse, q);
#else
  (void)inverse;
  return hn::Div(x, d);
#endif
}

/// The same for any normal d >= 2^-40. The second correction starts from a neighbour of the
/// quotient, which is what Markstein's theorem (IBM J. Res. Dev. 34, 1990) asks for.
HWY_INLINE V divide_by_float(V x, V d, V inverse) {
#if HWY_NATIVE_FMA
  const V q = divide_by_half(x, d, inverse);
  return hn::MulAdd(hn::NegMulAdd(q, d, x), inverse, q);
#else
  (void)inverse;
  return hn::Div(x, d);
#endif
}

/// Sums of the 16 named lanes of base/lane_sum.hpp, as its tree adds them.
HWY_INLINE float sum_of_run(const V (&lanes)[kParts]) {
  HWY_ALIGN float lane[kRun];
  const D d;
#if HWY_TARGET == HWY_AVX3
  const hn::Half<D> d8;
  const hn::Half<decltype(d8)> d4;
  const auto eight = hn::Add(hn::LowerHalf(d8, lanes[0]), hn::UpperHalf(d8, lanes[0]));
  const auto four = hn::Add(hn::LowerHalf(d4, eight), hn::UpperHalf(d4, eight));
  const auto two = hn::Add(four, hn::Shuffle1032(four));
  (void)d, (void)lane;
  return hn::GetLane(hn::Add(two, hn::Shuffle2301(two)));
#else
  for (int h = 0; h < kParts; ++h) hn::Store(lanes[h], d, lane + h * kLanes);
  for (int width = kRun / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0];
#endif
}

/// round_code() of codec/scale.hpp before its last subtraction: the code in the low bits.
HWY_INLINE V with_magic(V x) { return hn::Add(x, hn::Set(D(), 0x1.8p23f)); }
HWY_INLINE V round_even(V x) { return hn::Sub(with_magic(x), hn::Set(D(), 0x1.8p23f)); }

/// clamp_to() of codec/scale.hpp for any x but NaN.
HWY_INLINE V clamp(V x, V low, V high) { return hn::Min(hn::Max(x, low), high); }

}  // namespace
}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
