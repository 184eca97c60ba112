// dsq: dual-axis scaling, the state quantiser of Q-Mamba, without calibration.
#pragma once

#include "codec/codec.hpp"

namespace statepack {

extern const CodecInfo kDsqInfo;

}  // namespace statepack
