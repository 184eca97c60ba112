// Values of a template, with Python's semantics: what a name can stand for while rendering.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace statepack::jinja {

class Value;
class Work;

/// A list or a tuple; never changed once made.
struct Sequence {
  std::vector<Value> items;
  bool is_tuple = false;
  int depth = 1;
};

/// A mapping that keeps the order of its keys; never changed once made.
class Dict {
 public:
  /// Replaces the value of an equal key, which keeps its place. Only while building.
  /// Throws TemplateError for a key that Python cannot hash.
  void set(const Value& key, Value value);
  const Value* find(const Value& key) const;  ///< null: absent
  const Value* find(std::string_view key) const;
  const std::vector<std::pair<Value, Value>>& entries() const { return entries_; }
  int depth() const { return depth_; }

 private:
  std::vector<std::pair<Value, Value>> entries_;
  std::unordered_map<std::string, std::size_t> places_;  // by hash_key()
  int depth_ = 1;
};

/// namespace(): the one thing a template can change. Holds data only, so it is never in a cycle.
struct Namespace {
  std::unordered_map<std::string, Value> attributes;
};

/// What `loop` names inside a for.
struct Loop {
  const std::vector<Value>* items = nullptr;
  std::size_t index0 = 0;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

/// A macro, method or global function. Never inside a list, dict or namespace: it may refer to the
/// scope that it was made in, which it therefore cannot outlive.
struct Function {
  std::string name;
  std::function<Value(Arguments&)> call;
};

class Value {
 public:
  struct Undefined {
    std::shared_ptr<const std::string> why;  ///< "'x' is undefined"
  };
  struct None {};
  using Variant = std::variant<Undefined, None, bool, std::int64_t, double,
                               std::shared_ptr<const std::string>, std::shared_ptr<const Sequence>,
                               std::shared_ptr<const Dict>, std::shared_ptr<Namespace>,
                               std::shared_ptr<const Loop>, std::shared_ptr<const Function>>;

  Value() : v_(None{}) {}
  Value(bool b) : v_(b) {}          // NOLINT(google-explicit-constructor)
  Value(std::int64_t i) : v_(i) {}  // NOLINT(google-explicit-constructor)
  Value(double d) : v_(d) {}        // NOLINT(google-explicit-constructor)
  Value(std::string s) : v_(std::make_shared<const std::string>(std::move(s))) {}  // NOLINT
  Value(std::string_view s) : Value(std::string(s)) {}        // NOLINT(google-explicit-constructor)
  Value(const char* s) : Value(std::string(s)) {}             // NOLINT(google-explicit-constructor)
  Value(std::shared_ptr<const Dict> d) : v_(std::move(d)) {}  // NOLINT(google-explicit-constructor)
  Value(std::shared_ptr<Namespace> n) : v_(std::move(n)) {}   // NOLINT(google-explicit-constructor)
  Value(std::shared_ptr<const Loop> l) : v_(std::move(l)) {}  // NOLINT(google-explicit-constructor)
  Value(std::shared_ptr<const Function> f)
      : v_(std::move(f)) {}  // NOLINT(google-explicit-constructor)
  static Value undefined(std::string why);
  /// Throws TemplateError when an item may not be stored or nesting passes kMaxDepth.
  static Value list(std::vector<Value> items, bool is_tuple = false);
  static Value tuple(std::vector<Value> items) { return list(std::move(items), true); }
  /// Throws TemplateError when nested deeper than kMaxDepth.
  static Value from_json(const nlohmann::json& json);
  static Value from_json(const nlohmann::ordered_json& json);  ///< keeps the order of keys

  /// Lists and dicts may nest this deep, so that walking them cannot exhaust the stack.
  static constexpr int kMaxDepth = 256;

  template <class T>
  const T* get() const {
    return std::get_if<T>(&v_);
  }
  bool is_undefined() const { return get<Undefined>() != nullptr; }
  bool is_none() const { return get<None>() != nullptr; }
  bool is_bool() const { return get<bool>() != nullptr; }
  bool is_int() const { return get<std::int64_t>() != nullptr; }
  bool is_float() const { return get<double>() != nullptr; }
  bool is_number() const { return is_bool() || is_int() || is_float(); }
  const std::string* string() const { return pointee<const std::string>(); }
  const Sequence* sequence() const { return pointee<const Sequence>(); }
  const Dict* dict() const { return pointee<const Dict>(); }
  Namespace* ns() const { return pointee<Namespace>(); }
  const Loop* loop() const { return pointee<const Loop>(); }
  const Function* function() const { return pointee<const Function>(); }
  /// Bool or int as an integer, as Python's arithmetic takes them.
  const std::int64_t* integer(std::int64_t& storage) const;
  double number() const;  ///< of a bool, int or float

  bool truthy() const;
  std::string_view type_name() const;  ///< Python's: "str", "dict", ...
  /// str(): what {{ }} prints. Throws TemplateError for what has no text (functions).
  std::string str(Work& work) const;
  std::string repr(Work& work) const;
  bool is_data() const;  ///< may be an item of a list or dict
  int depth() const;

 private:
  template <class T>
  T* pointee() const {
    const auto* p = get<std::shared_ptr<T>>();
    return p == nullptr ? nullptr : p->get();
  }
  Variant v_;
};

/// Python's ==: 1 == 1.0 == True, a list is no tuple, values of other types differ.
bool equal(const Value& a, const Value& b, Work& work);
/// Python's <. Throws TemplateError for types without an order.
bool less(const Value& a, const Value& b, Work& work);
/// `needle in haystack`. Throws TemplateError where Python raises TypeError.
bool contains(const Value& haystack, const Value& needle, Work& work);

/// The items that a for loop over `value` sees: characters of a string, keys of a dict. Throws
/// TemplateError for what cannot be iterated.
std::vector<Value> iterate(const Value& value, Work& work);

/// Python's repr of a float: the shortest digits that read back the same.
std::string float_repr(double value);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool has_indent = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
/// As Python's json.dumps. Throws TemplateError for what JSON cannot hold.
std::string to_json(const Value& value, const JsonStyle& style, Work& work);

/// Counts what rendering costs, so that no template runs for ever or fills the memory: one unit for
/// each node evaluated, and for every 16 bytes or every item made.
class Work {
 public:
  explicit Work(std::uint64_t limit) : left_(limit) {}
  void charge(std::uint64_t units);  ///< throws TemplateError when the limit is passed
  void charge_bytes(std::uint64_t n_bytes) { charge(n_bytes / 16); }

 private:
  std::uint64_t left_;
};

}  // namespace statepack::jinja
