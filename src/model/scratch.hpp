// Working memory of a forward pass: taken piece by piece, given back all at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace statepack {

/// Uninitialised floats. Grows to the largest pass seen and stays there.
class Scratch {
 public:
  /// n floats, 64-byte aligned relative to one another, valid until the Mark around them ends.
  float* take(std::int64_t n) {
    n = (n + 15) / 16 * 16;
    while (at_ < chunks_.size() && used_ + n > chunks_[at_].n) {
      ++at_;
      used_ = 0;
    }
    if (at_ == chunks_.size()) {
      const std::int64_t size = std::max(n, kMinChunk);
      chunks_.push_back(
          {std::unique_ptr<float[]>(new float[static_cast<std::size_t>(size)]), size});
      used_ = 0;
    }
    float* out = chunks_[at_].data.get() + used_;
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
    std::unique_ptr<float[]> data;
    std::int64_t n;
  };
  std::vector<Chunk> chunks_;
  std::size_t at_ = 0;
  std::int64_t used_ = 0;
};

}  // namespace statepack
