// Shapes and words that every part shares. Letters are fixed everywhere: B rows of a batch, T
// tokens, H key heads, HV value heads, K key width (rows of a state), V value width (its columns).
#pragma once

#include <cstddef>
#include <cstdint>

namespace statepack {

/// Decay of the delta rule: one number a head (Gated DeltaNet), or one a key channel (Kimi Delta
/// Attention).
enum class Gate : std::uint8_t { kScalar, kChannel };

/// How a value between two codes becomes one of them.
enum class Rounding : std::uint8_t {
  kNearest,     ///< the nearer, ties to even
  kStochastic,  ///< either, with the chance of its nearness; counter-based, so that runs repeat
  kFeedback,    ///< the nearer to the value plus what earlier roundings left over
};

/// The recurrent heads of one layer. Value head h reads the q and k of key head h / (HV / H).
struct LayerShape {
  int n_key_heads = 0;    ///< H
  int n_value_heads = 0;  ///< HV, a multiple of H
  int K = 0;              ///< key width, rows of a state
  int V = 0;              ///< value width, columns of a state
  Gate gate = Gate::kScalar;

  int group() const { return n_value_heads / n_key_heads; }
  int key_head(int value_head) const { return value_head / group(); }
  /// Gate values of one token and value head: 1 or K.
  int gate_width() const { return gate == Gate::kScalar ? 1 : K; }
  std::int64_t n_values() const { return std::int64_t{n_value_heads} * K * V; }
  bool operator==(const LayerShape&) const = default;
};

}  // namespace statepack
