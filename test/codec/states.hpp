// States and codecs that several codec tests share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/safetensors.hpp"
#include "codec/codec.hpp"
#include "codec/scale.hpp"

namespace statepack::test {

using State = std::vector<float>;  // [K][V], or [heads][K][V]

/// The generator of STEPQuant's golden tests: s <- 1664525 s + 1013904223 mod 2^32, and u in [0,
/// 1).
class Lcg {
 public:
  explicit Lcg(std::uint32_t seed) : s_(seed) {}
  double centred() {  // u - 0.5
    s_ = 1664525u * s_ + 1013904223u;
    return (s_ >> 8) * 0x1p-24 - 0.5;
  }

 private:
  std::uint32_t s_;
};

/// Golden test G8: rows and columns of unlike magnitude, exact in f32.
inline State large_state(int K, int V) {
  Lcg lcg(1);
  State X;
  for (int i = 0; i < K; ++i) {
    for (int j = 0; j < V; ++j) {
      X.push_back(static_cast<float>(std::ldexp(lcg.centred(), i % 5 - 2 + j % 7 - 3)));
    }
  }
  return X;
}

inline State normal_state(int n_values, unsigned seed, float scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  State X(static_cast<std::size_t>(n_values));
  for (float& x : X) x = scale * normal(random);
  return X;
}

/// Four heads of 128 x 128 from a trained model (test/data/README.md).
inline State trained_states() {
  auto file = SafeTensors::open(SP_SOURCE_DIR "/test/data/trained_state.safetensors");
  if (!file.ok()) throw std::runtime_error(file.status().message());
  auto states = to_f32(*file->find("state"));
  if (!states.ok()) throw std::runtime_error(states.status().message());
  return std::move(states).value();
}

inline CodecConfig configure(const CodecInfo& info, std::string arg,
                             const std::map<std::string, std::string>& options = {}) {
  return fill_config(info, arg, Rounding::kNearest, options);
}

inline std::vector<std::byte> scratch_for(const LayerCodec& codec) {
  return std::vector<std::byte>(codec.scratch_bytes(), std::byte{0xA5});
}

/// A page filled with a pattern, so that what an encoder leaves out shows.
inline std::vector<std::uint8_t> encode(const LayerCodec& codec, const State& heads,
                                        std::uint8_t fill = 0xA5) {
  std::vector<std::uint8_t> page(static_cast<std::size_t>(codec.page_bytes()), fill);
  auto scratch = scratch_for(codec);
  const std::size_t n =
      static_cast<std::size_t>(codec.shape().K) * static_cast<std::size_t>(codec.shape().V);
  for (int h = 0; h < codec.shape().n_value_heads; ++h) {
    codec.encode(h, heads.data() + static_cast<std::size_t>(h) * n, page.data(), {}, {scratch});
  }
  return page;
}

inline State decode(const LayerCodec& codec, std::span<const std::uint8_t> page) {
  State heads(static_cast<std::size_t>(codec.shape().n_values()), NAN);
  auto scratch = scratch_for(codec);
  const std::size_t n =
      static_cast<std::size_t>(codec.shape().K) * static_cast<std::size_t>(codec.shape().V);
  for (int h = 0; h < codec.shape().n_value_heads; ++h) {
    codec.decode(h, page.data(), heads.data() + static_cast<std::size_t>(h) * n, {scratch});
  }
  return heads;
}

inline State round_trip(const LayerCodec& codec, const State& heads) {
  return decode(codec, encode(codec, heads));
}

inline double mean_square_error(const State& a, const State& b) {
  double sum = 0;
  for (std::size_t e = 0; e < a.size(); ++e) sum += std::pow(double{a[e]} - b[e], 2);
  return sum / static_cast<double>(a.size());
}

inline State absmax_rows(const State& X, int V, int bits) {  // scale f16(max|x| / Q), one a row
  const float Q = static_cast<float>((1 << (bits - 1)) - 1);
  State out(X.size());
  for (std::size_t begin = 0; begin < X.size(); begin += static_cast<std::size_t>(V)) {
    float peak = 0;
    for (int j = 0; j < V; ++j)
      peak = std::max(peak, std::fabs(X[begin + static_cast<std::size_t>(j)]));
    const float s = h16(peak / Q);
    for (std::size_t e = begin; e < begin + static_cast<std::size_t>(V); ++e) {
      out[e] = s * std::clamp(std::nearbyint(X[e] / s), -Q, Q);
    }
  }
  return out;
}

}  // namespace statepack::test
