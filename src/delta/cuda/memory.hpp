// Device memory that frees itself, and the runtime's errors as a Status.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "statepack/status.hpp"

namespace statepack::cuda {

/// What `code` (a cudaError_t) says about `what`; ok for 0. kExhausted when memory ran out, else
/// kUnsupported.
Status check(int code, const std::string& what);

/// Zeroed bytes in the memory of the current device, at a multiple of 256.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  DeviceBytes(DeviceBytes&& other) noexcept { *this = std::move(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(n_, other.n_);
    return *this;
  }
  ~DeviceBytes();
  /// Errors: kExhausted.
  static Result<DeviceBytes> make(std::size_t n);

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return n_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t n_ = 0;
};

/// Copies between host and device, after all work that any stream of the device has queued; returns
/// once done. Errors: kUnsupported.
Status copy_to_device(void* to, const void* from, std::size_t n);
Status copy_to_host(void* to, const void* from, std::size_t n);
/// Zeroes bytes on the device; returns once done. Errors: kUnsupported.
Status clear(void* to, std::size_t n);

/// An array on the device with the values of a host array.
template <class T>
Result<DeviceBytes> upload(std::span<const T> values) {
  SP_ASSIGN_OR_RETURN(DeviceBytes bytes, DeviceBytes::make(values.size_bytes()));
  SP_RETURN_IF_ERROR(copy_to_device(bytes.data(), values.data(), values.size_bytes()));
  return Result<DeviceBytes>(std::move(bytes));  // nvcc does not move by itself
}

}  // namespace statepack::cuda
