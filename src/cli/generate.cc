// statepack generate: one prompt, or a chat in the terminal.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <iostream>

#include "base/progress.hpp"
#include "cli/command.hpp"
#include "runtime/engine.hpp"
#include "runtime/prompt.hpp"
#include "runtime/sizing.hpp"

namespace statepack::cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct Options {
  ModelOptions model;
  std::string state = "fp32";
  std::string prompt;
  std::string system;
  bool raw = false;
  bool think = true;
  std::int64_t context = 0;
  SamplingParams sampling;
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Result<std::string> read_stdin() {
  std::string text(std::istreambuf_iterator<char>(std::cin), {});
  if (interrupted()) return Status(Code::kInterrupted, "stopped on request");
  if (text.empty()) {
    return Status(Code::kInvalidArgument,
                  "standard input held no prompt; pipe one in, or use -p TEXT");
  }
  return text;
}

// One model, one slot, one conversation.
class Conversation {
 public:
  static Result<Conversation> open(const Options& options) {
    Conversation c;
    c.options_ = options;
    SP_RETURN_IF_ERROR(options.sampling.validate());
    SP_RETURN_IF_ERROR(check_text("the system message", options.system));
    for (const std::string& stop : options.sampling.stop) {
      SP_RETURN_IF_ERROR(check_text("the stop text", stop));
    }
    SP_ASSIGN_OR_RETURN(Session session, open_session(options.model));
    c.session_ = std::make_unique<Session>(std::move(session));
    if (c.session_->chat_template == nullptr && !options.raw) {
      return Status(
          Code::kNotFound,
          options.model.model + ": has no chat template; pass --raw to continue plain text");
    }
    SP_ASSIGN_OR_RETURN(c.scheme_, c.session_->compile(options.state));
    PoolConfig pool;
    pool.n_slots = 1;
    pool.conv_floats = c.session_->model->config().conv_floats();
    SP_ASSIGN_OR_RETURN(c.pool_, StatePool::create(c.scheme_, pool));
    EngineConfig engine;
    engine.max_context = options.context;
    SP_ASSIGN_OR_RETURN(c.engine_,
                        Engine::create(*c.session_->model, *c.pool_, *c.session_->threads,
                                       c.session_->tokenizer.get(), engine));
    if (!options.system.empty()) c.add("system", options.system);
    return c;
  }

  /// Answers a user's turn, or continues plain text; streams the text unless JSON is wanted. A turn
  /// that is refused (kInvalidArgument) is forgotten: the conversation is as before.
  Result<Json> answer(const std::string& text) {
    const Json before = messages_;
    Result<Json> result = answer_turn(text);
    if (!result.ok()) messages_ = before;
    return result;
  }

  const CompiledScheme& scheme() const { return *scheme_; }

  void clear() {
    messages_ = Json::array();
    if (!options_.system.empty()) add("system", options_.system);
  }

