// The open window of one layer and slot: records (k, u, gate) in their storage format.
//
// Keys are kept once per key head, corrections and gates once per value head. Gates are kept as the
// log decay g_m of each record; the decay between record m and now is exp of a sum of later g,
// never a difference of running totals (which lose their digits on fast-decaying heads).
// Per-channel gates beside bf16 records are kept as the factors exp(g_m) in f16, whose products are
// formed backwards, and the boundary's own decay as the running f32 sum of the exact g since the
// window opened.
//
//   records  k              u or v         scalar g                per-channel g      beta (mode v)
//   f32      f32            f32            f32                     f32                f32
//   bf16     bf16           bf16           f32                     f16 factor         f32
//   int8     int8, f16 s    int8, f16 s    f16                     f16                f16
//   mixed    4 bits, f16 s  bf16           f32 (f16 in mode v)     f16                f16
//
// s is one scale a vector, absmax / L rounded to f16 (L 127, 7), codes rounded to nearest even. Two
// 4-bit codes a byte, even index in the low nibble, two's complement.
#pragma once

#include <cstdint>

#include "statepack/scheme.hpp"
#include "statepack/status.hpp"
#include "statepack/types.hpp"

namespace statepack {

/// Bytes of a window block by what they hold.
struct WindowBytes {
  std::int64_t keys = 0;  ///< codes or values of k
  std::int64_t key_scales = 0;
  std::int64_t values = 0;  ///< codes or values of u (v in mode V)
  std::int64_t value_scales = 0;
  std::int64_t gates = 0;
  std::int64_t betas = 0;
  std::int64_t totals = 0;  ///< running sums of exact g
  std::int64_t padding = 0;
  std::int64_t total() const {
    return keys + key_scales + values + value_scales + gates + betas + totals + padding;
  }
};

/// The offsets of a window block, for readers that are no WindowLayout. Vector (m, head) of a kind
/// starts at offset + (m * heads + head) * bytes; a scale lies behind its codes.
struct WindowMap {
  std::int64_t keys = 0, values = 0, gates = 0, betas = 0, totals = 0;
  std::int64_t key_bytes = 0, value_bytes = 0, gate_bytes = 0, beta_bytes = 0;  ///< 0: not kept
};

/// Where everything lies in a layer's window block, and how large it is. All offsets in bytes.
class WindowLayout {
 public:
  WindowLayout() = default;
  /// `capacity` records; 0 when the scheme rounds at every token (no block at all).
  WindowLayout(const LayerShape& shape, Records records, RecordMode mode, int capacity);

  const LayerShape& shape() const { return shape_; }
  int capacity() const { return capacity_; }
  Records records() const { return records_; }
  RecordMode mode() const { return mode_; }
  std::int64_t n_bytes() const { return bytes_.total(); }  ///< a multiple of 16
  const WindowBytes& parts() const { return bytes_; }
  WindowMap map() const {
    return {key_offset_, value_offset_, gate_offset_, beta_offset_, total_offset_,
            key_bytes_,  value_bytes_,  gate_bytes_,  beta_bytes_};
  }
  /// Gates are stored as f16 factors: use load_factor.
  bool keeps_factors() const;
  /// The decay since the window opened is kept apart, as load_total.
  bool keeps_total() const { return bytes_.totals > 0; }

  /// Stores record m of one key head / value head. `k` [K], `value` [V] (u, or raw v in mode V),
  /// `g` [gate_width], beta (mode V only). Records are stored in order: m = 0 opens the window.
  void store_key(std::uint8_t* block, int m, int key_head, const float* k) const;
  void store_value(std::uint8_t* block, int m, int value_head, const float* value, const float* g,
                   float beta) const;
  /// Reads record m back as f32: what later tokens see.
  void load_key(const std::uint8_t* block, int m, int key_head, float* k) const;
  void load_value(const std::uint8_t* block, int m, int value_head, float* value) const;
  /// Log decay [gate_width] of record m, >= -60000 (whose exp is 0): -inf never appears.
  void load_gate(const std::uint8_t* block, int m, int value_head, float* g) const;
  /// Where keeps_factors(): the stored decay factors exp(g) [gate_width] of record m.
  void load_factor(const std::uint8_t* block, int m, int value_head, float* a) const;
  /// Where keeps_total(): the sum of the exact g [gate_width] of all records stored so far.
  void load_total(const std::uint8_t* block, int value_head, float* total) const;
  float load_beta(const std::uint8_t* block, int m, int value_head) const;
  /// Asks memory for record m of all heads, which a reader will soon want.
  void prefetch(const std::uint8_t* block, int m) const;

 private:
  std::int64_t key_at(int m, int key_head) const;
  std::int64_t value_at(int m, int value_head) const;
  std::int64_t gate_at(int m, int value_head) const;
  std::int64_t beta_at(int m, int value_head) const;

  LayerShape shape_;
  Records records_ = Records::kBf16;
  RecordMode mode_ = RecordMode::kU;
  int capacity_ = 0;
  WindowBytes bytes_;
  // Of one vector, its scale included, and where the first one lies.
  std::int64_t key_bytes_ = 0, value_bytes_ = 0, gate_bytes_ = 0, beta_bytes_ = 0;
  std::int64_t key_offset_ = 0, value_offset_ = 0, gate_offset_ = 0, beta_offset_ = 0;
  std::int64_t total_offset_ = 0;
};

}  // namespace statepack
