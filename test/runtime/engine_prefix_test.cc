// Prefix cache, limits, fairness and endings of the engine, on a model that notices every mix-up of
// states, caches and positions.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "../base/temporary_folder.hpp"
#include "engine_rig.hpp"

namespace statepack {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t kBlock = 64;

EngineConfig with_cache(PrefixMode mode, std::int64_t max_bytes = 64 << 20) {
  EngineConfig config;
  config.max_context = 6000;
  config.prefix_cache = {mode, kBlock, max_bytes};
  return config;
}

struct CachedRig : Rig {
  explicit CachedRig(PrefixMode mode, std::int64_t n_slots = 4, std::int64_t max_bytes = 64 << 20)
      : CachedRig(n_slots, with_cache(mode, max_bytes)) {}
  CachedRig(std::int64_t n_slots, const EngineConfig& config) : Rig(n_slots, "fp32", config) {
    model.keeps_state = true;
  }
};

Tokens text(std::int64_t n, std::uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  Tokens tokens(static_cast<std::size_t>(n));
  for (auto& t : tokens) t = static_cast<std::int32_t>(3 + random() % 61);
  return tokens;
}

struct Outcome {
  Completion reply;
  std::int64_t n_cached = -1;
  RequestTimes times;
  std::vector<std::pair<std::int64_t, std::int64_t>> progress;  ///< tokens read and cached
};

RequestId submit(Engine& engine, Request r, Outcome* out) {
  auto id = engine.submit(std::move(r), [out](const TokenEvent& event) {
    EXPECT_LE(event.n_cached, event.n_prompt_read);
    EXPECT_LE(event.n_prompt_read, event.n_prompt);
    if (event.choice == nullptr && !event.finish) {
      out->progress.emplace_back(event.n_prompt_read, event.n_cached);
    }
    if (!event.finish) return;
    out->reply.tokens.assign(event.tokens.begin(), event.tokens.end());
    out->reply.finish = *event.finish;
    out->reply.status = event.status;
    out->n_cached = event.n_cached;
    out->times = event.times;
  });
  EXPECT_TRUE(id.ok()) << id.status().message();
  return id.value();
}

Outcome answer(Rig& rig, Request r) {
  Outcome out;
  submit(*rig.engine, std::move(r), &out);
  const Status status = rig.engine->run();
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(out.reply.status.ok()) << out.reply.status.message();
  return out;
}

Tokens cold_reply(const Request& r) {
  EngineConfig config;
  config.max_context = 6000;
  Rig rig(1, "fp32", config);
  return answer(rig, r).reply.tokens;
}

TEST(EnginePrefix, CachedTokensAreBlocksOfAPromptReadBefore) {
  for (const std::int64_t n : {1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 4097}) {
    CachedRig rig(PrefixMode::kBlocks);
    const Request r = request(text(n), 10);
    const Outcome first = answer(rig, r);
    EXPECT_EQ(first.n_cached, 0) << n;
    const std::int64_t n_read = rig.engine->stats().prompt_tokens;
    EXPECT_EQ(n_read, n);
    const Outcome second = answer(rig, r);
    const std::int64_t expected = (n - 1) / kBlock * kBlock;
    EXPECT_EQ(second.n_cached, expected) << n;
    EXPECT_EQ(rig.engine->stats().prompt_tokens - n_read, n - expected) << n;
    EXPECT_EQ(rig.engine->stats().cached_tokens, expected) << n;
    EXPECT_EQ(first.reply.tokens, second.reply.tokens) << n;
    EXPECT_EQ(first.reply.tokens, cold_reply(r)) << n;
    // A longer prompt takes every block of the shorter one, its last included.
    Request longer = r;
    longer.prompt.push_back(9);
    EXPECT_EQ(answer(rig, longer).n_cached, n / kBlock * kBlock) << n;
  }
}

TEST(EnginePrefix, ATurnReadsOnlyWhatIsNew) {
  for (const std::int64_t n : {1, 5, 63, 64, 65, 127, 128, 129, 700, 4097}) {
    CachedRig rig(PrefixMode::kTurns);
    Request r = request(text(n), 10);
    const Outcome first = answer(rig, r);
    EXPECT_EQ(first.n_cached, 0);
    // The last token of a reply that ran into its limit was never read.
    const std::int64_t n_state =
        n + std::ssize(first.reply.tokens) - (first.reply.finish == FinishReason::kLength ? 1 : 0);
    r.prompt.insert(r.prompt.end(), first.reply.tokens.begin(), first.reply.tokens.end());
    for (const std::int32_t t : text(7, 5)) r.prompt.push_back(t);
    const Outcome second = answer(rig, r);
    EXPECT_EQ(second.n_cached, n_state) << n;
    EXPECT_EQ(second.reply.tokens, cold_reply(r)) << n;
    // Another question behind the first prompt resumes where that ended.
    Request other = request(text(n), 10);
    other.prompt.push_back(60);
    EXPECT_EQ(answer(rig, other).n_cached, n) << n;
  }
}

TEST(EnginePrefix, ReplyThatEndsAtItsFirstTokenLeavesItsPrompt) {
  CachedRig rig(PrefixMode::kTurns);
  Request r = request(text(30), 1);
  answer(rig, r);
  r.prompt.push_back(9);
  EXPECT_EQ(answer(rig, r).n_cached, 30);
}

std::int64_t last_slot(Rig& rig) {
  for (const SlotView& view : rig.engine->slots()) {
    if (view.n_last > 0) return view.slot;
  }
  ADD_FAILURE() << "no slot has a last sequence";
  return 1;
}

TEST(EnginePrefix, AStateOfOtherTokensThanItsPlaceSaysIsNotUsed) {
  CachedRig first(PrefixMode::kTurns);
  Request r = request(text(150), 10);
  const Outcome one = answer(first, r);
  PrefixRecord record = first.engine->record_of(last_slot(first)).value();
  ASSERT_EQ(record.snapshots.size(), 4U);
  auto forged = std::make_shared<Snapshot>(*record.snapshots[2]);  // that of the prompt
  forged->n_tokens = std::ssize(record.tokens);
  record.snapshots = {forged};
  CachedRig second(PrefixMode::kTurns);
  ASSERT_TRUE(second.engine->keep_record(record).ok());
  r.prompt.insert(r.prompt.end(), one.reply.tokens.begin(), one.reply.tokens.end());
  r.prompt.push_back(9);
  const Outcome out = answer(second, r);
  EXPECT_EQ(out.n_cached, 0);
  EXPECT_EQ(out.reply.tokens, cold_reply(r));
  EXPECT_EQ(second.engine->stats().prefix.corrupt, 1);
  EXPECT_EQ(second.engine->stats().prefix.hits, 0);
}

TEST(EnginePrefix, SegmentsEndAtBlocksWhateverIsCached) {
  CachedRig rig(PrefixMode::kTurns);
  Request r = request(text(150), 3);
  answer(rig, r);
  EXPECT_THAT(rig.model.prefills, ElementsAre(Pair(0, 64), Pair(64, 64), Pair(128, 22)));
  rig.model.prefills.clear();
  for (const std::int32_t t : text(100, 9)) r.prompt.push_back(t);
  answer(rig, r);
  EXPECT_THAT(rig.model.prefills, ElementsAre(Pair(150, 42), Pair(192, 58)));
}

TEST(EnginePrefix, ASmallCacheForgetsAndNeverErrs) {
  CachedRig rig(PrefixMode::kTurns, 4, 20000);
  std::mt19937 random(3);
  std::vector<Tokens> talks(6);
  for (std::size_t i = 0; i < talks.size(); ++i) talks[i] = text(50, 10);  // one system prompt
  std::int64_t n_cached = 0;
  for (int turn = 0; turn < 120; ++turn) {
    Tokens& talk = talks[random() % talks.size()];
    if (talk.size() > 600) talk.resize(50);
    for (const std::int32_t t : text(static_cast<std::int64_t>(1 + random() % 90), random()))
      talk.push_back(t);
    const Request r = request(talk, 12);
    const Outcome out = answer(rig, r);
    ASSERT_EQ(out.reply.tokens, cold_reply(r)) << turn;
    n_cached += out.n_cached;
    talk.insert(talk.end(), out.reply.tokens.begin(), out.reply.tokens.end());
    const EngineStats stats = rig.engine->stats();
    ASSERT_LE(stats.prefix.bytes, 20000);
    ASSERT_EQ(stats.prefix.n_pinned, 0);
  }
  const EngineStats stats = rig.engine->stats();
  EXPECT_GT(stats.prefix.evictions, 50);
  EXPECT_EQ(stats.cached_tokens, n_cached);
  EXPECT_EQ(stats.prefix.hit_tokens, n_cached);
  EXPECT_EQ(stats.prefix.queries, 120);
  EXPECT_GT(stats.prefix.hits, 20);
}

TEST(EnginePrefix, ManyAtOnceGetTheRepliesOfEachAlone) {
  for (const auto mode : {PrefixMode::kOff, PrefixMode::kBlocks, PrefixMode::kTurns}) {
    CachedRig rig(mode, 7);
    std::vector<Outcome> out(80);
    std::vector<Request> requests;
    for (unsigned i = 0; i < 80; ++i) {
      Tokens prompt = text(40 + i % 5 * 64, 77);
      for (const std::int32_t t : text(i % 9, i % 4)) prompt.push_back(t);
      requests.push_back(request(std::move(prompt), 5 + i % 11));
      submit(*rig.engine, requests.back(), &out[i]);
    }
    ASSERT_TRUE(rig.engine->run().ok());
    std::map<Tokens, Tokens> replies;
    for (unsigned i = 0; i < 80; ++i) {
      ASSERT_EQ(out[i].reply.tokens, cold_reply(requests[i])) << i;
    }
    EXPECT_EQ(rig.pool->n_free(), 7);
    EXPECT_EQ(rig.engine->stats().cached_tokens > 0, mode != PrefixMode::kOff);
  }
}

TEST(EnginePrefix, IdenticalPromptsGiveOneAnswer) {
  CachedRig rig(PrefixMode::kTurns, 8);
  std::vector<Outcome> out(64);
  for (Outcome& o : out) submit(*rig.engine, request(text(200), 15), &o);
  ASSERT_TRUE(rig.engine->run().ok());
  for (const Outcome& o : out) EXPECT_EQ(o.reply.tokens, out[0].reply.tokens);
}

TEST(EngineStorm, ThousandsOfAbortsLeaveNothingBehind) {
  EngineConfig config = with_cache(PrefixMode::kTurns, 200000);
  config.max_queue = 50;
  config.prefill_budget = 128;
  config.kv_bytes = 4000;
  CachedRig rig(5, config);
  std::mt19937 random(11);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  struct Open {
    RequestId id;
    int steps_since_cancel = -1;
  };
  std::map<RequestId, Open> open;
  std::int64_t n_submitted = 0, n_ended = 0, n_cancelled = 0, n_full = 0;
  std::set<RequestId> ended;
  while (n_submitted < 5000 || !open.empty()) {
    for (int i = below(4); i > 0 && n_submitted < 5000; --i) {
      Tokens prompt = text(1 + below(400), static_cast<unsigned>(below(3)));
      Request r = request(std::move(prompt), 1 + below(40));
      if (below(20) == 0) r.deadline = std::chrono::steady_clock::now();
      const auto id = rig.engine->submit(std::move(r), [&](const TokenEvent& event) {
        ASSERT_FALSE(ended.contains(event.request));
        if (!event.finish) return;
        ASSERT_NE(*event.finish, FinishReason::kError) << event.status.message();
        ended.insert(event.request);
        ++n_ended;
        n_cancelled += *event.finish == FinishReason::kCancelled ? 1 : 0;
        open.erase(event.request);
      });
      ++n_submitted;
      if (id.ok()) {
        open[*id] = {*id};
      } else {
        ASSERT_EQ(id.status().code(), Code::kExhausted);
        ASSERT_THAT(id.status().message(), HasSubstr("50"));
        ++n_full;
      }
    }
    for (auto& [id, o] : open) {
      if (o.steps_since_cancel < 0 && below(6) == 0) {
        rig.engine->cancel(id);
        o.steps_since_cancel = 0;
      }
    }
    ASSERT_TRUE(rig.engine->step().ok());
    for (auto& [id, o] : open) {
      if (o.steps_since_cancel < 0) continue;
      ASSERT_LT(++o.steps_since_cancel, 2) << "a cancelled request went on";
    }
    const EngineStats stats = rig.engine->stats();
    ASSERT_LE(stats.kv_bytes_reserved, 4000);
    ASSERT_EQ(stats.prefix.n_pinned, 0);
    ASSERT_LE(stats.prefix.bytes, 200000);
  }
  EXPECT_TRUE(rig.engine->idle());
  EXPECT_EQ(rig.pool->n_free(), 5);
  EXPECT_EQ(n_ended + n_full, 5000);
  EXPECT_GT(n_cancelled, 500);
  const EngineStats stats = rig.engine->stats();
  EXPECT_EQ(stats.n_ended(), n_ended);
  EXPECT_EQ(stats.n_finished(FinishReason::kCancelled), n_cancelled);
  EXPECT_GT(stats.n_finished(FinishReason::kDeadline), 50);
  EXPECT_EQ(stats.kv_bytes_reserved, 0);
  EXPECT_EQ(stats.n_running, 0);
  for (const SlotView& view : rig.engine->slots()) EXPECT_EQ(view.phase, SlotPhase::kFree);
}

TEST(EngineQueue, ShortPromptsPassLongOnesByAndLongOnesGoOn) {
  EngineConfig config;
  config.max_context = 6000;
  config.max_prompts = 3;
  Rig rig(16, "fp32", config);
  rig.model.with_eos = false;
  std::vector<Outcome> longs(5);
  for (Outcome& o : longs) submit(*rig.engine, request(text(5120), 4), &o);
  ASSERT_TRUE(rig.engine->step().ok());
  // A stream of short ones: each gets its first tokens while the long ones are read.
  int steps = 0;
  for (; steps < 200 && !std::all_of(longs.begin(), longs.end(),
                                     [](const Outcome& o) { return o.n_cached >= 0; });) {
    Outcome brief;
    submit(*rig.engine, request(text(20, static_cast<unsigned>(steps)), 2), &brief);
    int waited = 0;
    while (brief.n_cached < 0) {
      ASSERT_TRUE(rig.engine->step().ok());
      ASSERT_LE(++waited, 4);
      ++steps;
    }
  }
  // 50 segments of 512 tokens in all, one a step, and the short ones' turns.
  EXPECT_LE(steps, 110);
  for (const Outcome& o : longs) EXPECT_EQ(o.reply.tokens, longs[0].reply.tokens);
}

TEST(EngineQueue, RepliesKeepTheirTurnsWhilePromptsAreRead) {
  EngineConfig config;
  config.max_context = 6000;
  Rig rig(8, "fp32", config);
  rig.model.with_eos = false;
  Outcome reply;
  submit(*rig.engine, request({5}, 60), &reply);
  ASSERT_TRUE(rig.engine->step().ok());
  std::vector<Outcome> prompts(4);
  for (Outcome& o : prompts) submit(*rig.engine, request(text(5000), 2), &o);
  for (int i = 0; i < 40; ++i) {
    const EngineStats before = rig.engine->stats();
    ASSERT_TRUE(rig.engine->step().ok());
    const EngineStats after = rig.engine->stats();
    EXPECT_GT(after.reply_tokens, before.reply_tokens);
    EXPECT_LE(after.prompt_tokens - before.prompt_tokens, 1024);
  }
  ASSERT_TRUE(rig.engine->run().ok());
  EXPECT_EQ(reply.reply.tokens.size(), 60U);
}

TEST(EngineLimits, AttentionCacheIsReservedForTheLongestReply) {
  EngineConfig config;
  config.kv_bytes = 100 * FakeModel::kRowBytes;
  Rig rig(8, "fp32", config);
  rig.model.with_eos = false;
  std::vector<Outcome> out(6);
  for (Outcome& o : out) submit(*rig.engine, request(text(20), 21), &o);  // 40 tokens are read
  std::int64_t most = 0;
  while (!rig.engine->idle()) {
    ASSERT_TRUE(rig.engine->step().ok());
    const EngineStats stats = rig.engine->stats();
    ASSERT_LE(stats.kv_bytes_reserved, stats.kv_bytes_limit);
    most = std::max(most, stats.n_running);
  }
  EXPECT_EQ(most, 2);
  for (const Outcome& o : out) EXPECT_EQ(o.reply.tokens.size(), 21U);

  const auto never = rig.engine->submit(request(text(20), 82), nullptr);
  EXPECT_EQ(never.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(never.status().message(), HasSubstr("404 bytes"));
  EXPECT_THAT(never.status().message(), HasSubstr("have 400"));
  EXPECT_TRUE(rig.engine->submit(request(text(20), 81), nullptr).ok());
  EXPECT_TRUE(rig.engine->run().ok());
}

TEST(EngineLimits, WithoutMemoryOneRequestEnds) {
  Rig rig(4);
  rig.model.with_eos = false;
  rig.model.max_cache_tokens = 30;
  std::vector<Outcome> out(4);
  for (std::size_t i = 0; i < 4; ++i) {
    submit(*rig.engine, request(text(20), i == 2 ? 20 : 8), &out[i]);
  }
  ASSERT_TRUE(rig.engine->run().ok());
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(out[i].reply.status.code(), i == 2 ? Code::kExhausted : Code::kOk);
    if (i != 2) {
      EXPECT_EQ(out[i].reply.tokens, out[0].reply.tokens);
    }
  }
  EXPECT_EQ(rig.pool->n_free(), 4);
}

TEST(EngineLimits, DeadlinesEndRequestsWhereverTheyAre) {
  EngineConfig config;
  config.max_batch = 1;
  Rig rig(2, "fp32", config);
  rig.model.with_eos = false;
  const auto now = std::chrono::steady_clock::now();
  Outcome running, waiting, fine;
  Request r = request({5}, 1000);
  // Long enough for a first step, and over before the loop below ends.
  r.deadline = now + std::chrono::milliseconds(50);
  submit(*rig.engine, r, &running);
  r.deadline = now;
  submit(*rig.engine, r, &waiting);
  r.deadline = now + std::chrono::hours(1);
  r.params.max_tokens = 3;
  submit(*rig.engine, r, &fine);
  while (std::chrono::steady_clock::now() < now + std::chrono::milliseconds(60)) {
    if (rig.engine->stats().n_running == 0) {
      ASSERT_TRUE(rig.engine->step().ok());
    }
  }
  ASSERT_TRUE(rig.engine->run().ok());
  EXPECT_EQ(running.reply.finish, FinishReason::kDeadline);
  EXPECT_EQ(waiting.reply.finish, FinishReason::kDeadline);
  EXPECT_TRUE(waiting.reply.tokens.empty());
  EXPECT_EQ(fine.reply.finish, FinishReason::kLength);
  EXPECT_EQ(rig.engine->stats().n_finished(FinishReason::kDeadline), 2);
  EXPECT_EQ(finish_reason_name(FinishReason::kDeadline), "deadline");
}

TEST(EngineEvents, ProgressTimesAndSlots) {
  CachedRig rig(PrefixMode::kBlocks, 2);
  rig.model.with_eos = false;
  answer(rig, request(text(200), 1));
  Outcome out;
  Request r = request(text(300), 5);
  std::copy_n(text(200).begin(), 200, r.prompt.begin());
  r.progress = true;
  const RequestId id = submit(*rig.engine, r, &out);
  EXPECT_EQ(rig.engine->stats().n_waiting, 1);
  ASSERT_TRUE(rig.engine->step().ok());
  std::vector<SlotView> slots = rig.engine->slots();
  ASSERT_EQ(slots.size(), 2U);
  const auto used = std::find_if(slots.begin(), slots.end(),
                                 [](const SlotView& v) { return v.phase == SlotPhase::kReply; });
  ASSERT_NE(used, slots.end());
  EXPECT_EQ(used->request, id);
  EXPECT_EQ(used->n_prompt, 300);
  EXPECT_EQ(used->n_cached, 192);
  EXPECT_EQ(used->n_prompt_read, 300);
  EXPECT_EQ(used->n_reply, 2);     // the prompt's own token and one step
  EXPECT_EQ(used->position, 301);  // of which the second was read
  ASSERT_TRUE(rig.engine->run().ok());
  EXPECT_THAT(out.progress, ElementsAre(Pair(256, 192), Pair(300, 192)));
  EXPECT_GE(out.times.queued, 0);
  EXPECT_GE(out.times.prompt, 0);
  EXPECT_GE(out.times.reply, 0);
  EXPECT_EQ(rig.engine->stats().decode_steps, 4);
  EXPECT_EQ(rig.engine->stats().decode_rows, 4);

  const std::int64_t held = rig.pool->alloc().value();
  slots = rig.engine->slots();
  for (const SlotView& view : slots) {
    EXPECT_EQ(view.phase, view.slot == held ? SlotPhase::kHeld : SlotPhase::kFree);
  }
  rig.pool->free(held);
}

TEST(EngineEvents, ALongPromptShowsItsPhase) {
  Rig rig(1);
  Outcome out;
  const RequestId id = submit(*rig.engine, request(text(2000), 5), &out);
  ASSERT_TRUE(rig.engine->step().ok());
  const SlotView view = rig.engine->slots()[0];
  EXPECT_EQ(view.phase, SlotPhase::kPrompt);
  EXPECT_EQ(view.request, id);
  EXPECT_EQ(view.n_prompt_read, 512);
  EXPECT_EQ(rig.engine->stats().n_prompts, 1);
  rig.engine->cancel_all();
  ASSERT_TRUE(rig.engine->step().ok());
  EXPECT_EQ(out.reply.finish, FinishReason::kCancelled);
  EXPECT_TRUE(rig.engine->idle());
}

TEST(EngineFiles, ASavedSequenceIsFoundInAnotherEngine) {
  const TemporaryFolder folder;
  const std::string path = folder / "slot";
  CachedRig first(PrefixMode::kTurns);
  Request r = request(text(150), 10);
  const Outcome one = answer(first, r);
  std::int64_t slot = 0;
  for (const SlotView& view : first.engine->slots()) {
    if (view.n_last > 0) slot = view.slot;
  }
  ASSERT_GT(slot, 0);
  const auto saved = first.engine->save_slot(slot, path);
  ASSERT_TRUE(saved.ok()) << saved.status().message();
  EXPECT_EQ(saved->n_snapshots, 4);  // two blocks, the prompt, the turn

  CachedRig second(PrefixMode::kTurns);
  const auto loaded = second.engine->load_prefix(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded->n_tokens, saved->n_tokens);
  EXPECT_EQ(loaded->n_snapshots, 4);
  EXPECT_EQ(loaded->n_bytes, saved->n_bytes);
  r.prompt.insert(r.prompt.end(), one.reply.tokens.begin(), one.reply.tokens.end());
  r.prompt.push_back(9);
  const Outcome warm = answer(second, r);
  EXPECT_EQ(warm.n_cached, saved->n_tokens);
  EXPECT_EQ(warm.reply.tokens, cold_reply(r));

  // Where every hit must equal a cold read, only the blocks are taken.
  CachedRig strict(PrefixMode::kBlocks);
  ASSERT_TRUE(strict.engine->load_prefix(path).ok());
  EXPECT_EQ(answer(strict, r).n_cached, 128);

  EXPECT_EQ(first.engine->erase_slot(slot).value(), saved->n_tokens);
  EXPECT_EQ(answer(first, r).n_cached, 150);
  EXPECT_EQ(first.engine->stats().prefix.queries, 2);  // saving and forgetting are no requests
  EXPECT_EQ(first.engine->erase_slot(99).status().code(), Code::kInvalidArgument);
}

TEST(EngineFiles, ARunningSequenceCanBeSaved) {
  const TemporaryFolder folder;
  CachedRig rig(PrefixMode::kTurns, 1);
  rig.model.with_eos = false;
  Outcome out;
  submit(*rig.engine, request(text(700), 50), &out);
  ASSERT_TRUE(rig.engine->step().ok());
  EXPECT_THAT(rig.engine->save_slot(1, folder / "a").status().message(), HasSubstr("reading"));
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(rig.engine->step().ok());
  const SlotView view = rig.engine->slots()[0];
  const auto saved = rig.engine->save_slot(1, folder / "a");
  ASSERT_TRUE(saved.ok()) << saved.status().message();
  EXPECT_EQ(saved->n_tokens, view.position);
  ASSERT_TRUE(rig.engine->run().ok());
  CachedRig other(PrefixMode::kTurns, 1);
  ASSERT_TRUE(other.engine->load_prefix(folder / "a").ok());
  Request r = request(text(700), 10);
  r.prompt.insert(r.prompt.end(), out.reply.tokens.begin(), out.reply.tokens.end());
  const Outcome warm = answer(other, r);
  EXPECT_EQ(warm.n_cached, saved->n_tokens);
  EXPECT_EQ(warm.reply.tokens, cold_reply(r));
}

TEST(EngineFiles, AWholeCacheGoesToAFolderAndBack) {
  const TemporaryFolder folder;
  const std::string path = folder / "prefixes";
  CachedRig first(PrefixMode::kTurns);
  std::vector<Request> requests;
  for (unsigned i = 0; i < 12; ++i) {
    Tokens prompt = text(100, 4);
    for (const std::int32_t t : text(10 + i * 20, i)) prompt.push_back(t);
    requests.push_back(request(std::move(prompt), 6));
    answer(first, requests.back());
  }
  for (int round = 0; round < 2; ++round) {  // the second save replaces the first
    const auto saved = first.engine->save_prefixes(path);
    ASSERT_TRUE(saved.ok()) << saved.status().message();
    EXPECT_EQ(saved->n_snapshots, first.engine->stats().prefix.n_snapshots);
  }
  folder.put("prefixes/99999999.spprefix", "no prefix at all");
  folder.put("prefixes/00000000.spprefix.tmp-1-1", "half a file");
  CachedRig second(PrefixMode::kTurns);
  std::vector<Status> skipped;
  const auto loaded = second.engine->load_prefixes(path, &skipped);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  ASSERT_EQ(skipped.size(), 1U);
  EXPECT_THAT(skipped[0].message(), HasSubstr("99999999.spprefix"));
  const EngineStats a = first.engine->stats(), b = second.engine->stats();
  EXPECT_EQ(a.prefix.n_snapshots, b.prefix.n_snapshots);
  EXPECT_EQ(a.prefix.row_bytes, b.prefix.row_bytes);
  for (Request r : requests) {
    r.prompt.push_back(9);
    const Outcome warm = answer(second, r);
    EXPECT_EQ(warm.n_cached, std::ssize(r.prompt) - 1);
    EXPECT_EQ(warm.reply.tokens, cold_reply(r));
  }
  // What cannot be written is the least recent: a disk that is full after some files has the
  // latest.
  const std::string full = folder / "full";
  std::filesystem::create_directories(full + "/00000000.spprefix/in the way");
  EXPECT_EQ(second.engine->save_prefixes(full).status().code(), Code::kIo);
  CachedRig third(PrefixMode::kTurns);
  ASSERT_TRUE(third.engine->load_prefixes(full, &skipped).ok());
  Request latest = requests.back();
  latest.prompt.push_back(9);
  EXPECT_EQ(answer(third, latest).n_cached, std::ssize(latest.prompt) - 1);
  ASSERT_TRUE(second.engine->save_prefixes(path).ok());
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    EXPECT_THAT(entry.path().filename().string(), testing::Not(HasSubstr("tmp")));
    EXPECT_THAT(entry.path().filename().string(), testing::Not(HasSubstr("999")));
  }
  EXPECT_EQ(second.engine->load_prefixes(folder / "nothing", nullptr)->n_tokens, 0);
  second.engine->clear_prefixes();
  EXPECT_EQ(second.engine->stats().prefix.bytes, 0);
}

