// Record formats: bytes to the byte, rounding bounds, order of values in memory.
#include "scheme/window.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/exp.hpp"
#include "base/half.hpp"

namespace statepack {
namespace {

constexpr Records kAll[] = {Records::kF32, Records::kBf16, Records::kInt8, Records::kMixed};
constexpr float kInf = std::numeric_limits<float>::infinity();

LayerShape shape(int H, int HV, int K, int V, Gate gate = Gate::kScalar) {
  return {H, HV, K, V, gate};
}

/// Bytes of one record of one value head, its share of the key included, without padding.
double record_bytes(const LayerShape& s, Records records, RecordMode mode) {
  const WindowLayout layout(s, records, mode, 16);
  const WindowBytes& parts = layout.parts();
  return static_cast<double>(parts.total() - parts.padding - parts.totals) /
         (16.0 * s.n_value_heads);
}

// PACE's accounting: bk dk / gamma + bv dv + 32 bits a token and value head, and the key
// scale of 16 / gamma bits beside it.
TEST(WindowLayout, PaceRecords) {
  for (const int gamma : {2, 3}) {
    const LayerShape s = shape(16, 16 * gamma, 128, 128);
    const double key_scale = 2.0 / gamma;
    EXPECT_DOUBLE_EQ(record_bytes(s, Records::kInt8, RecordMode::kU),
                     128.0 / gamma + 128 + 4 + key_scale);
    EXPECT_DOUBLE_EQ(record_bytes(s, Records::kMixed, RecordMode::kU),
                     64.0 / gamma + 256 + 4 + key_scale);
    // Mode V: g and beta fill the 32 bits, the value scale is extra.
    EXPECT_DOUBLE_EQ(record_bytes(s, Records::kInt8, RecordMode::kV),
                     128.0 / gamma + 128 + 4 + 2 + key_scale);
    EXPECT_DOUBLE_EQ(record_bytes(s, Records::kMixed, RecordMode::kV),
                     64.0 / gamma + 256 + 4 + key_scale);
  }
}

// LeapQuant's accounting: 8192 bytes of k and u, 64 of weights (logs here); KDA 4096 of factors and
// 512 of running sums.
TEST(WindowLayout, LeapQuantBuffers) {
  const WindowLayout gdn(shape(1, 1, 128, 128), Records::kBf16, RecordMode::kU, 16);
  EXPECT_EQ(gdn.n_bytes(), 8192 + 64);
  const WindowLayout kda(shape(1, 1, 128, 128, Gate::kChannel), Records::kBf16, RecordMode::kU, 16);
  EXPECT_EQ(kda.n_bytes(), 8192 + 4096 + 512);
  EXPECT_TRUE(kda.keeps_factors());
  EXPECT_TRUE(kda.keeps_total());
  // Keys are stored once per key head: 2 KiB less for each value head at 2:1.
  const WindowLayout shared(shape(16, 32, 128, 128), Records::kBf16, RecordMode::kU, 16);
  EXPECT_EQ(shared.n_bytes(), 32 * (8192 + 64 - 2048));
}

TEST(WindowLayout, NoWindowNoBytes) {
  EXPECT_EQ(WindowLayout(shape(1, 1, 8, 8), Records::kBf16, RecordMode::kU, 0).n_bytes(), 0);
  EXPECT_EQ(WindowLayout().n_bytes(), 0);
}

TEST(WindowLayout, BlocksAreWholeSixteens) {
  for (const Records records : kAll) {
    for (const RecordMode mode : {RecordMode::kU, RecordMode::kV}) {
      for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
        for (const int capacity : {1, 2, 3, 7, 16}) {
          for (const LayerShape& s : {shape(1, 3, 5, 7, gate), shape(2, 4, 24, 9, gate)}) {
            const WindowLayout layout(s, records, mode, capacity);
            EXPECT_EQ(layout.n_bytes() % 16, 0);
            EXPECT_LT(layout.parts().padding, 16);
          }
        }
      }
    }
  }
}

// What comes back: within the format's bound, each record in its own place, the rest of the block
// (and guards around it) untouched.
TEST(WindowRecords, RoundTripWithinBounds) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const Records records : kAll) {
    for (const RecordMode mode : {RecordMode::kU, RecordMode::kV}) {
      for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
        for (const LayerShape& s : {shape(2, 4, 33, 18, gate), shape(1, 3, 16, 7, gate)}) {
          constexpr int kCapacity = 5;
          const WindowLayout layout(s, records, mode, kCapacity);
          std::vector<std::uint8_t> memory(static_cast<std::size_t>(layout.n_bytes()) + 64, 0xa5);
          std::uint8_t* block = memory.data() + 32;
          const int width = s.gate_width();
          std::vector<std::vector<float>> k, u, g;
          std::vector<float> beta;
          const auto vector = [&](int n, float scale) {
            std::vector<float> x(static_cast<std::size_t>(n));
            for (float& y : x) y = scale * normal(random);
            return x;
          };
          for (int m = 0; m < kCapacity; ++m) {
            for (int h = 0; h < s.n_key_heads; ++h) {
              k.push_back(vector(s.K, 0.1f));
              layout.store_key(block, m, h, k.back().data());
            }
            for (int h = 0; h < s.n_value_heads; ++h) {
              u.push_back(vector(s.V, 3));
              g.push_back(vector(width, 0.2f));
              for (float& x : g.back()) x = -std::fabs(x);
              beta.push_back(std::fabs(normal(random)));
              layout.store_value(block, m, h, u.back().data(), g.back().data(), beta.back());
            }
          }
          const auto peak = [](const std::vector<float>& x) {
            float p = 0;
            for (const float y : x) p = std::max(p, std::fabs(y));
            return p;
          };
          std::vector<float> x(64), a(64), total(64);
          std::size_t at = 0, key_at = 0;
          for (int m = 0; m < kCapacity; ++m) {
            for (int h = 0; h < s.n_key_heads; ++h, ++key_at) {
              const std::vector<float>& want = k[key_at];
              layout.load_key(block, m, h, x.data());
              for (int i = 0; i < s.K; ++i) {
                const float bound = records == Records::kF32    ? 0
                                    : records == Records::kBf16 ? 0x1p-8f * std::fabs(want[i])
                                    : records == Records::kInt8 ? peak(want) / 127 * 0.501f
                                                                : peak(want) / 7 * 0.504f;
                EXPECT_LE(std::fabs(x[i] - want[i]), bound);
              }
            }
            for (int h = 0; h < s.n_value_heads; ++h, ++at) {
              const std::vector<float>& want = u[at];
              layout.load_value(block, m, h, x.data());
              for (int j = 0; j < s.V; ++j) {
                const float bound = records == Records::kF32    ? 0
                                    : records == Records::kInt8 ? peak(want) / 127 * 0.501f
                                                                : 0x1p-8f * std::fabs(want[j]);
                EXPECT_LE(std::fabs(x[j] - want[j]), bound);
              }
              layout.load_gate(block, m, h, x.data());
              for (int i = 0; i < width; ++i) {
                const float exact = g[at][i];
                if (layout.keeps_factors()) {  // half a unit of an f16 below 1, and exp itself
                  layout.load_factor(block, m, h, a.data());
                  EXPECT_NEAR(a[i], std::exp(exact), 0x1p-12 + 1e-6);
                  EXPECT_NEAR(x[i], std::log(a[i]), 1e-6);
                } else {
                  EXPECT_NEAR(x[i], exact, records == Records::kF32 ? 0 : std::fabs(exact) / 2000);
                }
              }
              if (mode == RecordMode::kV) {
                EXPECT_NEAR(layout.load_beta(block, m, h), beta[at], beta[at] / 2000);
              }
            }
          }
          if (layout.keeps_total()) {
            for (int h = 0; h < s.n_value_heads; ++h) {
              layout.load_total(block, h, total.data());
              for (int i = 0; i < width; ++i) {
                float sum = 0;
                for (int m = 0; m < kCapacity; ++m) {
                  sum += g[static_cast<std::size_t>(m * s.n_value_heads + h)][i];
                }
                EXPECT_EQ(total[i], sum);
              }
            }
          }
          for (int i = 0; i < 32; ++i) {
            EXPECT_EQ(memory[static_cast<std::size_t>(i)], 0xa5);
            EXPECT_EQ(memory[memory.size() - 1 - static_cast<std::size_t>(i)], 0xa5);
          }
        }
      }
    }
  }
}

