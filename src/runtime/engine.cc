#include "runtime/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/check.hpp"
#include "base/progress.hpp"

namespace statepack {
namespace {

// Prompts are read in segments that end at multiples of this position (and of the scheme's prefill
// period), so that the cuts, and with them every bit of the state, do not depend on load.
constexpr std::int64_t kSegment = 512;
constexpr std::int64_t kMaxDefaultBatch = 256;

std::int64_t segment_end(std::int64_t position, std::int64_t n_tokens, std::int64_t period) {
  std::int64_t end = std::min(n_tokens, (position / kSegment + 1) * kSegment);
  if (period > 0) end = std::min(end, (position / period + 1) * period);
  return end;
}

}  // namespace

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kDeadline:
      return "deadline";
    case FinishReason::kError:
      return "error";
  }
  return "error";
}

std::string_view slot_phase_name(SlotPhase phase) {
  switch (phase) {
    case SlotPhase::kFree:
      return "free";
    case SlotPhase::kPrompt:
      return "prompt";
    case SlotPhase::kReply:
      return "reply";
    case SlotPhase::kHeld:
      return "held";
  }
  return "held";
}

std::int64_t EngineStats::n_ended() const {
  return std::accumulate(finished.begin(), finished.end(), std::int64_t{0});
}

struct Engine::Sequence {
  Sequence(RequestId request_id, Request&& r, TokenCallback&& cb)
      : id(request_id),
        request(std::move(r)),
        callback(std::move(cb)),
        sampler(request.params, request.prompt),
        stops(request.params.stop) {}

  RequestId id;
  Request request;
  TokenCallback callback;
  Sampler sampler;
  StopStrings stops;
  Utf8Stream utf8;
  std::unique_ptr<KvCache> kv;
  std::int64_t slot = 0;      ///< 0: none yet
  std::int64_t position = 0;  ///< tokens that state and cache have read
  std::vector<std::int32_t> tokens;
  bool finished = false;
};

Result<std::unique_ptr<Engine>> Engine::create(Model& model, StatePool& pool, ThreadPool& threads,
                                               const Tokenizer* tokenizer,
                                               const EngineConfig& config) {
  const std::vector<LayerShape> shapes = model.config().recurrent_shapes();
  const auto& layers = pool.scheme().layers();
  const bool same =
      shapes.size() == layers.size() &&
      std::equal(shapes.begin(), shapes.end(), layers.begin(),
                 [](const LayerShape& s, const CompiledLayer& l) { return s == l.shape; });
  if (!same) {
    return Status(
        Code::kMismatch,
        fmt::format("the state pool was made for {} recurrent layers of another shape than "
                    "the model's {}; make it from the same model",
                    layers.size(), shapes.size()));
  }
  EngineConfig c = config;
  if (c.max_batch <= 0) c.max_batch = std::min(pool.n_slots(), kMaxDefaultBatch);
  if (c.max_context <= 0) c.max_context = model.config().max_position;
  return std::unique_ptr<Engine>(new Engine(model, pool, threads, tokenizer, c));
}

Engine::Engine(Model& model, StatePool& pool, ThreadPool& threads, const Tokenizer* tokenizer,
               const EngineConfig& config)
    : model_(model),
      pool_(pool),
      threads_(threads),
      tokenizer_(tokenizer),
      config_(config),
      n_vocab_(model.config().vocab),
      dense_(model.new_dense_state()),
      logits_(static_cast<std::size_t>(config.max_batch * model.config().vocab)),
      choices_(static_cast<std::size_t>(config.max_batch)),
      scratch_(static_cast<std::size_t>(threads.n_threads())) {
  if (tokenizer != nullptr) n_vocab_ = std::min<std::int64_t>(n_vocab_, tokenizer->n_tokens());
}

Engine::~Engine() {
  if (reading_ != nullptr) release(*reading_);
  for (const auto& sequence : running_) release(*sequence);
}

