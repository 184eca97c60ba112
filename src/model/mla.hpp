// Multi-head latent attention of Kimi-Linear, without rotary embedding (docs/models.md 8).
#pragma once

#include <memory>
#include <string>

#include "model/block.hpp"
#include "model/config.hpp"
#include "model/weights.hpp"

namespace statepack {

/// `attention_layer` counts the attention layers from 0.
Result<std::unique_ptr<Mixer>> load_mla(Weights& weights, const ModelConfig& config,
                                        const std::string& prefix, int attention_layer);

}  // namespace statepack
