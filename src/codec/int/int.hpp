// int8, int6, int5, int4: integers with one scale a row, column, head or group.
#pragma once

#include "codec/codec.hpp"

namespace statepack {

extern const CodecInfo kInt8Info;
extern const CodecInfo kInt6Info;
extern const CodecInfo kInt5Info;
extern const CodecInfo kInt4Info;

}  // namespace statepack
