#include "model/jinja/text.hpp"

#include <utf8proc.h>

#include <algorithm>

#include "model/utf8.hpp"

namespace statepack::jinja {
namespace {

// The last character of non-empty text.
Utf8Step decode_last(std::string_view text) {
  std::size_t begin = text.size() - 1;
  while (begin > 0 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return decode_utf8(text.substr(begin));
}

template <class Map>
std::string map_characters(std::string_view text, const Map& map) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text);
    append_utf8(out, map(step.character));
    text.remove_prefix(step.n_bytes);
  }
  return out;
}

char32_t to_upper(char32_t c) {
  return static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c)));
}
char32_t to_lower(char32_t c) {
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)));
}
char32_t to_title(char32_t c) {
  return static_cast<char32_t>(utf8proc_totitle(static_cast<utf8proc_int32_t>(c)));
}
bool has_case(char32_t c) { return to_upper(c) != c || to_lower(c) != c; }

}  // namespace

std::string_view strip(std::string_view text, const std::string* chars, Side side) {
  const auto drop = [&](char32_t c) {
    if (chars == nullptr) return is_python_space(c);
    std::string encoded;
    append_utf8(encoded, c);
    return chars->find(encoded) != std::string::npos;
  };
  while (side != Side::kRight && !text.empty()) {
    const Utf8Step step = decode_utf8(text);
    if (!drop(step.character)) break;
    text.remove_prefix(step.n_bytes);
  }
  while (side != Side::kLeft && !text.empty()) {
    const Utf8Step step = decode_last(text);
    if (!drop(step.character)) break;
    text.remove_suffix(step.n_bytes);
  }
  return text;
}

std::vector<std::string> split(std::string_view text, const std::string* separator,
                               std::int64_t max_splits, Side from) {
  std::vector<std::string> parts;
  const auto may_split = [&] {
    return max_splits < 0 || static_cast<std::int64_t>(parts.size()) < max_splits;
  };
  if (separator == nullptr) {
    const Side end = from == Side::kRight ? Side::kRight : Side::kLeft;
    text = strip(text, nullptr, end);
    while (!text.empty() && may_split()) {
      std::size_t n = 0;  // bytes of the word at that end
      while (n < text.size()) {
        const Utf8Step step = end == Side::kLeft ? decode_utf8(text.substr(n))
                                                 : decode_last(text.substr(0, text.size() - n));
        if (is_python_space(step.character)) break;
        n += step.n_bytes;
      }
      parts.emplace_back(end == Side::kLeft ? text.substr(0, n) : text.substr(text.size() - n));
      end == Side::kLeft ? text.remove_prefix(n) : text.remove_suffix(n);
      text = strip(text, nullptr, end);
    }
    if (!text.empty()) parts.emplace_back(text);  // met the bound
  } else {
    while (may_split()) {
      const std::size_t at = from == Side::kRight ? text.rfind(*separator) : text.find(*separator);
      if (at == std::string_view::npos) break;
      if (from == Side::kRight) {
        parts.emplace_back(text.substr(at + separator->size()));
        text = text.substr(0, at);
      } else {
        parts.emplace_back(text.substr(0, at));
        text = text.substr(at + separator->size());
      }
    }
    parts.emplace_back(text);
  }
  if (from == Side::kRight) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    std::size_t n = 0;    // bytes of the line
    std::size_t end = 0;  // bytes of its end
    while (n < text.size() && end == 0) {
      const Utf8Step step = decode_utf8(text.substr(n));
      const char32_t c = step.character;
      if (text.substr(n).starts_with("\r\n")) {
        end = 2;
      } else if ((c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
                 c == 0x2029) {
        end = step.n_bytes;
      } else {
        n += step.n_bytes;
      }
    }
    lines.emplace_back(text.substr(0, keep_ends ? n + end : n));
    text.remove_prefix(n + end);
  }
  return lines;
}

std::string replace(std::string_view text, std::string_view old, std::string_view with,
                    std::int64_t count) {
  std::string out;
  while (count != 0) {
    if (old.empty()) {
      out += with;
      if (text.empty()) return out;
      const std::size_t n = decode_utf8(text).n_bytes;
      out += text.substr(0, n);
      text.remove_prefix(n);
    } else {
      const std::size_t at = text.find(old);
      if (at == std::string_view::npos) break;
      out += text.substr(0, at);
      out += with;
      text.remove_prefix(at + old.size());
    }
    --count;
  }
  out += text;
  return out;
}

std::string upper(std::string_view text) { return map_characters(text, to_upper); }
std::string lower(std::string_view text) { return map_characters(text, to_lower); }

std::string capitalize(std::string_view text) {
  bool first = true;
  return map_characters(text, [&](char32_t c) {
    const char32_t mapped = first ? to_title(c) : to_lower(c);
    first = false;
    return mapped;
  });
}

std::string title(std::string_view text) {
  bool after_letter = false;
  return map_characters(text, [&](char32_t c) {
    const char32_t mapped = after_letter ? to_lower(c) : to_title(c);
    after_letter = has_case(c);
    return mapped;
  });
}

std::string title_words(std::string_view text) {
  bool first = true;
  return map_characters(text, [&](char32_t c) {
    const bool delimiter =
        is_python_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
    const char32_t mapped = first ? to_upper(c) : to_lower(c);
    first = delimiter;
    return delimiter ? c : mapped;
  });
}

bool is_upper(std::string_view text) {
  bool any = false;
  for (; !text.empty(); text.remove_prefix(decode_utf8(text).n_bytes)) {
    const char32_t c = decode_utf8(text).character;
    if (to_upper(c) != c) return false;
    any = any || to_lower(c) != c;
  }
  return any;
}

bool is_lower(std::string_view text) {
  bool any = false;
  for (; !text.empty(); text.remove_prefix(decode_utf8(text).n_bytes)) {
    const char32_t c = decode_utf8(text).character;
    if (to_lower(c) != c) return false;
    any = any || to_upper(c) != c;
  }
  return any;
}

bool all_of_category(std::string_view text, bool letters, bool digits) {
  if (text.empty()) return false;
  for (; !text.empty(); text.remove_prefix(decode_utf8(text).n_bytes)) {
    const auto category =
        utf8proc_category(static_cast<utf8proc_int32_t>(decode_utf8(text).character));
    const bool is_letter = category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
    if (!(letters && is_letter) && !(digits && category == UTF8PROC_CATEGORY_ND)) return false;
  }
  return true;
}

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> out;
  while (!text.empty()) {
    const std::size_t n = decode_utf8(text).n_bytes;
    out.push_back(text.substr(0, n));
    text.remove_prefix(n);
  }
  return out;
}

}  // namespace statepack::jinja
