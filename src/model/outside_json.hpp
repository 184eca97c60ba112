// JSON from outside: bounded in depth, errors as Status.
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "statepack/status.hpp"

namespace statepack {

/// Parses `text` into Json (nlohmann::json, or nlohmann::ordered_json to keep the order of keys).
/// Errors: kCorrupt with `label` and the byte; nesting deeper than 256 is refused before parsing,
/// since later walks over the value are recursive.
template <class Json>
Result<Json> parse_outside_json(std::string_view text, const std::string& label) {
  constexpr int kMaxDepth = 256;
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\')
        ++i;
      else if (c == '"')
        in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) {
        return Status(Code::kCorrupt, label + ": JSON nested deeper than " +
                                          std::to_string(kMaxDepth) + " at byte " +
                                          std::to_string(i));
      }
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  try {
    return Json::parse(text);
  } catch (const nlohmann::json::parse_error& e) {
    return Status(Code::kCorrupt,
                  label + ": not valid JSON (around byte " + std::to_string(e.byte) + ")");
  } catch (const nlohmann::json::exception& e) {
    return Status(Code::kCorrupt, label + ": not valid JSON (" + e.what() + ")");
  }
}

}  // namespace statepack
