// Python's string methods over valid UTF-8. Lengths and positions count characters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace statepack::jinja {

enum class Side : std::uint8_t { kBoth, kLeft, kRight };

/// Without characters from `chars` (null: white space) at the ends.
std::string_view strip(std::string_view text, const std::string* chars, Side side);
/// str.split and str.rsplit; null `separator`: runs of white space. `max_splits` < 0: no bound.
std::vector<std::string> split(std::string_view text, const std::string* separator,
                               std::int64_t max_splits, Side from);
std::vector<std::string> split_lines(std::string_view text, bool keep_ends);
/// At most `count` replacements, < 0: all. An empty `old` matches around every character.
std::string replace(std::string_view text, std::string_view old, std::string_view with,
                    std::int64_t count);

/// Character by character, by the simple case mappings of Unicode.
std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
/// str.title(): a letter is a capital unless it follows a letter.
std::string title(std::string_view text);
/// Jinja's title filter: words begin after white space and any of -({[<.
std::string title_words(std::string_view text);

bool is_upper(std::string_view text);  ///< str.isupper()
bool is_lower(std::string_view text);  ///< str.islower()
bool all_of_category(std::string_view text, bool letters,
                     bool digits);  ///< isalpha, isdigit, isalnum

/// The characters, each as UTF-8: for indexing, slicing and reversing.
std::vector<std::string_view> characters(std::string_view text);

}  // namespace statepack::jinja
