// How a slot lies in memory; shared by pool.cc and snapshot.cc.
//
//   slot:   header | page and window of layer 0 | ... of the last layer | cursors | conv history
//   memory: slot 0 (sentinel) | slot 1 | ... | free list | flags
//
// One mapping holds everything, so that what a pool takes is one number.
#pragma once

#include <atomic>
#include <mutex>
#include <span>
#include <vector>

#include "pool/pool.hpp"

namespace statepack {

struct SlotHeader {
  std::int64_t n_tokens = 0;
  std::uint32_t fault = 0;
  std::uint32_t unused = 0;
};
static_assert(sizeof(SlotHeader) % kStateAlign == 0);

/// Offsets inside a slot.
struct SlotLayout {
  struct Layer {
    std::int64_t page = 0, page_bytes = 0;
    std::int64_t window = 0, window_bytes = 0;
    std::int64_t cursor = 0;
  };
  std::vector<Layer> layers;
  ConvFormat conv_format = ConvFormat::kF32;
  std::int64_t conv = 0, conv_floats = 0, conv_bytes = 0;
  std::int64_t n_bytes = 0;  ///< a multiple of 64: slots do not share cache lines

  SlotLayout() = default;
  SlotLayout(const CompiledScheme& scheme, std::int64_t conv_floats);
};

struct StatePool::Impl {
  std::shared_ptr<const CompiledScheme> scheme;
  SlotLayout layout;
  std::int64_t n_slots = 0;
  std::uint8_t* memory = nullptr;
  std::int64_t n_bytes = 0;
  std::vector<GuardCounts> guards;  // [layers], added to by steps while others read

  mutable std::mutex mutex;           // guards what follows
  std::int64_t* free_list = nullptr;  // [n_slots], the first n_free are free, last in first out
  std::int64_t n_free = 0;
  std::int64_t n_quarantined = 0;  // of slots given back so far
  /// [n_slots + 1] per slot: kUsed while handed out, kDirty once memory may hold anything.
  std::uint8_t* flags = nullptr;
  static constexpr std::uint8_t kUsed = 1, kDirty = 2;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  std::uint8_t* slot(std::int64_t i) const { return memory + i * layout.n_bytes; }
  SlotHeader& header(std::int64_t i) const { return *reinterpret_cast<SlotHeader*>(slot(i)); }
  /// All that a slot owns but its header, whose fault other threads may read at any time.
  std::span<std::uint8_t> contents(std::int64_t i) const {
    return {slot(i) + sizeof(SlotHeader),
            static_cast<std::size_t>(layout.n_bytes) - sizeof(SlotHeader)};
  }
  Cursor& cursor(std::int64_t i, const SlotLayout::Layer& layer) const {
    return *reinterpret_cast<Cursor*>(slot(i) + layer.cursor);
  }
  bool faulty(std::int64_t i) const {
    return std::atomic_ref<std::uint32_t>(header(i).fault).load(std::memory_order_relaxed) != 0;
  }
  /// Errors: kInvalidArgument for a slot that does not exist or is free.
  Status check_used(std::int64_t i) const;
};

/// Slot as a snapshot, with or without its windows.
Snapshot write_snapshot(const StatePool::Impl& pool, std::int64_t slot, bool with_window);
/// Whether read_snapshot() would take these bytes; its errors.
Status check_snapshot(const StatePool::Impl& pool, std::span<const std::byte> bytes);
/// The reverse, after every check.
Status read_snapshot(StatePool::Impl& pool, std::int64_t slot, std::span<const std::byte> bytes);

}  // namespace statepack
