#include "runtime/decode_bench.hpp"

#include <fmt/format.h>

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/hash.hpp"

namespace statepack {
namespace {

using Clock = std::chrono::steady_clock;

// Rounds over which the sequences join: twice the period of the usual windows.
constexpr std::int64_t kJoinRounds = 32;

// Processor time of all threads of this process.
std::int64_t cpu_now_ns() {
  timespec t{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return std::int64_t{1'000'000'000} * t.tv_sec + t.tv_nsec;
}

// Different in every sequence, and without the ids at the vocabulary's end, which are special.
std::vector<std::int32_t> prompt_of(std::int64_t sequence, std::int64_t n, std::int64_t vocab) {
  std::vector<std::int32_t> tokens;
  const std::int64_t range = std::max<std::int64_t>(1, vocab / 2);
  for (std::int64_t i = 0; i < n; ++i) {
    tokens.push_back(static_cast<std::int32_t>((sequence * 7919 + i * 104729 + 11) % range));
  }
  return tokens;
}

}  // namespace

std::int64_t percentile(std::vector<std::int64_t> values, double p) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double rank = p / 100 * static_cast<double>(values.size() - 1);
  return values[static_cast<std::size_t>(std::lround(rank))];
}

Result<std::unique_ptr<DecodeBench>> DecodeBench::create(
    Model& model, std::shared_ptr<const CompiledScheme> scheme, ThreadPool& threads,
    const DecodeBenchConfig& config) {
  if (config.n_sequences < 1 || config.n_prompt < 1) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{} sequences with prompts of {} tokens; both must be 1 or more",
                              config.n_sequences, config.n_prompt));
  }
  std::unique_ptr<DecodeBench> bench(new DecodeBench(model, std::move(scheme), config));
  SP_RETURN_IF_ERROR(bench->fill(threads));
  return bench;
}

Status DecodeBench::fill(ThreadPool& threads) {
  PoolConfig pool;
  pool.n_slots = config_.n_sequences;
  pool.conv_floats = model_.config().conv_floats();
  SP_ASSIGN_OR_RETURN(pool_, StatePool::create(scheme_, pool));
  EngineConfig engine;
  engine.max_batch = config_.n_sequences;
  engine.prefill_budget =
      config_.n_prompt * ((config_.n_sequences + kJoinRounds - 1) / kJoinRounds);
  SP_ASSIGN_OR_RETURN(engine_, Engine::create(model_, *pool_, threads, nullptr, engine));
  first_tokens_.resize(static_cast<std::size_t>(config_.n_sequences));
  for (std::int64_t i = 0; i < config_.n_sequences; ++i) {
    Request request;
    request.prompt = prompt_of(i, config_.n_prompt, model_.config().vocab);
    request.params.ignore_eos = true;
    request.params.max_tokens = engine_->max_context();
    std::vector<std::int32_t>* const first = &first_tokens_[static_cast<std::size_t>(i)];
    const Result<RequestId> id =
        engine_->submit(std::move(request), [this, first](const TokenEvent& event) {
          if (failure_.ok() && event.finish.has_value()) failure_ = event.status;
          if (event.choice == nullptr || std::ssize(*first) == kDigestTokens) return;
          first->push_back(event.choice->token);
        });
    if (!id.ok()) return id.status();
  }
  while (engine_->stats().prompt_tokens < config_.n_sequences * config_.n_prompt) {
    SP_RETURN_IF_ERROR(engine_->step());
    SP_RETURN_IF_ERROR(failure_);  // a prompt that could not be read would be waited for
  }
  return engine_->step();  // what only the first full step does, such as growing scratch memory
}

Status DecodeBench::step() {
  SP_RETURN_IF_ERROR(failure_);
  if (engine_->stats().n_running < config_.n_sequences) {
    return {Code::kExhausted,
            fmt::format("a sequence ended before the last step: the context of {} tokens is full",
                        engine_->max_context())};
  }
  model_.time_parts(&part_ns_);
  const std::int64_t cpu_start = cpu_now_ns();
  const Clock::time_point start = Clock::now();
  Status status = engine_->step();
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
  cpu_ns_ += cpu_now_ns() - cpu_start;
  model_.time_parts(nullptr);
  SP_RETURN_IF_ERROR(status);
  step_ns_.push_back(ns.count());
  return {};
}

DecodeFigures DecodeBench::figures() const {
  DecodeFigures f;
  const SchemeBits bits = scheme_->bits();
  f.n_steps = std::ssize(step_ns_);
  f.total_ns = std::accumulate(step_ns_.begin(), step_ns_.end(), std::int64_t{0});
  if (f.total_ns > 0) {
    f.tokens_per_s = 1e9 * static_cast<double>(config_.n_sequences * f.n_steps) /
                     static_cast<double>(f.total_ns);
  }
  if (f.n_steps > 0) f.cpu_us = static_cast<double>(cpu_ns_) / 1e3 / static_cast<double>(f.n_steps);
  f.p50_us = static_cast<double>(percentile(step_ns_, 50)) / 1e3;
  f.p95_us = static_cast<double>(percentile(step_ns_, 95)) / 1e3;
  f.part_ns = part_ns_;
  f.other_ns = f.total_ns - std::accumulate(part_ns_.begin(), part_ns_.end(), std::int64_t{0});
  f.payload_bytes = bits.page_bytes;
  f.resident_bytes = bits.page_bytes + bits.window_bytes + bits.cursor_bytes;
  f.pool_bytes = pool_->bytes_allocated();
  std::vector<std::int32_t> tokens;
  for (const auto& first : first_tokens_) tokens.insert(tokens.end(), first.begin(), first.end());
  f.digest = to_hex(xxh3_128(std::as_bytes(std::span(tokens))));
  return f;
}

}  // namespace statepack