TEST(EngineFiles, ABoundOfStatesIsNamedAndWhatItEvictsIsNotCounted) {
  const TemporaryFolder folder;
  const std::string path = folder / "slot";
  CachedRig first(PrefixMode::kTurns);
  answer(first, request(text(150), 10));
  const std::int64_t slot = last_slot(first);
  const auto saved = first.engine->save_slot(slot, path);
  ASSERT_TRUE(saved.ok()) << saved.status().message();
  ASSERT_EQ(saved->n_snapshots, 4);
  const std::int64_t n_state = std::ssize(first.engine->record_of(slot)->snapshots.back()->bytes);

  EngineConfig config = with_cache(PrefixMode::kTurns);
  config.prefix_cache.max_state_bytes = 2 * n_state;
  CachedRig two(1, config);
  const auto loaded = two.engine->load_prefix(path);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded->n_snapshots, 2);
  EXPECT_EQ(loaded->n_tokens, saved->n_tokens);
  EXPECT_EQ(two.engine->stats().prefix.n_snapshots, 2);

  config.prefix_cache.max_state_bytes = 10;
  CachedRig none(1, config);
  const Status refused = none.engine->load_prefix(path).status();
  EXPECT_EQ(refused.code(), Code::kExhausted);
  EXPECT_EQ(refused.message(),
            "'" + path + "': its state takes " + std::to_string(n_state) +
                " bytes, and the prefix cache may keep 10 bytes of states; raise that bound");
  EXPECT_EQ(none.engine->stats().prefix.n_nodes, 0);

  CachedRig brief(PrefixMode::kTurns, 1);
  answer(brief, request(text(30), 4));
  ASSERT_TRUE(brief.engine->save_slot(1, path).ok());
  CachedRig blocks(PrefixMode::kBlocks, 1);
  const Status elsewhere = blocks.engine->load_prefix(path).status();
  EXPECT_EQ(elsewhere.code(), Code::kMismatch);
  EXPECT_THAT(elsewhere.message(), HasSubstr("at the end of a block of 64 tokens"));
}

