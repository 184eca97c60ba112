// Slots: all that running sequences own of recurrent state, allocated once.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "delta/step.hpp"
#include "scheme/layers.hpp"

namespace statepack {

/// An immutable copy of a slot: prefix-cache entry, save file, migration capsule. Bytes carry
/// scheme, plan and model fingerprints, token count, valid flag, cursors and a checksum per
/// section.
struct Snapshot {
  std::vector<std::byte> bytes;
  std::int64_t n_tokens = 0;
  bool from_file = false;  ///< nobody here has seen its values: they may not be finite
};

/// What a snapshot's bytes say about themselves.
struct SnapshotInfo {
  std::string scheme;  ///< with all options
  std::string plan_fingerprint, model_fingerprint;
  std::int64_t n_tokens = 0;
  std::vector<LayerShape> shapes;
  std::int64_t page_bytes = 0, cursor_bytes = 0, window_bytes = 0, conv_bytes = 0;
};
/// Reads the header and checks every checksum; needs no pool. Errors: kCorrupt, kUnsupported.
Result<SnapshotInfo> read_snapshot_info(std::span<const std::byte> snapshot);

struct PoolConfig {
  std::int64_t n_slots = 0;      ///< usable slots, numbered 1..n_slots; slot 0 is the sentinel
  std::int64_t conv_floats = 0;  ///< values of short-convolution history a slot, all layers
  /// Most bytes the pool may take; 0: what the machine has left (free memory, control group).
  std::int64_t max_bytes = 0;
};

enum class SlotState : std::uint8_t { kFree, kUsed, kQuarantined };

/// Fixed memory: n_slots + 1 slots, allocated by create() and never again. Thread-safe alloc and
/// free; a slot's contents belong to whoever holds it.
class StatePool {
 public:
  static constexpr std::int64_t kFirstValidSlot = 1;
  /// Errors: kExhausted naming the bytes wanted and the number of slots that would fit.
  static Result<std::unique_ptr<StatePool>> create(std::shared_ptr<const CompiledScheme> scheme,
                                                   const PoolConfig& config);
  ~StatePool();

  const CompiledScheme& scheme() const;
  std::int64_t n_slots() const;
  std::int64_t conv_floats() const;  ///< values of convolution history a slot
  std::int64_t n_free() const;
  std::int64_t bytes_per_slot() const;  ///< pages + windows + cursors + conv + bookkeeping
  /// bytes_per_slot() of a pool not yet made, to size one before weights are loaded.
  static std::int64_t bytes_per_slot(const CompiledScheme& scheme, std::int64_t conv_floats);
  std::int64_t bytes_allocated() const;  ///< of all slots, sentinel included: what was really taken
  std::int64_t nonfinite_total() const;  ///< slots quarantined so far
  /// Roundings so far, of all slots and layers, and of one layer: those of a scheme whose plan has
  /// a guard; else zeros.
  GuardCounts guard_counts() const;
  GuardCounts guard_counts(int recurrent_layer) const;

  /// A slot with everything zeroed: pages, windows, cursors, conv history, token count.
  /// Errors: kExhausted.
  Result<std::int64_t> alloc();
  /// Gives a slot back and ends its quarantine. Errors: kInvalidArgument for a slot that does not
  /// exist or is free already; nothing changes.
  Status try_free(std::int64_t slot);
  void free(std::int64_t slot);  ///< try_free() of a slot that the caller owns: failing is a bug
  SlotState state(std::int64_t slot) const;
  bool quarantined(std::int64_t slot) const;

  LayerState layer(int recurrent_layer);  ///< for delta/step.hpp
  float* conv(std::int64_t slot);         ///< conv_floats f32; of schemes that keep them so
  /// The history as f32, whatever its format: conv_floats values out of a slot and into one.
  void load_conv(std::int64_t slot, float* to) const;
  void store_conv(std::int64_t slot, const float* from);
  std::int64_t n_tokens(std::int64_t slot) const;
  void set_n_tokens(std::int64_t slot, std::int64_t n_tokens);

  /// All bytes of a slot, bookkeeping included, for moving them to another memory. Slots lie one
  /// behind the other from slot 0 on, alike in every pool of one scheme and
  /// conv_floats.
  std::span<std::uint8_t> memory(std::int64_t slot);

  /// Byte copy of everything a slot owns. Errors: kInvalidArgument.
  Status copy(std::int64_t from, std::int64_t to);
  /// Whole slot, open window included: restoring continues bit for bit. `with_window` false asks
  /// for an empty window (flush first) and stores payload only. Errors: kNotFinite for a
  /// quarantined slot, kInvalidArgument for an open window without `with_window`.
  Result<Snapshot> snapshot(std::int64_t slot, bool with_window = true) const;
  /// Fills an allocated slot. Errors: kCorrupt (which section), kMismatch (scheme, plan or model:
  /// both sides named).
  Status restore(std::int64_t slot, std::span<const std::byte> snapshot);
  /// Whether restore() into a slot of this pool would succeed; its errors.
  Status check(std::span<const std::byte> snapshot) const;
  Status save(std::int64_t slot, const std::string& path) const;
  Status load(std::int64_t slot, const std::string& path);

  struct Impl;  ///< pool/impl.hpp, for the pool's own sources

 private:
  StatePool();
  std::unique_ptr<Impl> impl_;
};

}  // namespace statepack
