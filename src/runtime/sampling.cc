#include "runtime/sampling.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "runtime/logits.hpp"

namespace statepack {
namespace {

constexpr float kGreedyBelow = 1e-5F;

// One step of SplitMix64 (Steele, Lea, Flood 2014): a bijection that scatters neighbouring inputs.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Uniform in [0, 1), 53 bits, from counters alone: no state that a batch could share or reorder.
double uniform(std::uint64_t seed, std::uint64_t sequence, std::int64_t position) {
  const std::uint64_t bits = mix(mix(mix(seed) + sequence) + static_cast<std::uint64_t>(position));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

Status out_of_range(std::string_view name, double value, std::string_view range) {
  return {Code::kInvalidArgument, fmt::format("{} is {}; it must be {}", name, value, range)};
}

bool heavier(const SamplerScratch::Candidate& a, const SamplerScratch::Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

}  // namespace

Status SamplingParams::validate() const {
  // Written so that NaN fails every test.
  if (!(temperature >= 0 && temperature <= 100)) {
    return out_of_range("temperature", temperature, "from 0 to 100");
  }
  if (top_k < 0) return out_of_range("top_k", top_k, "0 (off) or more");
  if (!(top_p > 0 && top_p <= 1)) return out_of_range("top_p", top_p, "above 0 and at most 1");
  if (!(min_p >= 0 && min_p <= 1)) return out_of_range("min_p", min_p, "from 0 to 1");
  if (!(repetition_penalty > 0 && repetition_penalty <= 100)) {
    return out_of_range("repetition_penalty", repetition_penalty, "above 0 and at most 100");
  }
  if (!(std::fabs(presence_penalty) <= 100)) {
    return out_of_range("presence_penalty", presence_penalty, "from -100 to 100");
  }
  if (!(std::fabs(frequency_penalty) <= 100)) {
    return out_of_range("frequency_penalty", frequency_penalty, "from -100 to 100");
  }
  if (max_tokens < 1) {
    return out_of_range("max_tokens", static_cast<double>(max_tokens), "1 or more");
  }
  if (logprobs < -1 || logprobs > 100) {
    return out_of_range("logprobs", logprobs, "-1 (off) or from 0 to 100");
  }
  for (const std::string& text : stop) {
    if (text.empty()) {
      return {Code::kInvalidArgument, "a stop string is empty; leave it out"};
    }
  }
  return {};
}

Sampler::Sampler(const SamplingParams& params, std::span<const std::int32_t> prompt)
    : params_(params),
      greedy_(params.temperature < kGreedyBelow || params.top_k == 1),
      has_penalties_(params.repetition_penalty != 1 || params.presence_penalty != 0 ||
                     params.frequency_penalty != 0) {
  if (!has_penalties_) return;
  for (const std::int32_t token : prompt) seen_[token].in_prompt = true;
}

void Sampler::accept(std::int32_t token) {
  if (has_penalties_) ++seen_[token].n_reply;
}

Result<Choice> Sampler::sample(std::span<const float> logits, std::int64_t position,
                               SamplerScratch& scratch) const {
  LogitPeak best = peak(logits);
  if (!best.finite) {
    return Status(Code::kNotFinite,
                  fmt::format("the logits at position {} are not finite", position));
  }
  Choice choice;
  std::span<const float> adjusted = logits;
  const float raw_best = best.value;
  if (has_penalties_) {
    scratch.logits.assign(logits.begin(), logits.end());
    for (const auto& [token, seen] : seen_) {
      if (token < 0 || static_cast<std::size_t>(token) >= logits.size()) continue;
      float& x = scratch.logits[static_cast<std::size_t>(token)];
      x = x > 0 ? x / params_.repetition_penalty : x * params_.repetition_penalty;
      if (seen.n_reply > 0) {
        x -=
            params_.presence_penalty + params_.frequency_penalty * static_cast<float>(seen.n_reply);
      }
    }
    adjusted = scratch.logits;
    best = peak(adjusted);
  }
  choice.token = greedy_ ? best.index : draw(adjusted, best.value, position, scratch);

  if (params_.logprobs >= 0) {
    scratch.weights.resize(logits.size());
    const double log_sum = static_cast<double>(raw_best) +
                           std::log(exp_sum(logits, raw_best, 1.0F, scratch.weights.data()));
    const auto logprob = [&](std::int32_t token) {
      return static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(token)]) -
                                log_sum);
    };
    choice.logprob = logprob(choice.token);
    const std::size_t n = std::min(static_cast<std::size_t>(params_.logprobs), logits.size());
    auto& order = scratch.candidates;
    order.clear();
    for (std::size_t i = 0; i < logits.size(); ++i) {
      order.push_back({static_cast<std::int32_t>(i), logits[i]});
    }
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n), order.end(),
                      heavier);
    for (std::size_t i = 0; i < n; ++i) {
      choice.top.push_back({order[i].token, logprob(order[i].token)});
    }
  }
  return choice;
}

