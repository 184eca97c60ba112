#include "serve/backend.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/file.hpp"
#include "model/outside_json.hpp"
#include "runtime/sizing.hpp"
#include "serve/json.hpp"

namespace statepack::serve {
namespace {

constexpr std::int64_t kDefaultSeqs = 64;
constexpr std::int64_t kMaxDefaultSeqs = 256;

Status wrong(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }

}  // namespace

Backend::~Backend() = default;

Result<std::unique_ptr<Backend>> Backend::plan(const BackendOptions& options) {
  std::unique_ptr<Backend> backend(new Backend);
  backend->options_ = options;
  SP_ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::load(options.model));
  SP_ASSIGN_OR_RETURN(const Scheme scheme, Scheme::parse(options.state));
  SP_ASSIGN_OR_RETURN(backend->plans_, PlanLibrary::open(options.model, options.plans));
  // Without the model's fingerprint, which is that of its weights: load() compares it.
  SP_ASSIGN_OR_RETURN(const auto compiled,
                      backend->plans_.compile(scheme, config.recurrent_shapes(), ""));
  SP_RETURN_IF_ERROR(backend->decide_sizes(config, *compiled));
  SP_RETURN_IF_ERROR(backend->read_defaults());
  // Untouched memory costs nothing, so the real pool can be tried here and made again by load().
  PoolConfig pool;
  pool.n_slots = backend->summary_.n_slots;
  pool.conv_floats = config.conv_floats();
  SP_ASSIGN_OR_RETURN(const auto tried, StatePool::create(compiled, pool));
  SP_RETURN_IF_ERROR(backend->check_prefix_bytes(*tried));
  return backend;
}

Status Backend::check_prefix_bytes(StatePool& pool) const {
  const PrefixCacheConfig& config = options_.prefix_cache;
  if (config.mode == PrefixMode::kOff) return {};
  SP_ASSIGN_OR_RETURN(const std::int64_t slot, pool.alloc());
  SP_ASSIGN_OR_RETURN(const Snapshot smallest, pool.snapshot(slot));
  const std::int64_t n_state = std::ssize(smallest.bytes);
  const auto refusal = [&](std::string_view option, std::int64_t n_given, std::int64_t n_enough) {
    return wrong(
        fmt::format("{} {} keeps nothing: a state takes {} bytes or more in {}; pass {} "
                    "or more, or --prefix-cache off",
                    option, n_given, n_state, summary_.scheme, n_enough));
  };
  // Twice a slot: also with an open window, and one state while the next is made.
  const std::int64_t n_enough = 2 * summary_.bytes_per_slot;
  if (config.max_state_bytes > 0 && config.max_state_bytes < n_state) {
    return refusal("--prefix-cache-state-bytes", config.max_state_bytes, n_enough);
  }
  if (config.max_bytes < n_state) {
    return refusal("--prefix-cache-bytes", config.max_bytes,
                   n_enough + config.block_tokens * summary_.kv_bytes_per_token);
  }
  return {};
}

Status Backend::decide_sizes(const ModelConfig& config, const CompiledScheme& scheme) {
  const BackendOptions& o = options_;
  StateSummary& s = summary_;
  const SchemeBits bits = scheme.bits();
  s.scheme = scheme.scheme().name();
  s.payload_bits = bits.payload;
  s.resident_bits = bits.resident;
  s.bytes_per_slot = StatePool::bytes_per_slot(scheme, config.conv_floats());
  s.kv_bytes_per_token = config.kv_bytes_per_token();

  s.max_context = o.max_context > 0 ? o.max_context : config.max_position;
  if (s.max_context > config.max_position) {
    return wrong(
        fmt::format("--max-model-len {} is more than the {} tokens that the model was made "
                    "for; pass {} or less",
                    s.max_context, config.max_position, config.max_position));
  }
  if (o.prefix_cache.mode == PrefixMode::kOff && !o.prefix_folder.empty()) {
    return wrong("--prefix-cache-path needs a prefix cache; pass --prefix-cache blocks or turns");
  }
  s.n_slots = o.pool_slots;
  if (o.pool_bytes > 0) {
    const std::int64_t fit = o.pool_bytes / s.bytes_per_slot - 1;  // one is the sentinel
    if (fit < 1) {
      return wrong(
          fmt::format("--state-pool-bytes {} holds no slot: one takes {} bytes in {}, and "
                      "the pool needs one more; pass {} or more",
                      o.pool_bytes, s.bytes_per_slot, s.scheme, 2 * s.bytes_per_slot));
    }
    if (o.pool_slots > fit) {
      return wrong(
          fmt::format("--state-pool-slots {} does not fit into --state-pool-bytes {}: {} "
                      "slots of {} bytes do",
                      o.pool_slots, o.pool_bytes, fit, s.bytes_per_slot));
    }
    if (s.n_slots == 0) s.n_slots = fit;
  }
  if (s.n_slots == 0) s.n_slots = o.max_seqs > 0 ? o.max_seqs : kDefaultSeqs;
  s.max_seqs = o.max_seqs > 0 ? o.max_seqs : std::min(s.n_slots, kMaxDefaultSeqs);
  if (s.max_seqs > s.n_slots) {
    return wrong(fmt::format(
        "--max-num-seqs {} needs as many state slots, and the pool has {} of {} bytes; pass "
        "--max-num-seqs {} or a larger pool",
        s.max_seqs, s.n_slots, s.bytes_per_slot, s.n_slots));
  }
  const std::int64_t longest = s.kv_bytes_per_token * s.max_context;
  if (o.kv_bytes > 0 && longest > o.kv_bytes) {
    return wrong(fmt::format(
        "--kv-cache-bytes {} is less than the {} bytes of one sequence of {} tokens; pass more, or "
        "--max-model-len {}",
        o.kv_bytes, longest, s.max_context, o.kv_bytes / s.kv_bytes_per_token));
  }
  return {};
}