TEST(EngineFiles, FilesOfOthersAreRefused) {
  const TemporaryFolder folder;
  const std::string path = folder / "a";
  CachedRig rig(PrefixMode::kTurns, 1);
  answer(rig, request(text(100), 4));
  ASSERT_TRUE(rig.engine->save_slot(1, path).ok());
  const auto refused = [&](Rig& other) {
    const EngineStats before = other.engine->stats();
    const auto loaded = other.engine->load_prefix(path);
    EXPECT_FALSE(loaded.ok());
    EXPECT_THAT(loaded.status().message(), HasSubstr(path));
    EXPECT_EQ(other.engine->stats().prefix.n_nodes, before.prefix.n_nodes);
    return loaded.status();
  };
  EngineConfig config = with_cache(PrefixMode::kTurns);
  {
    Rig other(1, "int8", config);
    EXPECT_THAT(refused(other).message(), HasSubstr("int8"));
  }
  {
    config.prefix_cache.block_tokens = 32;
    Rig other(1, "fp32", config);
    EXPECT_THAT(refused(other).message(), HasSubstr("every 64"));
  }
  config = with_cache(PrefixMode::kTurns);
  {
    config.max_context = 50;
    Rig other(1, "fp32", config);
    EXPECT_THAT(refused(other).message(), HasSubstr("at most 50"));
  }
  config = with_cache(PrefixMode::kTurns, 300);
  {
    Rig other(1, "fp32", config);
    EXPECT_EQ(refused(other).code(), Code::kExhausted);
  }
  Rig none(1);
  EXPECT_EQ(none.engine->load_prefix(path).status().code(), Code::kUnsupported);
  EXPECT_EQ(none.engine->save_slot(1, path).status().code(), Code::kUnsupported);
  EXPECT_EQ(rig.engine->load_prefix(folder / "nothing").status().code(), Code::kNotFound);
}

}  // namespace
}  // namespace statepack
