// config.json of every family: defaults, published shapes, and one clear error for each bad field.
#include "model/config.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace statepack {
namespace {

using nlohmann::json;

json next_config() {
  return json::parse(R"({"model_type": "qwen3_next", "rope_theta": 10000000})");
}
json dense_config() {
  return json::parse(R"({
    "model_type": "qwen3_5_text", "vocab_size": 8192, "hidden_size": 384,
    "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "tie_word_embeddings": true, "eos_token_id": 8191,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0,
                        "partial_rotary_factor": 0.25}})");
}
json kimi_config() {
  return json::parse(R"({
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304,
    "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "q_lora_rank": null,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": true, "rms_norm_eps": 1e-5, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "moe_router_activation_func": "sigmoid", "moe_renormalize": true,
    "routed_scaling_factor": 2.446, "use_grouped_topk": true, "num_expert_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "linear_attn_config": {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
      "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
      "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26]}})");
}

Result<ModelConfig> parse(const json& config) {
  return ModelConfig::parse(config.dump(), "config.json");
}
ModelConfig good(const json& config) {
  const Result<ModelConfig> result = parse(config);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? *result : ModelConfig();
}

TEST(Config, Qwen3NextDefaultsAreThe80B) {
  const ModelConfig c = good(next_config());
  EXPECT_EQ(c.family, ModelFamily::kQwen3Next);
  EXPECT_EQ(c.vocab, 151936);
  EXPECT_EQ(c.hidden, 2048);
  EXPECT_EQ(c.layers.size(), 48U);
  EXPECT_EQ(c.recurrent, (LayerShape{16, 32, 128, 128, Gate::kScalar}));
  EXPECT_EQ(c.n_heads, 16);
  EXPECT_EQ(c.n_kv_heads, 2);
  EXPECT_EQ(c.rotary_dim, 64);
  EXPECT_EQ(c.n_experts, 512);
  EXPECT_EQ(c.n_experts_per_token, 10);
  EXPECT_TRUE(c.interleaved_qkvz);
  EXPECT_EQ(c.tensor_prefix, "model.");
  for (std::size_t i = 0; i < 48; ++i) {
    EXPECT_EQ(c.layers[i].kind, i % 4 == 3 ? LayerKind::kGatedAttention : LayerKind::kGdn);
    EXPECT_TRUE(c.layers[i].moe);
  }
  // docs/models.md 13: bytes of state, convolution history and (bf16) cache.
  EXPECT_EQ(std::int64_t(c.recurrent_shapes().size()) * c.recurrent.n_values() * 4, 75497472);
  EXPECT_EQ(c.conv_floats() * 4, 3538944);
  EXPECT_EQ(c.kv_bytes_per_token() / 2, 24576);
}

TEST(Config, NestedTextConfigOfTheDense27B) {
  json text = dense_config();
  text.merge_patch(json::parse(R"({"vocab_size": 248320, "hidden_size": 5120,
    "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "eos_token_id": 248044})"));
  text.erase("tie_word_embeddings");
  const json root = {{"model_type", "qwen3_5"},
                     {"text_config", text},
                     {"tie_word_embeddings", false},
                     {"eos_token_id", json::array({248046})}};
  const ModelConfig c = good(root);
  EXPECT_EQ(c.tensor_prefix, "model.language_model.");
  EXPECT_EQ(c.model_type, "qwen3_5_text");
  EXPECT_FALSE(c.tied_head);
  EXPECT_EQ(c.eos_tokens, (std::vector<std::int32_t>{248046, 248044}));
  EXPECT_EQ(std::int64_t(c.recurrent_shapes().size()) * c.recurrent.n_values() * 4, 150994944);
  EXPECT_EQ(c.conv_floats() * 4, 5898240);
  EXPECT_EQ(c.kv_bytes_per_token() / 2, 65536);
}

TEST(Config, TheHeadMayBeTiedAtEitherLevel) {
  json text = dense_config();
  text.erase("tie_word_embeddings");
  const json root = {
      {"model_type", "qwen3_5"}, {"text_config", text}, {"tie_word_embeddings", true}};
  EXPECT_TRUE(good(root).tied_head);
  EXPECT_TRUE(good(dense_config()).tied_head);
}

