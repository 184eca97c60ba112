// fp32: the state as it is. The reference of every comparison.
#pragma once

#include "codec/codec.hpp"

namespace statepack {

extern const CodecInfo kFp32Info;

}  // namespace statepack
