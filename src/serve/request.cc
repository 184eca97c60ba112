#include "serve/request.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>

namespace statepack::serve {
namespace {

constexpr std::int64_t kMaxAnswers = 128;    // n
constexpr std::size_t kMaxPrompts = 1024;    // of one request
constexpr std::size_t kMaxSequences = 1024;  // n times prompts
constexpr std::size_t kMaxStops = 16;
constexpr std::size_t kMaxStopBytes = 1024;
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;
constexpr std::int64_t kMaxTopLogprobs = 20;

// Fields that other servers honour and this one cannot, with the number that asks for nothing; so
// do null, false, and empty texts, lists and objects.
struct NotHonoured {
  const char* name;
  int neutral = 0;
};
constexpr NotHonoured kNotHonoured[] = {
    {"logit_bias"},      {"suffix"},       {"stop_token_ids"}, {"min_tokens"},
    {"guided_json"},     {"guided_regex"}, {"guided_choice"},  {"guided_grammar"},
    {"json_schema"},     {"grammar"},      {"functions"},      {"structured_outputs"},
    {"function_call"},   {"audio"},        {"lora"},           {"use_beam_search"},
    {"prompt_embeds"},   {"bad_words"},    {"chat_template"},  {"continue_final_message"},
    {"prompt_logprobs"}, {"best_of", 1},   {"typical_p", 1},   {"allowed_token_ids"}};

bool asks_for_nothing(const Json& value, int neutral) {
  return value == false || value == neutral || (value.is_structured() && value.empty()) ||
         value == "";
}

void refuse_not_honoured(Fields& fields) {
  for (const auto& [name, neutral] : kNotHonoured) {
    const Json* value = fields.find(name);
    if (value == nullptr || asks_for_nothing(*value, neutral)) continue;
    fields.fail(not_supported(name, fmt::format("{} is not supported; leave it out", name)));
  }
  if (const Json* format = fields.find("response_format")) {
    if (!format->is_object() || !format->contains("type") || (*format)["type"] != "text") {
      fields.fail(not_supported("response_format",
                                "response_format can only be {\"type\": \"text\"} here"));
    }
  }
  if (const Json* choice = fields.find("tool_choice")) {
    if (*choice != "auto" && *choice != "none") {
      fields.fail(
          not_supported("tool_choice", "tool_choice can only be \"auto\" or \"none\" here"));
    }
  }
}

void read_stop(Fields& fields, SamplingParams* params) {
  const Json* value = fields.find("stop");
  if (value == nullptr) return;
  params->stop.clear();
  const Json list = value->is_string() ? Json::array({*value}) : *value;
  if (!list.is_array() || list.size() > kMaxStops) {
    return fields.fail("stop", fmt::format("must be a string or a list of at most {}", kMaxStops));
  }
  for (const Json& stop : list) {
    if (!stop.is_string() || stop.get_ref<const std::string&>().empty() ||
        stop.get_ref<const std::string&>().size() > kMaxStopBytes) {
      return fields.fail("stop", fmt::format("must hold strings of 1 to {} bytes", kMaxStopBytes));
    }
    params->stop.push_back(stop.get<std::string>());
  }
}

// What chat and completions share.
void read_common(const SamplingParams& defaults, Fields& fields, GenerationRequest* out) {
  SamplingParams& p = out->params;
  p = defaults;
  fields.read("model", &out->model);
  fields.read("temperature", &p.temperature, 0, 100);
  fields.read("top_p", &p.top_p, 0, 1);
  fields.read("min_p", &p.min_p, 0, 1);
  std::int64_t top_k = p.top_k;
  fields.read("top_k", &top_k, -1, std::numeric_limits<int>::max());
  p.top_k = static_cast<int>(std::max<std::int64_t>(top_k, 0));  // -1 is vLLM's "off"
  fields.read("repetition_penalty", &p.repetition_penalty, 0, 100);
  fields.read("presence_penalty", &p.presence_penalty, -100, 100);
  fields.read("frequency_penalty", &p.frequency_penalty, -100, 100);
  fields.read("ignore_eos", &p.ignore_eos);
  out->has_seed = fields.find("seed") != nullptr;
  std::int64_t seed = 0;
  fields.read("seed", &seed, std::numeric_limits<std::int64_t>::min(),
              std::numeric_limits<std::int64_t>::max());
  p.seed = static_cast<std::uint64_t>(seed);
  read_stop(fields, &p);
  fields.read("n", &out->n, 1, kMaxAnswers);
  fields.read("stream", &out->stream);
  fields.read("return_progress", &out->return_progress);
  if (const Json* options = fields.find("stream_options")) {
    if (!options->is_object()) return fields.fail("stream_options", "must be an object");
    if (!out->stream) return fields.fail("stream_options", "is only allowed with stream: true");
    Fields inner(*options, "stream_options.");
    inner.read("include_usage", &out->include_usage);
    if (!inner.ok()) fields.fail(*inner.error());
  }
  if (!fields.ok()) return;
  refuse_not_honoured(fields);
}

std::optional<ApiError> check(GenerationRequest* request) {
  SamplingParams params = request->params;
  params.max_tokens = 1;
  const Status status = params.validate();
  if (status.ok()) return std::nullopt;
  // The message begins with the parameter's name.
  return bad_request(status.message().substr(0, status.message().find(' ')), status.message());
}

// OpenAI sends a text as one string or as parts; templates expect the string.
bool flatten_content(Fields& fields, const std::string& where, Json* message) {
  const auto it = message->find("content");
  if (it == message->end() || it->is_null() || it->is_string()) return true;
  if (!it->is_array()) {
    fields.fail(bad_request(where + ".content", where + ".content must be a string or a list"));
    return false;
  }
  std::string text;
  for (const Json& part : *it) {
    const bool is_text = part.is_object() && part.contains("type") && part["type"] == "text" &&
                         part.contains("text") && part["text"].is_string();
    if (!is_text) {
      fields.fail(bad_request(where + ".content",
                              where + ".content may only hold parts {\"type\": \"text\", \"text\": "
                                      "...}; this server reads text alone"));
      return false;
    }
    text += part["text"].get_ref<const std::string&>();
  }
  *it = text;
  return true;
}

// Clients send a call's arguments as text that holds JSON; templates walk over the object.
void open_arguments(Json* message) {
  const auto calls = message->find("tool_calls");
  if (calls == message->end() || !calls->is_array()) return;
  for (Json& call : *calls) {
    if (!call.is_object() || !call.contains("function") || !call["function"].is_object()) continue;
    Json& function = call["function"];
    const auto arguments = function.find("arguments");
    if (arguments == function.end() || !arguments->is_string()) continue;
    Json parsed;
    if (!parse_body(arguments->get_ref<const std::string&>(), &parsed)) *arguments = parsed;
  }
}

bool read_message(Fields& fields, std::size_t index, Json* message) {
  static constexpr std::array kRoles = {"system", "user", "assistant", "tool"};
  const std::string where = fmt::format("messages[{}]", index);
  if (!message->is_object()) {
    fields.fail(bad_request(where, where + " must be an object with a role and a content"));
    return false;
  }
  const auto role = message->find("role");
  if (role == message->end() || !role->is_string()) {
    fields.fail(bad_request(where + ".role", where + ".role must be a string"));
    return false;
  }
  if (*role == "developer") *role = "system";  // OpenAI's newer name of it
  if (std::find(kRoles.begin(), kRoles.end(), role->get_ref<const std::string&>()) ==
      kRoles.end()) {
    fields.fail(bad_request(where + ".role",
                            where + ".role must be system, developer, user, assistant or tool"));
    return false;
  }
  const bool has_content = message->contains("content") && !(*message)["content"].is_null();
  if (!has_content && !message->contains("tool_calls")) {
    fields.fail(bad_request(where + ".content", where + ".content is missing"));
    return false;
  }
  open_arguments(message);
  return flatten_content(fields, where, message);
}

void read_logprobs_of_chat(Fields& fields, SamplingParams* params) {
  bool wanted = false;
  std::int64_t top = 0;
  fields.read("logprobs", &wanted);
  fields.read("top_logprobs", &top, 0, kMaxTopLogprobs);
  if (top > 0 && !wanted) fields.fail("top_logprobs", "needs logprobs: true");
  params->logprobs = wanted ? static_cast<int>(top) : -1;
}

void read_prompts(Fields& fields, GenerationRequest* out) {
  const Json* value = fields.find("prompt");
  if (value == nullptr) return fields.fail("prompt", "is missing");
  if (value->is_string()) {
    out->prompts.emplace_back(value->get<std::string>());
    return;
  }
  if (!value->is_array() || value->empty()) {
    return fields.fail("prompt",
                       "must be a string, a list of strings, a list of token ids, or a list of "
                       "lists of token ids");
  }
  if (value->front().is_number()) {
    std::vector<std::int32_t> ids;
    if (auto error = read_token_ids(*value, "prompt", &ids)) return fields.fail(*error);
    out->prompts.emplace_back(std::move(ids));
    return;
  }
  if (value->size() > kMaxPrompts) {
    return fields.fail("prompt", fmt::format("holds {} prompts; at most {} are allowed",
                                             value->size(), kMaxPrompts));
  }
  for (std::size_t i = 0; i < value->size(); ++i) {
    const Json& item = (*value)[i];
    const std::string name = fmt::format("prompt[{}]", i);
    if (item.is_string()) {
      out->prompts.emplace_back(item.get<std::string>());
      continue;
    }
    std::vector<std::int32_t> ids;
    if (!item.is_array()) return fields.fail(name, "must be a string or a list of token ids");
    if (auto error = read_token_ids(item, name, &ids)) return fields.fail(*error);
    out->prompts.emplace_back(std::move(ids));
  }
}

}  // namespace

std::optional<ApiError> read_token_ids(const Json& value, const std::string& name,
                                       std::vector<std::int32_t>* out) {
  if (!value.is_array()) return bad_request(name, name + " must be a list of token ids");
  out->reserve(value.size());
  for (const Json& id : value) {
    const bool in_range = id.is_number_unsigned() &&
                          id.get<std::uint64_t>() <= std::numeric_limits<std::int32_t>::max();
    if (!in_range) {
      return bad_request(
          name, fmt::format("{} holds {} at place {}; token ids are whole numbers "
                            "from 0",
                            name, id.is_number() ? id.dump() : "something else", out->size()));
    }
    out->push_back(id.get<std::int32_t>());
  }
  return std::nullopt;
}

std::optional<ApiError> read_chat_prompt(const Json& body, ChatPrompt* out) {
  Fields fields(body);
  const Json* messages = fields.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->empty()) {
    return bad_request("messages", "messages must be a list of at least one message");
  }
  out->messages = *messages;
  std::size_t index = 0;
  for (Json& message : out->messages) {
    if (!read_message(fields, index++, &message)) return fields.error();
  }
  out->variables = Json::object();
  if (const Json* kwargs = fields.find("chat_template_kwargs")) {
    if (!kwargs->is_object()) {
      return bad_request("chat_template_kwargs", "chat_template_kwargs must be an object");
    }
    out->variables = *kwargs;
  }
  for (const char* name : {"tools", "documents"}) {
    const Json* list = fields.find(name);
    if (list == nullptr) continue;
    if (!list->is_array()) return bad_request(name, fmt::format("{} must be a list", name));
    for (const Json& item : *list) {
      if (!item.is_object()) return bad_request(name, fmt::format("{} must hold objects", name));
    }
    const Json* choice = fields.find("tool_choice");
    const bool hidden = std::string_view(name) == "tools" && choice != nullptr && *choice == "none";
    if (!list->empty() && !hidden) out->variables[name] = *list;
  }
  std::string effort;
  fields.read("reasoning_effort", &effort);
  if (!effort.empty()) out->variables["reasoning_effort"] = effort;
  fields.read("add_generation_prompt", &out->add_generation_prompt);
  return fields.error();
}

