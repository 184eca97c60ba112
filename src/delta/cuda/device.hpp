// The delta rule on an NVIDIA GPU (compute capability 8.0 and later): delta/step.hpp for slots in
// device memory.
//
// Every call queues kernels on a stream and returns. Nothing is allocated, nothing waits and the
// host looks at no result, so calls can be captured in a CUDA graph: slots, cursors and which
// windows are complete are read on the device at every replay.
//
// Pages and windows are byte for byte those of the CPU: bytes of a slot that the CPU wrote may be
// copied to the device and back. Numbers agree to rounding: sums run in another fixed order.
#pragma once

#include <memory>

#include "delta/cuda/memory.hpp"
#include "delta/cuda/view.hpp"

namespace statepack::cuda {

/// Bookkeeping between the launches of a step, for batches of up to max_rows rows. Calls that share
/// one must be ordered by a stream or a graph.
class Workspace {
 public:
  /// Errors: kExhausted, kInvalidArgument (1 to 65535 rows).
  static Result<Workspace> make(int max_rows);
  int max_rows() const { return max_rows_; }
  WorkView view() const;

 private:
  int max_rows_ = 0;
  DeviceBytes memory_;
};

/// One layer of a compiled scheme on the current device. Immutable.
class DeviceLayer {
 public:
  /// Errors: kUnsupported for what no kernel knows: a codec or option without a page map; K or V
  /// that is no multiple of 16 or above 128, or V above 2 K; windows of more than 32 records; mode
  /// v; a device before compute capability 8.0.
  static Result<std::unique_ptr<DeviceLayer>> make(const CompiledLayer& layer,
                                                   const Scheme& scheme);
  ~DeviceLayer();

  /// One token of every row, and the rounding of windows that become complete, as statepack::step()
  /// has it: every result is independent of the other rows, of B and of slot numbers, bit for bit.
  ///
  /// What the CPU refuses cannot be refused here, where nobody waits: a row whose slot does not
  /// exist gets NaN output and touches nothing; two rows that write one slot, or one that writes
  /// what another reads, are the caller's fault and leave that slot undefined.
  ///
  /// A head whose values are not finite (32 columns of it, where pages are plain values and period
  /// is 1) quarantines the slot (fault word 1), gives NaN output and writes nothing. Of its row's
  /// other heads, those that did not see the fault word give their numbers in that step; from the
  /// next step on all give NaN. Heads neither wait for one another nor undo: while a window is
  /// open, page, cursor and the records below it stay as they were, but where the page is rewritten
  /// other heads may have written theirs. The fault word keeps all of them from being read until
  /// the slot is freed.
  ///
  /// Errors: kInvalidArgument (more rows than the workspace holds, a missing pointer), kUnsupported
  /// (the launch failed).
  Status step(const PoolView& pool, const TokenView& token, const Workspace& work,
              void* stream) const;

  /// Rounds the open windows of `n` slots (int64, on the device) now, as statepack::flush().
  Status flush(const PoolView& pool, const std::int64_t* slots, int n, const Workspace& work,
               void* stream) const;

  /// Dense f32 states S [HV][K][V] on the device become the page of a slot, as
  /// statepack::hand_over(). A state that is not finite quarantines the slot.
  Status hand_over(const PoolView& pool, std::int64_t slot, const float* S, std::int64_t n_tokens,
                   const Workspace& work, void* stream) const;

  /// The reverse: the state that the next token will see, or NaN for a quarantined slot.
  Status restore_dense(const PoolView& pool, std::int64_t slot, float* S, const Workspace& work,
                       void* stream) const;

  const LayerView& view() const;

 private:
  struct Impl;
  explicit DeviceLayer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace statepack::cuda
