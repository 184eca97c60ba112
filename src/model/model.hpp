// A loaded hybrid model on the CPU: prompts into dense states, tokens through packed ones.
//
// Weights stay as the checkpoint stores them (bf16 mapped from the file); every activation is f32.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"
#include "delta/prefill.hpp"
#include "model/config.hpp"
#include "pool/pool.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// Attention cache of one sequence: f32, all attention layers, grown by blocks of 256 tokens.
class KvCache {
 public:
  virtual ~KvCache() = default;
  virtual std::int64_t n_tokens() const = 0;
  virtual std::int64_t n_bytes() const = 0;  ///< allocated
  /// Forgets tokens from `n_tokens` on.
  virtual void truncate(std::int64_t n_tokens) = 0;
};

/// Dense f32 recurrent state of one sequence while its prompt is read.
struct DenseState {
  std::vector<float> S;     ///< [n recurrent layers][HV][K][V]
  std::vector<float> conv;  ///< conv_floats(): [n recurrent layers][channels][3], oldest first
};

struct DecodeRow {
  std::int64_t slot = 0;  ///< of the pool
  KvCache* kv = nullptr;
  std::int32_t token = 0;
  std::int64_t position = 0;
};

class Model {
 public:
  /// Maps and checks a checkpoint folder. `threads` must outlive the model; all work runs on it.
  static Result<std::unique_ptr<Model>> load(const std::string& dir, ThreadPool& threads);
  virtual ~Model() = default;

  virtual const ModelConfig& config() const = 0;
  virtual const std::string& fingerprint() const = 0;  ///< of the content: config and weights
  virtual std::int64_t weight_bytes() const = 0;
  virtual std::unique_ptr<KvCache> new_kv_cache() const = 0;
  virtual DenseState new_dense_state() const = 0;  ///< zeros

  /// Reads tokens[T] at `position` (= kv.n_tokens()), advancing state and cache. `logits` receives
  /// the last `n_logits` positions' logits [n_logits, vocab]; n_logits <= T, may be 0.
  /// Deterministic; the result does not depend on threads. Internally works in segments of at most
  /// 512 tokens. Errors: kInvalidArgument (token out of range, position mismatch), kInterrupted.
  virtual Status prefill(std::span<const std::int32_t> tokens, std::int64_t position,
                         DenseState& state, KvCache& kv, int n_logits, float* logits,
                         ChunkObserver* observer = nullptr) = 0;

  /// One token for every row through the packed states of `pool`; logits [B, vocab]. Every row's
  /// result is bit-equal to the row alone, whatever B and the threads. Convolution history is read
  /// and written in the pool; the caller advances pool.set_n_tokens. A quarantined row gets NaN
  /// logits. Errors: as step().
  virtual Status decode(StatePool& pool, std::span<const DecodeRow> rows, float* logits) = 0;
};

/// Hand-over of a prompt's dense state into a slot: conv history, pages, token count.
Status hand_over(StatePool& pool, std::int64_t slot, const DenseState& state, std::int64_t n_tokens,
                 ThreadPool& threads);

/// Rounds a dense state through the pool's codec in place (PACE's prefill rule): uses `slot`'s
/// pages as scratch.
Status round_dense(StatePool& pool, std::int64_t slot, DenseState& state, ThreadPool& threads);

}  // namespace statepack
