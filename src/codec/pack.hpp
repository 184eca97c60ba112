// Runs of b-bit codes, little-endian: code e of a run occupies bits [e*b, e*b + b).
//
// 8, 4 and 2 bits give 1, 2 and 4 codes a byte (the first code lowest); 6 bits give 4 codes in 3
// bytes, 5 bits 8 codes in 5 and 3 bits 8 codes in 3. The bits behind the last code are zero.
#pragma once

#include <cstdint>

namespace statepack {

inline constexpr int kMinPackBits = 2, kMaxPackBits = 8;

/// Bytes of a run of n codes.
constexpr std::int64_t packed_bytes(std::int64_t n, int bits) { return (n * bits + 7) / 8; }

/// Packs the low `bits` bits of each of n codes, so that int8 codes are stored as two's complement.
/// Writes exactly packed_bytes(n, bits) bytes; `out` must not overlap `codes`. bits in 2..8.
void pack_codes(const std::uint8_t* codes, std::int64_t n, int bits, std::uint8_t* out);

/// Reads n codes back, zero-extended.
void unpack_codes(const std::uint8_t* in, std::int64_t n, int bits, std::uint8_t* codes);

/// Reads n codes back, sign-extended from `bits` bits.
void unpack_signed(const std::uint8_t* in, std::int64_t n, int bits, std::int8_t* codes);

}  // namespace statepack
