// Batched decode: a row has the same bits in any company; hand-over, rounding, caches, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "model/model.hpp"
#include "model_testing.hpp"

namespace statepack {
namespace {

using ::testing::HasSubstr;
using testing::relative_error;

const std::string kTiny = SP_SOURCE_DIR "/test/data/tiny/";
const std::string kDemo = SP_SOURCE_DIR "/models/statepack-gdn";

// Greedy text of some sequences with the logits of every step.
struct Text {
  std::vector<std::int32_t> tokens;
  std::vector<float> logits;
};

std::vector<std::int32_t> prompt_of(int sequence, std::int64_t vocab) {
  const int n = 1 + sequence * 37 % 71;
  std::vector<std::int32_t> tokens;
  for (int i = 0; i < n; ++i) {
    tokens.push_back(static_cast<std::int32_t>((sequence * 7919 + i * 104729 + 11) % vocab));
  }
  return tokens;
}

// Decodes `sequences` together for n_steps, in slots that depend on the company.
std::vector<Text> greedy(Model& model, const char* scheme, const std::vector<int>& sequences,
                         int n_steps, ThreadPool& threads) {
  const auto pool = testing::fp32_pool(model, std::int64_t(sequences.size()) + 3, scheme);
  const std::int64_t vocab = model.config().vocab;
  std::vector<std::unique_ptr<KvCache>> caches;
  std::vector<DecodeRow> rows;
  std::vector<Text> texts(sequences.size());
  if (sequences.size() > 1) (void)pool->alloc();  // other slot numbers than alone
  for (int sequence : sequences) {
    const auto prompt = prompt_of(sequence, vocab);
    DenseState state = model.new_dense_state();
    caches.push_back(model.new_kv_cache());
    const auto n = std::int64_t(prompt.size());
    EXPECT_TRUE(model
                    .prefill(std::span(prompt).first(std::size_t(n - 1)), 0, state, *caches.back(),
                             0, nullptr)
                    .ok());
    const std::int64_t slot = *pool->alloc();
    EXPECT_TRUE(hand_over(*pool, slot, state, n - 1, threads).ok());
    rows.push_back({slot, caches.back().get(), prompt.back(), n - 1});
  }
  std::vector<float> logits(rows.size() * std::size_t(vocab));
  for (int step = 0; step < n_steps; ++step) {
    const Status status = model.decode(*pool, rows, logits.data());
    EXPECT_TRUE(status.ok()) << status.message();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto begin = logits.begin() + std::ptrdiff_t(r) * vocab;
      texts[r].logits.insert(texts[r].logits.end(), begin, begin + vocab);
      rows[r].token = std::int32_t(std::max_element(begin, begin + vocab) - begin);
      texts[r].tokens.push_back(rows[r].token);
      pool->set_n_tokens(rows[r].slot, ++rows[r].position);
    }
  }
  return texts;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_batch_invariance(const std::string& dir, const char* scheme, int n_steps,
                             const std::vector<int>& alone) {
  std::vector<int> all;
  for (int i = 0; i < 33; ++i) all.push_back(i);
  std::vector<Text> first;
  for (int n_threads : {1, 2, 3}) {
    ThreadPool threads(n_threads);
    const auto model = testing::load(dir, threads);
    const auto together = greedy(*model, scheme, all, n_steps, threads);
    if (n_threads == 1) {
      first = together;
      for (int sequence : alone) {
        const Text one = greedy(*model, scheme, {sequence}, n_steps, threads)[0];
        EXPECT_EQ(one.tokens, together[std::size_t(sequence)].tokens) << sequence;
        EXPECT_TRUE(same_bits(one.logits, together[std::size_t(sequence)].logits)) << sequence;
      }
      continue;
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(same_bits(first[i].logits, together[i].logits)) << i << " threads " << n_threads;
    }
  }
}

std::vector<int> everyone() {
  std::vector<int> all(33);
  for (int i = 0; i < 33; ++i) all[std::size_t(i)] = i;
  return all;
}

TEST(Decode, ABatchOf33EqualsEachAlone) {
  for (const char* model : {"next", "moe", "dense", "kimi"}) {
    SCOPED_TRACE(model);
    expect_batch_invariance(kTiny + model, "fp32", 10, everyone());
  }
}

// The largest batch that is meant to run: rows are cut into several tasks everywhere.
TEST(Decode, ABatchOf1024EqualsEachAlone) {
  std::vector<int> all(1024);
  for (int i = 0; i < 1024; ++i) all[std::size_t(i)] = i;
  ThreadPool threads(2);
  for (const char* name : {"next", "moe", "kimi"}) {
    const auto model = testing::load(kTiny + name, threads);
    const auto together = greedy(*model, "int8,period=4", all, 5, threads);
    for (int sequence : {0, 255, 256, 600, 1023}) {
      const Text one = greedy(*model, "int8,period=4", {sequence}, 5, threads)[0];
      EXPECT_TRUE(same_bits(one.logits, together[std::size_t(sequence)].logits))
          << name << " " << sequence;
    }
  }
}

TEST(Decode, PackedStatesDoNotCoupleRows) {
  for (const char* model : {"next", "kimi"}) {
    for (const char* scheme : {"int8", "bf16,period=4,records=bf16"}) {
      SCOPED_TRACE(std::string(model) + " " + scheme);
      expect_batch_invariance(kTiny + model, scheme, 6, {0, 5, 16, 32});
    }
  }
}

TEST(Decode, TheDemoModelIsBatchInvariant) {
  expect_batch_invariance(kDemo, "fp32", 6, {0, 7, 31, 32});
}

// Sequences that lie in several cache blocks, beside short ones.
TEST(Decode, LongContextsAreBatchInvariant) {
  for (const char* name : {"dense", "kimi"}) {
    ThreadPool threads(2);
    const auto model = testing::load(kTiny + name, threads);
    const auto run = [&](const std::vector<std::int64_t>& lengths) {
      const auto pool = testing::fp32_pool(*model, std::int64_t(lengths.size()));
      std::vector<std::unique_ptr<KvCache>> caches;
      std::vector<DecodeRow> rows;
      for (std::int64_t n : lengths) {
        std::vector<std::int32_t> tokens;
        for (std::int64_t i = 0; i < n; ++i) tokens.push_back(std::int32_t(i * i % 61));
        DenseState state = model->new_dense_state();
        caches.push_back(model->new_kv_cache());
        EXPECT_TRUE(model->prefill(tokens, 0, state, *caches.back(), 0, nullptr).ok());
        const std::int64_t slot = *pool->alloc();
        EXPECT_TRUE(hand_over(*pool, slot, state, n, threads).ok());
        rows.push_back({slot, caches.back().get(), 5, n});
      }
      std::vector<float> logits(rows.size() * 64);
      EXPECT_TRUE(model->decode(*pool, rows, logits.data()).ok());
      return logits;
    };
    const auto all = run({255, 256, 257, 3, 600});
    const std::int64_t lengths[] = {255, 256, 257, 3, 600};
    for (std::size_t i = 0; i < 5; ++i) {
      EXPECT_TRUE(same_bits(run({lengths[i]}),
                            std::vector<float>(all.begin() + std::ptrdiff_t(i) * 64,
                                               all.begin() + std::ptrdiff_t(i + 1) * 64)))
          << name << " " << lengths[i];
    }
  }
}

// A poisoned sequence ends alone: NaN logits, a quarantined slot, and bit-equal neighbours.
TEST(Decode, ANonFiniteSequenceIsQuarantined) {
  for (const char* name : {"next", "kimi"}) {
    ThreadPool threads(2);
    const auto model = testing::load(kTiny + name, threads);
    const auto run = [&](bool poison, std::vector<float>& logits) {
      const auto pool = testing::fp32_pool(*model, 3);
      std::vector<std::unique_ptr<KvCache>> caches;
      std::vector<DecodeRow> rows;
      for (int i = 0; i < 3; ++i) {
        caches.push_back(model->new_kv_cache());
        rows.push_back({*pool->alloc(), caches.back().get(), 7 + i, 0});
      }
      if (poison) pool->conv(rows[1].slot)[3] = std::numeric_limits<float>::quiet_NaN();
      for (int step = 0; step < 3; ++step) {
        EXPECT_TRUE(model->decode(*pool, rows, logits.data()).ok());
        for (DecodeRow& row : rows) pool->set_n_tokens(row.slot, ++row.position);
      }
      EXPECT_EQ(pool->quarantined(rows[1].slot), poison);
      EXPECT_FALSE(pool->quarantined(rows[0].slot));
      EXPECT_EQ(pool->nonfinite_total(), poison ? 1 : 0);
    };
    std::vector<float> clean(3 * 64), poisoned(3 * 64);
    run(false, clean);
    run(true, poisoned);
    for (std::size_t i = 0; i < 64; ++i) {
      EXPECT_EQ(clean[i], poisoned[i]);
      EXPECT_TRUE(std::isnan(poisoned[64 + i]));
      EXPECT_EQ(clean[128 + i], poisoned[128 + i]);
    }
  }
}

TEST(HandOver, CarriesStateHistoryAndCount) {
  ThreadPool threads(2);
  const auto model = testing::load(kTiny + "next", threads);
  const auto pool = testing::fp32_pool(*model, 2);
  const std::int64_t slot = *pool->alloc();
  DenseState state = model->new_dense_state();
  for (std::size_t i = 0; i < state.S.size(); ++i) state.S[i] = float(i % 1000) - 500;
  for (std::size_t i = 0; i < state.conv.size(); ++i) state.conv[i] = float(i);
  ASSERT_TRUE(hand_over(*pool, slot, state, 42, threads).ok());
  EXPECT_EQ(pool->n_tokens(slot), 42);
  EXPECT_TRUE(std::equal(state.conv.begin(), state.conv.end(), pool->conv(slot)));
  DenseState back = state;
  std::fill(back.S.begin(), back.S.end(), 0.0F);
  float* S = back.S.data();
  for (std::size_t i = 0; i < model->config().recurrent_shapes().size(); ++i) {
    ASSERT_TRUE(restore_dense(pool->layer(int(i)), slot, S, threads).ok());
    S += model->config().recurrent.n_values();
  }
  EXPECT_EQ(back.S, state.S);

  state.S[5] = std::numeric_limits<float>::quiet_NaN();
  const std::int64_t other = *pool->alloc();
  EXPECT_EQ(hand_over(*pool, other, state, 1, threads).code(), Code::kNotFinite);
  EXPECT_TRUE(pool->quarantined(other));
  state.S.pop_back();
  EXPECT_EQ(hand_over(*pool, slot, state, 1, threads).code(), Code::kMismatch);
  state.S.push_back(0);
  EXPECT_EQ(hand_over(*pool, 0, model->new_dense_state(), 1, threads).code(),
            Code::kInvalidArgument);
}

// What round_dense leaves is what a hand-over followed by a read gives, and a second rounding of an
// idempotent codec changes nothing.
TEST(HandOver, RoundDenseIsTheCodecsRounding) {
  ThreadPool threads(1);
  const auto model = testing::load(kTiny + "dense", threads);
  const auto pool = testing::fp32_pool(*model, 1, "bf16");
  const std::int64_t slot = *pool->alloc();
  DenseState state = model->new_dense_state();
  for (std::size_t i = 0; i < state.S.size(); ++i) state.S[i] = std::sin(float(i));
  const DenseState exact = state;
  ASSERT_TRUE(round_dense(*pool, slot, state, threads).ok());
  EXPECT_NE(state.S, exact.S);
  for (std::size_t i = 0; i < state.S.size(); ++i) {
    EXPECT_NEAR(state.S[i], exact.S[i], std::fabs(exact.S[i]) * 0x1p-8);
  }
  const DenseState once = state;
  ASSERT_TRUE(round_dense(*pool, slot, state, threads).ok());
  EXPECT_EQ(state.S, once.S);
}

TEST(KvCache, GrowsByBlocksAndForgets) {
  ThreadPool threads(1);
  const auto model = testing::load(kTiny + "dense", threads);
  const auto kv = model->new_kv_cache();
  EXPECT_EQ(kv->n_bytes(), 0);
  std::vector<std::int32_t> tokens(300);
  for (std::size_t i = 0; i < 300; ++i) tokens[i] = std::int32_t(i % 64);
  DenseState state = model->new_dense_state();
  std::vector<float> first(64), second(64);
  ASSERT_TRUE(model->prefill(std::span(tokens).first(250), 0, state, *kv, 0, nullptr).ok());
  EXPECT_EQ(kv->n_tokens(), 250);
  EXPECT_EQ(kv->n_bytes(), 256 * model->config().kv_bytes_per_token());
  const DenseState saved = state;
  ASSERT_TRUE(
      model->prefill(std::span(tokens).subspan(250), 250, state, *kv, 1, first.data()).ok());
  EXPECT_EQ(kv->n_bytes(), 512 * model->config().kv_bytes_per_token());
  kv->truncate(250);
  EXPECT_EQ(kv->n_tokens(), 250);
  EXPECT_EQ(kv->n_bytes(), 256 * model->config().kv_bytes_per_token());
  state = saved;
  ASSERT_TRUE(
      model->prefill(std::span(tokens).subspan(250), 250, state, *kv, 1, second.data()).ok());
  EXPECT_EQ(first, second);
}

TEST(Prefill, LogitsOnlyWhereAsked) {
  ThreadPool threads(2);
  const auto model = testing::load(kTiny + "dense", threads);
  std::vector<std::int32_t> tokens(1100);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = std::int32_t(i * 7 % 64);
  const auto run = [&](int n) {
    DenseState state = model->new_dense_state();
    const auto kv = model->new_kv_cache();
    std::vector<float> logits(std::size_t(n + 2) * 64, -1);
    EXPECT_TRUE(model->prefill(tokens, 0, state, *kv, n, logits.data() + 64).ok());
    for (std::size_t i = 0; i < 64; ++i) {  // guards
      EXPECT_EQ(logits[i], -1);
      EXPECT_EQ(logits[logits.size() - 1 - i], -1);
    }
    return std::vector<float>(logits.begin() + 64, logits.end() - 64);
  };
  const auto all = run(1100);
  for (int n : {1, 75, 76, 77, 588, 589}) {  // segments end at 512, 1024, 1100
    const auto some = run(n);
    const std::vector<float> tail(all.end() - n * 64, all.end());
    EXPECT_LT(relative_error(some, tail), 1e-5) << n;
  }
}

// Tokens of a sequence that are known already, several rows a call: the bits of a call for each,
// and the same state behind them.
TEST(Decode, ARunOfTokensEqualsAsManyCalls) {
  const std::vector<std::vector<std::int64_t>> calls = {
      {1, 1, 1}, {4, 2, 1}, {17, 70, 65}, {1, 4, 2}};
  for (const char* name : {"next", "moe", "dense", "kimi"}) {
    for (const char* scheme : {"fp32", "int4", "int8,period=3,conv=bf16"}) {
      SCOPED_TRACE(std::string(name) + " " + scheme);
      ThreadPool threads(2);
      const auto model = testing::load(kTiny + name, threads);
      const std::int64_t vocab = model->config().vocab;
      // Three sequences in two pools; in the third call the first one crosses a cache block.
      const auto read = [&](bool whole, int n_sequences) {
        const std::unique_ptr<StatePool> pools[] = {testing::fp32_pool(*model, 3, scheme),
                                                    testing::fp32_pool(*model, 3)};
        std::vector<std::unique_ptr<KvCache>> caches;
        std::vector<std::int64_t> slots, positions;
        std::vector<std::vector<float>> logits(3);
        const auto pool_of = [](std::size_t i) { return i / 2; };
        for (std::size_t i = 0; i < 3; ++i) {
          const std::int64_t n = i == 0 ? 250 : 3;
          std::vector<std::int32_t> tokens;
          for (std::int64_t t = 0; t < n; ++t) tokens.push_back(std::int32_t(t * t % 61));
          DenseState state = model->new_dense_state();
          caches.push_back(model->new_kv_cache());
          EXPECT_TRUE(model->prefill(tokens, 0, state, *caches[i], 0, nullptr).ok());
          slots.push_back(*pools[pool_of(i)]->alloc());
          EXPECT_TRUE(hand_over(*pools[pool_of(i)], slots[i], state, n, threads).ok());
          positions.push_back(n);
        }
        const auto token = [](std::size_t i, std::int64_t position) {
          return static_cast<std::int32_t>((7 * position + 3 * std::int64_t(i)) % 60);
        };
        for (const auto& lengths : calls) {
          std::vector<std::int64_t> left(lengths.begin(), lengths.begin() + n_sequences);
          while (std::ranges::any_of(left, [](std::int64_t n) { return n > 0; })) {
            std::vector<DecodeRow> rows[2];
            std::vector<std::pair<std::size_t, std::int64_t>> taken;
            for (std::size_t i = 0; i < left.size(); ++i) {
              const std::int64_t n = whole ? left[i] : std::min<std::int64_t>(left[i], 1);
              for (std::int64_t t = 0; t < n; ++t) {
                const std::int64_t at = positions[i] + t;
                rows[pool_of(i)].push_back({slots[i], caches[i].get(), token(i, at), at});
              }
              if (n > 0) taken.emplace_back(i, n);
              left[i] -= n;
            }
            const DecodeGroup groups[] = {{pools[0].get(), rows[0]}, {pools[1].get(), rows[1]}};
            std::vector<float> out((rows[0].size() + rows[1].size()) * std::size_t(vocab));
            EXPECT_TRUE(model->decode_groups(groups, out.data()).ok());
            const float* from = out.data();
            for (const auto& [i, n] : taken) {
              logits[i].insert(logits[i].end(), from, from + n * vocab);
              from += n * vocab;
              positions[i] += n;
              EXPECT_EQ(caches[i]->n_tokens(), positions[i]);
              pools[pool_of(i)]->set_n_tokens(slots[i], positions[i]);
            }
          }
        }
        for (std::size_t i = 0; i < std::size_t(n_sequences); ++i) {  // what was left behind
          DenseState state = model->new_dense_state();
          EXPECT_TRUE(restore_dense(*pools[pool_of(i)], slots[i], state, threads).ok());
          logits[i].insert(logits[i].end(), state.S.begin(), state.S.end());
          logits[i].insert(logits[i].end(), state.conv.begin(), state.conv.end());
        }
        return logits;
      };
      for (int n_sequences : {3, 1}) {  // runs over threads, heads over threads
        const auto whole = read(true, n_sequences), single = read(false, n_sequences);
        for (std::size_t i = 0; i < std::size_t(n_sequences); ++i) {
          EXPECT_GT(single[i].size(), std::size_t(24 * vocab));
          EXPECT_TRUE(same_bits(whole[i], single[i])) << i;
        }
      }
    }
  }
}

// A run that meets a value which is not finite is NaN throughout, its neighbours are not.
TEST(Decode, ANonFiniteRunIsQuarantined) {
  ThreadPool threads(2);
  const auto model = testing::load(kTiny + "next", threads);
  const auto run = [&](bool poison) {
    const auto pool = testing::fp32_pool(*model, 2);
    std::vector<std::unique_ptr<KvCache>> caches;
    std::vector<DecodeRow> rows;
    for (int i = 0; i < 2; ++i) {
      caches.push_back(model->new_kv_cache());
      const std::int64_t slot = *pool->alloc();
      for (int t = 0; t < 4; ++t) rows.push_back({slot, caches.back().get(), 7 + i + t, t});
    }
    if (poison) pool->conv(rows[4].slot)[3] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> logits(8 * 64);
    EXPECT_TRUE(model->decode(*pool, rows, logits.data()).ok());
    EXPECT_EQ(pool->quarantined(rows[4].slot), poison);
    EXPECT_FALSE(pool->quarantined(rows[0].slot));
    return logits;
  };
  const auto clean = run(false), poisoned = run(true);
  for (std::size_t i = 0; i < std::size_t(4 * 64); ++i) {
    EXPECT_EQ(clean[i], poisoned[i]);
    EXPECT_TRUE(std::isfinite(clean[i + 4 * 64]));
    EXPECT_TRUE(std::isnan(poisoned[i + 4 * 64]));
  }
}

// States of several schemes in one batch: what each gives alone.
TEST(Decode, PoolsShareABatchWithoutTouchingOneAnother) {
  ThreadPool threads(2);
  const auto model = testing::load(kTiny + "next", threads);
  const auto n_vocab = static_cast<std::size_t>(model->config().vocab);
  const auto read = [&](bool together) {
    std::vector<std::unique_ptr<StatePool>> pools;
    std::vector<std::unique_ptr<KvCache>> caches;
    std::vector<std::vector<DecodeRow>> rows(3);
    for (std::size_t p = 0; p < 3; ++p) {
      const char* const names[] = {"fp32", "int4", "int8,period=3"};
      pools.push_back(testing::fp32_pool(*model, 2, names[p]));
      for (std::size_t r = 0; r < p % 2 + 1; ++r) {
        caches.push_back(model->new_kv_cache());
        rows[p].push_back({*pools[p]->alloc(), caches.back().get(), 0, 0});
      }
    }
    std::vector<float> all;
    for (std::int64_t t = 0; t < 7; ++t) {
      std::vector<DecodeGroup> groups;
      for (std::size_t p = 0; p < 3; ++p) {
        for (std::size_t r = 0; r < rows[p].size(); ++r) {
          rows[p][r].token = static_cast<std::int32_t>((7 * t + 3 * std::ssize(groups)) % 60);
          rows[p][r].position = t;
        }
        groups.push_back({pools[p].get(), rows[p]});
      }
      std::vector<float> logits(4 * n_vocab);
      if (together) {
        EXPECT_TRUE(model->decode_groups(groups, logits.data()).ok());
      } else {
        EXPECT_TRUE(model->Model::decode_groups(groups, logits.data()).ok());
      }
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  };
  EXPECT_EQ(read(true), read(false));

  const auto pool = testing::fp32_pool(*model, 1);
  const auto kv = model->new_kv_cache();
  const DecodeRow row{*pool->alloc(), kv.get(), 1, 0};
  const DecodeGroup twice[] = {{pool.get(), {&row, 1}}, {pool.get(), {&row, 1}}};
  std::vector<float> logits(2 * n_vocab);
  EXPECT_THAT(model->decode_groups(twice, logits.data()).message(),
              HasSubstr("two groups of a batch share a pool"));
}

TEST(Model, RefusesWhatDoesNotBelongTogether) {
  ThreadPool threads(1);
  const auto model = testing::load(kTiny + "dense", threads);
  const auto other = testing::load(kTiny + "next", threads);
  DenseState state = model->new_dense_state();
  const auto kv = model->new_kv_cache();
  std::vector<float> logits(4 * 64);
  const std::int32_t tokens[] = {1, 2};
  const auto prefill = [&](std::span<const std::int32_t> t, std::int64_t position, DenseState& s,
                           KvCache& cache, int n) {
    return model->prefill(t, position, s, cache, n, logits.data()).message();
  };
  EXPECT_THAT(prefill(tokens, 5, state, *kv, 0),
              HasSubstr("position 5 does not follow the attention cache of 0 tokens"));
  const std::int32_t outside[] = {1, 64}, negative[] = {-1};
  EXPECT_THAT(prefill(outside, 0, state, *kv, 0),
              HasSubstr("token 64 is outside the model's vocabulary of 64"));
  EXPECT_THAT(prefill(negative, 0, state, *kv, 0), HasSubstr("token -1 is outside"));
  EXPECT_THAT(prefill(tokens, 0, state, *kv, 3),
              HasSubstr("logits of the last 3 of 2 tokens cannot be given"));
  EXPECT_THAT(prefill(tokens, 0, state, *other->new_kv_cache(), 0),
              HasSubstr("the attention cache is not of this model"));
  DenseState small = other->new_dense_state();
  EXPECT_THAT(prefill(tokens, 0, small, *kv, 0), HasSubstr("the dense state is not of this model"));
  EXPECT_EQ(kv->n_tokens(), 0);
  EXPECT_TRUE(model->prefill({}, 0, state, *kv, 0, nullptr).ok());

  const auto pool = testing::fp32_pool(*model, 2);
  const std::int64_t a = *pool->alloc(), b = *pool->alloc();
  const auto kv_b = model->new_kv_cache();
  const auto decode = [&](std::vector<DecodeRow> rows) {
    return model->decode(*pool, rows, logits.data()).message();
  };
  EXPECT_THAT(decode({{0, kv.get(), 1, 0}}), HasSubstr("slot 0 is not one of the pool's 1..2"));
  EXPECT_THAT(decode({{3, kv.get(), 1, 0}}), HasSubstr("slot 3 is not one of the pool's 1..2"));
  EXPECT_THAT(decode({{a, kv.get(), 99, 0}}), HasSubstr("token 99 is outside"));
  EXPECT_THAT(decode({{a, kv.get(), 1, 9}}), HasSubstr("position 9 does not follow"));
  EXPECT_THAT(decode({{a, nullptr, 1, 0}}), HasSubstr("the attention cache is not of this model"));
  EXPECT_THAT(decode({{a, kv.get(), 1, 0}, {a, kv_b.get(), 1, 0}}),
              HasSubstr("two rows of a batch share a slot or an attention cache"));
  EXPECT_THAT(decode({{a, kv.get(), 1, 0}, {b, kv.get(), 1, 0}}),
              HasSubstr("two rows of a batch share a slot or an attention cache"));
  // A run has one cache and positions that follow one another.
  EXPECT_THAT(decode({{a, kv.get(), 1, 0}, {a, kv.get(), 1, 2}}), HasSubstr("position 2 does not"));
  EXPECT_THAT(decode({{a, kv.get(), 1, 0}, {b, kv_b.get(), 1, 0}, {a, kv.get(), 1, 1}}),
              HasSubstr("position 1 does not follow"));
  EXPECT_EQ(decode({}), "");
  const auto strange = testing::fp32_pool(*other, 2);
  const DecodeRow row{*strange->alloc(), kv.get(), 1, 0};
  EXPECT_EQ(model->decode(*strange, {&row, 1}, logits.data()).code(), Code::kMismatch);
  EXPECT_EQ(kv->n_tokens(), 0);
}

}  // namespace
}  // namespace statepack
