// statepack serve: the OpenAI-compatible server.
#include "serve/server.hpp"

#include <fmt/format.h>
#include <spdlog/async.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <toml++/toml.h>

#include <algorithm>

#include "base/file.hpp"
#include "cli/command.hpp"
#include "runtime/sizing.hpp"

namespace statepack::cli {
namespace {

struct Options {
  serve::ServerOptions server;
  std::string pool_bytes, kv_bytes, prefix_bytes = "1GiB", prefix_state_bytes, max_body = "8MiB";
  std::string prefix_mode = std::string(prefix_mode_name(PrefixMode::kTurns));
  std::string conv_format;
  std::string config;
  std::string log_level = "info";
  double request_timeout_s = 600, header_timeout_s = 10, body_timeout_s = 60, idle_timeout_s = 60;
  double write_timeout_s = 20, ping_interval_s = 15, grace_s = 30;
};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

// Values of a TOML table become those of the options of the same names that were given neither on
// the command line nor in the environment.
Status read_config(const std::string& path, CLI::App& sub) {
  SP_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, std::size_t{1} << 20));
  toml::table table;
  try {
    table = toml::parse(text);
  } catch (const toml::parse_error& error) {
    return {Code::kCorrupt,
            fmt::format("{}: line {}: {}", path, error.source().begin.line, error.description())};
  }
  for (auto&& [key, node] : table) {
    const std::string name(key.str());
    CLI::Option* option = name == "config" ? nullptr : sub.get_option_no_throw("--" + name);
    if (option == nullptr) {
      return {Code::kInvalidArgument,
              fmt::format("{}: line {}: there is no option '{}'; `statepack serve --help` lists "
                          "them, and the file names them without '--'",
                          path, node.source().begin.line, name)};
    }
    if (option->count() > 0) continue;
    std::vector<std::string> values;
    const auto add = [&](const toml::node& value) {
      if (const auto word = value.value_exact<std::string>()) {
        values.push_back(*word);
      } else if (const auto whole = value.value_exact<std::int64_t>()) {
        values.push_back(fmt::format("{}", *whole));
      } else if (const auto number = value.value_exact<double>()) {
        values.push_back(fmt::format("{}", *number));
      } else if (const auto flag = value.value_exact<bool>()) {
        values.push_back(*flag ? "true" : "false");
      } else {
        return false;
      }
      return true;
    };
    bool known = true;
    if (const toml::array* list = node.as_array()) {
      for (const toml::node& item : *list) known = known && add(item);
    } else {
      known = add(node);
    }
    if (!known) {
      return {Code::kInvalidArgument,
              fmt::format("{}: line {}: '{}' must be a text, a number, true, false or a list of "
                          "those",
                          path, node.source().begin.line, name)};
    }
    try {
      option->add_result(values);
      option->run_callback();
    } catch (const CLI::Error& error) {
      return {Code::kInvalidArgument,
              fmt::format("{}: line {}: {}", path, node.source().begin.line, error.what())};
    }
  }
  return {};
}

// --conv-state-dtype beside a scheme that may say the same.
Status set_conv(const std::string& format, std::string* state) {
  SP_ASSIGN_OR_RETURN(Scheme scheme, Scheme::parse(*state));
  const ConvFormat wanted = format == "bf16" ? ConvFormat::kBf16 : ConvFormat::kF32;
  if (scheme.conv != wanted && state->find(",conv=") != std::string::npos) {
    return {Code::kInvalidArgument,
            fmt::format("--conv-state-dtype {} says otherwise than --state {}; give one of them",
                        format, *state)};
  }
  scheme.conv = wanted;
  *state = scheme.name();
  return {};
}

// A log that never makes the server wait: when stderr is stuck, the oldest lines are lost.
void open_log(const std::string& level) {
  spdlog::init_thread_pool(8192, 1);
  auto sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  auto logger =
      std::make_shared<spdlog::async_logger>("statepack", std::move(sink), spdlog::thread_pool(),
                                             spdlog::async_overflow_policy::overrun_oldest);
  logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %^%l%$ %v");
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

// Every connection is a file: take as many as the system grants.
void raise_file_limit(std::int64_t wanted) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const auto files = static_cast<rlim_t>(wanted);
  if (limit.rlim_cur >= files) return;
  limit.rlim_cur = std::min(files, limit.rlim_max);
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < files) {
    spdlog::warn(
        "only {} files may be open: fewer connections fit than --max-connections says; "
        "raise `ulimit -n`",
        limit.rlim_cur);
  }
}

// The server is gone when this returns: its end is logged, too.
Status run(const serve::ServerOptions& options) {
  SP_ASSIGN_OR_RETURN(const std::unique_ptr<serve::Server> server, serve::Server::create(options));
  return server->run();
}