Result<RequestId> Engine::submit(Request request, TokenCallback callback) {
  SP_RETURN_IF_ERROR(request.params.validate());
  const auto n_prompt = static_cast<std::int64_t>(request.prompt.size());
  if (n_prompt == 0) {
    return Status(Code::kInvalidArgument, "the prompt is empty; it needs at least one token");
  }
  if (n_prompt >= config_.max_context) {
    return Status(Code::kInvalidArgument,
                  fmt::format("the prompt has {} tokens and the context holds {}, prompt and reply "
                              "together; shorten the prompt or raise the context length",
                              n_prompt, config_.max_context));
  }
  for (const std::int32_t token : request.prompt) {
    if (token < 0 || token >= n_vocab_) {
      return Status(
          Code::kInvalidArgument,
          fmt::format("prompt token {} is outside the vocabulary of {}", token, n_vocab_));
    }
  }
  if (tokenizer_ == nullptr && !request.params.stop.empty()) {
    return Status(Code::kInvalidArgument, "stop strings need a tokenizer; this engine has none");
  }
  const std::lock_guard lock(mutex_);
  if (config_.max_queue > 0 && std::ssize(waiting_) >= config_.max_queue) {
    return Status(Code::kExhausted,
                  fmt::format("{} requests wait already, which is the limit; try again later",
                              config_.max_queue));
  }
  const RequestId id = next_id_++;
  waiting_.push_back(std::make_unique<Sequence>(id, std::move(request), std::move(callback)));
  return id;
}

void Engine::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  cancelled_.push_back(id);
}

bool Engine::idle() const {
  const std::lock_guard lock(mutex_);
  return waiting_.empty() && reading_ == nullptr && running_.empty();
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.n_waiting = std::ssize(waiting_);
  return stats;
}

Status Engine::run() {
  while (!idle()) {
    if (interrupted()) {
      return {Code::kInterrupted, "stopped on request before all replies were complete"};
    }
    SP_RETURN_IF_ERROR(step());
  }
  return {};
}

Status Engine::step() {
  take_cancellations();
  SP_RETURN_IF_ERROR(read_prompts());
  Status status = decode();
  std::erase_if(running_, [](const auto& sequence) { return sequence->finished; });
  const std::lock_guard lock(mutex_);
  stats_.n_running = std::ssize(running_) + (reading_ != nullptr ? 1 : 0);
  return status;
}

void Engine::take_cancellations() {
  std::vector<RequestId> ids;
  std::vector<std::unique_ptr<Sequence>> dropped;  // callbacks run without the lock
  {
    const std::lock_guard lock(mutex_);
    ids = std::exchange(cancelled_, {});
    if (ids.empty()) return;
    for (auto& sequence : waiting_) {
      if (std::find(ids.begin(), ids.end(), sequence->id) != ids.end()) {
        dropped.push_back(std::move(sequence));
      }
    }
    std::erase(waiting_, nullptr);
  }
  const auto is_cancelled = [&](const Sequence& sequence) {
    return std::find(ids.begin(), ids.end(), sequence.id) != ids.end();
  };
  for (const auto& sequence : dropped) finish(*sequence, FinishReason::kCancelled, {}, nullptr, {});
  if (reading_ != nullptr && is_cancelled(*reading_)) {
    finish(*reading_, FinishReason::kCancelled, {}, nullptr, {});
    reading_.reset();
  }
  for (const auto& sequence : running_) {
    if (is_cancelled(*sequence)) finish(*sequence, FinishReason::kCancelled, {}, nullptr, {});
  }
  std::erase_if(running_, [](const auto& sequence) { return sequence->finished; });
}

