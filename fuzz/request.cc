// Any bytes as the body of a request: refused with a status and a message, or read within bounds.
#include "serve/request.hpp"

#include "base/check.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n_bytes) {
  using namespace statepack;
  using namespace statepack::serve;
  const std::string_view text(reinterpret_cast<const char*>(data), n_bytes);
  Json body;
  const auto check = [](const std::optional<ApiError>& error) {
    if (!error) return true;
    SP_CHECK(error->status == 400 || error->status == 501, "a refusal has its status");
    SP_CHECK(!error->message.empty(), "a refusal says why");
    (void)dump(error->body());
    return false;
  };
  if (!check(parse_body(text, &body))) return 0;
  GenerationRequest chat;
  if (check(read_chat_request(body, {}, &chat))) {
    SP_CHECK(chat.chat && chat.chat->messages.is_array() && chat.n >= 1, "a chat has messages");
  }
  GenerationRequest completion;
  if (check(read_completion_request(body, {}, &completion))) {
    SP_CHECK(!completion.prompts.empty(), "a completion has a prompt");
  }
  return 0;
}
