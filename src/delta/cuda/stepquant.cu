#include "delta/cuda/kernels.cuh"
#include "delta/cuda/stepquant_page.cuh"

namespace statepack::cuda {

KernelSet stepquant_kernels(const Choice& choice) {
  if (choice.gate == Gate::kScalar) {
    return kernels_of<StepquantPage<Gate::kScalar>, Gate::kScalar, Records::kBf16, Records::kInt8>(
        choice);
  }
  return kernels_of<StepquantPage<Gate::kChannel>, Gate::kChannel, Records::kBf16, Records::kInt8>(
      choice);
}

}  // namespace statepack::cuda
