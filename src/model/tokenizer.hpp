// Byte-level BPE tokenizers as published: tokenizer.json (Qwen) and tiktoken.model (Kimi).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "statepack/status.hpp"

namespace statepack {

class Tokenizer {
 public:
  /// Reads `dir`/tokenizer.json (NFC or no normaliser, Split by regex + ByteLevel, BPE, added
  /// tokens), or, where there is none, `dir`/tiktoken.model with the special tokens of
  /// `dir`/tokenizer_config.json. Errors: kNotFound, kCorrupt, kUnsupported naming file and field.
  static Result<std::unique_ptr<Tokenizer>> load(const std::string& dir);
  /// The same from the text of a tokenizer.json.
  static Result<std::unique_ptr<Tokenizer>> parse(std::string_view json, const std::string& label);
  virtual ~Tokenizer() = default;

  /// Text (UTF-8; invalid bytes become U+FFFD as the ecosystem does) to ids. Added tokens in the
  /// text are recognised when `parse_special`, else they are encoded as plain text (user content
  /// must not forge them). Nothing is put in front or behind: the chat template does that. Safe to
  /// call from many threads at once.
  virtual std::vector<std::int32_t> encode(std::string_view text, bool parse_special) const = 0;
  /// The same, but says when the file's own pattern ran out of its work bounds on this text
  /// (kInvalidArgument; published patterns never do). encode() then takes what was not cut yet as
  /// one piece: ids that decode to the text, though not the canonical ones.
  virtual Result<std::vector<std::int32_t>> try_encode(std::string_view text,
                                                       bool parse_special) const {
    return encode(text, parse_special);
  }
  /// Text of the ids, always valid UTF-8 (ill-formed bytes become U+FFFD); unknown ids give
  /// nothing. `skip_special` drops special added tokens.
  virtual std::string decode(std::span<const std::int32_t> ids, bool skip_special) const = 0;
  /// Raw bytes of one token (may be a part of a UTF-8 character): for streaming. Empty for an
  /// unknown id.
  virtual std::string_view token_bytes(std::int32_t id) const = 0;
  /// The added token, or else the vocabulary's token, with these bytes; -1 when there is none.
  virtual std::int32_t token_id(std::string_view content) const = 0;
  virtual bool is_special(std::int32_t id) const = 0;
  virtual std::int32_t n_tokens() const = 0;  ///< ids are below this
};

/// Holds back the bytes of an unfinished UTF-8 character between tokens of a stream.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);  ///< the complete characters so far
  std::string finish();                      ///< what is left, invalid bytes as U+FFFD
 private:
  std::string pending_;
};

}  // namespace statepack
