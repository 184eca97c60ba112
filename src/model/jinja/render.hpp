// Evaluates a compiled template.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/jinja/ast.hpp"

namespace statepack::jinja {

struct Limits {
  std::uint64_t work = 0;       ///< units of Work
  std::size_t n_out_bytes = 0;  ///< of the rendered text
};

/// Renders `body` with `variables` as its top-level names. Throws TemplateError with a line.
std::string render(const Body& body, std::vector<std::pair<std::string, Value>> variables,
                   const Limits& limits);

}  // namespace statepack::jinja
