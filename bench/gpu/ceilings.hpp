// The two ceilings of memory-bound kernels: how fast bytes can be read, and read and written.
#pragma once

#include <cstddef>

namespace statepack::bench {

/// Queues a read of n bytes (a multiple of 16) that no other kernel can beat by much.
void read_all(const void* from, std::size_t n, void* sink, void* stream);
/// Queues a copy of n bytes through registers, as kernels that rewrite a state do it.
void copy_all(void* to, const void* from, std::size_t n, void* stream);

}  // namespace statepack::bench
