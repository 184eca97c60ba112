// The passes that codecs make over packed pages, on every instruction set that the machine has:
// encoding gives the bytes of the plain target, reading gives what decoding and summing gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../simd_targets.hpp"
#include "codec_cases.hpp"
#include "states.hpp"

namespace statepack {
namespace {

struct Case {
  std::string name;
  std::unique_ptr<LayerCodec> codec;
  std::string state;
  std::vector<float> X;  // [K][V], of every head
};

std::vector<LayerShape> shapes() {
#if defined(SP_SANITIZED)  // sanitizers slow everything twentyfold
  return {{1, 5, 32, 48, Gate::kScalar},
          {1, 5, 33, 32, Gate::kScalar},
          {1, 5, 33, 17, Gate::kScalar},
          {2, 2, 16, 16, Gate::kChannel}};
#endif
  return {{2, 4, 128, 128, Gate::kScalar}, {1, 5, 64, 128, Gate::kScalar},
          {1, 5, 128, 64, Gate::kScalar},  {1, 5, 96, 192, Gate::kScalar},
          {1, 5, 33, 32, Gate::kScalar},   {1, 5, 33, 17, Gate::kScalar},
          {1, 5, 1, 1, Gate::kScalar},     {2, 2, 128, 128, Gate::kChannel}};
}

/// Every argument of every codec, and groups that do and do not fill runs.
std::vector<CodecConfig> configs() {
  std::vector<CodecConfig> all;
  for (const CodecInfo* info : all_codecs()) {
    std::vector<std::string_view> args = info->args;
    if (args.empty()) args.push_back("");
    for (const std::string_view arg : args) all.push_back(testing::default_config(*info, arg));
  }
  for (const char* group : {"16", "48", "20"}) {
    all.push_back(testing::config_of("pace", "4", {{"group", group}}));
    all.push_back(testing::config_of("pace", "4/8", {{"group", group}}));
    all.push_back(testing::config_of("stepquant", "6", {{"group", group}}));
  }
  all.push_back(testing::config_of("leapquant", "8", {{"rank", "0"}}));
  all.push_back(testing::config_of("leapquant", "4", {{"rank", "7"}, {"clip", "on"}}));
  all.push_back(testing::config_of("leapquant", "8", {{"scales", "f16"}, {"rounds", "3"}}));
  return all;
}

template <class Fn>
void for_each_case(Fn fn) {
  for (const CodecConfig& config : configs()) {
    for (const LayerShape& shape : shapes()) {
      const LayerPlan plan = testing::test_plan(shape, config);
      auto made = config.info->make(config, shape, &plan);
      if (!made.ok()) continue;
      Case c{
          testing::name_of(config) + " " + std::to_string(shape.K) + "x" + std::to_string(shape.V),
          std::move(*made),
          "",
          {}};
      std::vector<testing::TestState> states = testing::test_states(shape.K, shape.V);
      states.push_back({"zero but one row", std::vector<float>(states[0].values.size(), 0.0f)});
      std::fill_n(states.back().values.begin(), shape.V, 2.5f);
      if (shape.K == 128 && shape.V == 128) {
        const test::State trained = test::trained_states();
        states.push_back({"trained", {trained.begin(), trained.begin() + 128 * 128}});
      }
      for (testing::TestState& state : states) {
        c.state = state.name;
        c.X = std::move(state.values);
        fn(c);
      }
    }
  }
}

std::vector<std::uint8_t> encode(const Case& c) {
  testing::Packed packed(*c.codec);
  for (int head = 0; head < c.codec->shape().n_value_heads; ++head) packed.encode(head, c.X);
  return packed.page;
}

// The plain target divides where the others correct reciprocals.
TEST(Fused, EveryInstructionSetPacksTheSameBytes) {
  std::vector<std::vector<std::uint8_t>> expected;
  hwy::SetSupportedTargetsForTest(HWY_STATIC_TARGET);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  for_each_case([&](const Case& c) { expected.push_back(encode(c)); });
  std::set<std::int64_t> targets;
  testing::for_each_simd_target([&] {
    targets.insert(hwy::SupportedTargets());
    std::size_t i = 0;
    for_each_case(
        [&](const Case& c) { ASSERT_EQ(encode(c), expected[i++]) << c.name << " " << c.state; });
  });
  EXPECT_GT(expected.size(), 500u);
  // Every set that this machine has ran, the widest one that was compiled among them.
  for (const std::int64_t target : targets) std::printf("ran %s\n", hwy::TargetName(target));
#if HWY_ARCH_X86
  EXPECT_EQ(targets.contains(HWY_AVX2), __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ(targets.contains(HWY_AVX3), __builtin_cpu_supports("avx512vl") != 0);
#endif
}

class Rows final : public RowSource {
 public:
  Rows(const std::vector<float>& X, int V) : X_(X), V_(V) {}
  const float* rows(int begin, int n) override {
    EXPECT_EQ(begin, next_);
    EXPECT_LE(n, kMaxRows);
    next_ += n;
    buffer_.assign(X_.begin() + begin * V_, X_.begin() + (begin + n) * V_);
    return buffer_.data();
  }

 private:
  const std::vector<float>& X_;
  const int V_;
  int next_ = 0;
  std::vector<float> buffer_;
};

TEST(Fused, RowsAreRestoredAsTheWholeStateIs) {
  testing::for_each_simd_target([] {
    std::set<std::string> codecs;
    for_each_case([&](const Case& c) {
      const std::vector<std::uint8_t> page = encode(c);
      std::vector<std::byte> scratch(c.codec->scratch_bytes());
      const int K = c.codec->shape().K, V = c.codec->shape().V;
      std::vector<float> all(c.X.size()), rows(static_cast<std::size_t>(RowSource::kMaxRows * V));
      for (int head = 0; head < c.codec->shape().n_value_heads; ++head) {
        c.codec->decode(head, page.data(), all.data(), {scratch});
        for (const auto& [begin, wanted] : {std::pair{0, 16}, std::pair{K / 2, 5}}) {
          const int n = std::min(wanted, K - begin);
          if (!c.codec->decode_rows(head, page.data(), begin, n, rows.data())) continue;
          codecs.insert(c.name.substr(0, c.name.find_first_of(":, ")));
          ASSERT_EQ(0, std::memcmp(rows.data(), all.data() + begin * V,
                                   static_cast<std::size_t>(n * V) * sizeof(float)))
              << c.name << " " << c.state;
        }
      }
    });
    EXPECT_TRUE(codecs.contains("bf16") && codecs.contains("fp16") && codecs.contains("int8"));
  });
}

TEST(Fused, RowsArePackedAsTheWholeStateIs) {
  testing::for_each_simd_target([] {
    int n_fused = 0;
    for_each_case([&](const Case& c) {
      std::vector<std::byte> scratch(c.codec->scratch_bytes());
      std::vector<std::uint8_t> page(static_cast<std::size_t>(c.codec->page_bytes()));
      for (int head = 0; head < c.codec->shape().n_value_heads; ++head) {
        Rows rows(c.X, c.codec->shape().V);
        if (c.codec->encode_rows(head, rows, page.data(), {scratch})) {
          ++n_fused;
        } else {
          c.codec->encode(head, c.X.data(), page.data(), testing::kAnyRounding, {scratch});
        }
      }
      ASSERT_EQ(page, encode(c)) << c.name << " " << c.state;
    });
    EXPECT_GT(n_fused, 300);
  });
}

// A value that is not finite is left to the caller.
TEST(Fused, RowsThatAreNotFiniteAreRefused) {
  const LayerShape shape{2, 4, 128, 128, Gate::kScalar};
  const CodecConfig config = testing::config_of("stepquant", "6");
  const LayerPlan plan = testing::test_plan(shape, config);
  const auto codec = std::move(*config.info->make(config, shape, &plan));
  std::vector<std::byte> scratch(codec->scratch_bytes());
  std::vector<std::uint8_t> page(static_cast<std::size_t>(codec->page_bytes()));
  testing::for_each_simd_target([&] {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      std::vector<float> X(128 * 128, 1.0f);
      X[77 * 128 + 5] = bad;
      Rows rows(X, 128);
      EXPECT_FALSE(codec->encode_rows(0, rows, page.data(), {scratch}));
    }
  });
}

// K products and their sum round once each, row and column scales apart from the codes; factors of
// LeapQuant cancel against the codes, but neither exceeds the column's peak by much.
TEST(Fused, ReadsWhatDecodingAndSummingGives) {
  testing::for_each_simd_target([] {
    int n_fused = 0;
    testing::Random random(3);
    for_each_case([&](const Case& c) {
      const int K = c.codec->shape().K, V = c.codec->shape().V;
      std::vector<float> a(static_cast<std::size_t>(K)), b(a.size());
      double sum_a = 0, sum_b = 0;
      for (std::size_t i = 0; i < a.size(); ++i) {
        a[i] = random.next(), b[i] = random.next();
        sum_a += std::fabs(a[i]), sum_b += std::fabs(b[i]);
      }
      testing::Packed packed(*c.codec);
      std::vector<std::byte> scratch(c.codec->scratch_bytes());
      for (int head = 0; head < c.codec->shape().n_value_heads; ++head) {
        packed.encode(head, c.X);
        std::vector<float> p(static_cast<std::size_t>(V), NAN), r = p;
        if (!c.codec->read_two(head, packed.page.data(), a.data(), b.data(), p.data(), r.data(),
                               {scratch})) {
          EXPECT_TRUE(std::all_of(p.begin(), p.end(), [](float x) { return std::isnan(x); }));
          continue;
        }
        ++n_fused;
        const std::vector<float> X = packed.decode(head);
        for (int j = 0; j < V; ++j) {
          double with_a = 0, with_b = 0, peak = 0;
          for (int i = 0; i < K; ++i) {
            const double x = X[static_cast<std::size_t>(i * V + j)];
            with_a += a[static_cast<std::size_t>(i)] * x;
            with_b += b[static_cast<std::size_t>(i)] * x;
            peak = std::max(peak, std::fabs(x));
          }
          const double unit = K * 0x1p-23 * peak, least = 1e-37;
          ASSERT_NEAR(p[static_cast<std::size_t>(j)], with_a, unit * sum_a + least)
              << c.name << " " << c.state << " head " << head << " column " << j;
          ASSERT_NEAR(r[static_cast<std::size_t>(j)], with_b, unit * sum_b + least)
              << c.name << " " << c.state << " head " << head << " column " << j;
        }
      }
    });
    EXPECT_GT(n_fused, 500);
  });
}

// A page of zero bytes reads as the zero state.
TEST(Fused, ReadsZeroOutOfAnEmptyPage) {
  for_each_case([](const Case& c) {
    const int K = c.codec->shape().K, V = c.codec->shape().V;
    const std::vector<std::uint8_t> page(static_cast<std::size_t>(c.codec->page_bytes()));
    const std::vector<float> a(static_cast<std::size_t>(K), 1.5f);
    std::vector<float> p(static_cast<std::size_t>(V), NAN), r = p;
    std::vector<std::byte> scratch(c.codec->scratch_bytes());
    if (!c.codec->read_two(0, page.data(), a.data(), a.data(), p.data(), r.data(), {scratch})) {
      return;
    }
    for (const float x : p) ASSERT_EQ(x, 0.0f) << c.name;
    for (const float x : r) ASSERT_EQ(x, 0.0f) << c.name;
  });
}

}  // namespace
}  // namespace statepack
