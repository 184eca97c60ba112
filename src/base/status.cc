#include "statepack/status.hpp"

namespace statepack {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid_argument";
    case Code::kNotFound:
      return "not_found";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kMismatch:
      return "mismatch";
    case Code::kExhausted:
      return "exhausted";
    case Code::kNotFinite:
      return "not_finite";
    case Code::kIo:
      return "io";
    case Code::kInterrupted:
      return "interrupted";
  }
  return "unknown";
}

}  // namespace statepack
