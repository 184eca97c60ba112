#include "eval/forced.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "delta/step.hpp"
#include "runtime/logits.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kFirstBucket = 64;
constexpr std::int64_t kSegment = 512;  // of prefill, bounds the logits in memory
// The tokens are known, so a stretch of each window goes through the layers at once: weights and
// attention cache are read once a stretch. At most this many tokens, and fewer, down to one, where
// their logits would take more bytes than these.
constexpr std::int64_t kStretch = 64;
constexpr std::int64_t kLogitBytes = std::int64_t{64} << 20;

// One scheme of the lockstep.
struct Lane {
  std::unique_ptr<StatePool> pool;
  std::vector<std::unique_ptr<KvCache>> caches;  ///< [windows]
  std::vector<std::int64_t> slots;               ///< [windows]
  std::vector<DecodeRow> rows;                   ///< [windows][tokens of a stretch]
  std::vector<bool> failed;                      ///< [windows]
};

Result<Lane> make_lane(const Model& model, const std::shared_ptr<const CompiledScheme>& scheme,
                       std::int64_t n_windows) {
  Lane lane;
  PoolConfig config;
  config.n_slots = n_windows;
  config.conv_floats = model.config().conv_floats();
  SP_ASSIGN_OR_RETURN(lane.pool, StatePool::create(scheme, config));
  for (std::int64_t w = 0; w < n_windows; ++w) {
    SP_ASSIGN_OR_RETURN(const std::int64_t slot, lane.pool->alloc());
    lane.caches.push_back(model.new_kv_cache());
    lane.slots.push_back(slot);
  }
  lane.failed.resize(static_cast<std::size_t>(n_windows));
  return lane;
}

// What the reference predicts at one position of one window.
struct ReferenceRow {
  LogitPeak best;
  double sum = 0;      ///< of the weights
  double log_sum = 0;  ///< log sum exp of the logits
};

struct RowScore {
  double nll = 0, kl = 0;
  bool agree = false;
  bool valid = false;
};

double norm_squared(std::span<const float> x) {
  double sum = 0;
  for (const float v : x) sum += static_cast<double>(v) * static_cast<double>(v);
  return sum;
}

double distance_squared(std::span<const float> x, std::span<const float> y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double d = static_cast<double>(x[i]) - static_cast<double>(y[i]);
    sum += d * d;
  }
  return sum;
}

void add_by_head(std::int64_t n, const std::vector<double>& by_head, StateDrift* drift) {
  if (n == 0) return;
  drift->by_head.resize(by_head.size());
  for (std::size_t h = 0; h < by_head.size(); ++h) drift->by_head[h] += by_head[h];
  drift->n_by_head += n;
}

// Compares the states of window `w` of two lanes, layer by layer and head by head.
Status add_drift(const Lane& reference, const Lane& lane, std::size_t w, ThreadPool& threads,
                 StateDrift* drift) {
  std::vector<float> a;
  std::vector<float> b;
  std::vector<double> by_head;
  const int n_layers = static_cast<int>(lane.pool->scheme().layers().size());
  for (int l = 0; l < n_layers; ++l) {
    const auto n = static_cast<std::size_t>(
        lane.pool->scheme().layers()[static_cast<std::size_t>(l)].shape.n_values());
    a.resize(n);
    b.resize(n);
    SP_RETURN_IF_ERROR(
        restore_dense(reference.pool->layer(l), reference.slots[w], a.data(), threads));
    SP_RETURN_IF_ERROR(restore_dense(lane.pool->layer(l), lane.slots[w], b.data(), threads));
    const double norm = norm_squared(a);
    if (norm > 0) drift->relative_error += std::sqrt(distance_squared(a, b) / norm);
    ++drift->n;
    const LayerShape& shape = lane.pool->scheme().layers()[static_cast<std::size_t>(l)].shape;
    const auto n_head = static_cast<std::size_t>(shape.K) * static_cast<std::size_t>(shape.V);
    for (std::size_t at = 0; at < n; at += n_head) {
      const std::span<const float> x = std::span(a).subspan(at, n_head);
      const double of_head = norm_squared(x);
      const double error = distance_squared(x, std::span(b).subspan(at, n_head));
      by_head.push_back(of_head > 0 ? std::sqrt(error / of_head) : 0);
    }
  }
  add_by_head(1, by_head, drift);
  return {};
}

