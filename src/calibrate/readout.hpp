// What an error in a state costs: how all later queries see it (the observability Gramian W), and
// what the readouts do to the residual stream (the column sensitivity s).
//
// An error eps made in S after token t changes the readout of a later token r by eps^T g_(t,r),
// with g_(t,r) = A_(t+1)^T ... A_r^T q_r and A = (I - beta k k^T) D. Over all later tokens and
// value columns it costs  sum_j s_j eps_j^T W_t eps_j,  W_t = sum_r g_(t,r) g_(t,r)^T.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.hpp"
#include "calibrate/collector.hpp"
#include "delta/prefill.hpp"
#include "statepack/types.hpp"

namespace statepack {

/// The tokens of one head of a sequence. Strides in floats between tokens.
struct HeadTokens {
  int K = 0;
  std::int64_t n_tokens = 0;
  const float* q = nullptr;  ///< scaled
  const float* k = nullptr;  ///< normalised
  std::int64_t qk_stride = 0;
  const float* g = nullptr;  ///< log decay, of the head or [K]
  std::int64_t g_stride = 0;
  Gate gate = Gate::kScalar;
  const float* beta = nullptr;
  std::int64_t beta_stride = 0;
};

/// Tokens between two samples of W, and of a chunk of the backward pass.
inline constexpr int kGramianInterval = 16;

/// Adds W_t of t = 16, 32, ... <= last_token (counted from 1) to sum [K][K]; returns how many. One
/// pass backwards in chunks, f64: with P_C = gamma (I - K_C^T Y) for the product of a chunk's A and
/// G the rows g_(t,r)^T inside it,
///   W_t = P_C^T W_(t+C) P_C + G^T G
/// costs 4 C K^2 multiply-adds a chunk and no loop over tokens that touches W. Gates of channels do
/// not factor out of P_C; they take W back token by token.
std::int64_t add_gramians(const HeadTokens& tokens, std::int64_t last_token, double* sum);

/// Sums W and s over segments of prefill, each from a zero state.
///
/// Memory: the tokens of one segment, 4 T (2 H K + 2 HV) bytes a layer, and 8 HV (K^2 + V) bytes a
/// layer and domain. Sums are added up in segment order, so results do not depend on threads.
class ReadoutCollector : public SegmentObserver {
 public:
  ReadoutCollector(const std::vector<LayerShape>& shapes, int n_domains,
                   std::int64_t segment_tokens, ThreadPool& threads);

  void begin_segment(int domain, std::int64_t first_update) override;
  void on_chunk(const ChunkView& chunk) override;
  void on_readout(const ReadoutView& view) override;
  /// Runs the backward passes, one head a task. The last quarter of a segment is no sample: what
  /// reads it lies outside. Errors: kNotFinite.
  Status end_segment() override;

  /// Mean W [K][K] of a value head over a domain.
  std::vector<double> gramian(int layer, int head, int domain) const;
  /// s [HV * V] of a domain: the mean square of what a unit error in a readout adds to the residual
  /// stream, relative to the stream's own mean square; the output norm's divisor is held fixed.
  std::vector<double> sensitivity(int layer, int domain) const;
  /// Mean log decay of a head, over all domains and its channels.
  double log_decay(int layer, int head) const;

 private:
  struct Domain {
    std::vector<double> W;         // [HV][K][K]
    std::int64_t n_gramians = 0;   // in each head
    std::vector<double> readout;   // [HV][V] sum of gain^2 / (mean o^2 + eps) out_power
    double residual = 0;           // sum of squares
    std::int64_t n_residuals = 0;  // values summed
    std::int64_t n_readouts = 0;   // tokens
    std::int64_t hidden = 0;
  };
  struct Layer {
    LayerShape shape;
    std::vector<float> q, k;             // [T][H][K] of this segment
    std::vector<float> g, beta;          // [T][HV][gate_width] and [T][HV]
    std::vector<std::int64_t> n_tokens;  // [HV] seen of this segment
    std::vector<Domain> domains;
    std::vector<double> log_decay;  // [HV] sums
    std::int64_t n_decays = 0;
  };

  std::int64_t segment_tokens_;
  ThreadPool& threads_;
  std::vector<Layer> layers_;
  int domain_ = 0;
};

}  // namespace statepack
