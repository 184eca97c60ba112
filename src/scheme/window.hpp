// The open window of one layer and slot: records (k, u, gate) in their storage format.
//
// Keys are kept once per key head, corrections and gates once per value head. Gates are kept as the
// log decay g_m of each record; the decay between record m and now is exp of a sum of later g, never
// a difference of running totals (which lose their digits on fast-decaying heads).
#pragma once

#include <cstdint>

#include "statepack/scheme.hpp"
#include "statepack/status.hpp"
#include "statepack/types.hpp"

namespace statepack {

/// Where everything lies in a layer's window block, and how large it is. All offsets in bytes.
class WindowLayout {
 public:
  WindowLayout() = default;
  /// `capacity` records; 0 when the scheme rounds at every token (no block at all).
  WindowLayout(const LayerShape& shape, Records records, RecordMode mode, int capacity);

  int capacity() const { return capacity_; }
  Records records() const { return records_; }
  RecordMode mode() const { return mode_; }
  std::int64_t n_bytes() const { return n_bytes_; }  ///< a multiple of 16

  /// Stores record m of one key head / value head. `k` [K], `value` [V] (u, or raw v in mode V), `g`
  /// [gate_width], beta (mode V only).
  void store_key(std::uint8_t* block, int m, int key_head, const float* k) const;
  void store_value(std::uint8_t* block, int m, int value_head, const float* value, const float* g,
                   float beta) const;
  /// Reads record m back as f32: what later tokens see.
  void load_key(const std::uint8_t* block, int m, int key_head, float* k) const;
  void load_value(const std::uint8_t* block, int m, int value_head, float* value) const;
  /// Log decay [gate_width] of record m; -inf never appears (f16 logs are clamped to -60000).
  void load_gate(const std::uint8_t* block, int m, int value_head, float* g) const;
  float load_beta(const std::uint8_t* block, int m, int value_head) const;

 private:
  LayerShape shape_;
  Records records_ = Records::kBf16;
  RecordMode mode_ = RecordMode::kU;
  int capacity_ = 0;
  std::int64_t n_bytes_ = 0;
  // Strides and offsets, filled by the constructor.
  std::int64_t key_bytes_ = 0, value_bytes_ = 0, gate_bytes_ = 0, beta_bytes_ = 0;
  std::int64_t key_offset_ = 0, value_offset_ = 0, gate_offset_ = 0, beta_offset_ = 0;
  std::int64_t total_offset_ = 0;  ///< per-channel gates: running f32 sum of exact g [HV][K]
};

}  // namespace statepack
