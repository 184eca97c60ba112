#include "model/config.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/file.hpp"

namespace statepack {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxConfigBytes = std::size_t{4} << 20;
// No published model comes near these; they keep every product of sizes far below 2^63.
constexpr std::int64_t kMaxVocab = 1 << 24, kMaxHidden = 1 << 17, kMaxIntermediate = 1 << 20;
constexpr std::int64_t kMaxLayers = 1024, kMaxHeads = 4096, kMaxHeadDim = 1024;
constexpr std::int64_t kMaxExperts = 1 << 14, kMaxLoraRank = 1 << 14;
constexpr std::int64_t kMaxPosition = std::int64_t{1} << 31;

/// Reads fields of one JSON object. The first error sticks; every later read returns its fallback.
class Fields {
 public:
  Fields(const json& object, std::string where, Status* status)
      : object_(object), where_(std::move(where)), status_(status) {}

  const json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  void fail(Code code, const std::string& what) const {
    if (status_->ok()) *status_ = Status(code, where_ + ": " + what);
  }

  /// Without a fallback the field must be there.
  std::int64_t integer(const char* key, std::optional<std::int64_t> fallback, std::int64_t low,
                       std::int64_t high) const {
    const json* value = find(key);
    if (value == nullptr) return or_missing(key, fallback, low);
    std::int64_t n = 0;
    if (value->is_number_unsigned()) {
      n = static_cast<std::int64_t>(std::min(value->get<std::uint64_t>(), std::uint64_t{1} << 62));
    } else if (value->is_number_integer()) {
      n = value->get<std::int64_t>();
    }
    if (!value->is_number_integer() || n < low || n > high) {
      wrong(key, *value, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
      return low;
    }
    return n;
  }
  int small(const char* key, std::optional<std::int64_t> fallback, std::int64_t low,
            std::int64_t high) const {
    return static_cast<int>(integer(key, fallback, low, high));
  }
  double number(const char* key, std::optional<double> fallback, double low, double high) const {
    const json* value = find(key);
    if (value == nullptr) return or_missing(key, fallback, low);
    const double x = value->is_number() ? value->get<double>() : NAN;
    if (!(x >= low && x <= high)) {
      wrong(key, *value, "a number from " + json(low).dump() + " to " + json(high).dump());
      return low;
    }
    return x;
  }
  bool boolean(const char* key, bool fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) {
      wrong(key, *value, "true or false");
      return fallback;
    }
    return value->get<bool>();
  }
  std::string text(const char* key, const char* fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string()) {
      wrong(key, *value, "a string");
      return fallback;
    }
    return value->get<std::string>();
  }
  /// An array of integers in [low, high]; a single integer counts as an array of one.
  std::vector<std::int64_t> integers(const char* key, std::int64_t low, std::int64_t high) const {
    std::vector<std::int64_t> out;
    const json* value = find(key);
    if (value == nullptr) return out;
    const json list = value->is_array() ? *value : json::array({*value});
    for (const json& item : list) {
      const bool is_integer =
          item.is_number_integer() &&
          !(item.is_number_unsigned() && item.get<std::uint64_t>() > std::uint64_t{1} << 62);
      if (!is_integer || item.get<std::int64_t>() < low || item.get<std::int64_t>() > high) {
        wrong(key, item, "integers from " + std::to_string(low) + " to " + std::to_string(high));
        return {};
      }
      out.push_back(item.get<std::int64_t>());
    }
    return out;
  }
  /// An object; empty when absent.
  Fields object(const char* key) const {
    static const json kEmpty = json::object();
    const json* value = find(key);
    if (value != nullptr && !value->is_object()) {
      wrong(key, *value, "an object");
      value = nullptr;
    }
    return {value == nullptr ? kEmpty : *value, where_ + ": " + key, status_};
  }
  void wrong(const char* key, const json& value, const std::string& expected) const {
    std::string shown = value.dump(-1, ' ', true, json::error_handler_t::replace);
    if (shown.size() > 40) shown = shown.substr(0, 37) + "...";
    fail(Code::kCorrupt, std::string(key) + " is " + shown + "; expected " + expected);
  }
  void refuse(const std::string& what) const { fail(Code::kUnsupported, what); }

