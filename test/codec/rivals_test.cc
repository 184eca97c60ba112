// What rival formats promise: sizes of the published table, rules of rounding, known numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numbers>

#include "base/half.hpp"
#include "codec/minifloat/formats.hpp"
#include "codec/philox.hpp"
#include "codec/rotated/hadamard.hpp"
#include "codec_cases.hpp"

namespace statepack {
namespace {

using testing::config_of;
using ::testing::HasSubstr;
using testing::Packed;
using Options = std::map<std::string, std::string>;

constexpr LayerShape kOneHead{1, 1, 128, 128, Gate::kScalar};

std::unique_ptr<LayerCodec> make(const CodecConfig& config, const LayerShape& shape = kOneHead) {
  LayerPlan plan;
  plan.bits.assign(static_cast<std::size_t>(shape.n_value_heads * shape.K), 4);
  for (std::size_t i = 0; i < plan.bits.size(); i += 8) plan.bits[i] = 16;  // an eighth protected
  auto codec = config.info->make(config, shape, &plan);
  EXPECT_TRUE(codec.ok()) << codec.status().message();
  return std::move(codec).value();
}

std::vector<float> noise(std::size_t n, float size = 1) {
  testing::Random random(11);
  std::vector<float> X(n);
  for (float& x : X) x = size * random.next();
  return X;
}

// Known answers of the generator's authors.
TEST(Philox, GivesTheKnownAnswers) {
  using Block = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, AHeadsNumbersAreTheBlocksOfItsPlace) {
  const RoundingContext at{.seed = 0x123456789abcdef0, .layer = 5, .step = 0x700000003};
  std::vector<std::uint32_t> numbers(static_cast<std::size_t>(drawn(100)));
  draw(at, 6, 100, numbers.data());
  for (std::uint32_t e = 0; e < 100; ++e) {
    const auto block = philox({e / 4, 5 << 16 | 6, 3, 7}, {0x9abcdef0, 0x12345678});
    EXPECT_EQ(numbers[e], block[e % 4]) << e;
  }
}

// Bits a value at 128 x 128, in bytes of a page: the table of the comparison.
TEST(Rivals, SizesAreThoseOfTheTable) {
  struct Case {
    const char *codec, *arg;
    Options options;
    double bits;
    Rounding rounding = Rounding::kNearest;
  };
  const Rounding feedback = Rounding::kFeedback;
  const Options column32 = {{"layout", "column"}, {"scale", "f32"}};
  const Case cases[] = {
      {"int8", "", {{"layout", "group"}, {"group", "32"}, {"code", "affine"}}, 9},
      {"int4", "", {{"layout", "group"}, {"group", "32"}, {"code", "affine"}}, 5},
      {"int8", "", column32, 8.25},
      {"int8", "", {}, 12.5, feedback},
      {"int8", "", {{"residual", "f32"}}, 40.25, feedback},
      {"int8", "", {{"residual", "f16"}}, 24.25, feedback},
      {"int8", "", {{"residual", "int8"}}, 16.5, feedback},
      {"int8", "", {{"residual", "implied"}}, 12.25, feedback},
      {"int8", "", {{"reads", "sum"}}, 12.5, feedback},
      {"fp8", "", {}, 8 + 32.0 / 4096},
      {"fp8", "", {{"layout", "row"}}, 8.125},
      {"fp8", "", {{"layout", "column"}}, 8.125},
      {"fp8", "", column32, 8.25},
      {"fp8", "", {{"layout", "group"}, {"group", "32"}}, 8.5},
      {"fp8", "", {{"layout", "tensor"}}, 8 + 32.0 / 16384},
      {"mxfp8", "", {}, 8.25},
      {"mxfp6", "", {}, 6.25},
      {"mxfp4", "", {}, 4.25},
      {"nvfp6", "", {}, 6.5 + 32.0 / 16384},
      {"nvfp4", "", {}, 4.5 + 32.0 / 16384},
      {"turboquant", "4", {}, 4.125},
      {"turboquant", "8", {}, 8.125},
      {"quarot", "4", {}, 4.125},
      {"damp", "8", {}, 9.875},
      {"damp", "4", {}, 6.375},
      {"damp", "4-lean", {}, 5.6640625},
      {"fp16", "", {}, 16, Rounding::kStochastic},
      {"bf16", "", {}, 16, Rounding::kStochastic},
  };
  for (const Case& c : cases) {
    const CodecConfig config = config_of(c.codec, c.arg, c.options, c.rounding);
    EXPECT_EQ(8.0 * static_cast<double>(make(config)->page_bytes()) / 16384, c.bits)
        << testing::name_of(config);
  }
}

TEST(MiniFloat, EveryCodeRestoresToItselfAndNeighboursRoundToTheNearer) {
  const auto check = []<class Format>(Format, float largest, int n_codes) {
    for (int code = 0; code < n_codes; ++code) {
      const float x = Format::decode(static_cast<std::uint32_t>(code));
      EXPECT_EQ(Format::encode(x, largest), static_cast<std::uint32_t>(code)) << x;
      EXPECT_EQ(Format::encode_either(x, largest, 0xffffffffu), static_cast<std::uint32_t>(code));
      if (code + 1 == n_codes) continue;
      const float next = Format::decode(static_cast<std::uint32_t>(code + 1));
      ASSERT_LT(x, next);
      const float middle = x + (next - x) / 2;
      EXPECT_EQ(Format::encode(middle, largest) % 2, 0u) << middle;
      EXPECT_EQ(Format::encode(std::nextafter(middle, 0.0f), largest), static_cast<unsigned>(code));
      EXPECT_EQ(Format::encode(std::nextafter(middle, next), largest),
                static_cast<unsigned>(code + 1));
    }
    EXPECT_EQ(Format::decode(static_cast<std::uint32_t>(n_codes - 1)), largest);
    EXPECT_EQ(Format::encode(INFINITY, largest), static_cast<std::uint32_t>(n_codes - 1));
    EXPECT_EQ(Format::decode(Format::encode(-1.0f, largest)), -1.0f);
  };
  check(E4m3(), kMaxE4m3, 127);
  check(E5m2(), kMaxE5m2, 124);
  check(E2m3(), kMaxE2m3, 32);
  check(E2m1(), kMaxE2m1, 8);
  check(F16(), 65504.0f, 31744);
}

// Means over many places: the rounding has no bias beyond six standard errors, and both neighbours
// appear where nearest rounding would always take one.
TEST(Stochastic, IsUnbiasedAndRepeats) {
  for (const char* name : {"bf16", "fp16", "int8", "int4", "fp8", "mxfp4"}) {
    const LayerShape shape{1, 1, 16, 16, Gate::kScalar};
    const auto codec = make(config_of(name, "", {}, Rounding::kStochastic), shape);
    const auto nearest = make(config_of(name, ""), shape);
    const std::vector<float> X = noise(256);
    Packed packed(*codec), plain(*nearest);
    plain.encode(0, X);
    const std::vector<float> rounded = plain.decode(0);
    constexpr int kRuns = 400;
    std::vector<double> sum(X.size()), squares(X.size());
    int n_moved = 0;
    for (int run = 0; run < kRuns; ++run) {
      const RoundingContext at{.seed = 9, .layer = 1, .step = static_cast<std::uint64_t>(run)};
      packed.encode(0, X, at);
      const std::vector<std::uint8_t> page = packed.page;
      packed.encode(0, X, at);
      ASSERT_EQ(packed.page, page) << name;
      const std::vector<float> back = packed.decode(0);
      for (std::size_t i = 0; i < X.size(); ++i) {
        sum[i] += back[i] - double{X[i]};
        squares[i] += std::pow(back[i] - double{X[i]}, 2);
        n_moved += back[i] != rounded[i];
      }
    }
    EXPECT_GT(n_moved, kRuns) << name;
    double total = 0, variance = 0;
    for (std::size_t i = 0; i < X.size(); ++i) total += sum[i], variance += squares[i];
    // mxfp4 saturates blocks whose peak lies above 6/8 of the next power of two: that is no
    // rounding.
    if (std::string(name) != "mxfp4") {
      EXPECT_LT(std::fabs(total), 6 * std::sqrt(variance)) << name;
    }
  }
}

// X moves towards a constant input, x <- a x + (1 - a) v, beside a row that sets the scale:
// increments far below half a step are lost by nearest rounding for ever; what is carried on adds
// up.
TEST(Feedback, KeepsWhatNearestRoundingLoses) {
  const LayerShape shape{1, 1, 16, 16, Gate::kScalar};
  std::vector<float> v = noise(256);
  std::fill_n(v.begin(), 16, 1.0f);
  const auto final_error = [&](const CodecConfig& config) {
    const auto codec = make(config, shape);
    Packed packed(*codec);
    std::vector<float> S(v.size(), 0.0f);
    std::fill_n(S.begin(), 16, 1.0f);
    packed.encode(0, S, {});
    constexpr float a = 0.997f;
    for (int t = 0; t < 4000; ++t) {
      S = packed.decode(0);
      for (std::size_t i = 0; i < S.size(); ++i) S[i] = a * S[i] + (1 - a) * v[i];
      packed.encode(0, S, {.step = static_cast<std::uint64_t>(t), .before = packed.page.data()});
    }
    S = packed.decode(0);
    double error = 0, power = 0;
    for (std::size_t i = 16; i < S.size(); ++i) {
      error += std::pow(double{S[i]} - v[i], 2);
      power += double{v[i]} * v[i];
    }
    return std::sqrt(error / power);
  };
  const Options column = {{"layout", "column"}, {"scale", "f32"}};
  const double nearest = final_error(config_of("int8", "", column));
  EXPECT_GT(nearest, 0.9);
  // A coarse residual loses increments too, but smaller ones.
  const std::pair<const char*, double> residuals[] = {
      {"f32", 0.05}, {"f16", 0.05}, {"int8", 0.05}, {"int4", 0.3}, {"implied", 0.5}};
  for (const auto& [residual, most] : residuals) {
    const CodecConfig config = config_of("int8", "", {{"residual", residual}}, Rounding::kFeedback);
    EXPECT_LT(final_error(config), most) << residual;
  }
  // The control keeps as many bits, but not what rounding them lost.
  EXPECT_LT(final_error(config_of("int8", "", {{"reads", "sum"}}, Rounding::kFeedback)), nearest);
}

TEST(Feedback, StartsFromNothingAndSurvivesAnyResidual) {
  const LayerShape shape{1, 2, 16, 16, Gate::kScalar};
  const std::vector<float> X = noise(256);
  for (const char* residual : {"f32", "f16", "int8", "int4", "implied"}) {
    for (const char* reads : {"code", "sum"}) {
      const CodecConfig config =
          config_of("int8", "", {{"residual", residual}, {"reads", reads}}, Rounding::kFeedback);
      const auto codec = make(config, shape);
      Packed fresh(*codec), empty(*codec), hostile(*codec);
      fresh.encode(1, X, {});
      const std::vector<std::uint8_t> zeros(fresh.page.size());
      empty.encode(1, X, {.before = zeros.data()});
      EXPECT_EQ(fresh.page, empty.page) << testing::name_of(config);
      // A page from outside may hold any bytes, NaN among them.
      const std::vector<std::uint8_t> ones(fresh.page.size(), 0xff);
      hostile.encode(1, X, {.before = ones.data()});
      if (std::string(reads) == "code") {
        hostile.encode(1, X, {.before = hostile.page.data()});
        for (const float x : hostile.decode(1)) ASSERT_TRUE(std::isfinite(x));
      }
    }
  }
}

TEST(Hadamard, IsItsOwnInverseAndKeepsLength) {
  for (const std::int64_t n : {1, 2, 6, 7, 16, 48, 96, 128, 192}) {
    const std::vector<float> x = noise(static_cast<std::size_t>(n));
    std::vector<float> y = x;
    hadamard(y.data(), n);
    double before = 0, after = 0;
    for (std::size_t i = 0; i < x.size(); ++i) before += x[i] * x[i], after += y[i] * y[i];
    EXPECT_NEAR(after, before, 1e-5 * before) << n;
    hadamard(y.data(), n);
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i], x[i], 1e-6f) << n;
  }
}

