#include <algorithm>

#include "codec/cast/cast.hpp"
#include "codec/codec.hpp"
#include "codec/damp/damp.hpp"
#include "codec/dsq/dsq.hpp"
#include "codec/fp32/fp32.hpp"
#include "codec/int/int.hpp"
#include "codec/klt/klt.hpp"
#include "codec/leapquant/leapquant.hpp"
#include "codec/minifloat/minifloat.hpp"
#include "codec/pace/pace.hpp"
#include "codec/rotated/rotated.hpp"
#include "codec/stepquant/stepquant.hpp"

namespace statepack {
namespace {

constexpr const CodecInfo* kAll[] = {
    &kFp32Info,      &kBf16Info, &kFp16Info,       &kInt8Info,   &kInt6Info,  &kInt5Info,
    &kInt4Info,      &kFp8Info,  &kMxfp8Info,      &kMxfp6Info,  &kMxfp4Info, &kNvfp6Info,
    &kNvfp4Info,     &kDsqInfo,  &kTurboquantInfo, &kQuarotInfo, &kDampInfo,  &kStepquantInfo,
    &kLeapquantInfo, &kPaceInfo, &kKltInfo,
};

}  // namespace

std::span<const CodecInfo* const> all_codecs() { return kAll; }

bool CodecInfo::allows_arg(std::string_view arg) const {
  if (arg_rule.has_value()) return arg_rule->allows(arg);
  return std::find(args.begin(), args.end(), arg) != args.end();
}

const CodecInfo* find_codec(std::string_view name) {
  for (const CodecInfo* info : kAll) {
    if (info->name == name) return info;
  }
  return nullptr;
}

CodecConfig fill_config(const CodecInfo& info, std::string_view arg, Rounding rounding,
                        const std::map<std::string, std::string>& given) {
  CodecConfig config{.info = &info, .arg = std::string(arg), .rounding = rounding, .options = {}};
  for (const CodecOption& option : info.options) {
    const std::string key(option.key);
    const auto found = given.find(key);
    config.options[key] =
        found != given.end() ? found->second : info.default_option(config, option.key);
  }
  return config;
}

}  // namespace statepack
