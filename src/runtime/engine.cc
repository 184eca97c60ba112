#include "runtime/engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/check.hpp"
#include "base/progress.hpp"
#include "runtime/engine_sequence.hpp"

namespace statepack {
namespace {

// Prompts are read in segments that end at multiples of this position, of the scheme's prefill
// period and of the prefix cache's blocks, so that the cuts, and with them every bit of the state,
// do not depend on load or on what is cached.
constexpr std::int64_t kSegment = 512;
constexpr std::int64_t kMaxDefaultBatch = 256;

/// The first multiple of `period` behind `position`; no such place when the period is 0.
std::int64_t next_multiple(std::int64_t position, std::int64_t period) {
  return period > 0 ? (position / period + 1) * period : std::numeric_limits<std::int64_t>::max();
}
bool is_multiple(std::int64_t position, std::int64_t period) {
  return period > 0 && position % period == 0;
}

double seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
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
  c.max_prompts = std::max<std::int64_t>(1, c.max_prompts);
  std::unique_ptr<PrefixCache> prefixes;
  if (c.prefix_cache.mode != PrefixMode::kOff) {
    SP_ASSIGN_OR_RETURN(prefixes,
                        PrefixCache::create(c.prefix_cache, model.new_kv_cache()->row_bytes()));
  }
  return std::unique_ptr<Engine>(
      new Engine(model, pool, threads, tokenizer, c, std::move(prefixes)));
}

Engine::Engine(Model& model, StatePool& pool, ThreadPool& threads, const Tokenizer* tokenizer,
               const EngineConfig& config, std::unique_ptr<PrefixCache> prefixes)
    : model_(model),
      pool_(pool),
      threads_(threads),
      tokenizer_(tokenizer),
      config_(config),
      n_vocab_(model.config().vocab),
      empty_kv_(model.new_kv_cache()),
      prefixes_(std::move(prefixes)),
      last_tokens_(static_cast<std::size_t>(pool.n_slots())),
      logits_(static_cast<std::size_t>(config.max_batch * model.config().vocab)),
      choices_(static_cast<std::size_t>(config.max_batch)),
      scratch_(static_cast<std::size_t>(threads.n_threads())) {
  if (tokenizer != nullptr) n_vocab_ = std::min<std::int64_t>(n_vocab_, tokenizer->n_tokens());
  stats_.kv_bytes_limit = config_.kv_bytes;
  publish();
}

Engine::~Engine() {
  for (const auto& sequence : reading_) release(*sequence);
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
  // The last token of a reply is never read.
  const std::int64_t n_longest =
      n_prompt + std::min(request.params.max_tokens, config_.max_context - n_prompt) - 1;
  const std::int64_t kv_bytes = empty_kv_->bytes_for(n_longest);
  if (config_.kv_bytes > 0 && kv_bytes > config_.kv_bytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("a prompt of {} tokens with a reply of up to {} needs {} bytes of "
                              "attention cache, and all requests together have {}; ask for a "
                              "shorter reply, shorten the prompt or raise the limit",
                              n_prompt, n_longest + 1 - n_prompt, kv_bytes, config_.kv_bytes));
  }
  const std::lock_guard lock(mutex_);
  if (config_.max_queue > 0 && std::ssize(waiting_) >= config_.max_queue) {
    return Status(Code::kExhausted,
                  fmt::format("{} requests wait already, which is the limit; try again later",
                              config_.max_queue));
  }
  const RequestId id = next_id_++;
  waiting_.push_back(
      std::make_unique<Sequence>(id, std::move(request), std::move(callback), kv_bytes));
  return id;
}

void Engine::cancel(RequestId id) {
  const std::lock_guard lock(mutex_);
  cancelled_.push_back(id);
}

void Engine::cancel_all() {
  const std::lock_guard lock(mutex_);
  cancel_all_ = true;
}

bool Engine::idle() const {
  const std::lock_guard lock(mutex_);
  return waiting_.empty() && n_admitted_ == 0;
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.n_waiting = std::ssize(waiting_);
  stats.nonfinite = pool_.nonfinite_total();
  stats.guard = pool_.guard_counts();
  return stats;
}

