// The calibrated constants of a codec for one model: one safetensors file, one fingerprint.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "codec/codec.hpp"
#include "statepack/scheme.hpp"
#include "statepack/status.hpp"
#include "statepack/types.hpp"

namespace statepack {

/// File layout: metadata {"statepack": JSON with format version, plan kind, scheme, model
/// fingerprint, calibration data identity and settings, per-layer summary}; tensors
/// `layers.N.bits` U8 [HV, K], `layers.N.row_weight` and `layers.N.row_scale` F32 [HV, K],
/// `layers.N.high` U8 [HV], `layers.N.transform` F16 [H or HV, K, K], `layers.N.guard` F32 [HV],
/// `layers.N.feedback` F16 [HV, K, K],
/// where N counts recurrent layers from 0.
struct Plan {
  static constexpr int kFormatVersion = 1;
  std::string kind;    ///< what it provides: "stepquant", "pace-high", "damp-rows" or "klt"
  std::string scheme;  ///< scheme name it was made for: "stepquant:6"; what
                       ///< follows a comma (window, codec options) binds nothing
  std::string model_fingerprint;                ///< of the checkpoint's content
  std::map<std::string, std::string> settings;  ///< data identity, seed, budgets, ...: for people
  std::vector<LayerShape> shapes;               ///< [n recurrent layers]
  std::vector<LayerPlan> layers;

  /// SHA-256 over everything that changes packed bytes (kind, shapes, layers but for their guards,
  /// model), hex.
  std::string fingerprint() const;
  Status save(const std::string& path) const;
  /// Checks everything: dtypes, shapes, widths, finite positive weights. Errors: kCorrupt,
  /// kMismatch, kUnsupported (a later format version), naming the file and the tensor.
  static Result<Plan> load(const std::string& path);
  static Result<Plan> parse(std::span<const std::byte> bytes, const std::string& label);
};

}  // namespace statepack
