// A loaded hybrid model on the CPU: prompts into dense states, tokens through packed ones.
//
// Weights stay as the checkpoint stores them (bf16 mapped from the file), but for a copy in the
// order of a matrix unit where there is one (model/weights.hpp); every activation is f32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.hpp"
#include "delta/prefill.hpp"
#include "model/config.hpp"
#include "model/part_clock.hpp"
#include "pool/pool.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// Attention cache of one sequence: f32, all attention layers, grown by blocks of 256 tokens.
class KvCache {
 public:
  virtual ~KvCache() = default;
  virtual std::int64_t n_tokens() const = 0;
  virtual std::int64_t n_bytes() const = 0;  ///< allocated
  /// Allocated for `n_tokens` tokens.
  virtual std::int64_t bytes_for(std::int64_t n_tokens) const = 0;
  /// Memory for tokens up to `n_tokens`, so that reading them cannot fail for want of it. Errors:
  /// kExhausted.
  virtual Status reserve(std::int64_t n_tokens) = 0;
  virtual std::int64_t row_bytes() const = 0;  ///< of one token's rows, all layers
  /// Writes the rows of tokens [begin, end), token by token, to `to`: (end - begin) * row_bytes().
  virtual void copy_rows(std::int64_t begin, std::int64_t end, std::byte* to) const = 0;
  /// Appends `n_tokens` tokens by their rows, as copy_rows() wrote them. Errors: kInvalidArgument
  /// (rows of another size), kExhausted; nothing changes.
  virtual Status append_rows(std::int64_t n_tokens, std::span<const std::byte> rows) = 0;
  /// Forgets tokens from `n_tokens` on.
  virtual void truncate(std::int64_t n_tokens) = 0;
};

/// Dense f32 recurrent state of one sequence while its prompt is read.
struct DenseState {
  std::vector<float> S;  ///< [n recurrent layers][HV][K][V]
  /// conv_floats(): [n recurrent layers][conv_kernel - 1][channels], oldest first; the same layout
  /// as StatePool::conv(). Time outside, so that a token's channels are one vector.
  std::vector<float> conv;
};

struct DecodeRow {
  std::int64_t slot = 0;  ///< of the pool
  KvCache* kv = nullptr;
  std::int32_t token = 0;
  std::int64_t position = 0;
};

/// Rows whose states lie in one pool. Rows of one slot stand together, at positions that follow one
/// another: a run of tokens that are known already, as in forced decoding.
struct DecodeGroup {
  StatePool* pool = nullptr;
  std::span<const DecodeRow> rows;
};

/// One caller at a time: a forward pass uses the model's own scratch memory and all of its threads.
class Model {
 public:
  /// Maps and checks a checkpoint folder: every tensor that the model uses is there, of the right
  /// shape, F32, F16 or BF16, and finite (of checkpoints above 32 GiB only samples are read for
  /// that). Errors: as ModelConfig::load() and Checkpoint::open(); kNotFound, kMismatch,
  /// kUnsupported, kNotFinite naming the tensor. `threads` must outlive the model; all work runs on
  /// it. `spare_bytes` are what the caller is going to allocate beside the model: copies of weights
  /// are made only where they leave that free.
  static Result<std::unique_ptr<Model>> load(const std::string& dir, ThreadPool& threads,
                                             std::int64_t spare_bytes = 0);
  virtual ~Model() = default;

  virtual const ModelConfig& config() const = 0;
  virtual const std::string& fingerprint() const = 0;  ///< of the content: config and weights
  virtual std::int64_t weight_bytes() const = 0;       ///< of the tensors in use and their copies
  virtual std::unique_ptr<KvCache> new_kv_cache() const = 0;
  virtual DenseState new_dense_state() const = 0;  ///< zeros

  /// Reads tokens[T] at `position` (= kv.n_tokens()), advancing state and cache. `logits` receives
  /// the last `n_logits` positions' logits [n_logits, vocab]; n_logits <= T, may be 0.
  /// Deterministic; the result does not depend on threads. Internally works in segments of at most
  /// 512 tokens.
  /// Errors: kInvalidArgument (token out of range, position mismatch, a state or cache of another
  /// model) with nothing changed; kInterrupted or kExhausted between segments, after which state
  /// and cache must be thrown away.
  virtual Status prefill(std::span<const std::int32_t> tokens, std::int64_t position,
                         DenseState& state, KvCache& kv, int n_logits, float* logits,
                         ChunkObserver* observer = nullptr) = 0;

  /// One token for every row through the packed states of `pool`; logits [B, vocab]. Every row's
  /// result is bit-equal to the row alone, whatever B and the threads; a run of rows of one slot
  /// gives the bits of as many calls while all values are finite, and reads weights and attention
  /// cache once. Convolution
  /// history is read and written in the pool; the caller advances pool.set_n_tokens. A quarantined
  /// row gets NaN logits, with its whole run, and its slot is not written; its cache grows like the
  /// others'.
  /// Errors: kInvalidArgument (token, slot, position, a slot or cache in two runs), kMismatch (a
  /// pool of another model), kExhausted (no memory for the caches); nothing is changed.
  virtual Status decode(StatePool& pool, std::span<const DecodeRow> rows, float* logits) = 0;
  /// The same over several pools at once, so that states of several schemes share the passes over
  /// the weights; logits [all rows, vocab], group by group. A pool may be in one group only.
  virtual Status decode_groups(std::span<const DecodeGroup> groups, float* logits);

  /// From the next pass on, prefill() and decode() add the time that they spend in each part to
  /// *times, which must live until this is called again; null ends it.
  virtual void time_parts(PartTimes* times) = 0;
};

/// Hand-over of a prompt's dense state into a slot: conv history, pages, token count. Errors:
/// kMismatch (sizes of another model), kInvalidArgument (slot), kNotFinite (the slot is
/// quarantined).
Status hand_over(StatePool& pool, std::int64_t slot, const DenseState& state, std::int64_t n_tokens,
                 ThreadPool& threads);

/// The reverse of hand_over(): the state that a slot's next token would see, page and window
/// together, and its convolution history, as a dense state. The slot does not change. Errors: as
/// hand_over().
Status restore_dense(StatePool& pool, std::int64_t slot, DenseState& state, ThreadPool& threads);

/// Rounds a dense state through the pool's codec in place (PACE's prefill rule): uses `slot`'s
/// pages as scratch. Errors: as hand_over().
Status round_dense(StatePool& pool, std::int64_t slot, DenseState& state, ThreadPool& threads);

}  // namespace statepack
