// The cloned hot loops give the same bytes as copies of all codecs built for one instruction set:
// whatever this machine picks, against plain x86-64 (or whatever the platform's baseline is), and
// against AVX2 with FMA, where a contraction of a multiply and an add would show.
#include <gtest/gtest.h>

#include <cstring>

#include "codec_cases.hpp"
#include "isa_entry.hpp"

namespace statepack {
namespace {

void expect_same_bytes(IsaRun* run) {
  int n_compared = 0;
  for (const CodecConfig& config : testing::all_configs()) {
    for (const LayerShape& shape : testing::shapes_for(config)) {
      const LayerPlan plan = testing::test_plan(shape, config);
      const auto codec = config.info->make(config, shape, &plan);
      if (!codec.ok()) continue;
      std::vector<const char*> keys, values;
      for (const auto& [key, value] : config.options) {
        keys.push_back(key.c_str());
        values.push_back(value.c_str());
      }
      const auto states = testing::test_states(shape.K, shape.V);
      for (const std::size_t s :
           {std::size_t{3}, std::size_t{4}, std::size_t{9}, std::size_t{11}}) {
        const std::vector<float>& X = states[s].values;
        testing::Packed packed(**codec);
        std::vector<std::uint8_t> page(packed.page.size());
        std::vector<float> restored(static_cast<std::size_t>(shape.n_values()));
        const IsaCase test{.codec = config.info->name.data(),
                           .arg = config.arg.c_str(),
                           .option_keys = keys.data(),
                           .option_values = values.data(),
                           .n_options = static_cast<int>(keys.size()),
                           .n_key_heads = shape.n_key_heads,
                           .n_value_heads = shape.n_value_heads,
                           .K = shape.K,
                           .V = shape.V,
                           .channel_gate = shape.gate == Gate::kChannel,
                           .rounding = static_cast<int>(config.rounding),
                           .seed = testing::kAnyRounding.seed,
                           .step = testing::kAnyRounding.step,
                           .layer = testing::kAnyRounding.layer,
                           .bits = plan.bits.data(),
                           .row_weight = plan.row_weight.data(),
                           .row_scale = plan.row_scale.data(),
                           .high = plan.high.data(),
                           .X = X.data()};
        ASSERT_TRUE(run(test, page.data(), static_cast<std::int64_t>(page.size()), restored.data()))
            << testing::name_of(config);
        for (int head = 0; head < shape.n_value_heads; ++head) packed.encode(head, X);
        ASSERT_EQ(packed.page, page) << testing::name_of(config) << " " << states[s].name;
        for (int head = 0; head < shape.n_value_heads; ++head) {
          const std::vector<float> back = packed.decode(head);
          ASSERT_EQ(std::memcmp(back.data(),
                                restored.data() + back.size() * static_cast<std::size_t>(head),
                                back.size() * sizeof(float)),
                    0)
              << testing::name_of(config) << " " << states[s].name;
        }
        ++n_compared;
      }
    }
  }
  EXPECT_GT(n_compared, 1000);
}

TEST(CodecIsa, ClonesMatchThePortableBuild) { expect_same_bytes(codec_run_portable); }

#ifdef SP_TEST_V3
TEST(CodecIsa, ClonesMatchTheAvx2Build) {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    GTEST_SKIP() << "this machine has no AVX2 and FMA";
  }
  expect_same_bytes(codec_run_v3);
}
#endif

}  // namespace
}  // namespace statepack
