// One token through packed states: the only reader and writer of pages.
//
//   S' = D S_{t-1};  u = beta (v - S'^T k);  S_t = S' + k u^T;  o = S_t^T q
//
// read through page and window without materialising S (window expansion):
//   S_t^T x = Shat^T (Gamma o x) + sum_m (k_m . (D_m o x)) u_m
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/thread_pool.hpp"
#include "scheme/layers.hpp"

namespace statepack {

/// How often a layer's heads were rounded, where its codec has a guard. Counts grow while others
/// read them.
struct GuardCounts {
  std::int64_t roundings = 0;  ///< of one head each
  std::int64_t over = 0;       ///< of them, that cost more than LayerCodec::guard() says
};

/// One layer of a pool as the step sees it. All strides in bytes between consecutive slots.
struct LayerState {
  const CompiledLayer* layer = nullptr;
  const Scheme* scheme = nullptr;
  std::int64_t n_slots = 0;
  std::uint8_t* pages = nullptr;
  std::int64_t page_stride = 0;
  std::uint8_t* windows = nullptr;
  std::int64_t window_stride = 0;
  Cursor* cursors = nullptr;
  std::int64_t cursor_stride = 0;   ///< in bytes
  std::uint32_t* faults = nullptr;  ///< per slot, sticky: non-zero = quarantined
  std::int64_t fault_stride = 0;    ///< in bytes
  std::uint32_t index = 0;          ///< of the recurrent layer, for stochastic rounding
  GuardCounts* guard = nullptr;     ///< of this layer, added to; null: not counted
};

/// The token of every row. q is scaled and, like k, normalised; strides in floats between rows.
struct StepInput {
  int n_rows = 0;                             ///< B
  const std::int64_t* read_slots = nullptr;   ///< [B]
  const std::int64_t* write_slots = nullptr;  ///< [B]; null: write where it was read
  std::int64_t first_valid_slot = 1;  ///< smaller ids are padding: output 0, nothing touched
  const float* q = nullptr;           ///< [B, H, K]
  const float* k = nullptr;           ///< [B, H, K]
  const float* v = nullptr;           ///< [B, HV, V]
  const float* g = nullptr;           ///< [B, HV, gate_width] log decay, <= 0
  const float* beta = nullptr;        ///< [B, HV]
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
  float* out = nullptr;  ///< [B, HV, V]
  std::int64_t out_stride = 0;
  /// [B] absolute token positions; may be null where rounding is not stochastic.
  const std::int64_t* positions = nullptr;
};

/// Runs the step and any flush that falls due. Work is one (row, value head) at a time over
/// `threads`; every result is independent of the other rows, of B, of the thread count and of slot
/// numbers. A row whose slot is quarantined (the one it reads or the one it writes), or becomes so
/// because a value turned non-finite, gets NaN output and its slot is not written; where pages are
/// dense f32, a state whose bound |D||S| + |k||u| leaves f32 counts as non-finite.
///
/// A complete window is rounded from its records as stored; the token that completes it reads the
/// state before that rounding. With period 1, X = D S + k u^T from unrounded k and u is packed.
/// Errors: kInvalidArgument, with nothing done (slot out of range; the same slot written by two
/// rows; a slot that one row reads and another writes; padding on one side of a row only;
/// stochastic rounding without positions).
Status step(const LayerState& state, const StepInput& input, ThreadPool& threads);

/// Rebuilds, rounds and repacks every listed slot whose window is not empty, whatever its fill
/// (before a payload-only snapshot). Boundaries of phase absolute stay where they are. Same
/// guarantees; quarantined slots are passed over. Errors: kInvalidArgument.
Status flush(const LayerState& state, std::span<const std::int64_t> slots, ThreadPool& threads);

/// Hand-over of prefill: dense f32 states S [HV][K][V] of one slot become its page; window emptied,
/// limit set from `n_tokens` (phase absolute: period - n_tokens mod period). A non-finite state
/// quarantines the slot and returns kNotFinite.
Status hand_over(const LayerState& state, std::int64_t slot, const float* S, std::int64_t n_tokens,
                 ThreadPool& threads);

/// The instruction set whose kernels serve steps on this machine, as Highway names it: "AVX3", say.
std::string_view simd_target();

/// Materialises the state that later tokens see (page and window) as dense f32 [HV][K][V].
Status restore_dense(const LayerState& state, std::int64_t slot, float* S, ThreadPool& threads);

}  // namespace statepack
