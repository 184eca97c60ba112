#include "scheme/plan.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/check.hpp"
#include "base/half.hpp"
#include "base/hash.hpp"
#include "base/safetensors.hpp"

namespace statepack {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxLayers = 4096;
constexpr int kMaxHeads = 65536;
constexpr int kMaxWidth = 4096;

std::string tensor_name(std::size_t layer, std::string_view field) {
  return "layers." + std::to_string(layer) + "." + std::string(field);
}

void hash_number(Sha256& sha, std::uint64_t number) {
  std::array<std::byte, 8> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(number >> (8 * i) & 0xff);
  }
  sha.update(bytes);
}

void hash_text(Sha256& sha, std::string_view text) {
  hash_number(sha, text.size());
  sha.update(text);
}

void hash_floats(Sha256& sha, std::span<const float> values) {
  hash_number(sha, values.size());
  for (const float x : values) hash_number(sha, std::bit_cast<std::uint32_t>(x));
}

void hash_bytes(Sha256& sha, std::span<const std::uint8_t> bytes) {
  hash_number(sha, bytes.size());
  sha.update(std::as_bytes(bytes));
}

Json summary_of(const LayerPlan& layer) {
  Json summary = Json::object();
  if (!layer.bits.empty()) {
    std::map<std::string, std::int64_t> rows;  // width -> rows that have it
    double sum = 0;
    for (const std::uint8_t b : layer.bits) {
      ++rows[std::to_string(b)];
      sum += b;
    }
    summary["rows_by_bits"] = rows;
    summary["mean_bits"] = sum / static_cast<double>(layer.bits.size());
  }
  if (!layer.high.empty()) {
    std::vector<int> heads;
    for (std::size_t h = 0; h < layer.high.size(); ++h) {
      if (layer.high[h] != 0) heads.push_back(static_cast<int>(h));
    }
    summary["high_heads"] = heads;
  }
  return summary;
}

/// Reads the metadata's JSON; every lookup names what is missing.
class Reader {
 public:
  explicit Reader(std::string label) : label_(std::move(label)) {}

  Status corrupt(const std::string& what) const {
    return {Code::kCorrupt, label_ + ": " + what + "; calibrate again"};
  }

  Result<std::string> text(const Json& object, const std::string& key) const {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_string()) {
      return corrupt("the plan's metadata has no text '" + key + "'");
    }
    return found->get<std::string>();
  }

  Result<int> number(const Json& object, const std::string& key, int lo, int hi) const {
    const auto found = object.find(key);
    if (found == object.end() || !found->is_number_integer()) {
      return corrupt("the plan's metadata has no whole number '" + key + "'");
    }
    const bool fits = found->is_number_unsigned()
                          ? found->get<std::uint64_t>() <= static_cast<std::uint64_t>(hi)
                          : found->get<std::int64_t>() <= hi;
    if (!fits || found->get<std::int64_t>() < lo) {
      return corrupt("the plan's metadata has '" + key + "' " + found->dump() + ", outside " +
                     std::to_string(lo) + " to " + std::to_string(hi));
    }
    return found->get<int>();
  }

  Result<LayerShape> shape(const Json& layer) const {
    if (!layer.is_object()) return corrupt("an entry of 'layers' in the metadata is no object");
    LayerShape shape;
    SP_ASSIGN_OR_RETURN(shape.n_key_heads, number(layer, "n_key_heads", 1, kMaxHeads));
    SP_ASSIGN_OR_RETURN(shape.n_value_heads, number(layer, "n_value_heads", 1, kMaxHeads));
    SP_ASSIGN_OR_RETURN(shape.K, number(layer, "K", 1, kMaxWidth));
    SP_ASSIGN_OR_RETURN(shape.V, number(layer, "V", 1, kMaxWidth));
    SP_ASSIGN_OR_RETURN(const std::string gate, text(layer, "gate"));
    if (gate != "scalar" && gate != "channel") {
      return corrupt("the plan's metadata has gate '" + gate +
                     "', which is neither 'scalar' nor "
                     "'channel'");
    }
    shape.gate = gate == "scalar" ? Gate::kScalar : Gate::kChannel;
    if (shape.n_value_heads % shape.n_key_heads != 0) {
      return corrupt("the plan's metadata has " + std::to_string(shape.n_value_heads) +
                     " value heads, not a multiple of its " + std::to_string(shape.n_key_heads) +
                     " key heads");
    }
    return shape;
  }

 private:
  std::string label_;
};