 private:
  Result<Json> answer_turn(const std::string& text) {
    SP_RETURN_IF_ERROR(check_text("the prompt", text));
    std::vector<std::int32_t> prompt;
    if (options_.raw) {
      prompt = session_->tokenizer->encode(text, true);
    } else {
      add("user", text);
      SP_ASSIGN_OR_RETURN(prompt, encode_chat(*session_->tokenizer, *session_->chat_template,
                                              messages_, {{"enable_thinking", options_.think}}));
    }
    const bool stream = !options_.model.json;
    const auto n_prompt = std::ssize(prompt);
    std::string reply;
    Json logprobs = Json::array();
    FinishReason finish = FinishReason::kError;
    Status status;
    std::int64_t n_reply = 0;
    const Clock::time_point start = Clock::now();
    double first_s = 0;
    Request request;
    request.prompt = std::move(prompt);
    request.params = options_.sampling;
    SP_ASSIGN_OR_RETURN([[maybe_unused]] const RequestId id,
                        engine_->submit(std::move(request), [&](const TokenEvent& event) {
                          if (first_s == 0) first_s = seconds_since(start);
                          reply += event.text;
                          if (stream) print(event.text);
                          if (event.choice != nullptr && options_.sampling.logprobs >= 0) {
                            logprobs.push_back(choice_json(*event.choice));
                          }
                          n_reply = std::ssize(event.tokens);
                          if (!event.finish.has_value()) return;
                          finish = *event.finish;
                          status = event.status;
                        }));
    if (Status run = engine_->run(); !run.ok()) {
      if (stream) print("\n");
      return run;
    }
    SP_RETURN_IF_ERROR(status);
    const double total_s = seconds_since(start);
    if (!options_.raw) add("assistant", reply);
    const SchemeBits bits = scheme_->bits();
    Json result{
        {"model", session_->name},
        {"text", reply},
        {"finish_reason", finish_reason_name(finish)},
        {"usage",
         {{"prompt_tokens", n_prompt},
          {"completion_tokens", n_reply},
          {"total_tokens", n_prompt + n_reply}}},
        {"timings",
         {{"prompt_ms", 1e3 * first_s},
          {"predicted_ms", 1e3 * (total_s - first_s)},
          {"predicted_per_second",
           total_s > first_s ? static_cast<double>(n_reply - 1) / (total_s - first_s) : 0}}},
        {"state",
         {{"scheme", scheme_->scheme().name()},
          {"payload_bytes", bits.page_bytes},
          {"resident_bytes", bits.page_bytes + bits.window_bytes + bits.cursor_bytes},
          {"fp32_bytes", bits.n_values * 4},
          {"payload_bits", bits.payload},
          {"resident_bits", bits.resident}}}};
    if (options_.sampling.logprobs >= 0) result["logprobs"] = std::move(logprobs);
    return result;
  }

  void add(const std::string& role, const std::string& content) {
    messages_.push_back({{"role", role}, {"content", content}});
  }

  Json choice_json(const Choice& choice) const {
    const auto text = [&](std::int32_t token) {
      return std::string(session_->tokenizer->token_bytes(token));
    };
    Json top = Json::array();
    for (const TokenLogprob& t : choice.top) {
      top.push_back({{"id", t.token}, {"token", text(t.token)}, {"logprob", t.logprob}});
    }
    return {{"id", choice.token},
            {"token", text(choice.token)},
            {"logprob", choice.logprob},
            {"top_logprobs", top}};
  }