// Rows drawn from N(0, 1): rotated and over the norm of 128 values, coordinates are nearly normal;
// the tails that a fixed norm cuts off make the error up to a few per cent less than the
// codebook's.
TEST(Turboquant, HasTheErrorOfItsCodebook) {
  testing::Random random(5);
  std::vector<float> X(128 * 128);
  for (float& x : X) {  // Box and Muller
    const double u = random.next() + 0.5 + 1e-9, v = random.next();
    x = static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
  }
  const std::pair<const char*, double> errors[] = {
      {"2", .11748}, {"3", .03455}, {"4", .009501}, {"5", .002505}, {"6", .000644}};
  for (const auto& [bits, expected] : errors) {
    const auto codec = make(config_of("turboquant", bits));
    Packed packed(*codec);
    packed.encode(0, X);
    const std::vector<float> back = packed.decode(0);
    double error = 0, power = 0;
    for (std::size_t i = 0; i < X.size(); ++i) {
      error += std::pow(double{back[i]} - X[i], 2);
      power += double{X[i]} * X[i];
    }
    EXPECT_NEAR(error / power, 0.95 * expected, 0.05 * expected) << bits;
  }
}

// One hot row a head: the protected rows are exact to half precision, wherever they lie.
TEST(Damp, ProtectedRowsAreHalves) {
  const auto codec = make(config_of("damp", "4"));
  const std::vector<float> X = noise(128 * 128, 3);
  Packed packed(*codec);
  packed.encode(0, X);
  const std::vector<float> back = packed.decode(0);
  for (std::size_t e = 0; e < X.size(); ++e) {
    if (e / 128 % 8 != 0) continue;
    EXPECT_EQ(back[e], f16_to_f32(f32_to_f16(X[e]))) << e;
  }
  EXPECT_EQ(codec->payload().pivots, 16 * 128 * 2);
}