/// A tensor with its shape and dtype checked.
Result<TensorView> take(const SafeTensors& file, const std::string& name, DType dtype,
                        const std::vector<std::int64_t>& shape) {
  SP_ASSIGN_OR_RETURN(TensorView tensor, file.get(name, shape));
  if (tensor.dtype != dtype) {
    return Status(Code::kCorrupt, file.label() + ": tensor '" + name + "' is " +
                                      std::string(dtype_name(tensor.dtype)) + ", but plans keep " +
                                      std::string(dtype_name(dtype)) + "; calibrate again");
  }
  return tensor;
}

std::vector<std::uint8_t> bytes_of(const TensorView& tensor) {
  std::vector<std::uint8_t> bytes(tensor.n_bytes);
  if (!bytes.empty()) std::memcpy(bytes.data(), tensor.data, bytes.size());
  return bytes;
}

Status check_values(const std::string& label, const std::string& prefix, const LayerShape& shape,
                    const LayerPlan& layer) {
  const auto bad = [&](std::string_view field, std::size_t i, int width, const std::string& what) {
    const std::size_t row = i / static_cast<std::size_t>(width);
    std::string where = "head " + std::to_string(width == 1 ? i : row);
    if (width > 1) where += ", row " + std::to_string(i % static_cast<std::size_t>(width));
    return Status(Code::kCorrupt, label + ": tensor '" + prefix + std::string(field) + "', " +
                                      where + ": " + what + "; calibrate again");
  };
  constexpr std::array<std::uint8_t, 8> kWidths = {0, 2, 3, 4, 5, 6, 8, 16};
  for (std::size_t i = 0; i < layer.bits.size(); ++i) {
    if (std::find(kWidths.begin(), kWidths.end(), layer.bits[i]) == kWidths.end()) {
      return bad("bits", i, shape.K,
                 "a width of " + std::to_string(layer.bits[i]) + " bits does not exist");
    }
  }
  for (std::size_t i = 0; i < layer.row_weight.size(); ++i) {
    if (!std::isfinite(layer.row_weight[i]) || layer.row_weight[i] <= 0) {
      return bad("row_weight", i, shape.K, "the weight is not a positive finite number");
    }
  }
  for (std::size_t i = 0; i < layer.row_scale.size(); ++i) {
    if (!std::isfinite(layer.row_scale[i]) || layer.row_scale[i] <= 0) {
      return bad("row_scale", i, shape.K, "the scale is not a positive finite number");
    }
  }
  for (std::size_t i = 0; i < layer.transform.size(); ++i) {
    if (!std::isfinite(layer.transform[i])) {
      const std::size_t row = i / static_cast<std::size_t>(shape.K);
      return bad("transform", row, shape.K, "the row holds NaN or Inf");
    }
  }
  for (std::size_t i = 0; i < layer.feedback.size(); ++i) {
    const auto k = static_cast<std::size_t>(shape.K);
    const bool lower = i % k < i / k % k;
    if (lower ? std::isfinite(layer.feedback[i]) : layer.feedback[i] == 0) continue;
    return bad("feedback", i / k, shape.K,
               "the row holds NaN, Inf or a value on or above the diagonal");
  }
  for (std::size_t i = 0; i < layer.guard.size(); ++i) {
    if (!std::isfinite(layer.guard[i]) || layer.guard[i] < 0) {
      return bad("guard", i, 1, "the cost is not a finite number of at least 0");
    }
  }
  for (std::size_t i = 0; i < layer.high.size(); ++i) {
    if (layer.high[i] > 1) {
      return bad("high", i, 1, "the mark " + std::to_string(layer.high[i]) + " is neither 0 nor 1");
    }
  }
  return {};
}

}  // namespace

std::string Plan::fingerprint() const {
  Sha256 sha;
  hash_text(sha, "statepack plan");
  hash_number(sha, kFormatVersion);
  hash_text(sha, kind);
  hash_text(sha, model_fingerprint);
  hash_number(sha, shapes.size());
  for (const LayerShape& shape : shapes) {
    for (const int n : {shape.n_key_heads, shape.n_value_heads, shape.K, shape.V}) {
      hash_number(sha, static_cast<std::uint64_t>(n));
    }
    hash_number(sha, shape.gate == Gate::kScalar ? 0 : 1);
  }
  for (const LayerPlan& layer : layers) {
    hash_bytes(sha, layer.bits);
    hash_floats(sha, layer.row_weight);
    hash_bytes(sha, layer.high);
    if (layer.row_scale.empty() && layer.transform.empty()) continue;  // plans older than these
    hash_floats(sha, layer.row_scale);
    hash_floats(sha, layer.transform);
    if (!layer.feedback.empty()) hash_floats(sha, layer.feedback);
  }
  return sha.hex();
}

