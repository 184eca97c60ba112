// The convolution's two forms: over consecutive rows of a prompt, and token by token.
#include "model/short_conv.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace statepack {
namespace {

TEST(ShortConv, StepsAreRowsOfThePrompt) {
  constexpr std::int64_t kRows = 9;
  for (const std::int64_t channels : {1, 15, 16, 17, 80}) {
    for (const int kernel : {2, 3, 4, 7}) {
      std::mt19937 random(static_cast<unsigned>(channels * kernel));
      std::normal_distribution<float> draw;
      const auto normal = [&](std::int64_t n) {
        std::vector<float> x(static_cast<std::size_t>(n));
        for (float& v : x) v = draw(random);
        return x;
      };
      const std::vector<float> weight = normal(channels * kernel);
      const ShortConv conv(weight, channels, kernel);
      const std::vector<float> u = normal((kernel - 1 + kRows) * channels);
      std::vector<float> history(u.begin(), u.begin() + conv.history_floats());
      std::vector<float> whole(static_cast<std::size_t>(channels)), step = whole;
      for (std::int64_t t = 0; t < kRows; ++t) {
        const float* rows = u.data() + t * channels;
        conv.apply(rows, whole.data());
        conv.step(history.data(), rows + conv.history_floats(), step.data());
        ASSERT_EQ(step, whole) << channels << " channels, kernel " << kernel << ", token " << t;
        ASSERT_EQ(history,
                  std::vector<float>(rows + channels, rows + channels + conv.history_floats()));
        for (std::int64_t ch = 0; ch < channels; ++ch) {
          double sum = 0, magnitude = 0;
          for (int j = 0; j < kernel; ++j) {
            const double term = double{weight[static_cast<std::size_t>(ch * kernel + j)]} *
                                double{rows[j * channels + ch]};
            sum += term;
            magnitude += std::fabs(term);
          }
          // kernel products and sums; SiLU's slope is at most 1.1, its own error a few ulp.
          const double expected = sum / (1 + std::exp(-sum));
          ASSERT_NEAR(step[static_cast<std::size_t>(ch)], expected,
                      1.1 * kernel * 0x1p-23 * magnitude + 4 * 0x1p-23 * std::fabs(expected));
        }
      }
    }
  }
}

}  // namespace
}  // namespace statepack
