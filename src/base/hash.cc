#include "base/hash.hpp"

#include <openssl/evp.h>
#include <xxhash.h>

#include <algorithm>

#include "base/check.hpp"

namespace statepack {

Hash128 xxh3_128(std::span<const std::byte> bytes) {
  XXH128_canonical_t canonical;  // big-endian on every machine
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  Hash128 hash;
  std::copy(std::begin(canonical.digest), std::end(canonical.digest), hash.begin());
  return hash;
}

std::string to_hex(std::span<const std::uint8_t> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  const bool ready = context_ != nullptr && EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_),
                                                              EVP_sha256(), nullptr) == 1;
  SP_CHECK(ready, "OpenSSL offers no SHA-256");
}

Sha256::~Sha256() { EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context_)); }

void Sha256::update(std::span<const std::byte> bytes) {
  EVP_DigestUpdate(static_cast<EVP_MD_CTX*>(context_), bytes.data(), bytes.size());
}

void Sha256::update(std::string_view text) {
  update(std::as_bytes(std::span(text.data(), text.size())));
}

std::string Sha256::hex() {
  std::array<std::uint8_t, 32> digest{};
  EVP_DigestFinal_ex(static_cast<EVP_MD_CTX*>(context_), digest.data(), nullptr);
  return to_hex(digest);
}

}  // namespace statepack
