#include "model/jinja/access.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include "model/jinja/error.hpp"
#include "model/jinja/text.hpp"
#include "model/utf8.hpp"

namespace statepack::jinja {

std::vector<const Value*> bind(std::string_view what, const Arguments& arguments,
                               std::initializer_list<std::string_view> names,
                               std::size_t n_required) {
  std::vector<const Value*> bound(names.size(), nullptr);
  const std::string label(what);
  if (arguments.positional.size() > names.size()) {
    fail(label + " takes at most " + std::to_string(names.size()) + " arguments, not " +
         std::to_string(arguments.positional.size()));
  }
  for (std::size_t i = 0; i < arguments.positional.size(); ++i) bound[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.named) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) fail(label + " has no argument '" + name + "'");
    const Value*& place = bound[static_cast<std::size_t>(found - names.begin())];
    if (place != nullptr) fail(label + " got the argument '" + name + "' twice");
    place = &value;
  }
  for (std::size_t i = 0; i < n_required; ++i) {
    if (bound[i] == nullptr) {
      fail(label + " needs the argument '" + std::string(names.begin()[i]) + "'");
    }
  }
  return bound;
}

std::int64_t int_argument(std::string_view what, const Value* value, std::int64_t fallback) {
  if (value == nullptr || value->is_none()) return fallback;
  std::int64_t storage = 0;
  const std::int64_t* integer = value->integer(storage);
  if (integer == nullptr) {
    fail(std::string(what) + " needs an integer, not a " + std::string(value->type_name()));
  }
  return *integer;
}

bool bool_argument(const Value* value, bool fallback) {
  return value == nullptr ? fallback : value->truthy();
}

const std::string& string_argument(std::string_view what, const Value* value) {
  const std::string* string = value == nullptr ? nullptr : value->string();
  if (string == nullptr) {
    fail(std::string(what) + " needs a string" +
         (value == nullptr ? "" : ", not a " + std::string(value->type_name())));
  }
  return *string;
}

