#include "runtime/engine_loop.hpp"

#include <gmock/gmock.h>

#include <atomic>
#include <future>
#include <thread>

#include "engine_rig.hpp"

namespace statepack {
namespace {

using namespace std::chrono_literals;

constexpr auto kLong = 60s;  // never waited for unless something is broken

EngineLoop::Clock::time_point in(std::chrono::steady_clock::duration d) {
  return EngineLoop::Clock::now() + d;
}

TEST(EngineLoop, ServesManyThreads) {
  Rig rig(4);
  EngineLoop loop(*rig.engine);
  std::vector<Completion> out(60);
  std::vector<std::thread> clients;
  for (int t = 0; t < 6; ++t) {
    clients.emplace_back([&, t] {
      for (int i = t; i < 60; i += 6) {
        std::promise<void> done;
        Completion& reply = out[static_cast<std::size_t>(i)];
        ASSERT_TRUE(loop.submit(request(prompt_of(i)),
                                [&](const TokenEvent& event) {
                                  if (!event.finish) return;
                                  reply.tokens.assign(event.tokens.begin(), event.tokens.end());
                                  done.set_value();
                                })
                        .ok());
        ASSERT_EQ(done.get_future().wait_for(kLong), std::future_status::ready);
      }
    });
  }
  for (std::thread& c : clients) c.join();
  EXPECT_TRUE(loop.drain(in(kLong)));
  loop.stop();
  for (int i = 0; i < 60; ++i) {
    EXPECT_EQ(out[static_cast<std::size_t>(i)].tokens, alone(request(prompt_of(i))).tokens);
  }
}

TEST(EngineLoop, CancelsFromAnyThread) {
  Rig rig(2);
  rig.model.with_eos = false;
  EngineLoop loop(*rig.engine);
  std::promise<FinishReason> done;
  const auto id = loop.submit(request({5}, 1 << 30), [&](const TokenEvent& event) {
    if (event.finish) done.set_value(*event.finish);
  });
  ASSERT_TRUE(id.ok());
  loop.cancel(*id);
  auto finish = done.get_future();
  ASSERT_EQ(finish.wait_for(kLong), std::future_status::ready);
  EXPECT_EQ(finish.get(), FinishReason::kCancelled);
}

TEST(EngineLoop, DrainLetsRepliesEndAndTakesNoMore) {
  Rig rig(2);
  rig.model.with_eos = false;
  EngineLoop loop(*rig.engine);
  std::vector<Completion> out(6);
  for (Completion& reply : out) {
    ASSERT_TRUE(loop.submit(request({5}, 30),
                            [&](const TokenEvent& event) {
                              if (event.finish) reply.finish = *event.finish;
                            })
                    .ok());
  }
  EXPECT_TRUE(loop.drain(in(kLong)));
  for (const Completion& reply : out) EXPECT_EQ(reply.finish, FinishReason::kLength);
  EXPECT_FALSE(loop.accepting());
  EXPECT_EQ(loop.submit(request({5}), nullptr).status().code(), Code::kInterrupted);
  bool ran = false;
  EXPECT_TRUE(loop.call([&] { ran = true; }).ok());  // saving the cache comes after draining
  EXPECT_TRUE(ran);
}

TEST(EngineLoop, DrainCancelsWhatIsLeft) {
  Rig rig(2);
  rig.model.with_eos = false;
  EngineLoop loop(*rig.engine);
  std::atomic<int> n_cancelled = 0;
  for (int i = 0; i < 5; ++i) {  // two run, three wait
    Request endless = request({5}, 4000);
    endless.prompt.push_back(i);
    ASSERT_TRUE(loop.submit(std::move(endless),
                            [&](const TokenEvent& event) {
                              if (event.finish == FinishReason::kCancelled) ++n_cancelled;
                            })
                    .ok());
  }
  EXPECT_FALSE(loop.drain(in(0ms)));
  EXPECT_EQ(n_cancelled, 5);
  EXPECT_EQ(rig.pool->n_free(), 2);
}

TEST(EngineLoop, StopEndsEverythingOnce) {
  Rig rig(2);
  rig.model.with_eos = false;
  int n_ends = 0, n_tasks = 0;
  {
    EngineLoop loop(*rig.engine);
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(loop.submit(request({5}, 4000),
                              [&](const TokenEvent& event) { n_ends += event.finish ? 1 : 0; })
                      .ok());
    }
    ASSERT_TRUE(loop.post([&] { ++n_tasks; }).ok());
    loop.stop();
    EXPECT_EQ(n_ends, 4);
    EXPECT_EQ(n_tasks, 1);
    EXPECT_EQ(loop.post([] {}).code(), Code::kInterrupted);
    EXPECT_EQ(loop.call([] {}).code(), Code::kInterrupted);
    loop.stop();
    EXPECT_TRUE(loop.drain(in(kLong)));  // at once: nothing is left
  }
  EXPECT_EQ(rig.pool->n_free(), 2);
}

TEST(EngineLoop, AnErrorEndsItsRequestsAndNotTheLoop) {
  Rig rig(2);
  rig.model.with_eos = false;
  EngineLoop loop(*rig.engine);
  const auto ask = [&] {
    std::promise<Status> done;
    EXPECT_TRUE(loop.submit(request({5}, 4),
                            [&](const TokenEvent& event) {
                              if (event.finish) done.set_value(event.status);
                            })
                    .ok());
    auto status = done.get_future();
    EXPECT_EQ(status.wait_for(kLong), std::future_status::ready);
    return status.get();
  };
  ASSERT_TRUE(loop.call([&] { rig.model.fail_decode = true; }).ok());
  EXPECT_EQ(ask().code(), Code::kIo);
  ASSERT_TRUE(loop.call([&] { rig.model.fail_decode = false; }).ok());
  EXPECT_TRUE(ask().ok());
  EXPECT_EQ(loop.last_error().code(), Code::kIo);
}

TEST(EngineLoop, WaitsForSlotsThatOthersHold) {
  Rig rig(1);
  const std::int64_t slot = rig.pool->alloc().value();
  EngineLoop loop(*rig.engine);
  std::promise<Status> done;
  ASSERT_TRUE(loop.submit(request({5}, 4),
                          [&](const TokenEvent& event) {
                            if (event.finish) done.set_value(event.status);
                          })
                  .ok());
  auto status = done.get_future();
  EXPECT_EQ(status.wait_for(60ms), std::future_status::timeout);
  rig.pool->free(slot);
  ASSERT_EQ(status.wait_for(kLong), std::future_status::ready);
  EXPECT_TRUE(status.get().ok());
}

TEST(EngineLoop, SleepsWhenIdle) {
  Rig rig(1);
  EngineLoop loop(*rig.engine);
  ASSERT_TRUE(loop.call([] {}).ok());
  const auto cpu = [] {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  };
  const double before = cpu();
  std::this_thread::sleep_for(200ms);
  EXPECT_LT(cpu() - before, 0.05);
}

TEST(EngineLoop, CallbacksMayUseTheLoop) {
  Rig rig(2);
  rig.model.with_eos = false;
  EngineLoop loop(*rig.engine);
  std::promise<void> done;
  ASSERT_TRUE(loop.submit(request({5}, 2),
                          [&](const TokenEvent& event) {
                            if (!event.finish) return;
                            bool ran = false;
                            EXPECT_TRUE(loop.call([&] { ran = true; }).ok());
                            EXPECT_TRUE(ran);
                            EXPECT_TRUE(loop.submit(request({6}, 2),
                                                    [&](const TokenEvent& second) {
                                                      if (second.finish) done.set_value();
                                                    })
                                            .ok());
                          })
                  .ok());
  EXPECT_EQ(done.get_future().wait_for(kLong), std::future_status::ready);
}

}  // namespace
}  // namespace statepack
