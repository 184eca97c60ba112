// Working memory of a forward pass: taken piece by piece, given back all at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/aligned.hpp"

namespace statepack {

/// Uninitialised floats. Grows to the largest pass seen and stays there.
class Scratch {
 public:
  /// n floats on cache lines of their own, valid until the Mark around them ends.
  float* take(std::int64_t n) {
    n = (n + 15) / 16 * 16;
    while (at_ < chunks_.size() && used_ + n > chunks_[at_].n) {
      ++at_;
      used_ = 0;
    }
    if (at_ == chunks_.size()) {
      const std::int64_t size = std::max(n, kMinChunk);
      chunks_.push_back({{}, size});
      chunks_.back().memory.grow(static_cast<std::size_t>(size) * sizeof(float));
      used_ = 0;
    }
    float* out = reinterpret_cast<float*>(chunks_[at_].memory.data()) + used_;
    used_ += n;
    return out;
  }

  /// Gives back, at its end, what was taken during its life.
  class Mark {
   public:
    explicit Mark(Scratch& scratch) : scratch_(scratch), at_(scratch.at_), used_(scratch.used_) {}
    ~Mark() {
      scratch_.at_ = at_;
      scratch_.used_ = used_;
    }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;

   private:
    Scratch& scratch_;
    std::size_t at_;
    std::int64_t used_;
  };

 private:
  static constexpr std::int64_t kMinChunk = std::int64_t{1} << 20;
  struct Chunk {
    AlignedBytes memory;
    std::int64_t n;
  };
  std::vector<Chunk> chunks_;
  std::size_t at_ = 0;
  std::int64_t used_ = 0;
};

}  // namespace statepack
