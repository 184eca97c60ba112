#include "delta/cuda/kernels.cuh"
#include "delta/cuda/uniform_page.cuh"

namespace statepack::cuda {

KernelSet int_kernels(int bits, const Choice& choice) {
  if (bits == 8) return kernels_by_gate<IntPage<8>>(choice);
  if (bits == 4) return kernels_by_gate<IntPage<4>>(choice);
  return {};
}

}  // namespace statepack::cuda
