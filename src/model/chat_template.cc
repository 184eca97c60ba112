#include "model/chat_template.hpp"

#include <utility>

#include <nlohmann/json.hpp>

#include "base/file.hpp"
#include "model/jinja/error.hpp"
#include "model/jinja/parser.hpp"
#include "model/jinja/render.hpp"
#include "model/outside_json.hpp"
#include "model/utf8.hpp"

namespace statepack {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxSourceBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxConfigBytes = std::size_t{64} << 20;
constexpr std::size_t kMaxOutBytes = std::size_t{64} << 20;
// A conversation of four thousand messages takes about a million units. Long texts add to the bound
// what handling each of their bytes sixteen times over takes.
constexpr std::uint64_t kBaseWork = 4'000'000;

std::uint64_t text_bytes(const jinja::Value& value) {
  std::uint64_t n = 1;
  if (const std::string* s = value.string()) n += s->size();
  if (const jinja::Sequence* s = value.sequence()) {
    for (const jinja::Value& item : s->items) n += text_bytes(item);
  }
  if (const jinja::Dict* d = value.dict()) {
    for (const auto& [key, item] : d->entries()) n += text_bytes(key) + text_bytes(item);
  }
  return n;
}

Status to_status(const jinja::TemplateError& error) {
  const std::string where =
      error.line > 0 ? "chat template, line " + std::to_string(error.line) : "chat template";
  return Status(error.code, where + ": " + error.message);
}

// A special token of tokenizer_config.json: text, or an object around it.
std::string token_text(const json& token) {
  if (token.is_string()) return token.get<std::string>();
  if (token.is_object() && token.contains("content") && token["content"].is_string()) {
    return token["content"].get<std::string>();
  }
  return {};
}

}  // namespace

struct ChatTemplate::Impl {
  jinja::Body body;
  std::vector<std::pair<std::string, std::string>> special_tokens;
};

ChatTemplate::ChatTemplate() : impl_(std::make_unique<Impl>()) {}
ChatTemplate::~ChatTemplate() = default;

Result<std::unique_ptr<ChatTemplate>> ChatTemplate::compile(std::string_view source) {
  if (source.size() > kMaxSourceBytes) {
    return Status(Code::kUnsupported, "chat template: " + std::to_string(source.size()) +
                                          " bytes; at most " + std::to_string(kMaxSourceBytes) +
                                          " are taken");
  }
  if (!is_valid_utf8(source)) return Status(Code::kCorrupt, "chat template: not valid UTF-8");
  std::unique_ptr<ChatTemplate> compiled(new ChatTemplate());
  try {
    compiled->impl_->body = jinja::parse(source);
  } catch (const jinja::TemplateError& error) {
    return to_status(error);
  }
  return compiled;
}

Result<std::unique_ptr<ChatTemplate>> ChatTemplate::load(const std::string& dir) {
  const std::string config_path = dir + "/tokenizer_config.json";
  const Result<std::string> config_text = read_text_file(config_path, kMaxConfigBytes);
  json config = json::object();
  if (config_text.ok()) {
    SP_ASSIGN_OR_RETURN(config, parse_outside_json<json>(*config_text, config_path));
    if (!config.is_object()) {
      return Status(Code::kCorrupt, config_path + ": the file is not a JSON object");
    }
  } else if (config_text.status().code() != Code::kNotFound) {
    return config_text.status();
  }

  const std::string jinja_path = dir + "/chat_template.jinja";
  Result<std::string> source = read_text_file(jinja_path, kMaxSourceBytes);
  std::string label = jinja_path;
  if (!source.ok()) {
    if (source.status().code() != Code::kNotFound) return source.status();
    label = config_path;
    const json found = config.value("chat_template", json());
    if (found.is_null()) {
      return Status(Code::kNotFound,
                    "'" + dir + "' has no chat template: neither chat_template.jinja nor the " +
                        "field 'chat_template' of tokenizer_config.json");
    }
    // Several named templates: the one called default.
    json chosen = found;
    if (found.is_array()) {
      for (const json& entry : found) {
        if (entry.is_object() && entry.value("name", json()) == "default") {
          chosen = entry.value("template", json());
        }
      }
    }
    if (!chosen.is_string()) {
      return Status(Code::kCorrupt, config_path +
                                        ": 'chat_template' is neither a string nor a "
                                        "list with a template named 'default'");
    }
    source = chosen.get<std::string>();
  }
  Result<std::unique_ptr<ChatTemplate>> compiled = compile(*source);
  if (!compiled.ok()) {
    return Status(compiled.status().code(), label + ": " + compiled.status().message());
  }
  for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                           "cls_token", "mask_token"}) {
    const std::string text = token_text(config.value(name, json()));
    if (!text.empty()) (*compiled)->impl_->special_tokens.emplace_back(name, text);
  }
  return compiled;
}

template <class Json>
Result<std::string> ChatTemplate::render_with(const Json& messages, bool add_generation_prompt,
                                              const Json& variables) const {
  if (!variables.is_object() && !variables.is_null()) {
    return Status(Code::kInvalidArgument, "chat template: the variables are not a JSON object");
  }
  try {
    using jinja::Value;
    std::vector<std::pair<std::string, Value>> names;  // later ones win
    names.emplace_back("tools", Value());
    names.emplace_back("documents", Value());
    for (const auto& [name, text] : impl_->special_tokens) names.emplace_back(name, text);
    for (const auto& [name, value] : variables.items()) {
      names.emplace_back(name, Value::from_json(value));
    }
    names.emplace_back("messages", Value::from_json(messages));
    names.emplace_back("add_generation_prompt", add_generation_prompt);
    jinja::Limits limits{.work = kBaseWork, .n_out_bytes = kMaxOutBytes};
    for (const auto& [name, value] : names) limits.work += text_bytes(value);
    return jinja::render(impl_->body, std::move(names), limits);
  } catch (const jinja::TemplateError& error) {
    return to_status(error);
  }
}

Result<std::string> ChatTemplate::render(const nlohmann::json& messages, bool add_generation_prompt,
                                         const nlohmann::json& variables) const {
  return render_with(messages, add_generation_prompt, variables);
}

Result<std::string> ChatTemplate::render(const nlohmann::ordered_json& messages,
                                         bool add_generation_prompt,
                                         const nlohmann::ordered_json& variables) const {
  return render_with(messages, add_generation_prompt, variables);
}

}  // namespace statepack
