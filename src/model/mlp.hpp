// Feed-forward parts: the dense SwiGLU MLP and the mixtures of experts (docs/models.md 4 and 9).
#pragma once

#include <memory>
#include <string>

#include "model/block.hpp"
#include "model/config.hpp"
#include "model/weights.hpp"

namespace statepack {

/// W_down (SiLU(W_gate x) * W_up x); a plain struct because experts are many.
struct Mlp {
  Linear gate, up, down;

  /// Reads `prefix` + {gate,up,down}_proj.weight (or the three given names).
  static Result<Mlp> load(Weights& weights, const std::string& prefix, std::int64_t hidden,
                          std::int64_t intermediate, const char* gate = "gate_proj",
                          const char* up = "up_proj", const char* down = "down_proj");
};

Result<std::unique_ptr<FeedForward>> load_dense_mlp(Weights& weights, const ModelConfig& config,
                                                    const std::string& prefix);

}  // namespace statepack
