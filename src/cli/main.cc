// The program: command line to command, Status to message and exit code.
#include <algorithm>
#include <cstdio>

#include "base/progress.hpp"
#include "cli/command.hpp"

namespace {

int run(int argc, char** argv) {
  using namespace statepack;
  using namespace std::string_literals;
  CLI::App app("Linear-attention language models with their recurrent state in a few bits.",
               "statepack");
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  statepack generate --model models/statepack-gdn --state stepquant:6 --prompt \"Compute 12 "
      "+ "
      "30.\"\n"
      "  statepack size qwen3.5-27b --state stepquant:6 --concurrency 256\n"
      "  statepack COMMAND --help");
  app.set_version_flag("--version", std::string("statepack ") + SP_VERSION);

  cli::Command command;
  cli::add_generate(app, &command);
  cli::add_serve(app, &command);
  cli::add_calibrate(app, &command);
  cli::add_eval(app, &command);
  cli::add_inspect(app, &command);
  cli::add_size(app, &command);
  cli::add_bench(app, &command);
  cli::add_version(app, &command);
  try {
    // llama-server's name of an option; a short name of ours has one letter.
    std::vector<std::string> args(argv + 1, argv + argc);
    if (!args.empty() && args[0] == "serve")
      std::replace(args.begin(), args.end(), "-np"s, "--parallel"s);
    std::reverse(args.begin(), args.end());  // as CLI11 takes them
    app.parse(args);
  } catch (const CLI::Success& help) {  // --help, --version
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    // CLI11 calls a misspelt command a missing one.
    const std::string first = argc > 1 ? argv[1] : "-";
    const bool misspelt =
        first[0] != '-' &&
        app.get_subcommands([&](const CLI::App* a) { return a->get_name() == first; }).empty();
    std::fprintf(stderr, "statepack: %s\nTry `statepack --help` or `statepack COMMAND --help`.\n",
                 misspelt ? ("there is no command '" + first + "'").c_str() : error.what());
    return cli::kExitWrong;
  }

  install_interrupt_handler();
  const Result<int> exit_code = command();
  if (exit_code.ok()) return *exit_code;
  std::fprintf(stderr, "statepack: %s\n", exit_code.status().message().c_str());
  return exit_code.status().code() == Code::kInterrupted ? cli::kExitInterrupted : cli::kExitWrong;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int exit_code = run(argc, argv);
    // A full disk or a closed pipe behind stdout is an error like any other.
    if ((std::fflush(stdout) != 0 || std::ferror(stdout) != 0) && exit_code == 0) {
      std::fprintf(stderr, "statepack: the output could not be written; free the disk or pipe\n");
      return statepack::cli::kExitWrong;
    }
    return exit_code;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "statepack: out of memory\n");
    return statepack::cli::kExitWrong;
  }
}
