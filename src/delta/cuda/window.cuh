// Records of an open window: the device's side of scheme/window.hpp.
#pragma once

#include "delta/cuda/block.cuh"

namespace statepack::cuda {

/// How one vector of a record is stored; a scale in f16 lies behind integer codes.
enum class VectorFormat { kF32, kBf16, kInt8, kInt4 };

__device__ inline VectorFormat key_format(Records records) {
  switch (records) {
    case Records::kF32:
      return VectorFormat::kF32;
    case Records::kBf16:
      return VectorFormat::kBf16;
    case Records::kInt8:
      return VectorFormat::kInt8;
    default:
      return VectorFormat::kInt4;
  }
}
__device__ inline VectorFormat value_format(Records records) {
  return records == Records::kMixed ? VectorFormat::kBf16 : key_format(records);
}

__device__ inline float load_half(const std::uint8_t* at) {
  return half_bits_to_float(*reinterpret_cast<const std::uint16_t*>(at));
}

/// Element i of a stored vector of n.
__device__ inline float load_element(VectorFormat format, const std::uint8_t* at, int n, int i) {
  switch (format) {
    case VectorFormat::kF32:
      return reinterpret_cast<const float*>(at)[i];
    case VectorFormat::kBf16:
      return bf16_bits_to_float(reinterpret_cast<const std::uint16_t*>(at)[i]);
    case VectorFormat::kInt8:
      return load_half(at + n) * static_cast<float>(reinterpret_cast<const std::int8_t*>(at)[i]);
    default:
      return load_half(at + n / 2) *
             static_cast<float>((((at[i / 2] >> (i % 2 * 4)) & 0xf) ^ 8) - 8);
  }
}

/// Rounds a vector x [n] in shared memory to its format, by one warp: where `at` is not null the
/// stored form goes there, and where `rounded` is not null what a reader will see goes there.
__device__ inline void store_vector(VectorFormat format, const float* x, int n, int lane,
                                    std::uint8_t* at, float* rounded) {
  if (format == VectorFormat::kF32) {
    for (int i = lane; i < n; i += 32) {
      if (at != nullptr) reinterpret_cast<float*>(at)[i] = x[i];
      if (rounded != nullptr) rounded[i] = x[i];
    }
    return;
  }
  if (format == VectorFormat::kBf16) {
    for (int i = lane; i < n; i += 32) {
      const std::uint16_t h = float_to_bf16_bits(x[i]);
      if (at != nullptr) reinterpret_cast<std::uint16_t*>(at)[i] = h;
      if (rounded != nullptr) rounded[i] = bf16_bits_to_float(h);
    }
    return;
  }
  float peak = 0;
  for (int i = lane; i < n; i += 32) peak = fmaxf(peak, fabsf(x[i]));
  peak = warp_max(peak);
  const bool bytes = format == VectorFormat::kInt8;
  const float levels = bytes ? 127.0f : 7.0f;
  const std::uint16_t stored = encode_scale(__fdiv_rn(peak, levels));
  const float scale = half_bits_to_float(stored);
  const float inverse = __fdiv_rn(1.0f, scale);
  if (at != nullptr && lane == 0) {
    *reinterpret_cast<std::uint16_t*>(at + (bytes ? n : n / 2)) = stored;
  }
  for (int pair = lane; pair < n / 2; pair += 32) {  // n is even; a 4-bit pair shares a byte
    std::uint32_t codes[2];
    for (int e = 0; e < 2; ++e) {
      const float code = round_code(divide(x[2 * pair + e], scale, inverse), levels);
      codes[e] = __float_as_uint(code);
      if (rounded != nullptr) rounded[2 * pair + e] = scale * code_value(code);
    }
    if (at == nullptr) continue;
    if (bytes) {
      at[2 * pair] = static_cast<std::uint8_t>(codes[0]);
      at[2 * pair + 1] = static_cast<std::uint8_t>(codes[1]);
    } else {
      at[pair] = static_cast<std::uint8_t>((codes[0] & 0xf) | (codes[1] << 4));
    }
  }
}

inline constexpr float kMinLogDecay = -60000.0f;
__device__ inline float clamp_log(float g) { return g > kMinLogDecay ? g : kMinLogDecay; }

/// One head's records in a window block.
template <Gate gate>
struct RecordsOf {
  const WindowView& window;
  const std::uint8_t* block;
  int n_key_heads, n_value_heads, key_head, head, K;

  // A block is far smaller than 2 GiB.
  __device__ const std::uint8_t* at(std::int64_t offset, int index, std::int64_t bytes) const {
    return block + (static_cast<int>(offset) + index * static_cast<int>(bytes));
  }
  __device__ const std::uint8_t* key(int m) const {
    return at(window.map.keys, m * n_key_heads + key_head, window.map.key_bytes);
  }
  __device__ const std::uint8_t* value(int m) const {
    return at(window.map.values, m * n_value_heads + head, window.map.value_bytes);
  }
  __device__ const std::uint8_t* gate_of(int m) const {
    return at(window.map.gates, m * n_value_heads + head, window.map.gate_bytes);
  }
  __device__ const float* total() const {
    return reinterpret_cast<const float*>(at(window.map.totals, head, 4 * K));
  }
  /// Gates are decay factors, and a total of their logs is kept; otherwise they are log decays.
  __device__ bool factors() const {
    return gate == Gate::kChannel && window.records == Records::kBf16;
  }
  __device__ bool wide_gates() const {  // f32, not f16
    return gate == Gate::kScalar ? window.records != Records::kInt8
                                 : window.records == Records::kF32;
  }
  /// Gate i of record m as stored.
  __device__ float gate_value(int m, int i) const {
    if (wide_gates()) return reinterpret_cast<const float*>(gate_of(m))[i];
    return load_half(gate_of(m) + 2 * i);
  }
  /// The decay that a reader will see of a gate whose log decay is g.
  __device__ float stored_decay(float g) const {
    if (factors()) return half_bits_to_float(float_to_half_bits(expf(g)));
    const float log = clamp_log(g);
    return expf(wide_gates() ? log : half_bits_to_float(float_to_half_bits(log)));
  }
};

}  // namespace statepack::cuda
