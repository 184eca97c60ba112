// Chat messages to prompt tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "model/chat_template.hpp"
#include "model/tokenizer.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// Renders `messages` (the OpenAI array) through the template and encodes the result. Special
/// tokens come from the template alone: text inside the messages that spells one
/// (`<|im_end|>`) is encoded as plain text, also in `variables` (`tools`) and in names of fields.
/// Errors: kInvalidArgument of the template.
Result<std::vector<std::int32_t>> encode_chat(const Tokenizer& tokenizer,
                                              const ChatTemplate& chat_template,
                                              const nlohmann::ordered_json& messages,
                                              const nlohmann::ordered_json& variables,
                                              bool add_generation_prompt = true);

/// Whole conversations, one after the other: `jsonl` holds one object with `messages` a line. For
/// reading (calibration), so without a generation prompt. Errors: kCorrupt naming the line; as
/// encode_chat().
Result<std::vector<std::int32_t>> encode_conversations(const Tokenizer& tokenizer,
                                                       const ChatTemplate& chat_template,
                                                       std::string_view jsonl);

}  // namespace statepack
