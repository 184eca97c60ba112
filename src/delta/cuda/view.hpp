// What kernels see of a layer, a pool and a token: plain values and device pointers.
//
// Offsets come from the layer's codec (codec/page_map.hpp) and window (scheme/window.hpp), so pages
// and windows are byte for byte those of the CPU and move between the two freely.
#pragma once

#include <cstdint>

#include "codec/page_map.hpp"
#include "scheme/layers.hpp"

namespace statepack::cuda {

// A warp works on 16 key rows at a time, and has a lane for every 4 value columns.
inline constexpr int kWarpRows = 16;
inline constexpr int kLaneColumns = 4;
inline constexpr int kMaxWidth = 128;  ///< of K and of V
inline constexpr int kMaxRecords = 32;
inline constexpr int kMaxRank = 8;

struct CodecView {
  const HeadMap* heads = nullptr;  // [HV]
  const RowMap* rows = nullptr;    // [HV][K]
  const float* start = nullptr;    // [rank][V]
  std::int64_t high_bits = 0, compensators = 0;
  int group = 0, tile = 0, rank = 0, rounds = 0;
  bool affine = false, f16_scales = false;
};

struct WindowView {
  WindowMap map;
  Records records = Records::kBf16;
};

struct LayerView {
  int n_key_heads = 0, n_value_heads = 0, K = 0, V = 0;
  int heads_per_key = 1;  // value heads of a key head
  std::uint32_t heads_per_key_inverse =
      0;  // ceil(2^32 / heads_per_key): dividing takes 35 instructions
  CodecView codec;
  WindowView window;
  int period = 1;
  bool absolute_phase = false, beta_bf16 = false;
};

/// Slots of one layer in device memory. Strides in bytes between slots; pages and windows start at
/// multiples of 16.
struct PoolView {
  std::uint8_t* pages = nullptr;
  std::uint8_t* windows = nullptr;
  Cursor* cursors = nullptr;
  std::uint32_t* faults = nullptr;
  std::int64_t page_stride = 0, window_stride = 0, cursor_stride = 0, fault_stride = 0;
  std::int64_t n_slots = 0;
};

/// The token of every row, in device memory. Strides in floats between rows.
struct TokenView {
  int n_rows = 0;
  const void* read_slots = nullptr;   // [B] int64 or int32; null: `slot` alone
  const void* write_slots = nullptr;  // the same; null: where it was read
  bool wide_slots = true;             // int64
  std::int64_t first_valid_slot = 1;  // smaller ids are padding: output 0, nothing touched
  const float* q = nullptr;           // [B, H, K]
  const float* k = nullptr;           // [B, H, K]
  const float* v = nullptr;           // [B, HV, V]
  const float* g = nullptr;           // [B, HV, gate_width]
  const float* beta = nullptr;        // [B, HV]
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
  bool normalise = false;          // q and k are raw: x rsqrt(sum x^2 + 1e-6), then q K^-1/2
  bool raw_gates = false;          // g and beta hold a and b
  const float* A_log = nullptr;    // [HV]
  const float* dt_bias = nullptr;  // [HV, gate_width]
  float lower_bound = 0;           // of raw gates; 0: unbounded
  float* out = nullptr;            // [B, HV, V]
  std::int64_t out_stride = 0;
};

/// What launches leave for one another. All zero between steps: every user puts back what it took.
struct WorkView {
  std::uint32_t* tickets = nullptr;  // [max_rows] heads of a row that are done
  std::int32_t* due_rows = nullptr;  // [max_rows]
  std::int32_t* n_due = nullptr;
  std::uint32_t* n_exits = nullptr;
};

/// What one launch of the rewriting kernel does.
enum class Rewrite : std::uint8_t {
  kEveryRow,  ///< every row of a step, due or not
  kDueRows,   ///< the rows of a step that the step kernel has listed
  kFlush,     ///< open windows of read_slots [n_rows]
  kHandOver,  ///< dense [HV][K][V] becomes the page of `slot`
  kRestore,   ///< the reverse
};

struct LaunchArgs {
  LayerView layer;
  std::int64_t slot = 0;
  PoolView pool;
  TokenView token;
  WorkView work;
  Rewrite rewrite = Rewrite::kEveryRow;
  float* dense = nullptr;  // kHandOver, kRestore
  std::int32_t limit = 0;  // of the cursor after kHandOver
};

}  // namespace statepack::cuda
