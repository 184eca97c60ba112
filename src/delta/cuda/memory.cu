#include "delta/cuda/memory.hpp"

#include <cuda_runtime.h>

namespace statepack::cuda {

Status check(int code, const std::string& what) {
  if (code == cudaSuccess) return {};
  const auto error = static_cast<cudaError_t>(code);
  (void)cudaGetLastError();  // reported here; the next launch must not report it again
  return {error == cudaErrorMemoryAllocation ? Code::kExhausted : Code::kUnsupported,
          what + " failed on the device: " + cudaGetErrorString(error)};
}

DeviceBytes::~DeviceBytes() {
  if (data_ != nullptr) cudaFree(data_);
}

Result<DeviceBytes> DeviceBytes::make(std::size_t n) {
  DeviceBytes bytes;
  if (n == 0) return Result<DeviceBytes>(std::move(bytes));  // nvcc does not move by itself
  void* data = nullptr;
  SP_RETURN_IF_ERROR(check(cudaMalloc(&data, n), "allocating " + std::to_string(n) + " bytes"));
  bytes.data_ = static_cast<std::uint8_t*>(data);
  bytes.n_ = n;
  SP_RETURN_IF_ERROR(clear(data, n));
  return Result<DeviceBytes>(std::move(bytes));
}

namespace {

// Streams of callers need not wait for the default stream, so wait for them here.
Status wait_for_device() { return check(cudaDeviceSynchronize(), "waiting"); }

}  // namespace

Status copy_to_device(void* to, const void* from, std::size_t n) {
  if (n == 0) return {};
  SP_RETURN_IF_ERROR(wait_for_device());
  SP_RETURN_IF_ERROR(
      check(cudaMemcpy(to, from, n, cudaMemcpyHostToDevice), "copying to the device"));
  return wait_for_device();  // from pageable memory the copy may still be under way
}

Status copy_to_host(void* to, const void* from, std::size_t n) {
  if (n == 0) return {};
  SP_RETURN_IF_ERROR(wait_for_device());
  return check(cudaMemcpy(to, from, n, cudaMemcpyDeviceToHost), "copying from the device");
}

Status clear(void* to, std::size_t n) {
  SP_RETURN_IF_ERROR(wait_for_device());
  SP_RETURN_IF_ERROR(check(cudaMemset(to, 0, n), "clearing memory"));
  return wait_for_device();
}

}  // namespace statepack::cuda