Status Plan::save(const std::string& path) const {
  SP_CHECK(shapes.size() == layers.size(), "a plan needs one shape for each layer");
  SafeTensorsWriter writer;
  Json layers_json = Json::array();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const LayerShape& shape = shapes[i];
    const LayerPlan& layer = layers[i];
    layers_json.push_back({{"n_key_heads", shape.n_key_heads},
                           {"n_value_heads", shape.n_value_heads},
                           {"K", shape.K},
                           {"V", shape.V},
                           {"gate", shape.gate == Gate::kScalar ? "scalar" : "channel"},
                           {"summary", summary_of(layer)}});
    const std::vector<std::int64_t> rows = {shape.n_value_heads, shape.K};
    if (!layer.bits.empty()) {
      writer.add(tensor_name(i, "bits"), DType::kU8, rows, std::as_bytes(std::span(layer.bits)));
    }
    if (!layer.row_weight.empty()) {
      writer.add(tensor_name(i, "row_weight"), DType::kF32, rows,
                 std::as_bytes(std::span(layer.row_weight)));
    }
    if (!layer.high.empty()) {
      writer.add(tensor_name(i, "high"), DType::kU8, {shape.n_value_heads},
                 std::as_bytes(std::span(layer.high)));
    }
    if (!layer.row_scale.empty()) {
      writer.add(tensor_name(i, "row_scale"), DType::kF32, rows,
                 std::as_bytes(std::span(layer.row_scale)));
    }
    for (const auto& [field, matrices] :
         {std::pair{"transform", &layer.transform}, {"feedback", &layer.feedback}}) {
      if (matrices->empty()) continue;
      std::vector<std::uint16_t> halves;
      halves.reserve(matrices->size());
      for (const float x : *matrices) halves.push_back(f32_to_f16(x));
      const std::int64_t n = std::ssize(halves) / (std::int64_t{shape.K} * shape.K);
      writer.add(tensor_name(i, field), DType::kF16, {n, shape.K, shape.K},
                 std::as_bytes(std::span(halves)));
    }
    if (!layer.guard.empty()) {
      writer.add(tensor_name(i, "guard"), DType::kF32, {shape.n_value_heads},
                 std::as_bytes(std::span(layer.guard)));
    }
  }
  const Json json = {{"format_version", kFormatVersion},
                     {"kind", kind},
                     {"scheme", scheme},
                     {"model_fingerprint", model_fingerprint},
                     {"fingerprint", fingerprint()},
                     {"settings", settings},
                     {"layers", layers_json}};
  writer.set_metadata("statepack", json.dump(-1, ' ', false, Json::error_handler_t::replace));
  return writer.write(path);
}

Result<Plan> Plan::load(const std::string& path) {
  SP_ASSIGN_OR_RETURN(const auto file, MappedFile::open(path));
  return parse(file->bytes(), path);
}

