// What the model tests share: running prompts through a model in several ways, and comparing.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "base/safetensors.hpp"
#include "model/model.hpp"
#include "scheme/layers.hpp"

namespace statepack::testing {

/// ||got - want|| / ||want||
inline double relative_error(const float* got, const float* want, std::size_t n) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double d = double{got[i]} - want[i];
    error += d * d;
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(error / norm);
}
inline double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  EXPECT_EQ(got.size(), want.size());
  return relative_error(got.data(), want.data(), want.size());
}

inline std::unique_ptr<Model> load(const std::string& dir, ThreadPool& threads) {
  auto model = Model::load(dir, threads);
  EXPECT_TRUE(model.ok()) << model.status().message();
  return model.ok() ? std::move(*model) : nullptr;
}

inline std::unique_ptr<StatePool> fp32_pool(const Model& model, std::int64_t n_slots,
                                            const char* scheme_name = "fp32") {
  const auto scheme = Scheme::parse(scheme_name);
  EXPECT_TRUE(scheme.ok());
  auto compiled = CompiledScheme::make(*scheme, model.config().recurrent_shapes(), nullptr,
                                       model.fingerprint());
  EXPECT_TRUE(compiled.ok()) << compiled.status().message();
  PoolConfig config;
  config.n_slots = n_slots;
  config.conv_floats = model.config().conv_floats();
  auto pool = StatePool::create(*compiled, config);
  EXPECT_TRUE(pool.ok()) << pool.status().message();
  return std::move(*pool);
}

struct Reading {
  std::vector<float> logits;  ///< of the last n_logits positions
  DenseState state;
  std::int64_t kv_bytes = 0;
};

/// The prompt by prefill, in calls of the given lengths.
inline Reading by_prefill(Model& model, const std::vector<std::int32_t>& tokens, int n_logits,
                          const std::vector<std::int64_t>& cuts = {}) {
  Reading run;
  run.state = model.new_dense_state();
  const auto kv = model.new_kv_cache();
  const std::int64_t vocab = model.config().vocab;
  const auto n = static_cast<std::int64_t>(tokens.size());
  std::vector<float> all(tokens.size() * static_cast<std::size_t>(vocab));
  std::int64_t at = 0;
  const auto read = [&](std::int64_t end) {
    const auto part = std::span(tokens).subspan(std::size_t(at), std::size_t(end - at));
    const int wanted =
        static_cast<int>(std::max<std::int64_t>(0, std::min(end - at, end - (n - n_logits))));
    const Status status =
        model.prefill(part, at, run.state, *kv, wanted, all.data() + (end - wanted) * vocab);
    EXPECT_TRUE(status.ok()) << status.message();
    at = end;
  };
  for (std::int64_t cut : cuts) read(at + cut);
  if (at < n) read(n);
  run.logits.assign(all.end() - n_logits * vocab, all.end());
  run.kv_bytes = kv->n_bytes();
  return run;
}

/// The prompt token by token through a pool, after `n_prefill` tokens of prefill.
inline Reading by_decode(Model& model, const std::vector<std::int32_t>& tokens, int n_logits,
                         ThreadPool& threads, std::int64_t n_prefill = 0) {
  Reading run;
  run.state = model.new_dense_state();
  const auto pool = fp32_pool(model, 1);
  const std::int64_t slot = *pool->alloc();
  const auto kv = model.new_kv_cache();
  const std::int64_t vocab = model.config().vocab;
  std::vector<float> all(tokens.size() * static_cast<std::size_t>(vocab));
  if (n_prefill > 0) {
    Status status = model.prefill(std::span(tokens).first(std::size_t(n_prefill)), 0, run.state,
                                  *kv, 0, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    status = hand_over(*pool, slot, run.state, n_prefill, threads);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  for (auto t = n_prefill; t < std::int64_t(tokens.size()); ++t) {
    const DecodeRow row{slot, kv.get(), tokens[std::size_t(t)], t};
    const Status status = model.decode(*pool, {&row, 1}, all.data() + t * vocab);
    EXPECT_TRUE(status.ok()) << status.message();
    pool->set_n_tokens(slot, t + 1);
  }
  run.logits.assign(all.end() - n_logits * vocab, all.end());
  float* S = run.state.S.data();
  for (std::size_t i = 0; i < model.config().recurrent_shapes().size(); ++i) {
    EXPECT_TRUE(restore_dense(pool->layer(int(i)), slot, S, threads).ok());
    S += model.config().recurrent.n_values();
  }
  std::copy_n(pool->conv(slot), run.state.conv.size(), run.state.conv.data());
  return run;
}

}  // namespace statepack::testing
