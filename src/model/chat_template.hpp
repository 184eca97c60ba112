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
  /// From `dir`/chat_template.jinja or the `chat_template` of `dir`/tokenizer_config.json.
  static Result<std::unique_ptr<ChatTemplate>> load(const std::string& dir);
  ~ChatTemplate();

  /// `messages` is the OpenAI array; `variables` an object with tools, enable_thinking, bos_token...
  /// Errors: kInvalidArgument for raise_exception() of the template (its text) or a missing value.
  /// Work and output are bounded (kInvalidArgument past them).
  Result<std::string> render(const nlohmann::json& messages, bool add_generation_prompt,
                             const nlohmann::json& variables) const;

 private:
  ChatTemplate();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace statepack