Status Engine::read_prompts() {
  std::int64_t n_read = 0;
  while (n_read == 0 || n_read < config_.prefill_budget) {
    if (reading_ == nullptr) {
      if (std::ssize(running_) >= config_.max_batch) return {};
      std::unique_ptr<Sequence> next;
      {
        const std::lock_guard lock(mutex_);
        if (waiting_.empty()) return {};
        Result<std::int64_t> slot = pool_.alloc();
        if (!slot.ok()) {
          if (!running_.empty()) return {};  // one comes free when a running sequence ends
          return {
              Code::kExhausted,
              fmt::format("{} requests wait, none runs, and all {} slots are held elsewhere; free "
                          "slots or make the pool larger",
                          waiting_.size(), pool_.n_slots())};
        }
        next = std::move(waiting_.front());
        waiting_.pop_front();
        next->slot = *slot;
      }
      reading_ = std::move(next);
      reading_->kv = model_.new_kv_cache();
      std::fill(dense_.S.begin(), dense_.S.end(), 0.0F);
      std::fill(dense_.conv.begin(), dense_.conv.end(), 0.0F);
    }
    Sequence& sequence = *reading_;
    if (Status status = read_segment(sequence, &n_read); !status.ok()) {
      if (status.code() == Code::kInterrupted) {
        // The request stays: it is read from its start when run() is called again.
        pool_.free(sequence.slot);
        sequence.slot = 0;
        sequence.position = 0;
        sequence.kv.reset();
        const std::lock_guard lock(mutex_);
        waiting_.push_front(std::move(reading_));
        return status;
      }
      finish(sequence, FinishReason::kError, std::move(status), nullptr, {});
      reading_.reset();
      continue;
    }
    if (sequence.position < std::ssize(sequence.request.prompt)) continue;

    // The first token comes from the prompt's own logits; only a reply that goes on needs the slot.
    const std::span<const float> row(logits_.data(), static_cast<std::size_t>(n_vocab_));
    deliver(sequence, sequence.sampler.sample(row, sequence.position, scratch_[0]));
    if (!sequence.finished) {
      Status status = hand_over(pool_, sequence.slot, dense_, sequence.position, threads_);
      if (status.ok()) {
        running_.push_back(std::move(reading_));
      } else {
        finish(sequence, FinishReason::kError, std::move(status), nullptr, {});
      }
    }
    reading_.reset();
  }
  return {};
}

Status Engine::read_segment(Sequence& sequence, std::int64_t* n_read) {
  const auto& prompt = sequence.request.prompt;
  const std::int64_t n_prompt = std::ssize(prompt);
  const std::int64_t period = pool_.scheme().scheme().prefill_period;
  const std::int64_t begin = sequence.position;
  const std::int64_t end = segment_end(begin, n_prompt, period);
  const std::span<const std::int32_t> tokens(prompt.data() + begin,
                                             static_cast<std::size_t>(end - begin));
  SP_RETURN_IF_ERROR(
      model_.prefill(tokens, begin, dense_, *sequence.kv, end == n_prompt ? 1 : 0, logits_.data()));
  // The end of the prompt is rounded by the hand-over.
  if (period > 0 && end % period == 0 && end < n_prompt) {
    SP_RETURN_IF_ERROR(round_dense(pool_, sequence.slot, dense_, threads_));
  }
  sequence.position = end;
  *n_read += end - begin;
  const std::lock_guard lock(mutex_);
  stats_.prompt_tokens += end - begin;
  return {};
}

Status Engine::decode() {
  if (running_.empty()) return {};
  rows_.clear();
  batch_.clear();
  for (const auto& sequence : running_) {
    rows_.push_back(
        {sequence->slot, sequence->kv.get(), sequence->tokens.back(), sequence->position});
    batch_.push_back(sequence.get());
  }
  if (Status status = model_.decode(pool_, rows_, logits_.data()); !status.ok()) {
    for (Sequence* sequence : batch_) {
      finish(*sequence, FinishReason::kError, status, nullptr, {});
    }
    return status;
  }
  for (Sequence* sequence : batch_) pool_.set_n_tokens(sequence->slot, ++sequence->position);
  sample_rows(batch_);
  for (std::size_t i = 0; i < batch_.size(); ++i) {
    Sequence& sequence = *batch_[i];
    if (pool_.quarantined(sequence.slot)) {
      finish(sequence, FinishReason::kError,
             {Code::kNotFinite,
              fmt::format("the state became non-finite at token {} of the sequence; its slot was "
                          "quarantined and no other request is affected",
                          sequence.position)},
             nullptr, {});
    } else {
      deliver(sequence, *std::exchange(choices_[i], std::nullopt));
    }
  }
  return {};
}

