// bf16 and fp16: every value rounded to 16 bits by itself.
#pragma once

#include "codec/codec.hpp"

namespace statepack {

extern const CodecInfo kBf16Info;
extern const CodecInfo kFp16Info;

}  // namespace statepack
