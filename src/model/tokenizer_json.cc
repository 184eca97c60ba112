// tokenizer.json -> TokenizerSpec. What would change ids and has no counterpart here is refused.
#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "model/byte_level.hpp"
#include "model/outside_json.hpp"
#include "model/tokenizer_spec.hpp"
#include "model/utf8.hpp"

namespace statepack {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxSplits = 8;
constexpr std::size_t kMaxAddedBytes = 512;

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

class Reader {
 public:
  explicit Reader(const std::string& label) { spec_.label = label; }

  Result<TokenizerSpec> read(const json& root) {
    if (!root.is_object()) return corrupt("", "is not a JSON object");
    SP_RETURN_IF_ERROR(read_normalizer(root));
    SP_RETURN_IF_ERROR(read_pre_tokenizer(root));
    SP_RETURN_IF_ERROR(read_decoder(root));
    const json* model = find(root, "model");
    if (model == nullptr || !model->is_object()) return corrupt("model", "is not an object");
    SP_RETURN_IF_ERROR(check_model(*model));
    SP_RETURN_IF_ERROR(read_vocab(*model));
    SP_RETURN_IF_ERROR(read_merges(*model));
    SP_RETURN_IF_ERROR(read_added(root));
    return std::move(spec_);
  }

 private:
  Status fail(Code code, const std::string& field, const std::string& what) const {
    return Status(
        code, spec_.label + ": " + (field.empty() ? "the file" : "'" + field + "'") + " " + what);
  }
  Status corrupt(const std::string& field, const std::string& what) const {
    return fail(Code::kCorrupt, field, what);
  }
  Status unsupported(const std::string& field, const std::string& what) const {
    return fail(Code::kUnsupported, field,
                what + "; supported are byte-level BPE files as Qwen publishes them");
  }

  // A member that is there and not null.
  static const json* find(const json& object, const char* key) {
    const auto it = object.find(key);
    return it == object.end() || it->is_null() ? nullptr : &*it;
  }
  // A flag that must have a given value where it is written at all.
  Status require_flag(const json& object, const std::string& path, const char* key, bool wanted,
                      bool absent) const {
    const json* flag = find(object, key);
    if (flag != nullptr && !flag->is_boolean()) {
      return corrupt(path + "." + key, "is not true or false");
    }
    if ((flag == nullptr ? absent : flag->get<bool>()) != wanted) {
      return unsupported(path + "." + key, wanted ? "is not true" : "is not false");
    }
    return {};
  }
  Result<std::string> type_of(const json& object, const std::string& path) const {
    if (!object.is_object()) return corrupt(path, "is not an object");
    const json* type = find(object, "type");
    if (type == nullptr || !type->is_string()) return corrupt(path + ".type", "is not a string");
    return type->get<std::string>();
  }
  // The members of a Sequence, or the object itself.
  Result<std::vector<std::pair<std::string, const json*>>> members(const json& object,
                                                                   const std::string& path,
                                                                   const char* list_key) const {
    SP_ASSIGN_OR_RETURN(const std::string type, type_of(object, path));
    std::vector<std::pair<std::string, const json*>> out;
    if (type != "Sequence") {
      out.emplace_back(path, &object);
      return out;
    }
    const json* list = find(object, list_key);
    if (list == nullptr || !list->is_array()) {
      return corrupt(path + "." + list_key, "is not an array");
    }
    for (std::size_t i = 0; i < list->size(); ++i) {
      out.emplace_back(path + "." + list_key + "[" + std::to_string(i) + "]", &(*list)[i]);
    }
    return out;
  }

  Status read_normalizer(const json& root) {
    const json* normalizer = find(root, "normalizer");
    if (normalizer == nullptr) return {};
    SP_ASSIGN_OR_RETURN(const auto parts, members(*normalizer, "normalizer", "normalizers"));
    for (const auto& [path, part] : parts) {
      SP_ASSIGN_OR_RETURN(const std::string type, type_of(*part, path));
      if (type != "NFC") return unsupported(path, "is of type " + type + ", not NFC");
      spec_.nfc = true;
    }
    return {};
  }

  Status read_pre_tokenizer(const json& root) {
    const json* pre = find(root, "pre_tokenizer");
    if (pre == nullptr) return unsupported("pre_tokenizer", "is missing");
    SP_ASSIGN_OR_RETURN(const auto parts, members(*pre, "pre_tokenizer", "pretokenizers"));
    if (parts.empty() || parts.size() > kMaxSplits + 1) {
      return unsupported("pre_tokenizer", "has " + std::to_string(parts.size()) + " parts");
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto& [path, part] = parts[i];
      SP_ASSIGN_OR_RETURN(const std::string type, type_of(*part, path));
      if (i + 1 < parts.size()) {
        if (type != "Split") return unsupported(path, "is of type " + type + ", not Split");
        SP_RETURN_IF_ERROR(read_split(*part, path));
      } else {
        if (type != "ByteLevel") {
          return unsupported(path, "is of type " + type + "; the last must be ByteLevel");
        }
        SP_RETURN_IF_ERROR(require_flag(*part, path, "add_prefix_space", false, true));
        const json* use_regex = find(*part, "use_regex");
        if (use_regex != nullptr && !use_regex->is_boolean()) {
          return corrupt(path + ".use_regex", "is not true or false");
        }
        if (use_regex == nullptr || use_regex->get<bool>()) {
          SP_RETURN_IF_ERROR(add_split(kGpt2Pattern, path));
        }
      }
    }
    return {};
  }

