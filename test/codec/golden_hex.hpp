// Bytes and floats as the golden files write them.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace statepack::testing {

inline std::vector<std::uint8_t> from_hex(const std::string& hex) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

/// Little-endian f32, as memory holds them.
inline std::vector<float> floats(const std::string& hex) {
  const std::vector<std::uint8_t> bytes = from_hex(hex);
  std::vector<float> values(bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

}  // namespace statepack::testing