TEST(Config, LayerTypesWinOverTheInterval) {
  json config = dense_config();
  config["layer_types"] = json::parse(R"(["full_attention", "linear_attention",
    "linear_attention", "linear_attention", "full_attention", "linear_attention",
    "linear_attention", "linear_attention"])");
  const ModelConfig c = good(config);
  EXPECT_EQ(c.layers[0].kind, LayerKind::kGatedAttention);
  EXPECT_EQ(c.layers[3].kind, LayerKind::kGdn);
  config.erase("layer_types");
  config["full_attention_interval"] = 2;
  EXPECT_EQ(good(config).layers[1].kind, LayerKind::kGatedAttention);
}

TEST(Config, SparseLayersOfQwen3Next) {
  json config = next_config();
  config["num_hidden_layers"] = 8;
  config["decoder_sparse_step"] = 2;
  config["mlp_only_layers"] = {3};
  const ModelConfig c = good(config);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(c.layers[i].moe, i % 2 == 1 && i != 3) << i;
  config["num_experts"] = 0;
  for (const LayerConfig& layer : good(config).layers) EXPECT_FALSE(layer.moe);
}

TEST(Config, MoeOf35HasExpertsEverywhere) {
  json config = next_config();
  config["model_type"] = "qwen3_5_moe_text";
  const ModelConfig c = good(config);
  EXPECT_EQ(c.family, ModelFamily::kQwen35);
  EXPECT_EQ(c.layers.size(), 40U);
  EXPECT_EQ(c.n_experts, 256);
  EXPECT_EQ(c.n_experts_per_token, 8);
  EXPECT_EQ(c.shared_intermediate, 512);
  for (const LayerConfig& layer : c.layers) EXPECT_TRUE(layer.moe);
}

TEST(Config, KimiLinearCountsItsLayersFromOne) {
  const ModelConfig c = good(kimi_config());
  EXPECT_EQ(c.family, ModelFamily::kKimiLinear);
  EXPECT_EQ(c.recurrent, (LayerShape{32, 32, 128, 128, Gate::kChannel}));
  for (std::size_t i = 0; i < 27; ++i) {
    EXPECT_EQ(c.layers[i].kind, i % 4 == 3 || i == 26 ? LayerKind::kMla : LayerKind::kKda) << i;
    EXPECT_EQ(c.layers[i].moe, i > 0) << i;
  }
  EXPECT_TRUE(c.router_sigmoid);
  EXPECT_FLOAT_EQ(c.routed_scaling, 2.446F);
  EXPECT_FLOAT_EQ(c.kv_a_norm_eps, 1e-6F);
  EXPECT_EQ(c.conv_floats() * 4, 2949120);
  EXPECT_EQ(c.kv_bytes_per_token() / 2, 8064);
  EXPECT_EQ(std::int64_t(c.recurrent_shapes().size()) * c.recurrent.n_values() * 4, 41943040);
}

TEST(Config, OutputGate) {
  json config = dense_config();
  EXPECT_FALSE(good(config).gdn_sigmoid_gate);
  for (const char* name : {"silu", "swish"}) {
    config["output_gate_type"] = name;
    EXPECT_FALSE(good(config).gdn_sigmoid_gate);
  }
  config["output_gate_type"] = "sigmoid";
  EXPECT_TRUE(good(config).gdn_sigmoid_gate);
}

TEST(Config, DemoModelCollectsItsEndTokens) {
  const auto c = ModelConfig::load(SP_SOURCE_DIR "/models/statepack-gdn");
  ASSERT_TRUE(c.ok()) << c.status().message();
  EXPECT_EQ(c->eos_tokens.front(), 8191);
  EXPECT_EQ(c->max_position, 8192);
}

struct Bad {
  const char* base;   ///< "dense", "next", "kimi"
  const char* patch;  ///< merged into it; null removes a field
  Code code;
  const char* message;
};

