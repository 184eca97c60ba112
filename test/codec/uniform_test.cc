// The uniform codecs (integers, dsq, pace) and the casts: error bounds from their definitions,
// published errors and sizes, and every code value through the page.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "base/half.hpp"
#include "codec/scale.hpp"
#include "codec_cases.hpp"

namespace statepack {
namespace {

using testing::config_of;
using testing::Packed;
using testing::test_states;

std::unique_ptr<LayerCodec> make(const CodecConfig& config, const LayerShape& shape,
                                 const LayerPlan* plan = nullptr) {
  auto codec = config.info->make(config, shape, plan);
  EXPECT_TRUE(codec.ok()) << codec.status().message();
  return std::move(codec).value();
}

constexpr LayerShape kOneHead{1, 1, 128, 128, Gate::kScalar};

// The state of the published codec comparison.
std::vector<float> published_state() {
  testing::Random random(1);
  std::vector<float> X;
  for (int i = 0; i < 128; ++i) {
    for (int j = 0; j < 128; ++j) {
      X.push_back(random.next() * std::exp2(static_cast<float>(i % 5 - 2 + j % 7 - 3)));
    }
  }
  return X;
}

double mean_square_error(const LayerCodec& codec, const std::vector<float>& X) {
  Packed packed(codec);
  packed.encode(0, X);
  const std::vector<float> back = packed.decode(0);
  double total = 0;
  for (std::size_t i = 0; i < X.size(); ++i) total += std::pow(double{back[i]} - X[i], 2);
  return total / static_cast<double>(X.size());
}

TEST(Uniform, MeetsThePublishedErrors) {
  const std::vector<float> X = published_state();
  const struct {
    const char *codec, *arg;
    double mse;
  } published[] = {{"int4", "", .076349719}, {"int6", "", .005310623},  {"int8", "", .00030753786},
                   {"dsq", "4", .028238127}, {"dsq", "6", .0014738704}, {"dsq", "8", 8.8516e-5}};
  for (const auto& [codec, arg, mse] : published) {
    EXPECT_NEAR(mean_square_error(*make(config_of(codec, arg), kOneHead), X), mse, 1e-3 * mse)
        << codec << arg;
  }
}

// Bits per value of the baselines' table at 128 x 128.
TEST(Uniform, PayloadsAreThePublishedSums) {
  const auto bits = [](const CodecConfig& config) {
    return 8.0 * static_cast<double>(make(config, kOneHead)->page_bytes()) / 16384;
  };
  for (const int b : {8, 6, 5, 4}) {
    const std::string name = "int" + std::to_string(b);
    EXPECT_EQ(bits(config_of(name, "")), b + 0.125);
    EXPECT_EQ(bits(config_of(name, "", {{"layout", "column"}})), b + 0.125);
    EXPECT_EQ(bits(config_of(name, "", {{"layout", "tensor"}})), b + 16.0 / 16384);
    EXPECT_EQ(bits(config_of(name, "", {{"layout", "group"}, {"group", "32"}})), b + 0.5);
    EXPECT_EQ(bits(config_of(name, "", {{"layout", "group"}, {"group", "64"}, {"axis", "key"}})),
              b + 0.25);
  }
  for (const char* arg : {"4", "6", "8"}) {
    EXPECT_EQ(bits(config_of("dsq", arg)), arg[0] - '0' + 0.25);
  }
  EXPECT_EQ(bits(config_of("fp32", "")), 32);
  EXPECT_EQ(bits(config_of("bf16", "")), 16);
  EXPECT_EQ(bits(config_of("fp16", "")), 16);
}

TEST(Pace, PayloadsAreThePublishedBytes) {
  EXPECT_EQ(make(config_of("pace", "4"), kOneHead)->page_bytes(), 8704);
  LayerPlan plan;
  plan.high = {0};
  EXPECT_EQ(make(config_of("pace", "4/8"), kOneHead, &plan)->page_bytes(), 9472);
  plan.high = {1};
  EXPECT_EQ(make(config_of("pace", "4/8"), kOneHead, &plan)->page_bytes(), 17920);

  // The sums of a 27B model: 48 layers of 48 heads, a quarter of them high.
  const LayerShape layer{16, 48, 128, 128, Gate::kScalar};
  plan.high.assign(48, 0);
  for (std::size_t h = 0; h < 12; ++h) plan.high[4 * h + 1] = 1;
  const PayloadBytes four = make(config_of("pace", "4"), layer)->payload();
  EXPECT_EQ(48 * four.total(), 20'054'016);
  EXPECT_EQ(8.0 * static_cast<double>(four.total()) / (48 * 16384), 4.25);
  EXPECT_EQ(four.codes, 48 * 8192);
  EXPECT_EQ(four.scales, 48 * 512);
  EXPECT_EQ(four.zero_points, 0);
  const PayloadBytes mixed = make(config_of("pace", "4/8"), layer, &plan)->payload();
  EXPECT_EQ(48 * mixed.total(), 26'689'536);
  EXPECT_EQ(8.0 * static_cast<double>(mixed.total()) / (48 * 16384), 5.65625);
  EXPECT_EQ(mixed.codes, 36 * 8192 + 12 * 16384);
  EXPECT_EQ(mixed.scales, 48 * 1024);
  EXPECT_EQ(mixed.zero_points, 36 * 256 + 12 * 512);
  EXPECT_EQ(mixed.padding, 0);
}

TEST(Pace, CountsHalfUsedBytesAsPadding) {
  // Columns of 13 keys: 6.5 bytes of codes; 2 groups of 7 and 6: one byte of 4-bit zero points.
  const LayerShape shape{1, 1, 13, 6, Gate::kScalar};
  LayerPlan plan;
  plan.high = {0};
  const auto codec = make(config_of("pace", "4/8", {{"group", "7"}}), shape, &plan);
  const PayloadBytes bytes = codec->payload();
  EXPECT_EQ(bytes.codes, 39);
  EXPECT_EQ(bytes.scales, 24);
  EXPECT_EQ(bytes.zero_points, 6);
  EXPECT_EQ(bytes.padding, 3);
}

// Each group of `rows` x `columns` values is restored within half a step of its own scale plus what
// rounding the scale to f16 moves the clamp: L s 2^-11; both from the definition.
void expect_within_half_a_step(const LayerCodec& codec, int rows, int columns, int L, bool affine,
                               const std::string& label) {
  const int K = codec.shape().K, V = codec.shape().V;
  for (const testing::TestState& state : test_states(K, V)) {
    Packed packed(codec);
    packed.encode(0, state.values);
    const std::vector<float> back = packed.decode(0);
    for (int i = 0; i < K; i += rows) {
      for (int j = 0; j < V; j += columns) {
        double low = 0, high = 0;
        for (int a = i; a < std::min(i + rows, K); ++a) {
          for (int b = j; b < std::min(j + columns, V); ++b) {
            const double x = state.values[static_cast<std::size_t>(a * V + b)];
            low = std::min(low, x);
            high = std::max(high, x);
          }
        }
        const double span = affine ? high - low : std::max(high, -low);
        if (span / L > 65504) continue;  // saturates: only finiteness is promised
        const double s = h16(static_cast<float>(span / L));
        // An f16 scale is within 2^-11 of the wanted one, or within 2^-25 below the normal halves.
        const double bound = s / 2 + L * std::max(s * 0x1p-11, 0x1p-25) + span * 0x1p-22;
        for (int a = i; a < std::min(i + rows, K); ++a) {
          for (int b = j; b < std::min(j + columns, V); ++b) {
            const std::size_t at = static_cast<std::size_t>(a * V + b);
            ASSERT_LE(std::fabs(double{back[at]} - state.values[at]), bound)
                << label << " " << state.name << " at " << a << "," << b;
          }
        }
      }
    }
  }
}

TEST(Uniform, ErrorIsHalfAStepOfTheGroup) {
  for (const auto& [K, V] : {std::pair{16, 16}, {64, 128}, {96, 192}, {13, 50}}) {
    const LayerShape shape{1, 1, K, V, Gate::kScalar};
    for (const int b : {8, 6, 5, 4}) {
      const int L = (1 << (b - 1)) - 1;
      const std::string name = "int" + std::to_string(b);
      const auto check = [&](const std::map<std::string, std::string>& options, int rows,
                             int columns) {
        const CodecConfig config = config_of(name, "", options);
        expect_within_half_a_step(*make(config, shape), rows, columns, L, false,
                                  testing::name_of(config));
      };
      check({}, 1, V);
      check({{"layout", "column"}}, K, 1);
      check({{"layout", "tensor"}}, K, V);
      check({{"layout", "group"}, {"group", "32"}}, 1, 32);
      check({{"layout", "group"}, {"group", "7"}, {"axis", "key"}}, 7, 1);
      check({{"layout", "group"}, {"group", "1"}}, 1, 1);
      check({{"layout", "group"}, {"group", "500"}, {"axis", "key"}}, 500, 1);
    }
    for (const int group : {64, 32, 5}) {
      const std::map<std::string, std::string> options{{"group", std::to_string(group)}};
      expect_within_half_a_step(*make(config_of("pace", "4", options), shape), group, 1, 7, false,
                                "pace:4");
      LayerPlan plan;
      plan.high = {0};
      expect_within_half_a_step(*make(config_of("pace", "4/8", options), shape, &plan), group, 1,
                                15, true, "pace:4/8 low");
      plan.high = {1};
      expect_within_half_a_step(*make(config_of("pace", "4/8", options), shape, &plan), group, 1,
                                255, true, "pace:4/8 high");
    }
  }
}

// dsq: half a step r_i c_j, and at the element that sets c_j the clamp by what f16 rounding took.
TEST(Uniform, DsqErrorIsHalfAStepOfBothScales) {
  for (const std::string axes : {"row-column", "column-row"}) {
    for (const int bits : {8, 6, 4}) {
      const int K = 48, V = 80, L = (1 << (bits - 1)) - 1;
      const auto codec = make(config_of("dsq", std::to_string(bits), {{"axes", axes}}),
                              {1, 1, K, V, Gate::kScalar});
      for (const testing::TestState& state : test_states(K, V)) {
        if (state.name == "huge" || state.name == "largest") continue;
        Packed packed(*codec);
        packed.encode(0, state.values);
        const std::vector<float> back = packed.decode(0);
        const std::uint8_t* scales = packed.page.data() + K * V * bits / 8;
        const auto scale = [&](int n) {
          std::uint16_t half;
          std::memcpy(&half, scales + 2 * n, 2);
          return double{f16_to_f32(half)};
        };
        for (int i = 0; i < K; ++i) {
          for (int j = 0; j < V; ++j) {
            const std::size_t at = static_cast<std::size_t>(i * V + j);
            const double step = scale(i) * scale(K + j);
            const double peak_scale = axes == "row-column" ? scale(K + j) : scale(i);
            const double clamp = L * step * std::max(0x1p-11, 0x1p-25 / peak_scale);
            ASSERT_LE(std::fabs(double{back[at]} - state.values[at]),
                      step / 2 + clamp + std::fabs(state.values[at]) * 0x1p-22)
                << axes << bits << state.name;
          }
        }
      }
    }
  }
}

// With more bits the error never grows on an ordinary state.
TEST(Uniform, MoreBitsNeverHurt) {
  const std::vector<float> X = published_state();
  for (const std::string layout : {"row", "column", "tensor"}) {
    double last = 1e9;
    for (const char* name : {"int4", "int5", "int6", "int8"}) {
      const double mse =
          mean_square_error(*make(config_of(name, "", {{"layout", layout}}), kOneHead), X);
      EXPECT_LT(mse, last) << name << layout;
      last = mse;
    }
  }
}

// A restored state is kept exactly: absmax elements hold code L, so the scale comes out again.
TEST(Uniform, SymmetricRoundingIsStable) {
  std::vector<CodecConfig> configs;
  for (const char* name : {"fp32", "bf16", "fp16"}) configs.push_back(config_of(name, ""));
  for (const char* name : {"int8", "int6", "int5", "int4"}) {
    for (const char* layout : {"row", "column", "tensor"}) {
      configs.push_back(config_of(name, "", {{"layout", layout}}));
    }
    configs.push_back(config_of(name, "", {{"layout", "group"}, {"group", "7"}, {"axis", "key"}}));
  }
  configs.push_back(config_of("pace", "4"));
  for (const CodecConfig& config : configs) {
    const LayerShape shape{1, 1, 64, 96, Gate::kScalar};
    const auto codec = make(config, shape);
    for (const testing::TestState& state : test_states(shape.K, shape.V)) {
      if (state.name == "tiny" || state.name == "subnormal") continue;
      std::vector<float> X = state.values;
      for (float& x : X) x *= 64;  // out of the subnormal halves, where a scale has few digits
      Packed packed(*codec);
      packed.encode(0, X);
      const std::vector<std::uint8_t> first = packed.page;
      packed.encode(0, packed.decode(0));
      EXPECT_EQ(packed.page, first) << testing::name_of(config) << " " << state.name;
    }
  }
}

TEST(Uniform, ZeroIsExactAlways) {
  LayerPlan plan;
  plan.high = {0, 1};
  const LayerShape shape{1, 2, 40, 24, Gate::kScalar};
  for (const CodecConfig& config : testing::all_configs()) {
    if (config.info->id > 9) continue;  // codecs with fitted scales have tests of their own
    const auto code = config.options.find("code");
    if (code != config.options.end() && code->second == "affine") continue;  // it has no zero level
    const auto codec = make(config, shape, &plan);
    for (const testing::TestState& state : test_states(shape.K, shape.V)) {
      std::vector<float> X = state.values;
      for (std::size_t i = 0; i < X.size(); i += 3) X[i] = 0;  // zeros among values
      for (int head = 0; head < 2; ++head) {
        Packed packed(*codec);
        packed.encode(head, X);
        const std::vector<float> back = packed.decode(head);
        for (std::size_t i = 0; i < X.size(); i += 3) {
          ASSERT_EQ(back[i], 0.0f) << testing::name_of(config) << " " << state.name;
        }
      }
    }
  }
}

// All code values of both widths and both quantisers through quantiser, page and back.
TEST(Pace, KeepsEveryCodeValue) {
  const LayerShape shape{1, 1, 256, 3, Gate::kScalar};
  const auto expect_exact = [&](const LayerCodec& codec, int lowest, int highest) {
    std::vector<float> X(256 * 3);
    for (int i = 0; i < 256; ++i) {
      for (int j = 0; j < 3; ++j) {
        const int code = lowest + (i * 7 + j) % (highest - lowest + 1);
        X[static_cast<std::size_t>(i * 3 + j)] = static_cast<float>(code);  // scale 1
      }
    }
    Packed packed(codec);
    packed.encode(0, X);
    EXPECT_EQ(packed.decode(0), X);
  };
  expect_exact(*make(config_of("pace", "4"), shape), -7, 7);
  LayerPlan plan;
  for (const int zero : {0, 3, 8, 15}) {
    plan.high = {0};
    expect_exact(*make(config_of("pace", "4/8"), shape, &plan), -zero, 15 - zero);
  }
  for (const int zero : {0, 1, 100, 255}) {
    plan.high = {1};
    expect_exact(*make(config_of("pace", "4/8", {{"group", "256"}}), shape, &plan), -zero,
                 255 - zero);
  }
}

// Column: codes, scales, zero points; even key in the low nibble; two's complement.
TEST(Pace, PageFollowsThePublishedLayout) {
  const LayerShape shape{1, 1, 4, 2, Gate::kScalar};
  const std::vector<float> X = {7, 14, -1, -14, 3, 2, -7, 4};  // columns (7,-1,3,-7), (14,-14,2,4)
  Packed symmetric(make(config_of("pace", "4", {{"group", "4"}}), shape));
  symmetric.encode(0, X);
  // Scales 1 and 2; codes 7,-1 | 3,-7 and 7,-7 | 1,2; f16 1 = 3c00, 2 = 4000.
  EXPECT_EQ(symmetric.page,
            (std::vector<std::uint8_t>{0xF7, 0x93, 0x00, 0x3C, 0x97, 0x21, 0x00, 0x40}));

  LayerPlan plan;
  plan.high = {0};
  const auto low = make(config_of("pace", "4/8", {{"group", "2"}}), shape, &plan);
  Packed affine(*low);
  affine.encode(0, {10, 0, -5, 0, 15, 0, 15, -15});
  // Column 0: range [-5, 10], s 1, z 5, codes 15 0; range [0, 15], s 1, z 0, codes 15 15.
  // Column 1: zeros, s 2^-24 = 0001, z 0; range [-15, 0], s 1, z 15, codes 15 0.
  EXPECT_EQ(affine.page, (std::vector<std::uint8_t>{0x0F, 0xFF, 0x00, 0x3C, 0x00, 0x3C, 0x05, 0x00,
                                                    0x0F, 0x01, 0x00, 0x00, 0x3C, 0xF0}));
}

TEST(Cast, SaturatesAndRoundsToEven) {
  const LayerShape shape{1, 1, 1, 8, Gate::kScalar};
  const float top = std::numeric_limits<float>::max();
  const std::vector<float> X = {top, -top, 65519.9f, 65520.0f, 1e30f, 0x1p-25f, 0x1.8p-24f, 1e-45f};
  Packed fp16(make(config_of("fp16", ""), shape));
  fp16.encode(0, X);
  EXPECT_EQ(fp16.decode(0),
            (std::vector<float>{65504, -65504, 65504, 65504, 65504, 0, 0x1p-23f, 0}));
  Packed bf16(make(config_of("bf16", ""), shape));
  bf16.encode(0, X);
  const float largest = 0x1.fep127f;
  EXPECT_EQ(bf16.decode(0), (std::vector<float>{largest, -largest, 65536, 65536, 0x1.94p99f,
                                                0x1p-25f, 0x1.8p-24f, 0}));
}

TEST(Options, RefusalsSayWhatToDo) {
  const auto message = [](const CodecConfig& config) {
    const Status status = config.info->validate(config);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  EXPECT_EQ(message(config_of("int8", "", {{"group", "48"}})),
            "int8: group=48 is not allowed with layout=row; drop it or use layout=group");
  EXPECT_EQ(message(config_of("int4", "", {{"axis", "key"}, {"layout", "tensor"}})),
            "int4: axis=key is not allowed with layout=tensor; drop it or use layout=group");
  EXPECT_EQ(message(config_of("int6", "", {{"layout", "group"}})),
            "int6: layout=group needs the width of a group; add group=32 or another width");
  EXPECT_EQ(message(config_of("int8", "", {{"layout", "rows"}})),
            "int8: layout=rows is not known; use one of row|column|tensor|group");
  for (const char* group : {"0", "-1", "", "065", "64 ", "1e2", "65537", "99999999999999999999"}) {
    EXPECT_EQ(message(config_of("pace", "4", {{"group", group}})),
              std::string("pace:4: group=") + group +
                  " is not allowed; give a whole number from 1 to 65536");
  }
  EXPECT_EQ(message(config_of("dsq", "6", {{"axes", "both"}})),
            "dsq:6: axes=both is not known; use one of row-column|column-row");
}

TEST(Options, DefaultsAreThePublishedOnes) {
  const CodecInfo& pace = *find_codec("pace");
  EXPECT_EQ(config_of("pace", "4").options.at("group"), "64");
  EXPECT_EQ(config_of("pace", "4/8").options.at("group"), "32");
  EXPECT_EQ(pace.plan_kind(config_of("pace", "4")), "");
  EXPECT_EQ(pace.plan_kind(config_of("pace", "4/8")), "pace-high");
  const SchemeDefaults defaults = pace.defaults(config_of("pace", "4"));
  EXPECT_EQ(defaults.period, 8);
  EXPECT_EQ(defaults.records, "int8");
  EXPECT_EQ(defaults.phase, "handover");
  EXPECT_EQ(defaults.prefill, "256");
  for (const char* name : {"fp32", "bf16", "fp16", "int8", "int6", "int5", "int4"}) {
    EXPECT_EQ(find_codec(name)->defaults(config_of(name, "")).period, 1) << name;
  }
  EXPECT_EQ(find_codec("dsq")->defaults(config_of("dsq", "6")).period, 1);
}

TEST(Pace, RefusesAPlanThatIsNotAMap) {
  LayerPlan plan;
  const LayerShape shape{1, 2, 16, 16, Gate::kScalar};
  const CodecConfig config = config_of("pace", "4/8");
  EXPECT_EQ(config.info->make(config, shape, nullptr).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(config.info->make(config, shape, &plan).status().code(), Code::kInvalidArgument);
  plan.high = {0, 2};
  EXPECT_EQ(config.info->make(config, shape, &plan).status().code(), Code::kCorrupt);
  plan.high = {0, 1, 0};
  EXPECT_EQ(config.info->make(config, shape, &plan).status().code(), Code::kMismatch);
}

}  // namespace
}  // namespace statepack
