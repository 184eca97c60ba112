// damp: the key rows whose errors last longest stay in half precision, the others become Hadamard
// transformed integers. A plan names the rows.
#pragma once

#include "codec/codec.hpp"

namespace statepack {

extern const CodecInfo kDampInfo;

}  // namespace statepack
