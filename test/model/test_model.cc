// The demo models against logits and states of another implementation.
#include "model/model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "model_testing.hpp"

namespace statepack {
namespace {

using testing::by_decode;
using testing::by_prefill;
using testing::Reading;
using testing::relative_error;

// test/data/README.md says where these come from: another implementation, f32 throughout. Two f32
// implementations with other orders of summation differ by about 1e-6 over these depths; the
// tolerances are the reference's own recommendation, twice that for logits.
constexpr double kLogits = 2e-4, kStates = 1e-4;
constexpr int kReferenceLogits = 8;

struct Source {
  const char* name;
  const char* reference;
};
void PrintTo(const Source& source, std::ostream* out) { *out << source.name; }

class Reference : public ::testing::TestWithParam<Source> {
 protected:
  Reference()
      : reference_(
            *SafeTensors::open(std::string(SP_SOURCE_DIR "/test/data/") + GetParam().reference)),
        threads_(2) {}

  void SetUp() override {
    std::string dir = SP_SOURCE_DIR "/models/statepack-gdn";
    if (GetParam().name == std::string("kda")) {
      const char* named = std::getenv("STATEPACK_KDA_MODEL");
      if (named == nullptr) {
        GTEST_SKIP() << "set STATEPACK_KDA_MODEL to the folder of statepack-kda to run this test";
      }
      dir = named;
    }
    model_ = testing::load(dir, threads_);
    ASSERT_NE(model_, nullptr);
  }

  std::vector<std::int32_t> tokens(const std::string& prompt) const {
    const TensorView* view = reference_.find(prompt + ".tokens");
    std::vector<std::int32_t> out(view->n_bytes / 4);
    std::memcpy(out.data(), view->data, view->n_bytes);
    return out;
  }
  std::vector<float> floats(const std::string& name) const {
    return *to_f32(*reference_.find(name));
  }

  void compare(const std::string& prompt, const Reading& run, const std::string& how) const {
    EXPECT_LT(relative_error(run.logits, floats(prompt + ".logits")), kLogits)
        << prompt << " " << how;
    const ModelConfig& c = model_->config();
    const std::int64_t channels = c.conv_channels();
    int recurrent = 0;
    for (std::size_t layer = 0; layer < c.layers.size(); ++layer) {
      if (!c.is_recurrent(layer)) continue;
      const std::string at = prompt + ".layer" + std::to_string(layer);
      if (reference_.find(at + ".state") != nullptr) {
        const std::vector<float> S = floats(at + ".state");
        const float* got = run.state.S.data() + recurrent * c.recurrent.n_values();
        EXPECT_LT(relative_error(got, S.data(), S.size()), kStates) << at << " " << how;
      }
      if (reference_.find(at + ".conv") != nullptr) {  // [channels][3]; ours is [3][channels]
        const std::vector<float> conv = floats(at + ".conv");
        std::vector<float> got(conv.size());
        for (std::int64_t ch = 0; ch < channels; ++ch) {
          for (int j = 0; j < 3; ++j) {
            got[std::size_t(ch * 3 + j)] =
                run.state.conv[std::size_t((recurrent * 3 + j) * channels + ch)];
          }
        }
        EXPECT_LT(relative_error(got, conv), kStates) << at << " conv " << how;
      }
      ++recurrent;
    }
  }

  SafeTensors reference_;
  ThreadPool threads_;
  std::unique_ptr<Model> model_;
};

TEST_P(Reference, PrefillMeetsIt) {
  for (const char* prompt : {"story", "code", "sum", "recall", "long"}) {
    compare(prompt, by_prefill(*model_, tokens(prompt), kReferenceLogits), "whole");
  }
}

TEST_P(Reference, TokenByTokenMeetsIt) {
  for (const char* prompt : {"story", "code", "sum", "recall"}) {
    compare(prompt, by_decode(*model_, tokens(prompt), kReferenceLogits, threads_), "decode");
  }
  compare("long", by_decode(*model_, tokens("long"), kReferenceLogits, threads_, 1450),
          "prefill of 1450, then decode");
}

TEST_P(Reference, SplitPromptsMeetIt) {
  for (const std::vector<std::int64_t>& cuts :
       std::vector<std::vector<std::int64_t>>{{1}, {2}, {3}, {1, 1, 1}, {5, 2, 7}, {16}}) {
    compare("story", by_prefill(*model_, tokens("story"), kReferenceLogits, cuts), "split");
  }
  compare("long", by_prefill(*model_, tokens("long"), kReferenceLogits, {1, 63, 2, 255, 513, 3}),
          "split");
}

INSTANTIATE_TEST_SUITE_P(Demo, Reference,
                         ::testing::Values(Source{"gdn", "statepack_gdn_reference.safetensors"},
                                           Source{"kda", "statepack_kda_reference.safetensors"}),
                         [](const auto& source) { return std::string(source.param.name); });

}  // namespace
}  // namespace statepack
