#include "model/jinja/builtins.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>

#include "model/jinja/access.hpp"
#include "model/jinja/arithmetic.hpp"
#include "model/jinja/error.hpp"
#include "model/jinja/text.hpp"
#include "model/utf8.hpp"

namespace statepack::jinja {
namespace {

// --- numbers from text ---

// Python's int() and float() take white space around, and single underscores between digits.
std::optional<std::string> plain_digits(std::string_view text) {
  std::string out(strip(text, nullptr, Side::kBoth));
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i] != '_') continue;
    const auto alnum = [&](std::size_t k) {
      return k < out.size() && std::isalnum(static_cast<unsigned char>(out[k])) != 0;
    };
    if (i == 0 || !alnum(i - 1) || !alnum(i + 1)) return std::nullopt;
  }
  std::erase(out, '_');
  return out;
}

std::optional<std::int64_t> parse_int(std::string_view text, std::int64_t base) {
  std::optional<std::string> digits = plain_digits(text);
  if (!digits || digits->empty()) return std::nullopt;
  std::string_view rest = *digits;
  const bool is_negative = rest[0] == '-';
  if (is_negative || rest[0] == '+') rest.remove_prefix(1);
  const auto prefixed = [&](char letter) {
    return rest.size() > 2 && rest[0] == '0' && (rest[1] | 0x20) == letter;
  };
  if ((base == 16 && prefixed('x')) || (base == 8 && prefixed('o')) ||
      (base == 2 && prefixed('b'))) {
    rest.remove_prefix(2);
  }
  if (base < 2 || base > 36 || rest.starts_with('-')) return std::nullopt;
  std::int64_t value = 0;
  const auto result =
      std::from_chars(rest.data(), rest.data() + rest.size(), value, static_cast<int>(base));
  if (result.ec != std::errc{} || result.ptr != rest.data() + rest.size()) return std::nullopt;
  return is_negative ? -value : value;
}

std::optional<double> parse_float(std::string_view text) {
  const std::optional<std::string> digits = plain_digits(text);
  if (!digits || digits->empty()) return std::nullopt;
  std::string_view rest = *digits;
  if (rest[0] == '+') rest.remove_prefix(1);
  if (rest.starts_with('+') || rest.find('(') != std::string_view::npos) return std::nullopt;
  double value = 0;
  const auto result = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (result.ptr != rest.data() + rest.size() || result.ec != std::errc{}) return std::nullopt;
  return value;
}

std::int64_t truncate(double value) {
  if (std::isnan(value) || std::fabs(value) >= 0x1p63) {
    fail("int: the number does not fit 64 bits");
  }
  return static_cast<std::int64_t>(value);
}

// --- helpers of filters over lists ---

// What sorting and comparing look at: an attribute when one is named, lower case unless told.
class Key {
 public:
  Key(const Value* attribute, bool case_sensitive, Work& work)
      : attribute_(attribute != nullptr && !attribute->is_none() ? attribute : nullptr),
        case_sensitive_(case_sensitive),
        work_(work) {}
  Value operator()(const Value& item) const {
    Value key = attribute_ != nullptr ? follow_path(item, *attribute_, work_) : item;
    if (!case_sensitive_ && key.string() != nullptr) {
      work_.charge_bytes(key.string()->size());
      return lower(*key.string());
    }
    return key;
  }

 private:
  const Value* attribute_;
  bool case_sensitive_;
  Work& work_;
};

Value sorted_by(std::vector<Value> items, const std::function<Value(const Value&)>& key,
                bool reverse, Work& work) {
  std::vector<std::pair<Value, Value>> keyed;
  keyed.reserve(items.size());
  for (Value& item : items) {
    Value k = key(item);
    keyed.emplace_back(std::move(k), std::move(item));
  }
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    return reverse ? less(b.first, a.first, work) : less(a.first, b.first, work);
  });
  items.clear();
  for (auto& [k, item] : keyed) items.push_back(std::move(item));
  return Value::list(std::move(items));
}

