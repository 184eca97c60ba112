// statepack calibrate: model + text -> plan.
#include "calibrate/calibrate.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "cli/command.hpp"

namespace statepack::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  ModelOptions model;
  std::vector<std::string> texts;
  std::string scheme = "stepquant:6";
  std::string out;
  CalibrationOptions calibration;
};

Result<int> run(const Options& options) {
  SP_ASSIGN_OR_RETURN(const Scheme scheme, Scheme::parse(options.scheme));
  if (!scheme.needs_plan()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} needs no plan; use it as it is", scheme.name()));
  }
  if (std::error_code none; std::filesystem::exists(options.out, none) &&
                            !std::filesystem::is_empty(options.out, none) &&
                            !Plan::load(options.out).ok()) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("'{}' exists and is not a plan; name another file for -o", options.out));
  }
  SP_ASSIGN_OR_RETURN(const Session session, open_session(options.model));
  std::vector<CalibrationText> texts;
  for (const std::string& path : options.texts) {
    SP_ASSIGN_OR_RETURN(std::vector<std::int32_t> tokens, encode_text(session, path));
    texts.push_back({std::filesystem::path(path).filename().string(), std::move(tokens)});
  }
  Model& model = *session.model;
  CalibrationOptions calibration = options.calibration;
  calibration.progress = true;
  SP_ASSIGN_OR_RETURN(const Calibration result,
                      calibrate(scheme, model.config().recurrent_shapes(), model.fingerprint(),
                                texts, calibration, prefill_from_zero(model), *session.threads));
  SP_RETURN_IF_ERROR(result.plan.save(options.out));

  if (options.model.json) {
    Json layers = Json::array();
    for (const LayerSummary& l : result.layers) {
      layers.push_back({{"mean_bits", l.mean_bits},
                        {"half_life_min", l.half_life_min},
                        {"half_life_max", l.half_life_max},
                        {"omega_spread", l.omega_spread},
                        {"row_peak", l.row_peak},
                        {"column_peak", l.column_peak},
                        {"relative_error", l.relative_error}});
    }
    print_json({{"plan", options.out},
                {"scheme", result.plan.scheme},
                {"fingerprint", result.plan.fingerprint()},
                {"settings", result.plan.settings},
                {"layers", layers},
                {"prefill_seconds", result.prefill_s},
                {"distortion_seconds", result.distortion_s},
                {"passes", result.n_passes}});
    return kExitOk;
  }
  for (std::size_t i = 0; i < result.layers.size(); ++i) {
    print(fmt::format("layer {:>2}: {}\n", i, result.layers[i].text()));
  }
  print(fmt::format("{}: plan for {}, {:.16}; reading {:.1f} s in {} {}, trying codecs {:.1f} s\n",
                    options.out, result.plan.scheme, result.plan.fingerprint(), result.prefill_s,
                    result.n_passes, result.n_passes == 1 ? "pass" : "passes",
                    result.distortion_s));
  return kExitOk;
}

}  // namespace

void add_calibrate(CLI::App& app, Command* command) {
  CLI::App* sub = app.add_subcommand("calibrate", "Make the plan of a scheme from model and text");
  const auto o = std::make_shared<Options>();
  add_model_options(*sub, &o->model);
  sub->add_option("--text", o->texts,
                  "Plain text, or .jsonl with one conversation (messages) a line; one kind a file")
      ->required()
      ->type_name("FILE");
  sub->add_option("--scheme", o->scheme, "Scheme that needs a plan")->capture_default_str();
  sub->add_option("-o,--out", o->out, "Plan file to write")->required()->type_name("FILE");
  CalibrationOptions& c = o->calibration;
  sub->add_option("--segments", c.n_segments, "Segments, each from a zero state")
      ->capture_default_str();
  sub->add_option("--seq-len", c.segment_tokens, "Tokens of a segment")->capture_default_str();
  sub->add_option("--seed", c.seed, "Seed of the segments' places and the snapshots' choice")
      ->check(whole_number())
      ->capture_default_str();
  sub->add_option("--snapshots", c.n_snapshots, "States a layer that codecs are tried on")
      ->capture_default_str();
  sub->add_option("--gamma", c.gamma, "Exponent of row impact")->capture_default_str();
  sub->add_option("--horizon", c.horizon,
                  "Tokens over which an error is counted; -1: the published number")
      ->capture_default_str();
  sub->add_option("--pivots", c.n_pivots, "Units kept in half precision; -1: the published share")
      ->capture_default_str();
  sub->add_option("--combine", c.combine,
                  "How several texts become one cost (klt: max, others: mean)")
      ->transform(CLI::CheckedTransformer(std::map<std::string, CombineDomains>{
          {"mean", CombineDomains::kMean}, {"max", CombineDomains::kMax}}));
  sub->footer(
      "Example:\n"
      "  statepack calibrate -m models/statepack-gdn --text "
      "eval/data/wikitext2/wikitext2.valid.txt "
      "--scheme stepquant:6 -o stepquant-6.safetensors\n"
      "  statepack calibrate -m models/statepack-gdn --combine max --text "
      "eval/data/wikitext2/wikitext2.valid.txt "
      "eval/data/calibration/*.jsonl --scheme stepquant:4 -o stepquant-4.safetensors\n"
      "  statepack calibrate -m models/statepack-gdn --segments 12 --text "
      "eval/data/wikitext2/wikitext2.valid.txt "
      "eval/data/calibration/*.jsonl --scheme klt:3 -o klt-3.safetensors");
  sub->callback([o, command] { *command = [o] { return run(*o); }; });
}

}  // namespace statepack::cli