std::vector<SlotView> Engine::slots() const {
  std::vector<SlotView> views;
  {
    const std::lock_guard lock(mutex_);
    views = views_;
  }
  for (SlotView& view : views) {
    if (view.phase == SlotPhase::kFree && pool_.state(view.slot) != SlotState::kFree) {
      view.phase = SlotPhase::kHeld;
    }
  }
  return views;
}

void Engine::publish() {
  std::vector<SlotView> views(static_cast<std::size_t>(pool_.n_slots()));
  for (std::size_t i = 0; i < views.size(); ++i) {
    views[i].slot = static_cast<std::int64_t>(i) + StatePool::kFirstValidSlot;
    views[i].n_last = std::ssize(last_tokens_[i]);
  }
  const auto show = [&](const Sequence& sequence, SlotPhase phase) {
    SlotView& view = views[static_cast<std::size_t>(sequence.slot - StatePool::kFirstValidSlot)];
    view.phase = phase;
    view.request = sequence.id;
    view.n_prompt = sequence.n_prompt();
    view.n_cached = sequence.n_cached;
    view.n_prompt_read = std::min(sequence.position, view.n_prompt);
    view.n_reply = std::ssize(sequence.tokens);
    view.position = sequence.position;
    view.n_last = 0;
  };
  for (const auto& sequence : reading_) show(*sequence, SlotPhase::kPrompt);
  for (const auto& sequence : running_) show(*sequence, SlotPhase::kReply);
  const std::lock_guard lock(mutex_);
  views_ = std::move(views);
  stats_.n_prompts = std::ssize(reading_);
  stats_.n_running = std::ssize(running_) + stats_.n_prompts;
  if (prefixes_ != nullptr) stats_.prefix = prefixes_->stats();
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
  Status status = read_prompts();
  if (status.ok()) status = decode();
  std::erase_if(running_, [](const auto& sequence) { return sequence->finished; });
  publish();
  return status;
}

void Engine::take_cancellations() {
  const Clock::time_point now = Clock::now();
  std::vector<RequestId> ids;
  bool all = false;
  const auto end_of = [&](const Sequence& sequence) -> std::optional<FinishReason> {
    if (all || std::binary_search(ids.begin(), ids.end(), sequence.id)) {
      return FinishReason::kCancelled;
    }
    if (sequence.request.deadline.has_value() && now >= *sequence.request.deadline) {
      return FinishReason::kDeadline;
    }
    return std::nullopt;
  };
  std::vector<std::unique_ptr<Sequence>> dropped;  // callbacks run without the lock
  {
    const std::lock_guard lock(mutex_);
    ids = std::exchange(cancelled_, {});
    all = std::exchange(cancel_all_, false);
    std::sort(ids.begin(), ids.end());
    for (auto& sequence : waiting_) {
      if (end_of(*sequence).has_value()) dropped.push_back(std::move(sequence));
    }
    std::erase(waiting_, nullptr);
  }
  for (const auto& sequence : dropped) finish(*sequence, *end_of(*sequence), {}, nullptr, {});
  for (auto* sequences : {&reading_, &running_}) {
    for (const auto& sequence : *sequences) {
      if (const auto end = end_of(*sequence)) finish(*sequence, *end, {}, nullptr, {});
    }
    std::erase_if(*sequences, [](const auto& sequence) { return sequence->finished; });
  }
}

