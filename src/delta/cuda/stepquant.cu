#include "delta/cuda/full_row_pages.cuh"

namespace statepack::cuda {

KernelSet stepquant_kernels(const Choice& choice) {
  if (choice.gate == Gate::kScalar) {
    return full_kernels_of<StepquantFull, Gate::kScalar, Records::kBf16, Records::kInt8>(choice);
  }
  return kernels_of<StepquantPage<Gate::kChannel>, Gate::kChannel, Records::kBf16, Records::kInt8>(
      choice);
}

}  // namespace statepack::cuda
