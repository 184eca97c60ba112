#include "scheme/layers.hpp"

#include <set>

#include "base/check.hpp"
#include "scheme/config.hpp"

namespace statepack {
namespace {

constexpr int kMaxLayers = 4096;
constexpr int kMaxHeads = 65536;
constexpr int kMaxWidth = 4096;  // K and V: products of these stay far from 2^63

std::string describe(const LayerShape& shape) {
  return std::to_string(shape.n_key_heads) + " key heads, " + std::to_string(shape.n_value_heads) +
         " value heads, K " + std::to_string(shape.K) + ", V " + std::to_string(shape.V) +
         (shape.gate == Gate::kScalar ? ", scalar gates" : ", per-channel gates");
}

Status check_shape(const LayerShape& shape, std::size_t layer) {
  const auto within = [](int n, int max) { return n >= 1 && n <= max; };
  if (within(shape.n_key_heads, kMaxHeads) && within(shape.n_value_heads, kMaxHeads) &&
      within(shape.K, kMaxWidth) && within(shape.V, kMaxWidth) &&
      shape.n_value_heads % shape.n_key_heads == 0) {
    return {};
  }
  return {Code::kInvalidArgument,
          "recurrent layer " + std::to_string(layer) + " (" + describe(shape) +
              ") is not a shape a state can have; head counts must be 1 to " +
              std::to_string(kMaxHeads) + ", widths 1 to " + std::to_string(kMaxWidth) +
              ", and value heads a multiple of key heads"};
}

/// The part of a scheme name that a plan is made for: "stepquant:6" of "stepquant:6,period=16".
std::string codec_part(std::string_view name) {
  return std::string(name.substr(0, name.find(',')));
}

Status check_plan(const Plan& plan, std::string_view kind, const std::string& codec,
                  const std::vector<LayerShape>& shapes, const std::string& model_fingerprint) {
  const auto mismatch = [](const std::string& what) { return Status(Code::kMismatch, what); };
  if (plan.kind != kind) {
    return mismatch("the plan is of kind '" + plan.kind + "', but scheme " + codec +
                    " needs one of kind '" + std::string(kind) + "'; calibrate for this scheme");
  }
  if (codec_part(plan.scheme) != codec) {
    return mismatch("the plan was made for scheme '" + plan.scheme + "', not for " + codec +
                    "; use the plan's scheme or calibrate for this one");
  }
  if (!model_fingerprint.empty() && plan.model_fingerprint != model_fingerprint) {
    return mismatch("the plan was made for the model with fingerprint '" + plan.model_fingerprint +
                    "', but this model's is '" + model_fingerprint +
                    "'; calibrate on this checkpoint");
  }
  if (plan.shapes.size() != shapes.size() || plan.layers.size() != shapes.size()) {
    return mismatch("the plan describes " + std::to_string(plan.shapes.size()) +
                    " recurrent layers, but the model has " + std::to_string(shapes.size()) +
                    "; calibrate on this model");
  }
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    if (plan.shapes[i] == shapes[i]) continue;
    return mismatch("recurrent layer " + std::to_string(i) + " has " + describe(plan.shapes[i]) +
                    " in the plan, but " + describe(shapes[i]) +
                    " in the model; calibrate on this model");
  }
  return {};
}

/// Per-channel decays commute with a transform of the key axis only when it is diagonal.
Status check_transforms(const LayerCodec& codec, const LayerShape& shape, std::size_t layer) {
  for (int head = 0; head < shape.n_value_heads; ++head) {
    const float* write = codec.write_transform(head);
    const float* read = codec.read_transform(head);
    SP_CHECK((write == nullptr) == (read == nullptr), "a codec transforms reads or writes only");
    if (write == nullptr || shape.gate == Gate::kScalar) continue;
    for (int i = 0; i < shape.K; ++i) {
      for (int j = 0; j < shape.K; ++j) {
        const std::int64_t at = std::int64_t{i} * shape.K + j;
        if (i == j || (write[at] == 0 && read[at] == 0)) continue;
        return {Code::kUnsupported, "recurrent layer " + std::to_string(layer) + ", value head " +
                                        std::to_string(head) +
                                        ": per-channel gates allow only diagonal transforms of "
                                        "the key axis; use a scheme without a transform"};
      }
    }
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<const CompiledScheme>> CompiledScheme::make(
    const Scheme& scheme, const std::vector<LayerShape>& shapes, const Plan* plan,
    const std::string& model_fingerprint) {
  SP_ASSIGN_OR_RETURN(const CodecConfig config, codec_config(scheme));
  if (shapes.empty() || shapes.size() > kMaxLayers) {
    return Status(Code::kInvalidArgument, "a model with " + std::to_string(shapes.size()) +
                                              " recurrent layers has no state to keep; 1 to " +
                                              std::to_string(kMaxLayers) + " are supported");
  }
  for (std::size_t i = 0; i < shapes.size(); ++i) SP_RETURN_IF_ERROR(check_shape(shapes[i], i));

  const std::string_view kind = config.info->plan_kind(config);
  const std::string codec =
      scheme.codec_arg.empty() ? scheme.codec : scheme.codec + ":" + scheme.codec_arg;
  auto compiled = std::make_shared<CompiledScheme>();
  if (kind.empty()) {
    plan = nullptr;  // one plan may be offered to a list of schemes
  } else if (plan == nullptr) {
    return Status(Code::kInvalidArgument, "scheme " + scheme.name() +
                                              " needs a calibrated plan; make one with `statepack "
                                              "calibrate` and pass it with --plan");
  } else {
    SP_RETURN_IF_ERROR(check_plan(*plan, kind, codec, shapes, model_fingerprint));
    compiled->plan_fingerprint_ = plan->fingerprint();
  }

  compiled->scheme_ = scheme;
  compiled->model_fingerprint_ = model_fingerprint;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    CompiledLayer layer;
    layer.shape = shapes[i];
    auto made = config.info->make(config, shapes[i], plan == nullptr ? nullptr : &plan->layers[i]);
    if (!made.ok()) {
      return Status(made.status().code(),
                    "recurrent layer " + std::to_string(i) + ": " + made.status().message());
    }
    layer.codec = std::move(*made);
    if (plan != nullptr) layer.plan = plan->layers[i];
    SP_RETURN_IF_ERROR(check_transforms(*layer.codec, shapes[i], i));
    layer.window =
        WindowLayout(shapes[i], scheme.records, scheme.mode, scheme.period > 1 ? scheme.period : 0);
    compiled->layers_.push_back(std::move(layer));
  }
  return std::shared_ptr<const CompiledScheme>(std::move(compiled));
}

SchemeBits CompiledScheme::bits() const {
  SchemeBits bits;
  for (const CompiledLayer& layer : layers_) {
    const PayloadBytes payload = layer.codec->payload();
    const WindowBytes& window = layer.window.parts();
    bits.n_values += layer.shape.n_values();
    bits.page_bytes += payload.total();
    bits.window_bytes += window.total();
    bits.cursor_bytes += static_cast<std::int64_t>(sizeof(Cursor));
    bits.alignment_bytes += (kStateAlign - payload.total() % kStateAlign) % kStateAlign;
    std::set<const float*> transforms;
    for (int head = 0; head < layer.shape.n_value_heads; ++head) {
      transforms.insert(layer.codec->write_transform(head));
      transforms.insert(layer.codec->read_transform(head));
    }
    transforms.erase(nullptr);
    bits.shared_bytes += std::ssize(transforms) * layer.shape.K * layer.shape.K *
                         static_cast<std::int64_t>(sizeof(float));
    bits.parts.codes += payload.codes;
    bits.parts.scales += payload.scales;
    bits.parts.zero_points += payload.zero_points;
    bits.parts.pivots += payload.pivots;
    bits.parts.compensators += payload.compensators;
    bits.parts.padding += payload.padding;
    bits.window_parts.keys += window.keys;
    bits.window_parts.key_scales += window.key_scales;
    bits.window_parts.values += window.values;
    bits.window_parts.value_scales += window.value_scales;
    bits.window_parts.gates += window.gates;
    bits.window_parts.betas += window.betas;
    bits.window_parts.totals += window.totals;
    bits.window_parts.padding += window.padding;
  }
  const double n = static_cast<double>(bits.n_values);
  bits.payload = 8.0 * static_cast<double>(bits.page_bytes) / n;
  bits.resident =
      8.0 * static_cast<double>(bits.page_bytes + bits.window_bytes + bits.cursor_bytes) / n;
  return bits;
}

}  // namespace statepack
