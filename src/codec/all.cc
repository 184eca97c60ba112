#include "codec/cast/cast.hpp"
#include "codec/codec.hpp"
#include "codec/dsq/dsq.hpp"
#include "codec/fp32/fp32.hpp"
#include "codec/int/int.hpp"
#include "codec/leapquant/leapquant.hpp"
#include "codec/pace/pace.hpp"
#include "codec/stepquant/stepquant.hpp"

namespace statepack {
namespace {

constexpr const CodecInfo* kAll[] = {
    &kFp32Info, &kBf16Info, &kFp16Info,      &kInt8Info,      &kInt6Info, &kInt5Info,
    &kInt4Info, &kDsqInfo,  &kStepquantInfo, &kLeapquantInfo, &kPaceInfo,
};

}  // namespace

std::span<const CodecInfo* const> all_codecs() { return kAll; }

const CodecInfo* find_codec(std::string_view name) {
  for (const CodecInfo* info : kAll) {
    if (info->name == name) return info;
  }
  return nullptr;
}

}  // namespace statepack