Value extreme(std::string_view what, const Value& input, Arguments& arguments, Work& work,
              bool largest) {
  const auto a = bind(what, arguments, {"case_sensitive", "attribute"}, 0);
  const std::vector<Value> items = iterate(input, work);
  if (items.empty()) return Value::undefined("No aggregated item, sequence was empty.");
  const Key key(a[1], bool_argument(a[0], false), work);
  const Value* best = &items[0];
  Value best_key = key(items[0]);
  for (const Value& item : items) {
    Value k = key(item);
    if (largest ? less(best_key, k, work) : less(k, best_key, work)) {
      best = &item;
      best_key = std::move(k);
    }
  }
  return *best;
}

// select, reject, selectattr, rejectattr: the items for which a test (or truth) is `wanted`.
Value select(std::string_view what, const Value& input, Arguments& arguments, Work& work,
             bool by_attribute, bool wanted) {
  auto& positional = arguments.positional;
  std::size_t n_used = 0;
  Value attribute;
  if (by_attribute) {
    if (positional.empty()) fail(std::string(what) + " needs the name of an attribute");
    attribute = positional[n_used++];
  }
  const Test* test = nullptr;
  if (positional.size() > n_used) {
    const std::string& name = string_argument(what, &positional[n_used++]);
    test = find_test(name);
    if (test == nullptr) fail(std::string(what) + ": no test '" + name + "'");
  }
  Arguments rest{{positional.begin() + static_cast<std::ptrdiff_t>(n_used), positional.end()},
                 arguments.named};
  std::vector<Value> chosen;
  for (const Value& item : iterate(input, work)) {
    const Value tested = by_attribute ? follow_path(item, attribute, work) : item;
    const bool passes = test == nullptr ? tested.truthy() : test->run(tested, rest, work);
    if (passes == wanted) chosen.push_back(item);
  }
  return Value::list(std::move(chosen));
}

Value map(const Value& input, Arguments& arguments, Work& work) {
  std::vector<Value> mapped;
  if (arguments.positional.empty()) {
    const auto a = bind("map", arguments, {"attribute", "default"}, 1);
    for (const Value& item : iterate(input, work)) {
      Value value = follow_path(item, *a[0], work);
      if (value.is_undefined() && a[1] != nullptr) value = *a[1];
      mapped.push_back(std::move(value));
    }
    return Value::list(std::move(mapped));
  }
  const std::string& name = string_argument("map", &arguments.positional[0]);
  const Filter* filter = find_filter(name);
  if (filter == nullptr) fail("map: no filter '" + name + "'");
  Arguments rest{{arguments.positional.begin() + 1, arguments.positional.end()}, arguments.named};
  for (const Value& item : iterate(input, work)) mapped.push_back(filter->run(item, rest, work));
  return Value::list(std::move(mapped));
}

std::int64_t length(const Value& input) {
  if (const std::string* s = input.string()) {
    return static_cast<std::int64_t>(count_characters(*s));
  }
  if (const Sequence* s = input.sequence()) return static_cast<std::int64_t>(s->items.size());
  if (const Dict* d = input.dict()) return static_cast<std::int64_t>(d->entries().size());
  if (const Loop* l = input.loop()) return static_cast<std::int64_t>(l->items->size());
  if (input.is_undefined()) return 0;
  fail("length: a " + std::string(input.type_name()) + " has none");
}

Value tojson(const Value& input, Arguments& arguments, Work& work) {
  const auto a =
      bind("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"}, 0);
  JsonStyle style;
  style.ensure_ascii = bool_argument(a[0], false);
  style.sort_keys = bool_argument(a[3], false);
  if (a[1] != nullptr && !a[1]->is_none()) {
    style.has_indent = true;
    style.item_separator = ",";
    if (const std::string* text = a[1]->string()) {
      style.indent = *text;
    } else {
      const std::int64_t n = int_argument("tojson", a[1], 0);
      if (n > 1000) fail("tojson: an indent above 1000");
      style.indent.assign(static_cast<std::size_t>(std::max<std::int64_t>(n, 0)), ' ');
    }
  }
  if (a[2] != nullptr && !a[2]->is_none()) {
    const Sequence* pair = a[2]->sequence();
    if (pair == nullptr || pair->items.size() != 2) {
      fail("tojson: separators are two strings, for example (',', ':')");
    }
    style.item_separator = string_argument("tojson", &pair->items[0]);
    style.key_separator = string_argument("tojson", &pair->items[1]);
  }
  return to_json(input, style, work);
}

