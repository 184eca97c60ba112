// Small random checkpoints of every family against an independent float64 forward pass
// (make_model_goldens.py): interleaved and split projections, experts fused and one by one, tied
// and own heads, bf16, f16 and f32, one file and shards, scalar and channel gates, latent
// attention.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "model/delta_block.hpp"
#include "model/model.hpp"
#include "model/moe.hpp"
#include "model_testing.hpp"

namespace statepack {
namespace {

using testing::by_decode;
using testing::by_prefill;
using testing::Reading;
using testing::relative_error;

// f32 against float64 over a few layers of sums of tens of terms: about 1e-6, with room for the
// amplification of random weights.
constexpr double kTolerance = 2e-5;

class Family : public ::testing::TestWithParam<const char*> {
 protected:
  Family()
      : threads_(2),
        dir_(std::string(SP_SOURCE_DIR "/test/data/tiny/") + GetParam()),
        golden_(*SafeTensors::open(dir_ + "/golden.safetensors")),
        model_(testing::load(dir_, threads_)) {
    const TensorView* tokens = golden_.find("tokens");
    tokens_.resize(tokens->n_bytes / 4);
    std::memcpy(tokens_.data(), tokens->data, tokens->n_bytes);
  }

  void compare(const Reading& reading, const std::string& how) {
    const std::vector<float> logits = *to_f32(*golden_.find("logits"));
    EXPECT_LT(relative_error(reading.logits, logits), kTolerance) << how;
    const ModelConfig& c = model_->config();
    const std::int64_t channels = c.conv_channels(), n_history = c.conv_kernel - 1;
    std::int64_t recurrent = 0;
    for (std::size_t layer = 0; layer < c.layers.size(); ++layer) {
      if (!c.is_recurrent(layer)) continue;
      const std::string at = "layer" + std::to_string(layer);
      const std::vector<float> S = *to_f32(*golden_.find(at + ".state"));
      EXPECT_LT(relative_error(reading.state.S.data() + recurrent * c.recurrent.n_values(),
                               S.data(), S.size()),
                kTolerance)
          << at << " " << how;
      const std::vector<float> conv = *to_f32(*golden_.find(at + ".conv"));  // [channels][history]
      std::vector<float> got(conv.size());
      for (std::int64_t ch = 0; ch < channels; ++ch) {
        for (std::int64_t j = 0; j < n_history; ++j) {
          got[std::size_t(ch * n_history + j)] =
              reading.state.conv[std::size_t((recurrent * n_history + j) * channels + ch)];
        }
      }
      EXPECT_LT(relative_error(got, conv), kTolerance) << at << " conv " << how;
      ++recurrent;
    }
  }
  int n_tokens() const { return static_cast<int>(tokens_.size()); }

