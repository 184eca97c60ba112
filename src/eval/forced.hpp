// Forced decode: many schemes read the same text token by token, and what each predicts is compared
// with fp32 at every position, without storing logits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/progress.hpp"
#include "model/model.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// Sums over the predictions made at positions [begin, end) of their windows: position t has read
/// t + 1 tokens and predicts the next. Sums of separate runs add up.
struct PositionBucket {
  std::int64_t begin = 0, end = 0;
  std::int64_t n = 0;
  double nll = 0;             ///< nats, of the scheme
  double reference_nll = 0;   ///< of fp32
  double excess_squares = 0;  ///< of nll - reference_nll per token, for its standard error
  double kl = 0;              ///< KL(fp32 || scheme), nats
  double kl_max = 0;
  std::int64_t n_agree = 0;  ///< the most likely token is fp32's
};

/// How far the recurrent states are from fp32's after `position` tokens: sum over windows and
/// layers of |S - S_fp32|_F / |S_fp32|_F.
struct StateDrift {
  std::int64_t position = 0;
  std::int64_t n = 0;
  double relative_error = 0;
  std::int64_t n_by_head = 0;  ///< windows in by_head; fewer than windows in results of older files
  std::vector<double> by_head;  ///< [layer][head], one behind the other: the same sum head by head
};

struct ForcedResult {
  std::int64_t n_windows = 0;
  /// Windows that ended early because the state became non-finite, with the stretch of tokens in
  /// which it did; how long stretches are depends on how many windows and schemes are read
  /// together.
  std::int64_t n_failed = 0;
  std::vector<PositionBucket> buckets;
  std::vector<StateDrift> drift;
  GuardCounts guard;  ///< of all windows, where the scheme's plan has a guard

  PositionBucket total() const;
};

/// Buckets for windows of `context` tokens: [0, 64), then every octave in four parts, so that the
/// last part before 2^n is [7/8 2^n, 2^n). The last bucket ends at `context` - 1: the window's last
/// token is read by no one.
ForcedResult empty_forced_result(std::int64_t context);

struct ForcedOptions {
  std::int64_t context =
      4096;  ///< tokens of a window, at least 2; every window starts from a zero state
  std::int64_t n_vocab = 0;  ///< logits from here on are padding
};

/// Reads windows [first_window, first_window + n_windows) of `tokens` through all schemes at the
/// same time, up to 64 tokens a pass, each state token by token; adds to `results`, one for each
/// scheme. The first scheme is the reference. Memory: for each scheme and window a slot and an
/// attention cache of `context` tokens, and logits of a pass (64 MiB, or one token of every row).
/// Errors: kInvalidArgument (windows past the text), kExhausted, kInterrupted (results untouched).
Status forced_decode(Model& model, ThreadPool& threads,
                     std::span<const std::shared_ptr<const CompiledScheme>> schemes,
                     std::span<const std::int32_t> tokens, const ForcedOptions& options,
                     std::int64_t first_window, std::int64_t n_windows,
                     std::span<ForcedResult> results, Progress* progress);

struct Perplexity {
  std::int64_t n_tokens = 0, n_windows = 0;
  double nll = 0;  ///< sum, nats
};
/// The same text by chunked prefill from a zero state at each window's start: fp32 only, fast.
Result<Perplexity> chunked_perplexity(Model& model, std::span<const std::int32_t> tokens,
                                      const ForcedOptions& options, std::int64_t n_windows,
                                      Progress* progress);

}  // namespace statepack
