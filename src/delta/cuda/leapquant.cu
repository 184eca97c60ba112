#include "delta/cuda/full_pages.cuh"

namespace statepack::cuda {

KernelSet leapquant_kernels(int bits, const Choice& choice) {
  switch (bits) {
    case 8:
      return full_kernels_by_gate<LeapquantFull<8>, Records::kBf16>(choice);
    case 6:
      return full_kernels_by_gate<LeapquantFull<6>, Records::kBf16>(choice);
    default:
      return full_kernels_by_gate<LeapquantFull<4>, Records::kBf16>(choice);
  }
}

}  // namespace statepack::cuda