  ThreadPool threads_;
  std::string dir_;
  SafeTensors golden_;
  std::unique_ptr<Model> model_;
  std::vector<std::int32_t> tokens_;
};

TEST_P(Family, PrefillMeetsTheDefinition) {
  compare(by_prefill(*model_, tokens_, n_tokens()), "whole");
  for (const std::vector<std::int64_t>& cuts : std::vector<std::vector<std::int64_t>>{
           {1}, {2}, {3}, {1, 1, 1}, {15, 2}, {63}, {64}, {65, 1}}) {
    compare(by_prefill(*model_, tokens_, n_tokens(), cuts), "split at " + std::to_string(cuts[0]));
  }
}

// Also: latent attention absorbed equals expanded, and one-step recurrence equals chunks.
TEST_P(Family, DecodeMeetsTheDefinition) {
  compare(by_decode(*model_, tokens_, n_tokens(), threads_), "token by token");
  const Reading mixed = by_decode(*model_, tokens_, n_tokens() - 37, threads_, 37);
  const std::vector<float> logits = *to_f32(*golden_.find("logits"));
  const std::vector<float> tail(logits.begin() + 37 * model_->config().vocab, logits.end());
  EXPECT_LT(relative_error(mixed.logits, tail), kTolerance);
}

TEST_P(Family, AttentionRowsMoveToAnotherCache) {
  const auto vocab = static_cast<std::int32_t>(model_->config().vocab);
  std::vector<std::int32_t> tokens(310);  // more than a block of the cache
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int32_t>(i * 7) % vocab;
  }
  DenseState state = model_->new_dense_state();
  const auto kv = model_->new_kv_cache(), other = model_->new_kv_cache();
  ASSERT_TRUE(model_->prefill(std::span(tokens).first(300), 0, state, *kv, 0, nullptr).ok());
  const auto rows_of = [](const KvCache& cache, std::int64_t begin, std::int64_t end) {
    std::vector<std::byte> rows(static_cast<std::size_t>((end - begin) * cache.row_bytes()));
    cache.copy_rows(begin, end, rows.data());
    return rows;
  };
  EXPECT_EQ(kv->row_bytes(), model_->config().kv_bytes_per_token());
  const auto first = rows_of(*kv, 0, 201), second = rows_of(*kv, 201, 300);
  ASSERT_TRUE(other->append_rows(201, first).ok());
  EXPECT_EQ(other->append_rows(100, second).code(), Code::kInvalidArgument);
  EXPECT_EQ(other->n_tokens(), 201);
  ASSERT_TRUE(other->append_rows(99, second).ok());
  EXPECT_EQ(other->n_tokens(), 300);
  EXPECT_EQ(other->n_bytes(), other->bytes_for(300));
  EXPECT_EQ(rows_of(*other, 0, 300), rows_of(*kv, 0, 300));
  // Reading on is the same from both.
  DenseState copy = state;
  std::vector<float> a(static_cast<std::size_t>(vocab)), b(static_cast<std::size_t>(vocab));
  const auto rest = std::span(tokens).subspan(300);
  ASSERT_TRUE(model_->prefill(rest, 300, state, *kv, 1, a.data()).ok());
  ASSERT_TRUE(model_->prefill(rest, 300, copy, *other, 1, b.data()).ok());
  EXPECT_EQ(a, b);
}

TEST_P(Family, ThreadsDoNotChangeABit) {
  const Reading two = by_prefill(*model_, tokens_, n_tokens());
  for (int n : {1, 3}) {
    ThreadPool threads(n);
    const auto model = testing::load(dir_, threads);
    const Reading other = by_prefill(*model, tokens_, n_tokens());
    EXPECT_EQ(two.logits, other.logits);
    EXPECT_EQ(two.state.S, other.state.S);
  }
}

INSTANTIATE_TEST_SUITE_P(Tiny, Family,
                         ::testing::Values("next", "moe", "dense", "kimi", "kimi_bounded"),
                         [](const auto& name) { return std::string(name.param); });

// docs/models.md 5.1: the order against a literal walk over the blocks of key heads.
TEST(QkvzOrder, IsTheDeinterleaving) {
  const LayerShape shape{3, 6, 5, 7, Gate::kScalar};
  const QkvzOrder order = qkvz_order(shape);
  const int r = 2, B = 2 * 5 + 2 * r * 7;
  ASSERT_EQ(order.qkv.size(), 2U * 3 * 5 + 6 * 7);
  ASSERT_EQ(order.z.size(), 6U * 7);
  std::size_t at = 0;
  for (int i = 0; i < 3; ++i) {
    for (int d = 0; d < 5; ++d) EXPECT_EQ(order.qkv[at++], i * B + d);
  }
  for (int i = 0; i < 3; ++i) {
    for (int d = 0; d < 5; ++d) EXPECT_EQ(order.qkv[at++], i * B + 5 + d);
  }
  std::size_t z = 0;
  for (int h = 0; h < 6; ++h) {  // head h = i r + j: row (h, d) is i B + 2 dk + j dv + d
    for (int d = 0; d < 7; ++d) {
      const int v_row = h / r * B + 2 * 5 + h % r * 7 + d;
      EXPECT_EQ(order.qkv[at++], v_row);
      EXPECT_EQ(order.z[z++], v_row + r * 7);
    }
  }
  EXPECT_EQ(order.b, (std::vector<std::int32_t>{0, 1, 4, 5, 8, 9}));
  EXPECT_EQ(order.a, (std::vector<std::int32_t>{2, 3, 6, 7, 10, 11}));
}

TEST(Router, ChoosesByBiasAndWeighsWithout) {
  Router router;
  router.n_experts = 4;
  router.top_k = 2;
  router.sigmoid = true;
  router.scaling = 2.446F;
  router.bias = {0, 0, 10, 0};
  const float logits[] = {1, 3, -2, 2};
  Router::Choice chosen[2];
  router.choose(logits, chosen);
  EXPECT_EQ(chosen[0].expert, 1);  // in the order of numbers
  EXPECT_EQ(chosen[1].expert, 2);  // through its bias
  const double a = 1 / (1 + std::exp(-3.0)), b = 1 / (1 + std::exp(2.0));
  EXPECT_NEAR(chosen[0].weight, a / (a + b) * 2.446, 1e-6);
  EXPECT_NEAR(chosen[1].weight, b / (a + b) * 2.446, 1e-6);
  router.biased_weights = true;
  router.choose(logits, chosen);
  EXPECT_NEAR(chosen[1].weight, (b + 10) / (a + b + 10) * 2.446, 1e-5);
}

TEST(Router, TiesTakeTheLowerNumberAndNaNStaysInside) {
  Router router;
  router.n_experts = 5;
  router.top_k = 2;
  const float equal[] = {1, 1, 1, 1, 1};
  Router::Choice chosen[2];
  router.choose(equal, chosen);
  EXPECT_EQ(chosen[0].expert, 0);
  EXPECT_EQ(chosen[1].expert, 1);
  EXPECT_FLOAT_EQ(chosen[0].weight, 0.5F);
  for (bool sigmoid : {false, true}) {
    router.sigmoid = sigmoid;
    const float broken[] = {NAN, NAN, NAN, NAN, NAN};
    router.choose(broken, chosen);
    EXPECT_EQ(chosen[0].expert, 0);
    EXPECT_TRUE(std::isnan(chosen[0].weight));
  }
}

}  // namespace
}  // namespace statepack
