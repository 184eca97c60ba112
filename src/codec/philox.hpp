// Random numbers for stochastic rounding: Philox 4x32-10 (J. Salmon, M. Moraes, R. Dror, D. Shaw,
// SC 2011), a function of key and counter alone, so that a run can be repeated from anywhere.
#pragma once

#include <array>
#include <cstdint>

#include "codec/codec.hpp"

namespace statepack {

/// One block of four numbers.
std::array<std::uint32_t, 4> philox(const std::array<std::uint32_t, 4>& counter,
                                    const std::array<std::uint32_t, 2>& key);

/// Numbers are drawn in whole runs of this many.
inline constexpr std::int64_t kDrawRun = 64;
constexpr std::int64_t drawn(std::int64_t n) { return (n + kDrawRun - 1) / kDrawRun * kDrawRun; }

/// numbers[e] for the elements e < drawn(n) of a head: lane e mod 4 of the block with key at.seed
/// and counter (e / 4, layer * 2^16 + head, low and high word of the step).
void draw(const RoundingContext& at, int head, std::int64_t n, std::uint32_t* numbers);

}  // namespace statepack
