// Byte-pair encoding of one piece of text: bytes -> token ids.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace statepack {

/// Adjacent tokens `left` and `right` become `result`; a lower rank goes first.
struct Merge {
  std::int32_t left = 0;
  std::int32_t right = 0;
  std::int32_t result = 0;
  std::uint32_t rank = 0;
};

class Bpe {
 public:
  /// `byte_tokens[b]` is the token of the single byte b. Of two merges of one pair the later
  /// counts.
  Bpe(const std::array<std::int32_t, 256>& byte_tokens, const std::vector<Merge>& merges);

  /// Buffers of encode(), to be kept between calls. One for each thread.
  struct Scratch {
    struct Symbol {
      std::int32_t id;      // -1: merged into a symbol to its left
      std::int64_t before;  // neighbours, -1 at the ends
      std::int64_t after;
    };
    struct Candidate {
      std::uint32_t rank;
      std::int32_t result;
      std::int64_t at;  // the left symbol
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  /// Appends the ids of `piece`: of all adjacent pairs that can merge the one of lowest rank does,
  /// the leftmost of equals first, until none can. O(n log n) for n bytes.
  void encode(std::string_view piece, Scratch& scratch, std::vector<std::int32_t>& out) const;

 private:
  struct Slot {
    std::uint64_t pair = kEmpty;
    std::uint32_t rank = 0;
    std::int32_t result = 0;
  };
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  static std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
    return (std::uint64_t{static_cast<std::uint32_t>(left)} << 32) |
           static_cast<std::uint32_t>(right);
  }
  std::size_t slot_of(std::uint64_t pair) const;
  void push_candidate(std::int64_t at, Scratch& scratch) const;

  std::array<std::int32_t, 256> byte_tokens_;
  // Open addressing, at most half full: a look-up is one cache miss, which is what encoding costs.
  std::vector<Slot> slots_;
};

}  // namespace statepack
