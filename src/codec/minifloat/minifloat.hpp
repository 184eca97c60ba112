// Small floats with shared scales: fp8 (E4M3, E5M2), the microscaling formats mxfp8, mxfp6, mxfp4
// (OCP MX v1.0: a power of two for 32 values) and the two-level nvfp4, nvfp6 (an E4M3 scale for 16
// values, an f32 scale for the head).
#pragma once

#include "codec/codec.hpp"

namespace statepack {

extern const CodecInfo kFp8Info;
extern const CodecInfo kMxfp8Info;
extern const CodecInfo kMxfp6Info;
extern const CodecInfo kMxfp4Info;
extern const CodecInfo kNvfp6Info;
extern const CodecInfo kNvfp4Info;

}  // namespace statepack
