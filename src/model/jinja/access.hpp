// Attributes, items, slices and methods of values.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "model/jinja/value.hpp"

namespace statepack::jinja {

/// `value.name`: a method or attribute first, then an item, as Jinja looks it up. Undefined when
/// there is none; throws TemplateError on an undefined value.
Value get_attribute(const Value& value, const std::string& name, Work& work);

/// `value[key]`: an item first, then a method or attribute.
Value get_item(const Value& value, const Value& key, Work& work);

/// `value[begin:end:step]` of a string, list or tuple; null: left out.
Value slice(const Value& value, const Value* begin, const Value* end, const Value* step,
            Work& work);

/// "a.b.0" of `item`, as map(attribute=...) and its like follow it.
Value follow_path(const Value& item, const Value& path, Work& work);

/// Puts call arguments in the order of `names`; null for those not given. Throws TemplateError for
/// too many, unknown or doubled arguments, and when fewer than `n_required` are there.
std::vector<const Value*> bind(std::string_view what, const Arguments& arguments,
                               std::initializer_list<std::string_view> names,
                               std::size_t n_required);

/// Conversions of arguments; throw TemplateError that names `what`. Null and None give the
/// fallback.
std::int64_t int_argument(std::string_view what, const Value* value, std::int64_t fallback);
bool bool_argument(const Value* value, bool fallback);
const std::string& string_argument(std::string_view what, const Value* value);

}  // namespace statepack::jinja
