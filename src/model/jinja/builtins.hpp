// Filters and tests.
#pragma once

#include <string>
#include <string_view>

#include "model/jinja/value.hpp"

namespace statepack::jinja {

struct Filter {
  std::string_view name;
  Value (*run)(const Value& input, Arguments& arguments, Work& work);
};
struct Test {
  std::string_view name;
  bool (*run)(const Value& input, Arguments& arguments, Work& work);
};

const Filter* find_filter(std::string_view name);  ///< null: none
const Test* find_test(std::string_view name);      ///< null: none
std::string filter_names();                        ///< for messages
std::string test_names();

}  // namespace statepack::jinja