  Status read_split(const json& split, const std::string& path) {
    const json* behavior = find(split, "behavior");
    if (behavior == nullptr || !behavior->is_string()) {
      return corrupt(path + ".behavior", "is not a string");
    }
    if (*behavior != "Isolated") return unsupported(path + ".behavior", "is not Isolated");
    SP_RETURN_IF_ERROR(require_flag(split, path, "invert", false, false));
    const json* pattern = find(split, "pattern");
    if (pattern == nullptr || !pattern->is_object()) {
      return corrupt(path + ".pattern", "is not an object");
    }
    const json* regex = find(*pattern, "Regex");
    if (regex == nullptr) return unsupported(path + ".pattern", "has no Regex");
    if (!regex->is_string()) return corrupt(path + ".pattern.Regex", "is not a string");
    return add_split(regex->get_ref<const std::string&>(), path + ".pattern.Regex");
  }

  Status add_split(std::string_view pattern, const std::string& path) {
    SP_ASSIGN_OR_RETURN(SplitRegex split,
                        SplitRegex::compile(pattern, spec_.label + ": '" + path + "'"));
    spec_.splits.push_back(std::move(split));
    return {};
  }

  Status read_decoder(const json& root) const {
    const json* decoder = find(root, "decoder");
    if (decoder == nullptr) return unsupported("decoder", "is missing");
    SP_ASSIGN_OR_RETURN(const auto parts, members(*decoder, "decoder", "decoders"));
    if (parts.size() != 1) return unsupported("decoder", "is not one ByteLevel decoder");
    SP_ASSIGN_OR_RETURN(const std::string type, type_of(*parts[0].second, parts[0].first));
    if (type != "ByteLevel") return unsupported(parts[0].first, "is of type " + type);
    return {};
  }

  Status check_model(const json& model) {
    if (const json* type = find(model, "type"); type != nullptr && *type != "BPE") {
      return unsupported("model.type", "is not BPE");
    }
    if (const json* dropout = find(model, "dropout"); dropout != nullptr && *dropout != 0.0) {
      return unsupported("model.dropout", "is not 0: encoding would be random");
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (const json* affix = find(model, key); affix != nullptr && *affix != "") {
        return unsupported(std::string("model.") + key, "is not empty");
      }
    }
    SP_RETURN_IF_ERROR(require_flag(model, "model", "byte_fallback", false, false));
    if (const json* flag = find(model, "ignore_merges"); flag != nullptr) {
      if (!flag->is_boolean()) return corrupt("model.ignore_merges", "is not true or false");
      spec_.whole_pieces = flag->get<bool>();
    }
    return {};
  }

  static bool is_id(const json& value) {
    return value.is_number_integer() &&
           (value.is_number_unsigned() ? value.get<std::uint64_t>() : ~std::uint64_t{0}) <
               static_cast<std::uint64_t>(kMaxTokens);
  }

  Status read_vocab(const json& model) {
    const json* vocab = find(model, "vocab");
    if (vocab == nullptr || !vocab->is_object() || vocab->empty()) {
      return corrupt("model.vocab", "is not an object with entries");
    }
    // The ids of n tokens are 0 .. n - 1: with a bound, no id twice and n of them, none is missing.
    const std::size_t n = vocab->size();
    if (n > static_cast<std::size_t>(kMaxTokens)) {
      return unsupported("model.vocab", "has " + std::to_string(n) + " entries");
    }
    spec_.tokens.resize(n);
    spec_.encodable.resize(n);
    id_of_.reserve(n);
    for (const auto& [text, value] : vocab->items()) {
      if (text.empty()) return corrupt("model.vocab", "has an empty token");
      if (!is_id(value)) {
        return corrupt("model.vocab", "gives token '" + text + "' the id " + value.dump() +
                                          ", not an integer from 0 to " +
                                          std::to_string(kMaxTokens - 1));
      }
      const auto id = value.get<std::size_t>();
      if (id >= n) {
        return corrupt("model.vocab", "gives token '" + text + "' the id " + std::to_string(id) +
                                          ", but its " + std::to_string(n) +
                                          " tokens must have the ids below that, without holes");
      }
      if (!spec_.tokens[id].empty()) {
        return corrupt("model.vocab", "has id " + std::to_string(id) +
                                          " twice, the second time for '" + text + "'");
      }
      std::optional<std::string> bytes = bytes_of_byte_level(text);
      spec_.encodable[id] = bytes.has_value();
      spec_.tokens[id] = bytes ? *std::move(bytes) : text;
      id_of_.emplace(text, static_cast<std::int32_t>(id));
    }
    return {};
  }