void Engine::sample_rows(std::span<Sequence* const> rows) {
  const std::int64_t vocab = model_.config().vocab;
  threads_.parallel_for(std::ssize(rows), [&](std::int64_t i, int worker) {
    const Sequence& sequence = *rows[static_cast<std::size_t>(i)];
    choices_[static_cast<std::size_t>(i)] = sequence.sampler.sample(
        std::span<const float>(logits_.data() + i * vocab, static_cast<std::size_t>(n_vocab_)),
        sequence.position, scratch_[static_cast<std::size_t>(worker)]);
  });
}

void Engine::deliver(Sequence& sequence, Result<Choice> choice) {
  if (!choice.ok()) {
    finish(sequence, FinishReason::kError, choice.status(), nullptr, {});
    return;
  }
  const SamplingParams& params = sequence.request.params;
  const auto& eos = model_.config().eos_tokens;
  const std::int32_t token = choice->token;
  if (!params.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end()) {
    std::string text;
    if (tokenizer_ != nullptr) {
      text = sequence.stops.push(sequence.utf8.finish());
      text += sequence.stops.finish();
    }
    finish(sequence, FinishReason::kStop, {}, &*choice, text);
    return;
  }
  sequence.tokens.push_back(token);
  sequence.sampler.accept(token);
  {
    const std::lock_guard lock(mutex_);
    ++stats_.reply_tokens;
  }
  std::string text;
  if (tokenizer_ != nullptr && !tokenizer_->is_special(token)) {
    text = sequence.stops.push(sequence.utf8.push(tokenizer_->token_bytes(token)));
  }
  if (sequence.stops.matched()) {
    finish(sequence, FinishReason::kStop, {}, &*choice, text);
    return;
  }
  const bool full =
      std::ssize(sequence.tokens) >= params.max_tokens ||
      std::ssize(sequence.request.prompt) + std::ssize(sequence.tokens) >= config_.max_context;
  if (full) {
    if (tokenizer_ != nullptr) {
      text += sequence.stops.push(sequence.utf8.finish());
      const bool matched = sequence.stops.matched();
      if (!matched) text += sequence.stops.finish();
      finish(sequence, matched ? FinishReason::kStop : FinishReason::kLength, {}, &*choice,
             std::move(text));
    } else {
      finish(sequence, FinishReason::kLength, {}, &*choice, {});
    }
    return;
  }
  if (sequence.callback) {
    TokenEvent event;
    event.request = sequence.id;
    event.choice = &*choice;
    event.text = text;
    event.tokens = sequence.tokens;
    sequence.callback(event);
  }
}

void Engine::finish(Sequence& sequence, FinishReason reason, Status status, const Choice* choice,
                    const std::string& text) {
  SP_CHECK(!sequence.finished, "a request ends once");
  sequence.finished = true;
  release(sequence);
  {
    const std::lock_guard lock(mutex_);
    ++stats_.finished[static_cast<std::size_t>(reason)];
  }
  if (!sequence.callback) return;
  TokenEvent event;
  event.request = sequence.id;
  event.choice = choice;
  event.text = text;
  event.tokens = sequence.tokens;
  event.finish = reason;
  event.status = std::move(status);
  sequence.callback(event);
}

void Engine::release(Sequence& sequence) {
  if (sequence.slot != 0) pool_.free(std::exchange(sequence.slot, 0));
  sequence.kv.reset();
}

Result<RequestId> submit_collect(Engine& engine, Request request, Completion* out) {
  const bool keep_choices = request.params.logprobs >= 0;
  return engine.submit(std::move(request), [out, keep_choices](const TokenEvent& event) {
    out->text += event.text;
    if (keep_choices && event.choice != nullptr) out->choices.push_back(*event.choice);
    if (!event.finish.has_value()) return;
    out->tokens.assign(event.tokens.begin(), event.tokens.end());
    out->finish = *event.finish;
    out->status = event.status;
  });
}

}  // namespace statepack
