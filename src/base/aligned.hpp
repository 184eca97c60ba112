// Memory on cache lines that grows to the largest size asked for and stays.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace statepack {

class AlignedBytes {
 public:
  static constexpr std::size_t kAlign = 64;

  /// At least `n_bytes` bytes; contents are lost when it has to grow.
  void grow(std::size_t n_bytes) {
    if (n_bytes <= n_bytes_) return;
    data_.reset();
    data_.reset(static_cast<std::byte*>(::operator new (n_bytes, std::align_val_t{kAlign})));
    n_bytes_ = n_bytes;
  }

  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const {
      ::operator delete (memory, std::align_val_t{kAlign});
    }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t n_bytes_ = 0;
};

}  // namespace statepack
