#include "model/jinja/value.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "model/jinja/error.hpp"
#include "model/utf8.hpp"

namespace statepack::jinja {

void Work::charge(std::uint64_t units) {
  if (units > left_) {
    fail("the template does more work than its bound allows; is there an endless growth in it?");
  }
  left_ -= units;
}

namespace {

// Keys that Python takes as equal (1, 1.0, True) give the same text.
std::string hash_key(const Value& key) {
  if (const std::string* s = key.string()) return "s" + *s;
  if (key.is_none()) return "n";
  if (key.is_undefined()) return "u";
  std::int64_t storage = 0;
  if (const std::int64_t* i = key.integer(storage)) return "i" + std::to_string(*i);
  if (const double* d = key.get<double>()) {
    if (std::floor(*d) == *d && std::fabs(*d) < 0x1p63) {
      return "i" + std::to_string(static_cast<std::int64_t>(*d));
    }
    return "f" + float_repr(*d);
  }
  fail("a " + std::string(key.type_name()) + " cannot be the key of a dict");
}

}  // namespace

void Dict::set(const Value& key, Value value) {
  if (!value.is_data()) {
    fail("a " + std::string(value.type_name()) + " cannot be stored in a dict");
  }
  depth_ = std::max(depth_, 1 + value.depth());
  if (depth_ > Value::kMaxDepth) fail("lists and dicts are nested too deeply");
  const auto [place, is_new] = places_.try_emplace(hash_key(key), entries_.size());
  if (is_new) {
    entries_.emplace_back(key, std::move(value));
  } else {
    entries_[place->second].second = std::move(value);
  }
}

const Value* Dict::find(const Value& key) const {
  const auto place = places_.find(hash_key(key));
  return place == places_.end() ? nullptr : &entries_[place->second].second;
}

const Value* Dict::find(std::string_view key) const { return find(Value(key)); }

Value Value::undefined(std::string why) {
  Value value;
  value.v_ = Undefined{std::make_shared<const std::string>(std::move(why))};
  return value;
}

Value Value::list(std::vector<Value> items, bool is_tuple) {
  auto sequence = std::make_shared<Sequence>();
  for (const Value& item : items) {
    if (!item.is_data()) {
      fail("a " + std::string(item.type_name()) + " cannot be stored in a list");
    }
    sequence->depth = std::max(sequence->depth, 1 + item.depth());
  }
  if (sequence->depth > kMaxDepth) fail("lists and dicts are nested too deeply");
  sequence->items = std::move(items);
  sequence->is_tuple = is_tuple;
  Value value;
  value.v_ = std::shared_ptr<const Sequence>(std::move(sequence));
  return value;
}

namespace {

template <class Json>
Value from_json_at(const Json& json, int depth) {
  if (depth > Value::kMaxDepth) fail("a variable is nested too deeply");
  using Type = typename Json::value_t;
  switch (json.type()) {
    case Type::boolean:
      return json.template get<bool>();
    case Type::number_integer:
      return json.template get<std::int64_t>();
    case Type::number_unsigned: {
      const auto u = json.template get<std::uint64_t>();
      if (u > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return static_cast<double>(u);
      }
      return static_cast<std::int64_t>(u);
    }
    case Type::number_float:
      return json.template get<double>();
    case Type::string:
      return to_valid_utf8(json.template get_ref<const std::string&>());
    case Type::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(from_json_at(item, depth + 1));
      return Value::list(std::move(items));
    }
    case Type::object: {
      auto dict = std::make_shared<Dict>();
      for (const auto& [key, item] : json.items()) {
        dict->set(to_valid_utf8(key), from_json_at(item, depth + 1));
      }
      return std::shared_ptr<const Dict>(std::move(dict));
    }
    case Type::null:
    case Type::binary:
    case Type::discarded:
      break;
  }
  return {};
}

}  // namespace

Value Value::from_json(const nlohmann::json& json) { return from_json_at(json, 1); }
Value Value::from_json(const nlohmann::ordered_json& json) { return from_json_at(json, 1); }

const std::int64_t* Value::integer(std::int64_t& storage) const {
  if (const bool* b = get<bool>()) {
    storage = *b ? 1 : 0;
    return &storage;
  }
  return get<std::int64_t>();
}

double Value::number() const {
  if (const double* d = get<double>()) return *d;
  std::int64_t storage = 0;
  return static_cast<double>(*integer(storage));
}

