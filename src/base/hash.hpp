// Checksums (XXH3-128) and fingerprints (SHA-256), as lower-case hex where they are text.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace statepack {

using Hash128 = std::array<std::uint8_t, 16>;
Hash128 xxh3_128(std::span<const std::byte> bytes);
std::string to_hex(std::span<const std::uint8_t> bytes);

/// Incremental SHA-256.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void update(std::span<const std::byte> bytes);
  void update(std::string_view text);
  std::string hex();  ///< 64 digits; the object is finished afterwards

 private:
  void* context_;
};

}  // namespace statepack
