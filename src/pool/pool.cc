#include "pool/pool.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.hpp"
#include "base/file.hpp"
#include "base/half.hpp"
#include "base/memory.hpp"
#include "pool/impl.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kMaxSlots = std::int64_t{1} << 32;
constexpr std::int64_t kMaxConvFloats = std::int64_t{1} << 32;
constexpr std::int64_t kBookkeepingBytes = sizeof(std::int64_t) + 1;  // free list, flags

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

/// What one slot adds to a pool.
std::int64_t slot_bytes(const SlotLayout& layout) { return layout.n_bytes + kBookkeepingBytes; }

std::int64_t page_size() {
  static const std::int64_t size = ::sysconf(_SC_PAGESIZE);
  return size;
}

}  // namespace

SlotLayout::SlotLayout(const CompiledScheme& scheme, std::int64_t n_conv_floats)
    : conv_format(scheme.scheme().conv),
      conv_floats(n_conv_floats),
      conv_bytes(n_conv_floats * (conv_format == ConvFormat::kF32 ? 4 : 2)) {
  std::int64_t at = sizeof(SlotHeader);
  for (const CompiledLayer& layer : scheme.layers()) {
    Layer place;
    place.page = at;
    place.page_bytes = layer.codec->page_bytes();
    place.window = round_up(place.page + place.page_bytes, kStateAlign);
    place.window_bytes = layer.window.n_bytes();
    at = place.window + place.window_bytes;
    layers.push_back(place);
  }
  for (Layer& place : layers) {
    place.cursor = at;
    at += static_cast<std::int64_t>(sizeof(Cursor));
  }
  conv = at;
  n_bytes = round_up(at + conv_bytes, 64);
}

StatePool::Impl::~Impl() {
  if (memory != nullptr) ::munmap(memory, static_cast<std::size_t>(n_bytes));
}

Status StatePool::Impl::check_used(std::int64_t i) const {
  if (i < kFirstValidSlot || i > n_slots) {
    return {Code::kInvalidArgument, "slot " + std::to_string(i) +
                                        " does not exist; the pool has slots 1 to " +
                                        std::to_string(n_slots)};
  }
  const std::lock_guard lock(mutex);
  if ((flags[i] & kUsed) == 0) {
    return {Code::kInvalidArgument,
            "slot " + std::to_string(i) + " is free; allocate a slot before using it"};
  }
  return {};
}

StatePool::StatePool() : impl_(std::make_unique<Impl>()) {}
StatePool::~StatePool() = default;

