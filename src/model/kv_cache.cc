#include "model/kv_cache.hpp"

#include <algorithm>
#include <new>
#include <string>

namespace statepack {

void PagedKvCache::truncate(std::int64_t n_tokens) {
  n_tokens_ = std::min(n_tokens_, std::max<std::int64_t>(n_tokens, 0));
  const std::int64_t n_blocks = (n_tokens_ + kTokens - 1) / kTokens;
  if (n_blocks < static_cast<std::int64_t>(blocks_.size())) {
    blocks_.resize(static_cast<std::size_t>(n_blocks));
  }
}

Status PagedKvCache::reserve(std::int64_t n_tokens) {
  while (static_cast<std::int64_t>(blocks_.size()) * kTokens < n_tokens) {
    std::unique_ptr<float[]> block(
        new (std::nothrow) float[static_cast<std::size_t>(block_floats())]);
    if (block == nullptr) {
      return Status(Code::kExhausted, "attention cache: no memory for a block of " +
                                          std::to_string(block_floats() * 4) + " bytes at token " +
                                          std::to_string(n_tokens) +
                                          "; run fewer or shorter sequences");
    }
    blocks_.push_back(std::move(block));
  }
  return {};
}

}  // namespace statepack
