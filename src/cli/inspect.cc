// statepack inspect: what is in a model, plan or snapshot.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>

#include "base/file.hpp"
#include "base/safetensors.hpp"
#include "calibrate/head_statistics.hpp"
#include "cli/command.hpp"
#include "delta/step.hpp"
#include "eval/table.hpp"
#include "pool/pool.hpp"
#include "runtime/sizing.hpp"

namespace statepack::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kStateInterval = 64;  // tokens between two states that are looked at

struct Options {
  std::string path;
  std::string text;
  std::int64_t n_tokens = 4096;
  std::string plan;
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

// What the heads are like on a text.
Result<std::vector<std::vector<HeadStatistics>>> heads_on_text(const Options& options) {
  ModelOptions model;
  model.model = options.path;
  SP_ASSIGN_OR_RETURN(const Session session, open_session(model));
  std::vector<std::vector<std::int32_t>> segments(1);
  SP_ASSIGN_OR_RETURN(segments[0], encode_text(session, options.text));
  if (std::ssize(segments[0]) > options.n_tokens) {
    segments[0].resize(static_cast<std::size_t>(options.n_tokens));
  }
  auto heads = measure_heads(session.model->config().recurrent_shapes(), segments, kStateInterval,
                             prefill_from_zero(*session.model));
  if (!heads.ok()) {
    return Status(heads.status().code(), options.text + ": " + heads.status().message());
  }
  return heads;
}

Json head_json(const HeadStatistics& h) {
  return {{"half_life", h.half_life},         {"half_life_min", h.half_life_min},
          {"half_life_max", h.half_life_max}, {"lifetime", h.lifetime},
          {"omega_p90_p10", h.omega_spread},  {"row_peak", h.row_peak},
          {"column_peak", h.column_peak},     {"rms", h.rms}};
}

std::string head_table(const std::vector<std::vector<HeadStatistics>>& heads) {
  Table table({"layer", "head", "half-life", "least", "most", "error lifetime", "omega P90/P10",
               "row max/median", "column max/median", "RMS"});
  for (std::size_t l = 0; l < heads.size(); ++l) {
    for (std::size_t h = 0; h < heads[l].size(); ++h) {
      const HeadStatistics& s = heads[l][h];
      table.add({fmt::format("{}", l), fmt::format("{}", h), fmt::format("{:.4g}", s.half_life),
                 fmt::format("{:.4g}", s.half_life_min), fmt::format("{:.4g}", s.half_life_max),
                 fmt::format("{:.4g}", s.lifetime), fmt::format("{:.3g}", s.omega_spread),
                 fmt::format("{:.3g}", s.row_peak), fmt::format("{:.3g}", s.column_peak),
                 fmt::format("{:.3g}", s.rms)});
    }
  }
  return table.text();
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
  std::vector<std::vector<HeadStatistics>> heads;
  if (!options.text.empty()) {
    SP_ASSIGN_OR_RETURN(heads, heads_on_text(options));
  }
  if (options.json) {
    Json layers = Json::array();
    for (std::size_t i = 0; i < config.layers.size(); ++i) {
      Json layer{{"kind", layer_name(config.layers[i].kind)}, {"moe", config.layers[i].moe}};
      const auto lives = half_lives.find(static_cast<std::int64_t>(i));
      if (lives != half_lives.end()) layer["resting_half_life"] = lives->second;
      layers.push_back(std::move(layer));
    }
    Json by_layer = Json::array();
    for (const auto& layer : heads) {
      Json list = Json::array();
      for (const HeadStatistics& h : layer) list.push_back(head_json(h));
      by_layer.push_back(std::move(list));
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
                {"layers", layers},
                {"heads_on_text", by_layer}});
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
  if (!heads.empty()) {
    print(fmt::format("\non {} (tokens; with a gate a key channel the median over rows):\n\n{}",
                      options.text, head_table(heads)));
  }
  return kExitOk;
}

// Of one head of a snapshot.
struct StateValues {
  double rms = 0;
  float largest = 0;
  double row_peak = 0, column_peak = 0;
};

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

/// Rows of a plan by their width, and what they cost.
struct Spending {
  std::int64_t n_rows = 0;
  std::int64_t bits = 0;  ///< of codes
};

std::map<int, Spending> spending(const Plan& plan) {
  std::map<int, Spending> by_width;
  for (std::size_t l = 0; l < plan.layers.size(); ++l) {
    for (const std::uint8_t width : plan.layers[l].bits) {
      ++by_width[width].n_rows;
      by_width[width].bits += std::int64_t{width} * plan.shapes[l].V;
    }
  }
  return by_width;
}

Json parts_json(const PayloadBytes& parts) {
  return {{"codes", parts.codes},
          {"scales", parts.scales},
          {"zero_points", parts.zero_points},
          {"half_precision", parts.pivots},
          {"compensators", parts.compensators},
          {"padding", parts.padding}};
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
      if (!layer.guard.empty()) {
        head["guard"] = double{layer.guard[static_cast<std::size_t>(h)]};
      }
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
  const std::map<int, Spending> by_width = spending(plan);
  std::int64_t n_rows = 0, n_bits = 0;
  for (const auto& [width, s] : by_width) n_rows += s.n_rows, n_bits += s.bits;
  if (options.json) {
    Json widths = Json::object();
    for (const auto& [width, s] : by_width) {
      widths[std::to_string(width)] = {{"rows", s.n_rows}, {"code_bits", s.bits}};
    }
    print_json({{"kind", "plan"},
                {"provides", plan.kind},
                {"scheme", plan.scheme},
                {"fingerprint", plan.fingerprint()},
                {"model_fingerprint", plan.model_fingerprint},
                {"payload_bits", bits.payload},
                {"page_bytes", bits.page_bytes},
                {"shared_bytes", bits.shared_bytes},
                {"page_parts", parts_json(bits.parts)},
                {"rows_by_bits", widths},
                {"settings", plan.settings},
                {"layers", layers}});
    return kExitOk;
  }
  print(
      fmt::format("plan         {} for {}\nfingerprint  {}\nmodel        {}\n"
                  "pages        {} a sequence, {:.3f} bits a value\n",
                  plan.kind, plan.scheme, plan.fingerprint(), plan.model_fingerprint,
                  bytes_text(bits.page_bytes), bits.payload));
  int n_guarded = 0, n_heads = 0;
  for (const CompiledLayer& layer : compiled->layers()) {
    for (int h = 0; h < layer.shape.n_value_heads; ++h, ++n_heads) {
      n_guarded += layer.codec->guard(h) > 0 ? 1 : 0;
    }
  }
  if (n_guarded > 0) {
    print(fmt::format("guard        {} of {} heads: costly roundings are counted\n", n_guarded,
                      n_heads));
  }
  if (bits.shared_bytes > 0) {
    print(fmt::format("transforms   {}, once for all sequences\n", bytes_text(bits.shared_bytes)));
  }
  for (const auto& [key, value] : plan.settings) print(fmt::format("{:<12} {}\n", key, value));
  Table parts({"of a page", "bytes", "bits a value"});
  const Json of_page = parts_json(bits.parts);
  for (const auto& [part, n_bytes] : of_page.items()) {
    const double n = n_bytes.get<double>();
    if (n > 0) {
      parts.add({part, fmt::format("{:.0f}", n),
                 fmt::format("{:.4f}", 8 * n / static_cast<double>(bits.n_values))});
    }
  }
  print("\n" + parts.text());
  if (!by_width.empty()) {
    Table widths({"width", "rows", "of rows %", "of code bits %"});
    for (const auto& [width, s] : by_width) {
      widths.add({fmt::format("{} bits", width), fmt::format("{}", s.n_rows),
                  fmt::format("{:.1f}",
                              100.0 * static_cast<double>(s.n_rows) / static_cast<double>(n_rows)),
                  fmt::format("{:.1f}",
                              100.0 * static_cast<double>(s.bits) / static_cast<double>(n_bits))});
    }
    print("\n" + widths.text());
  }
  print("\n" + table.text());
  return kExitOk;
}

// The values of a snapshot's state, head by head; nothing where that takes a plan that is not
// named.
Result<std::vector<std::vector<StateValues>>> values_of(const Options& options,
                                                        const SnapshotInfo& info,
                                                        std::span<const std::byte> bytes) {
  SP_ASSIGN_OR_RETURN(const Scheme scheme, Scheme::parse(info.scheme));
  std::vector<std::vector<StateValues>> layers;
  if (scheme.needs_plan() && options.plan.empty()) return layers;
  std::optional<Plan> plan;
  if (!options.plan.empty()) {
    SP_ASSIGN_OR_RETURN(plan, Plan::load(options.plan));
  }
  SP_ASSIGN_OR_RETURN(auto compiled,
                      CompiledScheme::make(scheme, info.shapes, plan.has_value() ? &*plan : nullptr,
                                           info.model_fingerprint));
  PoolConfig config;
  config.n_slots = 1;
  config.conv_floats = info.conv_bytes / (scheme.conv == ConvFormat::kF32 ? 4 : 2);
  SP_ASSIGN_OR_RETURN(const auto pool, StatePool::create(std::move(compiled), config));
  SP_ASSIGN_OR_RETURN(const std::int64_t slot, pool->alloc());
  SP_RETURN_IF_ERROR(pool->restore(slot, bytes));
  ThreadPool threads(1);
  for (std::size_t l = 0; l < info.shapes.size(); ++l) {
    const LayerShape& shape = info.shapes[l];
    std::vector<float> S(static_cast<std::size_t>(shape.n_values()));
    SP_RETURN_IF_ERROR(restore_dense(pool->layer(static_cast<int>(l)), slot, S.data(), threads));
    auto& heads = layers.emplace_back();
    const std::int64_t n = std::int64_t{shape.K} * shape.V;
    for (int h = 0; h < shape.n_value_heads; ++h) {
      std::vector<double> rows(static_cast<std::size_t>(shape.K));
      std::vector<double> columns(static_cast<std::size_t>(shape.V));
      const float* const X = S.data() + h * n;
      add_powers(X, shape, rows, columns);
      StateValues& v = heads.emplace_back();
      for (std::int64_t i = 0; i < n; ++i) v.largest = std::max(v.largest, std::fabs(X[i]));
      v.rms = std::sqrt(std::accumulate(rows.begin(), rows.end(), 0.0) / static_cast<double>(n));
      v.row_peak = peak_to_median(rows);
      v.column_peak = peak_to_median(columns);
    }
  }
  return layers;
}

Result<int> inspect_snapshot(const Options& options, std::span<const std::byte> bytes) {
  Result<SnapshotInfo> info = read_snapshot_info(bytes);
  if (!info.ok()) {
    return Status(info.status().code(), options.path + ": " + info.status().message());
  }
  auto values = values_of(options, *info, bytes);
  if (!values.ok()) {
    return Status(values.status().code(), options.path + ": " + values.status().message());
  }
  if (options.json) {
    Json layers = Json::array();
    for (const auto& layer : *values) {
      Json heads = Json::array();
      for (const StateValues& v : layer) {
        heads.push_back({{"rms", v.rms},
                         {"largest", v.largest},
                         {"row_peak", v.row_peak},
                         {"column_peak", v.column_peak}});
      }
      layers.push_back(std::move(heads));
    }
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
                {"layers", shapes},
                {"values", layers}});
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
  if (values->empty()) {
    print("\nits values take the plan that it was packed with; name it with --plan\n");
    return kExitOk;
  }
  Table table({"layer", "head", "RMS", "largest", "row max/median", "column max/median"});
  for (std::size_t l = 0; l < values->size(); ++l) {
    for (std::size_t h = 0; h < (*values)[l].size(); ++h) {
      const StateValues& v = (*values)[l][h];
      table.add({fmt::format("{}", l), fmt::format("{}", h), fmt::format("{:.3g}", v.rms),
                 fmt::format("{:.3g}", v.largest), fmt::format("{:.3g}", v.row_peak),
                 fmt::format("{:.3g}", v.column_peak)});
    }
  }
  print("\n" + table.text());
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
  sub->add_option(
         "--text", o->text,
         "Read this text (or conversations, .jsonl) with the model: half-life, read impact and "
         "outliers by head")
      ->type_name("FILE");
  sub->add_option("--tokens", o->n_tokens, "Tokens of the text to read, from its start")
      ->check(CLI::Range(kStateInterval, std::int64_t{1} << 24))
      ->capture_default_str();
  sub->add_option("--plan", o->plan, "The plan of a snapshot whose scheme needs one")
      ->type_name("FILE");
  add_json_option(*sub, &o->json);
  sub->footer(
      "Examples:\n"
      "  statepack inspect models/statepack-gdn\n"
      "  statepack inspect models/statepack-gdn --text "
      "eval/data/wikitext2/wikitext2.valid.txt\n"
      "  statepack inspect models/statepack-gdn/plans/stepquant-6.safetensors --json");
  sub->callback([o, command] { *command = [o] { return inspect(*o); }; });
}

}  // namespace statepack::cli