Result<std::unique_ptr<StatePool>> StatePool::create(std::shared_ptr<const CompiledScheme> scheme,
                                                     const PoolConfig& config) {
  if (config.n_slots < 1 || config.n_slots > kMaxSlots) {
    return Status(Code::kInvalidArgument, "a pool of " + std::to_string(config.n_slots) +
                                              " slots cannot be made; ask for 1 to " +
                                              std::to_string(kMaxSlots));
  }
  if (config.conv_floats < 0 || config.conv_floats > kMaxConvFloats || config.max_bytes < 0) {
    return Status(Code::kInvalidArgument, "conv_floats " + std::to_string(config.conv_floats) +
                                              " and max_bytes " + std::to_string(config.max_bytes) +
                                              " must not be negative, nor the first above " +
                                              std::to_string(kMaxConvFloats));
  }
  std::unique_ptr<StatePool> pool(new StatePool);
  Impl& impl = *pool->impl_;
  impl.layout = SlotLayout(*scheme, config.conv_floats);
  impl.scheme = std::move(scheme);
  impl.n_slots = config.n_slots;
  impl.guards.resize(impl.layout.layers.size());

  // Compare slots, not bytes: the product could overflow before it is known to fit.
  const std::int64_t per_slot = slot_bytes(impl.layout);
  const std::int64_t allowed = config.max_bytes > 0 ? config.max_bytes : available_bytes();
  const std::int64_t sentinel = impl.layout.n_bytes + 1 + page_size();
  const std::int64_t fits = std::max<std::int64_t>(0, allowed - sentinel) / per_slot;
  const auto too_many = [&] {
    return Status(Code::kExhausted, "a pool of " + std::to_string(config.n_slots) + " slots of " +
                                        std::to_string(per_slot) + " bytes does not fit into " +
                                        std::to_string(allowed) + " bytes; " +
                                        std::to_string(fits) + " slots would");
  };
  if (config.n_slots > fits) return too_many();

  const std::int64_t lists = (config.n_slots + 1) * impl.layout.n_bytes;
  impl.n_bytes = round_up(lists + config.n_slots * kBookkeepingBytes + 1, page_size());
  void* memory = ::mmap(nullptr, static_cast<std::size_t>(impl.n_bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    impl.n_bytes = 0;
    return too_many();
  }
  // A step walks from slot to slot: with small pages every few kilobytes would miss in the TLB.
  // Where the kernel has no huge pages to give, nothing is lost.
  (void)::madvise(memory, static_cast<std::size_t>(impl.n_bytes), MADV_HUGEPAGE);
  // Fresh pages read as zero and take memory only once touched.
  impl.memory = static_cast<std::uint8_t*>(memory);
  impl.free_list = reinterpret_cast<std::int64_t*>(impl.memory + lists);
  impl.flags = reinterpret_cast<std::uint8_t*>(impl.free_list + config.n_slots);
  for (std::int64_t i = 0; i < config.n_slots; ++i) impl.free_list[i] = config.n_slots - i;
  impl.n_free = config.n_slots;
  return pool;
}

const CompiledScheme& StatePool::scheme() const { return *impl_->scheme; }
std::int64_t StatePool::n_slots() const { return impl_->n_slots; }
std::int64_t StatePool::conv_floats() const { return impl_->layout.conv_floats; }
std::int64_t StatePool::bytes_per_slot() const { return slot_bytes(impl_->layout); }
std::int64_t StatePool::bytes_per_slot(const CompiledScheme& scheme, std::int64_t conv_floats) {
  return slot_bytes(SlotLayout(scheme, conv_floats));
}
std::int64_t StatePool::bytes_allocated() const { return impl_->n_bytes; }

std::int64_t StatePool::n_free() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->n_free;
}

std::int64_t StatePool::nonfinite_total() const {
  const std::lock_guard lock(impl_->mutex);
  std::int64_t n = impl_->n_quarantined;
  for (std::int64_t i = kFirstValidSlot; i <= impl_->n_slots; ++i) {
    if ((impl_->flags[i] & Impl::kUsed) != 0 && impl_->faulty(i)) ++n;
  }
  return n;
}

GuardCounts StatePool::guard_counts(int recurrent_layer) const {
  SP_CHECK(recurrent_layer >= 0 && recurrent_layer < static_cast<int>(impl_->guards.size()),
           "no such recurrent layer");
  GuardCounts& counts = impl_->guards[static_cast<std::size_t>(recurrent_layer)];
  const auto load = [](std::int64_t& n) {
    return std::atomic_ref<std::int64_t>(n).load(std::memory_order_relaxed);
  };
  return {load(counts.roundings), load(counts.over)};
}

GuardCounts StatePool::guard_counts() const {
  GuardCounts sum;
  for (int layer = 0; layer < static_cast<int>(impl_->guards.size()); ++layer) {
    const GuardCounts counts = guard_counts(layer);
    sum.roundings += counts.roundings;
    sum.over += counts.over;
  }
  return sum;
}

Result<std::int64_t> StatePool::alloc() {
  Impl& impl = *impl_;
  std::int64_t slot = 0;
  bool dirty = false;
  {
    const std::lock_guard lock(impl.mutex);
    if (impl.n_free == 0) {
      return Status(Code::kExhausted, "all " + std::to_string(impl.n_slots) +
                                          " slots are in use; free one or make a larger pool");
    }
    slot = impl.free_list[--impl.n_free];
    dirty = (impl.flags[slot] & Impl::kDirty) != 0;
  }
  // Outside the lock: the slot is neither free nor used yet, so nobody looks into it.
  if (dirty) std::memset(impl.slot(slot), 0, static_cast<std::size_t>(impl.layout.n_bytes));
  const std::lock_guard lock(impl.mutex);
  impl.flags[slot] = Impl::kUsed | Impl::kDirty;
  return slot;
}

