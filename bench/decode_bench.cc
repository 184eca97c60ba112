// Whole decode of a model: one Google Benchmark case for each scheme and number of sequences.
//
//   decode_bench [--benchmark_...] [MODEL [SCHEME...]]
//
// An iteration decodes one token of every sequence. Counters: p50_us and p95_us from a sequence's
// token to its next, bytes of a sequence's state and of the pool, and the share of every part of
// the model. The label is a digest of the replies: two runs that differ in it did not do the same
// work. To compare schemes on a machine that is not quiet, `statepack bench` takes turns.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "runtime/decode_bench.hpp"
#include "runtime/plan_library.hpp"
#include "statepack/scheme.hpp"

namespace {

using namespace statepack;

void decode(benchmark::State& state, Model& model, ThreadPool& threads,
            const std::shared_ptr<const CompiledScheme>& scheme, std::int64_t n_sequences) {
  DecodeBenchConfig config;
  config.n_sequences = n_sequences;
  const auto bench = DecodeBench::create(model, scheme, threads, config);
  if (!bench.ok()) return state.SkipWithError(bench.status().message().c_str());
  for ([[maybe_unused]] auto _ : state) {
    if (const Status status = (*bench)->step(); !status.ok()) {
      return state.SkipWithError(status.message().c_str());
    }
    state.SetIterationTime(1e-9 * static_cast<double>((*bench)->step_ns().back()));
  }
  const DecodeFigures f = (*bench)->figures();
  state.SetItemsProcessed(state.iterations() * n_sequences);
  state.SetLabel(f.digest);
  auto& counters = state.counters;
  counters["p50_us"] = f.p50_us;
  counters["p95_us"] = f.p95_us;
  counters["payload_bytes"] = static_cast<double>(f.payload_bytes);
  counters["resident_bytes"] = static_cast<double>(f.resident_bytes);
  counters["pool_bytes"] = static_cast<double>(f.pool_bytes);
  for (std::size_t p = 0; p < kNParts; ++p) {
    counters["share_" + std::string(kPartNames[p])] = f.share(f.part_ns[p]);
  }
  counters["share_sampling"] = f.share(f.other_ns);
}

Status register_all(Model& model, ThreadPool& threads, const std::string& dir,
                    const std::vector<std::string>& schemes) {
  SP_ASSIGN_OR_RETURN(const PlanLibrary plans, PlanLibrary::open(dir, {}));
  for (const std::string& name : schemes) {
    SP_ASSIGN_OR_RETURN(const Scheme scheme, Scheme::parse(name));
    SP_ASSIGN_OR_RETURN(
        const auto compiled,
        plans.compile(scheme, model.config().recurrent_shapes(), model.fingerprint()));
    for (const std::int64_t n : kBenchBatches) {
      const std::string label = "decode/" + name + "/" + std::to_string(n);
      benchmark::RegisterBenchmark(label.c_str(),
                                   [&model, &threads, compiled, n](benchmark::State& state) {
                                     decode(state, model, threads, compiled, n);
                                   })
          ->Iterations(64)
          ->UseManualTime()
          ->MeasureProcessCPUTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const std::string dir = argc > 1 ? argv[1] : SP_SOURCE_DIR "/models/statepack-gdn";
  std::vector<std::string> schemes(argv + std::min(argc, 2), argv + argc);
  if (schemes.empty()) schemes.assign(std::begin(kBenchSchemes), std::end(kBenchSchemes));
  ThreadPool threads;
  const auto model = Model::load(dir, threads);
  const Status status = model.ok() ? register_all(**model, threads, dir, schemes) : model.status();
  if (!status.ok()) {
    std::fprintf(stderr, "decode_bench: %s\n", status.message().c_str());
    return 2;
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