TEST(Config, EveryBadFieldGetsOneClearError) {
  const Bad cases[] = {
      {"dense", R"({"hidden_size": "384"})", Code::kCorrupt,
       "config.json: hidden_size is \"384\"; expected an integer from 1 to 131072"},
      {"dense", R"({"hidden_size": 384.5})", Code::kCorrupt,
       "config.json: hidden_size is 384.5; expected an integer from 1 to 131072"},
      {"dense", R"({"hidden_size": 0})", Code::kCorrupt,
       "config.json: hidden_size is 0; expected an integer from 1 to 131072"},
      {"dense", R"({"num_hidden_layers": -8})", Code::kCorrupt,
       "config.json: num_hidden_layers is -8; expected an integer from 1 to 1024"},
      {"dense", R"({"vocab_size": 18446744073709551615})", Code::kCorrupt,
       "config.json: vocab_size is 18446744073709551615; expected an integer from 1 to 16777216"},
      {"dense", R"({"vocab_size": 1e300})", Code::kCorrupt,
       "config.json: vocab_size is 1e+300; expected an integer from 1 to 16777216"},
      {"dense", R"({"linear_key_head_dim": 4096})", Code::kCorrupt,
       "config.json: linear_key_head_dim is 4096; expected an integer from 1 to 1024"},
      {"dense", R"({"intermediate_size": [1024]})", Code::kCorrupt,
       "config.json: intermediate_size is [1024]; expected an integer from 1 to 1048576"},
      {"dense", R"({"tie_word_embeddings": "yes"})", Code::kCorrupt,
       "config.json: tie_word_embeddings is \"yes\"; expected true or false"},
      {"dense", R"({"rms_norm_eps": 0})", Code::kCorrupt,
       "config.json: rms_norm_eps is 0; expected a number from 1e-12 to 0.1"},
      {"dense", R"({"linear_num_value_heads": 5})", Code::kCorrupt,
       "config.json: linear_num_value_heads (5) is not a multiple of linear_num_key_heads (2)"},
      {"dense", R"({"num_key_value_heads": 3})", Code::kCorrupt,
       "config.json: num_attention_heads (4) is not a multiple of num_key_value_heads (3)"},
      {"dense", R"({"rope_parameters": {"rope_type": "yarn"}})", Code::kUnsupported,
       "config.json: rope type 'yarn' is not supported; only 'default' is"},
      {"dense", R"({"rope_parameters": {"rope_theta": null}})", Code::kCorrupt,
       "config.json: rope_theta is missing"},
      {"dense", R"({"rope_parameters": 7})", Code::kCorrupt,
       "config.json: rope_parameters is 7; expected an object"},
      {"dense", R"({"rope_parameters": {"partial_rotary_factor": 0.01}})", Code::kCorrupt,
       "config.json: partial_rotary_factor gives 1 rotary dimensions of head_dim 128; expected an "
       "even number of at least 2"},
      {"dense", R"({"layer_types": ["linear_attention"]})", Code::kCorrupt,
       "config.json: layer_types is not an array of num_hidden_layers (8) entries"},
      {"dense", R"({"num_hidden_layers": 1, "layer_types": ["mamba"]})", Code::kCorrupt,
       "config.json: layer_types is \"mamba\"; expected 'linear_attention' or 'full_attention'"},
      {"dense", R"({"full_attention_interval": 0})", Code::kCorrupt,
       "config.json: full_attention_interval is 0; expected an integer from 1 to 1024"},
      {"dense", R"({"attention_bias": true})", Code::kUnsupported,
       "config.json: attention_bias true is not supported"},
      {"dense", R"({"attn_output_gate": false})", Code::kUnsupported,
       "config.json: attn_output_gate false is not supported"},
      {"dense", R"({"output_gate_type": "relu"})", Code::kUnsupported,
       "config.json: output_gate_type 'relu' is not supported; 'silu', 'swish' and 'sigmoid' are"},
      {"dense", R"({"hidden_act": "gelu"})", Code::kUnsupported,
       "config.json: hidden_act 'gelu' is not supported; only 'silu' is"},
      {"dense", R"({"quantization_config": {"quant_method": "fp8"}})", Code::kUnsupported,
       "config.json: quantization_config: quantised checkpoints are not supported; use the bf16, "
       "f16 or f32 release"},
      {"dense", R"({"model_type": "llama"})", Code::kUnsupported,
       "config.json: model_type 'llama' is not supported; qwen3_next, qwen3_5, qwen3_5_moe and "
       "kimi_linear are"},
      {"dense", R"({"model_type": null})", Code::kUnsupported,
       "config.json: model_type '' is not supported; qwen3_next, qwen3_5, qwen3_5_moe and "
       "kimi_linear are"},
      {"dense", R"({"model_type": 5})", Code::kCorrupt,
       "config.json: model_type is 5; expected a string"},
      {"dense", R"({"eos_token_id": 8192})", Code::kCorrupt,
       "config.json: eos_token_id is 8192; expected integers from 0 to 8191"},
      {"dense", R"({"eos_token_id": [1, "2"]})", Code::kCorrupt,
       "config.json: eos_token_id is \"2\"; expected integers from 0 to 8191"},
      {"next", R"({"num_experts_per_tok": 600})", Code::kCorrupt,
       "config.json: num_experts_per_tok (600) exceeds num_experts (512)"},
      {"next", R"({"mlp_only_layers": [48]})", Code::kCorrupt,
       "config.json: mlp_only_layers is 48; expected integers from 0 to 47"},
      {"next", R"({"rope_scaling": {"type": "linear", "factor": 4}})", Code::kUnsupported,
       "config.json: rope type 'linear' is not supported; only 'default' is"},
      {"kimi", R"({"hidden_size": null})", Code::kCorrupt, "config.json: hidden_size is missing"},
      {"kimi", R"({"num_expert_group": 8})", Code::kUnsupported,
       "config.json: num_expert_group 8 is not supported: experts are chosen without groups"},
      {"kimi", R"({"moe_router_activation_func": "softmax"})", Code::kUnsupported,
       "config.json: moe_router_activation_func 'softmax' is not supported; only 'sigmoid' is"},
      {"kimi", R"({"q_lora_rank": 1536})", Code::kUnsupported,
       "config.json: q_lora_rank is not supported; it must be null"},
      {"kimi", R"({"mla_use_nope": false})", Code::kUnsupported,
       "config.json: mla_use_nope false is not supported: latent attention has no rotary embedding "
       "here"},
      {"kimi", R"({"num_key_value_heads": 8})", Code::kUnsupported,
       "config.json: num_key_value_heads (8) differs from num_attention_heads (32), which latent "
       "attention does not know"},
      {"kimi", R"({"linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24]}})",
       Code::kCorrupt,
       "config.json: linear_attn_config: layer 27 (counted from 1) is named 0 times by kda_layers "
       "and full_attn_layers; expected once"},
      {"kimi", R"({"linear_attn_config": {"full_attn_layers": [0, 4]}})", Code::kCorrupt,
       "config.json: linear_attn_config: full_attn_layers is 0; expected integers from 1 to 27"},
      {"kimi", R"({"linear_attn_config": null})", Code::kCorrupt,
       "config.json: linear_attn_config: layer 1 (counted from 1) is named 0 times by kda_layers "
       "and full_attn_layers; expected once"},
  };
  for (const Bad& bad : cases) {
    json config = bad.base == std::string("dense")  ? dense_config()
                  : bad.base == std::string("next") ? next_config()
                                                    : kimi_config();
    config.merge_patch(json::parse(bad.patch));
    const Result<ModelConfig> result = parse(config);
    ASSERT_FALSE(result.ok()) << bad.patch;
    EXPECT_EQ(result.status().code(), bad.code) << bad.patch;
    EXPECT_EQ(result.status().message(), bad.message) << bad.patch;
  }
}