Status StatePool::try_free(std::int64_t slot) {
  SP_RETURN_IF_ERROR(impl_->check_used(slot));
  const std::lock_guard lock(impl_->mutex);
  if ((impl_->flags[slot] & Impl::kUsed) == 0) {  // another thread was faster
    return {Code::kInvalidArgument, "slot " + std::to_string(slot) + " is free already"};
  }
  if (impl_->faulty(slot)) ++impl_->n_quarantined;
  std::atomic_ref<std::uint32_t>(impl_->header(slot).fault).store(0, std::memory_order_relaxed);
  impl_->flags[slot] &= static_cast<std::uint8_t>(~Impl::kUsed);
  impl_->free_list[impl_->n_free++] = slot;
  return {};
}

void StatePool::free(std::int64_t slot) {
  const Status status = try_free(slot);
  SP_CHECK(status.ok(), status.message().c_str());
}

SlotState StatePool::state(std::int64_t slot) const {
  SP_CHECK(slot >= kFirstValidSlot && slot <= impl_->n_slots, "no such slot");
  const std::lock_guard lock(impl_->mutex);
  if ((impl_->flags[slot] & Impl::kUsed) == 0) return SlotState::kFree;
  return impl_->faulty(slot) ? SlotState::kQuarantined : SlotState::kUsed;
}

bool StatePool::quarantined(std::int64_t slot) const {
  return state(slot) == SlotState::kQuarantined;
}

LayerState StatePool::layer(int recurrent_layer) {
  Impl& impl = *impl_;
  SP_CHECK(recurrent_layer >= 0 && recurrent_layer < static_cast<int>(impl.layout.layers.size()),
           "no such recurrent layer");
  const auto index = static_cast<std::size_t>(recurrent_layer);
  const SlotLayout::Layer& place = impl.layout.layers[index];
  LayerState state;
  state.layer = &impl.scheme->layers()[index];
  state.scheme = &impl.scheme->scheme();
  state.n_slots = impl.n_slots + 1;
  state.pages = impl.memory + place.page;
  state.windows = impl.memory + place.window;
  state.cursors = reinterpret_cast<Cursor*>(impl.memory + place.cursor);
  state.faults = &impl.header(0).fault;
  state.page_stride = state.window_stride = state.cursor_stride = state.fault_stride =
      impl.layout.n_bytes;
  state.index = static_cast<std::uint32_t>(recurrent_layer);
  state.guard = &impl.guards[index];
  return state;
}

float* StatePool::conv(std::int64_t slot) {
  SP_CHECK(slot >= 0 && slot <= impl_->n_slots, "no such slot");
  SP_CHECK(impl_->layout.conv_format == ConvFormat::kF32, "the history is not kept in f32");
  return reinterpret_cast<float*>(impl_->slot(slot) + impl_->layout.conv);
}

void StatePool::load_conv(std::int64_t slot, float* to) const {
  SP_CHECK(slot >= 0 && slot <= impl_->n_slots, "no such slot");
  const SlotLayout& layout = impl_->layout;
  const std::uint8_t* from = impl_->slot(slot) + layout.conv;
  if (layout.conv_format == ConvFormat::kF32) {
    std::copy_n(reinterpret_cast<const float*>(from), layout.conv_floats, to);
  } else {
    std::transform(reinterpret_cast<const std::uint16_t*>(from),
                   reinterpret_cast<const std::uint16_t*>(from) + layout.conv_floats, to,
                   bf16_to_f32);
  }
}

