// Attention cache of one sequence, in blocks of 256 tokens, f32.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "model/model.hpp"

namespace statepack {

/// Each block holds kTokens tokens of every attention layer. Of its `width` floats a token a layer
/// keeps each run of `run` floats of all the block's tokens together: [width / run][kTokens][run].
class PagedKvCache final : public KvCache {
 public:
  static constexpr std::int64_t kTokens = 256;

  PagedKvCache(std::int64_t n_layers, std::int64_t width, std::int64_t run)
      : n_layers_(n_layers), width_(width), run_(run) {}

  std::int64_t n_tokens() const override { return n_tokens_; }
  std::int64_t n_bytes() const override {
    return bytes_for(static_cast<std::int64_t>(blocks_.size()) * kTokens);
  }
  std::int64_t bytes_for(std::int64_t n_tokens) const override {
    return (n_tokens + kTokens - 1) / kTokens * block_floats() *
           static_cast<std::int64_t>(sizeof(float));
  }
  Status reserve(std::int64_t n_tokens) override;
  std::int64_t row_bytes() const override {
    return n_layers_ * width_ * static_cast<std::int64_t>(sizeof(float));
  }
  void copy_rows(std::int64_t begin, std::int64_t end, std::byte* to) const override;
  Status append_rows(std::int64_t n_tokens, std::span<const std::byte> rows) override;
  void truncate(std::int64_t n_tokens) override;

  bool fits(std::int64_t n_layers, std::int64_t width) const {
    return n_layers_ == n_layers && width_ == width;
  }
  /// Counts tokens that all layers have written.
  void set_n_tokens(std::int64_t n_tokens) { n_tokens_ = n_tokens; }
  /// kTokens * width floats of one attention layer: tokens [b * kTokens, (b + 1) * kTokens).
  float* block(std::int64_t layer, std::int64_t b) const {
    return blocks_[static_cast<std::size_t>(b)].get() + layer * width_ * kTokens;
  }

 private:
  std::int64_t block_floats() const { return n_layers_ * width_ * kTokens; }
  /// Calls visit(float* run) for every run of token `t`, in the order of its row.
  template <class Visit>
  void for_each_run(std::int64_t t, Visit visit) const {
    for (std::int64_t layer = 0; layer < n_layers_; ++layer) {
      float* part = block(layer, t / kTokens);
      for (std::int64_t r = 0; r < width_ / run_; ++r) {
        visit(part + (r * kTokens + t % kTokens) * run_);
      }
    }
  }
  std::int64_t n_layers_, width_, run_;
  std::int64_t n_tokens_ = 0;
  std::vector<std::unique_ptr<float[]>> blocks_;
};

}  // namespace statepack
