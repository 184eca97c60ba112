// The recurrent blocks: Gated DeltaNet (docs/models.md 5) and Kimi Delta Attention (models.md 7).
// They differ in where the decay and the output gate come from and how wide the decay is; the flow
// is one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/block.hpp"
#include "model/config.hpp"
#include "model/weights.hpp"

namespace statepack {

/// Where Qwen3-Next's rows, grouped by key head, lie in the order of Qwen3.5 (docs/models.md 5.1):
/// row i of q|k|v is row qkv[i] of in_proj_qkvz, and so on.
struct QkvzOrder {
  std::vector<std::int32_t> qkv, z;  ///< rows of in_proj_qkvz
  std::vector<std::int32_t> b, a;    ///< rows of in_proj_ba
};
QkvzOrder qkvz_order(const LayerShape& shape);

/// `layer` is the index of the layer in the checkpoint, `recurrent_layer` among the recurrent ones.
Result<std::unique_ptr<Mixer>> load_gdn(Weights& weights, const ModelConfig& config,
                                        const std::string& prefix, int recurrent_layer);
Result<std::unique_ptr<Mixer>> load_kda(Weights& weights, const ModelConfig& config,
                                        const std::string& prefix, int recurrent_layer);

}  // namespace statepack
