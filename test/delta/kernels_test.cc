// The loops of a step against plain ones, on every instruction set that the machine has.
#include "delta/kernels.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "../simd_targets.hpp"

namespace statepack {
namespace {

struct Shape {
  int K, V;
};
constexpr Shape kShapes[] = {{128, 128}, {64, 128}, {128, 64}, {96, 192},
                             {1, 1},     {33, 17},  {5, 70}};

std::vector<float> random_values(int n, unsigned seed, float scale = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = scale * normal(rng);
  return x;
}

std::int32_t peak_of(const std::vector<float>& x) {
  std::int32_t peak = 0;
  for (const float v : x) peak = std::max(peak, std::bit_cast<std::int32_t>(std::fabs(v)));
  return peak;
}

// Sums in the order of the rows, each product rounded: the same bits everywhere.
TEST(HeadKernels, ReadBothSumsInTheOrderOfRows) {
  testing::for_each_simd_target([] {
    for (const auto& [K, V] : kShapes) {
      const auto S = random_values(K * V, 1), a = random_values(K, 2), b = random_values(K, 3);
      std::vector<float> p(static_cast<std::size_t>(V)), r = p, expected_p = p, expected_r = p;
      for (int i = 0; i < K; ++i) {
        for (int j = 0; j < V; ++j) {
          expected_p[std::size_t(j)] += a[std::size_t(i)] * S[std::size_t(i * V + j)];
          expected_r[std::size_t(j)] += b[std::size_t(i)] * S[std::size_t(i * V + j)];
        }
      }
      kernel::read_two(S.data(), K, V, a.data(), b.data(), p.data(), r.data());
      EXPECT_EQ(p, expected_p);
      EXPECT_EQ(r, expected_r);
      const int half = K / 2;  // in two pieces, the second on top of the first
      kernel::read_two(S.data(), half, V, a.data(), b.data(), p.data(), r.data());
      kernel::read_two(S.data() + half * V, K - half, V, a.data() + half, b.data() + half, p.data(),
                       r.data(), /*add=*/true);
      EXPECT_EQ(p, expected_p);
      EXPECT_EQ(r, expected_r);
      EXPECT_EQ(kernel::read_two_and_peak(S.data(), K, V, a.data(), b.data(), p.data(), r.data()),
                peak_of(S));
      EXPECT_EQ(p, expected_p);
      EXPECT_EQ(r, expected_r);
    }
  });
}

TEST(HeadKernels, AddUpdatesInOrder) {
  testing::for_each_simd_target([] {
    for (const auto& [K, V] : kShapes) {
      for (const int n : {0, 1, 3, 16}) {
        for (const int d_stride : {0, 1}) {
          const int key_stride = K + 3;
          const auto S = random_values(K * V, 1), d = random_values(K, 2);
          const auto keys = random_values(n * key_stride + 1, 3), values = random_values(n * V, 4);
          std::vector<float> expected = S;
          for (int i = 0; i < K; ++i) {
            for (int j = 0; j < V; ++j) {
              float& x = expected[std::size_t(i * V + j)];
              x = d[std::size_t(i * d_stride)] * x;
              for (int m = 0; m < n; ++m) {
                x += keys[std::size_t(m * key_stride + i)] * values[std::size_t(m * V + j)];
              }
            }
          }
          const kernel::Update by{d.data(), d_stride, n, keys.data(), key_stride, values.data()};
          std::vector<float> X(S.size());
          EXPECT_EQ(kernel::update(S.data(), K, V, by, X.data()), peak_of(expected));
          EXPECT_EQ(X, expected);
          X = S;  // in place
          kernel::update(X.data(), K, V, by, X.data());
          EXPECT_EQ(X, expected);
        }
      }
    }
  });
}

// The same sums with fused multiply-adds where there are some: within the rounding of their terms.
TEST(HeadKernels, FusedUpdatesStayWithinRounding) {
  testing::for_each_simd_target([] {
    for (const auto& [K, V] : kShapes) {
      constexpr int n = 16;
      const auto S = random_values(K * V, 1), d = random_values(1, 2);
      const auto keys = random_values(n * K, 3), values = random_values(n * V, 4);
      std::vector<float> X(S.size());
      const kernel::Update by{d.data(), 0, n, keys.data(), K, values.data(), true};
      const std::int32_t peak = kernel::update(S.data(), K, V, by, X.data());
      EXPECT_EQ(peak, peak_of(X));
      for (int i = 0; i < K; ++i) {
        for (int j = 0; j < V; ++j) {
          double sum = double{d[0]} * S[std::size_t(i * V + j)], size = std::fabs(sum);
          for (int m = 0; m < n; ++m) {
            const double term =
                double{keys[std::size_t(m * K + i)]} * values[std::size_t(m * V + j)];
            sum += term;
            size += std::fabs(term);
          }
          ASSERT_NEAR(X[std::size_t(i * V + j)], sum, (n + 1) * 0x1p-23 * size) << K << "x" << V;
        }
      }
    }
  });
}

TEST(HeadKernels, FindWhatIsNotFinite) {
  testing::for_each_simd_target([] {
    for (const float bad : {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), std::nanf("")}) {
      for (const auto& [K, V] : kShapes) {
        std::vector<float> S = random_values(K * V, 1, 1e30f);
        const std::vector<float> d(static_cast<std::size_t>(K), 1.0f);
        const kernel::Update by{d.data(), 0, 0, nullptr, 0, nullptr};
        std::vector<float> X(S.size());
        EXPECT_LT(kernel::update(S.data(), K, V, by, X.data()), kernel::kInfBits);
        for (const std::size_t at : {std::size_t{0}, S.size() / 2, S.size() - 1}) {
          std::vector<float> hurt = S;
          hurt[at] = bad;
          EXPECT_GE(kernel::update(hurt.data(), K, V, by, X.data()), kernel::kInfBits);
          const std::vector<float> a(static_cast<std::size_t>(K));
          std::vector<float> p(static_cast<std::size_t>(V)), r = p;
          EXPECT_GE(
              kernel::read_two_and_peak(hurt.data(), K, V, a.data(), a.data(), p.data(), r.data()),
              kernel::kInfBits);
        }
        // Of the two that correct() makes, either.
        std::vector<float> p(static_cast<std::size_t>(V)), r = p, v = p, u = p, o = p;
        EXPECT_LT(kernel::correct(p.data(), r.data(), v.data(), 0.5f, 1.0f, V, u.data(), o.data()),
                  kernel::kInfBits);
        for (std::vector<float>* hurt : {&p, &r, &v}) {
          (*hurt)[static_cast<std::size_t>(V) / 2] = bad;
          EXPECT_GE(
              kernel::correct(p.data(), r.data(), v.data(), 0.5f, 1.0f, V, u.data(), o.data()),
              kernel::kInfBits);
          (*hurt)[static_cast<std::size_t>(V) / 2] = 0;
        }
      }
    }
  });
}

TEST(HeadKernels, ReadRecords) {
  testing::for_each_simd_target([] {
    for (const auto& [K, V] : kShapes) {
      for (const int n : {1, 7, 16}) {
        const auto keys = random_values(n * K, 1), values = random_values(n * V, 2);
        const auto x = random_values(K, 3), y = random_values(K, 4);
        std::vector<float> a(static_cast<std::size_t>(n)), b = a;
        kernel::dot_records(keys.data(), n, K, x.data(), y.data(), a.data(), b.data());
        for (int m = 0; m < n; ++m) {
          double with_x = 0, with_y = 0, size = 0;
          for (int i = 0; i < K; ++i) {
            const double key = keys[std::size_t(m * K + i)];
            with_x += key * x[std::size_t(i)];
            with_y += key * y[std::size_t(i)];
            size += std::fabs(key) * (std::fabs(x[std::size_t(i)]) + std::fabs(y[std::size_t(i)]));
          }
          ASSERT_NEAR(a[std::size_t(m)], with_x, (K + 1) * 0x1p-24 * size);
          ASSERT_NEAR(b[std::size_t(m)], with_y, (K + 1) * 0x1p-24 * size);
        }
        auto p = random_values(V, 5), r = random_values(V, 6);
        const auto p0 = p, r0 = r;
        kernel::read_records(values.data(), n, V, a.data(), b.data(), p.data(), r.data());
        for (int j = 0; j < V; ++j) {
          double with_a = p0[std::size_t(j)], with_b = r0[std::size_t(j)];
          double size = std::fabs(with_a) + std::fabs(with_b);
          for (int m = 0; m < n; ++m) {
            const double u = values[std::size_t(m * V + j)];
            with_a += u * a[std::size_t(m)];
            with_b += u * b[std::size_t(m)];
            size += std::fabs(u) * (std::fabs(a[std::size_t(m)]) + std::fabs(b[std::size_t(m)]));
          }
          ASSERT_NEAR(p[std::size_t(j)], with_a, (n + 1) * 0x1p-24 * size);
          ASSERT_NEAR(r[std::size_t(j)], with_b, (n + 1) * 0x1p-24 * size);
        }
      }
    }
  });
}

}  // namespace
}  // namespace statepack