 private:
  template <class T>
  T or_missing(const char* key, std::optional<T> fallback, T otherwise) const {
    if (fallback) return *fallback;
    fail(Code::kCorrupt, std::string(key) + " is missing");
    return otherwise;
  }

  const json& object_;
  std::string where_;
  Status* status_;
};

std::string in_quotes(const std::string& text) {
  std::string out(1, '\'');
  out.append(text, 0, 60);
  out.push_back('\'');
  return out;
}

// Class defaults, docs/models.md 2.
struct QwenDefaults {
  std::int64_t vocab, hidden, intermediate, layers, heads, kv_heads, n_experts, top_k;
};
constexpr QwenDefaults kNextDefaults{151936, 2048, 5632, 48, 16, 2, 512, 10};
constexpr QwenDefaults kDenseDefaults{248320, 4096, 12288, 32, 16, 4, 0, 0};
constexpr QwenDefaults kMoeDefaults{248320, 2048, 5632, 40, 16, 2, 256, 8};

void check_common(const Fields& f) {
  if (f.find("quantization_config") != nullptr) {
    f.refuse(
        "quantization_config: quantised checkpoints are not supported; "
        "use the bf16, f16 or f32 release");
  }
  if (const std::string act = f.text("hidden_act", "silu"); act != "silu") {
    f.refuse("hidden_act " + in_quotes(act) + " is not supported; only 'silu' is");
  }
}

void check_divides(const Fields& f, std::int64_t parts, const char* parts_name, std::int64_t whole,
                   const char* whole_name) {
  if (whole % parts != 0) {
    f.fail(Code::kCorrupt, std::string(whole_name) + " (" + std::to_string(whole) +
                               ") is not a multiple of " + parts_name + " (" +
                               std::to_string(parts) + ")");
  }
}

void check_top_k(const Fields& f, const ModelConfig& c, const char* name) {
  if (c.n_experts_per_token > c.n_experts) {
    f.fail(Code::kCorrupt, std::string(name) + " (" + std::to_string(c.n_experts_per_token) +
                               ") exceeds num_experts (" + std::to_string(c.n_experts) + ")");
  }
}

// Plain rotary embedding only. For text, M-RoPE with its three equal positions is plain
// (docs/models.md 6).
void read_rope(const Fields& f, ModelConfig& c) {
  const Fields nested = f.object("rope_parameters");
  const Fields scaling = f.object("rope_scaling");
  for (const Fields* rope : {&nested, &scaling}) {
    for (const char* key : {"rope_type", "type"}) {
      const std::string type = rope->text(key, "default");
      if (type != "default") {
        f.refuse("rope type " + in_quotes(type) + " is not supported; only 'default' is");
      }
    }
  }
  const Fields& theta = nested.find("rope_theta") != nullptr ? nested : f;
  c.rope_theta = theta.number("rope_theta", std::nullopt, 1, 1e12);
  const Fields& factor = nested.find("partial_rotary_factor") != nullptr ? nested : f;
  const double part = factor.number("partial_rotary_factor", 0.25, 0, 1);
  c.rotary_dim = static_cast<int>(c.head_dim * part);
  if (c.rotary_dim < 2 || c.rotary_dim % 2 != 0) {
    f.fail(Code::kCorrupt, "partial_rotary_factor gives " + std::to_string(c.rotary_dim) +
                               " rotary dimensions of head_dim " + std::to_string(c.head_dim) +
                               "; expected an even number of at least 2");
  }
}

