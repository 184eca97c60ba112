#include "codec/philox.hpp"

#include "base/simd_clones.hpp"

namespace statepack {
namespace {

constexpr int kRounds = 10;
constexpr int kLanes = static_cast<int>(kDrawRun / 4);  // blocks at a time

struct Lanes {
  std::uint32_t x[4][kLanes];
};

// Ten rounds over kLanes counters that share a key.
SP_CLONES void mix(Lanes& c, std::uint32_t key0, std::uint32_t key1) {
  for (int round = 0; round < kRounds; ++round) {
    for (int l = 0; l < kLanes; ++l) {
      const std::uint64_t a = std::uint64_t{0xD2511F53u} * c.x[0][l];
      const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * c.x[2][l];
      c.x[0][l] = static_cast<std::uint32_t>(b >> 32) ^ c.x[1][l] ^ key0;
      c.x[1][l] = static_cast<std::uint32_t>(b);
      c.x[2][l] = static_cast<std::uint32_t>(a >> 32) ^ c.x[3][l] ^ key1;
      c.x[3][l] = static_cast<std::uint32_t>(a);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

}  // namespace

std::array<std::uint32_t, 4> philox(const std::array<std::uint32_t, 4>& counter,
                                    const std::array<std::uint32_t, 2>& key) {
  Lanes lanes{};
  for (std::size_t i = 0; i < 4; ++i) lanes.x[i][0] = counter[i];
  mix(lanes, key[0], key[1]);
  return {lanes.x[0][0], lanes.x[1][0], lanes.x[2][0], lanes.x[3][0]};
}

void draw(const RoundingContext& at, int head, std::int64_t n, std::uint32_t* numbers) {
  Lanes lanes;
  const std::uint32_t where = at.layer << 16 | static_cast<std::uint32_t>(head);
  for (std::int64_t e = 0; e < n; e += kDrawRun) {
    for (int l = 0; l < kLanes; ++l) {
      lanes.x[0][l] = static_cast<std::uint32_t>(e / 4 + l);
      lanes.x[1][l] = where;
      lanes.x[2][l] = static_cast<std::uint32_t>(at.step);
      lanes.x[3][l] = static_cast<std::uint32_t>(at.step >> 32);
    }
    mix(lanes, static_cast<std::uint32_t>(at.seed), static_cast<std::uint32_t>(at.seed >> 32));
    for (int l = 0; l < kLanes; ++l) {
      for (int i = 0; i < 4; ++i) numbers[e + 4 * l + i] = lanes.x[i][l];
    }
  }
}

}  // namespace statepack
