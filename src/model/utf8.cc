#include "model/utf8.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/check.hpp"

namespace statepack {

Utf8Step decode_utf8(std::string_view text) {
  Utf8Step step;
  if (text.empty()) return step;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  step.n_bytes = 1;
  if (lead < 0x80) {
    step.character = lead;
    step.valid = true;
    return step;
  }
  if (lead < 0xC2 || lead > 0xF4) return step;
  const std::size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte alone decides over-long forms, surrogates and values above U+10FFFF.
  unsigned low = 0x80;
  unsigned high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  char32_t character = lead & (0xFFu >> (length + 1));
  for (std::size_t i = 1; i < length; ++i) {
    if (i == text.size()) {
      step.truncated = true;
      return step;
    }
    if (byte(i) < low || byte(i) > high) return step;
    low = 0x80;
    high = 0xBF;
    character = (character << 6) | (byte(i) & 0x3Fu);
    step.n_bytes = i + 1;
  }
  step.character = character;
  step.valid = true;
  return step;
}

void append_utf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out.push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out.push_back(static_cast<char>(0xC0 | (c >> 6)));
    out.push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out.push_back(static_cast<char>(0xE0 | (c >> 12)));
    out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out.push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out.push_back(static_cast<char>(0xF0 | (c >> 18)));
    out.push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3F)));
    out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out.push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

namespace {

// Length of the leading ASCII part: most text is ASCII, and needs no decoding.
std::size_t ascii_prefix(std::string_view text) {
  std::size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    std::uint64_t word;
    std::memcpy(&word, text.data() + i, 8);
    if ((word & 0x8080808080808080u) != 0) break;
  }
  while (i < text.size() && static_cast<unsigned char>(text[i]) < 0x80) ++i;
  return i;
}

}  // namespace

bool is_valid_utf8(std::string_view bytes) {
  while (true) {
    bytes.remove_prefix(ascii_prefix(bytes));
    if (bytes.empty()) return true;
    const Utf8Step step = decode_utf8(bytes);
    if (!step.valid) return false;
    bytes.remove_prefix(step.n_bytes);
  }
}

std::string to_valid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const std::size_t n_ascii = ascii_prefix(bytes);
    out.append(bytes.substr(0, n_ascii));
    bytes.remove_prefix(n_ascii);
    if (bytes.empty()) break;
    const Utf8Step step = decode_utf8(bytes);
    append_utf8(out, step.character);
    bytes.remove_prefix(step.n_bytes);
  }
  return out;
}

std::size_t count_characters(std::string_view text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  }));
}

bool is_python_space(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F);
  return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
         c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

std::string normalize_nfc(std::string_view text) {
  // Every character below U+0300 is a starter that nothing before it composes with: text made of
  // them alone is in form C already. U+0300 is the first with a lead byte of 0xCC.
  if (std::none_of(text.begin(), text.end(),
                   [](char c) { return static_cast<unsigned char>(c) >= 0xCC; })) {
    return std::string(text);
  }
  constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  std::vector<utf8proc_int32_t> characters;
  characters.reserve(text.size());
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text);
    SP_CHECK(step.valid, "normalize_nfc takes valid UTF-8");
    text.remove_prefix(step.n_bytes);
    std::array<utf8proc_int32_t, 8> parts;  // no canonical decomposition is longer than 4
    int boundary = 0;
    const utf8proc_ssize_t n_parts =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(step.character), parts.data(),
                                parts.size(), kOptions, &boundary);
    SP_CHECK(n_parts >= 0 && n_parts <= static_cast<utf8proc_ssize_t>(parts.size()),
             "a canonical decomposition longer than 8");
    characters.insert(characters.end(), parts.begin(), parts.begin() + n_parts);
  }
  // Canonical order: each run of marks by combining class, equal classes as they came.
  const auto combining_class = [](utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  };
  for (auto first = characters.begin(); first != characters.end();) {
    if (combining_class(*first) == 0) {
      ++first;
      continue;
    }
    const auto last = std::find_if(first, characters.end(),
                                   [&](utf8proc_int32_t c) { return combining_class(c) == 0; });
    std::stable_sort(first, last, [&](utf8proc_int32_t a, utf8proc_int32_t b) {
      return combining_class(a) < combining_class(b);
    });
    first = last;
  }
  const utf8proc_ssize_t n_composed = utf8proc_normalize_utf32(
      characters.data(), static_cast<utf8proc_ssize_t>(characters.size()), kOptions);
  SP_CHECK(n_composed >= 0, "composition of decomposed text failed");
  std::string out;
  out.reserve(static_cast<std::size_t>(n_composed));
  for (utf8proc_ssize_t i = 0; i < n_composed; ++i) {
    append_utf8(out, static_cast<char32_t>(characters[static_cast<std::size_t>(i)]));
  }
  return out;
}

}  // namespace statepack