void read_qwen_layers(const Fields& f, std::size_t n_layers, const QwenDefaults& d,
                      ModelConfig& c) {
  c.layers.resize(n_layers);
  if (const json* types = f.find("layer_types"); types != nullptr) {
    if (!types->is_array() || types->size() != n_layers) {
      f.fail(Code::kCorrupt, "layer_types is not an array of num_hidden_layers (" +
                                 std::to_string(n_layers) + ") entries");
      return;
    }
    for (std::size_t i = 0; i < n_layers; ++i) {
      const json& type = (*types)[i];
      if (type == "full_attention") {
        c.layers[i].kind = LayerKind::kGatedAttention;
      } else if (type != "linear_attention") {
        f.wrong("layer_types", type, "'linear_attention' or 'full_attention'");
        return;
      }
    }
  } else {
    const std::int64_t interval = f.integer("full_attention_interval", 4, 1, kMaxLayers);
    for (std::size_t i = 0; i < n_layers; ++i) {
      if ((static_cast<std::int64_t>(i) + 1) % interval == 0) {
        c.layers[i].kind = LayerKind::kGatedAttention;
      }
    }
  }
  if (d.n_experts == 0) return;
  const bool next = c.family == ModelFamily::kQwen3Next;
  c.n_experts = f.small("num_experts", d.n_experts, next ? 0 : 1, kMaxExperts);
  if (c.n_experts == 0) return;
  c.n_experts_per_token = f.small("num_experts_per_tok", d.top_k, 1, kMaxExperts);
  check_top_k(f, c, "num_experts_per_tok");
  c.moe_intermediate = f.integer("moe_intermediate_size", 512, 1, kMaxIntermediate);
  c.shared_intermediate = f.integer("shared_expert_intermediate_size", 512, 1, kMaxIntermediate);
  c.n_shared_experts = 1;
  c.norm_topk_prob = next ? f.boolean("norm_topk_prob", true) : true;
  for (LayerConfig& layer : c.layers) layer.moe = true;
  if (!next) return;
  const std::int64_t step = f.integer("decoder_sparse_step", 1, 1, kMaxLayers);
  for (std::size_t i = 0; i < n_layers; ++i) {
    c.layers[i].moe = (static_cast<std::int64_t>(i) + 1) % step == 0;
  }
  for (std::int64_t i : f.integers("mlp_only_layers", 0, static_cast<std::int64_t>(n_layers) - 1)) {
    c.layers[static_cast<std::size_t>(i)].moe = false;
  }
}

void read_qwen(const Fields& f, const QwenDefaults& d, ModelConfig& c) {
  c.vocab = f.integer("vocab_size", d.vocab, 1, kMaxVocab);
  c.hidden = f.integer("hidden_size", d.hidden, 1, kMaxHidden);
  c.intermediate = f.integer("intermediate_size", d.intermediate, 1, kMaxIntermediate);
  c.max_position = f.integer("max_position_embeddings", 262144, 1, kMaxPosition);
  c.rms_norm_eps = static_cast<float>(f.number("rms_norm_eps", 1e-6, 1e-12, 1e-1));
  const auto n_layers =
      static_cast<std::size_t>(f.integer("num_hidden_layers", d.layers, 1, kMaxLayers));
  read_qwen_layers(f, n_layers, d, c);

  LayerShape& r = c.recurrent;
  r.K = f.small("linear_key_head_dim", 128, 1, kMaxHeadDim);
  r.V = f.small("linear_value_head_dim", 128, 1, kMaxHeadDim);
  r.n_key_heads = f.small("linear_num_key_heads", 16, 1, kMaxHeads);
  r.n_value_heads = f.small("linear_num_value_heads", 32, 1, kMaxHeads);
  check_divides(f, r.n_key_heads, "linear_num_key_heads", r.n_value_heads,
                "linear_num_value_heads");
  c.conv_kernel = f.small("linear_conv_kernel_dim", 4, 2, 16);
  c.interleaved_qkvz = c.family == ModelFamily::kQwen3Next;
  const std::string gate = f.text("output_gate_type", "silu");
  c.gdn_sigmoid_gate = gate == "sigmoid";
  if (gate != "silu" && gate != "swish" && gate != "sigmoid") {
    f.refuse("output_gate_type " + in_quotes(gate) +
             " is not supported; 'silu', 'swish' and 'sigmoid' are");
  }

  c.n_heads = f.small("num_attention_heads", d.heads, 1, kMaxHeads);
  c.n_kv_heads = f.small("num_key_value_heads", d.kv_heads, 1, kMaxHeads);
  check_divides(f, c.n_kv_heads, "num_key_value_heads", c.n_heads, "num_attention_heads");
  c.head_dim = f.small("head_dim", 256, 2, kMaxHeadDim);
  read_rope(f, c);
  if (f.boolean("attention_bias", false)) f.refuse("attention_bias true is not supported");
  if (!f.boolean("attn_output_gate", true)) f.refuse("attn_output_gate false is not supported");
}

