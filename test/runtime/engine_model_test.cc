// The engine on the project's own model and real packed states.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <atomic>
#include <cctype>
#include <string>

#include "runtime/engine.hpp"
#include "runtime/plan_library.hpp"

namespace statepack {
namespace {

const std::string kDir = SP_SOURCE_DIR "/models/statepack-gdn";

class EngineModelTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    auto model = Model::load(kDir, threads_);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::move(model).value();
    tokenizer_ = Tokenizer::load(kDir).value();
    const PlanLibrary plans = PlanLibrary::open(kDir, {}).value();
    auto scheme = plans.compile(Scheme::parse(GetParam()).value(),
                                model_->config().recurrent_shapes(), model_->fingerprint());
    ASSERT_TRUE(scheme.ok()) << scheme.status().message();
    scheme_ = *scheme;
  }
  std::unique_ptr<StatePool> pool(std::int64_t n_slots) {
    PoolConfig config;
    config.n_slots = n_slots;
    config.conv_floats = model_->config().conv_floats();
    return StatePool::create(scheme_, config).value();
  }
  std::vector<Completion> replies(const std::vector<std::string>& prompts, std::int64_t n_slots,
                                  std::int64_t max_tokens) {
    const auto slots = pool(n_slots);
    const auto engine = Engine::create(*model_, *slots, threads_, tokenizer_.get(), {}).value();
    std::vector<Completion> out(prompts.size());
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      Request request;
      request.prompt = tokenizer_->encode(prompts[i], true);
      request.params.max_tokens = max_tokens;
      request.params.ignore_eos = true;
      EXPECT_TRUE(submit_collect(*engine, std::move(request), &out[i]).ok());
    }
    EXPECT_TRUE(engine->run().ok());
    EXPECT_EQ(slots->n_free(), n_slots);
    return out;
  }
  ThreadPool threads_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::shared_ptr<const CompiledScheme> scheme_;
};

std::string question(int i) {
  return "<|im_start|>user\nWhat is " + std::to_string(1234 + 77 * i) + " + " +
         std::to_string(98 + i * i) + "?<|im_end|>\n<|im_start|>assistant\n";
}

TEST_P(EngineModelTest, ABatchOf33IsEachAlone) {
  std::vector<std::string> prompts;
  for (int i = 0; i < 33; ++i) prompts.push_back(question(i));
  const std::vector<Completion> together = replies(prompts, 33, 12);
  for (const int i : {0, 7, 31, 32}) {
    const Completion alone = replies({question(i)}, 1, 12)[0];
    EXPECT_EQ(together[static_cast<std::size_t>(i)].tokens, alone.tokens) << i;
    EXPECT_EQ(together[static_cast<std::size_t>(i)].text, alone.text) << i;
  }
  // Fewer slots than requests: the queue changes no reply.
  const std::vector<Completion> queued = replies(prompts, 5, 12);
  for (std::size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(queued[i].tokens, together[i].tokens);
}

TEST_P(EngineModelTest, IdenticalPromptsGiveOneAnswer) {
  const std::vector<Completion> out = replies(std::vector<std::string>(33, question(3)), 16, 12);
  for (const Completion& c : out) EXPECT_EQ(c.tokens, out[0].tokens);
}

std::atomic<int> g_signals{0};

// A handler that runs inside a library's kernels must not find a stack pointer that is none:
// profilers, timers and Ctrl-C of a host program arrive at any instruction.
TEST_P(EngineModelTest, SignalsHarmNothing) {
  std::string text;
  for (int i = 0; i < 24; ++i) text += question(i);
  const Completion quiet = replies({text}, 1, 2)[0];
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) { g_signals.fetch_add(1, std::memory_order_relaxed); };
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ASSERT_EQ(::sigaction(SIGALRM, &action, &before), 0);
  const itimerval often{{0, 150}, {0, 150}};
  const itimerval never{};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  const int n_before = g_signals.load();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(replies({text}, 1, 2)[0].tokens, quiet.tokens);
  ASSERT_EQ(::setitimer(ITIMER_REAL, &never, nullptr), 0);
  ASSERT_EQ(::sigaction(SIGALRM, &before, nullptr), 0);
  EXPECT_GT(g_signals.load(), n_before + 50);
}

INSTANTIATE_TEST_SUITE_P(Schemes, EngineModelTest,
                         testing::Values("fp32", "stepquant:6", "pace:4/8"),
                         [](const auto& scheme) {
                           std::string name = scheme.param;
                           for (char& c : name)
                             c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

}  // namespace
}  // namespace statepack
