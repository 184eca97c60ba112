// Continuous batching of many sequences over one model and one state pool: tokens in, tokens out.
#pragma once

#include <array>
#include <chrono>
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
#include "pool/prefix_cache.hpp"
#include "runtime/sampling.hpp"

namespace statepack {

using RequestId = std::uint64_t;

enum class FinishReason : std::uint8_t {
  kStop,    ///< end-of-sequence token or stop string
  kLength,  ///< max_tokens or the context is full
  kCancelled,
  kDeadline,  ///< Request::deadline passed
  kError,
};
inline constexpr std::size_t kNFinishReasons = 5;
/// "stop", "length", "cancelled", "deadline", "error"
std::string_view finish_reason_name(FinishReason reason);

struct Request {
  std::vector<std::int32_t> prompt;
  SamplingParams params;
  /// The request ends with kDeadline before its first token after this, wherever it is.
  std::optional<std::chrono::steady_clock::time_point> deadline;
  bool progress = false;  ///< send an event whenever a part of the prompt was read
};

/// How long a request was in each phase so far, in seconds.
struct RequestTimes {
  double queued = 0;  ///< from submit() to the start of its prompt
  double prompt = 0;  ///< from there to its first token
  double reply = 0;   ///< from there to now
};

/// What happened to a request in one round. Views are valid during the callback.
struct TokenEvent {
  RequestId request = 0;
  /// The new token; null when there is none: the prompt's progress, an error, a cancellation.
  const Choice* choice = nullptr;
  std::string_view text;  ///< text that became certain: whole characters, before any stop string
  /// All tokens of the reply so far, without the end-of-sequence token.
  std::span<const std::int32_t> tokens;
  std::int64_t n_prompt = 0;       ///< tokens of the prompt
  std::int64_t n_cached = 0;       ///< of them, taken from the prefix cache
  std::int64_t n_prompt_read = 0;  ///< of them, behind us: cached or read
  RequestTimes times;
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
  /// Prompts read in turns, a segment at a time; each holds a dense f32 state. With two or more the
  /// last place takes only prompts of one segment, so that short ones pass long ones by.
  std::int64_t max_prompts = 4;
  /// Attention cache of all admitted requests; 0: no limit. A request is admitted when the cache of
  /// its longest possible reply still fits, so that no running sequence ever has to give way.
  std::int64_t kv_bytes = 0;
  PrefixCacheConfig prefix_cache;  ///< off unless asked for
};

struct EngineStats {
  std::int64_t n_waiting = 0;      ///< in the queue
  std::int64_t n_prompts = 0;      ///< whose prompt is being read
  std::int64_t n_running = 0;      ///< those, and the ones that reply
  std::int64_t prompt_tokens = 0;  ///< read, cached ones not counted
  std::int64_t cached_tokens = 0;  ///< of prompts, taken from the prefix cache
  std::int64_t reply_tokens = 0;
  std::array<std::int64_t, kNFinishReasons> finished{};  ///< by FinishReason
  std::int64_t decode_steps = 0, decode_rows = 0;        ///< rows / steps: how full batches were
  /// Windows that were complete and rounded, of all recurrent layers together: a sequence's layers
  /// flush at the same token.
  std::int64_t flushes = 0;
  std::int64_t nonfinite = 0;          ///< slots quarantined so far
  GuardCounts guard;                   ///< roundings unlike those that the plan was made for
  std::int64_t kv_bytes_reserved = 0;  ///< for the longest replies of admitted requests
  std::int64_t kv_bytes_limit = 0;     ///< EngineConfig::kv_bytes
  PrefixCacheStats prefix;             ///< zeros when there is no prefix cache

  std::int64_t n_finished(FinishReason reason) const {
    return finished[static_cast<std::size_t>(reason)];
  }
  std::int64_t n_ended() const;  ///< all reasons together
};

enum class SlotPhase : std::uint8_t {
  kFree,
  kPrompt,
  kReply,
  kHeld,  ///< by somebody beside the engine
};
std::string_view slot_phase_name(SlotPhase phase);  ///< "free", "prompt", "reply", "held"

/// What a slot was doing at the end of the last step.
struct SlotView {
  std::int64_t slot = 0;
  SlotPhase phase = SlotPhase::kFree;
  RequestId request = 0;  ///< 0 unless in a prompt or a reply
  std::int64_t n_prompt = 0, n_cached = 0, n_prompt_read = 0;
  std::int64_t n_reply = 0;
  std::int64_t position = 0;  ///< tokens that the state has read
  /// Of a free slot: tokens of its last sequence, to be saved while the prefix cache has them.
  std::int64_t n_last = 0;
};

/// What was written to or read from a file.
struct SavedPrefix {
  std::int64_t n_tokens = 0;
  std::int64_t n_snapshots = 0;
  std::int64_t n_bytes = 0;  ///< of the file
};

/// Runs requests to their end. Every reply is bit-equal to the same request alone: prompts are cut
/// at fixed positions whatever the load, and decode rows do not see one another (what a prefix
/// cache in mode kTurns adds to this is said there). A request owns a slot from the start of its
/// prompt to its last token; without a free slot, or memory for its attention cache, requests wait
/// in order. A cancelled or late request ends at the start of the next step.
///
/// submit(), cancel(), stats(), slots(), idle() and read_record() may be called from any thread,
/// callbacks included; everything else from one thread at a time (see EngineLoop). Callbacks run on
/// that thread.
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
  /// as long as the context: both numbers; a sampling parameter; an attention cache that never
  /// fits: both numbers), kExhausted (queue full: the limit).
  Result<RequestId> submit(Request request, TokenCallback callback);
  /// Ends a request at the start of the next step; unknown or finished ids do nothing.
  void cancel(RequestId id);
  void cancel_all();

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
  std::vector<SlotView> slots() const;  ///< slots 1.. in order, as the last step left them

