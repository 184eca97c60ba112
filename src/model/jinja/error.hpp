// How compiling and rendering stop: caught where the chat template meets its callers.
#pragma once

#include <string>
#include <utility>

#include "statepack/status.hpp"

namespace statepack::jinja {

/// Thrown inside this folder only; ChatTemplate turns it into a Status. `line` is 0 until a node of
/// the template adds its own.
struct TemplateError {
  Code code;
  std::string message;
  int line = 0;
};

/// A template asked for something that Jinja refuses, or a request lacks a value.
[[noreturn]] inline void fail(std::string message) {
  throw TemplateError{Code::kInvalidArgument, std::move(message)};
}

}  // namespace statepack::jinja