bool Value::truthy() const {
  if (is_undefined() || is_none()) return false;
  if (is_number()) return number() != 0;
  if (const std::string* s = string()) return !s->empty();
  if (const Sequence* s = sequence()) return !s->items.empty();
  if (const Dict* d = dict()) return !d->entries().empty();
  return true;
}

std::string_view Value::type_name() const {
  struct Name {
    std::string_view operator()(const Undefined&) const { return "Undefined"; }
    std::string_view operator()(None) const { return "None"; }
    std::string_view operator()(bool) const { return "bool"; }
    std::string_view operator()(std::int64_t) const { return "int"; }
    std::string_view operator()(double) const { return "float"; }
    std::string_view operator()(const std::shared_ptr<const std::string>&) const { return "str"; }
    std::string_view operator()(const std::shared_ptr<const Sequence>& s) const {
      return s->is_tuple ? "tuple" : "list";
    }
    std::string_view operator()(const std::shared_ptr<const Dict>&) const { return "dict"; }
    std::string_view operator()(const std::shared_ptr<Namespace>&) const { return "namespace"; }
    std::string_view operator()(const std::shared_ptr<const Loop>&) const { return "loop"; }
    std::string_view operator()(const std::shared_ptr<const Function>&) const { return "function"; }
  };
  return std::visit(Name{}, v_);
}

bool Value::is_data() const {
  return ns() == nullptr && loop() == nullptr && function() == nullptr;
}

int Value::depth() const {
  if (const Sequence* s = sequence()) return s->depth;
  if (const Dict* d = dict()) return d->depth();
  return 0;
}

std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  // Shortest digits in scientific form, then placed as Python does: an exponent below -4 or
  // from 16.
  char buffer[64];
  const auto result =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  std::string text(buffer, result.ptr);
  const std::size_t e = text.find('e');
  const int exponent = std::stoi(text.substr(e + 1));
  if (exponent < -4 || exponent >= 16) return text;
  const bool negative = text[0] == '-';
  std::string digits = text.substr(negative ? 1 : 0, e - (negative ? 1 : 0));
  std::erase(digits, '.');
  const auto n = static_cast<int>(digits.size());
  std::string out;
  if (exponent < 0) {
    out = "0." + std::string(static_cast<std::size_t>(-exponent - 1), '0') + digits;
  } else if (n <= exponent + 1) {
    out = digits + std::string(static_cast<std::size_t>(exponent + 1 - n), '0') + ".0";
  } else {
    const auto point = static_cast<std::size_t>(exponent + 1);
    out = digits.substr(0, point) + "." + digits.substr(point);
  }
  return (negative ? "-" : "") + out;
}

namespace {

void append_hex(std::string& out, std::string_view prefix, unsigned value, int n_digits) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  out += prefix;
  for (int i = n_digits - 1; i >= 0; --i) out += kDigits[(value >> (4 * i)) & 15u];
}

// str.isprintable() of one character.
bool is_printable(char32_t c) {
  if (c == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

std::string string_repr(std::string_view text) {
  const bool double_quotes =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos;
  const char quote = double_quotes ? '"' : '\'';
  std::string out(1, quote);
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text);
    const char32_t c = step.character;
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (is_printable(c)) {
      out += text.substr(0, step.n_bytes);
    } else if (c < 0x100) {
      append_hex(out, "\\x", c, 2);
    } else if (c < 0x10000) {
      append_hex(out, "\\u", c, 4);
    } else {
      append_hex(out, "\\U", c, 8);
    }
    text.remove_prefix(step.n_bytes);
  }
  return out + quote;
}

void append_repr(const Value& value, std::string& out, Work& work) {
  work.charge(1);
  if (const std::string* s = value.string()) {
    work.charge_bytes(s->size());
    out += string_repr(*s);
  } else if (const Sequence* items = value.sequence()) {
    out += items->is_tuple ? '(' : '[';
    for (std::size_t i = 0; i < items->items.size(); ++i) {
      if (i > 0) out += ", ";
      append_repr(items->items[i], out, work);
    }
    if (items->is_tuple && items->items.size() == 1) out += ',';
    out += items->is_tuple ? ')' : ']';
  } else if (const Dict* d = value.dict()) {
    out += '{';
    bool first = true;
    for (const auto& [key, item] : d->entries()) {
      if (!std::exchange(first, false)) out += ", ";
      append_repr(key, out, work);
      out += ": ";
      append_repr(item, out, work);
    }
    out += '}';
  } else if (value.is_undefined()) {
    out += "Undefined";
  } else if (value.is_none()) {
    out += "None";
  } else if (const bool* b = value.get<bool>()) {
    out += *b ? "True" : "False";
  } else if (const std::int64_t* i = value.get<std::int64_t>()) {
    out += std::to_string(*i);
  } else if (const double* x = value.get<double>()) {
    out += float_repr(*x);
  } else {
    fail("a " + std::string(value.type_name()) + " cannot be printed");
  }
}

}  // namespace

