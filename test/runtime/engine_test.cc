#include "runtime/engine.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "engine_rig.hpp"

namespace statepack {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

TEST(Engine, BatchedRepliesAreThoseAlone) {
  Rig s(8);
  std::vector<Completion> out(33);
  for (int i = 0; i < 33; ++i) {
    Request r = request(prompt_of(i));
    if (i % 3 == 1) {
      r.params.temperature = 1;
      r.params.seed = static_cast<std::uint64_t>(i);
    }
    ASSERT_TRUE(submit_collect(*s.engine, r, &out[static_cast<std::size_t>(i)]).ok());
  }
  ASSERT_TRUE(s.engine->run().ok());
  std::int64_t n_tokens = 0;
  for (int i = 0; i < 33; ++i) {
    Request r = request(prompt_of(i));
    if (i % 3 == 1) {
      r.params.temperature = 1;
      r.params.seed = static_cast<std::uint64_t>(i);
    }
    const Completion expected = alone(r);
    const Completion& got = out[static_cast<std::size_t>(i)];
    EXPECT_EQ(got.tokens, expected.tokens) << i;
    EXPECT_EQ(got.finish, expected.finish) << i;
    EXPECT_TRUE(got.status.ok());
    n_tokens += std::ssize(got.tokens);
  }
  EXPECT_GT(n_tokens, 33 * 3);
  EXPECT_EQ(s.model.max_rows, 8);  // the batch was full
  EXPECT_EQ(s.pool->n_free(), 8);  // and every slot came back
  EXPECT_EQ(s.engine->stats().n_ended(), 33);
  EXPECT_EQ(s.engine->stats().n_running, 0);
}

TEST(Engine, EndsByTokenLengthAndContext) {
  EngineConfig config;
  config.max_context = 10;
  Rig s(4, "fp32", config);
  s.model.with_eos = false;
  Completion by_length;
  Completion by_context;
  ASSERT_TRUE(submit_collect(*s.engine, request({5, 6, 7}, 4), &by_length).ok());
  ASSERT_TRUE(submit_collect(*s.engine, request({5, 6, 7, 8}, 100), &by_context).ok());
  ASSERT_TRUE(s.engine->run().ok());
  EXPECT_EQ(by_length.tokens.size(), 4U);
  EXPECT_EQ(by_length.finish, FinishReason::kLength);
  EXPECT_EQ(by_context.tokens.size(), 6U);
  EXPECT_EQ(by_context.finish, FinishReason::kLength);
}

TEST(Engine, EosEndsUnlessIgnored) {
  int n_stopped = 0;
  for (int i = 0; i < 40; ++i) {
    Request r = request(prompt_of(i), 30);
    const Completion stopped = alone(r);
    if (stopped.finish != FinishReason::kStop) continue;
    ++n_stopped;
    EXPECT_THAT(stopped.tokens, testing::Not(testing::Contains(FakeModel::kEos)));
    r.params.ignore_eos = true;
    const Completion full = alone(r);
    EXPECT_EQ(full.tokens.size(), 30U);
    EXPECT_EQ(full.finish, FinishReason::kLength);
    EXPECT_EQ(full.tokens[stopped.tokens.size()], FakeModel::kEos);
  }
  EXPECT_GT(n_stopped, 5);
}

TEST(Engine, PromptsAreCutAtFixedPlaces) {
  Rig s(2);
  Completion out;
  ASSERT_TRUE(submit_collect(*s.engine, request(std::vector<std::int32_t>(1100, 9), 1), &out).ok());
  ASSERT_TRUE(s.engine->run().ok());
  EXPECT_THAT(s.model.prefills, ElementsAre(Pair(0, 512), Pair(512, 512), Pair(1024, 76)));
}

TEST(Engine, PrefillPeriodCutsToo) {
  Rig s(2, "int8,prefill=200");
  Completion out;
  ASSERT_TRUE(submit_collect(*s.engine, request(std::vector<std::int32_t>(700, 9), 1), &out).ok());
  ASSERT_TRUE(s.engine->run().ok());
  EXPECT_THAT(s.model.prefills, ElementsAre(Pair(0, 200), Pair(200, 200), Pair(400, 112),
                                            Pair(512, 88), Pair(600, 100)));
  EXPECT_TRUE(out.status.ok()) << out.status.message();
}

TEST(Engine, LongPromptsLeaveRunningRepliesTheirTurns) {
  Rig s(2);
  s.model.with_eos = false;
  Completion a;
  Completion b;
  ASSERT_TRUE(submit_collect(*s.engine, request({5}, 100), &a).ok());
  ASSERT_TRUE(s.engine->step().ok());
  ASSERT_TRUE(submit_collect(*s.engine, request(std::vector<std::int32_t>(1500, 9), 5), &b).ok());
  const std::int64_t before = s.engine->stats().reply_tokens;
  ASSERT_TRUE(s.engine->step().ok());
  ASSERT_TRUE(s.engine->step().ok());  // 1,024 of 1,500 tokens read
  EXPECT_EQ(s.engine->stats().reply_tokens, before + 2);
  ASSERT_TRUE(s.engine->run().ok());
  EXPECT_EQ(b.tokens.size(), 5U);
}

TEST(Engine, QuarantineEndsOneRequestAndNoOther) {
  Rig s(8);
  s.model.with_eos = false;
  std::vector<Completion> out(6);
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(
        submit_collect(*s.engine, request(prompt_of(i), 12), &out[static_cast<std::size_t>(i)])
            .ok());
  }
  s.model.poison_after = 50;
  Completion bad;
  ASSERT_TRUE(submit_collect(*s.engine, request({50}, 12), &bad).ok());
  ASSERT_TRUE(s.engine->run().ok());
  EXPECT_EQ(bad.finish, FinishReason::kError);
  EXPECT_EQ(bad.status.code(), Code::kNotFinite);
  EXPECT_THAT(bad.status.message(), HasSubstr("quarantined"));
  EXPECT_GE(s.engine->stats().n_finished(FinishReason::kError), 1);
  EXPECT_EQ(s.pool->n_free(), 8);
  int n_clean = 0;
  for (int i = 0; i < 6; ++i) {
    const Completion& got = out[static_cast<std::size_t>(i)];
    if (!got.status.ok()) continue;  // met the same token by itself
    ++n_clean;
    Rig other(1);
    other.model.with_eos = false;
    other.model.poison_after = 50;
    Completion expected;
    ASSERT_TRUE(submit_collect(*other.engine, request(prompt_of(i), 12), &expected).ok());
    ASSERT_TRUE(other.engine->run().ok());
    EXPECT_EQ(got.tokens, expected.tokens);
  }
  EXPECT_GT(n_clean, 0);
  // The slot serves again.
  Completion again;
  s.model.poison_after = -1;
  ASSERT_TRUE(submit_collect(*s.engine, request({50}, 3), &again).ok());
  ASSERT_TRUE(s.engine->run().ok());
  EXPECT_TRUE(again.status.ok());
}

