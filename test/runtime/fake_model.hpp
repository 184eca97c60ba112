// A model whose next token is a hash of all tokens before it: any mix-up of sequences, positions or
// caches changes the reply. It keeps no recurrent state of its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "model/model.hpp"

namespace statepack {

class FakeModel : public Model {
 public:
  static constexpr std::int32_t kEos = 1;
  static constexpr std::int32_t kPoison = 2;  ///< decoding it breaks the sequence's state
  static constexpr std::int64_t kVocab = 64;

  static constexpr std::int64_t kRowBytes = sizeof(std::int32_t);

  struct Cache : KvCache {
    std::vector<std::int32_t> tokens;
    std::int64_t n_tokens() const override { return std::ssize(tokens); }
    std::int64_t n_bytes() const override { return bytes_for(n_tokens()); }
    std::int64_t bytes_for(std::int64_t n) const override { return kRowBytes * n; }
    Status reserve(std::int64_t n) override {
      return n <= *max_tokens ? Status() : Status(Code::kExhausted, "no memory for the cache");
    }
    std::int64_t row_bytes() const override { return kRowBytes; }
    void copy_rows(std::int64_t begin, std::int64_t end, std::byte* to) const override {
      std::memcpy(to, tokens.data() + begin, static_cast<std::size_t>(kRowBytes * (end - begin)));
    }
    Status append_rows(std::int64_t n, std::span<const std::byte> rows) override {
      const auto end = tokens.size();
      tokens.resize(end + static_cast<std::size_t>(n));
      std::memcpy(tokens.data() + end, rows.data(), rows.size());
      return {};
    }
    void truncate(std::int64_t n) override { tokens.resize(static_cast<std::size_t>(n)); }

    const std::int64_t* max_tokens = nullptr;
  };

  FakeModel() {
    config_.vocab = kVocab;
    config_.max_position = 4096;
    config_.recurrent = {1, 1, 8, 8, Gate::kScalar};
    config_.layers = {{LayerKind::kGdn, false}};
    config_.eos_tokens = {kEos};
  }

  const ModelConfig& config() const override { return config_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  std::int64_t weight_bytes() const override { return 0; }
  std::unique_ptr<KvCache> new_kv_cache() const override {
    auto cache = std::make_unique<Cache>();
    cache->max_tokens = &max_cache_tokens;
    return cache;
  }
  DenseState new_dense_state() const override {
    return {std::vector<float>(64),
            std::vector<float>(static_cast<std::size_t>(config_.conv_floats()))};
  }

  Status prefill(std::span<const std::int32_t> tokens, std::int64_t position, DenseState& state,
                 KvCache& kv, int n_logits, float* logits, ChunkObserver*) override {
    if (fail_prefill) return {Code::kExhausted, "no memory for the cache"};
    auto& cache = static_cast<Cache&>(kv);
    if (position != cache.n_tokens()) return {Code::kInvalidArgument, "position mismatch"};
    prefills.emplace_back(position, std::ssize(tokens));
    if (keeps_state && !is_state_of(cache.tokens, state)) return {Code::kCorrupt, "state mix-up"};
    cache.tokens.insert(cache.tokens.end(), tokens.begin(), tokens.end());
    for (const std::int32_t t : tokens) state.S[0] += static_cast<float>(t);
    state.conv[0] = static_cast<float>(cache.tokens.back());
    if (n_logits == 1) write_logits(cache, logits);
    return {};
  }

  /// A row a slot, which is what the engine asks for: runs of tokens are refused.
  Status decode(StatePool& pool, std::span<const DecodeRow> rows, float* logits) override {
    if (fail_decode) return {Code::kIo, "the device is gone"};
    max_rows = std::max(max_rows, std::ssize(rows));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      auto& cache = static_cast<Cache&>(*rows[i].kv);
      if (rows[i].position != cache.n_tokens() || pool.n_tokens(rows[i].slot) != cache.n_tokens()) {
        return {Code::kInvalidArgument, "position mismatch"};
      }
      if (keeps_state) SP_RETURN_IF_ERROR(step_state(pool, rows[i], cache.tokens));
      cache.tokens.push_back(rows[i].token);
      float* row = logits + static_cast<std::int64_t>(i) * kVocab;
      write_logits(cache, row);
      if (rows[i].token != kPoison) continue;
      const LayerState layer = pool.layer(0);
      *reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::uint8_t*>(layer.faults) +
                                        rows[i].slot * layer.fault_stride) = 1;
      std::fill(row, row + kVocab, std::numeric_limits<float>::quiet_NaN());
    }
    return {};
  }

  void time_parts(PartTimes*) override {}

  std::vector<std::pair<std::int64_t, std::int64_t>> prefills;  ///< position, tokens of every call
  std::int64_t max_rows = 0;
  /// The state is the sum of all tokens, and its convolution history the last of them: both are
  /// checked against the cache at every call. For fp32 pools.
  bool keeps_state = false;
  std::int64_t max_cache_tokens = std::numeric_limits<std::int64_t>::max();
  bool fail_decode = false, fail_prefill = false;
  bool with_eos = true;
  std::int32_t poison_after = -1;  ///< the token after this one is kPoison

 private:
  static bool is_state_of(const std::vector<std::int32_t>& tokens, const DenseState& state) {
    const float sum = std::accumulate(tokens.begin(), tokens.end(), 0.0F);
    return state.S[0] == sum &&
           state.conv[0] == (tokens.empty() ? 0.0F : static_cast<float>(tokens.back()));
  }
  Status step_state(StatePool& pool, const DecodeRow& row,
                    const std::vector<std::int32_t>& tokens) {
    DenseState state = new_dense_state();
    SP_RETURN_IF_ERROR(restore_dense(pool, row.slot, state, one_thread_));
    if (!is_state_of(tokens, state)) return {Code::kCorrupt, "state mix-up"};
    state.S[0] += static_cast<float>(row.token);
    state.conv[0] = static_cast<float>(row.token);
    return hand_over(pool, row.slot, state, row.position, one_thread_);
  }
  void write_logits(const Cache& cache, float* logits) const {
    std::uint64_t h = 1469598103934665603ULL;
    for (const std::int32_t t : cache.tokens)
      h = (h ^ static_cast<std::uint64_t>(t)) * 1099511628211ULL;
    for (std::int64_t i = 0; i < kVocab; ++i) {
      logits[i] = static_cast<float>((h >> (i % 41)) % 1009) / 100;
    }
    logits[kEos] = with_eos && h % 19 == 0 ? 100 : -100;
    logits[kPoison] = cache.tokens.back() == poison_after ? 200 : -100;
  }

  ModelConfig config_;
  std::string fingerprint_ = "fake";
  ThreadPool one_thread_{1};
};

}  // namespace statepack
