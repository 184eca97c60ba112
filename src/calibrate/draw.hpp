// Random choices of calibration: the same for one seed with every compiler and standard library.
#pragma once

#include <cstdint>
#include <vector>

namespace statepack {

/// `n` starts of windows of `length` tokens, each uniform over a text of `n_tokens` >= length;
/// windows may overlap.
std::vector<std::int64_t> draw_starts(std::int64_t n_tokens, std::int64_t length, std::int64_t n,
                                      std::uint64_t seed);

/// `n` of the multiples of `interval` in [first, last], uniform without repetition, ascending; all
/// of them when there are no more than n. This is reservoir sampling with the length known
/// beforehand.
std::vector<std::int64_t> draw_multiples(std::int64_t first, std::int64_t last,
                                         std::int64_t interval, std::int64_t n, std::uint64_t seed);

/// An independent seed for the `stream`-th use of one seed.
std::uint64_t derive_seed(std::uint64_t seed, std::uint64_t stream);

}  // namespace statepack
