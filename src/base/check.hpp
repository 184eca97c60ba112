// SP_CHECK stops the process on our own bugs; outside input never reaches it (it gets a Status).
#pragma once

namespace statepack {

/// Prints file, line, the failed condition and `what`, then aborts.
[[noreturn]] void check_failed(const char* file, int line, const char* condition, const char* what);

}  // namespace statepack

#define SP_CHECK(condition, what) \
  ((condition) ? void(0) : ::statepack::check_failed(__FILE__, __LINE__, #condition, what))
