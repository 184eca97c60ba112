// Chat messages to prompt tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "model/chat_template.hpp"
#include "model/tokenizer.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// Renders `messages` (the OpenAI array) through the template with a generation prompt, and encodes
/// the result. Special tokens come from the template alone: text inside the messages that spells
/// one
/// (`<|im_end|>`) is encoded as plain text. Errors: kInvalidArgument of the template.
Result<std::vector<std::int32_t>> encode_chat(const Tokenizer& tokenizer,
                                              const ChatTemplate& chat_template,
                                              const nlohmann::json& messages,
                                              const nlohmann::json& variables);

}  // namespace statepack
