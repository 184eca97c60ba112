#include "model/jinja/parser.hpp"

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "model/jinja/builtins.hpp"
#include "model/jinja/error.hpp"
#include "model/jinja/lexer.hpp"

namespace statepack::jinja {
namespace {

using Kind = Expression::Kind;
using Comparison = Expression::Comparison;

// Evaluation and destruction recurse over trees: both bounds keep the stack within a megabyte.
constexpr int kMaxExpressionDepth = 200;
constexpr int kMaxStatementDepth = 64;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)) {}

  Body run() {
    Body body = statements({});
    if (current().kind != Token::Kind::kEnd) unexpected_tag();
    return body;
  }

 private:
  // --- tokens ---
  const Token& current() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  const Token& next() { return at_ + 1 < tokens_.size() ? tokens_[at_++] : tokens_[at_]; }

  [[noreturn]] void fail_at(int line, const std::string& what, Code code = Code::kCorrupt) const {
    throw TemplateError{code, what, line};
  }
  std::string describe(const Token& token) const {
    return token.kind == Token::Kind::kEnd ? "the end of the template" : "'" + token.text + "'";
  }
  [[noreturn]] void unexpected(const std::string& wanted) const {
    fail_at(current().line, "expected " + wanted + ", got " + describe(current()));
  }
  bool skip_operator(std::string_view op) {
    if (!current().is_operator(op)) return false;
    next();
    return true;
  }
  bool skip_name(std::string_view name) {
    if (!current().is_name(name)) return false;
    next();
    return true;
  }
  void expect_operator(std::string_view op) {
    if (!skip_operator(op)) unexpected("'" + std::string(op) + "'");
  }
  std::string expect_any_name() {
    if (current().kind != Token::Kind::kName) unexpected("a name");
    return next().text;
  }
  void expect_block_end() {
    if (current().kind != Token::Kind::kBlockEnd) unexpected("'%}'");
    next();
  }

  // --- trees ---
  ExpressionPtr make(Kind kind, int line) const {
    auto e = std::make_unique<Expression>();
    e->kind = kind;
    e->line = line;
    return e;
  }
  ExpressionPtr adopt(ExpressionPtr parent, ExpressionPtr child) const {
    if (child != nullptr) {
      parent->depth = std::max(parent->depth, child->depth + 1);
      if (parent->depth > kMaxExpressionDepth) too_deep();
    }
    parent->operands.push_back(std::move(child));
    return parent;
  }
  ExpressionPtr make(Kind kind, int line, ExpressionPtr a) const {
    return adopt(make(kind, line), std::move(a));
  }
  ExpressionPtr make(Kind kind, int line, ExpressionPtr a, ExpressionPtr b) const {
    return adopt(make(kind, line, std::move(a)), std::move(b));
  }
  ExpressionPtr constant(Value value, int line) const {
    ExpressionPtr e = make(Kind::kConstant, line);
    e->constant = std::move(value);
    return e;
  }
  [[noreturn]] void too_deep() const {
    fail_at(current().line, "nested too deeply", Code::kUnsupported);
  }

  // Bounds the parser's own recursion.
  class Deeper {
   public:
    Deeper(int& depth, int limit, const Parser& parser) : depth_(depth) {
      if (++depth_ > limit) {
        --depth_;
        parser.too_deep();
      }
    }
    ~Deeper() { --depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;

   private:
    int& depth_;
  };

  // --- expressions, lowest precedence first ---
  ExpressionPtr expression(bool with_conditional = true) {
    const Deeper deeper(expression_depth_, kMaxExpressionDepth / 2, *this);
    return with_conditional ? conditional() : disjunction();
  }

  ExpressionPtr conditional() {
    const int line = current().line;
    ExpressionPtr value = disjunction();
    while (skip_name("if")) {
      ExpressionPtr condition = disjunction();
      ExpressionPtr otherwise = skip_name("else") ? expression() : nullptr;
      value = adopt(make(Kind::kConditional, line, std::move(value), std::move(condition)),
                    std::move(otherwise));
    }
    return value;
  }

  ExpressionPtr disjunction() {
    ExpressionPtr left = conjunction();
    for (int line = current().line; skip_name("or"); line = current().line) {
      left = make(Kind::kOr, line, std::move(left), conjunction());
    }
    return left;
  }

  ExpressionPtr conjunction() {
    ExpressionPtr left = negation();
    for (int line = current().line; skip_name("and"); line = current().line) {
      left = make(Kind::kAnd, line, std::move(left), negation());
    }
    return left;
  }

  ExpressionPtr negation() {
    const int line = current().line;
    if (!skip_name("not")) return comparison();
    const Deeper deeper(expression_depth_, kMaxExpressionDepth / 2, *this);
    return make(Kind::kNot, line, negation());
  }

  std::optional<Comparison> comparison_operator() {
    constexpr std::pair<std::string_view, Comparison> kOperators[] = {
        {"==", Comparison::kEqual},  {"!=", Comparison::kNotEqual},
        {"<", Comparison::kLess},    {"<=", Comparison::kLessEqual},
        {">", Comparison::kGreater}, {">=", Comparison::kGreaterEqual},
    };
    for (const auto& [text, op] : kOperators) {
      if (skip_operator(text)) return op;
    }
    if (skip_name("in")) return Comparison::kIn;
    if (current().is_name("not") && ahead().is_name("in")) {
      next();
      next();
      return Comparison::kNotIn;
    }
    return std::nullopt;
  }

  ExpressionPtr comparison() {
    ExpressionPtr left = sum();
    ExpressionPtr chain;
    for (int line = current().line; const auto op = comparison_operator(); line = current().line) {
      if (chain == nullptr) chain = make(Kind::kCompare, line, std::move(left));
      chain->comparisons.push_back(*op);
      chain = adopt(std::move(chain), sum());
    }
    return chain != nullptr ? std::move(chain) : std::move(left);
  }

  ExpressionPtr sum() {
    ExpressionPtr left = concatenation();
    while (true) {
      const int line = current().line;
      if (skip_operator("+")) {
        left = make(Kind::kAdd, line, std::move(left), concatenation());
      } else if (skip_operator("-")) {
        left = make(Kind::kSubtract, line, std::move(left), concatenation());
      } else {
        return left;
      }
    }
  }

  ExpressionPtr concatenation() {
    const int line = current().line;
    ExpressionPtr left = product();
    if (!current().is_operator("~")) return left;
    ExpressionPtr all = make(Kind::kConcat, line, std::move(left));
    while (skip_operator("~")) all = adopt(std::move(all), product());
    return all;
  }

  ExpressionPtr product() {
    ExpressionPtr left = power();
    while (true) {
      const int line = current().line;
      if (skip_operator("*")) {
        left = make(Kind::kMultiply, line, std::move(left), power());
      } else if (skip_operator("/")) {
        left = make(Kind::kDivide, line, std::move(left), power());
      } else if (skip_operator("//")) {
        left = make(Kind::kFloorDivide, line, std::move(left), power());
      } else if (skip_operator("%")) {
        left = make(Kind::kModulo, line, std::move(left), power());
      } else {
        return left;
      }
    }
  }

  ExpressionPtr power() {
    ExpressionPtr left = unary(true);
    for (int line = current().line; skip_operator("**"); line = current().line) {
      left = make(Kind::kPower, line, std::move(left), unary(true));
    }
    return left;
  }

  ExpressionPtr unary(bool with_filter) {
    const Deeper deeper(expression_depth_, kMaxExpressionDepth / 2, *this);
    const int line = current().line;
    ExpressionPtr e;
    if (skip_operator("-")) {
      e = make(Kind::kNegative, line, unary(false));
    } else if (skip_operator("+")) {
      e = make(Kind::kPositive, line, unary(false));
    } else {
      e = primary();
    }
    e = postfix(std::move(e));
    return with_filter ? filters_and_tests(std::move(e)) : std::move(e);
  }

  ExpressionPtr primary() {
    const Token& token = current();
    const int line = token.line;
    switch (token.kind) {
      case Token::Kind::kName: {
        next();
        if (token.text == "true" || token.text == "True") return constant(true, line);
        if (token.text == "false" || token.text == "False") return constant(false, line);
        if (token.text == "none" || token.text == "None") return constant(Value(), line);
        ExpressionPtr e = make(Kind::kName, line);
        e->name = token.text;
        return e;
      }
      case Token::Kind::kString: {
        std::string text;
        while (current().kind == Token::Kind::kString) text += next().text;
        return constant(std::move(text), line);
      }
      case Token::Kind::kInteger:
        next();
        return constant(token.integer, line);
      case Token::Kind::kFloat:
        next();
        return constant(token.number, line);
      default:
        break;
    }
    if (skip_operator("(")) {
      ExpressionPtr e = tuple(true, {}, true);
      expect_operator(")");
      return e;
    }
    if (skip_operator("[")) {
      ExpressionPtr list = make(Kind::kList, line);
      while (!skip_operator("]")) {
        if (!list->operands.empty()) {
          expect_operator(",");
          if (skip_operator("]")) break;
        }
        list = adopt(std::move(list), expression());
      }
      return list;
    }
    if (skip_operator("{")) {
      ExpressionPtr dict = make(Kind::kDict, line);
      while (!skip_operator("}")) {
        if (!dict->operands.empty()) {
          expect_operator(",");
          if (skip_operator("}")) break;
        }
        dict = adopt(std::move(dict), expression());
        expect_operator(":");
        dict = adopt(std::move(dict), expression());
      }
      return dict;
    }
    unexpected("an expression");
  }

  bool at_tuple_end(std::initializer_list<std::string_view> end_names) const {
    const Token& token = current();
    return token.kind == Token::Kind::kPrintEnd || token.kind == Token::Kind::kBlockEnd ||
           token.is_operator(")") ||
           std::any_of(end_names.begin(), end_names.end(),
                       [&](std::string_view name) { return token.is_name(name); });
  }

  // One expression, or several with commas between or behind them.
  ExpressionPtr tuple(bool with_conditional, std::initializer_list<std::string_view> end_names = {},
                      bool may_be_empty = false) {
    ExpressionPtr all = make(Kind::kTuple, current().line);
    bool is_tuple = false;
    while (!at_tuple_end(end_names)) {
      all = adopt(std::move(all), expression(with_conditional));
      if (!skip_operator(",")) break;
      is_tuple = true;
    }
    if (is_tuple || (all->operands.empty() && may_be_empty)) return all;
    if (all->operands.empty()) unexpected("an expression");
    return std::move(all->operands[0]);
  }

  ExpressionPtr postfix(ExpressionPtr e) {
    while (true) {
      const int line = current().line;
      if (skip_operator(".")) {
        if (current().kind == Token::Kind::kInteger) {
          e = make(Kind::kItem, line, std::move(e), constant(next().integer, line));
        } else {
          const std::string name = expect_any_name();
          e = make(Kind::kAttribute, line, std::move(e));
          e->name = name;
        }
      } else if (skip_operator("[")) {
        e = subscript(std::move(e), line);
      } else if (current().is_operator("(")) {
        e = call(std::move(e));
      } else {
        return e;
      }
    }
  }

  ExpressionPtr subscript(ExpressionPtr e, int line) {
    const auto bound = [&]() -> ExpressionPtr {
      const bool absent = current().is_operator(":") || current().is_operator("]");
      return absent ? nullptr : expression();
    };
    ExpressionPtr first = bound();
    if (!current().is_operator(":")) {
      if (first == nullptr) unexpected("an index");
      expect_operator("]");
      return make(Kind::kItem, line, std::move(e), std::move(first));
    }
    next();
    ExpressionPtr slice = make(Kind::kSlice, line, std::move(e), std::move(first));
    slice = adopt(std::move(slice), bound());
    slice = adopt(std::move(slice), skip_operator(":") ? bound() : nullptr);
    expect_operator("]");
    return slice;
  }

  ExpressionPtr call(ExpressionPtr callee) {
    return arguments(make(Kind::kCall, current().line, std::move(callee)));
  }

  ExpressionPtr arguments(ExpressionPtr to) {
    expect_operator("(");
    bool first = true;
    while (!skip_operator(")")) {
      if (!first) {
        expect_operator(",");
        if (skip_operator(")")) break;
      }
      first = false;
      if (current().is_operator("*") || current().is_operator("**")) {
        fail_at(current().line, "'*' and '**' arguments are not supported; write them out",
                Code::kUnsupported);
      }
      if (current().kind == Token::Kind::kName && ahead().is_operator("=")) {
        const std::string name = next().text;
        next();
        ExpressionPtr value = expression();
        to->depth = std::max(to->depth, value->depth + 1);
        if (to->depth > kMaxExpressionDepth) too_deep();
        to->named.emplace_back(name, std::move(value));
      } else {
        if (!to->named.empty()) {
          fail_at(current().line, "an argument without a name behind one with a name");
        }
        to = adopt(std::move(to), expression());
      }
    }
    return to;
  }

  ExpressionPtr filters_and_tests(ExpressionPtr e) {
    while (true) {
      if (current().is_operator("|")) {
        next();
        e = filter(std::move(e));
      } else if (current().is_name("is")) {
        e = test(std::move(e));
      } else if (current().is_operator("(")) {
        e = call(std::move(e));
      } else {
        return e;
      }
    }
  }

  ExpressionPtr filter(ExpressionPtr input) {
    const int line = current().line;
    const std::string name = expect_any_name();
    ExpressionPtr e = make(Kind::kFilter, line, std::move(input));
    e->filter = find_filter(name);
    if (e->filter == nullptr) {
      fail_at(line, "no filter '" + name + "'; supported are " + filter_names(),
              Code::kUnsupported);
    }
    return current().is_operator("(") ? arguments(std::move(e)) : std::move(e);
  }

  ExpressionPtr test(ExpressionPtr input) {
    const int line = next().line;
    const bool negated = skip_name("not");
    const std::string name = expect_any_name();
    ExpressionPtr e = make(Kind::kTest, line, std::move(input));
    e->test = find_test(name);
    if (e->test == nullptr) {
      fail_at(line, "no test '" + name + "'; supported are " + test_names(), Code::kUnsupported);
    }
    const Token& token = current();
    const bool has_bare_argument =
        (token.kind == Token::Kind::kName && token.text != "else" && token.text != "or" &&
         token.text != "and") ||
        token.kind == Token::Kind::kString || token.kind == Token::Kind::kInteger ||
        token.kind == Token::Kind::kFloat || token.is_operator("[") || token.is_operator("{");
    if (token.is_operator("(")) {
      e = arguments(std::move(e));
    } else if (has_bare_argument) {
      if (token.text == "is") fail_at(token.line, "tests cannot be chained with 'is'");
      const Deeper deeper(expression_depth_, kMaxExpressionDepth / 2, *this);
      e = adopt(std::move(e), postfix(primary()));
    }
    return negated ? make(Kind::kNot, line, std::move(e)) : std::move(e);
  }

  // --- statements ---
  // Reads until a tag that begins with one of `end_names` (left current, behind its "{%").
  Body statements(std::initializer_list<std::string_view> end_names) {
    const Deeper deeper(statement_depth_, kMaxStatementDepth, *this);
    Body body;
    while (true) {
      const Token& token = current();
      if (token.kind == Token::Kind::kEnd) {
        if (end_names.size() > 0) {
          fail_at(token.line, "the template ends, but '" + std::string(*(end_names.end() - 1)) +
                                  "' is missing for the tag of line " +
                                  std::to_string(open_lines_.back()));
        }
        return body;
      }
      next();
      if (token.kind == Token::Kind::kText) {
        body.push_back(statement(Statement::Kind::kText, token.line));
        body.back().text = token.text;
      } else if (token.kind == Token::Kind::kPrintBegin) {
        body.push_back(statement(Statement::Kind::kPrint, token.line));
        body.back().expression = tuple(true);
        if (current().kind != Token::Kind::kPrintEnd) unexpected("'}}'");
        next();
      } else {
        for (const std::string_view name : end_names) {
          if (current().is_name(name)) return body;
        }
        body.push_back(tag());
        expect_block_end();
      }
    }
  }

  Statement statement(Statement::Kind kind, int line) const {
    Statement s;
    s.kind = kind;
    s.line = line;
    return s;
  }

  // The body of a block: from the end of its opening tag to `end_name`, which is read too.
  Body block(std::string_view end_name) {
    skip_operator(":");
    open_lines_.push_back(current().line);
    expect_block_end();
    Body body = statements({end_name});
    next();
    open_lines_.pop_back();
    return body;
  }
  // A body that break and continue cannot leave.
  Body closed_block(std::string_view end_name) {
    const int loops = std::exchange(loop_depth_, 0);
    Body body = block(end_name);
    loop_depth_ = loops;
    return body;
  }

  [[noreturn]] void unexpected_tag() const {
    fail_at(current().line, "unexpected tag '" + current().text + "'");
  }

  Statement tag() {
    const int line = current().line;
    if (current().kind != Token::Kind::kName) unexpected("the name of a tag");
    const std::string name = next().text;
    if (name == "if") return if_tag(line);
    if (name == "for") return for_tag(line);
    if (name == "set") return set_tag(line);
    if (name == "macro") return macro_tag(line);
    if (name == "call") return call_tag(line);
    if (name == "with") return with_tag(line);
    if (name == "filter") {
      Statement s = statement(Statement::Kind::kFilter, line);
      s.expression = filter_chain(filter(make(Kind::kFilterInput, line)));
      s.body = closed_block("endfilter");
      return s;
    }
    if (name == "generation") {  // marks the assistant's tokens for training; renders as its body
      Statement s = statement(Statement::Kind::kScope, line);
      s.body = block("endgeneration");
      return s;
    }
    if (name == "break" || name == "continue") {
      if (loop_depth_ == 0) fail_at(line, "'" + name + "' outside of a for loop");
      return statement(name == "break" ? Statement::Kind::kBreak : Statement::Kind::kContinue,
                       line);
    }
    for (const std::string_view known :
         {"block", "extends", "include", "import", "from", "autoescape", "print", "do", "trans"}) {
      if (name == known) {
        fail_at(line, "the tag '" + name + "' is not supported in chat templates",
                Code::kUnsupported);
      }
    }
    fail_at(line, "unexpected tag '" + name + "'");
  }

  Statement if_tag(int line) {
    Statement s = statement(Statement::Kind::kIf, line);
    open_lines_.push_back(line);
    while (true) {
      Branch& branch = s.branches.emplace_back();
      branch.condition = tuple(false);
      skip_operator(":");
      expect_block_end();
      branch.body = statements({"elif", "else", "endif"});
      const std::string end = next().text;
      if (end == "elif") continue;
      if (end == "else") {
        skip_operator(":");
        expect_block_end();
        s.otherwise = statements({"endif"});
        next();
      }
      open_lines_.pop_back();
      return s;
    }
  }

  Statement for_tag(int line) {
    Statement s = statement(Statement::Kind::kFor, line);
    s.target = target(false);
    if (!skip_name("in")) unexpected("'in'");
    s.expression = tuple(false, {"recursive"});
    if (skip_name("if")) s.condition = expression();
    if (current().is_name("recursive")) {
      fail_at(line, "recursive loops are not supported; use a macro", Code::kUnsupported);
    }
    skip_operator(":");
    open_lines_.push_back(line);
    expect_block_end();
    ++loop_depth_;
    s.body = statements({"else", "endfor"});
    --loop_depth_;
    if (next().text == "else") {
      skip_operator(":");
      expect_block_end();
      s.otherwise = statements({"endfor"});
      next();
    }
    open_lines_.pop_back();
    return s;
  }

  Statement set_tag(int line) {
    Statement s = statement(Statement::Kind::kSet, line);
    s.target = target(true);
    if (skip_operator("=")) {
      s.expression = tuple(true);
      return s;
    }
    s.kind = Statement::Kind::kSetBlock;
    s.expression = filter_chain(make(Kind::kFilterInput, line));
    s.body = closed_block("endset");
    return s;
  }

  ExpressionPtr filter_chain(ExpressionPtr e) {
    while (skip_operator("|")) e = filter(std::move(e));
    return e;
  }

  Statement macro_tag(int line) {
    Statement s = statement(Statement::Kind::kMacro, line);
    s.text = expect_any_name();
    s.parameters = parameters();
    macro_body(s, "endmacro");
    return s;
  }

  Statement call_tag(int line) {
    Statement s = statement(Statement::Kind::kCall, line);
    if (current().is_operator("(")) s.parameters = parameters();
    s.expression = expression();
    if (s.expression->kind != Kind::kCall) fail_at(line, "'call' needs the call of a macro");
    macro_body(s, "endcall");
    return s;
  }

  // A macro takes arguments beyond its parameters only when its body reads them.
  void macro_body(Statement& s, std::string_view end_name) {
    const std::size_t begin = at_;
    s.body = closed_block(end_name);
    for (std::size_t i = begin; i < at_; ++i) {
      s.uses.varargs = s.uses.varargs || tokens_[i].is_name("varargs");
      s.uses.kwargs = s.uses.kwargs || tokens_[i].is_name("kwargs");
      s.uses.caller = s.uses.caller || tokens_[i].is_name("caller");
    }
  }

  Statement with_tag(int line) {
    Statement s = statement(Statement::Kind::kWith, line);
    while (current().kind != Token::Kind::kBlockEnd) {
      if (!s.bindings.empty()) expect_operator(",");
      Target name = target(false);
      expect_operator("=");
      s.bindings.emplace_back(std::move(name), expression());
    }
    s.body = block("endwith");
    return s;
  }

  std::vector<Parameter> parameters() {
    std::vector<Parameter> all;
    expect_operator("(");
    while (!skip_operator(")")) {
      if (!all.empty()) expect_operator(",");
      Parameter& parameter = all.emplace_back();
      parameter.name = expect_any_name();
      if (skip_operator("=")) {
        parameter.fallback = expression();
      } else if (all.size() > 1 && all[all.size() - 2].fallback != nullptr) {
        fail_at(current().line, "a parameter without a default behind one with a default");
      }
    }
    return all;
  }

  // name, namespace.attribute (where allowed), (a, b), or a, b.
  Target target(bool with_attribute) {
    const int line = current().line;
    Target all;
    all.line = line;
    bool is_tuple = false;
    do {
      if (current().is_name("in") || current().is_operator("=")) break;  // behind a last comma
      all.parts.push_back(single_target(with_attribute));
      is_tuple = is_tuple || current().is_operator(",");
    } while (skip_operator(","));
    if (all.parts.empty()) unexpected("a name to assign to");
    return is_tuple ? all : std::move(all.parts[0]);
  }
  Target single_target(bool with_attribute) {
    const Deeper deeper(expression_depth_, kMaxExpressionDepth / 2, *this);
    Target one;
    one.line = current().line;
    if (skip_operator("(")) {
      one = target(with_attribute);
      expect_operator(")");
      return one;
    }
    one.name = expect_any_name();
    for (const std::string_view reserved : {"true", "false", "none", "True", "False", "None"}) {
      if (one.name == reserved) fail_at(one.line, "cannot assign to '" + one.name + "'");
    }
    if (with_attribute && skip_operator(".")) one.attribute = expect_any_name();
    return one;
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int expression_depth_ = 0;
  int statement_depth_ = 0;
  int loop_depth_ = 0;
  std::vector<int> open_lines_;  // of the blocks that wait for their end
};

}  // namespace

Body parse(std::string_view source) { return Parser(source).run(); }

}  // namespace statepack::jinja