TEST(Engine, CancelsWhereverARequestIs) {
  EngineConfig config;
  config.max_batch = 1;
  Rig s(2, "fp32", config);
  s.model.with_eos = false;
  Completion running;
  Completion waiting;
  const RequestId a = submit_collect(*s.engine, request({5}, 1000), &running).value();
  const RequestId b = submit_collect(*s.engine, request({6}, 1000), &waiting).value();
  ASSERT_TRUE(s.engine->step().ok());
  s.engine->cancel(a);
  s.engine->cancel(b);
  s.engine->cancel(12345);  // never existed
  ASSERT_TRUE(s.engine->run().ok());
  EXPECT_EQ(running.finish, FinishReason::kCancelled);
  EXPECT_GT(running.tokens.size(), 0U);
  EXPECT_EQ(waiting.finish, FinishReason::kCancelled);
  EXPECT_EQ(waiting.tokens.size(), 0U);
  EXPECT_EQ(s.pool->n_free(), 2);

  Completion reading;
  const RequestId c =
      submit_collect(*s.engine, request(std::vector<std::int32_t>(2000, 9)), &reading).value();
  ASSERT_TRUE(s.engine->step().ok());
  s.engine->cancel(c);
  ASSERT_TRUE(s.engine->run().ok());
  EXPECT_EQ(reading.finish, FinishReason::kCancelled);
  EXPECT_EQ(s.pool->n_free(), 2);
}

TEST(Engine, CallbacksMayCancelAndSubmit) {
  Rig s(2);
  s.model.with_eos = false;
  int n_events = 0;
  std::optional<FinishReason> finish;
  Completion second;
  ASSERT_TRUE(s.engine
                  ->submit(request({5}, 1000),
                           [&](const TokenEvent& event) {
                             finish = event.finish;
                             if (++n_events != 3) return;
                             s.engine->cancel(event.request);
                             ASSERT_TRUE(submit_collect(*s.engine, request({6}, 4), &second).ok());
                           })
                  .ok());
  ASSERT_TRUE(s.engine->run().ok());
  EXPECT_EQ(finish, FinishReason::kCancelled);
  EXPECT_EQ(second.tokens.size(), 4U);
}

