#include "model/jinja/arithmetic.hpp"

#include <cmath>
#include <optional>
#include <string>

#include "model/jinja/error.hpp"

namespace statepack::jinja {
namespace {

using Kind = Expression::Kind;

[[noreturn]] void overflow() { fail("an integer of the template does not fit 64 bits"); }

std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  const std::int64_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

Value integer_arithmetic(Kind op, std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  bool too_large = false;
  switch (op) {
    case Kind::kAdd:
      too_large = __builtin_add_overflow(a, b, &result);
      break;
    case Kind::kSubtract:
      too_large = __builtin_sub_overflow(a, b, &result);
      break;
    case Kind::kMultiply:
      too_large = __builtin_mul_overflow(a, b, &result);
      break;
    case Kind::kDivide:
      if (b == 0) fail("division by zero");
      return static_cast<double>(a) / static_cast<double>(b);
    case Kind::kFloorDivide:
    case Kind::kModulo: {
      if (b == 0) fail("division by zero");
      if (b == -1) {  // the one quotient that overflows is -2^63 / -1
        if (op == Kind::kModulo) return std::int64_t{0};
        return negative(a);
      }
      const std::int64_t quotient = floor_divide(a, b);
      return op == Kind::kFloorDivide ? quotient : a - quotient * b;
    }
    case Kind::kPower: {
      if (b < 0) {
        if (a == 0) fail("0 cannot be raised to a negative power");
        return std::pow(static_cast<double>(a), static_cast<double>(b));
      }
      result = 1;
      if (a == 0 || a == 1) return b == 0 ? std::int64_t{1} : a;
      if (a == -1) return b % 2 == 0 ? std::int64_t{1} : std::int64_t{-1};
      for (std::int64_t i = 0; i < b && !too_large; ++i) {  // at most 63 steps: |a| >= 2
        too_large = __builtin_mul_overflow(result, a, &result);
      }
      break;
    }
    default:
      break;
  }
  if (too_large) overflow();
  return result;
}

Value float_arithmetic(Kind op, double a, double b) {
  switch (op) {
    case Kind::kAdd:
      return a + b;
    case Kind::kSubtract:
      return a - b;
    case Kind::kMultiply:
      return a * b;
    case Kind::kPower: {
      const double power = std::pow(a, b);
      if (std::isnan(power) && !std::isnan(a) && !std::isnan(b)) {
        fail("a negative number cannot be raised to a fraction");
      }
      return power;
    }
    default:
      break;
  }
  if (b == 0) fail("division by zero");
  if (op == Kind::kDivide) return a / b;
  // As Python: the remainder has the sign of b, and the quotient is what it leaves.
  double remainder = std::fmod(a, b);
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  if (op == Kind::kModulo) return remainder == 0 ? std::copysign(0.0, b) : remainder;
  const double quotient = (a - remainder) / b;
  return std::floor(quotient + 0.5);
}

// text * n or list * n.
Value repeat(const Value& value, std::int64_t n, Work& work) {
  n = std::max<std::int64_t>(n, 0);
  if (const std::string* s = value.string()) {
    if (!s->empty()) work.charge(static_cast<std::uint64_t>(n));
    std::string out;
    for (std::int64_t i = 0; i < n && !s->empty(); ++i) {
      work.charge_bytes(s->size());
      out += *s;
    }
    return out;
  }
  const Sequence* s = value.sequence();
  std::vector<Value> items;
  for (std::int64_t i = 0; i < n && !s->items.empty(); ++i) {
    work.charge(s->items.size());
    items.insert(items.end(), s->items.begin(), s->items.end());
  }
  return Value::list(std::move(items), s->is_tuple);
}

const char* symbol(Kind op) {
  switch (op) {
    case Kind::kAdd:
      return "+";
    case Kind::kSubtract:
      return "-";
    case Kind::kMultiply:
      return "*";
    case Kind::kDivide:
      return "/";
    case Kind::kFloorDivide:
      return "//";
    case Kind::kModulo:
      return "%";
    default:
      return "**";
  }
}

}  // namespace

Value arithmetic(Kind op, const Value& a, const Value& b, Work& work) {
  if (a.is_number() && b.is_number()) {
    std::int64_t x = 0;
    std::int64_t y = 0;
    const std::int64_t* i = a.integer(x);
    const std::int64_t* j = b.integer(y);
    return i != nullptr && j != nullptr ? integer_arithmetic(op, *i, *j)
                                        : float_arithmetic(op, a.number(), b.number());
  }
  if (op == Kind::kAdd) {
    const std::string* s = a.string();
    const std::string* t = b.string();
    if (s != nullptr && t != nullptr) {
      work.charge_bytes(s->size() + t->size());
      return *s + *t;
    }
    const Sequence* v = a.sequence();
    const Sequence* w = b.sequence();
    if (v != nullptr && w != nullptr && v->is_tuple == w->is_tuple) {
      work.charge(v->items.size() + w->items.size());
      std::vector<Value> items = v->items;
      items.insert(items.end(), w->items.begin(), w->items.end());
      return Value::list(std::move(items), v->is_tuple);
    }
  }
  if (op == Kind::kMultiply) {
    const auto is_repeatable = [](const Value& value) {
      return value.string() != nullptr || value.sequence() != nullptr;
    };
    std::int64_t storage = 0;
    if (is_repeatable(a) && b.integer(storage) != nullptr) {
      return repeat(a, *b.integer(storage), work);
    }
    if (is_repeatable(b) && a.integer(storage) != nullptr) {
      return repeat(b, *a.integer(storage), work);
    }
  }
  for (const Value* value : {&a, &b}) {
    if (const auto* undefined = value->get<Value::Undefined>()) fail(*undefined->why);
  }
  std::string what = std::string("cannot compute ") + std::string(a.type_name()) + " " +
                     symbol(op) + " " + std::string(b.type_name());
  if (op == Kind::kAdd && (a.string() != nullptr || b.string() != nullptr)) {
    what += "; '~' joins values of any type";
  }
  fail(std::move(what));
}

Value negative(const Value& a) {
  std::int64_t storage = 0;
  if (const std::int64_t* i = a.integer(storage)) {
    std::int64_t result = 0;
    if (__builtin_sub_overflow(std::int64_t{0}, *i, &result)) overflow();
    return result;
  }
  if (a.is_float()) return -a.number();
  if (const auto* undefined = a.get<Value::Undefined>()) fail(*undefined->why);
  fail("a " + std::string(a.type_name()) + " has no negative");
}

}  // namespace statepack::jinja