// The parts of a method, taken away one at a time on a state with a hot row and a hot column.
TEST(Ablations, EveryPartOfTheMethodsLowersTheError) {
  const int K = 128, V = 128;
  std::vector<float> X = noise(128 * 128);
  for (int e = 0; e < K * V; ++e) {
    const auto at = static_cast<std::size_t>(e);
    X[at] *= std::exp2(static_cast<float>(e / V % 5 - 2 + e % V % 7 - 3));  // scales on both axes
    X[at] += 4 * std::sin(static_cast<float>(e / V)) * std::cos(static_cast<float>(e % V));
  }
  LayerPlan plan;
  plan.bits.assign(128, 6);
  plan.row_weight.assign(128, 1.0f);
  const auto error = [&](const CodecConfig& config) {
    auto made = config.info->make(config, kOneHead, &plan);
    EXPECT_TRUE(made.ok()) << made.status().message();
    Packed packed(**made);
    packed.encode(0, X);
    const std::vector<float> back = packed.decode(0);
    double sum = 0;
    for (std::size_t e = 0; e < X.size(); ++e) sum += std::pow(double{back[e]} - X[e], 2);
    return sum;
  };
  EXPECT_LT(error(config_of("stepquant", "6")),
            error(config_of("stepquant", "6", {{"fit", "rows"}})));
  const double full = error(config_of("leapquant", "8"));
  const double unsmoothed = error(config_of("leapquant", "8", {{"smooth", "off"}}));
  const double window = error(config_of("leapquant", "8", {{"smooth", "off"}, {"rank", "0"}}));
  EXPECT_LT(full, unsmoothed);
  EXPECT_LT(unsmoothed, window);
  // Without either, what is left is one f32 scale a value column.
  const double column = error(config_of("int8", "", {{"layout", "column"}, {"scale", "f32"}}));
  EXPECT_NEAR(window, column, 1e-3 * column);
}