Value indent(const Value& input, Arguments& arguments, Work& work) {
  const auto a = bind("indent", arguments, {"width", "first", "blank"}, 0);
  std::string indention(4, ' ');
  if (a[0] != nullptr) {
    if (const std::string* text = a[0]->string()) {
      indention = *text;
    } else {
      const std::int64_t n = int_argument("indent", a[0], 4);
      if (n > 1000) fail("indent: a width above 1000");
      indention.assign(static_cast<std::size_t>(std::max<std::int64_t>(n, 0)), ' ');
    }
  }
  const bool blank_too = bool_argument(a[2], false);
  // A newline behind the text makes its own last newline count as a line.
  std::string out;
  bool is_first = true;
  for (const std::string& line : split_lines(string_argument("indent", &input) + "\n", false)) {
    work.charge_bytes(16 + line.size() + indention.size());
    if (!is_first) out += '\n';
    if (is_first ? bool_argument(a[1], false) : blank_too || !line.empty()) out += indention;
    is_first = false;
    out += line;
  }
  return out;
}

Value round(const Value& input, Arguments& arguments, Work&) {
  const auto a = bind("round", arguments, {"precision", "method"}, 0);
  if (!input.is_number()) fail("round: a " + std::string(input.type_name()) + " is no number");
  const std::int64_t precision = int_argument("round", a[0], 0);
  if (precision < 0 || precision > 300) fail("round: the precision is not from 0 to 300");
  const std::string method = a[1] == nullptr ? "common" : string_argument("round", a[1]);
  if (method == "common") {
    if (!input.is_float()) return input;
    if (!std::isfinite(input.number())) return input;
    char buffer[700];  // 309 digits before the point and 300 behind it
    const auto end = std::to_chars(buffer, buffer + sizeof(buffer), input.number(),
                                   std::chars_format::fixed, static_cast<int>(precision));
    double rounded = 0;
    std::from_chars(buffer, end.ptr, rounded);
    return rounded;
  }
  const double scale = std::pow(10.0, static_cast<double>(precision));
  if (method == "ceil") return std::ceil(input.number() * scale) / scale;
  if (method == "floor") return std::floor(input.number() * scale) / scale;
  fail("round: the method must be common, ceil or floor");
}

Value join(const Value& input, Arguments& arguments, Work& work) {
  const auto a = bind("join", arguments, {"d", "attribute"}, 0);
  const std::string between = a[0] == nullptr ? "" : a[0]->str(work);
  const bool has_attribute = a[1] != nullptr && !a[1]->is_none();
  std::string out;
  bool is_first = true;
  for (const Value& item : iterate(input, work)) {
    work.charge_bytes(between.size());
    if (!is_first) out += between;
    is_first = false;
    out += (has_attribute ? follow_path(item, *a[1], work) : item).str(work);
  }
  return out;
}

Value dictsort(const Value& input, Arguments& arguments, Work& work) {
  const auto a = bind("dictsort", arguments, {"case_sensitive", "by", "reverse"}, 0);
  const Dict* dict = input.dict();
  if (dict == nullptr) fail("dictsort: a " + std::string(input.type_name()) + " is no dict");
  const std::string by = a[1] == nullptr ? "key" : string_argument("dictsort", a[1]);
  if (by != "key" && by != "value") fail("dictsort: 'by' is either 'key' or 'value'");
  std::vector<Value> items;
  for (const auto& [key, value] : dict->entries()) {
    work.charge(1);
    items.push_back(Value::tuple({key, value}));
  }
  const Key key(nullptr, bool_argument(a[0], false), work);
  return sorted_by(
      std::move(items),
      [&](const Value& item) { return key(item.sequence()->items[by == "key" ? 0 : 1]); },
      bool_argument(a[2], false), work);
}

