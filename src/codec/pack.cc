#include "codec/pack.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.hpp"
#include "base/simd_clones.hpp"

namespace statepack {
namespace {

static_assert(std::endian::native == std::endian::little, "codes are packed through whole words");

constexpr std::uint64_t every_byte(std::uint64_t byte) { return byte * 0x0101010101010101u; }

// Eight codes, one a byte, to 8*B bits and back: the gaps between bytes, then pairs, then quads
// close.
template <int B>
inline std::uint64_t squeeze(std::uint64_t x) {
  constexpr int kGap = 8 - B;
  x &= every_byte((1u << B) - 1);
  x = (x & 0x00ff00ff00ff00ffu) | ((x & 0xff00ff00ff00ff00u) >> kGap);
  x = (x & 0x0000ffff0000ffffu) | ((x & 0xffff0000ffff0000u) >> (2 * kGap));
  x = (x & 0x00000000ffffffffu) | ((x & 0xffffffff00000000u) >> (4 * kGap));
  return x;
}

template <int B, bool kSigned>
inline std::uint64_t spread(std::uint64_t x) {
  constexpr int kGap = 8 - B;
  constexpr std::uint64_t kQuad = (std::uint64_t{1} << (4 * B)) - 1;
  constexpr std::uint64_t kPair = ((std::uint64_t{1} << (2 * B)) - 1) * 0x0000000100000001u;
  constexpr std::uint64_t kOne = ((std::uint64_t{1} << B) - 1) * 0x0001000100010001u;
  x = (x & kQuad) | ((x & ~kQuad) << (4 * kGap));
  x = (x & kPair) | ((x << (2 * kGap)) & (kPair << 16));
  x = (x & kOne) | ((x << kGap) & (kOne << 8));
  if constexpr (kSigned) {  // copy the sign bit into the gap above it
    const std::uint64_t sign = x & every_byte(1u << (B - 1));
    x |= (sign << 1) * ((1u << kGap) - 1);
  }
  return x;
}

template <int B>
void pack_words(const std::uint8_t* codes, std::int64_t n, std::uint8_t* out) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8, codes += 8, out += B) {
    std::uint64_t x;
    std::memcpy(&x, codes, 8);
    x = squeeze<B>(x);
    std::memcpy(out, &x, B);
  }
  if (i < n) {
    std::uint64_t x = 0;
    std::memcpy(&x, codes, static_cast<std::size_t>(n - i));
    x = squeeze<B>(x);
    std::memcpy(out, &x, static_cast<std::size_t>(packed_bytes(n - i, B)));
  }
}

template <int B, bool kSigned>
void unpack_words(const std::uint8_t* in, std::int64_t n, std::uint8_t* codes) {
  // Whole words are read as long as the run lasts: assembling B bytes in memory would cost a
  // stalled load each time.
  const std::uint8_t* const end = in + packed_bytes(n, B);
  constexpr std::uint64_t kUsed = ~std::uint64_t{0} >> (64 - 8 * B);
  for (; end - in >= 8; in += B, codes += 8, n -= 8) {
    std::uint64_t x;
    std::memcpy(&x, in, 8);
    x = spread<B, kSigned>(x & kUsed);
    std::memcpy(codes, &x, 8);
  }
  while (n > 0) {
    const std::int64_t count = std::min<std::int64_t>(n, 8);
    std::uint64_t x = 0;
    std::memcpy(&x, in, static_cast<std::size_t>(packed_bytes(count, B)));
    x = spread<B, kSigned>(x);
    std::memcpy(codes, &x, static_cast<std::size_t>(count));
    in += B, codes += count, n -= count;
  }
}

// Nibbles have loops of their own, which vectorise.
SP_CLONES void pack_nibbles(const std::uint8_t* __restrict codes, std::int64_t n_pairs,
                            std::uint8_t* __restrict out) {
  for (std::int64_t i = 0; i < n_pairs; ++i) {
    out[i] = static_cast<std::uint8_t>((codes[2 * i] & 15) | (codes[2 * i + 1] << 4));
  }
}

SP_CLONES void unpack_nibbles(const std::uint8_t* __restrict in, std::int64_t n_pairs,
                              std::uint8_t sign, std::uint8_t* __restrict codes) {
  for (std::int64_t i = 0; i < n_pairs; ++i) {  // (c ^ 8) - 8 extends the sign, (c ^ 0) - 0 nothing
    codes[2 * i] = static_cast<std::uint8_t>(((in[i] & 15) ^ sign) - sign);
    codes[2 * i + 1] = static_cast<std::uint8_t>(((in[i] >> 4) ^ sign) - sign);
  }
}

template <bool kSigned>
void unpack(const std::uint8_t* in, std::int64_t n, int bits, std::uint8_t* codes) {
  switch (bits) {
    case 2:
      return unpack_words<2, kSigned>(in, n, codes);
    case 3:
      return unpack_words<3, kSigned>(in, n, codes);
    case 4: {
      const std::int64_t even = n & ~std::int64_t{1};
      unpack_nibbles(in, even / 2, kSigned ? 8 : 0, codes);
      return unpack_words<4, kSigned>(in + even / 2, n - even, codes + even);
    }
    case 5:
      return unpack_words<5, kSigned>(in, n, codes);
    case 6:
      return unpack_words<6, kSigned>(in, n, codes);
    case 7:
      return unpack_words<7, kSigned>(in, n, codes);
    case 8:
      std::copy_n(in, n, codes);
      return;
    default:
      SP_CHECK(false, "codes have 2 to 8 bits");
  }
}

}  // namespace

void pack_codes(const std::uint8_t* codes, std::int64_t n, int bits, std::uint8_t* out) {
  switch (bits) {
    case 2:
      return pack_words<2>(codes, n, out);
    case 3:
      return pack_words<3>(codes, n, out);
    case 4: {
      const std::int64_t even = n & ~std::int64_t{1};
      pack_nibbles(codes, even / 2, out);
      return pack_words<4>(codes + even, n - even, out + even / 2);
    }
    case 5:
      return pack_words<5>(codes, n, out);
    case 6:
      return pack_words<6>(codes, n, out);
    case 7:
      return pack_words<7>(codes, n, out);
    case 8:
      std::copy_n(codes, n, out);
      return;
    default:
      SP_CHECK(false, "codes have 2 to 8 bits");
  }
}

void unpack_codes(const std::uint8_t* in, std::int64_t n, int bits, std::uint8_t* codes) {
  unpack<false>(in, n, bits, codes);
}

void unpack_signed(const std::uint8_t* in, std::int64_t n, int bits, std::int8_t* codes) {
  unpack<true>(in, n, bits, reinterpret_cast<std::uint8_t*>(codes));
}

}  // namespace statepack
