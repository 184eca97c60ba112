// GPT-2's printable stand-ins for bytes, in which byte-level vocabularies are written.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace statepack {

/// The bytes that `text` (valid UTF-8) stands for; nothing when a character stands for no byte.
std::optional<std::string> bytes_of_byte_level(std::string_view text);

}  // namespace statepack
