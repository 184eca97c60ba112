// Softmax attention of a few query rows over one block of keys at a time: decode and prefill,
// grouped and latent attention all end here.
#pragma once

#include <cstdint>

namespace statepack {

/// Keys and values of consecutive tokens, at strides in floats.
struct KeyBlock {
  const float* k = nullptr;
  std::int64_t k_stride = 0;
  const float* v = nullptr;
  std::int64_t v_stride = 0;
  int n = 0;  ///< at most PagedKvCache::kTokens
};

/// Query rows on their way through the blocks (online softmax). All memory is the caller's.
class AttentionTile {
 public:
  /// Floats for `n_rows` queries of width k_dim.
  static std::int64_t scratch_floats(int n_rows, std::int64_t k_dim);

  /// `out` [n_rows][v_dim] at out_stride collects the result; `scratch` as above.
  AttentionTile(int n_rows, std::int64_t k_dim, std::int64_t v_dim, float scale, float* out,
                std::int64_t out_stride, float* scratch);
  /// Row r attends from q [k_dim].
  void set_query(int r, const float* q);
  /// Takes in a block. Row r sees its first min(n, n_visible + r * visible_step) keys. Each row's
  /// bits depend on that row, the keys and their cut into blocks, not on the other rows.
  void take(const KeyBlock& block, std::int64_t n_visible, int visible_step);
  /// Divides by the sum of weights. A row that saw nothing, or a NaN, gets NaN.
  void finish();

 private:
  int n_rows_;
  std::int64_t k_dim_, v_dim_;
  float scale_;
  float* out_;
  std::int64_t out_stride_;
  float *query_, *score_, *peak_, *sum_;
};

}  // namespace statepack