Result<Plan> Plan::parse(std::span<const std::byte> bytes, const std::string& label) {
  SP_ASSIGN_OR_RETURN(const SafeTensors file, SafeTensors::parse(bytes, label));
  const auto entry = file.metadata().find("statepack");
  if (entry == file.metadata().end()) {
    return Status(Code::kCorrupt, label +
                                      ": no 'statepack' entry in the metadata, so this is not a "
                                      "plan; make one with `statepack calibrate`");
  }
  const Json json = Json::parse(entry->second, nullptr, /*allow_exceptions=*/false);
  const Reader reader(label);
  if (!json.is_object()) return reader.corrupt("the plan's metadata is not a JSON object");
  SP_ASSIGN_OR_RETURN(const int version, reader.number(json, "format_version", 1, 1 << 30));
  if (version != kFormatVersion) {
    return Status(Code::kUnsupported, label + ": plan format version " + std::to_string(version) +
                                          " is later than this build's " +
                                          std::to_string(kFormatVersion) +
                                          "; update statepack or calibrate again");
  }

  Plan plan;
  SP_ASSIGN_OR_RETURN(plan.kind, reader.text(json, "kind"));
  SP_ASSIGN_OR_RETURN(plan.scheme, reader.text(json, "scheme"));
  SP_ASSIGN_OR_RETURN(plan.model_fingerprint, reader.text(json, "model_fingerprint"));
  SP_ASSIGN_OR_RETURN(const std::string fingerprint, reader.text(json, "fingerprint"));
  if (const auto settings = json.find("settings"); settings != json.end()) {
    if (!settings->is_object()) return reader.corrupt("'settings' in the metadata is no object");
    for (const auto& [key, value] : settings->items()) {
      if (!value.is_string()) {
        return reader.corrupt("setting '" + key + "' in the metadata is not a text");
      }
      plan.settings[key] = value.get<std::string>();
    }
  }
  const auto layers = json.find("layers");
  if (layers == json.end() || !layers->is_array() || layers->empty() ||
      layers->size() > kMaxLayers) {
    return reader.corrupt("the plan's metadata has no list 'layers' of 1 to " +
                          std::to_string(kMaxLayers) + " entries");
  }
  std::set<std::string> known;
  for (std::size_t i = 0; i < layers->size(); ++i) {
    SP_ASSIGN_OR_RETURN(const LayerShape shape, reader.shape((*layers)[i]));
    LayerPlan layer;
    const std::vector<std::int64_t> rows = {shape.n_value_heads, shape.K};
    if (const std::string name = tensor_name(i, "bits"); file.find(name) != nullptr) {
      SP_ASSIGN_OR_RETURN(const TensorView tensor, take(file, name, DType::kU8, rows));
      layer.bits = bytes_of(tensor);
      known.insert(name);
    }
    if (const std::string name = tensor_name(i, "row_weight"); file.find(name) != nullptr) {
      SP_ASSIGN_OR_RETURN(const TensorView tensor, take(file, name, DType::kF32, rows));
      SP_ASSIGN_OR_RETURN(layer.row_weight, to_f32(tensor));
      known.insert(name);
    }
    if (const std::string name = tensor_name(i, "high"); file.find(name) != nullptr) {
      SP_ASSIGN_OR_RETURN(const TensorView tensor,
                          take(file, name, DType::kU8, {shape.n_value_heads}));
      layer.high = bytes_of(tensor);
      known.insert(name);
    }
    if (const std::string name = tensor_name(i, "row_scale"); file.find(name) != nullptr) {
      SP_ASSIGN_OR_RETURN(const TensorView tensor, take(file, name, DType::kF32, rows));
      SP_ASSIGN_OR_RETURN(layer.row_scale, to_f32(tensor));
      known.insert(name);
    }
    if (const std::string name = tensor_name(i, "transform"); file.find(name) != nullptr) {
      SP_ASSIGN_OR_RETURN(const TensorView tensor,
                          take(file, name, DType::kF16, {-1, shape.K, shape.K}));
      if (tensor.shape[0] != shape.n_key_heads && tensor.shape[0] != shape.n_value_heads) {
        return reader.corrupt("tensor '" + name + "' has " + std::to_string(tensor.shape[0]) +
                              " matrices for " + std::to_string(shape.n_key_heads) +
                              " key heads and " + std::to_string(shape.n_value_heads) +
                              " value heads");
      }
      SP_ASSIGN_OR_RETURN(layer.transform, to_f32(tensor));
      known.insert(name);
    }
    if (const std::string name = tensor_name(i, "feedback"); file.find(name) != nullptr) {
      SP_ASSIGN_OR_RETURN(const TensorView tensor,
                          take(file, name, DType::kF16, {shape.n_value_heads, shape.K, shape.K}));
      SP_ASSIGN_OR_RETURN(layer.feedback, to_f32(tensor));
      known.insert(name);
    }
    if (const std::string name = tensor_name(i, "guard"); file.find(name) != nullptr) {
      SP_ASSIGN_OR_RETURN(const TensorView tensor,
                          take(file, name, DType::kF32, {shape.n_value_heads}));
      SP_ASSIGN_OR_RETURN(layer.guard, to_f32(tensor));
      known.insert(name);
    }
    SP_RETURN_IF_ERROR(check_values(label, tensor_name(i, ""), shape, layer));
    plan.shapes.push_back(shape);
    plan.layers.push_back(std::move(layer));
  }
  for (const auto& [name, tensor] : file.tensors()) {
    if (!known.contains(name)) {
      return reader.corrupt("tensor '" + name + "' does not belong in a plan of " +
                            std::to_string(plan.layers.size()) + " layers");
    }
  }
  if (plan.fingerprint() != fingerprint) {
    return reader.corrupt("the content's fingerprint is " + plan.fingerprint() +
                          ", but the metadata says '" + fingerprint + "': the file was altered");
  }
  return plan;
}

}  // namespace statepack
