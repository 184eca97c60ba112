// Rotary embedding over the first dimensions of a head, half-split pairs (docs/models.md 6).
#pragma once

#include <cstdint>
#include <vector>

namespace statepack {

/// Cosines and sines of the rows of one forward pass, shared by its attention layers.
class RopeTable {
 public:
  /// theta^(-2i / rotary_dim), i < rotary_dim / 2; rotary_dim 0 makes an empty table.
  RopeTable(int rotary_dim, double theta);

  /// One row of angles t theta^(-2i / dim), f32, for every position.
  void set_positions(const std::vector<std::int64_t>& positions);
  /// Rotates x by the angles of row `r`: pairs (i, i + rotary_dim / 2).
  void rotate(std::int64_t r, float* x) const;

 private:
  std::int64_t half_;
  std::vector<float> frequency_;
  std::vector<float> cos_, sin_;  // [rows][half]
};

}  // namespace statepack