TEST(Config, WhatIsNoJsonObjectIsRefused) {
  for (const char* text : {"", "{", "[]", "null", "7", "{\"a\": }", "\xff\xfe"}) {
    const auto result = ModelConfig::parse(text, "x/config.json");
    ASSERT_FALSE(result.ok()) << text;
    EXPECT_EQ(result.status().code(), Code::kCorrupt);
    EXPECT_EQ(result.status().message(),
              "x/config.json: not a JSON object; download the file again");
  }
}

// A thousand levels of nesting and numbers of a thousand digits end in an error, not in a crash.
TEST(Config, HostileTextEndsInAnError) {
  const std::string deep = std::string(100000, '[');
  EXPECT_FALSE(ModelConfig::parse("{\"text_config\": " + deep, "c").ok());
  std::string digits = R"({"model_type": "qwen3_5", "vocab_size": )" + std::string(1000, '9') + "}";
  const auto result = ModelConfig::parse(digits, "c");
  ASSERT_FALSE(result.ok());
  const std::string long_text =
      R"({"model_type": "qwen3_5", "vocab_size": ")" + std::string(5000, 'x') + "\"}";
  EXPECT_LT(ModelConfig::parse(long_text, "c").status().message().size(), 200U);
}

TEST(Config, AMissingFileIsNamed) {
  const auto result = ModelConfig::load("/no/such/folder");
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.status().code(), Code::kNotFound);
  EXPECT_THAT(result.status().message(), ::testing::HasSubstr("/no/such/folder/config.json"));
}

}  // namespace
}  // namespace statepack