Status check_windows(std::span<const std::int32_t> tokens, const ForcedOptions& options,
                     std::int64_t end_window) {
  if (options.context < 2) {
    return {Code::kInvalidArgument,
            fmt::format("a context of {} tokens predicts nothing; it takes at least 2",
                        options.context)};
  }
  if (end_window > std::ssize(tokens) / options.context) {
    return {Code::kInvalidArgument,
            fmt::format("the text has {} tokens, which is {} windows of {}; {} were asked for",
                        tokens.size(), std::ssize(tokens) / options.context, options.context,
                        end_window)};
  }
  return {};
}

}  // namespace

PositionBucket ForcedResult::total() const {
  PositionBucket sum;
  for (const PositionBucket& b : buckets) {
    sum.end = std::max(sum.end, b.end);
    sum.n += b.n;
    sum.nll += b.nll;
    sum.reference_nll += b.reference_nll;
    sum.excess_squares += b.excess_squares;
    sum.kl += b.kl;
    sum.kl_max = std::max(sum.kl_max, b.kl_max);
    sum.n_agree += b.n_agree;
  }
  return sum;
}

ForcedResult empty_forced_result(std::int64_t context) {
  ForcedResult result;
  const std::int64_t last = context - 1;
  std::int64_t begin = 0;
  std::int64_t end = kFirstBucket;
  std::int64_t octave = kFirstBucket;
  while (begin < last) {
    PositionBucket bucket;
    bucket.begin = begin;
    bucket.end = std::min(end, last);
    result.buckets.push_back(bucket);
    begin = end;
    if (begin == 2 * octave) octave = begin;
    end = begin + octave / 4;
  }
  for (std::int64_t p = 4 * kFirstBucket; p <= context; p *= 4)
    result.drift.push_back({p, 0, 0, 0, {}});
  return result;
}

