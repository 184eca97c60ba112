#include "serve/json.hpp"

#include <fmt/format.h>

#include <vector>

#include "model/utf8.hpp"

namespace statepack::serve {
namespace {

constexpr std::size_t kMaxDepth = 64;
constexpr int kMaxFields = 1024;

// Bounds of depth and width, before anything is built. Inside strings nothing counts.
std::optional<ApiError> check_shape(std::string_view text) {
  std::vector<int> fields;  // ':' seen in each open bracket
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (fields.size() == kMaxDepth) {
        return bad_request(
            "", fmt::format("the body is nested deeper than {} at byte {}", kMaxDepth, i));
      }
      fields.push_back(0);
    } else if ((c == ']' || c == '}') && !fields.empty()) {
      fields.pop_back();
    } else if (c == ':' && !fields.empty() && ++fields.back() > kMaxFields) {
      return bad_request(
          "",
          fmt::format("the body has more than {} fields in one object, at byte {}", kMaxFields, i));
    }
  }
  return std::nullopt;
}

std::string_view kind(const Json& value) {
  switch (value.type()) {
    case Json::value_t::boolean:
      return "a boolean";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::array:
      return "a list";
    case Json::value_t::object:
      return "an object";
    default:
      return "a number";
  }
}

}  // namespace

Json ApiError::body() const {
  return {{"error",
           {{"message", message},
            {"type", type},
            {"param", param.empty() ? Json(nullptr) : Json(param)},
            {"code", status}}}};
}

ApiError bad_request(std::string param, std::string message) {
  return {400, std::move(message), "BadRequestError", std::move(param)};
}

ApiError not_supported(std::string param, std::string message) {
  return {501, std::move(message), "not_supported_error", std::move(param)};
}

ApiError to_api_error(const Status& status) {
  switch (status.code()) {
    case Code::kInvalidArgument:
    case Code::kCorrupt:
    case Code::kMismatch:
      return {400, status.message(), "BadRequestError", ""};
    case Code::kNotFound:
      return {404, status.message(), "NotFoundError", ""};
    case Code::kUnsupported:
      return {501, status.message(), "not_supported_error", ""};
    case Code::kExhausted:
      return {429, status.message(), "rate_limit_error", ""};
    case Code::kInterrupted:
      return {503, status.message(), "unavailable_error", ""};
    case Code::kOk:
    case Code::kNotFinite:
    case Code::kIo:
      break;
  }
  return {500, status.message(), "server_error", ""};
}

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<ApiError> parse_body(std::string_view text, Json* out) {
  for (std::size_t at = 0; at < text.size();) {
    const Utf8Step step = decode_utf8(text.substr(at));
    if (!step.valid) {
      return bad_request("", fmt::format("the body is not UTF-8 text: byte {} (0x{:02x}) does not "
                                         "belong there",
                                         at, static_cast<unsigned char>(text[at])));
    }
    at += step.n_bytes;
  }
  if (auto error = check_shape(text)) return error;
  try {
    *out = Json::parse(text);
  } catch (const Json::parse_error& e) {
    return bad_request("", fmt::format("the body is not valid JSON, around byte {}", e.byte));
  } catch (const Json::exception&) {  // a number beyond the range of a double
    return bad_request("", "the body holds a number that is out of range");
  }
  if (!out->is_object()) {
    return bad_request("", fmt::format("the body is {}; it must be an object",
                                       out->is_null() ? "null" : kind(*out)));
  }
  return std::nullopt;
}

Fields::Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {}

const Json* Fields::find(const char* name) const {
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

void Fields::fail(const std::string& name, const std::string& message) {
  fail(bad_request(path_ + name, fmt::format("{}{} {}", path_, name, message)));
}

void Fields::fail(ApiError error) {
  if (ok()) error_ = std::move(error);
}

void Fields::read(const char* name, bool* out) {
  const Json* value = find(name);
  if (value == nullptr) return;
  if (!value->is_boolean())
    return fail(name, fmt::format("is {}; it must be true or false", kind(*value)));
  *out = value->get<bool>();
}

void Fields::read(const char* name, std::string* out) {
  const Json* value = find(name);
  if (value == nullptr) return;
  if (!value->is_string())
    return fail(name, fmt::format("is {}; it must be a string", kind(*value)));
  *out = value->get<std::string>();
}

void Fields::read(const char* name, float* out, float low, float high) {
  const Json* value = find(name);
  if (value == nullptr) return;
  if (!value->is_number())
    return fail(name, fmt::format("is {}; it must be a number", kind(*value)));
  const double number = value->get<double>();
  if (!(number >= low && number <= high)) {
    return fail(name, fmt::format("is {}; it must be from {} to {}", number, low, high));
  }
  *out = static_cast<float>(number);
}

void Fields::read(const char* name, std::int64_t* out, std::int64_t low, std::int64_t high) {
  const Json* value = find(name);
  if (value == nullptr) return;
  if (!value->is_number_integer()) {
    return fail(name, fmt::format("is {}; it must be a whole number",
                                  value->is_number() ? value->dump() : std::string(kind(*value))));
  }
  // Unsigned values above the signed range would wrap around.
  const bool too_large =
      value->is_number_unsigned() && value->get<std::uint64_t>() > static_cast<std::uint64_t>(high);
  const std::int64_t number = too_large ? high : value->get<std::int64_t>();
  if (too_large || number < low || number > high) {
    return fail(name, fmt::format("is {}; it must be from {} to {}", value->dump(), low, high));
  }
  *out = number;
}

}  // namespace statepack::serve
