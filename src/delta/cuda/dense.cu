#include "delta/cuda/kernels.cuh"
#include "delta/cuda/uniform_page.cuh"

namespace statepack::cuda {
namespace {

template <PageFamily kFamily>
KernelSet of_family(const Choice& choice) {
  using Page = DensePage<kFamily>;
  KernelSet set = choice.gate == Gate::kScalar ? kernels_for_all<Page, Gate::kScalar>()
                                               : kernels_for_all<Page, Gate::kChannel>();
  if (choice.gate == Gate::kScalar) {
    set.dense = choice.full ? dense_kernel<Page, Gate::kScalar, Fixed<true>>
                            : dense_kernel<Page, Gate::kScalar, Fixed<false>>;
  } else {
    set.dense = choice.full ? dense_kernel<Page, Gate::kChannel, Fixed<true>>
                            : dense_kernel<Page, Gate::kChannel, Fixed<false>>;
  }
  return set;
}

}  // namespace

KernelSet dense_kernels(PageFamily family, const Choice& choice) {
  switch (family) {
    case PageFamily::kF32:
      return of_family<PageFamily::kF32>(choice);
    case PageFamily::kBf16:
      return of_family<PageFamily::kBf16>(choice);
    default:
      return of_family<PageFamily::kF16>(choice);
  }
}

}  // namespace statepack::cuda
