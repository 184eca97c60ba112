// statepack version
#include "cli/command.hpp"

namespace statepack::cli {

void add_version(CLI::App& app, Command* command) {
  CLI::App* sub = app.add_subcommand("version", "Print the version and what this build can do");
  const auto json = std::make_shared<bool>(false);
  add_json_option(*sub, json.get());
  sub->footer("Example:\n  statepack version --json");
  sub->callback([json, command] {
    *command = [json]() -> Result<int> {
      if (*json) {
        print_json({{"version", SP_VERSION}, {"schemes", scheme_help()}, {"devices", {"cpu"}}});
      } else {
        print(std::string("statepack ") + SP_VERSION + "\nschemes: " + scheme_help() +
              "\ndevices: cpu\n");
      }
      return kExitOk;
    };
  });
}

}  // namespace statepack::cli
