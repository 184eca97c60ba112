// What rounding costs: the error that variants of a codec leave in every row of real states.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codec/codec.hpp"

namespace statepack {

/// Runs states through a codec that is compiled once for each variant (a plan for each layer: all
/// rows at 4 bits, all at 6, ...) and sums squared errors by row, f64, in the order of the calls.
/// Calls for different (layer, head) may come at the same time. Memory: 8 n_variants K bytes a head
/// and domain, and the codecs; states are not kept.
class ErrorMeter {
 public:
  /// `variants` [n_variants][layer]; each head is compiled alone, as every codec treats it.
  /// Errors: what the codec says to a plan or shape, with layer and head.
  static Result<ErrorMeter> make(const CodecConfig& config, const std::vector<LayerShape>& shapes,
                                 const std::vector<std::vector<LayerPlan>>& variants,
                                 int n_domains);

  /// X [K][V], finite.
  void add(int layer, int head, int domain, const float* X);

  /// Sums over the states that were added, one entry a row [K] or column [V].
  struct Sums {
    std::int64_t n_states = 0;
    std::vector<std::vector<double>> row_error;  ///< [variant][K] sum_j (Xhat_ij - X_ij)^2
    std::vector<double> row_power;               ///< [K] sum_j X_ij^2
    std::vector<double> column_power;            ///< [V] sum_i X_ij^2

    void add(const Sums& other);
  };
  const Sums& sums(int layer, int head, int domain) const;

 private:
  struct Head {
    std::vector<std::unique_ptr<LayerCodec>> codecs;  // [variant]
    std::vector<Sums> domains;
  };
  std::vector<LayerShape> shapes_;
  std::vector<std::vector<Head>> heads_;  // [layer][head]
};

}  // namespace statepack
