#include "model/tokenizer.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <unordered_map>
#include <utility>

#include "base/file.hpp"
#include "model/tokenizer_spec.hpp"
#include "model/utf8.hpp"

namespace statepack {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{96}
                                      << 20;  // a parsed file takes about twenty times its size
// Pieces recur: most words of a text are encoded once. Long ones hardly do, and would cost memory.
constexpr std::size_t kMaxCachedPieceBytes = 64;
constexpr std::size_t kMaxCachedPieces = std::size_t{1} << 16;

// Finds the leftmost-longest occurrence of any of a set of strings: a trie over their bytes.
class StringSet {
 public:
  bool insert(std::string_view text, std::int32_t id) {
    std::size_t node = 0;
    for (const char c : text) {
      const auto [edge, is_new] = edges_.try_emplace(edge_key(node, c), ids_.size());
      if (is_new) ids_.push_back(-1);
      node = edge->second;
    }
    starts_[static_cast<unsigned char>(text.front())] = true;
    return std::exchange(ids_[node], id) < 0;
  }
  bool empty() const { return edges_.empty(); }

  struct Match {
    std::size_t begin = 0;
    std::size_t n_bytes = 0;  // 0: none
    std::int32_t id = -1;
  };
  Match find(std::string_view text, std::size_t from) const {
    for (std::size_t begin = from; begin < text.size(); ++begin) {
      if (!starts_[static_cast<unsigned char>(text[begin])]) continue;
      Match match{.begin = begin};
      std::size_t node = 0;
      for (std::size_t i = begin; i < text.size(); ++i) {
        const auto edge = edges_.find(edge_key(node, text[i]));
        if (edge == edges_.end()) break;
        node = edge->second;
        if (ids_[node] >= 0) {
          match.n_bytes = i + 1 - begin;
          match.id = ids_[node];
        }
      }
      if (match.n_bytes > 0) return match;
    }
    return {};
  }

 private:
  static std::uint64_t edge_key(std::size_t node, char c) {
    return (std::uint64_t{node} << 8) | static_cast<unsigned char>(c);
  }
  std::unordered_map<std::uint64_t, std::size_t> edges_;
  std::vector<std::int32_t> ids_ = {-1};  // by node; -1: no string ends here
  std::array<bool, 256> starts_{};
};

// Cuts as the Kimi family's tokenizer does before anything else: every `max_characters`, and where
// a run of white space or of other characters passes `max_run`.
void cut(std::string_view text, std::size_t max_characters, std::size_t max_run,
         const std::function<void(std::string_view)>& part) {
  std::size_t begin = 0;
  std::size_t n_characters = 0;
  std::size_t run = 0;
  bool run_is_space = false;
  for (std::size_t i = 0; i < text.size();) {
    const Utf8Step step = decode_utf8(text.substr(i));
    const bool is_space = is_python_space(step.character);
    if (n_characters == max_characters) {
      part(text.substr(begin, i - begin));
      begin = i;
      n_characters = run = 0;
    }
    if (run == 0 || is_space != run_is_space) {
      run_is_space = is_space;
      run = 1;
    } else if (++run > max_run) {
      part(text.substr(begin, i - begin));
      begin = i;
      run = 1;
    }
    ++n_characters;
    i += step.n_bytes;
  }
  if (begin < text.size()) part(text.substr(begin));
}

struct StringHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>{}(text);
  }
};

class ByteLevelTokenizer final : public Tokenizer {
 public:
  ByteLevelTokenizer(TokenizerSpec spec, const std::array<std::int32_t, 256>& byte_tokens)
      : spec_(std::move(spec)), bpe_(byte_tokens, spec_.merges) {
    spec_.merges = {};
    special_.assign(spec_.tokens.size(), false);
    id_of_.reserve(spec_.tokens.size());
    for (std::size_t id = 0; id < spec_.tokens.size(); ++id) {
      if (spec_.encodable[id]) id_of_.emplace(spec_.tokens[id], static_cast<std::int32_t>(id));
    }
    // Last, so that the text of a plain token never becomes a special one by way of `id_of_`.
    for (const AddedToken& token : spec_.added) {
      special_[static_cast<std::size_t>(token.id)] = token.special;
      if (token.special) id_of_.erase(token.content);
    }
  }

  Status index_added() {
    for (const AddedToken& token : spec_.added) {
      const std::string content =
          token.normalized && spec_.nfc ? normalize_nfc(token.content) : token.content;
      if (!(token.normalized ? added_normalized_ : added_).insert(content, token.id) ||
          !added_ids_.emplace(token.content, token.id).second) {
        return Status(Code::kCorrupt,
                      spec_.label + ": added token '" + token.content + "' is there twice");
      }
    }
    return {};
  }