std::optional<ApiError> read_chat_request(const Json& body, const SamplingParams& defaults,
                                          GenerationRequest* out) {
  Fields fields(body);
  read_common(defaults, fields, out);
  read_logprobs_of_chat(fields, &out->params);
  std::int64_t max_tokens = 0;
  for (const char* name : {"max_tokens", "max_completion_tokens"}) {  // the newer name wins
    if (fields.find(name) == nullptr) continue;
    fields.read(name, &max_tokens, 1, kMaxTokens);
    out->max_tokens = max_tokens;
  }
  if (!fields.ok()) return fields.error();
  out->chat.emplace();
  if (auto error = read_chat_prompt(body, &*out->chat)) return error;
  return check(out);
}

std::optional<ApiError> read_completion_request(const Json& body, const SamplingParams& defaults,
                                                GenerationRequest* out) {
  Fields fields(body);
  read_common(defaults, fields, out);
  fields.read("echo", &out->echo);
  std::int64_t logprobs = -1;
  fields.read("logprobs", &logprobs, 0, kMaxTopLogprobs);
  out->params.logprobs = static_cast<int>(logprobs);
  std::int64_t max_tokens = 16;  // OpenAI's default
  fields.read("max_tokens", &max_tokens, out->echo ? 0 : 1, kMaxTokens);
  out->max_tokens = max_tokens;
  if (fields.ok()) read_prompts(fields, out);
  if (!fields.ok()) return fields.error();
  if (out->echo && logprobs >= 0) {
    return not_supported("echo",
                         "echo with logprobs would need those of the prompt, which are not "
                         "kept; ask for one of the two");
  }
  if (out->prompts.size() * static_cast<std::size_t>(out->n) > kMaxSequences) {
    return bad_request("n", fmt::format("{} prompts with {} answers each are more than the {} "
                                        "answers that one request may ask for",
                                        out->prompts.size(), out->n, kMaxSequences));
  }
  return check(out);
}

}  // namespace statepack::serve
