#include "delta/small_gemm.hpp"

// Vectors of these targets have no compile-time size and cannot stand in the arrays below.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "delta/small_gemm.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// R x (P vectors) of C stay in registers while k runs.
template <int R, int P, class D>
HWY_INLINE void gemm_tile(D d, int K, const float* A, std::int64_t a_row, std::int64_t a_col,
                          const float* B, std::int64_t b_row, float* C, std::int64_t c_row,
                          bool accumulate) {
  using V = hn::Vec<D>;
  constexpr int L = static_cast<int>(hn::MaxLanes(D()));
  V acc[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      acc[r][p] = accumulate ? hn::LoadU(d, C + r * c_row + p * L) : hn::Zero(d);
    }
  }
  for (int k = 0; k < K; ++k) {
    V b[P];
    for (int p = 0; p < P; ++p) b[p] = hn::LoadU(d, B + k * b_row + p * L);
    for (int r = 0; r < R; ++r) {
      const V a = hn::Set(d, A[r * a_row + k * a_col]);
      for (int p = 0; p < P; ++p) acc[r][p] = hn::MulAdd(a, b[p], acc[r][p]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) hn::StoreU(acc[r][p], d, C + r * c_row + p * L);
  }
}

template <int P, class D>
HWY_INLINE void gemm_columns(D d, int M, int K, const float* A, std::int64_t a_row,
                             std::int64_t a_col, const float* B, std::int64_t b_row, float* C,
                             std::int64_t c_row, bool accumulate) {
  int m = 0;
  for (; m + 4 <= M; m += 4) {
    gemm_tile<4, P>(d, K, A + m * a_row, a_row, a_col, B, b_row, C + m * c_row, c_row, accumulate);
  }
  if (m + 2 <= M) {  // the two heads of a group in decode attention
    gemm_tile<2, P>(d, K, A + m * a_row, a_row, a_col, B, b_row, C + m * c_row, c_row, accumulate);
    m += 2;
  }
  if (m < M) {
    gemm_tile<1, P>(d, K, A + m * a_row, a_row, a_col, B, b_row, C + m * c_row, c_row, accumulate);
  }
}

#if HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kTileVectors = 4;  // 32 registers
#else
constexpr int kTileVectors = 2;  // 16 registers
#endif

void small_gemm_kernel(int M, int N, int K, const float* A, std::int64_t a_row, std::int64_t a_col,
                       const float* B, std::int64_t b_row, float* C, std::int64_t c_row,
                       bool accumulate) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> one;
  constexpr int L = static_cast<int>(hn::MaxLanes(d));
  int n = 0;
  for (; n + kTileVectors * L <= N; n += kTileVectors * L) {
    gemm_columns<kTileVectors>(d, M, K, A, a_row, a_col, B + n, b_row, C + n, c_row, accumulate);
  }
  for (; n + L <= N; n += L) {
    gemm_columns<1>(d, M, K, A, a_row, a_col, B + n, b_row, C + n, c_row, accumulate);
  }
  for (; n < N; ++n) {
    gemm_columns<1>(one, M, K, A, a_row, a_col, B + n, b_row, C + n, c_row, accumulate);
  }
}

}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace statepack {

HWY_EXPORT(small_gemm_kernel);

void small_gemm(int M, int N, int K, const float* A, std::int64_t a_row, std::int64_t a_col,
                const float* B, std::int64_t b_row, float* C, std::int64_t c_row, bool accumulate) {
  HWY_DYNAMIC_DISPATCH(small_gemm_kernel)(M, N, K, A, a_row, a_col, B, b_row, C, c_row, accumulate);
}

}  // namespace statepack
#endif
