// A scheme's codec with all of its options filled in.
#pragma once

#include "codec/codec.hpp"
#include "statepack/scheme.hpp"

namespace statepack {

/// Errors: kInvalidArgument when the scheme was not made by Scheme::parse.
Result<CodecConfig> codec_config(const Scheme& scheme);

}  // namespace statepack