Status forced_decode(Model& model, ThreadPool& threads,
                     std::span<const std::shared_ptr<const CompiledScheme>> schemes,
                     std::span<const std::int32_t> tokens, const ForcedOptions& options,
                     std::int64_t first_window, std::int64_t n_windows,
                     std::span<ForcedResult> results, Progress* progress) {
  SP_RETURN_IF_ERROR(check_windows(tokens, options, first_window + n_windows));
  const std::int64_t stride = model.config().vocab;
  const auto n_vocab = static_cast<std::size_t>(options.n_vocab);
  const auto n_rows = static_cast<std::size_t>(n_windows);

  std::vector<Lane> lanes;
  for (const auto& scheme : schemes) {
    SP_ASSIGN_OR_RETURN(Lane lane, make_lane(model, scheme, n_windows));
    lanes.push_back(std::move(lane));
  }
  std::vector<DecodeGroup> groups(lanes.size());
  std::vector<ForcedResult> sums(schemes.size(), empty_forced_result(options.context));
  // A power of two, so that stretches end where states are compared.
  const auto all_rows = static_cast<std::int64_t>(schemes.size() * n_rows);
  std::int64_t stretch = kStretch;
  while (stretch > 1 && stretch * all_rows * stride * std::int64_t{4} > kLogitBytes) stretch /= 2;
  std::vector<float> logits;  // [lane][window][token][vocab]
  std::vector<float> weights(n_rows * n_vocab);
  std::vector<float> exps(static_cast<std::size_t>(threads.n_threads()) * n_vocab);
  std::vector<ReferenceRow> reference(n_rows);
  std::vector<RowScore> scores(n_rows);

  std::size_t bucket = 0;
  std::int64_t begin = 0;  // of the stretch
  std::int64_t n_in_stretch = 0;
  for (std::int64_t t = 0; t + 1 < options.context; ++t) {
    if (interrupted()) return {Code::kInterrupted, "stopped on request during the forced decode"};
    while (t >= sums[0].buckets[bucket].end) ++bucket;
    if (t == begin + n_in_stretch) {
      begin = t;
      n_in_stretch = std::min(stretch, options.context - 1 - t);
      for (std::size_t s = 0; s < lanes.size(); ++s) {
        Lane& lane = lanes[s];
        lane.rows.clear();
        for (std::size_t w = 0; w < n_rows; ++w) {
          const std::int64_t window = first_window + static_cast<std::int64_t>(w);
          for (std::int64_t i = t; i < t + n_in_stretch; ++i) {
            const auto at = static_cast<std::size_t>(window * options.context + i);
            lane.rows.push_back({lane.slots[w], lane.caches[w].get(), tokens[at], i});
          }
        }
        groups[s] = {lane.pool.get(), lane.rows};
      }
      logits.resize(static_cast<std::size_t>(all_rows * n_in_stretch * stride));
      // All lanes at once: the weights are read once, whatever the number of schemes.
      SP_RETURN_IF_ERROR(model.decode_groups(groups, logits.data()));
      for (Lane& lane : lanes) {
        for (const std::int64_t slot : lane.slots) {
          lane.pool->set_n_tokens(slot, begin + n_in_stretch);
        }
      }
    }
    // Logits of this token: the first window's of the first lane, and from window to window.
    const float* const reference_logits = logits.data() + (t - begin) * stride;
    const std::int64_t row_stride = n_in_stretch * stride;
    for (std::size_t s = 0; s < lanes.size(); ++s) {
      Lane& lane = lanes[s];
      const float* const lane_logits =
          reference_logits + static_cast<std::int64_t>(s) * n_windows * row_stride;
      threads.parallel_for(n_windows, [&](std::int64_t i, int worker) {
        const auto w = static_cast<std::size_t>(i);
        const std::int64_t window = first_window + i;
        const auto target = static_cast<std::size_t>(
            tokens[static_cast<std::size_t>(window * options.context + t + 1)]);
        const std::span<const float> x(reference_logits + i * row_stride, n_vocab);
        const std::span<const float> y(lane_logits + i * row_stride, n_vocab);
        const std::span<float> p(weights.data() + w * n_vocab, n_vocab);
        RowScore& score = scores[w];
        score = {};
        const LogitPeak best = peak(y);
        if (!best.finite) return;
        double log_sum = 0;
        if (s == 0) {
          ReferenceRow& row = reference[w];
          row.best = best;
          row.sum = exp_sum(y, best.value, 1.0F, p.data());
          row.log_sum = log_sum = static_cast<double>(best.value) + std::log(row.sum);
        } else if (reference[w].best.finite) {
          // KL = sum p (x - y) - lse(x) + lse(y); the other way round would need logs of p.
          float* e = exps.data() + static_cast<std::size_t>(worker) * n_vocab;
          log_sum = static_cast<double>(best.value) + std::log(exp_sum(y, best.value, 1.0F, e));
          score.kl = std::max(0.0, weighted_difference(p, x, y) / reference[w].sum -
                                       reference[w].log_sum + log_sum);
        }
        score.nll = log_sum - static_cast<double>(y[target]);
        score.agree = best.index == reference[w].best.index;
        score.valid = reference[w].best.finite;
      });
      PositionBucket& b = sums[s].buckets[bucket];
      for (std::size_t w = 0; w < n_rows; ++w) {
        if (!scores[w].valid) {
          lane.failed[w] = true;
          continue;
        }
        const std::int64_t window = first_window + static_cast<std::int64_t>(w);
        const auto target = static_cast<std::size_t>(
            tokens[static_cast<std::size_t>(window * options.context + t + 1)]);
        const double reference_nll =
            reference[w].log_sum -
            static_cast<double>(
                reference_logits[w * static_cast<std::size_t>(row_stride) + target]);
        const double excess = scores[w].nll - reference_nll;
        ++b.n;
        b.nll += scores[w].nll;
        b.reference_nll += reference_nll;
        b.excess_squares += excess * excess;
        b.kl += scores[w].kl;
        b.kl_max = std::max(b.kl_max, scores[w].kl);
        b.n_agree += scores[w].agree ? 1 : 0;
      }
    }
    for (std::size_t d = 0; d < sums[0].drift.size(); ++d) {
      if (std::min(sums[0].drift[d].position, options.context - 1) != t + 1) continue;
      for (std::size_t s = 1; s < lanes.size(); ++s) {
        for (std::size_t w = 0; w < n_rows; ++w) {
          if (lanes[s].failed[w] || lanes[0].failed[w]) continue;
          SP_RETURN_IF_ERROR(add_drift(lanes[0], lanes[s], w, threads, &sums[s].drift[d]));
        }
      }
    }
    if (progress != nullptr) progress->advance(n_windows * std::ssize(lanes));
  }

  for (std::size_t s = 0; s < lanes.size(); ++s) {
    ForcedResult& out = results[s];
    out.n_windows += n_windows;
    out.n_failed += std::count(lanes[s].failed.begin(), lanes[s].failed.end(), true);
    const GuardCounts guard = lanes[s].pool->guard_counts();
    out.guard.roundings += guard.roundings;
    out.guard.over += guard.over;
    for (std::size_t i = 0; i < out.buckets.size(); ++i) {
      PositionBucket& to = out.buckets[i];
      const PositionBucket& from = sums[s].buckets[i];
      to.n += from.n;
      to.nll += from.nll;
      to.reference_nll += from.reference_nll;
      to.excess_squares += from.excess_squares;
      to.kl += from.kl;
      to.kl_max = std::max(to.kl_max, from.kl_max);
      to.n_agree += from.n_agree;
    }
    for (std::size_t i = 0; i < out.drift.size(); ++i) {
      out.drift[i].n += sums[s].drift[i].n;
      out.drift[i].relative_error += sums[s].drift[i].relative_error;
      add_by_head(sums[s].drift[i].n_by_head, sums[s].drift[i].by_head, &out.drift[i]);
    }
  }
  return {};
}

