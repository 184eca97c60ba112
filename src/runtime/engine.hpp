// Continuous batching of many sequences over one model and one state pool: tokens in, tokens out.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "model/tokenizer.hpp"
#include "pool/pool.hpp"
#include "runtime/sampling.hpp"

namespace statepack {

using RequestId = std::uint64_t;

enum class FinishReason : std::uint8_t {
  kStop,    ///< end-of-sequence token or stop string
  kLength,  ///< max_tokens or the context is full
  kCancelled,
  kError,
};
std::string_view finish_reason_name(
    FinishReason reason);  ///< "stop", "length", "cancelled", "error"

struct Request {
  std::vector<std::int32_t> prompt;
  SamplingParams params;
};

/// What happened to a request in one round. Views are valid during the callback.
struct TokenEvent {
  RequestId request = 0;
  const Choice* choice = nullptr;  ///< the new token; null when there is none (error, cancelled)
  std::string_view text;  ///< text that became certain: whole characters, before any stop string
  /// All tokens of the reply so far, without the end-of-sequence token.
  std::span<const std::int32_t> tokens;
  std::optional<FinishReason> finish;  ///< set in the request's last event
  Status status;                       ///< why, when finish is kError
};
using TokenCallback = std::function<void(const TokenEvent&)>;

struct EngineConfig {
  std::int64_t max_batch = 0;    ///< rows of one decode step; 0: the pool's slots, at most 256
  std::int64_t max_queue = 0;    ///< waiting requests; 0: no limit
  std::int64_t max_context = 0;  ///< tokens of prompt and reply; 0: the model's max_position
  /// Prompt tokens read between two decode steps (at least one segment is): small keeps running
  /// replies flowing, large fills the batch sooner.
  std::int64_t prefill_budget = 512;
};

struct EngineStats {
  std::int64_t n_running = 0, n_waiting = 0;
  std::int64_t prompt_tokens = 0, reply_tokens = 0;
  std::int64_t n_finished = 0, n_failed = 0;
};

/// Runs requests to their end. Every reply is bit-equal to the same request alone: prompts are cut
/// at fixed positions whatever the load, and decode rows do not see one another. A request owns a
/// slot from the start of its prompt to its last token; without a free slot requests wait in order.
///
/// submit(), cancel() and stats() may be called from any thread, callbacks included; step(), run()
/// and idle() from one thread at a time. Callbacks run on that thread.
class Engine {
 public:
  /// All references must outlive the engine. `tokenizer` may be null: then events carry no text,
  /// and stop strings are refused. Errors: kMismatch when the pool was made for another model's
  /// layers.
  static Result<std::unique_ptr<Engine>> create(Model& model, StatePool& pool, ThreadPool& threads,
                                                const Tokenizer* tokenizer,
                                                const EngineConfig& config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Queues a request. Errors: kInvalidArgument (empty prompt, token outside the vocabulary, prompt
  /// as long as the context: both numbers; a sampling parameter), kExhausted (queue full).
  Result<RequestId> submit(Request request, TokenCallback callback);
  /// Ends a request before its next token; unknown or finished ids do nothing.
  void cancel(RequestId id);

  /// One round: takes cancellations, reads prompts within the budget, decodes one token for every
  /// running sequence. Errors: kExhausted when requests wait, none runs and every slot is held by
  /// others (nothing is lost); what a decode step of the whole batch returns (its requests end with
  /// that error).
  Status step();
  /// Steps until nothing runs or waits. Errors: as step(); kInterrupted after SIGINT (requests
  /// stay).
  Status run();
  bool idle() const;
  EngineStats stats() const;
  std::int64_t max_context() const { return config_.max_context; }

 private:
  struct Sequence;
  Engine(Model& model, StatePool& pool, ThreadPool& threads, const Tokenizer* tokenizer,
         const EngineConfig& config);
  void take_cancellations();
  Status read_prompts();
  Status read_segment(Sequence& sequence, std::int64_t* n_read);
  Status decode();
  void sample_rows(std::span<Sequence* const> rows);
  void deliver(Sequence& sequence, Result<Choice> choice);
  void finish(Sequence& sequence, FinishReason reason, Status status, const Choice* choice,
              const std::string& text);
  void release(Sequence& sequence);

  Model& model_;
  StatePool& pool_;
  ThreadPool& threads_;
  const Tokenizer* tokenizer_;
  EngineConfig config_;
  std::int64_t n_vocab_ = 0;  ///< ids below are real tokens; rows of the head past them are padding

  mutable std::mutex mutex_;  ///< of the four members below
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<RequestId> cancelled_;
  RequestId next_id_ = 1;
  EngineStats stats_;

  std::unique_ptr<Sequence> reading_;  ///< its prompt is being read into dense_
  DenseState dense_;
  std::vector<std::unique_ptr<Sequence>> running_;

  std::vector<float> logits_;  ///< [max_batch, vocab]
  std::vector<DecodeRow> rows_;
  std::vector<Sequence*> batch_;
  std::vector<std::optional<Result<Choice>>> choices_;
  std::vector<SamplerScratch> scratch_;  ///< one a thread
};

/// A whole reply.
struct Completion {
  std::vector<std::int32_t> tokens;  ///< without the end-of-sequence token
  std::string text;
  std::vector<Choice> choices;  ///< one a token, when logprobs were asked for
  FinishReason finish = FinishReason::kError;
  Status status;
};

/// Submits one request and collects its reply into `out`, which must live until the engine is idle.
Result<RequestId> submit_collect(Engine& engine, Request request, Completion* out);

}  // namespace statepack