  // One merge is ["a", "b"], or "a b" in older files.
  std::optional<std::pair<std::string_view, std::string_view>> parts_of(const json& merge) const {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      return std::pair<std::string_view, std::string_view>(merge[0].get_ref<const std::string&>(),
                                                           merge[1].get_ref<const std::string&>());
    }
    if (merge.is_string()) {
      const std::string_view text = merge.get_ref<const std::string&>();
      const std::size_t space = text.find(' ');
      if (space != std::string_view::npos && text.find(' ', space + 1) == std::string_view::npos) {
        return std::pair(text.substr(0, space), text.substr(space + 1));
      }
    }
    return std::nullopt;
  }

  Status read_merges(const json& model) {
    const json* merges = find(model, "merges");
    if (merges == nullptr || !merges->is_array()) return corrupt("model.merges", "is not an array");
    if (merges->size() > static_cast<std::size_t>(kMaxTokens)) {
      return unsupported("model.merges", "has " + std::to_string(merges->size()) + " entries");
    }
    spec_.merges.reserve(merges->size());
    std::string joined;
    for (std::size_t i = 0; i < merges->size(); ++i) {
      const std::string path = "model.merges[" + std::to_string(i) + "]";
      const auto parts = parts_of((*merges)[i]);
      if (!parts) return corrupt(path, "is neither a pair of strings nor two parts and a space");
      joined.assign(parts->first).append(parts->second);
      Merge merge{.rank = static_cast<std::uint32_t>(i)};
      for (const auto& [text, id] :
           {std::pair(parts->first, &merge.left), std::pair(parts->second, &merge.right),
            std::pair(std::string_view(joined), &merge.result)}) {
        const auto found = id_of_.find(text);
        if (found == id_of_.end()) {
          return corrupt(path, "needs token '" + std::string(text) + "', which the vocab lacks");
        }
        *id = found->second;
      }
      spec_.merges.push_back(merge);
    }
    return {};
  }

  Status read_added(const json& root) {
    const json* added = find(root, "added_tokens");
    if (added == nullptr) return {};
    if (!added->is_array()) return corrupt("added_tokens", "is not an array");
    for (std::size_t i = 0; i < added->size(); ++i) {
      const std::string path = "added_tokens[" + std::to_string(i) + "]";
      const json& entry = (*added)[i];
      if (!entry.is_object()) return corrupt(path, "is not an object");
      const json* content = find(entry, "content");
      if (content == nullptr || !content->is_string()) {
        return corrupt(path + ".content", "is not a string");
      }
      const json* id = find(entry, "id");
      if (id == nullptr || !is_id(*id)) {
        return corrupt(path + ".id",
                       "is not an integer from 0 to " + std::to_string(kMaxTokens - 1));
      }
      for (const char* key : {"single_word", "lstrip", "rstrip"}) {
        SP_RETURN_IF_ERROR(require_flag(entry, path, key, false, false));
      }
      AddedToken token{.id = id->get<std::int32_t>(), .content = content->get<std::string>()};
      for (const auto& [key, flag] :
           {std::pair("special", &token.special), std::pair("normalized", &token.normalized)}) {
        const json* value = find(entry, key);
        if (value == nullptr) continue;
        if (!value->is_boolean()) return corrupt(path + "." + key, "is not true or false");
        *flag = value->get<bool>();
      }
      if (token.content.empty() || token.content.size() > kMaxAddedBytes) {
        return corrupt(path + ".content",
                       "is empty or longer than " + std::to_string(kMaxAddedBytes) + " bytes");
      }
      const auto in_vocab = id_of_.find(token.content);
      if (in_vocab != id_of_.end() && in_vocab->second != token.id) {
        return corrupt(path + ".id", "is " + std::to_string(token.id) + ", but the vocab has '" +
                                         token.content + "' as " +
                                         std::to_string(in_vocab->second));
      }
      if (in_vocab == id_of_.end() && static_cast<std::size_t>(token.id) < id_of_.size()) {
        return corrupt(path + ".id", "is " + std::to_string(token.id) +
                                         ", which the vocab gives to another token");
      }
      spec_.added.push_back(std::move(token));
    }
    return {};
  }

  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>{}(text);
    }
  };

  TokenizerSpec spec_;
  std::unordered_map<std::string, std::int32_t, Hash, std::equal_to<>> id_of_;
};

}  // namespace

Result<TokenizerSpec> read_tokenizer_json(std::string_view text, const std::string& label) {
  SP_ASSIGN_OR_RETURN(const json root, parse_outside_json<json>(text, label));
  return Reader(label).read(root);
}

}  // namespace statepack
