// Starting a kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace statepack::cuda {

/// Queues `kernel` on a stream, for a grid of columns x rows blocks. More than 48 KiB of dynamic
/// shared memory must have been allowed beforehand. Returns what the runtime says.
template <class Args>
cudaError_t launch(void (*kernel)(Args), int columns, int rows, int n_threads,
                   std::size_t shared_bytes, void* stream, const Args& args) {
  const dim3 grid(static_cast<unsigned>(columns), static_cast<unsigned>(rows));
  kernel<<<grid, static_cast<unsigned>(n_threads), shared_bytes,
           static_cast<cudaStream_t>(stream)>>>(args);
  return cudaGetLastError();
}

}  // namespace statepack::cuda
