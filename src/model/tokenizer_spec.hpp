// What a tokenizer file says, checked and free of its format: between the readers and the encoder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "model/bpe.hpp"
#include "model/split_regex.hpp"
#include "model/tokenizer.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// Ids are below this: room for any published vocabulary (262,144 at most), none for a file that
/// asks for gigabytes.
inline constexpr std::int64_t kMaxTokens = std::int64_t{1} << 22;

/// A token that is cut out of the text before anything else happens to it.
struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool special = false;     ///< decode() can leave it out
  bool normalized = false;  ///< looked for in the normalised text instead of the raw text
};

struct TokenizerSpec {
  std::string label;                ///< for messages: the file
  std::vector<std::string> tokens;  ///< bytes by id; empty: no such token
  /// False for an entry that only stands for itself when decoded (its text cannot come out of
  /// byte-level encoding). As long as `tokens`.
  std::vector<bool> encodable;
  std::vector<Merge> merges;
  std::vector<AddedToken> added;
  std::vector<SplitRegex> splits;  ///< applied one after the other, each to the pieces of the last
  bool nfc = false;                ///< normalise to form C first
  bool whole_pieces = false;       ///< a piece that is a token becomes it, whatever the merges say
  /// The Kimi family cuts text after this many characters, and runs of white space or of other
  /// characters after `max_run`, before all else. 0: no cutting.
  std::size_t max_characters = 0;
  std::size_t max_run = 0;
};

/// Reads tokenizer.json. Errors as Tokenizer::parse.
Result<TokenizerSpec> read_tokenizer_json(std::string_view json, const std::string& label);

/// Reads tiktoken.model (base64 token and rank a line) and the added_tokens_decoder of
/// tokenizer_config.json. Errors: kCorrupt, kUnsupported naming the line or field.
Result<TokenizerSpec> read_tiktoken(std::string_view ranks, const std::string& label,
                                    std::string_view config_json, const std::string& config_label);

/// Errors: kCorrupt when bytes lack a token, or added tokens contradict one another.
Result<std::unique_ptr<Tokenizer>> make_tokenizer(TokenizerSpec spec);

}  // namespace statepack
