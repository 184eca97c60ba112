// Chunked prefill of the delta rule (WY form, chunks of 64 tokens), f32, one sequence and layer.
#pragma once

#include "base/thread_pool.hpp"
#include "statepack/types.hpp"

namespace statepack {

inline constexpr int kPrefillChunk = 64;

/// What one solved chunk of one value head looked like; all pointers are valid during the call.
///   S_tau = exp(G_tau) S_0 + sum_{j<=tau} exp(G_tau - G_j) k_j d_j^T     (tau inside the chunk)
struct ChunkView {
  int layer = 0;  ///< recurrent layer, from 0
  int value_head = 0;
  int n_tokens = 0;           ///< C, the last chunk may be shorter
  std::int64_t position = 0;  ///< of the chunk's first token in its sequence
  const float* q = nullptr;   ///< [C][K] at stride qk_stride; scaled, normalised
  const float* k = nullptr;   ///< [C][K] at stride qk_stride
  std::int64_t qk_stride = 0;
  const float* g = nullptr;  ///< [C][gate_width] at stride g_stride: log decay
  std::int64_t g_stride = 0;
  const float* beta = nullptr;  ///< [C] at stride beta_stride
  std::int64_t beta_stride = 0;
  const float* d = nullptr;         ///< [C][V] corrections, contiguous
  const float* S_before = nullptr;  ///< [K][V]
  const float* S_after = nullptr;   ///< [K][V]
};

/// How the readouts of a stretch of tokens of one layer reach the residual stream: o is divided by
/// its head's RMS, multiplied by `gain`, and goes through the output matrix.
struct ReadoutView {
  int layer = 0;  ///< recurrent layer, from 0
  int n_tokens = 0;
  const float* o = nullptr;     ///< [T, HV, V] before the norm
  const float* gain = nullptr;  ///< [T, HV, V] norm weight times output gate
  float eps = 0;                ///< beside the mean square of o
  /// [HV, V] squared length of what a unit entering the output matrix adds to the stream.
  const float* out_power = nullptr;
  const float* residual = nullptr;  ///< [T, hidden] the stream that the block adds to
  std::int64_t hidden = 0;
};

/// Sees every chunk of every value head, for calibration. Calls for different heads come from
/// different threads at the same time; calls for one (layer, head) come in order.
class ChunkObserver {
 public:
  virtual ~ChunkObserver() = default;
  virtual void on_chunk(const ChunkView& chunk) = 0;
  /// After the chunks of these tokens, from one thread. A model without such blocks never calls it.
  virtual void on_readout(const ReadoutView& view) { (void)view; }
};

/// One sequence, one layer. Strides in floats between tokens.
struct PrefillInput {
  LayerShape shape;
  int layer = 0;
  std::int64_t position = 0;
  int n_tokens = 0;
  const float* q = nullptr;     ///< [T, H, K] scaled, normalised
  const float* k = nullptr;     ///< [T, H, K]
  const float* v = nullptr;     ///< [T, HV, V]
  const float* g = nullptr;     ///< [T, HV, gate_width]
  const float* beta = nullptr;  ///< [T, HV]
  std::int64_t q_stride = 0, k_stride = 0, v_stride = 0, g_stride = 0, beta_stride = 0;
  float* S = nullptr;    ///< [HV][K][V], read and replaced
  float* out = nullptr;  ///< [T, HV, V]
  std::int64_t out_stride = 0;
};

/// Parallel over value heads. Exponents are formed as differences that are <= 0: g = -80 a token is
/// fine. `observer` may be null.
void prefill(const PrefillInput& input, ThreadPool& threads, ChunkObserver* observer);

}  // namespace statepack
