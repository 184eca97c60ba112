#include "base/check.hpp"

#include <cstdio>
#include <cstdlib>

namespace statepack {

void check_failed(const char* file, int line, const char* condition, const char* what) {
  std::fprintf(stderr, "%s:%d: check failed: %s (%s)\n", file, line, condition, what);
  std::abort();
}

}  // namespace statepack
