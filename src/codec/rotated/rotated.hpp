// Rows that are rotated before they are rounded: turboquant (TurboQuant's mean-square form, with
// the row as the vector: norm apart, one fixed Lloyd-Max codebook) and quarot (integers, as QuaRot
// rounds activations).
#pragma once

#include "codec/codec.hpp"

namespace statepack {

extern const CodecInfo kTurboquantInfo;
extern const CodecInfo kQuarotInfo;

}  // namespace statepack
