// The slots of pool/pool.hpp in device memory.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "delta/cuda/device.hpp"
#include "pool/pool.hpp"

namespace statepack::cuda {

struct DevicePoolConfig {
  std::int64_t n_slots = 0;      ///< usable slots, numbered 1..n_slots; slot 0 is the sentinel
  std::int64_t conv_floats = 0;  ///< f32 of short-convolution history a slot, all layers
  int max_rows = 0;              ///< most rows of a step or slots of a flush
};

/// Fixed memory on the current device, allocated once. A slot lies there as it does in a StatePool,
/// byte for byte, so snapshots move between the two.
///
/// step(), flush(), hand_over() and restore_dense() of kernels() queue work on a stream. All of one
/// pool's share workspace(), so they must be ordered, by one stream or by events. The calls here
/// instead wait until the current device, which must be the pool's, is idle, because they look at
/// what that work left. They may run in several threads; a slot's contents belong to whoever holds
/// it.
class DevicePool {
 public:
  /// Errors: kExhausted, and kUnsupported for a scheme or shape without kernels.
  static Result<std::unique_ptr<DevicePool>> create(std::shared_ptr<const CompiledScheme> scheme,
                                                    const DevicePoolConfig& config);

  const CompiledScheme& scheme() const { return staging_->scheme(); }
  std::int64_t n_slots() const { return n_slots_; }
  std::int64_t n_free() const;
  std::int64_t bytes_per_slot() const { return slot_bytes_; }
  std::int64_t bytes_allocated() const { return static_cast<std::int64_t>(memory_.size()); }
  std::int64_t nonfinite_total() const;  ///< slots given back in quarantine so far

  /// A slot with everything zeroed. Errors: kExhausted.
  Result<std::int64_t> alloc();
  /// Gives a slot back and ends its quarantine. Errors: kInvalidArgument for a slot that does not
  /// exist or is free already.
  Status try_free(std::int64_t slot);
  /// Errors: kInvalidArgument for a slot that does not exist.
  Result<SlotState> state(std::int64_t slot) const;
  /// Errors: kInvalidArgument for a slot that does not exist or is free. Does not wait.
  Status need_used(std::int64_t slot) const;

  const DeviceLayer& kernels(int recurrent_layer) const {
    return *layers_[static_cast<std::size_t>(recurrent_layer)];
  }
  PoolView layer(int recurrent_layer) const;
  const Workspace& workspace() const { return work_; }
  /// conv_floats f32 of a slot, on the device.
  float* conv(std::int64_t slot) const;

  /// Tokens read so far, kept with the slot. Errors: kInvalidArgument.
  Result<std::int64_t> n_tokens(std::int64_t slot) const;
  Status set_n_tokens(std::int64_t slot, std::int64_t n_tokens);

  /// Everything that a slot owns. Errors: kInvalidArgument, kNotFinite for a quarantined slot.
  Status copy(std::int64_t from, std::int64_t to);
  /// As StatePool::snapshot() and StatePool::restore(), of either kind of pool.
  Result<Snapshot> snapshot(std::int64_t slot, bool with_window = true) const;
  Status restore(std::int64_t slot, std::span<const std::byte> snapshot);

 private:
  DevicePool() = default;
  Status check_used(std::int64_t slot) const;  // needs the lock
  std::uint8_t* slot_at(std::int64_t slot) const { return memory_.data() + slot * slot_bytes_; }
  /// The slot's bytes into the staging slot, whatever they are. Needs the lock.
  Status fetch(std::int64_t slot) const;

  std::int64_t n_slots_ = 0, slot_bytes_ = 0, n_quarantined_ = 0;
  std::unique_ptr<StatePool> staging_;  // one slot on the host, which knows the snapshot format
  std::int64_t staging_slot_ = 0;
  DeviceBytes memory_;
  std::vector<std::unique_ptr<DeviceLayer>> layers_;
  Workspace work_;

  mutable std::mutex mutex_;  // guards the staging slot and what follows
  std::vector<std::int64_t> free_;
  std::vector<bool> used_;  // [n_slots + 1]
};

}  // namespace statepack::cuda
