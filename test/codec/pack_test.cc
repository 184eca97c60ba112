#include "codec/pack.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/half.hpp"
#include "codec/scale.hpp"
#include "codec/transpose.hpp"

namespace statepack {
namespace {

std::vector<std::uint8_t> pack(const std::vector<std::uint8_t>& codes, int bits) {
  std::vector<std::uint8_t> out(
      static_cast<std::size_t>(packed_bytes(static_cast<std::int64_t>(codes.size()), bits)));
  pack_codes(codes.data(), static_cast<std::int64_t>(codes.size()), bits, out.data());
  return out;
}

using Bytes = std::vector<std::uint8_t>;

TEST(Pack, KeepsThePublishedBitOrder) {
  EXPECT_EQ(pack({1, 2, 3, 4}, 6), (Bytes{0x81, 0x30, 0x10}));
  EXPECT_EQ(pack({1, 15}, 4), (Bytes{0xF1}));
  EXPECT_EQ(pack({3, 2, 1, 0}, 2), (Bytes{0x1B}));
}

// Bit e*b + k of the run is bit k of code e, whatever path a length takes.
TEST(Pack, PlacesEveryBitOfEveryCodeForEveryLength) {
  for (int bits = kMinPackBits; bits <= kMaxPackBits; ++bits) {
    const unsigned mask = (1u << bits) - 1;
    for (int n = 0; n <= 150; ++n) {
      Bytes codes(static_cast<std::size_t>(n));
      for (int e = 0; e < n; ++e) {  // high bits beyond the width are noise that packing drops
        codes[static_cast<std::size_t>(e)] = static_cast<std::uint8_t>(e * 37 + n * 11 + 5);
      }
      constexpr std::uint8_t kGuard = 0xA5;
      const std::size_t n_bytes = static_cast<std::size_t>(packed_bytes(n, bits));
      Bytes out(n_bytes + 8, kGuard);
      pack_codes(codes.data(), n, bits, out.data());
      for (std::size_t i = 0; i < 8; ++i) ASSERT_EQ(out[n_bytes + i], kGuard) << bits << " " << n;
      for (std::int64_t bit = 0; bit < static_cast<std::int64_t>(n_bytes) * 8; ++bit) {
        const std::int64_t e = bit / bits;
        const unsigned want =
            e < n ? (codes[static_cast<std::size_t>(e)] >> (bit % bits)) & 1u : 0u;
        ASSERT_EQ((out[static_cast<std::size_t>(bit / 8)] >> (bit % 8)) & 1u, want)
            << bits << " bits, " << n << " codes, bit " << bit;
      }
      out.resize(n_bytes);  // readers may not look behind the run
      Bytes back(static_cast<std::size_t>(n) + 8, kGuard);
      unpack_codes(out.data(), n, bits, back.data());
      std::vector<std::int8_t> back_signed(static_cast<std::size_t>(n) + 8, 99);
      unpack_signed(out.data(), n, bits, back_signed.data());
      for (std::size_t e = 0; e < static_cast<std::size_t>(n); ++e) {
        const int code = static_cast<int>(codes[e] & mask);
        ASSERT_EQ(back[e], code);
        ASSERT_EQ(back_signed[e], code >= (1 << (bits - 1)) ? code - (1 << bits) : code);
      }
      for (std::size_t i = 0; i < 8; ++i) {
        ASSERT_EQ(back[static_cast<std::size_t>(n) + i], kGuard);
        ASSERT_EQ(back_signed[static_cast<std::size_t>(n) + i], 99);
      }
    }
  }
}

TEST(Scale, RoundsAsTheHalfConversionInsideItsRange) {
  // Every 977th float from 0 to beyond 65504: subnormal halves, ties and both clamps among them.
  const std::uint32_t last = std::bit_cast<std::uint32_t>(70000.0f);
  for (std::uint32_t u = 0; u < last; u += 977) {
    const float x = std::bit_cast<float>(u);
    const std::uint16_t want = f32_to_f16(std::fmin(std::fmax(x, 0x1p-24f), 65504.0f));
    ASSERT_EQ(encode_scale(x), want) << x;
    ASSERT_EQ(saturate_to_f16(x), f32_to_f16(std::fmin(x, 65504.0f))) << x;
    ASSERT_EQ(saturate_to_f16(-x), f32_to_f16(std::fmax(-x, -65504.0f))) << x;
  }
  for (std::uint32_t h = 1; h < 0x7c00; ++h) {  // halves, and the ties halfway to the next
    const float low = f16_to_f32(static_cast<std::uint16_t>(h));
    ASSERT_EQ(encode_scale(low), h);
    if (h + 1 < 0x7c00) {
      const float tie = (low + f16_to_f32(static_cast<std::uint16_t>(h + 1))) / 2;
      ASSERT_EQ(encode_scale(tie), h + (h & 1)) << tie;
    }
  }
  EXPECT_EQ(h16(0.0f), 0x1p-24f);
  EXPECT_EQ(h16(1e30f), 65504.0f);
  EXPECT_EQ(h16(std::numeric_limits<float>::infinity()), 65504.0f);
  EXPECT_EQ(h16(std::numeric_limits<float>::quiet_NaN()), 0x1p-24f);
}

TEST(Scale, RoundsCodesToNearestEvenAndClamps) {
  for (int n = -4096; n <= 4096; ++n) {
    const float x = static_cast<float>(n) / 16;  // ties at every odd multiple of 8
    ASSERT_EQ(rne(x), std::nearbyint(x)) << x;
    ASSERT_EQ(round_code(x, -127, 127), std::fmin(std::fmax(std::nearbyint(x), -127.f), 127.f));
    ASSERT_EQ(static_cast<std::int8_t>(round_code_u8(x, -127, 127)), round_code(x, -127, 127));
  }
  for (const float x : {0x1p22f, 4194303.5f, -0x1p22f, 2097152.5f, 0.49999997f, -0.49999997f}) {
    EXPECT_EQ(rne(x), std::nearbyint(x)) << x;
  }
  EXPECT_EQ(round_code(1e38f, -7, 7), 7);
  EXPECT_EQ(round_code(-std::numeric_limits<float>::infinity(), -7, 7), -7);
}

TEST(Transpose, MovesEveryByteForEveryShapeAndStride) {
  for (const std::int64_t rows : {1, 2, 15, 16, 17, 31, 32, 40}) {
    for (const std::int64_t columns : {1, 3, 16, 18, 32, 47}) {
      const std::int64_t in_stride = columns + 3, out_stride = rows + 5;
      Bytes in(static_cast<std::size_t>(rows * in_stride));
      for (std::size_t i = 0; i < in.size(); ++i)
        in[i] = static_cast<std::uint8_t>(i * 7 + i / 251);
      in.resize(static_cast<std::size_t>((rows - 1) * in_stride + columns));  // end of the last row
      Bytes out(static_cast<std::size_t>(columns * out_stride), 0xEE);
      transpose_bytes(in.data(), in_stride, rows, columns, out.data(), out_stride);
      for (std::int64_t c = 0; c < columns; ++c) {
        for (std::int64_t r = 0; r < out_stride; ++r) {
          const std::uint8_t want =
              r < rows ? in[static_cast<std::size_t>(r * in_stride + c)] : std::uint8_t{0xEE};
          ASSERT_EQ(out[static_cast<std::size_t>(c * out_stride + r)], want)
              << rows << "x" << columns << " at " << r << "," << c;
        }
      }
    }
  }
}

}  // namespace
}  // namespace statepack
