// Gated full attention of the Qwen models (docs/models.md 6).
#pragma once

#include <memory>
#include <string>

#include "model/block.hpp"
#include "model/config.hpp"
#include "model/weights.hpp"

namespace statepack {

/// `attention_layer` counts the attention layers from 0.
Result<std::unique_ptr<Mixer>> load_gated_attention(Weights& weights, const ModelConfig& config,
                                                    const std::string& prefix, int attention_layer);

}  // namespace statepack
