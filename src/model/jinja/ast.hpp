// A compiled template.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/jinja/value.hpp"

namespace statepack::jinja {

struct Filter;  // builtins.hpp
struct Test;

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Expression {
  enum class Kind : std::uint8_t {
    kConstant,   // constant
    kName,       // name
    kAttribute,  // operands[0].name
    kItem,       // operands[0][operands[1]]
    kSlice,      // operands[0][operands[1] : operands[2] : operands[3]], the last three may be null
    kList,       // [operands...]
    kTuple,      // (operands...)
    kDict,       // {operands[0]: operands[1], ...}
    kCall,       // operands[0](operands[1..], named...)
    kFilter,     // operands[0] | filter(operands[1..], named...)
    kTest,       // operands[0] is test(operands[1..], named...)
    kFilterInput,  // what a {% filter %} or {% set %} block rendered
    kNot,
    kNegative,
    kPositive,
    kAnd,
    kOr,
    kAdd,
    kSubtract,
    kMultiply,
    kDivide,
    kFloorDivide,
    kModulo,
    kPower,
    kConcat,       // operands joined as text
    kCompare,      // operands[0] comparisons[0] operands[1] comparisons[1] ...
    kConditional,  // operands[0] if operands[1] else operands[2] (may be null)
  };
  enum class Comparison : std::uint8_t {
    kEqual,
    kNotEqual,
    kLess,
    kLessEqual,
    kGreater,
    kGreaterEqual,
    kIn,
    kNotIn,
  };
  Kind kind = Kind::kConstant;
  int line = 1;
  int depth = 1;  // of this tree
  std::string name;
  Value constant;
  const Filter* filter = nullptr;
  const Test* test = nullptr;
  std::vector<ExpressionPtr> operands;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
  std::vector<Comparison> comparisons;
};

/// What {% set %} and {% for %} assign to: a name, a namespace's attribute, or a tuple of targets.
struct Target {
  int line = 1;
  std::string name;
  std::string attribute;      // not empty: name.attribute
  std::vector<Target> parts;  // not empty: a tuple; the names above are unused
};

struct Parameter {
  std::string name;
  ExpressionPtr fallback;  // may be null
};

struct Statement;
using Body = std::vector<Statement>;

struct Branch {
  ExpressionPtr condition;
  Body body;
};

struct Statement {
  enum class Kind : std::uint8_t {
    kText,      // text
    kPrint,     // expression
    kIf,        // branches, otherwise
    kFor,       // for target in expression if condition: body; otherwise
    kSet,       // target = expression
    kSetBlock,  // target = expression applied to the rendered body
    kMacro,     // macro text(parameters): body; `uses` says which special names the body reads
    kCall,      // expression (a kCall) with caller(parameters): body
    kFilter,    // expression applied to the rendered body
    kWith,      // bindings, body
    kScope,     // body
    kBreak,
    kContinue,
  };
  Kind kind = Kind::kText;
  int line = 1;
  std::string text;
  ExpressionPtr expression;
  ExpressionPtr condition;
  Target target;
  std::vector<Branch> branches;
  std::vector<Parameter> parameters;
  std::vector<std::pair<Target, ExpressionPtr>> bindings;
  struct Uses {
    bool varargs = false;
    bool kwargs = false;
    bool caller = false;
  } uses;
  Body body;
  Body otherwise;
};

}  // namespace statepack::jinja
