// The demo model against reference logits and states, and a model against itself.
#include "model/model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "model_testing.hpp"

namespace statepack {
namespace {

using testing::by_decode;
using testing::by_prefill;
using testing::Reading;
using testing::relative_error;

// test/data/README.md says where these come from: another implementation, f32 throughout. The
// tolerances are those of the reference's own description with a factor of two for logits: two f32
// implementations with other orders of summation differ by about 1e-6 over these depths.
constexpr double kLogits = 2e-4, kStates = 1e-4;
constexpr int kReferenceLogits = 8;

const SafeTensors& reference() {
  static const SafeTensors file =
      *SafeTensors::open(SP_SOURCE_DIR "/test/data/statepack_gdn_reference.safetensors");
  return file;
}

std::vector<std::int32_t> tokens_of(const std::string& prompt) {
  const TensorView* view = reference().find(prompt + ".tokens");
  std::vector<std::int32_t> tokens(view->n_bytes / 4);
  std::memcpy(tokens.data(), view->data, view->n_bytes);
  return tokens;
}

std::vector<float> floats_of(const std::string& name) { return *to_f32(*reference().find(name)); }

class DemoModel : public ::testing::Test {
 protected:
  DemoModel() : threads_(2) {
    model_ = testing::load(SP_SOURCE_DIR "/models/statepack-gdn", threads_);
  }

  void compare(const std::string& prompt, const Reading& run, const std::string& how) {
    const std::vector<float> want = floats_of(prompt + ".logits");
    EXPECT_LT(relative_error(run.logits, want), kLogits) << prompt << " " << how;
    const ModelConfig& c = model_->config();
    const std::int64_t channels = c.conv_channels();
    int recurrent = 0;
    for (std::size_t layer = 0; layer < c.layers.size(); ++layer) {
      if (!c.is_recurrent(layer)) continue;
      const std::string at = prompt + ".layer" + std::to_string(layer);
      if (reference().find(at + ".state") != nullptr) {
        const std::vector<float> S = floats_of(at + ".state");
        const float* got = run.state.S.data() + recurrent * c.recurrent.n_values();
        EXPECT_LT(relative_error(got, S.data(), S.size()), kStates) << at << " " << how;
      }
      if (reference().find(at + ".conv") != nullptr) {  // [channels][3]; ours is [3][channels]
        const std::vector<float> conv = floats_of(at + ".conv");
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

  ThreadPool threads_;
  std::unique_ptr<Model> model_;
};

TEST_F(DemoModel, PrefillMeetsTheReference) {
  for (const char* prompt : {"story", "code", "sum", "recall", "long"}) {
    compare(prompt, by_prefill(*model_, tokens_of(prompt), kReferenceLogits), "whole");
  }
}

TEST_F(DemoModel, TokenByTokenMeetsTheReference) {
  for (const char* prompt : {"story", "code", "sum", "recall"}) {
    compare(prompt, by_decode(*model_, tokens_of(prompt), kReferenceLogits, threads_), "decode");
  }
  compare("long", by_decode(*model_, tokens_of("long"), kReferenceLogits, threads_, 1300),
          "prefill of 1300, then decode");
}

TEST_F(DemoModel, SplitPromptsMeetTheReference) {
  for (const std::vector<std::int64_t>& cuts :
       std::vector<std::vector<std::int64_t>>{{1}, {2}, {3}, {1, 1, 1}, {5, 2, 7}, {16}}) {
    compare("story", by_prefill(*model_, tokens_of("story"), kReferenceLogits, cuts), "split");
  }
  compare("long", by_prefill(*model_, tokens_of("long"), kReferenceLogits, {1, 63, 2, 255, 513, 3}),
          "split");
}

}  // namespace
}  // namespace statepack
