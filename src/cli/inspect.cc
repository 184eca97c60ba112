// statepack inspect: what is in a model, plan or snapshot.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "base/file.hpp"
#include "base/safetensors.hpp"
#include "cli/command.hpp"
#include "eval/table.hpp"
#include "pool/pool.hpp"
#include "runtime/sizing.hpp"

namespace statepack::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string path;
  bool json = false;
};

Json shape_json(const LayerShape& s) {
  return {{"key_heads", s.n_key_heads},
          {"value_heads", s.n_value_heads},
          {"K", s.K},
          {"V", s.V},
          {"gate", s.gate == Gate::kScalar ? "scalar" : "channel"}};
}

std::string shape_text(const LayerShape& s) {
  return fmt::format("{} key heads, {} value heads, {} x {}, {} gate", s.n_key_heads,
                     s.n_value_heads, s.K, s.V, s.gate == Gate::kScalar ? "scalar" : "per-channel");
}

std::string bytes_text(std::int64_t n) { return fmt::format("{} ({})", n, format_bytes(n)); }

// Half-life in tokens at the layer's resting gate, a = 0: g = -exp(A_log) softplus(dt_bias), one
// value for each head (or the median of a head's channels). What a text does to the gate comes on
// top.
std::vector<double> resting_half_lives(const std::vector<float>& a_log,
                                       const std::vector<float>& dt_bias) {
  std::vector<double> lives;
  if (a_log.empty() || dt_bias.size() % a_log.size() != 0) return lives;
  const std::size_t width = dt_bias.size() / a_log.size();
  for (std::size_t h = 0; h < a_log.size(); ++h) {
    std::vector<double> channels;
    for (std::size_t i = 0; i < width; ++i) {
      const double x = static_cast<double>(dt_bias[h * width + i]);
      const double softplus = x > 20 ? x : std::log1p(std::exp(x));
      channels.push_back(std::log(2.0) /
                         (std::exp(static_cast<double>(a_log[h])) * std::max(softplus, 1e-300)));
    }
    std::nth_element(channels.begin(), channels.begin() + std::ssize(channels) / 2, channels.end());
    lives.push_back(channels[channels.size() / 2]);
  }
  return lives;
}

std::string_view layer_name(LayerKind kind) {
  switch (kind) {
    case LayerKind::kGdn:
      return "gated delta";
    case LayerKind::kKda:
      return "kimi delta";
    case LayerKind::kGatedAttention:
      return "attention";
    case LayerKind::kMla:
      return "latent attention";
  }
  return "unknown";
}

std::string join_numbers(const std::vector<double>& values, std::string_view format) {
  std::string text;
  for (const double v : values) {
    text += (text.empty() ? "" : " ") + fmt::format(fmt::runtime(format), v);
  }
  return text;
}