Result<Perplexity> chunked_perplexity(Model& model, std::span<const std::int32_t> tokens,
                                      const ForcedOptions& options, std::int64_t n_windows,
                                      Progress* progress) {
  SP_RETURN_IF_ERROR(check_windows(tokens, options, n_windows));
  const std::int64_t stride = model.config().vocab;
  const auto n_vocab = static_cast<std::size_t>(options.n_vocab);
  std::vector<float> logits(static_cast<std::size_t>(kSegment * stride));
  std::vector<float> exps(n_vocab);
  Perplexity result;
  DenseState state = model.new_dense_state();
  for (std::int64_t w = 0; w < n_windows; ++w) {
    std::fill(state.S.begin(), state.S.end(), 0.0F);
    std::fill(state.conv.begin(), state.conv.end(), 0.0F);
    const std::unique_ptr<KvCache> cache = model.new_kv_cache();
    const std::span<const std::int32_t> window = tokens.subspan(
        static_cast<std::size_t>(w * options.context), static_cast<std::size_t>(options.context));
    for (std::int64_t begin = 0; begin + 1 < options.context; begin += kSegment) {
      if (interrupted()) return Status(Code::kInterrupted, "stopped on request");
      const std::int64_t n = std::min(kSegment, options.context - 1 - begin);
      SP_RETURN_IF_ERROR(model.prefill(
          window.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n)), begin,
          state, *cache, static_cast<int>(n), logits.data()));
      for (std::int64_t i = 0; i < n; ++i) {
        const std::span<const float> row(logits.data() + i * stride, n_vocab);
        const LogitPeak best = peak(row);
        if (!best.finite) {
          return Status(Code::kNotFinite, fmt::format("the logits of window {} at token {} are not "
                                                      "finite; the checkpoint may be damaged",
                                                      w, begin + i));
        }
        const auto target =
            static_cast<std::size_t>(window[static_cast<std::size_t>(begin + i + 1)]);
        result.nll += static_cast<double>(best.value) +
                      std::log(exp_sum(row, best.value, 1.0F, exps.data())) -
                      static_cast<double>(row[target]);
      }
      result.n_tokens += n;
      if (progress != nullptr) progress->advance(n);
    }
    ++result.n_windows;
  }
  return result;
}

}  // namespace statepack
