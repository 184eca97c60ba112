// tiktoken.model of the Kimi family -> TokenizerSpec.
#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <nlohmann/json.hpp>

#include "model/outside_json.hpp"
#include "model/tokenizer_spec.hpp"
#include "model/utf8.hpp"

namespace statepack {
namespace {

using nlohmann::json;

// Every token is tried at every cut below: quadratic in its length.
constexpr std::size_t kMaxTokenBytes = 512;
constexpr std::int32_t kReservedSpecials = 256;
// As the vendor's tokenizer cuts before it encodes.
constexpr std::size_t kMaxCharacters = 400'000;
constexpr std::size_t kMaxRun = 25'000;

constexpr std::string_view kPattern =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

std::optional<std::string> decode_base64(std::string_view text) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  std::size_t n_padding = 0;
  while (n_padding < 2 && text[text.size() - 1 - n_padding] == '=') ++n_padding;
  std::string out;
  for (std::size_t i = 0; i < text.size(); i += 4) {
    unsigned value = 0;
    for (std::size_t k = i; k < i + 4; ++k) {
      const bool padding = k >= text.size() - n_padding;
      const std::size_t digit = padding ? 0 : kDigits.find(text[k]);
      if (digit == std::string_view::npos) return std::nullopt;
      value = (value << 6) | static_cast<unsigned>(digit);
    }
    out.push_back(static_cast<char>(value >> 16));
    out.push_back(static_cast<char>((value >> 8) & 0xFF));
    out.push_back(static_cast<char>(value & 0xFF));
  }
  out.resize(out.size() - n_padding);
  return out;
}

Status read_ranks(std::string_view text, TokenizerSpec& spec) {
  constexpr std::size_t kMinLineBytes = 6;  // "QQ== 0": ranks without holes are below the lines
  const auto max_rank = static_cast<std::int64_t>(text.size() / kMinLineBytes);
  for (std::size_t line = 1; !text.empty(); ++line) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    std::string_view entry = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (entry.ends_with('\r')) entry.remove_suffix(1);
    if (entry.empty()) continue;
    const auto corrupt = [&](const std::string& what) {
      return Status(Code::kCorrupt, spec.label + ": line " + std::to_string(line) + " " + what);
    };
    const std::size_t space = entry.find(' ');
    if (space == std::string_view::npos)
      return corrupt("is not a base64 token, a space and a rank");
    std::optional<std::string> bytes = decode_base64(entry.substr(0, space));
    const std::string_view digits = entry.substr(space + 1);
    std::int64_t rank = -1;
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    if (!bytes || error != std::errc{} || stop != digits.data() + digits.size()) {
      return corrupt("is not a base64 token, a space and a rank");
    }
    if (bytes->empty() || bytes->size() > kMaxTokenBytes) {
      return corrupt("has a token of " + std::to_string(bytes->size()) + " bytes; 1 to " +
                     std::to_string(kMaxTokenBytes) + " are taken");
    }
    if (rank < 0 || rank > max_rank || rank >= kMaxTokens - kReservedSpecials) {
      return corrupt("has the rank " + std::string(digits) + ", out of range");
    }
    const auto id = static_cast<std::size_t>(rank);
    if (id >= spec.tokens.size()) spec.tokens.resize(id + 1);
    if (!spec.tokens[id].empty()) return corrupt("has a rank that an earlier line has");
    spec.tokens[id] = std::move(*bytes);
  }
  const auto hole = std::find(spec.tokens.begin(), spec.tokens.end(), "");
  if (spec.tokens.empty() || hole != spec.tokens.end()) {
    return Status(Code::kCorrupt, spec.label + ": no line has the rank " +
                                      std::to_string(hole - spec.tokens.begin()));
  }
  return {};
}

// tiktoken merges the adjacent pair whose concatenation has the lowest rank: every cut of a token
// into two tokens is a merge with that rank.
Status derive_merges(TokenizerSpec& spec) {
  std::unordered_map<std::string_view, std::int32_t> id_of;
  id_of.reserve(spec.tokens.size());
  for (std::size_t id = 0; id < spec.tokens.size(); ++id) {
    if (!id_of.emplace(spec.tokens[id], static_cast<std::int32_t>(id)).second) {
      return Status(Code::kCorrupt, spec.label + ": the token of rank " + std::to_string(id) +
                                        " appears with another rank too");
    }
  }
  for (std::size_t id = 0; id < spec.tokens.size(); ++id) {
    const std::string_view token = spec.tokens[id];
    for (std::size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = id_of.find(token.substr(0, cut));
      if (left == id_of.end()) continue;
      const auto right = id_of.find(token.substr(cut));
      if (right == id_of.end()) continue;
      spec.merges.push_back({left->second, right->second, static_cast<std::int32_t>(id),
                             static_cast<std::uint32_t>(id)});
    }
  }
  return {};
}

// The ids behind the ranks are special: named by the config, or reserved.
Status add_specials(std::string_view text, const std::string& label, TokenizerSpec& spec) {
  SP_ASSIGN_OR_RETURN(const json config, parse_outside_json<json>(text, label));
  const auto corrupt = [&](const std::string& what) {
    return Status(Code::kCorrupt, label + ": 'added_tokens_decoder' " + what);
  };
  const json decoder = config.is_object() ? config.value("added_tokens_decoder", json()) : json();
  if (!decoder.is_object()) return corrupt("is not an object");
  const auto n_base = static_cast<std::int32_t>(spec.tokens.size());
  for (std::int32_t i = 0; i < kReservedSpecials; ++i) {
    const std::int32_t id = n_base + i;
    spec.added.push_back(
        {.id = id, .content = "<|reserved_token_" + std::to_string(id) + "|>", .special = true});
  }
  for (const auto& [key, entry] : decoder.items()) {
    std::int32_t id = -1;
    const auto [stop, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc{} || stop != key.data() + key.size() || id < n_base ||
        id >= n_base + kReservedSpecials) {
      return corrupt("has the id '" + key + "', not one of the " +
                     std::to_string(kReservedSpecials) + " from " + std::to_string(n_base) +
                     " that follow the ranks of " + spec.label);
    }
    if (!entry.is_object() || !entry.contains("content") || !entry["content"].is_string() ||
        entry["content"].get_ref<const std::string&>().empty()) {
      return corrupt("has no content for id " + key);
    }
    AddedToken& token = spec.added[static_cast<std::size_t>(id - n_base)];
    token.content = entry["content"].get<std::string>();
    if (entry.contains("special")) {
      if (!entry["special"].is_boolean()) return corrupt("has a 'special' that is no flag");
      token.special = entry["special"].get<bool>();
    }
  }
  return {};
}

}  // namespace

Result<TokenizerSpec> read_tiktoken(std::string_view ranks, const std::string& label,
                                    std::string_view config_json, const std::string& config_label) {
  TokenizerSpec spec;
  spec.label = label;
  spec.whole_pieces = true;
  spec.max_characters = kMaxCharacters;
  spec.max_run = kMaxRun;
  SP_RETURN_IF_ERROR(read_ranks(ranks, spec));
  spec.encodable.assign(spec.tokens.size(), true);
  SP_RETURN_IF_ERROR(derive_merges(spec));
  SP_ASSIGN_OR_RETURN(SplitRegex split, SplitRegex::compile(kPattern, label));
  spec.splits.push_back(std::move(split));
  SP_RETURN_IF_ERROR(add_specials(config_json, config_label, spec));
  return spec;
}

}  // namespace statepack
