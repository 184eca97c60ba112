// How much memory there is.
#pragma once

#include <cstdint>

namespace statepack {

/// Bytes of memory this process can still take: the machine's, or its control group's if less.
std::int64_t available_bytes();

}  // namespace statepack
