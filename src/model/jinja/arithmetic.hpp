// Python's arithmetic on numbers, strings and lists. Integers have 64 bits: results beyond are
// errors. All throw TemplateError where Python raises.
#pragma once

#include "model/jinja/ast.hpp"
#include "model/jinja/value.hpp"

namespace statepack::jinja {

/// `op` is one of kAdd .. kPower.
Value arithmetic(Expression::Kind op, const Value& a, const Value& b, Work& work);
Value negative(const Value& a);

}  // namespace statepack::jinja
