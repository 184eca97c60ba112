#include "runtime/prompt.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace statepack {
namespace {

using Json = nlohmann::ordered_json;  // templates print fields in the order of the request

// U+FDD0, a code point that Unicode reserves for a program's own use inside itself: it is put into
// whatever spells a special token, and the rendered prompt is cut there before encoding.
constexpr std::string_view kCut = "\xEF\xB7\x90";

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at)) {
    text.replace(at, from.size(), to);
    at += to.size();
  }
}

/// A text in which nothing spells a special token whole: kCut stands behind its first character.
std::string defused(std::string text, const std::vector<std::string>& specials) {
  replace_all(text, kCut, "\xEF\xBF\xBD");
  for (const std::string& special : specials) {
    if (special.size() < 2) continue;
    // Behind the first character, which may have several bytes.
    std::size_t n_first = 1;
    while (n_first < special.size() &&
           (static_cast<unsigned char>(special[n_first]) & 0xC0) == 0x80) {
      ++n_first;
    }
    if (n_first == special.size()) continue;
    std::string cut = special;
    cut.insert(n_first, kCut);
    replace_all(text, special, cut);
  }
  return text;
}

/// Every text in a value, names of fields included: a tool's parameters are printed with theirs.
Json defused(const Json& value, const std::vector<std::string>& specials) {
  if (value.is_string()) return defused(value.get_ref<const std::string&>(), specials);
  if (!value.is_structured()) return value;
  Json safe = value.is_array() ? Json::array() : Json::object();
  for (const auto& [name, item] : value.items()) {
    if (value.is_array()) {
      safe.push_back(defused(item, specials));
    } else {
      safe[defused(name, specials)] = defused(item, specials);
    }
  }
  return safe;
}

}  // namespace

Result<std::vector<std::int32_t>> encode_chat(const Tokenizer& tokenizer,
                                              const ChatTemplate& chat_template,
                                              const Json& messages, const Json& variables,
                                              bool add_generation_prompt) {
  std::vector<std::string> specials;
  for (std::int32_t id = 0; id < tokenizer.n_tokens(); ++id) {
    if (tokenizer.is_special(id)) specials.emplace_back(tokenizer.token_bytes(id));
  }
  SP_ASSIGN_OR_RETURN(const std::string text,
                      chat_template.render(defused(messages, specials), add_generation_prompt,
                                           defused(variables, specials)));

  std::vector<std::int32_t> tokens;
  std::size_t begin = 0;
  for (;;) {
    const std::size_t cut = text.find(kCut, begin);
    const std::string_view piece = std::string_view(text).substr(begin, cut - begin);
    const std::vector<std::int32_t> ids = tokenizer.encode(piece, true);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    if (cut == std::string::npos) return tokens;
    begin = cut + kCut.size();
  }
}

Result<std::vector<std::int32_t>> encode_conversations(const Tokenizer& tokenizer,
                                                       const ChatTemplate& chat_template,
                                                       std::string_view jsonl) {
  std::vector<std::int32_t> tokens;
  std::int64_t n_lines = 0;
  for (std::size_t begin = 0; begin < jsonl.size();) {
    const std::size_t end = std::min(jsonl.find('\n', begin), jsonl.size());
    const std::string_view line = jsonl.substr(begin, end - begin);
    begin = end + 1;
    ++n_lines;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const Json json = Json::parse(line, nullptr, false);
    if (!json.is_object() || !json.contains("messages") || !json["messages"].is_array()) {
      return Status(Code::kCorrupt, "line " + std::to_string(n_lines) +
                                        " is not a JSON object with a list 'messages'");
    }
    Result<std::vector<std::int32_t>> ids =
        encode_chat(tokenizer, chat_template, json["messages"], Json::object(), false);
    if (!ids.ok()) {
      return Status(ids.status().code(),
                    "line " + std::to_string(n_lines) + ": " + ids.status().message());
    }
    tokens.insert(tokens.end(), ids->begin(), ids->end());
  }
  return tokens;
}

}  // namespace statepack
