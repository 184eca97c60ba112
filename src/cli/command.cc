#include "cli/command.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "base/file.hpp"
#include "codec/codec.hpp"
#include "model/utf8.hpp"
#include "runtime/prompt.hpp"
#include "statepack/scheme.hpp"

namespace statepack::cli {
namespace {

constexpr std::size_t kMaxTextFileBytes = std::size_t{1} << 30;

}  // namespace

void add_json_option(CLI::App& command, bool* json) {
  command.add_flag("--json", *json, "Print one JSON document on stdout");
}

void add_model_options(CLI::App& command, ModelOptions* options) {
  command.add_option("-m,--model", options->model, "Checkpoint folder")
      ->required()
      ->type_name("DIR");
  command
      .add_option("--plan", options->plans,
                  "Plan file; may be given again. Plans in DIR/plans are found by themselves")
      ->type_name("FILE");
  command.add_option("--threads", options->threads, "Threads; 0 takes the cores at hand")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  add_json_option(command, &options->json);
}

Result<std::shared_ptr<const CompiledScheme>> Session::compile(std::string_view scheme) const {
  SP_ASSIGN_OR_RETURN(const Scheme parsed, Scheme::parse(scheme));
  return plans.compile(parsed, model->config().recurrent_shapes(), model->fingerprint());
}

std::int64_t Session::n_vocab() const {
  return std::min<std::int64_t>(model->config().vocab, tokenizer->n_tokens());
}

Result<Session> open_session(const ModelOptions& options) {
  Session session;
  session.name = base_name(options.model);
  SP_ASSIGN_OR_RETURN(session.plans, PlanLibrary::open(options.model, options.plans));
  session.threads = std::make_unique<ThreadPool>(options.threads);
  SP_ASSIGN_OR_RETURN(session.model, Model::load(options.model, *session.threads));
  SP_ASSIGN_OR_RETURN(session.tokenizer, Tokenizer::load(options.model));
  Result<std::unique_ptr<ChatTemplate>> chat_template = ChatTemplate::load(options.model);
  if (chat_template.ok()) {
    session.chat_template = std::move(chat_template).value();
  } else if (chat_template.status().code() != Code::kNotFound) {
    return chat_template.status();
  }
  return session;
}

PrefillPass prefill_from_zero(Model& model) {
  const auto state = std::make_shared<DenseState>(model.new_dense_state());
  return [&model, state](std::span<const std::int32_t> tokens, ChunkObserver& observer) {
    std::fill(state->S.begin(), state->S.end(), 0.0F);
    std::fill(state->conv.begin(), state->conv.end(), 0.0F);
    const std::unique_ptr<KvCache> cache = model.new_kv_cache();
    return model.prefill(tokens, 0, *state, *cache, 0, nullptr, &observer);
  };
}

std::string scheme_help() {
  std::string text;
  for (const CodecInfo* codec : all_codecs()) {
    if (!text.empty()) text += ", ";
    text += codec->name;
    for (std::size_t i = 0; i < codec->args.size(); ++i) {
      text += i == 0 ? ':' : '|';
      text += codec->args[i];
    }
    if (codec->arg_rule.has_value()) text += fmt::format(" ({})", codec->arg_rule->words);
  }
  return text;
}

CLI::Validator whole_number() {
  return {[](std::string& text) -> std::string {
            std::uint64_t value = 0;
            const char* end = text.data() + text.size();
            const auto [at, error] = std::from_chars(text.data(), end, value);
            if (error == std::errc() && at == end) return "";
            return "'" + text + "' is not a whole number from 0 to 18446744073709551615";
          },
          "UINT"};
}

Status check_text(std::string_view what, std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Utf8Step step = decode_utf8(text.substr(at));
    if (!step.valid) {
      return {
          Code::kInvalidArgument,
          fmt::format("{} is not UTF-8 text: byte {} (0x{:02x}) does not belong there; convert it, "
                      "with iconv say",
                      what, at, static_cast<unsigned char>(text[at]))};
    }
    at += step.n_bytes;
  }
  return {};
}

Result<std::vector<std::int32_t>> encode_text(const Session& session, const std::string& path) {
  SP_ASSIGN_OR_RETURN(const std::string content, read_text_file(path, kMaxTextFileBytes));
  SP_RETURN_IF_ERROR(check_text(path, content));
  if (!path.ends_with(".jsonl")) return session.tokenizer->encode(content, false);
  if (session.chat_template == nullptr) {
    return Status(Code::kInvalidArgument,
                  path +
                      ": holds conversations, but the checkpoint has no chat template; give "
                      "plain text instead");
  }
  Result<std::vector<std::int32_t>> tokens =
      encode_conversations(*session.tokenizer, *session.chat_template, content);
  if (tokens.ok()) return tokens;
  return Status(tokens.status().code(), path + ": " + tokens.status().message());
}

std::string base_name(const std::string& path) {
  std::filesystem::path p(path);
  if (!p.has_filename()) p = p.parent_path();
  return p.filename().string();
}

Colours colours() {
  if (::isatty(STDOUT_FILENO) != 1 || std::getenv("NO_COLOR") != nullptr) return {};
  return {"\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"};
}

void print(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void print_json(const nlohmann::ordered_json& json) {
  // Text of models may hold bytes that are no UTF-8: they print as U+FFFD.
  print(json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

}  // namespace statepack::cli