Result<int> serve_until_stopped(Options& o, CLI::App& sub) {
  if (!o.config.empty()) SP_RETURN_IF_ERROR(read_config(o.config, sub));
  serve::ServerOptions& server = o.server;
  if (server.backend.model.empty()) {
    return Status(Code::kInvalidArgument, "serve needs a checkpoint folder: --model DIR");
  }
  const auto size = [](const std::string& text, auto* out) -> Status {
    if (text.empty()) return {};
    SP_ASSIGN_OR_RETURN(const std::int64_t n, parse_bytes(text));
    *out = static_cast<std::remove_pointer_t<decltype(out)>>(n);
    return {};
  };
  SP_RETURN_IF_ERROR(size(o.pool_bytes, &server.backend.pool_bytes));
  SP_RETURN_IF_ERROR(size(o.kv_bytes, &server.backend.kv_bytes));
  SP_RETURN_IF_ERROR(size(o.prefix_bytes, &server.backend.prefix_cache.max_bytes));
  SP_RETURN_IF_ERROR(size(o.prefix_state_bytes, &server.backend.prefix_cache.max_state_bytes));
  SP_RETURN_IF_ERROR(size(o.max_body, &server.limits.max_body_bytes));
  SP_ASSIGN_OR_RETURN(server.backend.prefix_cache.mode, parse_prefix_mode(o.prefix_mode));
  if (!o.conv_format.empty()) SP_RETURN_IF_ERROR(set_conv(o.conv_format, &server.backend.state));
  server.request_timeout = milliseconds(o.request_timeout_s);
  server.ping_interval = milliseconds(o.ping_interval_s);
  server.grace = milliseconds(o.grace_s);
  server.limits.header_timeout = milliseconds(o.header_timeout_s);
  server.limits.body_timeout = milliseconds(o.body_timeout_s);
  server.limits.idle_timeout = milliseconds(o.idle_timeout_s);
  server.limits.write_timeout = milliseconds(o.write_timeout_s);
  server.handle_signals = true;
  server.version = SP_VERSION;

  open_log(o.log_level);
  raise_file_limit(server.limits.max_connections + 64);
  const Status status = run(server);
  if (status.ok()) spdlog::info("stopped");
  spdlog::shutdown();
  SP_RETURN_IF_ERROR(status);
  return kExitOk;
}

void add_backend_options(CLI::App& sub, Options& o) {
  serve::BackendOptions& b = o.server.backend;
  sub.add_option("-m,--model,--model-path", b.model, "Checkpoint folder")->type_name("DIR");
  sub.add_option("--state,--state-dtype", b.state, "How the state is kept: " + scheme_help())
      ->capture_default_str()
      ->type_name("SCHEME");
  sub.add_option("--plan,--state-plan", b.plans,
                 "Plan file; may be given again. Plans in DIR/plans are found by themselves")
      ->type_name("FILE");
  sub.add_option("--threads", b.threads, "Threads; 0 takes the cores at hand")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  sub.add_option("--state-pool-slots,--max-mamba-cache-size", b.pool_slots,
                 "Slots of the state pool; 0: as many as --max-num-seqs")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 24));
  sub.add_option("--state-pool-bytes", o.pool_bytes, "Memory of the state pool: 2GiB, say")
      ->type_name("SIZE");
  sub.add_option("--conv-state-dtype", o.conv_format,
                 "Of the short convolutions' history: f32, or bf16 in half the memory; the same as "
                 "conv= in --state")
      ->check(CLI::IsMember({"f32", "bf16"}));
  sub.add_option("--max-num-seqs,--parallel,--max-running-requests", b.max_seqs,
                 "Sequences decoded together; 0: the slots, at most 256, or 64 (-np, too)")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 20));
  sub.add_option("-c,--max-model-len,--ctx-size,--context-length", b.max_context,
                 "Tokens of prompt and reply; 0: the model's limit")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30));
  sub.add_option("--kv-cache-bytes", o.kv_bytes,
                 "Memory of the attention layers' caches, all sequences (4GiB); 0: no limit")
      ->type_name("SIZE");
  sub.add_option("--max-queue", b.max_queue, "Waiting requests; more get 429. 0: no limit")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30))
      ->capture_default_str();
  sub.add_option("--prefix-cache", o.prefix_mode,
                 "Reuse of prompts read before: off, blocks, turns")
      ->capture_default_str();
  sub.add_option("--prefix-cache-bytes", o.prefix_bytes, "Memory of the prefix cache")
      ->capture_default_str()
      ->type_name("SIZE");
  sub.add_option(
         "--prefix-cache-state-bytes", o.prefix_state_bytes,
         "Of them, memory of states; the rest is of attention rows. None: no bound of its own")
      ->type_name("SIZE");
  sub.add_option("--prefix-cache-block", b.prefix_cache.block_tokens,
                 "Tokens between two places of a prompt where it can be resumed")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->capture_default_str();
  sub.add_option("--prefix-cache-path", b.prefix_folder,
                 "Folder that keeps the prefix cache from run to run")
      ->type_name("DIR");
}