Result<std::unique_ptr<Engine::Sequence>> Engine::next_waiting() {
  if (std::ssize(reading_) >= config_.max_prompts ||
      std::ssize(reading_) + std::ssize(running_) >= config_.max_batch) {
    return std::unique_ptr<Sequence>();
  }
  const std::lock_guard lock(mutex_);
  const auto is_long = [&](const std::unique_ptr<Sequence>& sequence) {
    if (sequence->n_new < 0) {
      const std::int64_t n = sequence->n_prompt();
      sequence->n_new =
          n - (prefixes_ == nullptr ? 0 : prefixes_->match(sequence->request.prompt, n - 1));
    }
    return sequence->n_new > kSegment;
  };
  // Requests start in order, but for this: while all places for long prompts are taken, the short
  // ones among those that wait go on. They wait in order for everything else, so that a long prompt
  // gets the first slot that comes free once it has a place.
  auto next = waiting_.begin();
  const std::int64_t n_long = std::count_if(reading_.begin(), reading_.end(), is_long);
  if (config_.max_prompts > 1 && n_long == config_.max_prompts - 1) {
    next = std::find_if_not(waiting_.begin(), waiting_.end(), is_long);
  }
  if (next == waiting_.end()) return std::unique_ptr<Sequence>();
  const std::int64_t kv_reserved = stats_.kv_bytes_reserved + (*next)->kv_bytes;
  if (config_.kv_bytes > 0 && kv_reserved > config_.kv_bytes) return std::unique_ptr<Sequence>();
  const Result<std::int64_t> slot = pool_.alloc();
  if (!slot.ok()) {
    if (n_admitted_ > 0) return std::unique_ptr<Sequence>();  // one comes free when those end
    return Status(Code::kExhausted,
                  fmt::format("{} requests wait, none runs, and all {} slots are held elsewhere; "
                              "free slots or make the pool larger",
                              waiting_.size(), pool_.n_slots()));
  }
  std::unique_ptr<Sequence> sequence = std::move(*next);
  waiting_.erase(next);
  sequence->slot = *slot;
  stats_.kv_bytes_reserved = kv_reserved;
  ++n_admitted_;
  return sequence;
}

Status Engine::admit() {
  for (;;) {
    SP_ASSIGN_OR_RETURN(std::unique_ptr<Sequence> sequence, next_waiting());
    if (sequence == nullptr) return {};
    sequence->reading_since = Clock::now();
    sequence->kv = model_.new_kv_cache();
    if (spare_dense_.empty()) {
      sequence->dense = std::make_unique<DenseState>(model_.new_dense_state());
    } else {
      sequence->dense = std::move(spare_dense_.back());
      spare_dense_.pop_back();
      std::fill(sequence->dense->S.begin(), sequence->dense->S.end(), 0.0F);
      std::fill(sequence->dense->conv.begin(), sequence->dense->conv.end(), 0.0F);
    }
    if (prefixes_ != nullptr) resume_prefix(*sequence);
    reading_.push_back(std::move(sequence));
  }
}

void Engine::resume_prefix(Sequence& sequence) {
  PrefixCache::Hit hit = prefixes_->find(sequence.request.prompt, sequence.n_prompt() - 1);
  if (!hit) return;
  const auto restore = [&]() -> Status {
    // restore() compares every checksum and fingerprint.
    SP_RETURN_IF_ERROR(pool_.restore(sequence.slot, hit.snapshot().bytes));
    if (pool_.n_tokens(sequence.slot) != hit.n_tokens()) {
      return {Code::kCorrupt, fmt::format("a snapshot of {} tokens stands at a prefix of {}",
                                          pool_.n_tokens(sequence.slot), hit.n_tokens())};
    }
    SP_RETURN_IF_ERROR(restore_dense(pool_, sequence.slot, *sequence.dense, threads_));
    // Checksums vouch for what was written, not for what a file's writer meant; kept, such a state
    // would fail every request that begins like this one. States of our own are finite.
    if (hit.from_file()) {
      if (!all_finite(sequence.dense->S) || !all_finite(sequence.dense->conv)) {
        return {Code::kNotFinite, "the state is not finite"};
      }
      hit.set_checked();
    }
    for (const PrefixCache::Hit::Rows& rows : hit.rows()) {
      SP_RETURN_IF_ERROR(sequence.kv->append_rows(rows.n_tokens, rows.bytes));
    }
    return {};
  };
  if (!restore().ok()) {
    // A cache may forget, not fail: what is of no use goes, and the prompt is read from its start.
    prefixes_->discard(std::move(hit));
    sequence.kv->truncate(0);
    std::fill(sequence.dense->S.begin(), sequence.dense->S.end(), 0.0F);
    std::fill(sequence.dense->conv.begin(), sequence.dense->conv.end(), 0.0F);
    return;
  }
  sequence.position = sequence.n_cached = hit.n_tokens();
  sequence.lineage = hit.lineage();
  sequence.reads_as_cold =
      sequence.lineage.cold() && is_multiple(sequence.position, prefixes_->config().block_tokens);
  const std::lock_guard lock(mutex_);
  stats_.cached_tokens += sequence.n_cached;
}