void read_kimi_layers(const Fields& f, const Fields& linear, ModelConfig& c) {
  const auto n_layers = f.integer("num_hidden_layers", std::nullopt, 1, kMaxLayers);
  c.layers.resize(static_cast<std::size_t>(n_layers));
  std::vector<int> seen(c.layers.size(), 0);
  // Both lists count layers from 1.
  for (const auto& [key, kind] :
       {std::pair{"kda_layers", LayerKind::kKda}, std::pair{"full_attn_layers", LayerKind::kMla}}) {
    for (std::int64_t i : linear.integers(key, 1, n_layers)) {
      c.layers[static_cast<std::size_t>(i - 1)].kind = kind;
      ++seen[static_cast<std::size_t>(i - 1)];
    }
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (seen[i] != 1) {
      linear.fail(Code::kCorrupt, "layer " + std::to_string(i + 1) + " (counted from 1) is named " +
                                      std::to_string(seen[i]) +
                                      " times by kda_layers and full_attn_layers; expected once");
    }
  }
  c.n_experts = f.small("num_experts", 0, 0, kMaxExperts);
  if (c.n_experts == 0) return;
  c.n_experts_per_token = f.small("num_experts_per_token", std::nullopt, 1, kMaxExperts);
  check_top_k(f, c, "num_experts_per_token");
  c.moe_intermediate = f.integer("moe_intermediate_size", std::nullopt, 1, kMaxIntermediate);
  c.n_shared_experts = f.small("num_shared_experts", 0, 0, 64);
  c.shared_intermediate = c.moe_intermediate * c.n_shared_experts;
  c.router_sigmoid = true;
  c.norm_topk_prob = f.boolean("moe_renormalize", true);
  c.routed_scaling = static_cast<float>(f.number("routed_scaling_factor", 1.0, 1e-6, 1e6));
  if (const std::string act = f.text("moe_router_activation_func", "sigmoid"); act != "sigmoid") {
    f.refuse("moe_router_activation_func " + in_quotes(act) +
             " is not supported; only 'sigmoid' is");
  }
  for (const char* key : {"num_expert_group", "topk_group"}) {
    if (const std::int64_t n = f.integer(key, 1, 1, kMaxExperts); n != 1) {
      f.refuse(std::string(key) + " " + std::to_string(n) +
               " is not supported: experts are chosen without groups");
    }
  }
  const std::int64_t first = f.integer("first_k_dense_replace", 0, 0, n_layers);
  const std::int64_t every = f.integer("moe_layer_freq", 1, 1, kMaxLayers);
  for (std::int64_t i = first; i < n_layers; ++i) {
    c.layers[static_cast<std::size_t>(i)].moe = i % every == 0;
  }
}