template <std::string (*map_text)(std::string_view)>
Value text_filter(const Value& input, Arguments& arguments, Work& work) {
  bind("this filter", arguments, {}, 0);
  return map_text(input.str(work));
}

Value default_filter(const Value& input, Arguments& arguments, Work&) {
  const auto a = bind("default", arguments, {"default_value", "boolean"}, 0);
  const bool use = input.is_undefined() || (bool_argument(a[1], false) && !input.truthy());
  return !use ? input : a[0] == nullptr ? Value("") : *a[0];
}

Value length_filter(const Value& input, Arguments& arguments, Work&) {
  bind("length", arguments, {}, 0);
  return length(input);
}

Value first_or_last(std::string_view what, const Value& input, Arguments& arguments, Work& work,
                    bool first) {
  bind(what, arguments, {}, 0);
  std::vector<Value> items = iterate(input, work);
  if (items.empty()) {
    return Value::undefined("No " + std::string(what) + " item, sequence was empty.");
  }
  return first ? items.front() : items.back();
}

constexpr Filter kFilters[] = {
    {"abs",
     [](const Value& input, Arguments& arguments, Work&) -> Value {
       bind("abs", arguments, {}, 0);
       if (!input.is_number()) fail("abs: a " + std::string(input.type_name()) + " is no number");
       std::int64_t storage = 0;
       const std::int64_t* integer = input.integer(storage);
       if (integer == nullptr) return std::fabs(input.number());
       return *integer < 0 ? negative(input) : Value(*integer);
     }},
    {"capitalize", text_filter<capitalize>},
    {"count", length_filter},
    {"d", default_filter},
    {"default", default_filter},
    {"dictsort", dictsort},
    {"first", [](const Value& input, Arguments& arguments,
                 Work& work) { return first_or_last("first", input, arguments, work, true); }},
    {"float",
     [](const Value& input, Arguments& arguments, Work&) -> Value {
       const auto a = bind("float", arguments, {"default"}, 0);
       Value fallback = a[0] == nullptr ? Value(0.0) : *a[0];
       if (input.is_number()) return input.number();
       if (const std::string* s = input.string()) {
         const std::optional<double> value = parse_float(*s);
         return value ? Value(*value) : fallback;
       }
       if (const auto* undefined = input.get<Value::Undefined>()) fail(*undefined->why);
       return fallback;
     }},
    {"indent", indent},
    {"int",
     [](const Value& input, Arguments& arguments, Work&) -> Value {
       const auto a = bind("int", arguments, {"default", "base"}, 0);
       Value fallback = a[0] == nullptr ? Value(std::int64_t{0}) : *a[0];
       std::int64_t storage = 0;
       if (const std::int64_t* integer = input.integer(storage)) return *integer;
       if (input.is_float()) return truncate(input.number());
       if (const std::string* s = input.string()) {
         if (const auto value = parse_int(*s, int_argument("int", a[1], 10))) return *value;
         const std::optional<double> value = parse_float(*s);
         return value && std::isfinite(*value) ? Value(truncate(*value)) : fallback;
       }
       if (const auto* undefined = input.get<Value::Undefined>()) fail(*undefined->why);
       return fallback;
     }},
    {"items",
     [](const Value& input, Arguments& arguments, Work& work) -> Value {
       bind("items", arguments, {}, 0);
       if (input.is_undefined()) return Value::list({});
       if (input.dict() == nullptr) {
         fail("items: a " + std::string(input.type_name()) + " is no mapping");
       }
       Arguments none;
       return get_attribute(input, "items", work).function()->call(none);
     }},
    {"join", join},
    {"last", [](const Value& input, Arguments& arguments,
                Work& work) { return first_or_last("last", input, arguments, work, false); }},
    {"length", length_filter},
    {"list",
     [](const Value& input, Arguments& arguments, Work& work) {
       bind("list", arguments, {}, 0);
       return Value::list(iterate(input, work));
     }},
    {"lower", text_filter<lower>},
    {"map", map},
    {"max", [](const Value& input, Arguments& arguments,
               Work& work) { return extreme("max", input, arguments, work, true); }},
    {"min", [](const Value& input, Arguments& arguments,
               Work& work) { return extreme("min", input, arguments, work, false); }},
    {"reject", [](const Value& input, Arguments& arguments,
                  Work& work) { return select("reject", input, arguments, work, false, false); }},
    {"rejectattr",
     [](const Value& input, Arguments& arguments, Work& work) {
       return select("rejectattr", input, arguments, work, true, false);
     }},
    {"replace",
     [](const Value& input, Arguments& arguments, Work& work) -> Value {
       const auto a = bind("replace", arguments, {"old", "new", "count"}, 2);
       Arguments texts{{a[0]->str(work), a[1]->str(work)}, {}};
       if (a[2] != nullptr && !a[2]->is_none()) texts.positional.push_back(*a[2]);
       return get_attribute(input.str(work), "replace", work).function()->call(texts);
     }},
    {"reverse",
     [](const Value& input, Arguments& arguments, Work& work) -> Value {
       bind("reverse", arguments, {}, 0);
       std::vector<Value> items = iterate(input, work);
       std::reverse(items.begin(), items.end());
       if (input.string() == nullptr) return Value::list(std::move(items));
       std::string out;
       for (const Value& character : items) out += *character.string();
       return out;
     }},
    {"round", round},
    {"safe", text_filter<[](std::string_view text) { return std::string(text); }>},
    {"select", [](const Value& input, Arguments& arguments,
                  Work& work) { return select("select", input, arguments, work, false, true); }},
    {"selectattr",
     [](const Value& input, Arguments& arguments, Work& work) {
       return select("selectattr", input, arguments, work, true, true);
     }},
    {"sort",
     [](const Value& input, Arguments& arguments, Work& work) {
       const auto a = bind("sort", arguments, {"reverse", "case_sensitive", "attribute"}, 0);
       const Key key(a[2], bool_argument(a[1], false), work);
       return sorted_by(iterate(input, work), key, bool_argument(a[0], false), work);
     }},
    {"string", text_filter<[](std::string_view text) { return std::string(text); }>},
    {"sum",
     [](const Value& input, Arguments& arguments, Work& work) {
       const auto a = bind("sum", arguments, {"attribute", "start"}, 0);
       const bool has_attribute = a[0] != nullptr && !a[0]->is_none();
       Value total = a[1] == nullptr ? Value(std::int64_t{0}) : *a[1];
       for (const Value& item : iterate(input, work)) {
         const Value term = has_attribute ? follow_path(item, *a[0], work) : item;
         total = arithmetic(Expression::Kind::kAdd, total, term, work);
       }
       return total;
     }},
    {"title", text_filter<title_words>},
    {"tojson", tojson},
    {"trim",
     [](const Value& input, Arguments& arguments, Work& work) -> Value {
       const auto a = bind("trim", arguments, {"chars"}, 0);
       const bool plain = a[0] == nullptr || a[0]->is_none();
       return strip(input.str(work), plain ? nullptr : &string_argument("trim", a[0]), Side::kBoth);
     }},
    {"unique",
     [](const Value& input, Arguments& arguments, Work& work) {
       const auto a = bind("unique", arguments, {"case_sensitive", "attribute"}, 0);
       const Key key(a[1], bool_argument(a[0], false), work);
       Dict seen;
       std::vector<Value> kept;
       for (const Value& item : iterate(input, work)) {
         const Value k = key(item);
         if (seen.find(k) != nullptr) continue;
         seen.set(k, Value());
         kept.push_back(item);
       }
       return Value::list(std::move(kept));
     }},
    {"upper", text_filter<upper>},
};

