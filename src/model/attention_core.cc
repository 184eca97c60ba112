#include "model/attention_core.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "base/exp.hpp"
#include "base/simd_clones.hpp"
#include "delta/small_gemm.hpp"
#include "model/dot_kernel.hpp"
#include "model/kv_cache.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kMaxKeys = PagedKvCache::kTokens;

// Weights e^{scale s - peak} of the first n scores in place, zeros behind them up to n_all. Returns
// their sum, in sixteen lanes; *peak grows to cover the scores.
SP_CLONES float weigh(float* s, std::int64_t n, std::int64_t n_all, float scale, float* peak) {
  float lanes[16];
  std::fill_n(lanes, 16, *peak);
  std::int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int l = 0; l < 16; ++l) {
      const float x = scale * s[i + l];
      s[i + l] = x;
      lanes[l] = x > lanes[l] ? x : lanes[l];
    }
  }
  for (; i < n; ++i) {
    s[i] *= scale;
    lanes[0] = s[i] > lanes[0] ? s[i] : lanes[0];
  }
  float top = lanes[0];
  for (float x : lanes) top = x > top ? x : top;
  *peak = top;

  for (i = 0; i < n; ++i) s[i] = exp_f32(s[i] - top);
  for (; i < n_all; ++i) s[i] = 0;
  float sums[16] = {};
  for (i = 0; i + 16 <= n_all; i += 16) {
    for (int l = 0; l < 16; ++l) sums[l] += s[i + l];
  }
  for (int l = 0; i + l < n_all; ++l) sums[l] += s[i + l];
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

SP_CLONES void multiply(float* x, float a, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] *= a;
}

}  // namespace

std::int64_t AttentionTile::scratch_floats(int n_rows, std::int64_t k_dim) {
  return n_rows * (packed_width(k_dim) + kMaxKeys + 2);
}

AttentionTile::AttentionTile(int n_rows, std::int64_t k_dim, std::int64_t v_dim, float scale,
                             float* out, std::int64_t out_stride, float* scratch)
    : n_rows_(n_rows),
      k_dim_(k_dim),
      v_dim_(v_dim),
      scale_(scale),
      out_(out),
      out_stride_(out_stride),
      query_(scratch),
      score_(query_ + n_rows * packed_width(k_dim)),
      peak_(score_ + n_rows * kMaxKeys),
      sum_(peak_ + n_rows) {
  std::fill_n(peak_, n_rows, -std::numeric_limits<float>::infinity());
  std::fill_n(sum_, n_rows, 0.0F);
  for (int r = 0; r < n_rows; ++r) std::fill_n(out_ + r * out_stride_, v_dim_, 0.0F);
}

void AttentionTile::set_query(int r, const float* q) {
  pack_row(DType::kF32, q, k_dim_, query_ + r * packed_width(k_dim_));
}

void AttentionTile::take(const KeyBlock& block, std::int64_t n_visible, int visible_step) {
  const std::int64_t n_last = std::min<std::int64_t>(
      block.n, n_visible + static_cast<std::int64_t>(n_rows_ - 1) * visible_step);
  if (n_last <= 0) return;
  std::array<const std::byte*, kMaxKeys> keys;
  for (std::int64_t j = 0; j < n_last; ++j) {
    keys[static_cast<std::size_t>(j)] =
        reinterpret_cast<const std::byte*>(block.k + j * block.k_stride);
  }
  dot_rows(DType::kF32, query_, n_rows_, keys.data(), n_last, k_dim_, score_, kMaxKeys);
  int first = n_rows_;  // rows before it see nothing of this block
  for (int r = n_rows_ - 1; r >= 0; --r) {
    const std::int64_t n =
        std::min(n_last, n_visible + static_cast<std::int64_t>(r) * visible_step);
    if (n <= 0) break;
    first = r;
    const float old_peak = peak_[r];
    const float sum = weigh(score_ + r * kMaxKeys, n, n_last, scale_, &peak_[r]);
    const float kept = exp_f32(old_peak - peak_[r]);
    sum_[r] = sum_[r] * kept + sum;
    multiply(out_ + r * out_stride_, kept, v_dim_);
  }
  small_gemm(n_rows_ - first, static_cast<int>(v_dim_), static_cast<int>(n_last),
             score_ + first * kMaxKeys, kMaxKeys, 1, block.v, block.v_stride,
             out_ + first * out_stride_, out_stride_, true);
}

void AttentionTile::finish() {
  for (int r = 0; r < n_rows_; ++r) multiply(out_ + r * out_stride_, 1.0F / sum_[r], v_dim_);
}

}  // namespace statepack
