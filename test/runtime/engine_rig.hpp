// An engine on the fake model, and requests for it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_model.hpp"
#include "runtime/engine.hpp"

namespace statepack {

struct Rig {
  ThreadPool threads{2};
  FakeModel model;
  std::unique_ptr<StatePool> pool;
  std::unique_ptr<Engine> engine;

  explicit Rig(std::int64_t n_slots, const std::string& scheme = "fp32",
               const EngineConfig& config = {}) {
    auto compiled = CompiledScheme::make(Scheme::parse(scheme).value(),
                                         model.config().recurrent_shapes(), nullptr, "fake");
    EXPECT_TRUE(compiled.ok()) << compiled.status().message();
    PoolConfig pool_config;
    pool_config.n_slots = n_slots;
    pool_config.conv_floats = model.config().conv_floats();
    pool = StatePool::create(*compiled, pool_config).value();
    engine = Engine::create(model, *pool, threads, nullptr, config).value();
  }
};

inline Request request(std::vector<std::int32_t> prompt, std::int64_t max_tokens = 20) {
  Request r;
  r.prompt = std::move(prompt);
  r.params.max_tokens = max_tokens;
  return r;
}

inline std::vector<std::int32_t> prompt_of(int i) {
  std::vector<std::int32_t> prompt;
  for (int j = 0; j <= i % 7; ++j) prompt.push_back(3 + (i * 13 + j * 5) % 60);
  return prompt;
}

inline Completion alone(const Request& r) {
  Rig s(1);
  Completion out;
  EXPECT_TRUE(submit_collect(*s.engine, r, &out).ok());
  EXPECT_TRUE(s.engine->run().ok());
  return out;
}

}  // namespace statepack
