#include "model/kv_cache.hpp"

#include <algorithm>
#include <cstring>
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

void PagedKvCache::copy_rows(std::int64_t begin, std::int64_t end, std::byte* to) const {
  const std::size_t n_bytes = static_cast<std::size_t>(run_) * sizeof(float);
  for (std::int64_t t = begin; t < end; ++t) {
    for_each_run(t, [&](const float* run) {
      std::memcpy(to, run, n_bytes);
      to += n_bytes;
    });
  }
}

Status PagedKvCache::append_rows(std::int64_t n_tokens, std::span<const std::byte> rows) {
  if (n_tokens < 0 || std::ssize(rows) != n_tokens * row_bytes()) {
    return Status(Code::kInvalidArgument, "attention cache: " + std::to_string(rows.size()) +
                                              " bytes are not the rows of " +
                                              std::to_string(n_tokens) + " tokens of " +
                                              std::to_string(row_bytes()) + " bytes");
  }
  const std::int64_t end = n_tokens_ + n_tokens;
  SP_RETURN_IF_ERROR(reserve(end));
  const std::size_t n_bytes = static_cast<std::size_t>(run_) * sizeof(float);
  const std::byte* from = rows.data();
  for (std::int64_t t = n_tokens_; t < end; ++t) {
    for_each_run(t, [&](float* run) {
      std::memcpy(run, from, n_bytes);
      from += n_bytes;
    });
  }
  n_tokens_ = end;
  return {};
}

}  // namespace statepack