Result<int> inspect_model(const Options& options) {
  SP_ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::load(options.path));
  SP_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(options.path));
  std::int64_t n_bytes = 0;
  std::int64_t n_parameters = 0;
  std::map<std::string, std::int64_t> dtypes;
  std::map<std::int64_t, std::vector<double>> half_lives;  // by layer of the model
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    n_bytes += static_cast<std::int64_t>(tensor.n_bytes);
    n_parameters += tensor.n_elements();
    ++dtypes[std::string(dtype_name(tensor.dtype))];
    constexpr std::string_view kEnd = ".A_log";
    if (!name.ends_with(kEnd)) continue;
    const TensorView* dt_bias =
        checkpoint.find(name.substr(0, name.size() - kEnd.size()) + ".dt_bias");
    const std::size_t at = name.find("layers.");
    if (dt_bias == nullptr || at == std::string::npos) continue;
    SP_ASSIGN_OR_RETURN(const std::vector<float> a, to_f32(tensor));
    SP_ASSIGN_OR_RETURN(const std::vector<float> b, to_f32(*dt_bias));
    half_lives[std::atoll(name.c_str() + at + 7)] = resting_half_lives(a, b);
  }
  const std::int64_t state = geometry("", config, 0).state_bytes_f32();
  if (options.json) {
    Json layers = Json::array();
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      Json layer{{"kind", layer_name(config.layers[i].kind)}, {"moe", config.layers[i].moe}};
      const auto lives = half_lives.find(static_cast<std::int64_t>(i));
      if (lives != half_lives.end()) layer["resting_half_life"] = lives->second;
      layers.push_back(std::move(layer));
    }
    print_json({{"kind", "model"},
                {"model_type", config.model_type},
                {"parameters", n_parameters},
                {"weight_bytes", n_bytes},
                {"tensors", checkpoint.tensors().size()},
                {"dtypes", dtypes},
                {"hidden", config.hidden},
                {"vocab", config.vocab},
                {"max_position", config.max_position},
                {"recurrent", shape_json(config.recurrent)},
                {"recurrent_layers", config.recurrent_shapes().size()},
                {"state_bytes_fp32", state},
                {"conv_bytes", config.conv_floats() * 4},
                {"kv_bytes_per_token", config.kv_bytes_per_token()},
                {"eos_tokens", config.eos_tokens},
                {"layers", layers}});
    return kExitOk;
  }
  std::string types;
  for (const auto& [name, n] : dtypes) types += fmt::format(" {} x {}", n, name);
  print(fmt::format(
      "model            {}, {} layers, hidden {}, vocabulary {}, {} positions\n"
      "weights          {:.1f} M parameters, {}:{}\n"
      "recurrent        {} layers: {}\n"
      "state            {} in fp32, convolution {}\n"
      "attention cache  {} a token\n\n",
      config.model_type, config.layers.size(), config.hidden, config.vocab, config.max_position,
      static_cast<double>(n_parameters) / 1e6, bytes_text(n_bytes), types,
      config.recurrent_shapes().size(), shape_text(config.recurrent), bytes_text(state),
      bytes_text(config.conv_floats() * 4), bytes_text(config.kv_bytes_per_token())));
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    std::string line = fmt::format("layer {:>2}  {}{}", i, layer_name(config.layers[i].kind),
                                   config.layers[i].moe ? ", experts" : "");
    const auto lives = half_lives.find(static_cast<std::int64_t>(i));
    if (lives != half_lives.end()) {
      line += "; half-life at rest, tokens a head: " + join_numbers(lives->second, "{:.3g}");
    }
    print(line + "\n");
  }
  return kExitOk;
}

// Of the K rows of one head.
struct HeadSummary {
  double mean_bits = 0;
  int min_bits = 0, max_bits = 0;
  double weight_spread = 1;  ///< largest to smallest row weight
  bool high = false;
};

HeadSummary summarise(const LayerShape& shape, const LayerPlan& layer, int head) {
  HeadSummary h;
  const auto k = static_cast<std::size_t>(shape.K);
  const std::size_t begin = static_cast<std::size_t>(head) * k;
  if (!layer.bits.empty()) {
    const auto bits = std::span(layer.bits).subspan(begin, k);
    std::int64_t sum = 0;
    for (const std::uint8_t b : bits) sum += b;
    h.mean_bits = static_cast<double>(sum) / static_cast<double>(k);
    h.min_bits = *std::min_element(bits.begin(), bits.end());
    h.max_bits = *std::max_element(bits.begin(), bits.end());
  }
  if (!layer.row_weight.empty()) {
    const auto w = std::span(layer.row_weight).subspan(begin, k);
    h.weight_spread = static_cast<double>(*std::max_element(w.begin(), w.end())) /
                      static_cast<double>(*std::min_element(w.begin(), w.end()));
  }
  h.high = !layer.high.empty() && layer.high[static_cast<std::size_t>(head)] != 0;
  return h;
}