TEST(WindowRecords, ExtremeValues) {
  const LayerShape s = shape(1, 1, 5, 4);
  for (const Records records : kAll) {
    const WindowLayout layout(s, records, RecordMode::kU, 2);
    std::vector<std::uint8_t> block(static_cast<std::size_t>(layout.n_bytes()));
    const float zeros[5] = {};
    float x[5] = {1, 1, 1, 1, 1};
    layout.store_key(block.data(), 0, 0, zeros);
    layout.load_key(block.data(), 0, 0, x);
    for (const float y : x) EXPECT_EQ(y, 0.0f);
    const float huge[5] = {3e38f, -3e38f, 0, 1, 2};
    layout.store_key(block.data(), 1, 0, huge);
    layout.load_key(block.data(), 1, 0, x);
    for (const float y : x) EXPECT_TRUE(std::isfinite(y));
    // Logs never come back as -Inf; a decay of exactly 1 stays one.
    for (const float g : {-kInf, -1e30f, -70000.0f}) {
      float read = 0;
      layout.store_value(block.data(), 1, 0, zeros, &g, 0);
      layout.load_gate(block.data(), 1, 0, &read);
      EXPECT_EQ(read, -60000.0f);
      EXPECT_EQ(exp_f32(read), 0.0f);
    }
    const float none = 0;
    float read = 1;
    layout.store_value(block.data(), 1, 0, zeros, &none, 0);
    layout.load_gate(block.data(), 1, 0, &read);
    EXPECT_EQ(exp_f32(read), 1.0f);
  }
}

