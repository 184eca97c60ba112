// A scheme compiled for a model: a codec and a window layout for each recurrent layer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "codec/codec.hpp"
#include "scheme/plan.hpp"
#include "scheme/window.hpp"

namespace statepack {

struct CompiledLayer {
  LayerShape shape;
  std::unique_ptr<LayerCodec> codec;
  WindowLayout window;
  LayerPlan plan;  ///< what the codec was compiled with; empty where it needs none
};

/// Bits per state value, counted from the bytes that are really kept.
struct SchemeBits {
  double payload = 0;                                               ///< pages
  double resident = 0;                                              ///< pages + windows + cursors
  std::int64_t page_bytes = 0, window_bytes = 0, cursor_bytes = 0;  ///< of one slot, all layers
  /// What a slot adds so that every page starts at a multiple of kStateAlign; in neither figure.
  std::int64_t alignment_bytes = 0;
  /// Of the transforms of all layers: kept once, for all slots, and in neither figure.
  std::int64_t shared_bytes = 0;
  std::int64_t n_values = 0;
  PayloadBytes parts;        ///< payload by kind, summed over layers
  WindowBytes window_parts;  ///< windows by kind, summed over layers
};

/// Where pages and windows start inside a slot: at multiples of this.
inline constexpr std::int64_t kStateAlign = 16;

/// Cursor of one (slot, layer). Lives with the slot.
struct Cursor {
  std::int32_t fill = 0;   ///< records in the window
  std::int32_t limit = 0;  ///< the window is complete at this fill; 0 = period
};

/// Immutable once made; shared by pool, steps and reports.
class CompiledScheme {
 public:
  /// Compiles `scheme` for layers of these shapes. `plan` may be null when the scheme needs none.
  /// Errors: kInvalidArgument (plan missing), kMismatch (plan of another scheme kind, shape or
  /// model; says which; `model_fingerprint` "" skips that check), what the codec says.
  static Result<std::shared_ptr<const CompiledScheme>> make(const Scheme& scheme,
                                                            const std::vector<LayerShape>& shapes,
                                                            const Plan* plan,
                                                            const std::string& model_fingerprint);

  const Scheme& scheme() const { return scheme_; }
  const std::vector<CompiledLayer>& layers() const { return layers_; }
  const std::string& plan_fingerprint() const { return plan_fingerprint_; }  ///< "" without a plan
  const std::string& model_fingerprint() const { return model_fingerprint_; }
  SchemeBits bits() const;

 private:
  Scheme scheme_;
  std::vector<CompiledLayer> layers_;
  std::string plan_fingerprint_, model_fingerprint_;
};

}  // namespace statepack
