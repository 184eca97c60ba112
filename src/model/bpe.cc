#include "model/bpe.hpp"

#include <algorithm>
#include <bit>

namespace statepack {

Bpe::Bpe(const std::array<std::int32_t, 256>& byte_tokens, const std::vector<Merge>& merges)
    : byte_tokens_(byte_tokens), slots_(std::bit_ceil(2 * merges.size() + 2)) {
  for (const Merge& merge : merges) {
    const std::uint64_t pair = pair_key(merge.left, merge.right);
    slots_[slot_of(pair)] = {pair, merge.rank, merge.result};
  }
}

std::size_t Bpe::slot_of(std::uint64_t pair) const {
  std::uint64_t hash = pair * 0x9E3779B97F4A7C15u;  // Fibonacci hashing, high bits folded in
  hash ^= hash >> 32;
  std::size_t slot = hash & (slots_.size() - 1);
  while (slots_[slot].pair != kEmpty && slots_[slot].pair != pair) {
    slot = (slot + 1) & (slots_.size() - 1);
  }
  return slot;
}

namespace {

// std::push_heap keeps the largest in front, so "less" means "later".
bool goes_later(const Bpe::Scratch::Candidate& a, const Bpe::Scratch::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
}

}  // namespace

void Bpe::push_candidate(std::int64_t at, Scratch& scratch) const {
  if (at < 0) return;
  const Scratch::Symbol& left = scratch.symbols[static_cast<std::size_t>(at)];
  if (left.after < 0) return;
  const Scratch::Symbol& right = scratch.symbols[static_cast<std::size_t>(left.after)];
  const Slot& slot = slots_[slot_of(pair_key(left.id, right.id))];
  if (slot.pair == kEmpty) return;
  scratch.heap.push_back({slot.rank, slot.result, at});
  std::push_heap(scratch.heap.begin(), scratch.heap.end(), goes_later);
}

void Bpe::encode(std::string_view piece, Scratch& scratch, std::vector<std::int32_t>& out) const {
  auto& symbols = scratch.symbols;
  auto& heap = scratch.heap;
  const auto n = static_cast<std::int64_t>(piece.size());
  symbols.clear();
  heap.clear();
  for (std::int64_t i = 0; i < n; ++i) {
    const auto byte = static_cast<unsigned char>(piece[static_cast<std::size_t>(i)]);
    symbols.push_back({byte_tokens_[byte], i - 1, i + 1 < n ? i + 1 : -1});
  }
  for (std::int64_t i = 0; i + 1 < n; ++i) push_candidate(i, scratch);

  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), goes_later);
    const Scratch::Candidate top = heap.back();
    heap.pop_back();
    Scratch::Symbol& left = symbols[static_cast<std::size_t>(top.at)];
    if (left.id < 0 || left.after < 0) continue;
    Scratch::Symbol& right = symbols[static_cast<std::size_t>(left.after)];
    // A candidate is stale when one of its two symbols has merged with another since.
    const Slot& slot = slots_[slot_of(pair_key(left.id, right.id))];
    if (slot.pair == kEmpty || slot.result != top.result) continue;
    left.id = top.result;
    left.after = right.after;
    right.id = -1;
    if (left.after >= 0) symbols[static_cast<std::size_t>(left.after)].before = top.at;
    push_candidate(left.before, scratch);
    push_candidate(top.at, scratch);
  }
  for (std::int64_t i = n > 0 ? 0 : -1; i >= 0; i = symbols[static_cast<std::size_t>(i)].after) {
    out.push_back(symbols[static_cast<std::size_t>(i)].id);
  }
}

}  // namespace statepack