void read_kimi(const Fields& f, ModelConfig& c) {
  c.vocab = f.integer("vocab_size", std::nullopt, 1, kMaxVocab);
  c.hidden = f.integer("hidden_size", std::nullopt, 1, kMaxHidden);
  c.intermediate = f.integer("intermediate_size", std::nullopt, 1, kMaxIntermediate);
  c.max_position = f.integer("model_max_length", 1048576, 1, kMaxPosition);
  c.rms_norm_eps = static_cast<float>(f.number("rms_norm_eps", 1e-5, 1e-12, 1e-1));
  const Fields linear = f.object("linear_attn_config");
  read_kimi_layers(f, linear, c);

  LayerShape& r = c.recurrent;
  r.gate = Gate::kChannel;
  r.K = r.V = linear.small("head_dim", std::nullopt, 1, kMaxHeadDim);
  r.n_key_heads = r.n_value_heads = linear.small("num_heads", std::nullopt, 1, kMaxHeads);
  c.conv_kernel = linear.small("short_conv_kernel_size", 4, 2, 16);
  c.kda_lower_bound = static_cast<float>(linear.number("gate_lower_bound", 0.0, -1e4, 0));
  c.gdn_sigmoid_gate = true;

  c.n_heads = f.small("num_attention_heads", std::nullopt, 1, kMaxHeads);
  c.n_kv_heads = f.small("num_key_value_heads", c.n_heads, 1, kMaxHeads);
  if (c.n_kv_heads != c.n_heads) {
    f.refuse("num_key_value_heads (" + std::to_string(c.n_kv_heads) +
             ") differs from num_attention_heads (" + std::to_string(c.n_heads) +
             "), which latent attention does not know");
  }
  c.kv_lora_rank = f.small("kv_lora_rank", std::nullopt, 1, kMaxLoraRank);
  c.qk_nope_head_dim = f.small("qk_nope_head_dim", std::nullopt, 1, kMaxHeadDim);
  c.qk_rope_head_dim = f.small("qk_rope_head_dim", std::nullopt, 1, kMaxHeadDim);
  c.v_head_dim = f.small("v_head_dim", std::nullopt, 1, kMaxHeadDim);
  c.head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim;
  c.kv_a_norm_eps = static_cast<float>(f.number("kv_a_norm_eps", 1e-6, 1e-12, 1e-1));
  if (f.find("q_lora_rank") != nullptr) f.refuse("q_lora_rank is not supported; it must be null");
  if (!f.boolean("mla_use_nope", false)) {
    f.refuse("mla_use_nope false is not supported: latent attention has no rotary embedding here");
  }
}

void add_eos(const Fields& f, ModelConfig& c) {
  for (std::int64_t id : f.integers("eos_token_id", 0, c.vocab - 1)) {
    const auto token = static_cast<std::int32_t>(id);
    if (std::find(c.eos_tokens.begin(), c.eos_tokens.end(), token) == c.eos_tokens.end()) {
      c.eos_tokens.push_back(token);
    }
  }
}

Result<json> parse_object(std::string_view text, const std::string& label) {
  json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    return Status(Code::kCorrupt, label + ": not a JSON object; download the file again");
  }
  return object;
}

}  // namespace

Result<ModelConfig> ModelConfig::parse(std::string_view config_json, const std::string& label) {
  SP_ASSIGN_OR_RETURN(const json root, parse_object(config_json, label));
  Status status;
  const Fields top(root, label, &status);
  const Fields nested = top.object("text_config");
  const Fields& text = top.find("text_config") != nullptr ? nested : top;

  ModelConfig c;
  c.model_type = text.text("model_type", top.text("model_type", "").c_str());
  check_common(top);
  if (&text != &top) check_common(text);
  if (c.model_type == "qwen3_next") {
    c.family = ModelFamily::kQwen3Next;
    read_qwen(text, kNextDefaults, c);
  } else if (c.model_type == "qwen3_5" || c.model_type == "qwen3_5_text") {
    read_qwen(text, kDenseDefaults, c);
  } else if (c.model_type == "qwen3_5_moe" || c.model_type == "qwen3_5_moe_text") {
    read_qwen(text, kMoeDefaults, c);
  } else if (c.model_type == "kimi_linear") {
    c.family = ModelFamily::kKimiLinear;
    read_kimi(text, c);
  } else {
    text.refuse("model_type " + in_quotes(c.model_type) +
                " is not supported; qwen3_next, qwen3_5, qwen3_5_moe and kimi_linear are");
  }
  c.tied_head = text.boolean("tie_word_embeddings", top.boolean("tie_word_embeddings", false));
  add_eos(top, c);
  if (&text != &top) add_eos(text, c);
  if (!status.ok()) return status;
  c.tensor_prefix = &text != &top ? "model.language_model." : "model.";
  return c;
}

