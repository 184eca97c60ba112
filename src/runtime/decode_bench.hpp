// How fast a model decodes a full batch of sequences: the engine's own path, timed step by step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/engine.hpp"

namespace statepack {

struct DecodeBenchConfig {
  std::int64_t n_sequences = 1;
  std::int64_t n_prompt = 16;  ///< tokens that every sequence has read before the first step
};

/// What the programs run unless told otherwise.
inline constexpr const char* kBenchSchemes[] = {"fp32", "pace:4", "leapquant:8"};
inline constexpr std::int64_t kBenchBatches[] = {1, 8, 64, 256, 1024};

/// Figures of one scheme and batch.
struct DecodeFigures {
  std::int64_t n_steps = 0;
  std::int64_t total_ns = 0;        ///< wall time of all steps
  double tokens_per_s = 0;          ///< of all sequences together
  double cpu_us = 0;                ///< of a step, all threads: disturbed less by other programs
  double p50_us = 0, p95_us = 0;    ///< from one token of a sequence to its next
  PartTimes part_ns{};              ///< of all steps
  std::int64_t other_ns = 0;        ///< of all steps: sampling and delivery
  std::int64_t payload_bytes = 0;   ///< pages of one sequence
  std::int64_t resident_bytes = 0;  ///< pages, window and cursors of one sequence
  std::int64_t pool_bytes = 0;      ///< all slots, with convolution history
  std::string digest;               ///< of every sequence's first tokens, at most kDigestTokens

  /// Nanoseconds as a share of total_ns.
  double share(std::int64_t ns) const {
    return total_ns == 0 ? 0 : static_cast<double>(ns) / static_cast<double>(total_ns);
  }
};

/// A batch of greedy sequences, all of them running. Prompts are token numbers by a fixed rule, so
/// that every run of a model and scheme gives the same tokens, and their digest may be compared.
/// Sequences join over several steps, as requests do, so that their windows do not fill together.
class DecodeBench {
 public:
  static constexpr std::int64_t kDigestTokens = 16;

  /// Reads all prompts. `model` and `threads` must outlive it. Errors: kInvalidArgument (a number
  /// below 1, a prompt that fills the context), as StatePool::create(), Engine::step() and
  /// Model::prefill().
  static Result<std::unique_ptr<DecodeBench>> create(Model& model,
                                                     std::shared_ptr<const CompiledScheme> scheme,
                                                     ThreadPool& threads,
                                                     const DecodeBenchConfig& config);
  /// Decodes one token of every sequence. Errors: as Engine::step(); kNotFinite when a state
  /// left f32, kExhausted when a sequence reached the end of the context.
  Status step();
  /// Wall time of the steps so far, in nanoseconds.
  const std::vector<std::int64_t>& step_ns() const { return step_ns_; }
  DecodeFigures figures() const;

 private:
  DecodeBench(Model& model, std::shared_ptr<const CompiledScheme> scheme,
              const DecodeBenchConfig& config)
      : model_(model), scheme_(std::move(scheme)), config_(config) {}
  Status fill(ThreadPool& threads);

  Model& model_;
  std::shared_ptr<const CompiledScheme> scheme_;
  DecodeBenchConfig config_;
  std::unique_ptr<StatePool> pool_;
  std::unique_ptr<Engine> engine_;
  Status failure_;  ///< of the first sequence that ended with an error
  std::vector<std::vector<std::int32_t>> first_tokens_;  ///< of every sequence, for the digest
  std::vector<std::int64_t> step_ns_;
  std::int64_t cpu_ns_ = 0;
  PartTimes part_ns_{};
};

/// The p-th percentile of values (0 <= p <= 100), the nearest one that occurs; 0 of none.
std::int64_t percentile(std::vector<std::int64_t> values, double p);

}  // namespace statepack
