#include "delta/cuda/kernels.cuh"
#include "delta/cuda/leapquant_page.cuh"

namespace statepack::cuda {

KernelSet leapquant_kernels(int bits, const Choice& choice) {
  switch (bits) {
    case 8:
      return kernels_by_gate<LeapquantPage<8>, Records::kBf16>(choice);
    case 6:
      return kernels_by_gate<LeapquantPage<6>, Records::kBf16>(choice);
    default:
      return kernels_by_gate<LeapquantPage<4>, Records::kBf16>(choice);
  }
}

}  // namespace statepack::cuda