  Options options_;
  std::unique_ptr<Session> session_;
  std::shared_ptr<const CompiledScheme> scheme_;
  std::unique_ptr<StatePool> pool_;
  std::unique_ptr<Engine> engine_;
  Json messages_ = Json::array();
};

void report(const Json& result) {
  if (::isatty(STDERR_FILENO) != 1) return;
  const Json& state = result["state"];
  std::fprintf(stderr, "%s\n",
               fmt::format("[{} + {} tokens, {:.1f} token/s, state {} of {} in fp32]",
                           result["usage"]["prompt_tokens"].get<std::int64_t>(),
                           result["usage"]["completion_tokens"].get<std::int64_t>(),
                           result["timings"]["predicted_per_second"].get<double>(),
                           format_bytes(state["resident_bytes"].get<std::int64_t>()),
                           format_bytes(state["fp32_bytes"].get<std::int64_t>()))
                   .c_str());
}

Result<int> chat(Conversation& conversation, const Options& options) {
  const bool terminal = ::isatty(STDIN_FILENO) == 1 && !options.model.json;
  if (terminal) {
    print(fmt::format("state {}, {} a sequence. /clear starts again, /quit ends.\n",
                      conversation.scheme().scheme().name(),
                      format_bytes(conversation.scheme().bits().page_bytes)));
  }
  int exit_code = kExitOk;
  for (;;) {
    if (terminal) print("> ");
    std::string line;
    if (!std::getline(std::cin, line)) {
      if (terminal) print("\n");
      if (interrupted()) return Status(Code::kInterrupted, "stopped on request");
      return exit_code;
    }
    if (line.empty()) continue;
    if (line == "/quit" || line == "/exit") return exit_code;
    if (line == "/clear") {
      conversation.clear();
      continue;
    }
    if (line == "/help") {
      print("/clear forgets the conversation, /quit ends; anything else goes to the model\n");
      continue;
    }
    const Result<Json> answer = conversation.answer(line);
    if (!answer.ok() && answer.status().code() == Code::kInvalidArgument) {
      // A turn too long, say: the others need not be lost with it.
      std::fprintf(stderr, "statepack: %s\n", answer.status().message().c_str());
      exit_code = kExitWrong;
      continue;
    }
    SP_ASSIGN_OR_RETURN(const Json result, answer);
    if (options.model.json) {
      print(result.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
    } else {
      print("\n");
      report(result);
    }
  }
}

Result<int> generate(const Options& options, bool has_prompt) {
  SP_RETURN_IF_ERROR(check_text("the prompt", options.prompt));  // before weights load
  SP_ASSIGN_OR_RETURN(Conversation conversation, Conversation::open(options));
  if (!has_prompt) return chat(conversation, options);
  std::string prompt = options.prompt;
  if (prompt == "-") {
    SP_ASSIGN_OR_RETURN(prompt, read_stdin());
  }
  SP_ASSIGN_OR_RETURN(const Json result, conversation.answer(prompt));
  if (options.model.json) {
    print_json(result);
  } else {
    print("\n");
    report(result);
  }
  return kExitOk;
}

}  // namespace

void add_generate(CLI::App& app, Command* command) {
  CLI::App* sub = app.add_subcommand("generate", "Answer one prompt, or chat in the terminal");
  const auto o = std::make_shared<Options>();
  add_model_options(*sub, &o->model);
  sub->add_option("--state", o->state, "How the state is kept: " + scheme_help())
      ->capture_default_str()
      ->type_name("SCHEME");
  CLI::Option* prompt =
      sub->add_option("-p,--prompt", o->prompt,
                      "The prompt; '-' reads stdin. Without it: a chat, a turn a line (and with "
                      "--json a document a line)");
  sub->add_option("--system", o->system, "System message");
  sub->add_flag("--raw", o->raw, "Continue the text as it is, without the chat template");
  sub->add_flag("!--no-think", o->think, "Ask the template for a reply without reasoning");
  sub->add_option("--max-context", o->context, "Tokens of prompt and reply; 0: the model's limit")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30));
  SamplingParams& s = o->sampling;
  sub->add_option("-n,--max-tokens", s.max_tokens, "Longest reply")->capture_default_str();
  sub->add_option("-t,--temperature", s.temperature, "0 is greedy")->capture_default_str();
  sub->add_option("--top-k", s.top_k, "0 keeps all tokens")->capture_default_str();
  sub->add_option("--top-p", s.top_p, "Nucleus")->capture_default_str();
  sub->add_option("--min-p", s.min_p, "Share of the best token's probability")
      ->capture_default_str();
  sub->add_option("--repetition-penalty", s.repetition_penalty, "1 is off")->capture_default_str();
  sub->add_option("--presence-penalty", s.presence_penalty, "0 is off")->capture_default_str();
  sub->add_option("--frequency-penalty", s.frequency_penalty, "0 is off")->capture_default_str();
  sub->add_option("--seed", s.seed, "Seed of the draws")
      ->check(whole_number())
      ->capture_default_str();
  sub->add_option("--stop", s.stop, "End before this text; may be given again");
  sub->add_flag("--ignore-eos", s.ignore_eos, "Run to the longest reply");
  sub->add_option("--logprobs", s.logprobs, "With --json: log-probabilities of this many tokens");
  sub->footer(
      "Examples:\n"
      "  statepack generate -m models/statepack-gdn -p \"Compute 12 + 30.\" --state stepquant:6\n"
      "  statepack generate -m models/statepack-gdn          # chat\n"
      "  echo \"Once upon a time\" | statepack generate -m models/statepack-gdn --raw -p - -t 0.8");
  sub->callback([o, prompt, command] {
    *command = [o, prompt] { return generate(*o, prompt->count() > 0); };
  });
}

}  // namespace statepack::cli
