// statepack bench: how fast whole batches decode, by scheme.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/progress.hpp"
#include "cli/command.hpp"
#include "eval/table.hpp"
#include "runtime/decode_bench.hpp"
#include "runtime/sizing.hpp"

namespace statepack::cli {
namespace {

using Json = nlohmann::ordered_json;
using Schemes = std::vector<std::shared_ptr<const CompiledScheme>>;

struct Options {
  ModelOptions model;
  std::vector<std::string> states{std::begin(kBenchSchemes), std::end(kBenchSchemes)};
  std::vector<std::int64_t> batches{std::begin(kBenchBatches), std::end(kBenchBatches)};
  std::int64_t prompt = 16;
  std::int64_t steps = 64;
};

// Schemes take turns of this many steps, so that a disturbance of the machine meets all of them:
// the usual window is complete in one turn.
constexpr std::int64_t kTurn = 16;

/// A case in the format of Google Benchmark, so that its tools can compare two runs.
Json case_json(const std::string& name, const DecodeFigures& f, double speedup) {
  const double mean_us = static_cast<double>(f.total_ns) / 1e3 / static_cast<double>(f.n_steps);
  Json json{{"name", name},
            {"run_name", name},
            {"run_type", "iteration"},
            {"iterations", f.n_steps},
            {"real_time", mean_us},
            {"cpu_time", f.cpu_us},
            {"time_unit", "us"},
            {"items_per_second", f.tokens_per_s},
            {"p50_us", f.p50_us},
            {"p95_us", f.p95_us},
            {"speedup", speedup},
            {"payload_bytes", f.payload_bytes},
            {"resident_bytes", f.resident_bytes},
            {"pool_bytes", f.pool_bytes}};
  for (std::size_t p = 0; p < kNParts; ++p) {
    json["share_" + std::string(kPartNames[p])] = f.share(f.part_ns[p]);
  }
  json["share_sampling"] = f.share(f.other_ns);
  json["label"] = f.digest;
  return json;
}

/// Runs one batch size under every scheme in turns; `speedups` are medians over the turns of the
/// first scheme's time by the scheme's own.
Result<std::vector<DecodeFigures>> run_batch(const Session& session, const Schemes& schemes,
                                             const Options& options, std::int64_t n_sequences,
                                             std::vector<double>* speedups) {
  std::vector<std::unique_ptr<DecodeBench>> benches;
  for (const auto& scheme : schemes) {
    SP_ASSIGN_OR_RETURN(auto bench, DecodeBench::create(*session.model, scheme, *session.threads,
                                                        {n_sequences, options.prompt}));
    benches.push_back(std::move(bench));
  }
  for (std::int64_t done = 0; done < options.steps; done += kTurn) {
    for (const auto& bench : benches) {
      for (std::int64_t i = done; i < std::min(options.steps, done + kTurn); ++i) {
        if (interrupted()) return Status(Code::kInterrupted, "stopped on request");
        SP_RETURN_IF_ERROR(bench->step());
      }
    }
  }
  std::vector<DecodeFigures> figures;
  for (const auto& bench : benches) {
    std::vector<double> ratios;
    for (std::int64_t begin = 0; begin < options.steps; begin += kTurn) {
      const auto turn_ns = [&](const DecodeBench& b) {
        const auto first = b.step_ns().begin() + begin;
        const auto last = b.step_ns().begin() + std::min(options.steps, begin + kTurn);
        return static_cast<double>(std::accumulate(first, last, std::int64_t{0}));
      };
      ratios.push_back(turn_ns(*benches[0]) / turn_ns(*bench));
    }
    const auto middle = ratios.begin() + std::ssize(ratios) / 2;
    std::nth_element(ratios.begin(), middle, ratios.end());
    speedups->push_back(*middle);
    figures.push_back(bench->figures());
  }
  return figures;
}

Result<int> bench(const Options& options) {
  SP_ASSIGN_OR_RETURN(const Session session, open_session(options.model));
  std::vector<std::string> header = {"scheme", "sequences", "tokens/s",  "speed-up", "CPU ms",
                                     "p50 ms", "p95 ms",    "state/seq", "pool"};
  for (const std::string_view part : kPartNames) header.push_back(fmt::format("{} %", part));
  header.push_back("sampling %");
  Schemes schemes;  // all of them before the first batch: a misspelt one costs no run
  for (const std::string& state : options.states) {
    SP_ASSIGN_OR_RETURN(auto scheme, session.compile(state));
    schemes.push_back(std::move(scheme));
  }
  Table table(header);
  Json cases = Json::array();
  Status stopped;  // what ends the run early; finished batches are printed all the same
  for (const std::int64_t n : options.batches) {
    std::vector<double> speedups;
    const Result<std::vector<DecodeFigures>> figures =
        run_batch(session, schemes, options, n, &speedups);
    if (!figures.ok()) {
      stopped = figures.status();
      break;
    }
    for (std::size_t i = 0; i < figures->size(); ++i) {
      const DecodeFigures& f = (*figures)[i];
      cases.push_back(case_json(fmt::format("decode/{}/{}", options.states[i], n), f, speedups[i]));
      std::vector<std::string> row = {options.states[i],
                                      fmt::format("{}", n),
                                      fmt::format("{:.0f}", f.tokens_per_s),
                                      fmt::format("{:.2f}", speedups[i]),
                                      fmt::format("{:.2f}", f.cpu_us / 1e3),
                                      fmt::format("{:.2f}", f.p50_us / 1e3),
                                      fmt::format("{:.2f}", f.p95_us / 1e3),
                                      format_bytes(f.resident_bytes),
                                      format_bytes(f.pool_bytes)};
      for (const std::int64_t ns : f.part_ns) {
        row.push_back(fmt::format("{:.1f}", 100 * f.share(ns)));
      }
      row.push_back(fmt::format("{:.1f}", 100 * f.share(f.other_ns)));
      table.add(std::move(row));
    }
  }
  if (!stopped.ok() && cases.empty()) return stopped;
  if (options.model.json) {
    print_json({{"context",
                 {{"executable", "statepack bench"},
                  {"model", session.name},
                  {"num_cpus", session.threads->n_threads()},
                  {"prompt_tokens", options.prompt}}},
                {"benchmarks", cases}});
    return stopped.ok() ? Result<int>(kExitOk) : Result<int>(stopped);
  }
  print(table.text());
  print(fmt::format(
      "\n{} steps on {} threads after prompts of {} tokens. speed-up: the first scheme's time by "
      "this\none's, median over turns of {} steps; CPU: all threads, a step; p50, p95: from a "
      "sequence's token to\nits next.\n",
      options.steps, session.threads->n_threads(), options.prompt, kTurn));
  return stopped.ok() ? Result<int>(kExitOk) : Result<int>(stopped);
}

}  // namespace

void add_bench(CLI::App& app, Command* command) {
  CLI::App* sub = app.add_subcommand("bench", "Measure how fast full batches decode, by scheme");
  const auto o = std::make_shared<Options>();
  add_model_options(*sub, &o->model);
  sub->add_option("--state", o->states, "Schemes, the first to compare with: " + scheme_help())
      ->capture_default_str()
      ->type_name("SCHEME");
  const CLI::Range positive(std::int64_t{1}, std::int64_t{1} << 20);
  sub->add_option("-b,--batch", o->batches, "Sequences at a time")
      ->delimiter(',')
      ->check(positive)
      ->capture_default_str();
  sub->add_option("--prompt", o->prompt, "Tokens that every sequence has read before")
      ->check(positive)
      ->capture_default_str();
  sub->add_option("--steps", o->steps, "Tokens of every sequence that are timed")
      ->check(positive)
      ->capture_default_str();
  sub->footer(
      "Examples:\n"
      "  statepack bench -m models/statepack-gdn\n"
      "  statepack bench -m models/statepack-gdn --state fp32 stepquant:6 --batch 64,256 --json");
  sub->callback([o, command] { *command = [o] { return bench(*o); }; });
}

}  // namespace statepack::cli
