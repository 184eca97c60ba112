// Rotation of rows by signs and a Walsh-Hadamard transform, which spreads a large value over a row.
#pragma once

#include <cstdint>
#include <vector>

namespace statepack {

/// Values that are transformed together in rows of `n`: the largest power of two that divides n.
constexpr std::int64_t hadamard_block(std::int64_t n) { return n & -n; }

/// Each block of x [n] becomes H x / sqrt(block), H the Hadamard matrix in natural order: its own
/// inverse. f32, butterflies of width 1, 2, 4, ..., then one product by 1 / sqrt(block).
void hadamard(float* x, std::int64_t n);

/// out[j] = x[j], or +-2^100 beyond that: what a transform of it keeps finite.
void bound(const float* x, std::int64_t n, float* out);
/// out[j] = signs[j] x[j], bounded likewise.
void flip_signs(const float* x, const float* signs, std::int64_t n, float* out);

/// +1 or -1 for each of n values, fixed by `stream`: part of the page formats that use it.
std::vector<float> random_signs(std::int64_t n, std::uint64_t stream);

}  // namespace statepack
