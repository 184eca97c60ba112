#include "statepack/status.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <set>

#include "base/check.hpp"

namespace statepack {
namespace {

TEST(Status, EveryCodeHasItsOwnName) {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(Code::kInterrupted); ++code) {
    const std::string_view name = code_name(static_cast<Code>(code));
    EXPECT_NE(name, "unknown") << code;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(code_name(static_cast<Code>(99)), "unknown");
  EXPECT_EQ(code_name(Code::kInvalidArgument), "invalid_argument");
}

Result<std::unique_ptr<int>> make(bool good) {
  if (!good) return Status(Code::kNotFound, "there is none");
  return std::make_unique<int>(7);
}

Status use(bool good, int& out) {
  SP_ASSIGN_OR_RETURN(const std::unique_ptr<int> value, make(good));
  SP_RETURN_IF_ERROR(Status());
  out = *value;
  return {};
}

TEST(Status, MacrosPassErrorsOnAndMoveValues) {
  int out = 0;
  EXPECT_TRUE(use(true, out).ok());
  EXPECT_EQ(out, 7);
  const Status status = use(false, out);
  EXPECT_EQ(status.code(), Code::kNotFound);
  EXPECT_EQ(status.message(), "there is none");
}

TEST(CheckDeathTest, StopsWithPlaceConditionAndReason) {
  const int three = 3;
  SP_CHECK(three == 3, "not reached");
  EXPECT_DEATH(SP_CHECK(three == 4, "three is four"),
               "status_test.cc:[0-9]+: check failed: three == 4 \\(three is four\\)");
}

}  // namespace
}  // namespace statepack
