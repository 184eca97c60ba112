#include "pool/cuda/device_pool.hpp"

#include <cstddef>
#include <limits>
#include <string>

#include "base/check.hpp"

namespace statepack::cuda {

Result<std::unique_ptr<DevicePool>> DevicePool::create(std::shared_ptr<const CompiledScheme> scheme,
                                                       const DevicePoolConfig& config) {
  if (config.n_slots < 1 || config.max_rows < 1) {
    return Status(Code::kInvalidArgument,
                  "a device pool needs at least one slot and one row, not " +
                      std::to_string(config.n_slots) + " and " + std::to_string(config.max_rows));
  }
  constexpr std::int64_t kMaxSlots = std::int64_t{1} << 32;
  if (config.n_slots > kMaxSlots) {
    return Status(Code::kInvalidArgument, "a device pool of " + std::to_string(config.n_slots) +
                                              " slots; it holds at most " +
                                              std::to_string(kMaxSlots));
  }
  if (scheme->scheme().conv != ConvFormat::kF32 && config.conv_floats > 0) {
    return Status(Code::kUnsupported,
                  "scheme '" + scheme->scheme().name() +
                      "': device pools keep the convolution history in f32; leave conv= out, or "
                      "keep the history elsewhere (conv_floats 0)");
  }
  std::unique_ptr<DevicePool> pool(new DevicePool);
  SP_ASSIGN_OR_RETURN(pool->staging_,
                      StatePool::create(scheme, {.n_slots = 1, .conv_floats = config.conv_floats}));
  SP_ASSIGN_OR_RETURN(pool->staging_slot_, pool->staging_->alloc());
  for (const CompiledLayer& layer : scheme->layers()) {
    SP_ASSIGN_OR_RETURN(auto made, DeviceLayer::make(layer, scheme->scheme()));
    pool->layers_.push_back(std::move(made));
  }
  pool->n_slots_ = config.n_slots;
  pool->slot_bytes_ = static_cast<std::int64_t>(pool->staging_->memory(pool->staging_slot_).size());
  if (pool->slot_bytes_ > std::numeric_limits<std::int64_t>::max() / (config.n_slots + 1)) {
    return Status(Code::kExhausted, std::to_string(config.n_slots) + " slots of " +
                                        std::to_string(pool->slot_bytes_) +
                                        " bytes fit no device; make a smaller pool");
  }
  SP_ASSIGN_OR_RETURN(
      pool->memory_,
      DeviceBytes::make(static_cast<std::size_t>((config.n_slots + 1) * pool->slot_bytes_)));
  SP_ASSIGN_OR_RETURN(pool->work_, Workspace::make(config.max_rows));
  for (std::int64_t slot = config.n_slots; slot > 0; --slot) pool->free_.push_back(slot);
  pool->used_.resize(static_cast<std::size_t>(config.n_slots) + 1);
  return pool;
}

std::int64_t DevicePool::n_free() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(free_.size());
}

std::int64_t DevicePool::nonfinite_total() const {
  const std::lock_guard lock(mutex_);
  return n_quarantined_;
}

Status DevicePool::check_used(std::int64_t slot) const {
  if (slot < 1 || slot > n_slots_) {
    return {Code::kInvalidArgument, "slot " + std::to_string(slot) +
                                        " does not exist; the pool has slots 1 to " +
                                        std::to_string(n_slots_)};
  }
  if (used_[static_cast<std::size_t>(slot)]) return {};
  return {Code::kInvalidArgument,
          "slot " + std::to_string(slot) + " is free; allocate a slot before using it"};
}

Status DevicePool::need_used(std::int64_t slot) const {
  const std::lock_guard lock(mutex_);
  return check_used(slot);
}

Result<std::int64_t> DevicePool::alloc() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    return Status(Code::kExhausted, "all " + std::to_string(n_slots_) +
                                        " slots are in use; free one or make a larger pool");
  }
  const std::int64_t slot = free_.back();
  SP_RETURN_IF_ERROR(clear(slot_at(slot), static_cast<std::size_t>(slot_bytes_)));
  free_.pop_back();
  used_[static_cast<std::size_t>(slot)] = true;
  return slot;
}

Status DevicePool::fetch(std::int64_t slot) const {
  const std::span<std::uint8_t> staged = staging_->memory(staging_slot_);
  return copy_to_host(staged.data(), slot_at(slot), staged.size());
}

