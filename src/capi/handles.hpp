// What the files of the C API share: handles, checks of arguments, the last error.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <utility>

#include "pool/pool.hpp"
#include "statepack/statepack.h"

struct sp_scheme {
  std::shared_ptr<const statepack::CompiledScheme> compiled;
};
struct sp_snapshot {
  statepack::Snapshot snapshot;
};

namespace statepack::capi {

/// The calling thread's: why its last call failed.
std::string& last_error();

inline Status invalid(std::string what) { return {Code::kInvalidArgument, std::move(what)}; }

/// Runs a body that returns a Status; remembers its message; lets no exception out.
template <class Body>
sp_code guarded(Body&& body) noexcept {
  try {
    const Status status = body();
    last_error() = status.message();
    return static_cast<sp_code>(status.code());
  } catch (const std::bad_alloc&) {  // both texts fit the string's own storage: no allocation
    last_error() = "out of memory";
    return SP_EXHAUSTED;
  } catch (...) {
    last_error() = "internal error";
    return SP_UNSUPPORTED;
  }
}

inline Status need(const void* pointer, const char* name) {
  return pointer != nullptr ? Status()
                            : invalid(std::string(name) + " is NULL; pass a valid pointer");
}

template <class Struct>
Status need_struct(const Struct* given, const char* name) {
  SP_RETURN_IF_ERROR(need(given, name));
  if (given->struct_size == sizeof(Struct)) return {};
  return invalid(std::string(name) + ".struct_size is " + std::to_string(given->struct_size) +
                 ", but this library's is " + std::to_string(sizeof(Struct)) +
                 "; set it to sizeof and compile with this library's header");
}

/// Errors: kInvalidArgument naming the layers there are.
Status need_layer(const CompiledScheme& scheme, std::int32_t layer);
/// What can be told of a step's arguments without reading their arrays, whatever device these are
/// on; slots and their type are the caller's. Errors: kInvalidArgument.
Status check_step_args(const sp_step_args* args, const CompiledScheme& scheme);

}  // namespace statepack::capi
