// What the blocks of a layer have in common: how they are called, and what a forward pass gives
// them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.hpp"
#include "model/kv_cache.hpp"
#include "model/linear.hpp"
#include "model/part_clock.hpp"
#include "model/rope.hpp"
#include "model/scratch.hpp"

namespace statepack {

/// The tools of a forward pass, prefill or decode alike.
struct Pass {
  ThreadPool& threads;
  LinearRunner& linear;
  Scratch& scratch;
  const RopeTable& rope;  ///< a row of angles for each row of the pass
  PartClock& clock;       ///< whoever ends a part says so
  GemmPath path;
  int n_rows = 0;  ///< tokens of the segment, or rows of the batch
};

/// A stretch of one prompt.
struct Segment {
  std::int64_t position = 0;  ///< of its first token, which is also what the cache holds
  DenseState& state;
  PagedKvCache& kv;  ///< with room for the segment
  ChunkObserver* observer = nullptr;
  const float* residual = nullptr;  ///< [n_rows, hidden] what the mixers' results are added to
};

/// Rows of a batch that are consecutive tokens of one sequence.
struct RowRun {
  std::int64_t first = 0, n = 1;
  int group = 0;
};

/// One token or more of each of several sequences, group by group.
struct Batch {
  std::span<const DecodeGroup> groups;
  std::span<const RowRun> runs;  ///< all rows, in order
  std::int64_t longest_run = 1;
  std::span<const std::int64_t> slots;      ///< of the rows
  std::span<const std::int64_t> positions;  ///< of the rows
  std::span<PagedKvCache* const> kv;        ///< of the rows, with room for the token
  std::span<float* const> conv;             ///< history of the runs' slots, all layers
};

/// The runs in pieces of at most `n` rows.
std::vector<RowRun> cut_runs(std::span<const RowRun> runs, std::int64_t n);

/// The normed input of a block, [n_rows, hidden]. Its rows are not there before `make` has written
/// them, which the block's first linear layers call on it (LinearRunner::run).
struct BlockInput {
  const float* x = nullptr;
  const RowMaker& make;
};

/// Token mixer of one layer: y [n_rows, hidden] is its result.
class Mixer {
 public:
  virtual ~Mixer() = default;
  virtual void prefill(const Pass& pass, const Segment& segment, const BlockInput& in,
                       float* y) = 0;
  virtual Status decode(const Pass& pass, const Batch& batch, const BlockInput& in, float* y) = 0;
};

/// Feed-forward part of one layer, the same for prompts and batches.
class FeedForward {
 public:
  virtual ~FeedForward() = default;
  virtual void run(const Pass& pass, const BlockInput& in, float* y) = 0;
};

}  // namespace statepack