void StatePool::store_conv(std::int64_t slot, const float* from) {
  SP_CHECK(slot >= 0 && slot <= impl_->n_slots, "no such slot");
  const SlotLayout& layout = impl_->layout;
  std::uint8_t* to = impl_->slot(slot) + layout.conv;
  if (layout.conv_format == ConvFormat::kF32) {
    std::copy_n(from, layout.conv_floats, reinterpret_cast<float*>(to));
  } else {
    std::transform(from, from + layout.conv_floats, reinterpret_cast<std::uint16_t*>(to),
                   f32_to_bf16);
  }
}

std::int64_t StatePool::n_tokens(std::int64_t slot) const {
  SP_CHECK(slot >= kFirstValidSlot && slot <= impl_->n_slots, "no such slot");
  return impl_->header(slot).n_tokens;
}

void StatePool::set_n_tokens(std::int64_t slot, std::int64_t n_tokens) {
  SP_CHECK(slot >= kFirstValidSlot && slot <= impl_->n_slots && n_tokens >= 0, "no such slot");
  impl_->header(slot).n_tokens = n_tokens;
}

std::span<std::uint8_t> StatePool::memory(std::int64_t slot) {
  SP_CHECK(slot >= 0 && slot <= impl_->n_slots, "no such slot");
  return {impl_->slot(slot), static_cast<std::size_t>(impl_->layout.n_bytes)};
}

Status StatePool::copy(std::int64_t from, std::int64_t to) {
  SP_RETURN_IF_ERROR(impl_->check_used(from));
  SP_RETURN_IF_ERROR(impl_->check_used(to));
  if (impl_->faulty(from) || impl_->faulty(to)) {
    return {Code::kNotFinite, "slot " + std::to_string(impl_->faulty(from) ? from : to) +
                                  " is quarantined and cannot be copied from or to; free it"};
  }
  if (from != to) {
    const std::span<std::uint8_t> target = impl_->contents(to), source = impl_->contents(from);
    std::memcpy(target.data(), source.data(), source.size());
    impl_->header(to).n_tokens = impl_->header(from).n_tokens;
  }
  return {};
}

Result<Snapshot> StatePool::snapshot(std::int64_t slot, bool with_window) const {
  SP_RETURN_IF_ERROR(impl_->check_used(slot));
  if (impl_->faulty(slot)) {
    return Status(Code::kNotFinite, "slot " + std::to_string(slot) +
                                        " is quarantined and has no state worth keeping; free it");
  }
  if (!with_window) {
    for (std::size_t i = 0; i < impl_->layout.layers.size(); ++i) {
      const int fill = impl_->cursor(slot, impl_->layout.layers[i]).fill;
      if (fill == 0) continue;
      return Status(Code::kInvalidArgument,
                    "slot " + std::to_string(slot) + " has " + std::to_string(fill) +
                        " tokens in the window of recurrent layer " + std::to_string(i) +
                        ", which a snapshot without windows would lose; flush it first");
    }
  }
  return write_snapshot(*impl_, slot, with_window);
}

Status StatePool::restore(std::int64_t slot, std::span<const std::byte> snapshot) {
  SP_RETURN_IF_ERROR(impl_->check_used(slot));
  if (impl_->faulty(slot)) {
    return {Code::kNotFinite,
            "slot " + std::to_string(slot) + " is quarantined; free it and allocate another"};
  }
  return read_snapshot(*impl_, slot, snapshot);
}

Status StatePool::check(std::span<const std::byte> snapshot) const {
  return check_snapshot(*impl_, snapshot);
}

Status StatePool::save(std::int64_t slot, const std::string& path) const {
  SP_ASSIGN_OR_RETURN(const Snapshot image, snapshot(slot));
  SP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  SP_RETURN_IF_ERROR(file.write(std::span<const std::byte>(image.bytes)));
  return file.commit();
}

Status StatePool::load(std::int64_t slot, const std::string& path) {
  SP_ASSIGN_OR_RETURN(const auto file, MappedFile::open(path));
  const Status status = restore(slot, file->bytes());
  return status.ok() ? status : Status(status.code(), path + ": " + status.message());
}

}  // namespace statepack
