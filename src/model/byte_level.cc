#include "model/byte_level.hpp"

#include <array>
#include <cstdint>

#include "model/utf8.hpp"

namespace statepack {
namespace {

// Printable Latin-1 bytes stand for themselves; the other 68 are U+0100, U+0101, ... in order.
constexpr std::array<std::int16_t, 0x144> make_table() {
  std::array<std::int16_t, 0x144> byte_of{};
  byte_of.fill(-1);
  std::size_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD);
    byte_of[printable ? static_cast<std::size_t>(b) : next++] = static_cast<std::int16_t>(b);
  }
  return byte_of;
}
constexpr auto kByteOf = make_table();

}  // namespace

std::optional<std::string> bytes_of_byte_level(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  while (!text.empty()) {
    const Utf8Step step = decode_utf8(text);
    text.remove_prefix(step.n_bytes);
    if (step.character >= kByteOf.size() || kByteOf[step.character] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(kByteOf[step.character]));
  }
  return bytes;
}

}  // namespace statepack