// --- tests ---

bool no_arguments(const Arguments& arguments) {
  bind("this test", arguments, {}, 0);
  return true;
}

const Value& other(const Arguments& arguments) {
  return *bind("this test", arguments, {"other"}, 1)[0];
}

std::int64_t integer_of(const Value& input) { return int_argument("this test", &input, 0); }

constexpr Test kTests[] = {
    {"boolean", [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && v.is_bool(); }},
    {"callable", [](const Value& v, Arguments& a,
                    Work&) { return no_arguments(a) && v.function() != nullptr; }},
    {"defined",
     [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && !v.is_undefined(); }},
    {"divisibleby",
     [](const Value& v, Arguments& a, Work& work) {
       return !arithmetic(Expression::Kind::kModulo, v, other(a), work).truthy();
     }},
    {"eq", [](const Value& v, Arguments& a, Work& work) { return equal(v, other(a), work); }},
    {"equalto", [](const Value& v, Arguments& a, Work& work) { return equal(v, other(a), work); }},
    {"even",
     [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && integer_of(v) % 2 == 0; }},
    {"false", [](const Value& v, Arguments& a,
                 Work&) { return no_arguments(a) && v.is_bool() && !v.truthy(); }},
    {"float", [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && v.is_float(); }},
    {"ge", [](const Value& v, Arguments& a,
              Work& work) { return less(other(a), v, work) || equal(v, other(a), work); }},
    {"greaterthan",
     [](const Value& v, Arguments& a, Work& work) { return less(other(a), v, work); }},
    {"gt", [](const Value& v, Arguments& a, Work& work) { return less(other(a), v, work); }},
    {"in", [](const Value& v, Arguments& a, Work& work) { return contains(other(a), v, work); }},
    {"integer", [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && v.is_int(); }},
    {"iterable",
     [](const Value& v, Arguments& a, Work&) {
       return no_arguments(a) && (v.string() != nullptr || v.sequence() != nullptr ||
                                  v.dict() != nullptr || v.is_undefined());
     }},
    {"le", [](const Value& v, Arguments& a,
              Work& work) { return less(v, other(a), work) || equal(v, other(a), work); }},
    {"lessthan", [](const Value& v, Arguments& a, Work& work) { return less(v, other(a), work); }},
    {"lower", [](const Value& v, Arguments& a,
                 Work& work) { return no_arguments(a) && is_lower(v.str(work)); }},
    {"lt", [](const Value& v, Arguments& a, Work& work) { return less(v, other(a), work); }},
    {"mapping",
     [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && v.dict() != nullptr; }},
    {"ne", [](const Value& v, Arguments& a, Work& work) { return !equal(v, other(a), work); }},
    {"none", [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && v.is_none(); }},
    {"number",
     [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && v.is_number(); }},
    {"odd",
     [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && integer_of(v) % 2 != 0; }},
    {"sameas",
     [](const Value& v, Arguments& a, Work& work) {
       return v.type_name() == other(a).type_name() && equal(v, other(a), work);
     }},
    {"sequence",
     [](const Value& v, Arguments& a, Work&) {
       return no_arguments(a) && (v.string() != nullptr || v.sequence() != nullptr ||
                                  v.dict() != nullptr || v.is_undefined());
     }},
    {"string",
     [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && v.string() != nullptr; }},
    {"true", [](const Value& v, Arguments& a,
                Work&) { return no_arguments(a) && v.is_bool() && v.truthy(); }},
    {"undefined",
     [](const Value& v, Arguments& a, Work&) { return no_arguments(a) && v.is_undefined(); }},
    {"upper", [](const Value& v, Arguments& a,
                 Work& work) { return no_arguments(a) && is_upper(v.str(work)); }},
};

template <class Entry, std::size_t n>
const Entry* find_entry(const Entry (&entries)[n], std::string_view name) {
  const auto found =
      std::find_if(entries, entries + n, [&](const Entry& entry) { return entry.name == name; });
  return found == entries + n ? nullptr : found;
}

template <class Entry, std::size_t n>
std::string names(const Entry (&entries)[n]) {
  std::string out;
  for (const Entry& entry : entries) out += (out.empty() ? "" : ", ") + std::string(entry.name);
  return out;
}

}  // namespace

const Filter* find_filter(std::string_view name) { return find_entry(kFilters, name); }
const Test* find_test(std::string_view name) { return find_entry(kTests, name); }
std::string filter_names() { return names(kFilters); }
std::string test_names() { return names(kTests); }

}  // namespace statepack::jinja
