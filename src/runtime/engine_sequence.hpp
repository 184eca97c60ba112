// What an engine keeps of one request; for the engine's own sources.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "runtime/engine.hpp"

namespace statepack {

inline bool all_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

struct Engine::Sequence {
  Sequence(RequestId request_id, Request&& r, TokenCallback&& cb, std::int64_t n_kv_bytes)
      : id(request_id),
        request(std::move(r)),
        callback(std::move(cb)),
        sampler(request.params, request.prompt),
        stops(request.params.stop),
        kv_bytes(n_kv_bytes) {}

  std::int64_t n_prompt() const { return std::ssize(request.prompt); }
  /// The tokens that state and attention cache have seen: `position` of them.
  std::vector<std::int32_t> tokens_read() const {
    const std::int64_t n = std::min(position, n_prompt());
    std::vector<std::int32_t> read(request.prompt.begin(), request.prompt.begin() + n);
    read.insert(read.end(), tokens.begin(), tokens.begin() + (position - n));
    return read;
  }
  /// This sequence alone: of its reply, and of a prompt resumed where no cold read stops.
  std::uint64_t reader() {
    if (own_reader == Lineage::kCold) own_reader = Lineage::new_reader();
    return own_reader;
  }
  /// Forgets what was read, but not who asked.
  void restart() {
    position = n_cached = 0;
    lineage = {};
    reads_as_cold = true;
    reading_since.reset();
  }

  RequestId id;
  Request request;
  TokenCallback callback;
  Sampler sampler;
  StopStrings stops;
  Utf8Stream utf8;
  std::int64_t kv_bytes;    ///< of attention cache that its longest reply takes
  std::int64_t n_new = -1;  ///< prompt tokens beyond the prefix cache when first looked at
  std::unique_ptr<KvCache> kv;
  std::unique_ptr<DenseState> dense;          ///< while the prompt is read
  std::int64_t slot = 0;                      ///< 0: none yet
  std::int64_t position = 0;                  ///< tokens that state and cache have read
  std::int64_t n_cached = 0;                  ///< of them, from the prefix cache
  Lineage lineage;                            ///< of them, when there is a prefix cache
  bool reads_as_cold = true;                  ///< what is read of the prompt
  std::uint64_t own_reader = Lineage::kCold;  ///< see reader()
  std::vector<std::int32_t> tokens;           ///< of the reply
  Clock::time_point submitted = Clock::now();
  std::optional<Clock::time_point> reading_since, replying_since;
  bool finished = false;
};

}  // namespace statepack
