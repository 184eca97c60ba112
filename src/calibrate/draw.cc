#include "calibrate/draw.hpp"

#include <random>

#include "base/check.hpp"

namespace statepack {
namespace {

// Uniform in [0, n). std::uniform_int_distribution differs between standard libraries.
std::int64_t below(std::mt19937_64& random, std::int64_t n) {
  const auto range = static_cast<std::uint64_t>(n);
  const std::uint64_t rejected = (0 - range) % range;  // 2^64 mod n: the values that would be extra
  std::uint64_t x = random();
  while (x < rejected) x = random();
  return static_cast<std::int64_t>(x % range);
}

}  // namespace

std::vector<std::int64_t> draw_starts(std::int64_t n_tokens, std::int64_t length, std::int64_t n,
                                      std::uint64_t seed) {
  SP_CHECK(length > 0 && n_tokens >= length, "a window must fit into the text");
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> starts;
  for (std::int64_t i = 0; i < n; ++i) starts.push_back(below(random, n_tokens - length + 1));
  return starts;
}

std::vector<std::int64_t> draw_multiples(std::int64_t first, std::int64_t last,
                                         std::int64_t interval, std::int64_t n,
                                         std::uint64_t seed) {
  SP_CHECK(first >= 1 && interval >= 1, "updates are counted from 1");
  // Selection sampling (Knuth, algorithm S): take the next of `left` with chance wanted / left.
  std::mt19937_64 random(seed);
  const std::int64_t lowest = (first + interval - 1) / interval, highest = last / interval;
  std::vector<std::int64_t> chosen;
  for (std::int64_t i = lowest; i <= highest; ++i) {
    const std::int64_t left = highest - i + 1,
                       wanted = n - static_cast<std::int64_t>(chosen.size());
    if (below(random, left) < wanted) chosen.push_back(i * interval);
  }
  return chosen;
}

std::uint64_t derive_seed(std::uint64_t seed, std::uint64_t stream) {
  // splitmix64 of both: neighbouring seeds and streams give unrelated sequences.
  std::uint64_t x = seed + 0x9e3779b97f4a7c15u * (stream + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace statepack
