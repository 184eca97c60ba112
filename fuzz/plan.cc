// Any bytes: refused, or a plan that can be fingerprinted.
#include "scheme/plan.hpp"

#include "base/check.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n_bytes) {
  using namespace statepack;
  const auto plan = Plan::parse(std::as_bytes(std::span(data, n_bytes)), "fuzz");
  if (!plan.ok()) return 0;
  SP_CHECK(plan->shapes.size() == plan->layers.size(), "a layer without a shape");
  SP_CHECK(plan->fingerprint().size() == 64, "a fingerprint is a SHA-256");
  return 0;
}