std::string Value::repr(Work& work) const {
  std::string out;
  append_repr(*this, out, work);
  return out;
}

std::string Value::str(Work& work) const {
  if (const std::string* s = string()) {
    work.charge_bytes(s->size());
    return *s;
  }
  return is_undefined() ? std::string() : repr(work);
}

bool equal(const Value& a, const Value& b, Work& work) {
  work.charge(1);
  if (a.is_number() && b.is_number()) {
    std::int64_t x = 0;
    std::int64_t y = 0;
    const std::int64_t* i = a.integer(x);
    const std::int64_t* j = b.integer(y);
    return i != nullptr && j != nullptr ? *i == *j : a.number() == b.number();
  }
  if (const std::string* s = a.string()) {
    const std::string* t = b.string();
    return t != nullptr && *s == *t;
  }
  if (const Sequence* s = a.sequence()) {
    const Sequence* t = b.sequence();
    return t != nullptr && s->is_tuple == t->is_tuple &&
           std::equal(s->items.begin(), s->items.end(), t->items.begin(), t->items.end(),
                      [&](const Value& x, const Value& y) { return equal(x, y, work); });
  }
  if (const Dict* d = a.dict()) {
    const Dict* e = b.dict();
    return e != nullptr && d->entries().size() == e->entries().size() &&
           std::all_of(d->entries().begin(), d->entries().end(), [&](const auto& entry) {
             const Value* other = e->find(entry.first);
             return other != nullptr && equal(entry.second, *other, work);
           });
  }
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (a.ns() != nullptr) return a.ns() == b.ns();
  if (a.function() != nullptr) return a.function() == b.function();
  return a.loop() != nullptr && a.loop() == b.loop();
}

bool less(const Value& a, const Value& b, Work& work) {
  work.charge(1);
  if (a.is_number() && b.is_number()) {
    std::int64_t x = 0;
    std::int64_t y = 0;
    const std::int64_t* i = a.integer(x);
    const std::int64_t* j = b.integer(y);
    return i != nullptr && j != nullptr ? *i < *j : a.number() < b.number();
  }
  // Bytes of UTF-8 are in the order of the characters, as Python compares them.
  if (a.string() != nullptr && b.string() != nullptr) return *a.string() < *b.string();
  const Sequence* s = a.sequence();
  const Sequence* t = b.sequence();
  if (s != nullptr && t != nullptr && s->is_tuple == t->is_tuple) {
    const std::size_t n = std::min(s->items.size(), t->items.size());
    for (std::size_t i = 0; i < n; ++i) {
      if (!equal(s->items[i], t->items[i], work)) return less(s->items[i], t->items[i], work);
    }
    return s->items.size() < t->items.size();
  }
  for (const Value* value : {&a, &b}) {
    if (const auto* undefined = value->get<Value::Undefined>()) fail(*undefined->why);
  }
  fail("a " + std::string(a.type_name()) + " and a " + std::string(b.type_name()) +
       " have no order");
}

bool contains(const Value& haystack, const Value& needle, Work& work) {
  if (const std::string* s = haystack.string()) {
    const std::string* part = needle.string();
    if (part == nullptr) {
      fail("'in' on a string needs a string on its left, not a " + std::string(needle.type_name()));
    }
    work.charge_bytes(s->size());
    return s->find(*part) != std::string::npos;
  }
  if (const Sequence* s = haystack.sequence()) {
    return std::any_of(s->items.begin(), s->items.end(),
                       [&](const Value& item) { return equal(item, needle, work); });
  }
  if (const Dict* d = haystack.dict()) return d->find(needle) != nullptr;
  if (haystack.is_undefined()) return false;
  fail("'in' needs a string, list or dict on its right, not a " +
       std::string(haystack.type_name()));
}