// Two 4-bit codes a byte, even index low, two's complement; the scale behind them.
TEST(WindowRecords, FourBitLayout) {
  const LayerShape s = shape(1, 1, 3, 1);
  const WindowLayout layout(s, Records::kMixed, RecordMode::kU, 1);
  std::vector<std::uint8_t> block(static_cast<std::size_t>(layout.n_bytes()));
  const float k[3] = {7, -1, -7};
  layout.store_key(block.data(), 0, 0, k);
  const std::uint8_t* key = block.data() + 4 + 2;  // behind one gate f32 and one value bf16
  EXPECT_EQ(key[0], 0xf7);
  EXPECT_EQ(key[1] & 0xf, 0x9);
  std::uint16_t scale;
  std::memcpy(&scale, key + 2, 2);
  EXPECT_EQ(f16_to_f32(scale), 1.0f);
}

TEST(Exp, WithinTwoUnits) {
  EXPECT_EQ(exp_f32(0.0f), 1.0f);
  EXPECT_EQ(exp_f32(-0.0f), 1.0f);
  EXPECT_EQ(exp_f32(-kInf), 0.0f);
  EXPECT_EQ(exp_f32(-1e6f), 0.0f);
  EXPECT_TRUE(std::isnan(exp_f32(std::nanf(""))));
  for (float x = -86.0f; x < 1.0f; x += 0.00917f) {
    const double exact = std::exp(static_cast<double>(x));
    EXPECT_NEAR(exp_f32(x), exact, exact * 0x1p-22) << x;
  }
}

}  // namespace
}  // namespace statepack
