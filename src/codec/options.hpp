// What codecs share in reading their options and shapes.
#pragma once

#include <string>
#include <string_view>

#include "codec/codec.hpp"

namespace statepack {

/// "pace:4", the start of every message about a configuration.
std::string codec_label(const CodecConfig& config);

/// The value of an option of the codec; configurations hold all of them.
const std::string& option(const CodecConfig& config, std::string_view key);

/// Checks that an option is one of the words in its CodecOption::values ("a|b|c"). Errors:
/// kInvalidArgument naming the words.
Status check_choice(const CodecConfig& config, std::string_view key);

/// An option that is a whole number from `lo` to `hi`. Errors: kInvalidArgument.
Result<int> int_option(const CodecConfig& config, std::string_view key, int lo, int hi);

/// Head counts and widths that sizes can be computed from without overflow: each from 1 to 65536,
/// value heads a multiple of key heads. Errors: kUnsupported.
Status check_shape(const CodecConfig& config, const LayerShape& shape);

}  // namespace statepack
