// UTF-8 as text from outside needs it: decoding with replacement, and normalisation form C.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace statepack {

inline constexpr char32_t kReplacementCharacter = 0xFFFD;

/// One step of decoding at the front of a text.
struct Utf8Step {
  char32_t character = kReplacementCharacter;
  std::size_t n_bytes = 0;  ///< bytes to move on by; 0 only for an empty text
  bool valid = false;       ///< false: an ill-formed sequence, to be read as U+FFFD
  bool truncated = false;   ///< the text ends inside a sequence that is well formed so far
};

/// Ill-formed input advances by its maximal subpart (Unicode 15, 3.9, U+FFFD substitution), as
/// Rust, Python and the web do.
Utf8Step decode_utf8(std::string_view text);

void append_utf8(std::string& out, char32_t character);

/// A copy in which every ill-formed sequence is one U+FFFD.
std::string to_valid_utf8(std::string_view bytes);
bool is_valid_utf8(std::string_view bytes);

/// Number of characters (code points) of valid UTF-8.
std::size_t count_characters(std::string_view text);

/// What Python's str.isspace() and its \s take as white space.
bool is_python_space(char32_t character);

/// Normalisation form C of valid UTF-8. Time is O(n log n) whatever the text: runs of combining
/// marks are sorted, not swapped pair by pair.
std::string normalize_nfc(std::string_view text);

}  // namespace statepack
