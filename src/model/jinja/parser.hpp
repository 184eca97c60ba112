// Tokens -> a compiled template.
#pragma once

#include <string_view>

#include "model/jinja/ast.hpp"

namespace statepack::jinja {

/// Throws TemplateError with the line: kCorrupt for what Jinja refuses too, kUnsupported for what
/// is Jinja but outside the subset of docs/templates.md.
Body parse(std::string_view source);

}  // namespace statepack::jinja
