// Numbers, texts and hashes to and from the headers of binary files, little-endian.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.hpp"

namespace statepack {

static_assert(std::endian::native == std::endian::little, "files are written as memory lies");

class ByteWriter {
 public:
  template <class T>
  void number(T value) {
    const auto raw = std::as_bytes(std::span(&value, 1));
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
  }
  void raw(std::span<const std::byte> data) {
    bytes_.insert(bytes_.end(), data.begin(), data.end());
  }
  void text(std::string_view text) {
    number(static_cast<std::uint32_t>(text.size()));
    raw(std::as_bytes(std::span(text.data(), text.size())));
  }
  void hash(const Hash128& hash) { raw(std::as_bytes(std::span(hash))); }
  std::vector<std::byte>& bytes() { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

/// Takes values off a header; once it runs out it stays out.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}
  bool ok() const { return ok_; }
  std::size_t n_left() const { return rest_.size(); }

  template <class T>
  T number() {
    T value{};
    const auto data = raw(sizeof(T));
    if (ok_) std::memcpy(&value, data.data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> raw(std::size_t n) {
    if (n > rest_.size()) ok_ = false;
    if (!ok_) return {};
    const auto data = rest_.first(n);
    rest_ = rest_.subspan(n);
    return data;
  }
  std::string text() {
    const auto n = number<std::uint32_t>();
    if (n > kMaxText) ok_ = false;
    const auto data = raw(n);
    return {reinterpret_cast<const char*>(data.data()), data.size()};
  }
  Hash128 hash() {
    Hash128 hash{};
    const auto data = raw(hash.size());
    if (ok_) std::memcpy(hash.data(), data.data(), hash.size());
    return hash;
  }

 private:
  static constexpr std::size_t kMaxText = 4096;
  std::span<const std::byte> rest_;
  bool ok_ = true;
};

}  // namespace statepack
