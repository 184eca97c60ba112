#include "delta/cuda/full_row_pages.cuh"

namespace statepack::cuda {

KernelSet int_kernels(int bits, const Choice& choice) {
  if (bits == 8) return full_kernels_by_gate<IntFull<8>, Records::kBf16, Records::kInt8>(choice);
  if (bits == 4) return full_kernels_by_gate<IntFull<4>, Records::kBf16, Records::kInt8>(choice);
  return {};
}

}  // namespace statepack::cuda
