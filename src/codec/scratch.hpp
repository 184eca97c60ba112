// Carves aligned arrays out of a CodecScratch.
//
//   scratch_bytes():  ScratchSize().add<float>(V).add<std::uint8_t>(K * V).n_bytes()
//   encode():         ScratchCursor cursor(scratch); float* peak = cursor.take<float>(V); ...
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/check.hpp"
#include "codec/codec.hpp"

namespace statepack {

inline constexpr std::size_t kScratchAlign = 64;  // a cache line, and the widest vector

constexpr std::size_t scratch_round(std::size_t n) {
  return (n + kScratchAlign - 1) / kScratchAlign * kScratchAlign;
}

class ScratchSize {
 public:
  template <class T>
  constexpr ScratchSize& add(std::int64_t n) {
    n_bytes_ += scratch_round(static_cast<std::size_t>(n) * sizeof(T));
    return *this;
  }
  constexpr std::size_t n_bytes() const { return n_bytes_; }

 private:
  std::size_t n_bytes_ = kScratchAlign;  // the span itself may start anywhere
};

class ScratchCursor {
 public:
  explicit ScratchCursor(CodecScratch scratch) {
    const auto start = reinterpret_cast<std::uintptr_t>(scratch.bytes.data());
    next_ = scratch.bytes.data() + (scratch_round(start) - start);
    end_ = scratch.bytes.data() + scratch.bytes.size();
  }
  /// n uninitialised values, 64-byte aligned; in the order and sizes given to ScratchSize.
  template <class T>
  T* take(std::int64_t n) {
    const std::size_t n_bytes = scratch_round(static_cast<std::size_t>(n) * sizeof(T));
    SP_CHECK(next_ <= end_ && n_bytes <= static_cast<std::size_t>(end_ - next_),
             "codec scratch is smaller than scratch_bytes()");
    T* values = reinterpret_cast<T*>(next_);
    next_ += n_bytes;
    return values;
  }

 private:
  std::byte* next_;
  std::byte* end_;
};

}  // namespace statepack