Result<ModelConfig> ModelConfig::load(const std::string& dir) {
  const std::string path = dir + "/config.json";
  SP_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxConfigBytes));
  SP_ASSIGN_OR_RETURN(ModelConfig config, parse(text, path));
  const std::string generation_path = dir + "/generation_config.json";
  const Result<std::string> generation = read_text_file(generation_path, kMaxConfigBytes);
  if (!generation.ok()) {
    if (generation.status().code() == Code::kNotFound) return config;
    return generation.status();
  }
  SP_ASSIGN_OR_RETURN(const json object, parse_object(*generation, generation_path));
  Status status;
  add_eos(Fields(object, generation_path, &status), config);
  if (!status.ok()) return status;
  return config;
}

std::vector<LayerShape> ModelConfig::recurrent_shapes() const {
  std::vector<LayerShape> shapes;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (is_recurrent(i)) shapes.push_back(recurrent);
  }
  return shapes;
}

std::int64_t ModelConfig::conv_channels() const {
  return 2 * std::int64_t{recurrent.n_key_heads} * recurrent.K +
         std::int64_t{recurrent.n_value_heads} * recurrent.V;
}

std::int64_t ModelConfig::conv_floats() const {
  return static_cast<std::int64_t>(recurrent_shapes().size()) * conv_channels() * (conv_kernel - 1);
}

std::int64_t ModelConfig::kv_floats_per_layer() const {
  return family == ModelFamily::kKimiLinear ? kv_lora_rank + qk_rope_head_dim
                                            : 2 * std::int64_t{n_kv_heads} * head_dim;
}

std::int64_t ModelConfig::kv_run_floats() const {
  return family == ModelFamily::kKimiLinear ? kv_floats_per_layer() : head_dim;
}

std::int64_t ModelConfig::n_attention_layers() const {
  return static_cast<std::int64_t>(layers.size() - recurrent_shapes().size());
}

std::int64_t ModelConfig::kv_bytes_per_token() const {
  return n_attention_layers() * kv_floats_per_layer() * static_cast<std::int64_t>(sizeof(float));
}

std::string ModelConfig::canonical() const {
  json fields = json::array({static_cast<int>(family),
                             vocab,
                             hidden,
                             intermediate,
                             rms_norm_eps,
                             tied_head,
                             recurrent.n_key_heads,
                             recurrent.n_value_heads,
                             recurrent.K,
                             recurrent.V,
                             static_cast<int>(recurrent.gate),
                             conv_kernel,
                             gdn_sigmoid_gate,
                             interleaved_qkvz,
                             kda_lower_bound,
                             n_heads,
                             n_kv_heads,
                             head_dim,
                             rotary_dim,
                             rope_theta,
                             kv_lora_rank,
                             qk_nope_head_dim,
                             qk_rope_head_dim,
                             v_head_dim,
                             kv_a_norm_eps,
                             n_experts,
                             n_experts_per_token,
                             n_shared_experts,
                             moe_intermediate,
                             shared_intermediate,
                             norm_topk_prob,
                             router_sigmoid,
                             router_biased_weights,
                             routed_scaling});
  for (const LayerConfig& layer : layers) {
    fields.push_back({static_cast<int>(layer.kind), layer.moe});
  }
  return fields.dump();
}

}  // namespace statepack
