// Logits to a token: penalties, temperature, truncation, and a draw that depends on nothing but
// (seed, sequence, position).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "statepack/status.hpp"

namespace statepack {

/// How a reply is drawn and when it ends. The defaults are greedy.
struct SamplingParams {
  float temperature = 0;  ///< 0 (or below 1e-5) takes the most likely token
  int top_k = 0;          ///< keep the k most likely tokens; 0 keeps all
  float top_p = 1;        ///< keep the fewest tokens that hold this probability
  float min_p = 0;        ///< keep tokens of at least this share of the best one's probability
  float repetition_penalty = 1;  ///< divides (positive) or multiplies (negative) logits of tokens
                                 ///< seen in prompt or reply
  float presence_penalty = 0;    ///< subtracted once for each token seen in the reply
  float frequency_penalty = 0;   ///< subtracted for each time it was seen in the reply
  std::uint64_t seed = 0;
  std::uint64_t sequence = 0;  ///< tells several answers to one prompt apart under one seed
  std::int64_t max_tokens = 512;
  std::vector<std::string> stop;  ///< the reply ends before the first of these texts
  bool ignore_eos = false;        ///< run to max_tokens
  int logprobs = -1;  ///< log-probabilities of the chosen and this many best tokens; -1: none

  /// Errors: kInvalidArgument naming the parameter, its value and its range.
  Status validate() const;
};

struct TokenLogprob {
  std::int32_t token = 0;
  float logprob = 0;
};

/// The token of one position. Log-probabilities are the model's own: before penalties, temperature
/// and truncation.
struct Choice {
  std::int32_t token = -1;
  float logprob = 0;              ///< only when asked for
  std::vector<TokenLogprob> top;  ///< best first
};

/// Memory of one thread for sampling: grows once, then is reused.
struct SamplerScratch {
  struct Candidate {
    std::int32_t token;
    float weight;
  };
  std::vector<float> logits;
  std::vector<float> weights;
  std::vector<Candidate> candidates;
};

/// Draws the tokens of one reply. Order of the filters: penalties, temperature, min_p, top_k,
/// top_p.
class Sampler {
 public:
  Sampler(const SamplingParams& params, std::span<const std::int32_t> prompt);

  /// Chooses a token; `position` is its absolute place in the sequence. Pure: the same logits,
  /// history and position give the same token on every machine.
  /// Errors: kNotFinite when a logit is NaN or +Inf, or none is above -Inf.
  Result<Choice> sample(std::span<const float> logits, std::int64_t position,
                        SamplerScratch& scratch) const;
  /// Counts a token of the reply for the penalties.
  void accept(std::int32_t token);

 private:
  struct Seen {
    bool in_prompt = false;
    std::int32_t n_reply = 0;
  };
  std::int32_t draw(std::span<const float> logits, float best, std::int64_t position,
                    SamplerScratch& scratch) const;
  SamplingParams params_;
  bool greedy_;
  bool has_penalties_;
  std::unordered_map<std::int32_t, Seen> seen_;  ///< filled only when there are penalties
};

/// Finds stop strings in a stream of text and holds back what may still become one.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops);
  /// Takes more text; gives the text that is certain to lie before any stop string. Nothing comes
  /// after a match.
  std::string push(std::string_view text);
  /// The end of the text: what was held back.
  std::string finish();
  bool matched() const { return matched_; }

 private:
  std::vector<std::string> stops_;
  std::size_t longest_ = 0;
  std::string pending_;
  bool matched_ = false;
};

}  // namespace statepack