Status Engine::read_prompts() {
  std::int64_t n_read = 0;
  for (;;) {
    SP_RETURN_IF_ERROR(admit());
    if (reading_.empty() || (n_read > 0 && n_read >= config_.prefill_budget)) return {};
    turn_ = turn_ < reading_.size() ? turn_ : 0;
    const auto place = reading_.begin() + static_cast<std::ptrdiff_t>(turn_);
    Sequence& sequence = **place;
    Status status = read_segment(sequence, &n_read);
    const bool at_end = status.ok() && sequence.position == sequence.n_prompt();
    if (at_end) status = end_prompt(sequence);
    if (status.ok() && !at_end) {
      ++turn_;
      continue;
    }
    std::unique_ptr<Sequence> taken = std::move(*place);
    reading_.erase(place);
    if (status.code() == Code::kInterrupted) {
      put_back(std::move(taken));
      return status;
    }
    if (!status.ok()) finish(sequence, FinishReason::kError, std::move(status), nullptr, {});
    if (!sequence.finished) running_.push_back(std::move(taken));
  }
}

Status Engine::read_segment(Sequence& sequence, std::int64_t* n_read) {
  const auto& prompt = sequence.request.prompt;
  const std::int64_t n_prompt = sequence.n_prompt();
  const std::int64_t period = pool_.scheme().scheme().prefill_period;
  const std::int64_t block = prefixes_ == nullptr ? 0 : prefixes_->config().block_tokens;
  const std::int64_t begin = sequence.position;
  const std::int64_t end = std::min({n_prompt, next_multiple(begin, kSegment),
                                     next_multiple(begin, period), next_multiple(begin, block)});
  const std::span<const std::int32_t> tokens(prompt.data() + begin,
                                             static_cast<std::size_t>(end - begin));
  SP_RETURN_IF_ERROR(model_.prefill(tokens, begin, *sequence.dense, *sequence.kv,
                                    end == n_prompt ? 1 : 0, logits_.data()));
  sequence.position = end;
  if (prefixes_ != nullptr) {
    sequence.lineage.extend(end, sequence.reads_as_cold ? Lineage::kCold : sequence.reader());
  }
  *n_read += end - begin;
  {
    const std::lock_guard lock(mutex_);
    stats_.prompt_tokens += end - begin;
  }
  if (end < n_prompt) {  // the end of the prompt is rounded by the hand-over
    if (is_multiple(end, block)) {
      SP_RETURN_IF_ERROR(end_block(sequence));
    } else if (is_multiple(end, period)) {
      SP_RETURN_IF_ERROR(round_dense(pool_, sequence.slot, *sequence.dense, threads_));
    }
  }
  if (sequence.request.progress && sequence.callback) sequence.callback(event_of(sequence));
  return {};
}

Status Engine::end_block(Sequence& sequence) {
  SP_RETURN_IF_ERROR(hand_over(pool_, sequence.slot, *sequence.dense, sequence.position, threads_));
  keep_prefix(sequence);
  return restore_dense(pool_, sequence.slot, *sequence.dense, threads_);
}

Status Engine::end_prompt(Sequence& sequence) {
  SP_RETURN_IF_ERROR(hand_over(pool_, sequence.slot, *sequence.dense, sequence.position, threads_));
  spare_dense_.push_back(std::move(sequence.dense));
  if (prefixes_ != nullptr) {
    const PrefixCacheConfig& config = prefixes_->config();
    if (config.mode == PrefixMode::kTurns || is_multiple(sequence.position, config.block_tokens)) {
      keep_prefix(sequence);
    }
  }
  // The first token comes from the prompt's own logits.
  const std::span<const float> row(logits_.data(), static_cast<std::size_t>(n_vocab_));
  deliver(sequence, sequence.sampler.sample(row, sequence.position, scratch_[0]));
  return {};
}

void Engine::keep_prefix(const Sequence& sequence) {
  const std::vector<std::int32_t> tokens = sequence.tokens_read();
  if (prefixes_->refresh(tokens)) return;
  Result<Snapshot> snapshot = pool_.snapshot(sequence.slot);
  if (!snapshot.ok()) return;  // a state that has become non-finite
  prefixes_->insert(tokens, sequence.lineage,
                    std::make_shared<const Snapshot>(std::move(*snapshot)),
                    [&](std::int64_t begin, std::int64_t end, std::byte* to) {
                      sequence.kv->copy_rows(begin, end, to);
                    });
}

