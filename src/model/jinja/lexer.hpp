// Template text -> tokens, with white space control already applied.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace statepack::jinja {

struct Token {
  enum class Kind : std::uint8_t {
    kText,        // between tags
    kBlockBegin,  // {%
    kBlockEnd,
    kPrintBegin,  // {{
    kPrintEnd,
    kName,
    kString,  // unescaped
    kInteger,
    kFloat,
    kOperator,
    kEnd,
  };
  Kind kind = Kind::kEnd;
  std::string text;
  int line = 1;
  std::int64_t integer = 0;
  double number = 0;

  bool is(Kind k, std::string_view t) const { return kind == k && text == t; }
  bool is_name(std::string_view t) const { return is(Kind::kName, t); }
  bool is_operator(std::string_view t) const { return is(Kind::kOperator, t); }
};

/// Reads as Jinja with trim_blocks and lstrip_blocks set and keep_trailing_newline not. The last
/// token is kEnd. Throws TemplateError with the line.
std::vector<Token> tokenize(std::string_view source);

}  // namespace statepack::jinja