Result<int> inspect_plan(const Options& options) {
  SP_ASSIGN_OR_RETURN(const Plan plan, Plan::load(options.path));
  Json layers = Json::array();
  Table table({"layer", "head", "bits", "least", "most", "row weight spread", "8 bits"});
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    Json heads = Json::array();
    const LayerPlan& layer = plan.layers[l];
    for (int h = 0; h < plan.shapes[l].n_value_heads; ++h) {
      const HeadSummary s = summarise(plan.shapes[l], layer, h);
      Json head = Json::object();
      if (!layer.bits.empty()) {
        head.update(
            {{"mean_bits", s.mean_bits}, {"min_bits", s.min_bits}, {"max_bits", s.max_bits}});
      }
      if (!layer.row_weight.empty()) head["row_weight_spread"] = s.weight_spread;
      if (!layer.high.empty()) head["high"] = s.high;
      heads.push_back(std::move(head));
      const bool has_bits = !layer.bits.empty();
      table.add({fmt::format("{}", l), fmt::format("{}", h),
                 has_bits ? fmt::format("{:.2f}", s.mean_bits) : "-",
                 has_bits ? fmt::format("{}", s.min_bits) : "-",
                 has_bits ? fmt::format("{}", s.max_bits) : "-",
                 layer.row_weight.empty() ? "-" : fmt::format("{:.1f}", s.weight_spread),
                 layer.high.empty() ? "-"
                 : s.high           ? "yes"
                                    : "no"});
    }
    layers.push_back({{"shape", shape_json(plan.shapes[l])}, {"heads", heads}});
  }
  SP_ASSIGN_OR_RETURN(const Scheme scheme, Scheme::parse(plan.scheme));
  SP_ASSIGN_OR_RETURN(const auto compiled, CompiledScheme::make(scheme, plan.shapes, &plan, ""));
  const SchemeBits bits = compiled->bits();
  if (options.json) {
    print_json({{"kind", "plan"},
                {"provides", plan.kind},
                {"scheme", plan.scheme},
                {"fingerprint", plan.fingerprint()},
                {"model_fingerprint", plan.model_fingerprint},
                {"payload_bits", bits.payload},
                {"page_bytes", bits.page_bytes},
                {"settings", plan.settings},
                {"layers", layers}});
    return kExitOk;
  }
  print(
      fmt::format("plan         {} for {}\nfingerprint  {}\nmodel        {}\n"
                  "pages        {} a sequence, {:.3f} bits a value\n",
                  plan.kind, plan.scheme, plan.fingerprint(), plan.model_fingerprint,
                  bytes_text(bits.page_bytes), bits.payload));
  for (const auto& [key, value] : plan.settings) print(fmt::format("{:<12} {}\n", key, value));
  print("\n" + table.text());
  return kExitOk;
}

Result<int> inspect_snapshot(const Options& options, std::span<const std::byte> bytes) {
  Result<SnapshotInfo> info = read_snapshot_info(bytes);
  if (!info.ok()) {
    return Status(info.status().code(), options.path + ": " + info.status().message());
  }
  if (options.json) {
    Json shapes = Json::array();
    for (const LayerShape& s : info->shapes) shapes.push_back(shape_json(s));
    print_json({{"kind", "snapshot"},
                {"scheme", info->scheme},
                {"plan_fingerprint", info->plan_fingerprint},
                {"model_fingerprint", info->model_fingerprint},
                {"tokens", info->n_tokens},
                {"page_bytes", info->page_bytes},
                {"cursor_bytes", info->cursor_bytes},
                {"window_bytes", info->window_bytes},
                {"conv_bytes", info->conv_bytes},
                {"layers", shapes}});
    return kExitOk;
  }
  print(fmt::format(
      "snapshot  {} after {} tokens; checksums right\nplan      {}\nmodel     {}\n"
      "pages     {}\nwindows   {}\ncursors   {}\nconvolution {}\nlayers    {}{}\n",
      info->scheme, info->n_tokens,
      info->plan_fingerprint.empty() ? "none" : info->plan_fingerprint, info->model_fingerprint,
      bytes_text(info->page_bytes), bytes_text(info->window_bytes), bytes_text(info->cursor_bytes),
      bytes_text(info->conv_bytes), info->shapes.size(),
      info->shapes.empty() ? "" : ", the first: " + shape_text(info->shapes[0])));
  return kExitOk;
}

Result<int> inspect(const Options& options) {
  if (std::filesystem::is_directory(options.path)) return inspect_model(options);
  if (options.path.ends_with(".safetensors")) return inspect_plan(options);
  SP_ASSIGN_OR_RETURN(const auto file, MappedFile::open(options.path));
  return inspect_snapshot(options, file->bytes());
}

}  // namespace

void add_inspect(CLI::App& app, Command* command) {
  CLI::App* sub = app.add_subcommand(
      "inspect", "What is in a model folder, a plan (.safetensors) or a snapshot");
  const auto o = std::make_shared<Options>();
  sub->add_option("path", o->path, "Model folder, plan or snapshot file")->required();
  add_json_option(*sub, &o->json);
  sub->footer(
      "Examples:\n"
      "  statepack inspect models/statepack-gdn\n"
      "  statepack inspect models/statepack-gdn/plans/stepquant-6.safetensors --json");
  sub->callback([o, command] { *command = [o] { return inspect(*o); }; });
}

}  // namespace statepack::cli
