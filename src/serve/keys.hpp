// API keys: read from a file, compared without telling by time how much of a guess was right.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "statepack/status.hpp"

namespace statepack::serve {

class ApiKeys {
 public:
  /// `keys` and those of `file` ("" for none), which holds one a line; empty lines and lines that
  /// begin with '#' are passed over. Errors: kNotFound, kIo; kInvalidArgument for a file without a
  /// key or a key that no header could carry.
  static Result<ApiKeys> load(const std::vector<std::string>& keys, const std::string& file);

  bool empty() const { return digests_.empty(); }
  /// Compares digests, and all of them every time.
  bool accept(std::string_view key) const;

 private:
  std::vector<std::string> digests_;  ///< SHA-256 in hex: one length for all keys
};

}  // namespace statepack::serve
