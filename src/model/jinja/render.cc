#include "model/jinja/render.hpp"

#include <locale.h>
#include <time.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "model/jinja/access.hpp"
#include "model/jinja/arithmetic.hpp"
#include "model/jinja/builtins.hpp"
#include "model/jinja/error.hpp"

namespace statepack::jinja {
namespace {

using Kind = Expression::Kind;
using Comparison = Expression::Comparison;

// Nested evaluations, macros that call themselves included: keeps the stack within a few megabytes.
constexpr int kMaxDepth = 600;
// As the sandbox of the ecosystem.
constexpr std::int64_t kMaxRange = 100'000;

// Names of one block. Lives on the stack of the renderer for as long as the block runs, which is
// longer than any macro made in it: functions are never stored where they could outlive it.
struct Scope {
  explicit Scope(Scope* outer) : parent(outer) {}
  Scope* parent;
  std::unordered_map<std::string, Value> names;

  const Value* find(const std::string& name) const {
    for (const Scope* scope = this; scope != nullptr; scope = scope->parent) {
      const auto found = scope->names.find(name);
      if (found != scope->names.end()) return &found->second;
    }
    return nullptr;
  }
};

enum class Flow : std::uint8_t { kNext, kBreak, kContinue };

Value make_function(std::string name, std::function<Value(Arguments&)> call) {
  auto function = std::make_shared<Function>();
  function->name = std::move(name);
  function->call = std::move(call);
  return std::shared_ptr<const Function>(std::move(function));
}

// --- global functions ---

Value range(Arguments& arguments, Work& work) {
  const auto a = bind("range", arguments, {"start", "stop", "step"}, 1);
  const std::int64_t first = a[1] == nullptr ? 0 : int_argument("range", a[0], 0);
  const std::int64_t last = int_argument("range", a[1] == nullptr ? a[0] : a[1], 0);
  const std::int64_t step = int_argument("range", a[2], 1);
  if (step == 0) fail("range cannot have the step 0");
  std::vector<Value> items;
  for (std::int64_t i = first; step > 0 ? i < last : i > last;) {
    work.charge(1);
    if (static_cast<std::int64_t>(items.size()) == kMaxRange) {
      fail("range has more than " + std::to_string(kMaxRange) + " numbers");
    }
    items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return Value::list(std::move(items));
}

// The entries that dict(...) and namespace(...) take: of a dict, then named ones.
std::vector<std::pair<Value, Value>> entries_of(std::string_view what, const Arguments& arguments,
                                                Work& work) {
  std::vector<std::pair<Value, Value>> entries;
  if (arguments.positional.size() > 1) fail(std::string(what) + " takes at most one dict");
  if (!arguments.positional.empty()) {
    const Value& from = arguments.positional[0];
    if (const Dict* dict = from.dict()) {
      entries = dict->entries();
    } else {
      for (const Value& item : iterate(from, work)) {
        const Sequence* pair = item.sequence();
        if (pair == nullptr || pair->items.size() != 2) {
          fail(std::string(what) + " needs a dict, or a list of pairs");
        }
        entries.emplace_back(pair->items[0], pair->items[1]);
      }
    }
  }
  for (const auto& [name, value] : arguments.named) entries.emplace_back(Value(name), value);
  work.charge(entries.size());
  return entries;
}

void check_storable(const Value& value) {
  if (!value.is_data()) {
    fail("a " + std::string(value.type_name()) + " cannot be stored in a namespace");
  }
}

Value make_namespace(const Arguments& arguments, Work& work) {
  auto ns = std::make_shared<Namespace>();
  for (const auto& [name, value] : entries_of("namespace", arguments, work)) {
    check_storable(value);
    ns->attributes.insert_or_assign(string_argument("namespace", &name), value);
  }
  return ns;
}

Value make_dict(const Arguments& arguments, Work& work) {
  auto dict = std::make_shared<Dict>();
  for (const auto& [key, value] : entries_of("dict", arguments, work)) dict->set(key, value);
  return std::shared_ptr<const Dict>(std::move(dict));
}

// strftime_now(format): the caller's clock, in UTC and English, so that renders can be repeated.
Value strftime_now(const Arguments& arguments, const Value* clock) {
  const auto a = bind("strftime_now", arguments, {"format"}, 1);
  const std::string& format = string_argument("strftime_now", a[0]);
  if (clock == nullptr) {
    fail(
        "the template asks for the date; pass 'clock_unix_s' (seconds since 1970, UTC) with the "
        "variables");
  }
  const time_t seconds = int_argument("clock_unix_s", clock, 0);
  struct tm parts {};
  if (gmtime_r(&seconds, &parts) == nullptr) fail("'clock_unix_s' is out of range");
  if (format.size() > 256) fail("strftime_now: the format is longer than 256 bytes");
  if (format.empty()) return "";
  static const locale_t c_locale = newlocale(LC_ALL_MASK, "C", nullptr);
  // A mark behind the format tells an empty result from one that did not fit.
  char buffer[8192];
  const std::size_t n =
      strftime_l(buffer, sizeof(buffer), (format + "|").c_str(), &parts, c_locale);
  if (n == 0) fail("strftime_now: the result is too long");
  return std::string_view(buffer, n - 1);
}

class Renderer {
 public:
  explicit Renderer(const Limits& limits) : work_(limits.work), n_out_bytes_(limits.n_out_bytes) {}

  std::string run(const Body& body, std::vector<std::pair<std::string, Value>>&& variables) {
    Scope globals(nullptr);
    const auto add = [&](const char* name, std::function<Value(Arguments&)> call) {
      globals.names.emplace(name, make_function(name, std::move(call)));
    };
    add("range", [this](Arguments& a) { return range(a, work_); });
    add("dict", [this](Arguments& a) { return make_dict(a, work_); });
    add("namespace", [this](Arguments& a) { return make_namespace(a, work_); });
    add("raise_exception", [this](Arguments& a) -> Value {
      const auto message = bind("raise_exception", a, {"message"}, 1);
      fail(message[0]->str(work_));
    });
    Scope top(&globals);
    add("strftime_now", [&top](Arguments& a) { return strftime_now(a, top.find("clock_unix_s")); });
    for (auto& [name, value] : variables) top.names.insert_or_assign(name, std::move(value));
    std::string out;
    out_ = &out;
    execute(body, top);
    return out;
  }

 private:
  class Deeper {
   public:
    explicit Deeper(int& depth) : depth_(depth) {
      if (depth_ >= kMaxDepth) fail("nested too deeply; does a macro call itself for ever?");
      ++depth_;
    }
    ~Deeper() { --depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    int& depth_;
  };

  void print(std::string_view text) {
    if (text.size() > n_out_bytes_ - std::min(n_out_bytes_, out_->size())) {
      fail("the rendered text is longer than " + std::to_string(n_out_bytes_) + " bytes");
    }
    work_.charge_bytes(text.size());
    *out_ += text;
  }

  // Runs `body` and gives what it printed.
  std::string capture(const Body& body, Scope& scope) {
    std::string text;
    std::string* const outer = std::exchange(out_, &text);
    try {
      execute(body, scope);
    } catch (...) {
      out_ = outer;
      throw;
    }
    out_ = outer;
    return text;
  }

  // --- statements ---
  Flow execute(const Body& body, Scope& scope) {
    const Deeper deeper(depth_);
    for (const Statement& statement : body) {
      try {
        const Flow flow = execute(statement, scope);
        if (flow != Flow::kNext) return flow;
      } catch (TemplateError& error) {
        if (error.line == 0) error.line = statement.line;
        throw;
      }
    }
    return Flow::kNext;
  }

  Flow execute(const Statement& s, Scope& scope) {
    work_.charge(1);
    switch (s.kind) {
      case Statement::Kind::kText:
        print(s.text);
        break;
      case Statement::Kind::kPrint:
        print(evaluate(*s.expression, scope).str(work_));
        break;
      case Statement::Kind::kIf:
        for (const Branch& branch : s.branches) {
          if (evaluate(*branch.condition, scope).truthy()) return execute(branch.body, scope);
        }
        return execute(s.otherwise, scope);
      case Statement::Kind::kFor:
        loop(s, scope);
        break;
      case Statement::Kind::kSet:
        assign(s.target, evaluate(*s.expression, scope), scope);
        break;
      case Statement::Kind::kSetBlock:
        assign(s.target, filter_block(s, scope), scope);
        break;
      case Statement::Kind::kFilter:
        print(filter_block(s, scope).str(work_));
        break;
      case Statement::Kind::kMacro:
        scope.names.insert_or_assign(s.text, macro(s, s.text, scope));
        break;
      case Statement::Kind::kCall:
        call_block(s, scope);
        break;
      case Statement::Kind::kWith: {
        Scope inner(&scope);
        for (const auto& [target, expression] : s.bindings) {
          assign(target, evaluate(*expression, scope), inner);
        }
        return execute(s.body, inner);
      }
      case Statement::Kind::kScope: {
        Scope inner(&scope);
        return execute(s.body, inner);
      }
      case Statement::Kind::kBreak:
        return Flow::kBreak;
      case Statement::Kind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNext;
  }

  void loop(const Statement& s, Scope& scope) {
    std::vector<Value> items = iterate(evaluate(*s.expression, scope), work_);
    if (s.condition != nullptr) {
      std::vector<Value> kept;
      for (Value& item : items) {
        Scope inner(&scope);
        assign(s.target, item, inner);
        if (evaluate(*s.condition, inner).truthy()) kept.push_back(std::move(item));
      }
      items = std::move(kept);
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      Scope inner(&scope);
      auto state = std::make_shared<Loop>();
      state->items = &items;
      state->index0 = i;
      inner.names.emplace("loop", Value(std::shared_ptr<const Loop>(std::move(state))));
      assign(s.target, items[i], inner);
      if (execute(s.body, inner) == Flow::kBreak) break;
    }
    if (items.empty()) {
      Scope inner(&scope);
      execute(s.otherwise, inner);
    }
  }

  void assign(const Target& target, const Value& value, Scope& scope) {
    if (!target.parts.empty()) {
      const std::vector<Value> items = iterate(value, work_);
      if (items.size() != target.parts.size()) {
        fail("cannot unpack " + std::to_string(items.size()) + " values into " +
             std::to_string(target.parts.size()) + " names");
      }
      for (std::size_t i = 0; i < items.size(); ++i) assign(target.parts[i], items[i], scope);
    } else if (target.attribute.empty()) {
      scope.names.insert_or_assign(target.name, value);
    } else {
      const Value* found = scope.find(target.name);
      Namespace* ns = found == nullptr ? nullptr : found->ns();
      if (ns == nullptr) {
        fail("cannot set '" + target.name + "." + target.attribute + "': '" + target.name +
             "' is not a namespace");
      }
      check_storable(value);
      ns->attributes.insert_or_assign(target.attribute, value);
    }
  }

  Value filter_block(const Statement& s, Scope& scope) {
    Scope inner(&scope);
    const Value text = capture(s.body, inner);
    const Value* const outer = std::exchange(filter_input_, &text);
    try {
      Value result = evaluate(*s.expression, scope);
      filter_input_ = outer;
      return result;
    } catch (...) {
      filter_input_ = outer;
      throw;
    }
  }

  // A function that renders the body of `s`, a kMacro or kCall.
  Value macro(const Statement& s, const std::string& name, Scope& scope) {
    return make_function(name, [this, &s, name, &scope](Arguments& arguments) -> Value {
      Scope inner(&scope);
      bind_macro(s, name, arguments, inner);
      return capture(s.body, inner);
    });
  }

  void bind_macro(const Statement& s, const std::string& name, const Arguments& arguments,
                  Scope& inner) {
    const std::size_t n_parameters = s.parameters.size();
    std::vector<Value> extra;
    for (std::size_t i = 0; i < arguments.positional.size(); ++i) {
      if (i < n_parameters) {
        inner.names.insert_or_assign(s.parameters[i].name, arguments.positional[i]);
      } else {
        extra.push_back(arguments.positional[i]);
      }
    }
    if (!extra.empty() && !s.uses.varargs) {
      fail("macro '" + name + "' takes at most " + std::to_string(n_parameters) + " arguments");
    }
    auto extra_named = std::make_shared<Dict>();
    for (const auto& [key, value] : arguments.named) {
      const bool is_parameter =
          (key == "caller" && s.uses.caller) ||
          std::any_of(s.parameters.begin(), s.parameters.end(),
                      [&wanted = key](const Parameter& p) { return p.name == wanted; });
      if (is_parameter) {
        if (!inner.names.emplace(key, value).second) {
          fail("macro '" + name + "' got the argument '" + key + "' twice");
        }
      } else if (s.uses.kwargs) {
        extra_named->set(key, value);
      } else {
        fail("macro '" + name + "' has no argument '" + key + "'");
      }
    }
    for (const Parameter& parameter : s.parameters) {
      if (inner.names.contains(parameter.name)) continue;
      inner.names.emplace(parameter.name, parameter.fallback != nullptr
                                              ? evaluate(*parameter.fallback, inner)
                                              : Value::undefined("parameter '" + parameter.name +
                                                                 "' was not provided"));
    }
    if (s.uses.varargs) inner.names.emplace("varargs", Value::tuple(std::move(extra)));
    if (s.uses.kwargs) {
      inner.names.emplace("kwargs", std::shared_ptr<const Dict>(std::move(extra_named)));
    }
  }

  void call_block(const Statement& s, Scope& scope) {
    const Expression& call = *s.expression;
    const Value callee = evaluate(*call.operands[0], scope);
    Arguments arguments = arguments_of(call, scope);
    arguments.named.emplace_back("caller", macro(s, "caller", scope));
    print(invoke(callee, arguments).str(work_));
  }

  // --- expressions ---
  Value evaluate(const Expression& e, Scope& scope) {
    const Deeper deeper(depth_);
    work_.charge(1);
    try {
      switch (e.kind) {
        case Kind::kConstant:
          return e.constant;
        case Kind::kName:
          return name(e, scope);
        case Kind::kFilterInput:
          return *filter_input_;
        case Kind::kAnd: {
          Value left = evaluate(*e.operands[0], scope);
          return left.truthy() ? evaluate(*e.operands[1], scope) : left;
        }
        case Kind::kOr: {
          Value left = evaluate(*e.operands[0], scope);
          return left.truthy() ? left : evaluate(*e.operands[1], scope);
        }
        case Kind::kConditional:
          return conditional(e, scope);
        case Kind::kAttribute:
          return get_attribute(evaluate(*e.operands[0], scope), e.name, work_);
        case Kind::kCall: {
          const Value callee = evaluate(*e.operands[0], scope);
          Arguments arguments = arguments_of(e, scope);
          return invoke(callee, arguments);
        }
        default:
          return operation(e, scope);
      }
    } catch (TemplateError& error) {
      if (error.line == 0) error.line = e.line;
      throw;
    }
  }

  // Out of evaluate() to keep the frames of its recursion small.
  Value name(const Expression& e, Scope& scope) const {
    const Value* found = scope.find(e.name);
    return found != nullptr ? *found : Value::undefined("'" + e.name + "' is undefined");
  }

  Value conditional(const Expression& e, Scope& scope) {
    if (evaluate(*e.operands[1], scope).truthy()) return evaluate(*e.operands[0], scope);
    if (e.operands[2] != nullptr) return evaluate(*e.operands[2], scope);
    return Value::undefined("the inline if-expression was false and has no else");
  }

  std::vector<Value> values(const Expression& e, std::size_t from, Scope& scope) {
    std::vector<Value> all;
    all.reserve(e.operands.size() - from);
    for (std::size_t i = from; i < e.operands.size(); ++i) {
      all.push_back(evaluate(*e.operands[i], scope));
    }
    return all;
  }

  Arguments arguments_of(const Expression& e, Scope& scope) {
    Arguments arguments{values(e, 1, scope), {}};
    for (const auto& [key, value] : e.named) {
      arguments.named.emplace_back(key, evaluate(*value, scope));
    }
    return arguments;
  }

  Value invoke(const Value& callee, Arguments& arguments) {
    if (const auto* undefined = callee.get<Value::Undefined>()) fail(*undefined->why);
    const Function* function = callee.function();
    if (function == nullptr) fail("a " + std::string(callee.type_name()) + " cannot be called");
    return function->call(arguments);
  }

  Value operation(const Expression& e, Scope& scope) {
    switch (e.kind) {
      case Kind::kItem: {
        const Value value = evaluate(*e.operands[0], scope);
        return get_item(value, evaluate(*e.operands[1], scope), work_);
      }
      case Kind::kSlice:
        return slice_of(e, scope);
      case Kind::kList:
        return Value::list(values(e, 0, scope));
      case Kind::kTuple:
        return Value::tuple(values(e, 0, scope));
      case Kind::kDict: {
        auto dict = std::make_shared<Dict>();
        for (std::size_t i = 0; i < e.operands.size(); i += 2) {
          const Value key = evaluate(*e.operands[i], scope);
          dict->set(key, evaluate(*e.operands[i + 1], scope));
        }
        return std::shared_ptr<const Dict>(std::move(dict));
      }
      case Kind::kFilter: {
        const Value input = evaluate(*e.operands[0], scope);
        Arguments arguments = arguments_of(e, scope);
        return e.filter->run(input, arguments, work_);
      }
      case Kind::kTest: {
        const Value input = evaluate(*e.operands[0], scope);
        Arguments arguments = arguments_of(e, scope);
        return e.test->run(input, arguments, work_);
      }
      case Kind::kNot:
        return !evaluate(*e.operands[0], scope).truthy();
      case Kind::kNegative:
        return negative(evaluate(*e.operands[0], scope));
      case Kind::kPositive:
        return negative(negative(evaluate(*e.operands[0], scope)));
      case Kind::kConcat: {
        std::string text;
        for (const ExpressionPtr& operand : e.operands) {
          text += evaluate(*operand, scope).str(work_);
        }
        return text;
      }
      case Kind::kCompare:
        return compare(e, scope);
      default: {
        const Value left = evaluate(*e.operands[0], scope);
        return arithmetic(e.kind, left, evaluate(*e.operands[1], scope), work_);
      }
    }
  }

  Value slice_of(const Expression& e, Scope& scope) {
    const Value value = evaluate(*e.operands[0], scope);
    std::optional<Value> bounds[3];
    for (std::size_t i = 0; i < 3; ++i) {
      if (e.operands[i + 1] != nullptr) bounds[i] = evaluate(*e.operands[i + 1], scope);
    }
    const auto pointer = [](const std::optional<Value>& v) { return v ? &*v : nullptr; };
    return slice(value, pointer(bounds[0]), pointer(bounds[1]), pointer(bounds[2]), work_);
  }

  Value compare(const Expression& e, Scope& scope) {
    Value left = evaluate(*e.operands[0], scope);
    for (std::size_t i = 0; i < e.comparisons.size(); ++i) {
      Value right = evaluate(*e.operands[i + 1], scope);
      if (!holds(e.comparisons[i], left, right)) return false;
      left = std::move(right);
    }
    return true;
  }

  bool holds(Comparison comparison, const Value& left, const Value& right) {
    switch (comparison) {
      case Comparison::kEqual:
        return equal(left, right, work_);
      case Comparison::kNotEqual:
        return !equal(left, right, work_);
      case Comparison::kLess:
        return less(left, right, work_);
      case Comparison::kLessEqual:
        return less(left, right, work_) || equal(left, right, work_);
      case Comparison::kGreater:
        return less(right, left, work_);
      case Comparison::kGreaterEqual:
        return less(right, left, work_) || equal(left, right, work_);
      case Comparison::kIn:
        return contains(right, left, work_);
      case Comparison::kNotIn:
        return !contains(right, left, work_);
    }
    return false;
  }

  Work work_;
  std::size_t n_out_bytes_;
  std::string* out_ = nullptr;
  const Value* filter_input_ = nullptr;
  int depth_ = 0;
};

}  // namespace

std::string render(const Body& body, std::vector<std::pair<std::string, Value>> variables,
                   const Limits& limits) {
  return Renderer(limits).run(body, std::move(variables));
}

}  // namespace statepack::jinja
