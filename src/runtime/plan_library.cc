#include "runtime/plan_library.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

namespace statepack {

Result<PlanLibrary> PlanLibrary::open(const std::string& model_dir,
                                      const std::vector<std::string>& files) {
  PlanLibrary library;
  library.model_dir_ = model_dir;
  const auto add = [&](const std::string& path, bool named) -> Status {
    SP_ASSIGN_OR_RETURN(Plan plan, Plan::load(path));
    SP_ASSIGN_OR_RETURN(Scheme scheme, Scheme::parse(plan.scheme));
    library.entries_.push_back({path, named, std::move(plan), std::move(scheme)});
    return {};
  };
  for (const std::string& file : files) SP_RETURN_IF_ERROR(add(file, true));

  std::vector<std::string> found;
  std::error_code error;  // no such folder: no plans
  for (const auto& item : std::filesystem::directory_iterator(model_dir + "/plans", error)) {
    if (item.path().extension() == ".safetensors") found.push_back(item.path().string());
  }
  std::sort(found.begin(), found.end());
  for (const std::string& file : found) SP_RETURN_IF_ERROR(add(file, false));
  return library;
}

Result<std::shared_ptr<const CompiledScheme>> PlanLibrary::compile(
    const Scheme& scheme, const std::vector<LayerShape>& shapes,
    const std::string& model_fingerprint) const {
  if (!scheme.needs_plan()) {
    return CompiledScheme::make(scheme, shapes, nullptr, model_fingerprint);
  }
  const Entry* chosen = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.scheme.codec != scheme.codec) continue;
    if (entry.scheme.codec_arg == scheme.codec_arg) {
      chosen = &entry;
      break;
    }
    if (entry.named && chosen == nullptr) chosen = &entry;
  }
  if (chosen == nullptr) {
    const std::string base =
        scheme.codec_arg.empty() ? scheme.codec : scheme.codec + ":" + scheme.codec_arg;
    return Status(
        Code::kInvalidArgument,
        fmt::format("{0} needs a plan and none is named or found in {1}/plans; make one with "
                    "`statepack calibrate --model {1} --scheme {0} --text FILE -o PLAN` and pass "
                    "`--plan PLAN`",
                    base, model_dir_));
  }
  return CompiledScheme::make(scheme, shapes, &chosen->plan, model_fingerprint);
}

}  // namespace statepack