void Engine::put_back(std::unique_ptr<Sequence> sequence) {
  release(*sequence);
  sequence->restart();
  const std::lock_guard lock(mutex_);
  waiting_.push_front(std::move(sequence));
}

Status Engine::decode() {
  // Without memory for one token a request ends, and not the batch.
  for (const auto& sequence : running_) {
    if (Status status = sequence->kv->reserve(sequence->position + 1); !status.ok()) {
      finish(*sequence, FinishReason::kError, std::move(status), nullptr, {});
    }
  }
  std::erase_if(running_, [](const auto& sequence) { return sequence->finished; });
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
  count_step();
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

void Engine::count_step() {
  std::int64_t n_flushed = 0;
  if (!pool_.scheme().layers().empty()) {
    const LayerState layer = pool_.layer(0);
    const auto* cursors = reinterpret_cast<const std::uint8_t*>(layer.cursors);
    n_flushed = std::count_if(batch_.begin(), batch_.end(), [&](const Sequence* sequence) {
      const auto* cursor =
          reinterpret_cast<const Cursor*>(cursors + sequence->slot * layer.cursor_stride);
      return cursor->fill == 0;
    });
  }
  const std::lock_guard lock(mutex_);
  ++stats_.decode_steps;
  stats_.decode_rows += std::ssize(batch_);
  stats_.flushes += n_flushed;
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
  if (!sequence.replying_since.has_value()) sequence.replying_since = Clock::now();
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
      finish(sequence, matched ? FinishReason::kStop : FinishReason::kLength, {}, &*choice, text);
    } else {
      finish(sequence, FinishReason::kLength, {}, &*choice, {});
    }
    return;
  }
  if (sequence.callback) {
    TokenEvent event = event_of(sequence);
    event.choice = &*choice;
    event.text = text;
    sequence.callback(event);
  }
}

void Engine::finish(Sequence& sequence, FinishReason reason, Status status, const Choice* choice,
                    const std::string& text) {
  SP_CHECK(!sequence.finished, "a request ends once");
  sequence.finished = true;
  if (prefixes_ != nullptr && sequence.slot != 0) {
    const bool has_turn = sequence.position > sequence.n_prompt() && reason != FinishReason::kError;
    if (has_turn && prefixes_->config().mode == PrefixMode::kTurns) {
      sequence.lineage.extend(sequence.position, sequence.reader());
      keep_prefix(sequence);
    }
    last_tokens_[static_cast<std::size_t>(sequence.slot - StatePool::kFirstValidSlot)] =
        sequence.tokens_read();
  }
  TokenEvent event = event_of(sequence);
  release(sequence);
  {
    const std::lock_guard lock(mutex_);
    ++stats_.finished[static_cast<std::size_t>(reason)];
  }
  if (!sequence.callback) return;
  event.choice = choice;
  event.text = text;
  event.finish = reason;
  event.status = std::move(status);
  sequence.callback(event);
}

void Engine::release(Sequence& sequence) {
  if (sequence.dense != nullptr) spare_dense_.push_back(std::move(sequence.dense));
  sequence.kv.reset();
  if (sequence.slot == 0) return;
  pool_.free(std::exchange(sequence.slot, 0));
  const std::lock_guard lock(mutex_);
  stats_.kv_bytes_reserved -= sequence.kv_bytes;
  --n_admitted_;
}

TokenEvent Engine::event_of(const Sequence& sequence) const {
  const Clock::time_point now = Clock::now();
  const Clock::time_point reading = sequence.reading_since.value_or(now);
  const Clock::time_point replying = sequence.replying_since.value_or(now);
  TokenEvent event;
  event.request = sequence.id;
  event.tokens = sequence.tokens;
  event.n_prompt = sequence.n_prompt();
  event.n_cached = sequence.n_cached;
  event.n_prompt_read = std::min(sequence.position, event.n_prompt);
  event.times = {seconds(reading - sequence.submitted), seconds(replying - reading),
                 seconds(now - replying)};
  return event;
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