Status Backend::read_defaults() {
  defaults_ = {};
  defaults_.temperature = 1;  // OpenAI's
  const std::string path =
      (std::filesystem::path(options_.model) / "generation_config.json").string();
  if (!std::filesystem::exists(path)) return {};
  SP_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, std::size_t{1} << 20));
  SP_ASSIGN_OR_RETURN(const Json json, parse_outside_json<Json>(text, path));
  if (!json.is_object()) return {Code::kCorrupt, path + ": is no object"};
  Fields fields(json);
  bool sample = true;
  std::int64_t top_k = 0;
  fields.read("do_sample", &sample);
  fields.read("temperature", &defaults_.temperature, 0, 100);
  fields.read("top_k", &top_k, 0, 1 << 30);
  fields.read("top_p", &defaults_.top_p, 0, 1);
  fields.read("min_p", &defaults_.min_p, 0, 1);
  fields.read("repetition_penalty", &defaults_.repetition_penalty, 0, 100);
  if (!fields.ok()) return {Code::kCorrupt, path + ": " + fields.error()->message};
  defaults_.top_k = static_cast<int>(top_k);
  if (!sample) defaults_.temperature = 0;
  return {};
}

Status Backend::load() {
  threads_ = std::make_unique<ThreadPool>(options_.threads);
  // The pool that plan() tried is made behind the weights, and must still find its memory.
  const std::int64_t pool_bytes = (summary_.n_slots + 1) * summary_.bytes_per_slot;
  SP_ASSIGN_OR_RETURN(model_, Model::load(options_.model, *threads_, pool_bytes));
  SP_ASSIGN_OR_RETURN(tokenizer_, Tokenizer::load(options_.model));
  for (std::int32_t id = 0; id < tokenizer_->n_tokens(); ++id) {
    longest_token_bytes_ =
        std::max<std::int64_t>(longest_token_bytes_, std::ssize(tokenizer_->token_bytes(id)));
  }
  Result<std::unique_ptr<ChatTemplate>> chat_template = ChatTemplate::load(options_.model);
  if (chat_template.ok()) {
    chat_template_ = std::move(chat_template).value();
  } else if (chat_template.status().code() != Code::kNotFound) {
    return chat_template.status();
  }
  SP_ASSIGN_OR_RETURN(const Scheme scheme, Scheme::parse(options_.state));
  SP_ASSIGN_OR_RETURN(
      const auto compiled,
      plans_.compile(scheme, model_->config().recurrent_shapes(), model_->fingerprint()));
  PoolConfig pool;
  pool.n_slots = summary_.n_slots;
  pool.conv_floats = model_->config().conv_floats();
  SP_ASSIGN_OR_RETURN(pool_, StatePool::create(compiled, pool));
  EngineConfig engine;
  engine.max_batch = summary_.max_seqs;
  engine.max_queue = options_.max_queue;
  engine.max_context = summary_.max_context;
  engine.kv_bytes = options_.kv_bytes;
  engine.prefix_cache = options_.prefix_cache;
  SP_ASSIGN_OR_RETURN(engine_,
                      Engine::create(*model_, *pool_, *threads_, tokenizer_.get(), engine));
  if (!options_.prefix_folder.empty() && std::filesystem::exists(options_.prefix_folder)) {
    std::vector<Status> skipped;
    SP_ASSIGN_OR_RETURN(const SavedPrefix loaded,
                        engine_->load_prefixes(options_.prefix_folder, &skipped));
    for (const Status& status : skipped) spdlog::warn("passed over: {}", status.message());
    spdlog::info("prefix cache: {} tokens in {} snapshots read from {}", loaded.n_tokens,
                 loaded.n_snapshots, options_.prefix_folder);
  }
  loop_ = std::make_unique<EngineLoop>(*engine_);
  ready_.store(true, std::memory_order_release);
  return {};
}

bool Backend::close(std::chrono::steady_clock::time_point deadline) {
  if (!ready() || std::exchange(closed_, true)) return true;
  const bool all = loop_->drain(deadline);
  loop_->stop();
  if (!options_.prefix_folder.empty()) {
    const Result<SavedPrefix> saved = engine_->save_prefixes(options_.prefix_folder);
    if (saved.ok()) {
      spdlog::info("prefix cache: {} tokens in {} snapshots written to {}", saved->n_tokens,
                   saved->n_snapshots, options_.prefix_folder);
    } else {
      spdlog::error("the prefix cache was not kept: {}", saved.status().message());
    }
  }
  return all;
}

}  // namespace statepack::serve