std::vector<Value> iterate(const Value& value, Work& work) {
  std::vector<Value> items;
  if (const Sequence* s = value.sequence()) {
    work.charge(s->items.size());
    return s->items;
  }
  if (const Dict* d = value.dict()) {
    work.charge(d->entries().size());
    for (const auto& [key, item] : d->entries()) items.push_back(key);
  } else if (const std::string* s = value.string()) {
    work.charge(s->size());
    for (std::string_view rest = *s; !rest.empty();) {
      const std::size_t n_bytes = decode_utf8(rest).n_bytes;
      items.emplace_back(rest.substr(0, n_bytes));
      rest.remove_prefix(n_bytes);
    }
  } else if (!value.is_undefined()) {
    fail("a " + std::string(value.type_name()) + " cannot be iterated");
  }
  return items;
}

namespace {

std::string json_string(std::string_view text, bool ensure_ascii) {
  std::string out = "\"";
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text);
    const char32_t c = step.character;
    if (c == '"') {
      out += "\\\"";
    } else if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\b') {
      out += "\\b";
    } else if (c == '\f') {
      out += "\\f";
    } else if (c < 0x20 || (ensure_ascii && c >= 0x7F && c < 0x10000)) {
      append_hex(out, "\\u", c, 4);
    } else if (ensure_ascii && c >= 0x10000) {
      append_hex(out, "\\u", 0xD800 + ((c - 0x10000) >> 10), 4);
      append_hex(out, "\\u", 0xDC00 + ((c - 0x10000) & 0x3FF), 4);
    } else {
      out += text.substr(0, step.n_bytes);
    }
    text.remove_prefix(step.n_bytes);
  }
  return out + '"';
}

std::string json_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return float_repr(value);
}

std::string json_key(const Value& key) {
  if (const std::string* s = key.string()) return *s;
  if (const bool* b = key.get<bool>()) return *b ? "true" : "false";
  if (const std::int64_t* i = key.get<std::int64_t>()) return std::to_string(*i);
  if (const double* d = key.get<double>()) return json_number(*d);
  if (!key.is_none())
    fail("tojson: a key of type " + std::string(key.type_name()) + " is not JSON");
  return "null";
}

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Work& work) : style_(style), work_(work) {}

  void write(const Value& value, std::size_t level) {
    work_.charge(1);
    if (const std::string* s = value.string()) {
      work_.charge_bytes(s->size());
      out_ += json_string(*s, style_.ensure_ascii);
    } else if (const Sequence* list = value.sequence()) {
      write_items('[', ']', list->items.size(), level,
                  [&](std::size_t i) { write(list->items[i], level + 1); });
    } else if (const Dict* d = value.dict()) {
      std::vector<const std::pair<Value, Value>*> entries;
      for (const auto& entry : d->entries()) entries.push_back(&entry);
      if (style_.sort_keys) {
        std::stable_sort(entries.begin(), entries.end(), [&](const auto* a, const auto* b) {
          return less(a->first, b->first, work_);
        });
      }
      write_items('{', '}', entries.size(), level, [&](std::size_t i) {
        out_ +=
            json_string(json_key(entries[i]->first), style_.ensure_ascii) + style_.key_separator;
        write(entries[i]->second, level + 1);
      });
    } else if (value.is_none()) {
      out_ += "null";
    } else if (const bool* b = value.get<bool>()) {
      out_ += *b ? "true" : "false";
    } else if (const std::int64_t* i = value.get<std::int64_t>()) {
      out_ += std::to_string(*i);
    } else if (const double* x = value.get<double>()) {
      out_ += json_number(*x);
    } else {
      fail("tojson: a value of type " + std::string(value.type_name()) + " is not JSON");
    }
  }
  std::string take() { return std::move(out_); }

 private:
  template <class Item>
  void write_items(char open, char close, std::size_t n, std::size_t level, const Item& item) {
    out_ += open;
    for (std::size_t i = 0; i < n; ++i) {
      if (i > 0) out_ += style_.item_separator;
      if (style_.has_indent) new_line(level + 1);
      item(i);
    }
    if (n > 0 && style_.has_indent) new_line(level);
    out_ += close;
  }
  void new_line(std::size_t level) {
    work_.charge_bytes(level * style_.indent.size());
    out_ += '\n';
    for (std::size_t i = 0; i < level; ++i) out_ += style_.indent;
  }

  const JsonStyle& style_;
  Work& work_;
  std::string out_;
};

}  // namespace

std::string to_json(const Value& value, const JsonStyle& style, Work& work) {
  JsonWriter writer(style, work);
  writer.write(value, 0);
  return writer.take();
}

}  // namespace statepack::jinja
