// config.json of the supported families, checked; field names as in docs/models.md 2.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "statepack/status.hpp"
#include "statepack/types.hpp"

namespace statepack {

enum class LayerKind : std::uint8_t { kGdn, kKda, kGatedAttention, kMla };
enum class ModelFamily : std::uint8_t { kQwen3Next, kQwen35, kKimiLinear };

struct LayerConfig {
  LayerKind kind = LayerKind::kGdn;
  bool moe = false;
};

struct ModelConfig {
  ModelFamily family = ModelFamily::kQwen35;
  std::string model_type;
  /// "model." or "model.language_model."; Model::load corrects it to what the checkpoint has.
  std::string tensor_prefix;
  std::int64_t vocab = 0, hidden = 0, intermediate = 0;
  std::vector<LayerConfig> layers;
  float rms_norm_eps = 1e-6F;
  bool tied_head = false;
  std::int64_t max_position = 0;
  // Recurrent layers.
  LayerShape recurrent;  ///< the same for all recurrent layers
  int conv_kernel = 4;
  bool gdn_sigmoid_gate = false;  ///< output gate: sigmoid (KDA, or output_gate_type), else SiLU
  bool interleaved_qkvz = false;  ///< Qwen3-Next rows
  float kda_lower_bound = 0;      ///< < 0 selects the bounded gate
  // Attention.
  int n_heads = 0, n_kv_heads = 0, head_dim = 0;
  int rotary_dim = 0;
  double rope_theta = 1e7;
  // MLA.
  int kv_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  float kv_a_norm_eps = 1e-6F;
  // MoE.
  int n_experts = 0, n_experts_per_token = 0, n_shared_experts = 0;
  std::int64_t moe_intermediate = 0, shared_intermediate = 0;
  bool norm_topk_prob = true;
  bool router_sigmoid = false;
  bool router_biased_weights = false;  ///< vendor's in-place bias; parity tests only
  float routed_scaling = 1;
  std::vector<std::int32_t> eos_tokens;  ///< config.json and generation_config.json together

  /// Reads `dir`/config.json and, when there is one, generation_config.json. Errors: kNotFound,
  /// kCorrupt (a field of the wrong type or out of range), kUnsupported (well formed, but a variant
  /// that no code here computes); one sentence naming file, field and value.
  static Result<ModelConfig> load(const std::string& dir);
  static Result<ModelConfig> parse(std::string_view config_json, const std::string& label);
  std::vector<LayerShape> recurrent_shapes() const;  ///< one for each recurrent layer
  /// Channels of the short convolution: q of all key heads, k of all key heads, v of all value
  /// heads.
  std::int64_t conv_channels() const;
  /// f32 of short-convolution history a sequence keeps, all recurrent layers.
  std::int64_t conv_floats() const;
  bool is_recurrent(std::size_t layer) const {
    return layers[layer].kind == LayerKind::kGdn || layers[layer].kind == LayerKind::kKda;
  }
  std::int64_t n_attention_layers() const;
  /// f32 of attention cache that one token and attention layer cost: rotated keys and values, or
  /// the latent and its shared key.
  std::int64_t kv_floats_per_layer() const;
  /// Of them, those that the attention reads together: a head's key or value, or the latent row.
  std::int64_t kv_run_floats() const;
  /// Bytes of attention cache a token costs (f32), all attention layers.
  std::int64_t kv_bytes_per_token() const;
  /// Every field that the arithmetic depends on, as one JSON array: for fingerprints.
  std::string canonical() const;
};

}  // namespace statepack
