// The prefix cache on the project's own model: bits, not tokens alone.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "../base/temporary_folder.hpp"
#include "runtime/engine.hpp"
#include "runtime/plan_library.hpp"

namespace statepack {
namespace {

const std::string kDir = SP_SOURCE_DIR "/models/statepack-gdn";
using Tokens = std::vector<std::int32_t>;

/// A model, a pool of one scheme, and an engine that can be made anew.
struct Bench {
  ThreadPool threads;
  std::unique_ptr<Model> model = Model::load(kDir, threads).value();
  std::unique_ptr<Tokenizer> tokenizer = Tokenizer::load(kDir).value();
  std::unique_ptr<StatePool> pool;
  std::unique_ptr<Engine> engine;

  Bench(const std::string& scheme, PrefixMode mode) {
    const PlanLibrary plans = PlanLibrary::open(kDir, {}).value();
    auto compiled = plans.compile(Scheme::parse(scheme).value(), model->config().recurrent_shapes(),
                                  model->fingerprint());
    EXPECT_TRUE(compiled.ok()) << compiled.status().message();
    PoolConfig config;
    config.n_slots = 3;
    config.conv_floats = model->config().conv_floats();
    pool = StatePool::create(*compiled, config).value();
    restart(mode);
  }
  void restart(PrefixMode mode) {
    EngineConfig config;
    config.prefix_cache.mode = mode;
    engine = Engine::create(*model, *pool, threads, tokenizer.get(), config).value();
  }
  Tokens encode(const std::string& text) const { return tokenizer->encode(text, true); }
};

struct Reply {
  Tokens tokens;
  std::vector<float> logprobs;  ///< of every token and of the best three: a digest of all logits
  std::int64_t n_cached = -1;
  bool operator==(const Reply& other) const {
    return tokens == other.tokens && logprobs.size() == other.logprobs.size() &&
           std::memcmp(logprobs.data(), other.logprobs.data(), logprobs.size() * sizeof(float)) ==
               0;
  }
};

void ask(Bench& bench, Tokens prompt, std::int64_t n_tokens, Reply* out) {
  Request request;
  request.prompt = std::move(prompt);
  request.params.max_tokens = n_tokens;
  request.params.ignore_eos = true;
  request.params.logprobs = 3;
  const auto id = bench.engine->submit(std::move(request), [out](const TokenEvent& event) {
    if (event.choice != nullptr) {
      out->logprobs.push_back(event.choice->logprob);
      for (const TokenLogprob& top : event.choice->top) out->logprobs.push_back(top.logprob);
    }
    if (!event.finish) return;
    EXPECT_TRUE(event.status.ok()) << event.status.message();
    out->tokens.assign(event.tokens.begin(), event.tokens.end());
    out->n_cached = event.n_cached;
  });
  EXPECT_TRUE(id.ok()) << id.status().message();
}

Reply answer(Bench& bench, const Tokens& prompt, std::int64_t n_tokens = 12) {
  Reply reply;
  ask(bench, prompt, n_tokens, &reply);
  EXPECT_TRUE(bench.engine->run().ok());
  return reply;
}

/// About `n` tokens of chat, different for every `seed`.
Tokens talk(const Bench& bench, std::size_t n, int seed) {
  std::string text;
  for (int i = 0; bench.encode(text).size() < n; ++i) {
    text += "<|im_start|>user\nWhat is " + std::to_string(1234 + 77 * i + seed) + " + " +
            std::to_string(98 + i * i) +
            "?<|im_end|>\n<|im_start|>assistant\nA number.<|im_end|>\n";
  }
  Tokens tokens = bench.encode(text);
  tokens.resize(n);
  return tokens;
}

class PrefixModelTest : public testing::TestWithParam<const char*> {};

TEST_P(PrefixModelTest, ABlockHitIsAColdReadBitForBit) {
  Bench bench(GetParam(), PrefixMode::kBlocks);
  const Tokens prompt = talk(bench, 700, 1);
  const Reply cold = answer(bench, prompt);
  EXPECT_EQ(cold.n_cached, 0);
  const Reply warm = answer(bench, prompt);
  EXPECT_EQ(warm.n_cached, 512);
  EXPECT_TRUE(warm == cold);
  // Whatever else is cached, and in whatever company.
  Tokens sibling = prompt;
  sibling.resize(300);
  std::vector<Reply> out(3);
  ask(bench, prompt, 12, &out[0]);
  ask(bench, sibling, 12, &out[1]);
  ask(bench, prompt, 12, &out[2]);
  ASSERT_TRUE(bench.engine->run().ok());
  EXPECT_EQ(out[1].n_cached, 256);
  EXPECT_TRUE(out[0] == cold);
  EXPECT_TRUE(out[2] == cold);
  bench.restart(PrefixMode::kBlocks);
  EXPECT_TRUE(answer(bench, sibling) == out[1]);
  EXPECT_TRUE(answer(bench, prompt) == cold);
  // A cache that keeps turns, too, leaves cold reads and blocks as they are.
  bench.restart(PrefixMode::kTurns);
  EXPECT_TRUE(answer(bench, prompt) == cold);
  EXPECT_TRUE(answer(bench, prompt) == cold);
  if (std::string(GetParam()) == "fp32") {  // its rounding is none: no cache at all is the same
    bench.restart(PrefixMode::kOff);
    EXPECT_TRUE(answer(bench, prompt) == cold);
  }
}

TEST_P(PrefixModelTest, ASecondTurnIsASequenceThatNeverStopped) {
  Bench bench(GetParam(), PrefixMode::kTurns);
  const Tokens first = talk(bench, 90, 1);
  const Reply turn = answer(bench, first, 20);
  Tokens second = first;
  second.insert(second.end(), turn.tokens.begin(), turn.tokens.end());
  const Tokens question = talk(bench, 40, 2);
  second.insert(second.end(), question.begin(), question.end());
  const Reply reply = answer(bench, second);
  EXPECT_EQ(reply.n_cached, 90 + 19);  // the last token of a reply is never read

  // By hand, in one slot that nobody saves or restores.
  Model& model = *bench.model;
  StatePool& pool = *bench.pool;
  const std::int64_t slot = pool.alloc().value();
  const auto kv = model.new_kv_cache();
  DenseState state = model.new_dense_state();
  std::vector<float> logits(static_cast<std::size_t>(model.config().vocab));
  ASSERT_TRUE(model.prefill(first, 0, state, *kv, 0, nullptr).ok());
  ASSERT_TRUE(hand_over(pool, slot, state, 90, bench.threads).ok());
  std::int64_t position = 90;
  const auto decode = [&](std::int32_t token) {
    const DecodeRow row{slot, kv.get(), token, position};
    ASSERT_TRUE(model.decode(pool, std::span(&row, 1), logits.data()).ok());
    pool.set_n_tokens(slot, ++position);
  };
  for (std::size_t i = 0; i + 1 < turn.tokens.size(); ++i) decode(turn.tokens[i]);
  ASSERT_TRUE(restore_dense(pool, slot, state, bench.threads).ok());
  const std::span<const std::int32_t> rest = std::span(second).subspan(90 + 19);
  ASSERT_TRUE(model.prefill(rest, position, state, *kv, 1, logits.data()).ok());
  position = std::ssize(second);
  ASSERT_TRUE(hand_over(pool, slot, state, position, bench.threads).ok());
  Sampler sampler({}, second);
  SamplerScratch scratch;
  Tokens tokens;
  for (std::size_t i = 0; i < reply.tokens.size(); ++i) {
    if (i > 0) decode(tokens.back());
    tokens.push_back(sampler.sample(logits, position, scratch)->token);
  }
  EXPECT_EQ(tokens, reply.tokens);
  pool.free(slot);
}

TEST_P(PrefixModelTest, ABrokenStateEndsOneRequestAndIsNotCached) {
  Bench bench(GetParam(), PrefixMode::kTurns);
  const Tokens victim = talk(bench, 300, 1), bystander = talk(bench, 120, 2);
  const Reply expected = answer(bench, bystander, 30);
  const Reply whole = answer(bench, victim, 30);
  bench.restart(PrefixMode::kTurns);
  std::vector<Reply> out(2);
  ask(bench, bystander, 30, &out[0]);
  Status broken;
  Request request;
  request.prompt = victim;
  request.params.max_tokens = 30;
  request.params.ignore_eos = true;
  const auto id = bench.engine->submit(std::move(request), [&](const TokenEvent& event) {
    if (event.finish) broken = event.status;
  });
  ask(bench, bystander, 30, &out[1]);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(bench.engine->step().ok());
  for (const SlotView& view : bench.engine->slots()) {
    if (view.request != *id) continue;
    ASSERT_EQ(view.phase, SlotPhase::kReply);
    bench.pool->conv(view.slot)[5] = std::numeric_limits<float>::quiet_NaN();
  }
  ASSERT_TRUE(bench.engine->run().ok());
  EXPECT_EQ(broken.code(), Code::kNotFinite) << broken.message();
  EXPECT_EQ(bench.engine->stats().nonfinite, 1);
  for (const Reply& reply : out) EXPECT_TRUE(reply == expected);
  EXPECT_TRUE(answer(bench, victim, 30) == whole);
}

constexpr const char* kFolderVariable = "STATEPACK_TEST_FOLDER";

TEST_P(PrefixModelTest, SavesAtTheEnd) {
  const TemporaryFolder own;
  const char* folder = std::getenv(kFolderVariable);  // set when the next test starts this one
  Bench bench(GetParam(), PrefixMode::kTurns);
  answer(bench, talk(bench, 300, 1));
  const auto saved = bench.engine->save_prefixes(folder != nullptr ? folder : own.path());
  ASSERT_TRUE(saved.ok()) << saved.status().message();
  EXPECT_EQ(saved->n_tokens, 311);
  EXPECT_EQ(saved->n_snapshots, 3);
}

TEST_P(PrefixModelTest, AnotherProcessGoesOnBitForBit) {
  const TemporaryFolder folder;
  std::string filter = testing::UnitTest::GetInstance()->current_test_info()->name();
  filter = "--gtest_filter=*SavesAtTheEnd" + filter.substr(filter.find('/'));
  const std::string variable = std::string(kFolderVariable) + "=" + folder.path();
  const pid_t child = fork();
  if (child == 0) {
    char program[] = "/proc/self/exe";
    char* const arguments[] = {program, filter.data(), nullptr};
    char* const environment[] = {const_cast<char*>(variable.c_str()), nullptr};
    execve(program, arguments, environment);
    _exit(127);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  Bench bench(GetParam(), PrefixMode::kTurns);
  Tokens next = talk(bench, 300, 1);
  const Reply turn = answer(bench, next);
  next.insert(next.end(), turn.tokens.begin(), turn.tokens.end());
  next.push_back(next.front());
  const Reply expected = answer(bench, next);
  bench.restart(PrefixMode::kTurns);
  std::vector<Status> skipped;
  const auto loaded = bench.engine->load_prefixes(folder.path(), &skipped);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_TRUE(skipped.empty()) << skipped[0].message();
  EXPECT_EQ(loaded->n_snapshots, 3);  // block, prompt, turn
  const Reply warm = answer(bench, next);
  EXPECT_EQ(warm.n_cached, 311);
  EXPECT_EQ(warm.n_cached, expected.n_cached);
  EXPECT_TRUE(warm == expected);
}

TEST(PrefixMemory, ACachedPrefixTakesItsPayloadAndNothingMore) {
  for (const char* scheme :
       {"fp32", "bf16", "leapquant:8", "leapquant:8,records=int8", "pace:4", "pace:4/8",
        "stepquant:4,period=16", "stepquant:4,period=16,records=int8", "stepquant:4,period=8"}) {
    Bench bench(scheme, PrefixMode::kBlocks);
    const SchemeBits bits = bench.pool->scheme().bits();
    const std::int64_t conv = 4 * bench.pool->conv_floats();
    const std::int64_t payload = bits.page_bytes + bits.cursor_bytes + conv;
    const Tokens prompt = talk(bench, 512, 1);
    answer(bench, prompt, 6);
    const PrefixCacheStats blocks = bench.engine->stats().prefix;
    ASSERT_EQ(blocks.n_snapshots, 2) << scheme;
    const std::int64_t block = blocks.state_bytes / 2;
    bench.restart(PrefixMode::kTurns);
    answer(bench, prompt, 6);
    const PrefixCacheStats turns = bench.engine->stats().prefix;
    ASSERT_EQ(turns.n_snapshots, 3) << scheme;
    const std::int64_t turn = turns.state_bytes - 2 * block;
    const std::int64_t rows = bench.model->config().kv_bytes_per_token();
    EXPECT_EQ(turns.row_bytes, (512 + 5) * rows) << scheme;
    std::printf("%-36s slot %8ld; snapshot of a block %8ld, of a turn %8ld; rows %ld a token\n",
                scheme, bench.pool->bytes_per_slot(), block, turn, rows);
    const std::int64_t header = 1024;  // names, fingerprints, shapes, checksums
    EXPECT_GE(block, payload) << scheme;
    EXPECT_LE(block, payload + header) << scheme;
    EXPECT_GE(turn, payload + bits.window_bytes) << scheme;
    EXPECT_LE(turn, payload + bits.window_bytes + header) << scheme;
  }
}

TEST(ConvFormat, HistoryInBf16KeepsEveryEquality) {
  Bench bench("stepquant:4,period=16,conv=bf16", PrefixMode::kBlocks);
  const Tokens prompt = talk(bench, 700, 1);
  const Reply cold = answer(bench, prompt, 40);
  std::vector<Reply> out(3);
  ask(bench, prompt, 40, &out[0]);
  ask(bench, talk(bench, 90, 2), 40, &out[1]);
  ask(bench, prompt, 40, &out[2]);
  ASSERT_TRUE(bench.engine->run().ok());
  EXPECT_EQ(out[0].n_cached, 512);
  EXPECT_TRUE(out[0] == cold);
  EXPECT_TRUE(out[2] == cold);
  bench.restart(PrefixMode::kOff);
  EXPECT_EQ(answer(bench, talk(bench, 90, 2), 40).tokens, out[1].tokens);
}

TEST(ConvFormat, HistoryInBf16IsCloseToF32) {
  // Forced through the same tokens, so that only the format differs.
  Bench f32("fp32", PrefixMode::kOff);
  Bench bf16("fp32,conv=bf16", PrefixMode::kOff);
  const Tokens tokens = talk(f32, 300, 1);
  std::vector<std::vector<float>> logits;
  for (Bench* bench : {&f32, &bf16}) {
    const std::int64_t slot = bench->pool->alloc().value();
    const auto kv = bench->model->new_kv_cache();
    std::vector<float>& all = logits.emplace_back();
    std::vector<float> row(static_cast<std::size_t>(bench->model->config().vocab));
    for (std::int64_t t = 0; t < std::ssize(tokens); ++t) {
      const DecodeRow in{slot, kv.get(), tokens[static_cast<std::size_t>(t)], t};
      ASSERT_TRUE(bench->model->decode(*bench->pool, std::span(&in, 1), row.data()).ok());
      bench->pool->set_n_tokens(slot, t + 1);
      all.insert(all.end(), row.begin(), row.end());
    }
    bench->pool->free(slot);
  }
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < logits[0].size(); ++i) {
    const double d = logits[0][i] - logits[1][i];
    difference += d * d;
    norm += double{logits[0][i]} * logits[0][i];
  }
  const double relative = std::sqrt(difference / norm);
  std::printf("logits over 300 tokens differ by %.2g of their norm\n", relative);
  EXPECT_GT(relative, 0);
  // Each of the three older taps carries a rounding of at most 2^-9 of its value.
  EXPECT_LT(relative, 3 * 0x1p-9);
}

INSTANTIATE_TEST_SUITE_P(Schemes, PrefixModelTest,
                         testing::Values("fp32", "leapquant:8", "stepquant:4,period=16",
                                         "pace:4/8"),
                         [](const auto& scheme) {
                           std::string name = scheme.param;
                           for (char& c : name) {
                             c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           }
                           return name;
                         });

}  // namespace
}  // namespace statepack