Status DevicePool::try_free(std::int64_t slot) {
  const std::lock_guard lock(mutex_);
  SP_RETURN_IF_ERROR(check_used(slot));
  SP_RETURN_IF_ERROR(fetch(slot));
  if (staging_->quarantined(staging_slot_)) ++n_quarantined_;
  SP_RETURN_IF_ERROR(clear(slot_at(slot), static_cast<std::size_t>(slot_bytes_)));
  used_[static_cast<std::size_t>(slot)] = false;
  free_.push_back(slot);
  return {};
}

Result<SlotState> DevicePool::state(std::int64_t slot) const {
  const std::lock_guard lock(mutex_);
  if (slot < 1 || slot > n_slots_) return check_used(slot);
  if (!used_[static_cast<std::size_t>(slot)]) return SlotState::kFree;
  SP_RETURN_IF_ERROR(fetch(slot));
  return staging_->state(staging_slot_);
}

PoolView DevicePool::layer(int recurrent_layer) const {
  const LayerState host = staging_->layer(recurrent_layer);
  // The staging pool lies as this one does: slot 0, then slot 1.
  const std::uint8_t* base = staging_->memory(0).data();
  const auto moved = [&](const void* place) {
    return memory_.data() + (static_cast<const std::uint8_t*>(place) - base);
  };
  PoolView view;
  view.pages = moved(host.pages);
  view.windows = moved(host.windows);
  view.cursors = reinterpret_cast<Cursor*>(moved(host.cursors));
  view.faults = reinterpret_cast<std::uint32_t*>(moved(host.faults));
  view.page_stride = view.window_stride = view.cursor_stride = view.fault_stride = slot_bytes_;
  view.n_slots = n_slots_ + 1;
  return view;
}

float* DevicePool::conv(std::int64_t slot) const {
  SP_CHECK(slot >= 0 && slot <= n_slots_, "no such slot");
  const std::uint8_t* host = reinterpret_cast<const std::uint8_t*>(staging_->conv(0));
  return reinterpret_cast<float*>(slot_at(slot) + (host - staging_->memory(0).data()));
}

Result<std::int64_t> DevicePool::n_tokens(std::int64_t slot) const {
  const std::lock_guard lock(mutex_);
  SP_RETURN_IF_ERROR(check_used(slot));
  SP_RETURN_IF_ERROR(fetch(slot));
  return staging_->n_tokens(staging_slot_);
}

Status DevicePool::set_n_tokens(std::int64_t slot, std::int64_t n_tokens) {
  const std::lock_guard lock(mutex_);
  SP_RETURN_IF_ERROR(check_used(slot));
  SP_RETURN_IF_ERROR(fetch(slot));
  if (n_tokens < 0) {
    return {Code::kInvalidArgument, std::to_string(n_tokens) + " tokens: the count is negative"};
  }
  staging_->set_n_tokens(staging_slot_, n_tokens);
  const std::span<std::uint8_t> staged = staging_->memory(staging_slot_);
  return copy_to_device(slot_at(slot), staged.data(), staged.size());
}

Status DevicePool::copy(std::int64_t from, std::int64_t to) {
  const std::lock_guard lock(mutex_);
  SP_RETURN_IF_ERROR(check_used(from));
  SP_RETURN_IF_ERROR(check_used(to));
  for (const std::int64_t slot : {to, from}) {
    SP_RETURN_IF_ERROR(fetch(slot));
    if (!staging_->quarantined(staging_slot_)) continue;
    return {Code::kNotFinite, "slot " + std::to_string(slot) +
                                  " is quarantined and cannot be copied from or to; free it"};
  }
  const std::span<std::uint8_t> staged = staging_->memory(staging_slot_);
  return copy_to_device(slot_at(to), staged.data(), staged.size());
}

Result<Snapshot> DevicePool::snapshot(std::int64_t slot, bool with_window) const {
  const std::lock_guard lock(mutex_);
  SP_RETURN_IF_ERROR(check_used(slot));
  SP_RETURN_IF_ERROR(fetch(slot));
  return staging_->snapshot(staging_slot_, with_window);
}

Status DevicePool::restore(std::int64_t slot, std::span<const std::byte> snapshot) {
  const std::lock_guard lock(mutex_);
  SP_RETURN_IF_ERROR(check_used(slot));
  SP_RETURN_IF_ERROR(fetch(slot));
  SP_RETURN_IF_ERROR(staging_->restore(staging_slot_, snapshot));
  const std::span<std::uint8_t> staged = staging_->memory(staging_slot_);
  return copy_to_device(slot_at(slot), staged.data(), staged.size());
}

}  // namespace statepack::cuda
