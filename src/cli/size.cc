// statepack size: memory of a model and schemes at a concurrency, and how many sequences fit.
#include <fmt/format.h>

#include <filesystem>

#include "base/safetensors.hpp"
#include "cli/command.hpp"
#include "eval/table.hpp"
#include "runtime/sizing.hpp"

namespace statepack::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string model;
  std::vector<std::string> states = {"fp32",   "bf16",        "int8",
                                     "pace:4", "leapquant:8", "stepquant:6"};
  std::vector<std::string> plans;
  std::vector<std::int64_t> concurrency = {1, 32, 256};
  std::int64_t context = 4096;
  std::string memory;
  bool list = false;
  bool json = false;
};

bool is_checkpoint(const std::string& path) {
  return std::filesystem::exists(std::filesystem::path(path) / "config.json");
}

// The checkpoint's own geometry; weights are counted from the tensors' sizes, none is read.
Result<ModelGeometry> checkpoint_geometry(const std::string& dir) {
  SP_ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::load(dir));
  SP_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(dir));
  std::int64_t n_bytes = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    n_bytes += static_cast<std::int64_t>(tensor.n_bytes);
  }
  return geometry(base_name(dir), config, n_bytes);
}

Result<std::shared_ptr<const CompiledScheme>> compile(const Options& options,
                                                      const ModelGeometry& model, bool is_folder,
                                                      const std::string& name, bool* nominal) {
  SP_ASSIGN_OR_RETURN(const Scheme scheme, Scheme::parse(name));
  *nominal = false;
  if (scheme.needs_plan()) {
    // A plan at hand gives the exact size; without one the nominal bits will do.
    if (is_folder || !options.plans.empty()) {
      SP_ASSIGN_OR_RETURN(const PlanLibrary library,
                          PlanLibrary::open(is_folder ? options.model : "", options.plans));
      Result<std::shared_ptr<const CompiledScheme>> compiled =
          library.compile(scheme, model.shapes, "");
      if (compiled.ok() || !options.plans.empty()) return compiled;
    }
    *nominal = true;
    SP_ASSIGN_OR_RETURN(const Plan plan, nominal_plan(scheme, model.shapes));
    return CompiledScheme::make(scheme, model.shapes, &plan, "");
  }
  return CompiledScheme::make(scheme, model.shapes, nullptr, "");
}

Result<int> list_models(bool json) {
  if (json) {
    Json list = Json::array();
    for (const ModelGeometry& m : public_models()) {
      list.push_back({{"name", m.name},
                      {"recurrent_layers", m.shapes.size()},
                      {"state_bytes_fp32", m.state_bytes_f32()},
                      {"conv_bytes_fp32", m.conv_floats * 4},
                      {"kv_bytes_per_token", m.kv_bytes_per_token},
                      {"weight_bytes", m.weight_bytes}});
    }
    print_json(list);
    return kExitOk;
  }
  Table table({"model", "recurrent layers", "state fp32", "conv fp32", "KV/token", "weights"});
  for (const ModelGeometry& m : public_models()) {
    table.add({m.name, fmt::format("{}", m.shapes.size()), format_bytes(m.state_bytes_f32()),
               format_bytes(m.conv_floats * 4), format_bytes(m.kv_bytes_per_token),
               format_bytes(m.weight_bytes)});
  }
  print(table.text());
  return kExitOk;
}