TEST(Engine, SubmitFromOtherThreads) {
  Rig s(4);
  std::vector<Completion> out(40);
  std::vector<std::thread> clients;
  for (int t = 0; t < 4; ++t) {
    clients.emplace_back([&, t] {
      for (int i = t; i < 40; i += 4) {
        EXPECT_TRUE(
            submit_collect(*s.engine, request(prompt_of(i)), &out[static_cast<std::size_t>(i)])
                .ok());
      }
    });
  }
  while (s.engine->stats().n_ended() < 40) ASSERT_TRUE(s.engine->step().ok());
  for (std::thread& c : clients) c.join();
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(out[static_cast<std::size_t>(i)].tokens, alone(request(prompt_of(i))).tokens);
  }
}

TEST(Engine, RefusesBadRequests) {
  EngineConfig config;
  config.max_context = 16;
  config.max_queue = 2;
  Rig s(1, "fp32", config);
  const auto refused = [&](const Request& r) {
    const auto result = s.engine->submit(r, nullptr);
    EXPECT_FALSE(result.ok());
    return result.status();
  };
  EXPECT_THAT(refused(request({})).message(), HasSubstr("empty"));
  EXPECT_THAT(refused(request({64})).message(), HasSubstr("token 64"));
  EXPECT_THAT(refused(request({-1})).message(), HasSubstr("token -1"));
  const Status too_long = refused(request(std::vector<std::int32_t>(16, 5)));
  EXPECT_THAT(too_long.message(), HasSubstr("16 tokens"));
  EXPECT_THAT(too_long.message(), HasSubstr("holds 16"));
  Request stops = request({5});
  stops.params.stop = {"x"};
  EXPECT_THAT(refused(stops).message(), HasSubstr("tokenizer"));
  Request hot = request({5});
  hot.params.temperature = -1;
  EXPECT_THAT(refused(hot).message(), HasSubstr("temperature"));
  EXPECT_TRUE(s.engine->submit(request({5}), nullptr).ok());
  EXPECT_TRUE(s.engine->submit(request({5}), nullptr).ok());
  EXPECT_EQ(refused(request({5})).code(), Code::kExhausted);
  EXPECT_TRUE(s.engine->run().ok());
}

TEST(Engine, SaysWhenOthersHoldEverySlot) {
  Rig s(1);
  const std::int64_t slot = s.pool->alloc().value();
  Completion out;
  ASSERT_TRUE(submit_collect(*s.engine, request({5}), &out).ok());
  EXPECT_EQ(s.engine->run().code(), Code::kExhausted);
  s.pool->free(slot);
  EXPECT_TRUE(s.engine->run().ok());
  EXPECT_TRUE(out.status.ok());
}

TEST(Engine, AFailedDecodeEndsItsRequests) {
  Rig s(2);
  s.model.with_eos = false;
  Completion out;
  ASSERT_TRUE(submit_collect(*s.engine, request({5}, 50), &out).ok());
  s.model.fail_decode = true;
  EXPECT_EQ(s.engine->run().code(), Code::kIo);
  EXPECT_EQ(out.finish, FinishReason::kError);
  EXPECT_EQ(out.status.code(), Code::kIo);
  EXPECT_EQ(s.pool->n_free(), 2);
  EXPECT_TRUE(s.engine->idle());
}

TEST(Engine, LeavesSlotsWhenItGoesAway) {
  Rig s(2);
  s.model.with_eos = false;
  ASSERT_TRUE(s.engine->submit(request({5}, 50), nullptr).ok());
  ASSERT_TRUE(s.engine->step().ok());
  EXPECT_EQ(s.pool->n_free(), 1);
  s.engine.reset();
  EXPECT_EQ(s.pool->n_free(), 2);
}

TEST(Engine, RefusesAPoolOfAnotherModel) {
  ThreadPool threads(1);
  FakeModel model;
  const std::vector<LayerShape> shapes = {{1, 1, 16, 8, Gate::kScalar}};
  PoolConfig config;
  config.n_slots = 1;
  const auto pool =
      StatePool::create(
          CompiledScheme::make(Scheme::parse("fp32").value(), shapes, nullptr, "").value(), config)
          .value();
  EXPECT_EQ(Engine::create(model, *pool, threads, nullptr, {}).status().code(), Code::kMismatch);
}

}  // namespace
}  // namespace statepack
