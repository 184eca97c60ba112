#include "runtime/sizing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>

#include "scheme/config.hpp"

namespace statepack {
namespace {

struct PublicModel {
  std::string_view name;
  int n_recurrent, n_key_heads, n_value_heads;
  Gate gate;
  std::int64_t kv_bytes_per_token;
  std::int64_t weight_bytes;
};

constexpr int kHeadDim = 128;    // dk = dv of every model below
constexpr int kConvHistory = 3;  // convolution of 4

constexpr std::array kPublicModels = {
    PublicModel{"Qwen3.5-0.8B", 18, 16, 16, Gate::kScalar, 12288, 1504786048},
    PublicModel{"Qwen3.5-2B", 18, 16, 16, Gate::kScalar, 12288, 3763650176},
    PublicModel{"Qwen3.5-4B", 24, 16, 32, Gate::kScalar, 32768, 8411502592},
    PublicModel{"Qwen3.5-9B", 24, 16, 32, Gate::kScalar, 32768, 17907606528},
    PublicModel{"Qwen3.5-27B", 48, 16, 48, Gate::kScalar, 65536, 53791996928},
    PublicModel{"Qwen3.6-27B", 48, 16, 48, Gate::kScalar, 65536, 53791996928},
    PublicModel{"Qwen3.8-27B", 48, 16, 48, Gate::kScalar, 65536, 53791996928},
    PublicModel{"Qwen3.5-35B-A3B", 30, 16, 32, Gate::kScalar, 20480, 69321221376},
    PublicModel{"Qwen3.6-35B-A3B", 30, 16, 32, Gate::kScalar, 20480, 69321221376},
    PublicModel{"Qwen3-Next-80B-A3B", 36, 16, 32, Gate::kScalar, 24576, 159348782592},
    PublicModel{"Qwen3.5-122B-A10B", 36, 16, 64, Gate::kScalar, 24576, 244223053824},
    PublicModel{"Qwen3.5-397B-A17B", 45, 16, 64, Gate::kScalar, 30720, 792692700672},
    PublicModel{"Kimi-Linear-48B-A3B", 20, 32, 32, Gate::kChannel, 8064, 98245363456},
};

std::string plain(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  return out;
}

}  // namespace

std::int64_t ModelGeometry::state_bytes_f32() const {
  std::int64_t n = 0;
  for (const LayerShape& shape : shapes) n += shape.n_values() * 4;
  return n;
}

ModelGeometry geometry(const std::string& name, const ModelConfig& config,
                       std::int64_t weight_bytes) {
  return {name, config.recurrent_shapes(), config.conv_floats(), config.kv_bytes_per_token(),
          weight_bytes};
}

std::span<const ModelGeometry> public_models() {
  static const std::vector<ModelGeometry> models = [] {
    std::vector<ModelGeometry> list;
    for (const PublicModel& m : kPublicModels) {
      const LayerShape shape{m.n_key_heads, m.n_value_heads, kHeadDim, kHeadDim, m.gate};
      const std::int64_t channels =
          std::int64_t{2} * m.n_key_heads * kHeadDim + std::int64_t{m.n_value_heads} * kHeadDim;
      list.push_back({std::string(m.name),
                      std::vector<LayerShape>(static_cast<std::size_t>(m.n_recurrent), shape),
                      m.n_recurrent * channels * kConvHistory, m.kv_bytes_per_token,
                      m.weight_bytes});
    }
    return list;
  }();
  return models;
}

Result<ModelGeometry> find_public_model(std::string_view name) {
  const std::string wanted = plain(name);
  std::vector<const ModelGeometry*> fits;
  std::string names;
  for (const ModelGeometry& model : public_models()) {
    const std::string have = plain(model.name);
    if (have == wanted) return model;
    if (!wanted.empty() && have.find(wanted) != std::string::npos) fits.push_back(&model);
    names += (names.empty() ? "" : ", ") + model.name;
  }
  if (fits.size() == 1) return *fits[0];
  if (fits.empty()) {
    return Status(
        Code::kNotFound,
        fmt::format("'{}' is neither a model folder nor one of the known models: {}", name, names));
  }
  std::string several;
  for (const ModelGeometry* model : fits) several += (several.empty() ? "" : ", ") + model->name;
  return Status(Code::kInvalidArgument, fmt::format("'{}' fits {}; name one", name, several));
}

Result<Plan> nominal_plan(const Scheme& scheme, const std::vector<LayerShape>& shapes) {
  SP_ASSIGN_OR_RETURN(const CodecConfig config, codec_config(scheme));
  double bits = 8;
  std::from_chars(scheme.codec_arg.data(), scheme.codec_arg.data() + scheme.codec_arg.size(), bits);
  // Rows of the two widths around it, in turn.
  static constexpr int kWidths[] = {0, 2, 3, 4, 5, 6, 8};
  const int* const above = std::lower_bound(std::begin(kWidths), std::end(kWidths) - 1, bits);
  const int* const below = *above > bits && above != kWidths ? above - 1 : above;
  const double share = above == below ? 0 : (bits - *below) / (*above - *below);
  Plan plan;
  plan.kind = std::string(config.info->plan_kind(config));
  plan.scheme = scheme.name();
  plan.shapes = shapes;
  for (const LayerShape& shape : shapes) {
    const auto n_rows = static_cast<std::size_t>(shape.n_value_heads) * shape.K;
    LayerPlan layer;
    for (std::size_t i = 0; i < n_rows; ++i) {
      const bool wide = std::floor(static_cast<double>(i + 1) * share) >
                        std::floor(static_cast<double>(i) * share);
      layer.bits.push_back(static_cast<std::uint8_t>(wide ? *above : *below));
    }
    if (plan.kind == "damp-rows") {  // an eighth of a head's rows stays in half precision
      for (std::size_t i = 0; i < n_rows; i += 8) layer.bits[i] = 16;
    }
    layer.row_weight.assign(n_rows, 1.0F);
    layer.row_scale.assign(n_rows, 1.0F);
    layer.high.assign(static_cast<std::size_t>(shape.n_value_heads), 0);
    std::fill_n(layer.high.begin(), (shape.n_value_heads + 3) / 4, std::uint8_t{1});
    plan.layers.push_back(std::move(layer));
  }
  return plan;
}

SequenceMemory sequence_memory(const ModelGeometry& model, const CompiledScheme& scheme,
                               std::int64_t context) {
  const SchemeBits bits = scheme.bits();
  const std::int64_t conv_bytes =
      model.conv_floats * (scheme.scheme().conv == ConvFormat::kF32 ? 4 : 2);
  return {bits.page_bytes, bits.window_bytes, bits.cursor_bytes, conv_bytes,
          model.kv_bytes_per_token * context};
}

std::int64_t sequences_that_fit(const ModelGeometry& model, const SequenceMemory& sequence,
                                std::int64_t memory) {
  const std::int64_t left = memory - model.weight_bytes;
  return left <= 0 || sequence.total() <= 0 ? 0 : left / sequence.total();
}

Result<std::int64_t> parse_bytes(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string unit;
  for (const char* c = end; c != text.data() + text.size(); ++c) {
    if (*c != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  }
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"", 1},         {"b", 1},      {"k", 0x1p10},   {"kib", 0x1p10}, {"m", 0x1p20},
      {"mib", 0x1p20}, {"g", 0x1p30}, {"gib", 0x1p30}, {"t", 0x1p40},   {"tib", 0x1p40},
      {"kb", 1e3},     {"mb", 1e6},   {"gb", 1e9},     {"tb", 1e12}};
  const auto* found = std::find_if(std::begin(kUnits), std::end(kUnits),
                                   [&](const auto& u) { return u.first == unit; });
  if (error != std::errc() || found == std::end(kUnits) ||
      !(value >= 0 && value * found->second < 9e18)) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("'{}' is not a size in bytes; write 80GiB, 24GB, 512MiB or 1048576", text));
  }
  return static_cast<std::int64_t>(value * found->second);
}

std::string format_bytes(std::int64_t n) {
  static constexpr std::string_view kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  auto value = static_cast<double>(n);
  std::size_t unit = 0;
  while (std::fabs(value) >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", n);
  return fmt::format("{:.{}f} {}", value,
                     value >= 99.95   ? 0
                     : value >= 9.995 ? 1
                                      : 2,
                     kUnits[unit]);
}

}  // namespace statepack
