// Runs a test once for each instruction set that Highway compiled for and this machine has.
#pragma once

#include <cstdint>

#include <gtest/gtest.h>
#include <hwy/targets.h>

namespace statepack::testing {

template <class Fn>
void for_each_simd_target(Fn fn) {
  hwy::SetSupportedTargetsForTest(0);
  std::int64_t left = hwy::SupportedTargets() & HWY_TARGETS;
  while (left != 0) {
    const std::int64_t target = left & -left;
    left &= left - 1;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, hwy::TargetName(target));
    fn();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace statepack::testing
