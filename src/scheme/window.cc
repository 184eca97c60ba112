#include "scheme/window.hpp"

#include <cmath>
#include <cstring>

#include "base/check.hpp"
#include "base/exp.hpp"
#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "codec/scale.hpp"

namespace statepack {
namespace {

constexpr float kMinLogDecay = -60000.0f;  // a multiple of the f16 spacing there; exp gives 0

float clamp_log(float g) { return g > kMinLogDecay ? g : kMinLogDecay; }

SP_CLONES void to_bf16(const float* x, int n, std::uint8_t* out) {
  for (int i = 0; i < n; ++i) {
    const std::uint16_t h = f32_to_bf16(x[i]);
    std::memcpy(out + 2 * std::int64_t{i}, &h, 2);
  }
}

SP_CLONES void from_bf16(const std::uint8_t* in, int n, float* x) {
  for (int i = 0; i < n; ++i) {
    std::uint16_t h;
    std::memcpy(&h, in + 2 * std::int64_t{i}, 2);
    x[i] = bf16_to_f32(h);
  }
}

SP_CLONES void from_f16(const std::uint8_t* in, int n, float* x) {
  for (int i = 0; i < n; ++i) {
    std::uint16_t h;
    std::memcpy(&h, in + 2 * std::int64_t{i}, 2);
    x[i] = f16_to_f32(h);
  }
}

void to_f16(const float* x, int n, std::uint8_t* out) {
  for (int i = 0; i < n; ++i) {
    const std::uint16_t h = f32_to_f16(x[i]);
    std::memcpy(out + 2 * std::int64_t{i}, &h, 2);
  }
}

/// max |x[i]|, by the integer order of non-negative floats: no order of summation to fix.
SP_CLONES float peak(const float* x, int n) {
  std::int32_t top = 0;
  for (int i = 0; i < n; ++i) {
    std::int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  return std::bit_cast<float>(top);
}

SP_CLONES void quantise(const float* x, int n, float scale, float levels, std::uint8_t* codes) {
  for (int i = 0; i < n; ++i) codes[i] = round_code_u8(x[i] / scale, -levels, levels);
}

SP_CLONES void dequantise(const std::uint8_t* codes, int n, float scale, float* x) {
  for (int i = 0; i < n; ++i) x[i] = scale * static_cast<float>(static_cast<std::int8_t>(codes[i]));
}

float store_scale(const float* x, int n, float levels, std::uint8_t* at) {
  const std::uint16_t stored = encode_scale(peak(x, n) / levels);
  std::memcpy(at, &stored, 2);
  return f16_to_f32(stored);
}

float load_half(const std::uint8_t* at) {
  std::uint16_t h;
  std::memcpy(&h, at, 2);
  return f16_to_f32(h);
}

// One vector behind its codes' scale: n codes, then f16.
void store_int8(const float* x, int n, std::uint8_t* at) {
  quantise(x, n, store_scale(x, n, 127, at + n), 127, at);
}

void load_int8(const std::uint8_t* at, int n, float* x) { dequantise(at, n, load_half(at + n), x); }

void store_int4(const float* x, int n, std::uint8_t* at) {
  const int n_bytes = (n + 1) / 2;
  const float scale = store_scale(x, n, 7, at + n_bytes);
  for (int i = 0; i < n_bytes; ++i) {
    const std::uint8_t low = round_code_u8(x[2 * i] / scale, -7, 7);
    const std::uint8_t high =
        2 * i + 1 < n ? round_code_u8(x[2 * i + 1] / scale, -7, 7) : std::uint8_t{0};
    at[i] = static_cast<std::uint8_t>((low & 0xf) | (high << 4));
  }
}

SP_CLONES void unpack_int4(const std::uint8_t* codes, int n_pairs, float scale, float* x) {
  for (int i = 0; i < n_pairs; ++i) {  // (n ^ 8) - 8 extends the sign of a nibble
    x[2 * i] = scale * static_cast<float>(((codes[i] & 0xf) ^ 8) - 8);
    x[2 * i + 1] = scale * static_cast<float>(((codes[i] >> 4) ^ 8) - 8);
  }
}

void load_int4(const std::uint8_t* at, int n, float* x) {
  const float scale = load_half(at + (n + 1) / 2);
  unpack_int4(at, n / 2, scale, x);
  if (n % 2 == 1) x[n - 1] = scale * static_cast<float>(((at[n / 2] & 0xf) ^ 8) - 8);
}

}  // namespace

WindowLayout::WindowLayout(const LayerShape& shape, Records records, RecordMode mode, int capacity)
    : shape_(shape), records_(records), mode_(mode), capacity_(capacity) {
  if (capacity == 0) return;
  const std::int64_t K = shape.K, V = shape.V, H = shape.n_key_heads, HV = shape.n_value_heads;
  std::int64_t key_scale = 0, value_scale = 0;
  switch (records) {
    case Records::kF32:
      key_bytes_ = 4 * K;
      value_bytes_ = 4 * V;
      break;
    case Records::kBf16:
      key_bytes_ = 2 * K;
      value_bytes_ = 2 * V;
      break;
    case Records::kInt8:
      key_scale = value_scale = 2;
      key_bytes_ = K + key_scale;
      value_bytes_ = V + value_scale;
      break;
    case Records::kMixed:
      key_scale = 2;
      key_bytes_ = (K + 1) / 2 + key_scale;
      value_bytes_ = 2 * V;
      break;
  }
  const bool v_mode = mode == RecordMode::kV;
  const bool coarse = records == Records::kInt8 || records == Records::kMixed;
  if (shape.gate == Gate::kScalar) {
    gate_bytes_ = records == Records::kInt8 || (records == Records::kMixed && v_mode) ? 2 : 4;
  } else {
    gate_bytes_ = (records == Records::kF32 ? 4 : 2) * K;
  }
  beta_bytes_ = !v_mode ? 0 : coarse ? 2 : 4;
  // Replay (mode V) decays the state record by record and needs no total.
  const std::int64_t total_bytes = keeps_factors() && !v_mode ? 4 * K : 0;

  const std::int64_t n = capacity;
  bytes_.keys = n * H * (key_bytes_ - key_scale);
  bytes_.key_scales = n * H * key_scale;
  bytes_.values = n * HV * (value_bytes_ - value_scale);
  bytes_.value_scales = n * HV * value_scale;
  bytes_.gates = n * HV * gate_bytes_;
  bytes_.betas = n * HV * beta_bytes_;
  bytes_.totals = HV * total_bytes;

  total_offset_ = 0;  // first, where 16-byte aligned
  gate_offset_ = total_offset_ + bytes_.totals;
  beta_offset_ = gate_offset_ + bytes_.gates;
  value_offset_ = beta_offset_ + bytes_.betas;
  key_offset_ = value_offset_ + bytes_.values + bytes_.value_scales;
  const std::int64_t used = key_offset_ + bytes_.keys + bytes_.key_scales;
  bytes_.padding = (16 - used % 16) % 16;
}

bool WindowLayout::keeps_factors() const {
  return shape_.gate == Gate::kChannel && records_ == Records::kBf16;
}

std::int64_t WindowLayout::key_at(int m, int key_head) const {
  return key_offset_ + (std::int64_t{m} * shape_.n_key_heads + key_head) * key_bytes_;
}
std::int64_t WindowLayout::value_at(int m, int value_head) const {
  return value_offset_ + (std::int64_t{m} * shape_.n_value_heads + value_head) * value_bytes_;
}
std::int64_t WindowLayout::gate_at(int m, int value_head) const {
  return gate_offset_ + (std::int64_t{m} * shape_.n_value_heads + value_head) * gate_bytes_;
}
std::int64_t WindowLayout::beta_at(int m, int value_head) const {
  return beta_offset_ + (std::int64_t{m} * shape_.n_value_heads + value_head) * beta_bytes_;
}

void WindowLayout::store_key(std::uint8_t* block, int m, int key_head, const float* k) const {
  std::uint8_t* at = block + key_at(m, key_head);
  switch (records_) {
    case Records::kF32:
      std::memcpy(at, k, static_cast<std::size_t>(key_bytes_));
      break;
    case Records::kBf16:
      to_bf16(k, shape_.K, at);
      break;
    case Records::kInt8:
      store_int8(k, shape_.K, at);
      break;
    case Records::kMixed:
      store_int4(k, shape_.K, at);
      break;
  }
}

void WindowLayout::load_key(const std::uint8_t* block, int m, int key_head, float* k) const {
  const std::uint8_t* at = block + key_at(m, key_head);
  switch (records_) {
    case Records::kF32:
      std::memcpy(k, at, static_cast<std::size_t>(key_bytes_));
      break;
    case Records::kBf16:
      from_bf16(at, shape_.K, k);
      break;
    case Records::kInt8:
      load_int8(at, shape_.K, k);
      break;
    case Records::kMixed:
      load_int4(at, shape_.K, k);
      break;
  }
}

void WindowLayout::store_value(std::uint8_t* block, int m, int value_head, const float* value,
                               const float* g, float beta) const {
  std::uint8_t* at = block + value_at(m, value_head);
  switch (records_) {
    case Records::kF32:
      std::memcpy(at, value, static_cast<std::size_t>(value_bytes_));
      break;
    case Records::kBf16:
    case Records::kMixed:
      to_bf16(value, shape_.V, at);
      break;
    case Records::kInt8:
      store_int8(value, shape_.V, at);
      break;
  }

  std::uint8_t* gate = block + gate_at(m, value_head);
  const int width = shape_.gate_width();
  if (keeps_factors()) {
    for (int i = 0; i < width; ++i) {
      const std::uint16_t h = f32_to_f16(exp_f32(g[i]));
      std::memcpy(gate + 2 * std::int64_t{i}, &h, 2);
    }
  } else if (gate_bytes_ == 4 * std::int64_t{width}) {
    for (int i = 0; i < width; ++i) {
      const float clamped = clamp_log(g[i]);
      std::memcpy(gate + 4 * std::int64_t{i}, &clamped, 4);
    }
  } else {
    for (int i = 0; i < width; ++i) {
      const std::uint16_t h = f32_to_f16(clamp_log(g[i]));
      std::memcpy(gate + 2 * std::int64_t{i}, &h, 2);
    }
  }

  if (keeps_total()) {
    std::uint8_t* total = block + total_offset_ + std::int64_t{value_head} * 4 * shape_.K;
    for (int i = 0; i < width; ++i) {
      float sum = 0;
      if (m > 0) std::memcpy(&sum, total + 4 * std::int64_t{i}, 4);
      sum = clamp_log(sum + g[i]);
      std::memcpy(total + 4 * std::int64_t{i}, &sum, 4);
    }
  }

  if (beta_bytes_ == 4) std::memcpy(block + beta_at(m, value_head), &beta, 4);
  if (beta_bytes_ == 2) to_f16(&beta, 1, block + beta_at(m, value_head));
}

void WindowLayout::load_value(const std::uint8_t* block, int m, int value_head,
                              float* value) const {
  const std::uint8_t* at = block + value_at(m, value_head);
  switch (records_) {
    case Records::kF32:
      std::memcpy(value, at, static_cast<std::size_t>(value_bytes_));
      break;
    case Records::kBf16:
    case Records::kMixed:
      from_bf16(at, shape_.V, value);
      break;
    case Records::kInt8:
      load_int8(at, shape_.V, value);
      break;
  }
}

void WindowLayout::load_gate(const std::uint8_t* block, int m, int value_head, float* g) const {
  const std::uint8_t* gate = block + gate_at(m, value_head);
  const int width = shape_.gate_width();
  if (gate_bytes_ == 4 * std::int64_t{width}) {
    std::memcpy(g, gate, static_cast<std::size_t>(gate_bytes_));
    return;
  }
  from_f16(gate, width, g);
  if (keeps_factors()) {
    for (int i = 0; i < width; ++i) g[i] = clamp_log(std::log(g[i]));
  }
}

void WindowLayout::load_factor(const std::uint8_t* block, int m, int value_head, float* a) const {
  SP_CHECK(keeps_factors(), "these records keep log decays");
  from_f16(block + gate_at(m, value_head), shape_.K, a);
}

void WindowLayout::load_total(const std::uint8_t* block, int value_head, float* total) const {
  SP_CHECK(keeps_total(), "these records keep no running total");
  std::memcpy(total, block + total_offset_ + std::int64_t{value_head} * 4 * shape_.K,
              4 * static_cast<std::size_t>(shape_.K));
}

void WindowLayout::prefetch(const std::uint8_t* block, int m) const {
  constexpr std::int64_t kLine = 64;
  const auto ask = [](const std::uint8_t* at, std::int64_t n_bytes) {
    for (std::int64_t e = 0; e < n_bytes + kLine - 1; e += kLine) __builtin_prefetch(at + e);
  };
  ask(block + key_at(m, 0), key_bytes_ * shape_.n_key_heads);
  ask(block + value_at(m, 0), value_bytes_ * shape_.n_value_heads);
  ask(block + gate_at(m, 0), gate_bytes_ * shape_.n_value_heads);
}

float WindowLayout::load_beta(const std::uint8_t* block, int m, int value_head) const {
  float beta = 0;
  if (beta_bytes_ == 4) std::memcpy(&beta, block + beta_at(m, value_head), 4);
  if (beta_bytes_ == 2) beta = load_half(block + beta_at(m, value_head));
  return beta;
}

}  // namespace statepack