TEST(Ablations, WidthsAndSizesFollowTheOptions) {
  const LayerShape shape{1, 4, 128, 128, Gate::kScalar};
  LayerPlan plan;
  for (const std::uint8_t bits : std::initializer_list<std::uint8_t>{4, 6, 16, 2}) {
    plan.bits.insert(plan.bits.end(), 128, bits);
  }
  plan.row_weight.assign(512, 1.0f);
  const auto payload = [&](const Options& options) {
    const CodecConfig config = config_of("stepquant", "6", options);
    auto made = config.info->make(config, shape, &plan);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return (*made)->payload();
  };
  EXPECT_EQ(payload({}).pivots, 128 * 128 * 2);
  EXPECT_EQ(payload({{"bits", "no-pivots"}}).pivots, 0);
  EXPECT_EQ(payload({{"bits", "no-pivots"}}).codes, (4 + 6 + 8 + 2) * 128 * 128 / 8);
  EXPECT_EQ(payload({{"bits", "uniform"}}).codes, 4 * 6 * 128 * 128 / 8);
  // No column scales, 2 bytes a column of each head that has codes; one scale a row, not four, at 2
  // bits.
  EXPECT_EQ(payload({}).scales - payload({{"fit", "rows"}}).scales, 3 * 128 * 2 + 3 * 128 * 2);
  const CodecConfig plain = config_of("leapquant", "8", {{"smooth", "off"}, {"rank", "0"}});
  EXPECT_EQ((*plain.info->make(plain, kOneHead, nullptr))->page_bytes(), 128 * 128 + 4 * 128);
}

TEST(Rivals, WhatCannotBeCombinedIsRefusedWithTheReason) {
  const auto message = [](const CodecConfig& config) {
    const Status status = config.info->validate(config);
    EXPECT_FALSE(status.ok()) << testing::name_of(config);
    return status.message();
  };
  EXPECT_THAT(message(config_of("int8", "", {{"code", "affine"}}, Rounding::kStochastic)),
              HasSubstr("code=affine rounds to nearest only"));
  EXPECT_THAT(message(config_of("int8", "", {{"residual", "int4"}})),
              HasSubstr("residual= keeps what rounding=feedback carries on"));
  EXPECT_THAT(message(config_of("int8", "", {{"reads", "sum"}})), HasSubstr("reads=sum"));
  EXPECT_THAT(message(config_of("int8", "", {{"residual", "none"}}, Rounding::kFeedback)),
              HasSubstr("residual=none is not allowed"));
  EXPECT_THAT(message(config_of("fp8", "", {{"format", "e5m2"}})), HasSubstr("layout=tile"));
  EXPECT_THAT(message(config_of("fp8", "", {{"group", "4"}})), HasSubstr("layout=tile"));
  EXPECT_THAT(message(config_of("mxfp4", "", {{"group", "0"}})), HasSubstr("from 1 to 65536"));
  const CodecConfig damp = config_of("damp", "8");
  EXPECT_THAT(damp.info->make(damp, kOneHead, nullptr).status().message(),
              HasSubstr("statepack calibrate --scheme damp:8"));
}

}  // namespace
}  // namespace statepack
