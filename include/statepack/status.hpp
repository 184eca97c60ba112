// How the library reports what went wrong: values, never exceptions, prints or exits.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace statepack {

/// What kind of failure a Status reports. The number is part of the C API: never reused.
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 1,  ///< the caller's flag, request or shape is wrong
  kNotFound = 2,         ///< a file, tensor or name does not exist
  kCorrupt = 3,          ///< bytes from outside break their own format
  kUnsupported = 4,      ///< well formed, but not something this build can do
  kMismatch = 5,         ///< two well-formed things do not belong together (plan and model, say)
  kExhausted = 6,        ///< no slot, memory or queue place is left
  kNotFinite = 7,        ///< NaN or Inf in a state or an input
  kIo = 8,               ///< the operating system refused a read or write
  kInterrupted = 9,      ///< stopped on request; nothing half-done was left behind
};

/// The fixed name of a code, e.g. "invalid_argument".
std::string_view code_name(Code code);

/// Success, or a code with one sentence that says what was wrong, where, and how to mend it.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

/// A T or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace statepack

/// Returns from the enclosing function when `expr` (a Status) failed.
#define SP_RETURN_IF_ERROR(expr)                                                      \
  do {                                                                                \
    if (::statepack::Status sp_status_ = (expr); !sp_status_.ok()) return sp_status_; \
  } while (false)

#define SP_CONCAT_INNER_(a, b) a##b
#define SP_CONCAT_(a, b) SP_CONCAT_INNER_(a, b)

/// `SP_ASSIGN_OR_RETURN(auto x, f());` takes the value of a Result or returns its Status.
#define SP_ASSIGN_OR_RETURN(lhs, expr) \
  SP_ASSIGN_OR_RETURN_IMPL_(SP_CONCAT_(sp_result_, __LINE__), lhs, expr)
// NOLINTBEGIN(bugprone-macro-parentheses): `lhs` may be a declaration.
#define SP_ASSIGN_OR_RETURN_IMPL_(result, lhs, expr) \
  auto result = (expr);                              \
  if (!result.ok()) return result.status();          \
  lhs = std::move(result).value()
// NOLINTEND(bugprone-macro-parentheses)