namespace {

Value strings(const std::vector<std::string>& parts, Work& work) {
  work.charge(parts.size());
  return Value::list(std::vector<Value>(parts.begin(), parts.end()));
}

const std::string* optional_string(std::string_view what, const Value* value) {
  return value == nullptr || value->is_none() ? nullptr : &string_argument(what, value);
}

Value affix_test(std::string_view what, const std::string& text, const Arguments& arguments,
                 bool at_start) {
  const auto a = bind(what, arguments, {"affix"}, 1);
  const auto matches = [&](const Value& affix) {
    const std::string& s = string_argument(what, &affix);
    return at_start ? text.starts_with(s) : text.ends_with(s);
  };
  const Sequence* any = a[0]->sequence();
  if (any == nullptr) return matches(*a[0]);
  return std::any_of(any->items.begin(), any->items.end(), matches);
}

Value find_in(std::string_view what, const std::string& text, const Arguments& arguments,
              bool last) {
  const auto a = bind(what, arguments, {"sub"}, 1);
  const std::string& part = string_argument(what, a[0]);
  const std::size_t at = last ? text.rfind(part) : text.find(part);
  if (at == std::string::npos) return std::int64_t{-1};
  return static_cast<std::int64_t>(count_characters(std::string_view(text).substr(0, at)));
}

Value partition(std::string_view what, const std::string& text, const Arguments& arguments,
                bool last) {
  const auto a = bind(what, arguments, {"separator"}, 1);
  const std::string& separator = string_argument(what, a[0]);
  if (separator.empty()) fail(std::string(what) + " needs a separator that is not empty");
  const std::size_t at = last ? text.rfind(separator) : text.find(separator);
  if (at == std::string::npos) {
    return last ? Value::tuple({"", "", text}) : Value::tuple({text, "", ""});
  }
  return Value::tuple({text.substr(0, at), separator, text.substr(at + separator.size())});
}

using StringMethod = Value (*)(const std::string& text, const Arguments& arguments, Work& work);

template <Side side>
Value strip_method(const std::string& text, const Arguments& arguments, Work&) {
  const auto a = bind("strip", arguments, {"chars"}, 0);
  return strip(text, optional_string("strip", a[0]), side);
}

template <Side side>
Value split_method(const std::string& text, const Arguments& arguments, Work& work) {
  const auto a = bind("split", arguments, {"sep", "maxsplit"}, 0);
  const std::string* separator = optional_string("split", a[0]);
  if (separator != nullptr && separator->empty()) {
    fail("split needs a separator that is not empty");
  }
  return strings(split(text, separator, int_argument("split", a[1], -1), side), work);
}

template <std::string (*map)(std::string_view)>
Value map_method(const std::string& text, const Arguments& arguments, Work&) {
  bind("this method", arguments, {}, 0);
  return map(text);
}

template <bool (*test)(std::string_view)>
Value test_method(const std::string& text, const Arguments& arguments, Work&) {
  bind("this method", arguments, {}, 0);
  return test(text);
}

bool is_alpha(std::string_view text) { return all_of_category(text, true, false); }
bool is_digit(std::string_view text) { return all_of_category(text, false, true); }
bool is_alnum(std::string_view text) { return all_of_category(text, true, true); }
bool is_space(std::string_view text) {
  return !text.empty() && strip(text, nullptr, Side::kLeft).empty();
}

struct NamedStringMethod {
  std::string_view name;
  StringMethod run;
};
constexpr NamedStringMethod kStringMethods[] = {
    {"strip", strip_method<Side::kBoth>},
    {"lstrip", strip_method<Side::kLeft>},
    {"rstrip", strip_method<Side::kRight>},
    {"split", split_method<Side::kLeft>},
    {"rsplit", split_method<Side::kRight>},
    {"splitlines",
     [](const std::string& text, const Arguments& arguments, Work& work) -> Value {
       const auto a = bind("splitlines", arguments, {"keepends"}, 0);
       return strings(split_lines(text, bool_argument(a[0], false)), work);
     }},
    {"partition",
     [](const std::string& text, const Arguments& arguments, Work&) -> Value {
       return partition("partition", text, arguments, false);
     }},
    {"rpartition",
     [](const std::string& text, const Arguments& arguments, Work&) -> Value {
       return partition("rpartition", text, arguments, true);
     }},
    {"startswith",
     [](const std::string& text, const Arguments& arguments, Work&) -> Value {
       return affix_test("startswith", text, arguments, true);
     }},
    {"endswith",
     [](const std::string& text, const Arguments& arguments, Work&) -> Value {
       return affix_test("endswith", text, arguments, false);
     }},
    {"removeprefix",
     [](const std::string& text, const Arguments& arguments, Work&) -> Value {
       const auto a = bind("removeprefix", arguments, {"prefix"}, 1);
       const std::string& prefix = string_argument("removeprefix", a[0]);
       return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
     }},
    {"removesuffix",
     [](const std::string& text, const Arguments& arguments, Work&) -> Value {
       const auto a = bind("removesuffix", arguments, {"suffix"}, 1);
       const std::string& suffix = string_argument("removesuffix", a[0]);
       return text.ends_with(suffix) ? text.substr(0, text.size() - suffix.size()) : text;
     }},
    {"replace",
     [](const std::string& text, const Arguments& arguments, Work& work) -> Value {
       const auto a = bind("replace", arguments, {"old", "new", "count"}, 2);
       const std::string& old = string_argument("replace", a[0]);
       const std::string& with = string_argument("replace", a[1]);
       // The most that the result can be, before it is made.
       work.charge_bytes(text.size() +
                         (text.size() / std::max<std::size_t>(old.size(), 1) + 1) * with.size());
       return replace(text, old, with, int_argument("replace", a[2], -1));
     }},
    {"find",
     [](const std::string& text, const Arguments& arguments, Work&) -> Value {
       return find_in("find", text, arguments, false);
     }},
    {"rfind",
     [](const std::string& text, const Arguments& arguments, Work&) -> Value {
       return find_in("rfind", text, arguments, true);
     }},
    {"count",
     [](const std::string& text, const Arguments& arguments, Work&) -> Value {
       const auto a = bind("count", arguments, {"sub"}, 1);
       const std::string& part = string_argument("count", a[0]);
       if (part.empty()) return static_cast<std::int64_t>(count_characters(text) + 1);
       std::int64_t n = 0;
       for (std::size_t at = text.find(part); at != std::string::npos;
            at = text.find(part, at + part.size())) {
         ++n;
       }
       return n;
     }},
    {"join",
     [](const std::string& text, const Arguments& arguments, Work& work) -> Value {
       const auto a = bind("join", arguments, {"iterable"}, 1);
       std::string out;
       bool first = true;
       for (const Value& item : iterate(*a[0], work)) {
         const std::string& part = string_argument("join", &item);
         work.charge_bytes(text.size() + part.size());
         if (!first) out += text;
         first = false;
         out += part;
       }
       return out;
     }},
    {"upper", map_method<upper>},
    {"lower", map_method<lower>},
    {"title", map_method<title>},
    {"capitalize", map_method<capitalize>},
    {"isalpha", test_method<is_alpha>},
    {"isdigit", test_method<is_digit>},
    {"isalnum", test_method<is_alnum>},
    {"isspace", test_method<is_space>},
    {"isupper", test_method<is_upper>},
    {"islower", test_method<is_lower>},
};

Value make_method(const std::string& name, std::function<Value(Arguments&)> call) {
  auto function = std::make_shared<Function>();
  function->name = name;
  function->call = std::move(call);
  return std::shared_ptr<const Function>(std::move(function));
}

// Methods that change their object: the environment of the ecosystem refuses them too.
bool is_mutator(std::string_view name) {
  constexpr std::string_view kNames[] = {"append", "extend",  "insert",     "remove", "clear",
                                         "update", "reverse", "setdefault", "sort",   "popitem"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// A method or attribute; nothing when the type has none of that name.
std::optional<Value> find_attribute(const Value& value, const std::string& name, Work& work) {
  if (value.string() != nullptr) {
    for (const NamedStringMethod& method : kStringMethods) {
      if (method.name != name) continue;
      return make_method(name, [value, run = method.run, &work](Arguments& arguments) {
        work.charge_bytes(value.string()->size());
        return run(*value.string(), arguments, work);
      });
    }
    return std::nullopt;
  }
  if (const Dict* d = value.dict()) {
    if (name == "items" || name == "keys" || name == "values") {
      return make_method(name, [value, name, d, &work](Arguments& arguments) {
        bind(name, arguments, {}, 0);
        std::vector<Value> all;
        for (const auto& [key, item] : d->entries()) {
          work.charge(1);
          all.push_back(name == "items" ? Value::tuple({key, item}) : name == "keys" ? key : item);
        }
        return Value::list(std::move(all));
      });
    }
    if (name == "get") {
      return make_method(name, [value, d](Arguments& arguments) {
        const auto a = bind("get", arguments, {"key", "default"}, 1);
        const Value* found = d->find(*a[0]);
        return found != nullptr ? *found : a[1] != nullptr ? *a[1] : Value();
      });
    }
    if (name == "copy") {
      return make_method(name, [value](Arguments& arguments) {
        bind("copy", arguments, {}, 0);
        return value;
      });
    }
    return std::nullopt;
  }
  if (const Sequence* s = value.sequence()) {
    if (name == "count" || name == "index") {
      return make_method(name, [value, name, s, &work](Arguments& arguments) -> Value {
        const auto a = bind(name, arguments, {"value"}, 1);
        const auto matches = [&](const Value& item) { return equal(item, *a[0], work); };
        if (name == "count") {
          return static_cast<std::int64_t>(
              std::count_if(s->items.begin(), s->items.end(), matches));
        }
        const auto found = std::find_if(s->items.begin(), s->items.end(), matches);
        if (found == s->items.end()) fail("index: the value is not in the list");
        return static_cast<std::int64_t>(found - s->items.begin());
      });
    }
    return std::nullopt;
  }
  if (const Namespace* ns = value.ns()) {
    const auto found = ns->attributes.find(name);
    return found == ns->attributes.end() ? std::nullopt : std::optional<Value>(found->second);
  }
  if (const Loop* loop = value.loop()) {
    const auto n = static_cast<std::int64_t>(loop->items->size());
    const auto index0 = static_cast<std::int64_t>(loop->index0);
    if (name == "index") return index0 + 1;
    if (name == "index0") return index0;
    if (name == "revindex") return n - index0;
    if (name == "revindex0") return n - index0 - 1;
    if (name == "first") return index0 == 0;
    if (name == "last") return index0 + 1 == n;
    if (name == "length") return n;
    if (name == "depth") return std::int64_t{1};
    if (name == "depth0") return std::int64_t{0};
    if (name == "previtem") {
      return index0 == 0 ? Value::undefined("there is no previous item")
                         : (*loop->items)[loop->index0 - 1];
    }
    if (name == "nextitem") {
      return index0 + 1 == n ? Value::undefined("there is no next item")
                             : (*loop->items)[loop->index0 + 1];
    }
    if (name == "cycle") {
      return make_method(name, [index0](Arguments& arguments) {
        if (arguments.positional.empty()) fail("cycle needs values");
        return arguments.positional[static_cast<std::size_t>(index0) % arguments.positional.size()];
      });
    }
  }
  return std::nullopt;
}

std::optional<Value> find_item(const Value& value, const Value& key, Work& work) {
  if (const Dict* d = value.dict()) {
    const Value* found = key.is_data() && key.depth() == 0 ? d->find(key) : nullptr;
    return found == nullptr ? std::nullopt : std::optional<Value>(*found);
  }
  std::int64_t storage = 0;
  const std::int64_t* integer = key.integer(storage);
  if (integer == nullptr) return std::nullopt;
  const auto place = [&](std::size_t n) -> std::optional<std::size_t> {
    const std::int64_t i = *integer < 0 ? *integer + static_cast<std::int64_t>(n) : *integer;
    if (i < 0 || i >= static_cast<std::int64_t>(n)) return std::nullopt;
    return static_cast<std::size_t>(i);
  };
  if (const Sequence* s = value.sequence()) {
    const auto i = place(s->items.size());
    return i ? std::optional<Value>(s->items[*i]) : std::nullopt;
  }
  if (const std::string* s = value.string()) {
    work.charge_bytes(s->size());
    const std::vector<std::string_view> all = characters(*s);
    const auto i = place(all.size());
    return i ? std::optional<Value>(all[*i]) : std::nullopt;
  }
  return std::nullopt;
}

Value missing(const Value& value, const Value& name, Work& work) {
  std::string why = "'";
  why.append(value.type_name()).append(" object' has no ");
  if (name.string() != nullptr) {
    why.append("attribute '").append(*name.string()).append("'");
  } else {
    why.append("element ").append(name.is_data() ? name.repr(work) : "of this key");
  }
  return Value::undefined(std::move(why));
}

}  // namespace

Value get_attribute(const Value& value, const std::string& name, Work& work) {
  if (const auto* undefined = value.get<Value::Undefined>()) fail(*undefined->why);
  if (std::optional<Value> attribute = find_attribute(value, name, work)) return *attribute;
  if (std::optional<Value> item = find_item(value, Value(name), work)) return *item;
  if ((value.sequence() != nullptr || value.dict() != nullptr) && is_mutator(name)) {
    fail("'" + name + "' would change a " + std::string(value.type_name()) + "; templates may not");
  }
  return missing(value, Value(name), work);
}

Value get_item(const Value& value, const Value& key, Work& work) {
  if (const auto* undefined = value.get<Value::Undefined>()) fail(*undefined->why);
  if (std::optional<Value> item = find_item(value, key, work)) return *item;
  if (const std::string* name = key.string()) {
    if (std::optional<Value> attribute = find_attribute(value, *name, work)) return *attribute;
  }
  return missing(value, key, work);
}

Value slice(const Value& value, const Value* begin, const Value* end, const Value* step,
            Work& work) {
  if (const auto* undefined = value.get<Value::Undefined>()) fail(*undefined->why);
  const std::string* text = value.string();
  const Sequence* sequence = value.sequence();
  if (text == nullptr && sequence == nullptr) {
    fail("a " + std::string(value.type_name()) + " cannot be sliced");
  }
  std::vector<std::string_view> all;
  if (text != nullptr) {
    work.charge(text->size());
    all = characters(*text);
  }
  const auto n = static_cast<std::int64_t>(text != nullptr ? all.size() : sequence->items.size());
  const std::int64_t by = int_argument("a slice", step, 1);
  if (by == 0) fail("a slice cannot have the step 0");
  // Python's bounds: negative ones count from the end, then all are clipped.
  const auto clip = [&](const Value* bound, std::int64_t fallback) {
    if (bound == nullptr || bound->is_none()) return fallback;
    std::int64_t i = int_argument("a slice", bound, 0);
    if (i < 0) i += n;
    return std::clamp(i, by < 0 ? std::int64_t{-1} : std::int64_t{0}, by < 0 ? n - 1 : n);
  };
  const std::int64_t first = clip(begin, by < 0 ? n - 1 : 0);
  const std::int64_t last = clip(end, by < 0 ? -1 : n);
  std::string out_text;
  std::vector<Value> out_items;
  for (std::int64_t i = first; by > 0 ? i < last : i > last;) {
    work.charge(1);
    if (text != nullptr) {
      out_text += all[static_cast<std::size_t>(i)];
    } else {
      out_items.push_back(sequence->items[static_cast<std::size_t>(i)]);
    }
    if (by > 0 ? by >= last - i : by <= last - i) break;  // and so i + by cannot overflow
    i += by;
  }
  if (text != nullptr) return out_text;
  return Value::list(std::move(out_items), sequence->is_tuple);
}

Value follow_path(const Value& item, const Value& path, Work& work) {
  const std::string* text = path.string();
  if (text == nullptr) return get_item(item, path, work);
  Value value = item;
  const std::string dot = ".";
  for (const std::string& part : split(*text, &dot, -1, Side::kLeft)) {
    const bool is_index = !part.empty() && part.size() < 10 &&
                          part.find_first_not_of("0123456789") == std::string::npos;
    value = get_item(value, is_index ? Value(std::int64_t{std::stoi(part)}) : Value(part), work);
  }
  return value;
}

}  // namespace statepack::jinja
