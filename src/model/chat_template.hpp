// Renders a checkpoint's own chat template: the documented subset of Jinja in docs/templates.md.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "statepack/status.hpp"

namespace statepack {

class ChatTemplate {
 public:
  /// Compiles. Errors: kUnsupported or kCorrupt with line, construct and what is supported.
  static Result<std::unique_ptr<ChatTemplate>> compile(std::string_view source);
  /// From `dir`/chat_template.jinja or the `chat_template` of `dir`/tokenizer_config.json, whose
  /// special tokens (bos_token, eos_token, ...) become variables. Errors: also kNotFound.
  static Result<std::unique_ptr<ChatTemplate>> load(const std::string& dir);
  ~ChatTemplate();

  /// `messages` is the OpenAI array; `variables` an object (or null) with tools, enable_thinking,
  /// bos_token, ...; `clock_unix_s` sets what strftime_now() says. `tools` and `documents` are none
  /// unless given. Safe to call from many threads at once.
  /// Errors: kInvalidArgument for raise_exception() of the template (its text) or a missing value.
  /// Work and output are bounded (kInvalidArgument past them).
  Result<std::string> render(const nlohmann::json& messages, bool add_generation_prompt,
                             const nlohmann::json& variables) const;
  /// The same with the keys of objects in the order of the request: models saw tool declarations
  /// that way, so requests should be parsed as ordered_json.
  Result<std::string> render(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                             const nlohmann::ordered_json& variables) const;

 private:
  ChatTemplate();
  template <class Json>
  Result<std::string> render_with(const Json& messages, bool add_generation_prompt,
                                  const Json& variables) const;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace statepack
