#include "base/hash.hpp"

#include <gtest/gtest.h>

#include <string>

namespace statepack {
namespace {

std::string xxh3_hex(std::string_view text) {
  return to_hex(xxh3_128(std::as_bytes(std::span(text.data(), text.size()))));
}

std::string sha_hex(std::string_view text) {
  Sha256 sha;
  sha.update(text);
  return sha.hex();
}

// FIPS 180-4 examples.
TEST(Hash, Sha256KnownAnswers) {
  EXPECT_EQ(sha_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha_hex(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Hash, Sha256InPiecesIsTheWhole) {
  Sha256 sha;
  sha.update("abcdbcdecdefdefg");
  sha.update("");
  sha.update("efghfghighijhijkijkljklmklmnlmnomnopnopq");
  EXPECT_EQ(sha.hex(), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

// Made with the Python package xxhash 3.
TEST(Hash, Xxh3KnownAnswers) {
  EXPECT_EQ(xxh3_hex(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(xxh3_hex("abc"), "06b05ab6733a618578af5f94892f3950");
  EXPECT_EQ(xxh3_hex(std::string(1000, 'a')), "b01da365eddaa29cb3e7af627147db7c");
}

TEST(Hash, HexIsLowerCaseAndPadded) {
  const std::array<std::uint8_t, 4> bytes = {0x00, 0x0a, 0xf0, 0xff};
  EXPECT_EQ(to_hex(bytes), "000af0ff");
}

}  // namespace
}  // namespace statepack
