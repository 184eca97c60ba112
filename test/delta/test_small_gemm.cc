// The small matrix product against double precision, every orientation of A and odd sizes.
#include "delta/small_gemm.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "../simd_targets.hpp"

namespace statepack {
namespace {

std::vector<float> random_values(int n, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = normal(rng);
  return x;
}

void check_products() {
  for (int M : {1, 2, 4, 7}) {
    for (int N : {1, 5, 16, 17, 64, 100, 192}) {
      for (int K : {0, 1, 33, 128}) {
        for (bool transposed : {false, true}) {
          for (bool accumulate : {false, true}) {
            const int a_row = transposed ? 1 : K + 2, a_col = transposed ? M + 3 : 1;
            const auto A = random_values((M + 3) * (K + 2), 1),
                       B = random_values(K * (N + 1) + 1, 2);
            auto C = random_values(M * (N + 4), 3);
            const auto before = C;
            small_gemm(M, N, K, A.data(), a_row, a_col, B.data(), N + 1, C.data(), N + 4,
                       accumulate);
            for (int m = 0; m < M; ++m) {
              for (int n = 0; n < N + 4; ++n) {
                const std::size_t at = std::size_t(m * (N + 4) + n);
                if (n >= N) {  // between the rows nothing is written
                  EXPECT_EQ(C[at], before[at]);
                  continue;
                }
                double sum = accumulate ? before[at] : 0, magnitude = std::fabs(sum);
                for (int k = 0; k < K; ++k) {
                  const double term = double{A[std::size_t(m * a_row + k * a_col)]} *
                                      B[std::size_t(k * (N + 1) + n)];
                  sum += term;
                  magnitude += std::fabs(term);
                }
                ASSERT_NEAR(C[at], sum, (K + 1) * 0x1p-24 * magnitude) << M << " " << N << " " << K;
              }
            }
          }
        }
      }
    }
  }
}

TEST(SmallGemm, IsTheProductOnEveryInstructionSet) {
  testing::for_each_simd_target(check_products);
}

void check_company() {
  const int N = 100, K = 70;
  const auto A = random_values(9 * K, 4), B = random_values(K * N, 5);
  std::vector<float> all(9 * N), one(N);
  small_gemm(9, N, K, A.data(), K, 1, B.data(), N, all.data(), N, false);
  for (int m = 0; m < 9; ++m) {
    small_gemm(1, N, K, A.data() + m * K, K, 1, B.data(), N, one.data(), N, false);
    EXPECT_EQ(one, std::vector<float>(all.begin() + m * N, all.begin() + (m + 1) * N));
  }
}

TEST(SmallGemm, ARowHasTheSameBitsInAnyCompany) { testing::for_each_simd_target(check_company); }

}  // namespace
}  // namespace statepack
