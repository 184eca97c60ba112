// Attention cache of one sequence, in blocks of 256 tokens, f32.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "model/model.hpp"

namespace statepack {

/// Each block holds kTokens tokens of every attention layer; a layer decides how its `width` floats
/// a token lie inside its part of the block.
class PagedKvCache final : public KvCache {
 public:
  static constexpr std::int64_t kTokens = 256;

  PagedKvCache(std::int64_t n_layers, std::int64_t width) : n_layers_(n_layers), width_(width) {}

  std::int64_t n_tokens() const override { return n_tokens_; }
  std::int64_t n_bytes() const override {
    return static_cast<std::int64_t>(blocks_.size()) * block_floats() *
           static_cast<std::int64_t>(sizeof(float));
  }
  void truncate(std::int64_t n_tokens) override;

  bool fits(std::int64_t n_layers, std::int64_t width) const {
    return n_layers_ == n_layers && width_ == width;
  }
  /// Memory for tokens up to n_tokens. Errors: kExhausted.
  Status reserve(std::int64_t n_tokens);
  /// Counts tokens that all layers have written.
  void set_n_tokens(std::int64_t n_tokens) { n_tokens_ = n_tokens; }
  /// kTokens * width floats of one attention layer: tokens [b * kTokens, (b + 1) * kTokens).
  float* block(std::int64_t layer, std::int64_t b) const {
    return blocks_[static_cast<std::size_t>(b)].get() + layer * width_ * kTokens;
  }

 private:
  std::int64_t block_floats() const { return n_layers_ * width_ * kTokens; }
  std::int64_t n_layers_, width_;
  std::int64_t n_tokens_ = 0;
  std::vector<std::unique_ptr<float[]>> blocks_;
};

}  // namespace statepack
