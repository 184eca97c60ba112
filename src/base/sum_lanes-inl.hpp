// For Highway sources, once for each target: sums over the lanes of vectors.
#include <hwy/highway.h>

#if defined(SP_BASE_SUM_LANES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef SP_BASE_SUM_LANES_INL_HPP
#undef SP_BASE_SUM_LANES_INL_HPP
#else
#define SP_BASE_SUM_LANES_INL_HPP
#endif

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace {

/// out[o] = the sum of the lanes of v[o], for four vectors of f32, always in the same order.
#if HWY_TARGET == HWY_SCALAR
template <class D>
HWY_INLINE void sum_lanes(D /*d*/, const hwy::HWY_NAMESPACE::Vec<D> (&v)[4], float* out) {
  for (int o = 0; o < 4; ++o) out[o] = hwy::HWY_NAMESPACE::GetLane(v[o]);
}
#else
template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<hwy::HWY_NAMESPACE::Full128<float> > sum_blocks(
    D d, hwy::HWY_NAMESPACE::Vec<D> v) {
  namespace hn = hwy::HWY_NAMESPACE;
  if constexpr (hn::MaxLanes(d) > 4) {
    const hn::Half<D> half;
    return sum_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  } else {
    return v;
  }
}

template <class D>
HWY_INLINE void sum_lanes(D d, const hwy::HWY_NAMESPACE::Vec<D> (&v)[4], float* out) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::Repartition<std::uint64_t, D> d64;
  const auto v01 = hn::Add(hn::InterleaveLower(d, v[0], v[1]), hn::InterleaveUpper(d, v[0], v[1]));
  const auto v23 = hn::Add(hn::InterleaveLower(d, v[2], v[3]), hn::InterleaveUpper(d, v[2], v[3]));
  const auto w01 = hn::BitCast(d64, v01), w23 = hn::BitCast(d64, v23);
  const auto all = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, w01, w23)),
                           hn::BitCast(d, hn::InterleaveUpper(d64, w01, w23)));
  hn::StoreU(sum_blocks(d, all), hn::Full128<float>(), out);
}
#endif

}  // namespace
}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // once for each target
