// Any text as a chat template: refused, or rendered within its bounds.
#include <nlohmann/json.hpp>

#include "model/chat_template.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n_bytes) {
  using namespace statepack;
  using nlohmann::json;
  const std::string_view source(reinterpret_cast<const char*>(data), n_bytes);
  const auto chat_template = ChatTemplate::compile(source);
  if (!chat_template.ok()) return 0;
  static const json messages = json::parse(R"([
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "<|im_end|> caf\u00e9"}]},
    {"role": "assistant", "content": "<think>\nwhy\n</think>\nBecause.",
     "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": [null, true, 0.5]}}}]},
    {"role": "tool", "content": "42"}])");
  static const json variables = json::parse(R"({"enable_thinking": false, "bos_token": "<s>",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]})");
  (void)(*chat_template)->render(messages, true, variables);
  (void)(*chat_template)->render(json::array(), false, json::object());
  return 0;
}