void add_http_options(CLI::App& sub, Options& o) {
  serve::ServerOptions& s = o.server;
  sub.add_option("--host", s.host, "Address to listen on; 0.0.0.0 for all")->capture_default_str();
  sub.add_option("--port", s.port, "Port; 0 takes a free one")->capture_default_str();
  sub.add_option("--served-model-name,--alias", s.model_names,
                 "Name of the model in requests; may be given again. None: the folder's");
  sub.add_option("--api-key", s.api_keys,
                 "Key that requests must bring (other users of this machine can see it here)");
  sub.add_option("--api-key-file", s.api_key_file, "File of keys, one a line")->type_name("FILE");
  sub.add_option("--cors-origin", s.cors_origins,
                 "Origin whose web pages may call the server; '*' for all");
  sub.add_option("--slot-save-path", s.slot_save_folder,
                 "Folder for POST /slots/{id}?action=save and restore")
      ->type_name("DIR");
  const auto seconds = [&](const char* name, double* value, const char* help) {
    sub.add_option(name, *value, help)
        ->check(CLI::Range(0.0, 1e6))
        ->capture_default_str()
        ->type_name("SECONDS");
  };
  seconds("--request-timeout", &o.request_timeout_s,
          "From the request to its last token; 0: no limit");
  seconds("--header-timeout", &o.header_timeout_s,
          "For the head of a request to arrive; 0: no limit");
  seconds("--body-timeout", &o.body_timeout_s, "For its body to arrive; 0: no limit");
  seconds("--idle-timeout", &o.idle_timeout_s, "Of a connection without a request; 0: no limit");
  seconds("--write-timeout", &o.write_timeout_s, "Without a byte taken by the client; 0: no limit");
  seconds("--ping-interval", &o.ping_interval_s,
          "Between comments on a stream that has no news; 0: none");
  seconds("--grace", &o.grace_s, "For running requests, after SIGINT or SIGTERM");
  sub.add_option("--max-connections", s.limits.max_connections, "Connections; more get 503")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20))
      ->capture_default_str();
  sub.add_option("--max-body-bytes", o.max_body, "Of one request")
      ->capture_default_str()
      ->type_name("SIZE");
  sub.add_option("--max-header-bytes", s.limits.max_header_bytes, "Of one request's head")
      ->check(CLI::Range(std::size_t{1024}, std::size_t{1} << 20))
      ->capture_default_str();
  sub.add_option("--max-unsent-bytes", s.limits.max_unsent_bytes,
                 "Of a stream, waiting for its client; more, and the client counts as gone")
      ->check(CLI::Range(std::size_t{1024}, std::size_t{1} << 30))
      ->capture_default_str();
  sub.add_option("--log-level", o.log_level, "debug, info, warn, error or off")
      ->check(CLI::IsMember({"debug", "info", "warn", "error", "off"}))
      ->capture_default_str();
}

// STATEPACK_MAX_NUM_SEQS for --max-num-seqs, and so on.
void name_environment(CLI::App& sub) {
  for (CLI::Option* option : sub.get_options()) {
    if (option->get_lnames().empty() || option->get_lnames().front() == "help") continue;
    std::string name = "STATEPACK_" + option->get_lnames().front();
    std::transform(name.begin(), name.end(), name.begin(), [](char c) {
      return c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    });
    option->envname(name);
  }
}

}  // namespace

void add_serve(CLI::App& app, Command* command) {
  CLI::App* sub = app.add_subcommand("serve", "Answer requests over HTTP, as OpenAI's API does");
  const auto o = std::make_shared<Options>();
  add_backend_options(*sub, *o);
  add_http_options(*sub, *o);
  sub->add_option("--config", o->config,
                  "TOML file of options by their names here; the command line and the environment "
                  "come first")
      ->type_name("FILE");
  name_environment(*sub);
  sub->footer(
      "Every option can be set in the environment, too: STATEPACK_MAX_NUM_SEQS for "
      "--max-num-seqs.\n"
      "Examples:\n"
      "  statepack serve -m models/statepack-gdn --state stepquant:6 --max-num-seqs 256\n"
      "  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\\n"
      "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Compute 12 + 30.\"}]}'");
  sub->callback(
      [o, sub, command] { *command = [o, sub] { return serve_until_stopped(*o, *sub); }; });
}

}  // namespace statepack::cli
