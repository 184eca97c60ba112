// Mixtures of experts: Qwen's softmax router with a gated shared expert, Kimi's sigmoid router with
// a correction bias (docs/models.md 9).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/block.hpp"
#include "model/config.hpp"
#include "model/weights.hpp"

namespace statepack {

struct Router {
  int n_experts = 0, top_k = 0;
  bool sigmoid = false;         ///< scores by sigmoid, else softmax over all experts
  bool normalise = true;        ///< chosen weights are divided by their sum
  bool biased_weights = false;  ///< weights come from biased scores too (parity tests)
  float scaling = 1;            ///< on the weights
  std::vector<float> bias;      ///< on the scores, for the choice only; may be empty

  struct Choice {
    int expert;
    float weight;
  };
  /// The top_k experts of one row of logits [n_experts], in the order of expert numbers; the lower
  /// number wins a tie. NaN logits choose the first experts with NaN weights.
  void choose(const float* logits, std::span<Choice> chosen) const;
};

Result<std::unique_ptr<FeedForward>> load_moe(Weights& weights, const ModelConfig& config,
                                              const std::string& prefix);

}  // namespace statepack
