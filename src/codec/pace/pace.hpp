// pace: groups along the key axis, rounded once every few tokens; a quarter of the heads at 8 bits.
#pragma once

#include "codec/codec.hpp"

namespace statepack {

extern const CodecInfo kPaceInfo;

}  // namespace statepack
