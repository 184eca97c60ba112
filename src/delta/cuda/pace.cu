#include "delta/cuda/full_pages.cuh"

namespace statepack::cuda {

KernelSet pace_kernels(bool affine, const Choice& choice) {
  // With zero points columns start at any byte: kernels that stage pages are faster.
  if (affine) return kernels_by_gate<PacePage<true>, Records::kInt8, Records::kMixed>(choice);
  return full_kernels_by_gate<PaceFull, Records::kInt8, Records::kMixed>(choice);
}

}  // namespace statepack::cuda
