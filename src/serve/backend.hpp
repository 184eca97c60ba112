// Everything below HTTP: checkpoint, state pool, engine and its thread, sized before anything
// loads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/chat_template.hpp"
#include "model/model.hpp"
#include "model/tokenizer.hpp"
#include "runtime/engine.hpp"
#include "runtime/engine_loop.hpp"
#include "runtime/plan_library.hpp"

namespace statepack::serve {

struct BackendOptions {
  std::string model;  ///< checkpoint folder
  std::vector<std::string> plans;
  std::string state = "fp32";    ///< scheme
  int threads = 0;               ///< 0: the cores at hand
  std::int64_t pool_slots = 0;   ///< 0: as pool_bytes or max_seqs say
  std::int64_t pool_bytes = 0;   ///< of the state pool; 0: as pool_slots or max_seqs say
  std::int64_t max_seqs = 0;     ///< decoded in one batch; 0: the slots, at most 256
  std::int64_t max_context = 0;  ///< tokens of prompt and reply; 0: the model's limit
  std::int64_t max_queue = 1024;
  std::int64_t kv_bytes = std::int64_t{4} << 30;  ///< attention cache of all running sequences
  PrefixCacheConfig prefix_cache{PrefixMode::kTurns};
  std::string prefix_folder;  ///< the prefix cache is kept there between runs; "": nowhere
};

/// What is fixed once the sizes are.
struct StateSummary {
  std::string scheme;
  double payload_bits = 0, resident_bits = 0;
  std::int64_t n_slots = 0, bytes_per_slot = 0;
  std::int64_t max_seqs = 0, max_context = 0, kv_bytes_per_token = 0;
};

class Backend {
 public:
  /// Reads config and plans, decides all sizes and checks that the pool fits into memory; loads no
  /// weights. Errors: as ModelConfig::load(), PlanLibrary and CompiledScheme; kInvalidArgument and
  /// kExhausted for sizes that do not go together, naming the number that would.
  static Result<std::unique_ptr<Backend>> plan(const BackendOptions& options);
  ~Backend();

  const StateSummary& summary() const { return summary_; }
  const BackendOptions& options() const { return options_; }

  /// Loads weights and tokenizer and starts the engine's thread. Once, from any thread. Errors: as
  /// Model::load(), Tokenizer::load(), ChatTemplate::load() and StatePool::create().
  Status load();
  /// True once load() succeeded; only then may what follows be used.
  bool ready() const { return ready_.load(std::memory_order_acquire); }

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  std::int64_t longest_token_bytes() const { return longest_token_bytes_; }
  const ChatTemplate* chat_template() const { return chat_template_.get(); }  ///< null: none
  /// Sampling settings of a request that names none: those of the checkpoint's
  /// generation_config.json, else OpenAI's.
  const SamplingParams& defaults() const { return defaults_; }
  Engine& engine() { return *engine_; }
  EngineLoop& loop() { return *loop_; }
  const StatePool& pool() const { return *pool_; }
  std::int64_t weight_bytes() const { return model_->weight_bytes(); }

  /// Lets running requests finish until `deadline`, cancels the rest and keeps the prefix cache if
  /// it has a folder. True when every request came to its own end. Called again it does nothing.
  bool close(std::chrono::steady_clock::time_point deadline);

 private:
  Backend() = default;
  Status decide_sizes(const ModelConfig& config, const CompiledScheme& scheme);
  /// Whether the prefix cache's bounds hold a state of this (still empty) pool.
  Status check_prefix_bytes(StatePool& pool) const;
  Status read_defaults();

  BackendOptions options_;
  StateSummary summary_;
  PlanLibrary plans_;
  SamplingParams defaults_;
  std::atomic<bool> ready_{false};
  bool closed_ = false;
  std::unique_ptr<ThreadPool> threads_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::int64_t longest_token_bytes_ = 0;
  std::unique_ptr<ChatTemplate> chat_template_;
  std::unique_ptr<StatePool> pool_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineLoop> loop_;
};

}  // namespace statepack::serve
