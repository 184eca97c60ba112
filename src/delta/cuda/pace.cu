#include "delta/cuda/kernels.cuh"
#include "delta/cuda/pace_page.cuh"

namespace statepack::cuda {

KernelSet pace_kernels(bool affine, const Choice& choice) {
  if (affine) return kernels_by_gate<PacePage<true>, Records::kInt8, Records::kMixed>(choice);
  return kernels_by_gate<PacePage<false>, Records::kInt8, Records::kMixed>(choice);
}

}  // namespace statepack::cuda