  /// Writes the sequence of a slot to a file: of a running one as it stands, of a free slot what
  /// the prefix cache still has of its last one. Errors: kInvalidArgument (no such slot, or its
  /// prompt is being read), kNotFound (nothing is left of it), kNotFinite, kUnsupported (no prefix
  /// cache), kIo; an older file stays.
  Result<SavedPrefix> save_slot(std::int64_t slot, const std::string& path);
  /// Puts a file's sequence into the prefix cache, where requests that begin with it find it.
  /// n_tokens of the result are found from now on. Errors: kNotFound, kIo, kCorrupt, kMismatch
  /// (another model, scheme, plan, block length, or reading of the same tokens; in mode kBlocks: no
  /// state at a block's end), kExhausted (larger than one of the cache's bounds, which is named),
  /// kUnsupported (no prefix cache); nothing changes.
  Result<SavedPrefix> load_prefix(const std::string& path);
  /// save_slot() is record_of() and write_prefix_file(); load_prefix() is read_record() and
  /// keep_record(). A server does the middle, compression, checksums and the disk, elsewhere:
  /// read_record() may be called from any thread. Errors: those of the whole.
  Result<PrefixRecord> record_of(std::int64_t slot);
  Result<PrefixRecord> read_record(const std::string& path, std::int64_t* n_bytes) const;
  Result<SavedPrefix> keep_record(const PrefixRecord& record);
  /// Forgets the prefix cache's entry of a free slot's last sequence: its tokens. Errors:
  /// kInvalidArgument, kNotFound, kUnsupported.
  Result<std::int64_t> erase_slot(std::int64_t slot);
  /// The whole prefix cache to and from a folder, made if it is not there: one file for each
  /// longest prefix; files of earlier saves go. Loading passes over files that do not belong here
  /// and says why in *skipped, which may be null; its result counts what the cache holds then, for
  /// what does not fit goes as ever. Errors: kIo, kUnsupported (no prefix cache).
  Result<SavedPrefix> save_prefixes(const std::string& folder);
  Result<SavedPrefix> load_prefixes(const std::string& folder, std::vector<Status>* skipped);
  void clear_prefixes();
  /// PrefixCache::outline(); nothing when there is no prefix cache.
  std::vector<PrefixNodeView> prefix_nodes(std::int64_t max_nodes) const;

  std::int64_t max_context() const { return config_.max_context; }

 private:
  struct Sequence;
  using Clock = std::chrono::steady_clock;
  Engine(Model& model, StatePool& pool, ThreadPool& threads, const Tokenizer* tokenizer,
         const EngineConfig& config, std::unique_ptr<PrefixCache> prefixes);
  void take_cancellations();
  Status read_prompts();
  Status admit();
  /// The next request that may start, off the queue, with a slot; null when none may. Errors: as
  /// step().
  Result<std::unique_ptr<Sequence>> next_waiting();
  void resume_prefix(Sequence& sequence);
  Status read_segment(Sequence& sequence, std::int64_t* n_read);
  Status end_block(Sequence& sequence);
  Status end_prompt(Sequence& sequence);
  void put_back(std::unique_ptr<Sequence> sequence);
  Status decode();
  void count_step();
  void sample_rows(std::span<Sequence* const> rows);
  void deliver(Sequence& sequence, Result<Choice> choice);
  void finish(Sequence& sequence, FinishReason reason, Status status, const Choice* choice,
              const std::string& text);
  void release(Sequence& sequence);
  void keep_prefix(const Sequence& sequence);
  TokenEvent event_of(const Sequence& sequence) const;
  void publish();
  PrefixCache::Hit longest_of(std::int64_t slot);
  Status check_record(const PrefixRecord& record) const;
  Status need_prefixes() const;

  Model& model_;
  StatePool& pool_;
  ThreadPool& threads_;
  const Tokenizer* tokenizer_;
  EngineConfig config_;
  std::int64_t n_vocab_ = 0;  ///< ids below are real tokens; rows of the head past them are padding
  std::unique_ptr<const KvCache> empty_kv_;  ///< to ask for sizes

  mutable std::mutex mutex_;  ///< of the members up to views_
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<RequestId> cancelled_;
  bool cancel_all_ = false;
  RequestId next_id_ = 1;
  std::int64_t n_admitted_ = 0;  ///< off the queue and not ended
  EngineStats stats_;
  std::vector<SlotView> views_;  ///< [slots] what the engine's own were doing

  std::vector<std::unique_ptr<Sequence>> reading_;  ///< prompts, in turns
  std::size_t turn_ = 0;                            ///< whose
  std::vector<std::unique_ptr<DenseState>> spare_dense_;
  std::vector<std::unique_ptr<Sequence>> running_;
  std::unique_ptr<PrefixCache> prefixes_;               ///< null: off
  std::vector<std::vector<std::int32_t>> last_tokens_;  ///< [slots] of each slot's last sequence

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
