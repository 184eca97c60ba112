// Where the time of a forward pass goes.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace statepack {

/// The parts of a pass, told apart by what limits them.
enum class Part : std::uint8_t {
  kEmbedding,    ///< checks of the call, and the embedding's rows
  kProjections,  ///< linear layers of the token mixers, the norms before them, residual sums
  kConvolution,  ///< short convolution, head norms of q and k, decay and beta
  kState,        ///< step and flush of the recurrent state (of a prompt: its chunks)
  kAttention,    ///< scores, softmax and values; rotation, cache row, MLA's inner products
  kFeedForward,  ///< MLP or experts, routing, norm and residual sum included
  kHead,         ///< final norm and logits
};
inline constexpr std::size_t kNParts = 7;
inline constexpr std::array<std::string_view, kNParts> kPartNames = {
    "embedding", "projections", "convolution", "state", "attention", "feed-forward", "head"};

/// Nanoseconds by part.
using PartTimes = std::array<std::int64_t, kNParts>;

/// A stop watch whose laps follow one another without gaps. Costs a branch while nobody looks.
class PartClock {
 public:
  /// Laps from now on add to *times; null stops the watch.
  void watch(PartTimes* times) { times_ = times; }
  /// The first lap begins.
  void start() {
    if (times_ != nullptr) last_ = Clock::now();
  }
  /// What happened since the last call belongs to `part`.
  void lap(Part part) {
    if (times_ == nullptr) return;
    const Clock::time_point now = Clock::now();
    (*times_)[static_cast<std::size_t>(part)] +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  PartTimes* times_ = nullptr;
  Clock::time_point last_;
};

}  // namespace statepack
