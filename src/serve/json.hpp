// Bodies of requests: parsed within bounds, read field by field with errors that name the field.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "statepack/status.hpp"

namespace statepack::serve {

/// Keeps the order of fields: templates print tool declarations as the client wrote them.
using Json = nlohmann::ordered_json;

/// An error as OpenAI's clients read it.
struct ApiError {
  int status = 400;
  std::string message;
  std::string type = "BadRequestError";
  std::string param;  ///< the field at fault; "" is null in the body

  Json body() const;  ///< {"error": {"message", "type", "param", "code"}}
};
ApiError bad_request(std::string param, std::string message);
/// For what is understood but cannot be done here.
ApiError not_supported(std::string param, std::string message);
/// The one place where a Status becomes an HTTP status.
ApiError to_api_error(const Status& status);

/// Text of a value: model text may hold bytes that are no UTF-8, which print as U+FFFD.
std::string dump(const Json& json);

/// Parses a body that must be one object. Errors: not UTF-8 text, not JSON (with the byte), nested
/// deeper than 64, more than 1,024 fields in one object (looking fields up in order costs their
/// number squared), not an object.
std::optional<ApiError> parse_body(std::string_view text, Json* out);

/// Reads the fields of an object that came from outside. A field that is missing or null leaves the
/// value as it is; the first field of a wrong type or range becomes error(), and later reads do
/// nothing.
class Fields {
 public:
  /// `path` stands before the names in errors: "stream_options.".
  explicit Fields(const Json& object, std::string path = "");

  void read(const char* name, bool* out);
  void read(const char* name, std::string* out);
  void read(const char* name, float* out, float low, float high);
  void read(const char* name, std::int64_t* out, std::int64_t low, std::int64_t high);
  /// The value, or null when there is none (JSON null counts as none).
  const Json* find(const char* name) const;
  void fail(const std::string& name, const std::string& message);
  void fail(ApiError error);
  bool ok() const { return !error_.has_value(); }
  const std::optional<ApiError>& error() const { return error_; }

 private:
  const Json& object_;
  std::string path_;
  std::optional<ApiError> error_;
};

}  // namespace statepack::serve