  std::vector<std::int32_t> encode(std::string_view text, bool parse_special) const override {
    Encoding encoding;
    encode(text, parse_special, encoding);
    return std::move(encoding.ids);
  }

  Result<std::vector<std::int32_t>> try_encode(std::string_view text,
                                               bool parse_special) const override {
    Encoding encoding;
    encode(text, parse_special, encoding);
    SP_RETURN_IF_ERROR(encoding.status);
    return std::move(encoding.ids);
  }

  std::string decode(std::span<const std::int32_t> ids, bool skip_special) const override {
    std::string bytes;
    for (const std::int32_t id : ids) {
      if (!(skip_special && is_special(id))) bytes += token_bytes(id);
    }
    return to_valid_utf8(bytes);
  }

  std::string_view token_bytes(std::int32_t id) const override {
    if (id < 0 || id >= n_tokens()) return {};
    return spec_.tokens[static_cast<std::size_t>(id)];
  }

  std::int32_t token_id(std::string_view content) const override {
    const auto added = added_ids_.find(content);
    if (added != added_ids_.end()) return added->second;
    const auto plain = id_of_.find(content);
    return plain == id_of_.end() ? -1 : plain->second;
  }

  bool is_special(std::int32_t id) const override {
    return id >= 0 && id < n_tokens() && special_[static_cast<std::size_t>(id)];
  }

  std::int32_t n_tokens() const override { return static_cast<std::int32_t>(spec_.tokens.size()); }

 private:
  // One call of encode(): its result and its working memory.
  struct Encoding {
    std::vector<std::int32_t> ids;
    Status status;  // the first error of a split
    Bpe::Scratch scratch;
    // Piece -> where its ids lie in `cached_ids`: first, and one past the last.
    std::unordered_map<std::string, std::pair<std::size_t, std::size_t>, StringHash,
                       std::equal_to<>>
        cache;
    std::vector<std::int32_t> cached_ids;
  };

  void encode(std::string_view bytes, bool parse_special, Encoding& encoding) const {
    const std::string text = to_valid_utf8(bytes);
    const auto part = [&](std::string_view p) { encode_part(p, parse_special, encoding); };
    if (spec_.max_characters > 0) {
      cut(text, spec_.max_characters, spec_.max_run, part);
    } else {
      part(text);
    }
  }

  void encode_part(std::string_view text, bool parse_special, Encoding& encoding) const {
    const auto plain = [&](std::string_view p) { encode_pieces(p, 0, encoding); };
    const auto raw = [&](std::string_view p) {
      const std::string normalized = spec_.nfc ? normalize_nfc(p) : std::string();
      const std::string_view section = spec_.nfc ? std::string_view(normalized) : p;
      take_added(section, parse_special ? &added_normalized_ : nullptr, encoding, plain);
    };
    take_added(text, parse_special ? &added_ : nullptr, encoding, raw);
  }

  // Appends the ids of the strings of `set` (none when null); `rest` gets what lies between.
  template <class Rest>
  static void take_added(std::string_view text, const StringSet* set, Encoding& encoding,
                         const Rest& rest) {
    std::size_t done = 0;
    while (set != nullptr && !set->empty() && done < text.size()) {
      const StringSet::Match match = set->find(text, done);
      if (match.n_bytes == 0) break;
      if (match.begin > done) rest(text.substr(done, match.begin - done));
      encoding.ids.push_back(match.id);
      done = match.begin + match.n_bytes;
    }
    if (done < text.size()) rest(text.substr(done));
  }

  void encode_pieces(std::string_view text, std::size_t level, Encoding& encoding) const {
    if (level == spec_.splits.size()) {
      encode_piece(text, encoding);
      return;
    }
    const Status status = spec_.splits[level].split(
        text, [&](std::string_view piece) { encode_pieces(piece, level + 1, encoding); });
    if (!status.ok() && encoding.status.ok()) encoding.status = status;
  }

  void encode_piece(std::string_view piece, Encoding& encoding) const {
    if (piece.size() > kMaxCachedPieceBytes) {
      encode_uncached(piece, encoding, encoding.ids);
      return;
    }
    if (encoding.cache.size() == kMaxCachedPieces) {
      encoding.cache.clear();
      encoding.cached_ids.clear();
    }
    auto entry = encoding.cache.find(piece);
    if (entry == encoding.cache.end()) {
      const std::size_t begin = encoding.cached_ids.size();
      encode_uncached(piece, encoding, encoding.cached_ids);
      entry = encoding.cache.emplace(piece, std::pair(begin, encoding.cached_ids.size())).first;
    }
    const auto ids = encoding.cached_ids.begin();
    encoding.ids.insert(encoding.ids.end(), ids + static_cast<std::ptrdiff_t>(entry->second.first),
                        ids + static_cast<std::ptrdiff_t>(entry->second.second));
  }