Result<int> size(const Options& options) {
  if (options.list) return list_models(options.json);
  if (options.model.empty()) {
    return Status(Code::kInvalidArgument,
                  "name a checkpoint folder or a known model; --list shows those");
  }
  const bool is_folder = is_checkpoint(options.model);
  SP_ASSIGN_OR_RETURN(const ModelGeometry model, is_folder ? checkpoint_geometry(options.model)
                                                           : find_public_model(options.model));
  std::int64_t memory = 0;
  if (!options.memory.empty()) {
    SP_ASSIGN_OR_RETURN(memory, parse_bytes(options.memory));
  }
  for (const std::int64_t n : options.concurrency) {
    if (n < 1 || n > (std::int64_t{1} << 30)) {
      return Status(Code::kInvalidArgument, fmt::format("a concurrency of {} is not possible", n));
    }
  }

  std::vector<std::string> header = {"scheme",    "payload bits", "resident bits",
                                     "state/seq", "x smaller",    "all/seq"};
  for (const std::int64_t n : options.concurrency) header.push_back(fmt::format("state x {}", n));
  if (memory > 0) header.push_back("sequences in " + options.memory);
  Table table(header);
  Json rows = Json::array();
  bool any_nominal = false;
  for (const std::string& name : options.states) {
    bool nominal = false;
    SP_ASSIGN_OR_RETURN(const auto scheme, compile(options, model, is_folder, name, &nominal));
    any_nominal |= nominal;
    const SchemeBits bits = scheme->bits();
    const SequenceMemory m = sequence_memory(model, *scheme, options.context);
    const std::int64_t state = m.pages + m.windows + m.cursors;
    const std::int64_t fit = sequences_that_fit(model, m, memory);
    const double ratio = static_cast<double>(model.state_bytes_f32()) / static_cast<double>(state);
    std::vector<std::string> row = {scheme->scheme().name() + (nominal ? " *" : ""),
                                    fmt::format("{:.2f}", bits.payload),
                                    fmt::format("{:.2f}", bits.resident),
                                    format_bytes(state),
                                    fmt::format("{:.2f}", ratio),
                                    format_bytes(m.total())};
    Json totals = Json::array();
    for (const std::int64_t n : options.concurrency) {
      row.push_back(format_bytes(n * state));
      totals.push_back({{"sequences", n},
                        {"state_bytes", n * state},
                        {"total_bytes", n * m.total() + model.weight_bytes}});
    }
    if (memory > 0) row.push_back(fmt::format("{}", fit));
    table.add(row);
    Json json{{"scheme", scheme->scheme().name()},
              {"nominal", nominal},
              {"payload_bits", bits.payload},
              {"resident_bits", bits.resident},
              {"page_bytes", m.pages},
              {"window_bytes", m.windows},
              {"cursor_bytes", m.cursors},
              {"conv_bytes", m.conv},
              {"kv_bytes", m.kv},
              {"ratio_to_fp32", ratio},
              {"concurrency", totals}};
    if (memory > 0) json["sequences_that_fit"] = fit;
    rows.push_back(std::move(json));
  }

  if (options.json) {
    Json document{{"model", model.name},
                  {"weight_bytes", model.weight_bytes},
                  {"state_bytes_fp32", model.state_bytes_f32()},
                  {"conv_bytes", model.conv_floats * 4},
                  {"kv_bytes_per_token", model.kv_bytes_per_token},
                  {"context", options.context},
                  {"schemes", rows}};
    if (memory > 0) document["memory_bytes"] = memory;
    print_json(document);
    return kExitOk;
  }
  print(fmt::format(
      "{}: weights {}, state {} in fp32, convolution {}, attention cache {} at {} tokens\n\n",
      model.name, format_bytes(model.weight_bytes), format_bytes(model.state_bytes_f32()),
      format_bytes(model.conv_floats * 4), format_bytes(model.kv_bytes_per_token * options.context),
      options.context));
  print(table.text());
  print("\nstate: pages, windows and cursors; all: with convolution and attention cache.\n");
  if (any_nominal) print("*: no plan at hand, counted at the nominal bits in every head.\n");
  return kExitOk;
}

}  // namespace

void add_size(CLI::App& app, Command* command) {
  CLI::App* sub = app.add_subcommand(
      "size", "Memory of a model and schemes, and how many sequences fit; loads no weights");
  const auto o = std::make_shared<Options>();
  sub->add_option("model", o->model, "Checkpoint folder, or a known model: \"qwen3.5-27b\"");
  sub->add_option("--state", o->states, "Schemes to compare: " + scheme_help())
      ->capture_default_str()
      ->type_name("SCHEME");
  sub->add_option("--plan", o->plans, "Plan file, for exact sizes")->type_name("FILE");
  sub->add_option("-c,--concurrency", o->concurrency, "Sequences at a time")
      ->delimiter(',')
      ->capture_default_str();
  sub->add_option("--context", o->context, "Tokens of a sequence, for the attention cache")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 32))
      ->capture_default_str();
  sub->add_option("--memory", o->memory,
                  "Memory to fill: how many sequences fit beside the weights");
  sub->add_flag("--list", o->list, "List the known models");
  add_json_option(*sub, &o->json);
  sub->footer(
      "Examples:\n"
      "  statepack size qwen3.5-27b --concurrency 64,256\n"
      "  statepack size models/statepack-gdn --state fp32 --state stepquant:6\n"
      "  statepack size qwen3-next --memory 80GiB --context 32768 --json");
  sub->callback([o, command] { *command = [o] { return size(*o); }; });
}

}  // namespace statepack::cli
