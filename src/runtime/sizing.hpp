// How much memory a model and a scheme take at a concurrency, and the reverse, before anything
// loads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.hpp"
#include "scheme/layers.hpp"
#include "scheme/plan.hpp"
#include "statepack/status.hpp"
#include "statepack/types.hpp"

namespace statepack {

/// What memory depends on.
struct ModelGeometry {
  std::string name;
  std::vector<LayerShape> shapes;  ///< of the recurrent layers
  std::int64_t conv_floats = 0;    ///< of a sequence
  std::int64_t kv_bytes_per_token =
      0;  ///< bf16 for the public models, f32 as this runtime keeps it
  std::int64_t weight_bytes = 0;

  std::int64_t state_bytes_f32() const;
};

/// Geometry of a loaded configuration; `weight_bytes` of its checkpoint.
ModelGeometry geometry(const std::string& name, const ModelConfig& config,
                       std::int64_t weight_bytes);

/// Published hybrid models, bf16 weights without vision and multi-token prediction, latent
/// attention cache where the model has one. Source: their configs and tensor headers
/// (docs/models.md 13).
std::span<const ModelGeometry> public_models();
/// By name; case, '-', '_' and '.' do not matter, and a unique part of a name will do ("27b").
/// Errors: kNotFound listing the names, kInvalidArgument when several fit.
Result<ModelGeometry> find_public_model(std::string_view name);

/// A stand-in for a calibrated plan: the scheme's nominal bits in every head and a quarter of the
/// heads high. Good for sizes only. Errors: as codec_config().
Result<Plan> nominal_plan(const Scheme& scheme, const std::vector<LayerShape>& shapes);

struct SequenceMemory {
  std::int64_t pages = 0, windows = 0, cursors = 0, conv = 0;
  std::int64_t kv = 0;  ///< attention cache at the given context
  std::int64_t total() const { return pages + windows + cursors + conv + kv; }
};
SequenceMemory sequence_memory(const ModelGeometry& model, const CompiledScheme& scheme,
                               std::int64_t context);

/// Sequences that fit into `memory` bytes beside the weights; 0 when the weights alone do not.
std::int64_t sequences_that_fit(const ModelGeometry& model, const SequenceMemory& sequence,
                                std::int64_t memory);

/// "80GiB", "24 GB", "512M", "1048576" to bytes; binary units for GiB, MiB, KiB and single letters.
Result<std::int64_t> parse_bytes(std::string_view text);
/// "50.3 MB": decimal units, three digits.
std::string format_bytes(std::int64_t n);

}  // namespace statepack
