// The plans at hand for a model, and which of them a scheme means.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/config.hpp"
#include "scheme/layers.hpp"
#include "scheme/plan.hpp"
#include "statepack/scheme.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// Plans named by the user, then those in `<model>/plans/*.safetensors` in the order of their
/// names.
class PlanLibrary {
 public:
  /// Loads every file. Errors: as Plan::load() for a named file and for one of the folder's.
  static Result<PlanLibrary> open(const std::string& model_dir,
                                  const std::vector<std::string>& files);

  /// Compiles a scheme, with the first plan made for the same codec and argument when it needs one.
  /// A plan that the user named is used even if it was made for another argument of the codec and
  /// none fits better; CompiledScheme::make() then decides. Errors: kInvalidArgument saying how to
  /// make a plan; as CompiledScheme::make().
  Result<std::shared_ptr<const CompiledScheme>> compile(const Scheme& scheme,
                                                        const std::vector<LayerShape>& shapes,
                                                        const std::string& model_fingerprint) const;

 private:
  struct Entry {
    std::string path;
    bool named = false;  ///< by the user, not found beside the model
    Plan plan;
    Scheme scheme;
  };
  std::string model_dir_;
  std::vector<Entry> entries_;
};

}  // namespace statepack
