// What a request for text asks for: OpenAI's fields, and those that vLLM and llama-server add.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/sampling.hpp"
#include "serve/json.hpp"

namespace statepack::serve {

/// Text to encode, or token ids as they are.
using Prompt = std::variant<std::string, std::vector<std::int32_t>>;

/// Messages and what the chat template sees beside them.
struct ChatPrompt {
  Json messages;   ///< contents as strings, roles checked, arguments of tool calls as objects
  Json variables;  ///< tools, documents, fields of chat_template_kwargs
  bool add_generation_prompt = true;
};

struct GenerationRequest {
  std::string model;  ///< "" when the request names none
  std::optional<ChatPrompt> chat;
  std::vector<Prompt> prompts;  ///< of completions; one or more
  SamplingParams params;        ///< seed and sequence as far as the request sets them
  bool has_seed = false;
  /// Longest reply; none: what the context leaves. 0 is possible with `echo` alone.
  std::optional<std::int64_t> max_tokens;
  std::int64_t n = 1;  ///< answers to each prompt
  bool stream = false;
  bool include_usage = false;    ///< of a stream: a last chunk with the usage
  bool return_progress = false;  ///< of a stream: chunks while the prompt is read
  bool echo = false;             ///< completions: the prompt's text in front
};

/// Reads the body of POST /v1/chat/completions. `defaults` holds the model's own sampling settings.
/// Fields that are unknown are ignored; fields that are known and would change the answer, but
/// cannot be honoured here, are refused (501).
std::optional<ApiError> read_chat_request(const Json& body, const SamplingParams& defaults,
                                          GenerationRequest* out);
/// The same for POST /v1/completions.
std::optional<ApiError> read_completion_request(const Json& body, const SamplingParams& defaults,
                                                GenerationRequest* out);
/// The messages of a body, for /apply-template and /tokenize as well.
std::optional<ApiError> read_chat_prompt(const Json& body, ChatPrompt* out);
/// A list of token ids under `name`. Errors: not a list of whole numbers in 32 bits.
std::optional<ApiError> read_token_ids(const Json& value, const std::string& name,
                                       std::vector<std::int32_t>* out);

}  // namespace statepack::serve
