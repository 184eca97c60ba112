// What the commands share: options, what they load, and how they speak.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.hpp"
#include "calibrate/calibrate.hpp"
#include "model/chat_template.hpp"
#include "model/model.hpp"
#include "model/tokenizer.hpp"
#include "runtime/plan_library.hpp"
#include "statepack/status.hpp"

namespace statepack::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitGateFailed = 1;
inline constexpr int kExitWrong =
    2;  ///< wrong use, bad input, a file that cannot be read or written
inline constexpr int kExitInterrupted = 130;

/// The body of a command: its exit code, or what went wrong.
using Command = std::function<Result<int>()>;

/// Each adds one subcommand, and sets `*command` when the user calls it.
void add_bench(CLI::App& app, Command* command);
void add_generate(CLI::App& app, Command* command);
void add_calibrate(CLI::App& app, Command* command);
void add_eval(CLI::App& app, Command* command);
void add_inspect(CLI::App& app, Command* command);
void add_serve(CLI::App& app, Command* command);
void add_size(CLI::App& app, Command* command);
void add_version(CLI::App& app, Command* command);

/// Options of every command that runs a model.
struct ModelOptions {
  std::string model;
  std::vector<std::string> plans;
  int threads = 0;
  bool json = false;
};
void add_model_options(CLI::App& command, ModelOptions* options);
void add_json_option(CLI::App& command, bool* json);

/// A checkpoint and what belongs to it.
struct Session {
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<Model> model;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat_template;  ///< null when the checkpoint has none
  PlanLibrary plans;
  std::string name;  ///< the folder's name

  /// Parses and compiles a scheme for this model.
  Result<std::shared_ptr<const CompiledScheme>> compile(std::string_view scheme) const;
  /// Real tokens: logits from here on are padding.
  std::int64_t n_vocab() const;
};
/// Sizes are refused before weights load. Errors: as the loaders.
Result<Session> open_session(const ModelOptions& options);

/// Prefill of the model from a zero state, for what looks at states on the way.
PrefillPass prefill_from_zero(Model& model);

/// "fp32", "int4,..." : the schemes' names for help texts.
std::string scheme_help();

/// Check of an option that counts from 0 in 64 bits: "-1" does not wrap around.
CLI::Validator whole_number();
/// Refuses text that no tokenizer has a meaning for. Errors: kInvalidArgument with `what` and the
/// byte where UTF-8 breaks.
Status check_text(std::string_view what, std::string_view text);
/// The tokens of a file: of its text, or where it ends in .jsonl of its conversations (one JSON
/// object with `messages` a line) through the chat template. Errors: as read_text_file() and
/// check_text(), kInvalidArgument (no chat template, no conversations).
Result<std::vector<std::int32_t>> encode_text(const Session& session, const std::string& path);

/// Folder or file name without its path.
std::string base_name(const std::string& path);
/// ANSI colours, empty unless stdout is a terminal and NO_COLOR is not set.
struct Colours {
  std::string_view bold, good, bad, dim, off;
};
Colours colours();

void print(std::string_view text);                    ///< to stdout
void print_json(const nlohmann::ordered_json& json);  ///< one document, then a line end

}  // namespace statepack::cli