  void encode_uncached(std::string_view piece, Encoding& encoding,
                       std::vector<std::int32_t>& out) const {
    if (spec_.whole_pieces) {
      const auto whole = id_of_.find(piece);
      if (whole != id_of_.end()) {
        out.push_back(whole->second);
        return;
      }
    }
    bpe_.encode(piece, encoding.scratch, out);
  }

  TokenizerSpec spec_;
  Bpe bpe_;
  std::vector<bool> special_;
  std::unordered_map<std::string_view, std::int32_t> id_of_;      // keys point into spec_.tokens
  std::unordered_map<std::string_view, std::int32_t> added_ids_;  // keys point into spec_.added
  StringSet added_;
  StringSet added_normalized_;
};

}  // namespace

Result<std::unique_ptr<Tokenizer>> make_tokenizer(TokenizerSpec spec) {
  std::array<std::int32_t, 256> byte_tokens;
  byte_tokens.fill(-1);
  for (std::size_t id = 0; id < spec.tokens.size(); ++id) {
    if (spec.encodable[id] && spec.tokens[id].size() == 1) {
      byte_tokens[static_cast<unsigned char>(spec.tokens[id][0])] = static_cast<std::int32_t>(id);
    }
  }
  const auto missing = std::find(byte_tokens.begin(), byte_tokens.end(), -1);
  if (missing != byte_tokens.end()) {
    return Status(Code::kCorrupt, spec.label + ": no token for byte " +
                                      std::to_string(missing - byte_tokens.begin()) +
                                      "; a byte-level vocabulary has one for each of the 256");
  }
  for (const AddedToken& token : spec.added) {
    const auto id = static_cast<std::size_t>(token.id);
    if (id >= spec.tokens.size()) {
      spec.tokens.resize(id + 1);
      spec.encodable.resize(id + 1, false);
    }
    if (!spec.tokens[id].empty() && spec.tokens[id] != token.content) {
      return Status(Code::kCorrupt, spec.label + ": id " + std::to_string(token.id) +
                                        " belongs to '" + to_valid_utf8(spec.tokens[id]) +
                                        "' and to added token '" + token.content + "'");
    }
    spec.tokens[id] = token.content;
  }
  auto tokenizer = std::make_unique<ByteLevelTokenizer>(std::move(spec), byte_tokens);
  SP_RETURN_IF_ERROR(tokenizer->index_added());
  return std::unique_ptr<Tokenizer>(std::move(tokenizer));
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::parse(std::string_view json,
                                                    const std::string& label) {
  SP_ASSIGN_OR_RETURN(TokenizerSpec spec, read_tokenizer_json(json, label));
  return make_tokenizer(std::move(spec));
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& dir) {
  const std::string json_path = dir + "/tokenizer.json";
  const Result<std::string> json = read_text_file(json_path, kMaxFileBytes);
  if (json.ok()) return parse(*json, json_path);
  if (json.status().code() != Code::kNotFound) return json.status();

  const std::string ranks_path = dir + "/tiktoken.model";
  const Result<std::string> ranks = read_text_file(ranks_path, kMaxFileBytes);
  if (!ranks.ok()) {
    if (ranks.status().code() != Code::kNotFound) return ranks.status();
    return Status(Code::kNotFound, "'" + dir +
                                       "' has neither tokenizer.json nor tiktoken.model; "
                                       "download the checkpoint's tokenizer files too");
  }
  const std::string config_path = dir + "/tokenizer_config.json";
  SP_ASSIGN_OR_RETURN(const std::string config, read_text_file(config_path, kMaxFileBytes));
  SP_ASSIGN_OR_RETURN(TokenizerSpec spec, read_tiktoken(*ranks, ranks_path, config, config_path));
  return make_tokenizer(std::move(spec));
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string out;
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const Utf8Step step = decode_utf8(rest);
    if (step.truncated) break;
    append_utf8(out, step.character);
    rest.remove_prefix(step.n_bytes);
  }
  pending_.erase(0, pending_.size() - rest.size());
  return out;
}

std::string Utf8Stream::finish() {
  std::string out = to_valid_utf8(pending_);
  pending_.clear();
  return out;
}

}  // namespace statepack