std::int32_t Sampler::draw(std::span<const float> logits, float best, std::int64_t position,
                           SamplerScratch& scratch) const {
  scratch.weights.resize(logits.size());
  double total = exp_sum(logits, best, 1.0F / params_.temperature, scratch.weights.data());
  const double u = uniform(params_.seed, params_.sequence, position);

  // Without truncation the draw walks the vocabulary in its own order: nothing to sort.
  const bool all = params_.min_p == 0 && params_.top_p == 1 &&
                   (params_.top_k == 0 || static_cast<std::size_t>(params_.top_k) >= logits.size());
  auto& kept = scratch.candidates;
  kept.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const float w = scratch.weights[i];
    if (w > 0 && w >= params_.min_p) kept.push_back({static_cast<std::int32_t>(i), w});
  }
  if (!all) {
    if (params_.top_k > 0 && static_cast<std::size_t>(params_.top_k) < kept.size()) {
      std::nth_element(kept.begin(), kept.begin() + (params_.top_k - 1), kept.end(), heavier);
      kept.resize(static_cast<std::size_t>(params_.top_k));
    }
    total = 0;
    if (params_.top_p < 1) {
      double mass = 0;
      for (const auto& c : kept) mass += static_cast<double>(c.weight);
      const double wanted = static_cast<double>(params_.top_p) * mass;
      // Sort as many of the best as hold the wanted mass, in growing runs: the tail of a large
      // vocabulary is never sorted.
      std::size_t n_sorted = 0;
      std::size_t n_kept = 0;
      while (n_kept < kept.size() && (n_kept == 0 || total < wanted)) {
        if (n_kept == n_sorted) {
          const std::size_t n_next = std::min(kept.size(), std::max<std::size_t>(64, 4 * n_sorted));
          std::partial_sort(kept.begin() + static_cast<std::ptrdiff_t>(n_sorted),
                            kept.begin() + static_cast<std::ptrdiff_t>(n_next), kept.end(),
                            heavier);
          n_sorted = n_next;
        }
        total += static_cast<double>(kept[n_kept++].weight);
      }
      kept.resize(n_kept);
    } else {
      std::sort(kept.begin(), kept.end(),
                [](const auto& a, const auto& b) { return a.token < b.token; });
      for (const auto& c : kept) total += static_cast<double>(c.weight);
    }
  }
  double left = u * total;
  for (const auto& c : kept) {
    left -= static_cast<double>(c.weight);
    if (left < 0) return c.token;
  }
  return kept.back().token;  // u * total rounded up to the sum
}

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) longest_ = std::max(longest_, stop.size());
}

std::string StopStrings::push(std::string_view text) {
  if (matched_) return {};
  if (stops_.empty()) return std::string(text);
  pending_ += text;
  std::size_t first = std::string::npos;
  for (const std::string& stop : stops_) first = std::min(first, pending_.find(stop));
  std::string out;
  if (first != std::string::npos) {
    matched_ = true;
    out = pending_.substr(0, first);
    pending_.clear();
    return out;
  }
  // The longest end of the text that begins some stop string stays back.
  std::size_t held = std::min(pending_.size(), longest_ - 1);
  for (; held > 0; --held) {
    const std::string_view tail = std::string_view(pending_).substr(pending_.size() - held);
    const auto begins = [&](const std::string& stop) {
      return std::string_view(stop).substr(0, held) == tail;
    };
    if (std::any_of(stops_.begin(), stops_.end(), begins)) break;
  }
  out = pending_.substr(0, pending_.size() - held);
  pending_.erase(0, pending_.size() - held);
  return out;
}

std::string StopStrings::finish() { return std::exchange(pending_, {}); }

}  // namespace statepack
