// Inverses and eigenvectors against what defines them.
#include "base/matrix.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace statepack {
namespace {

std::vector<double> random_matrix(int n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> A(static_cast<std::size_t>(n) * static_cast<std::size_t>(n));
  for (double& a : A) a = normal(random);
  return A;
}

std::vector<double> product(const std::vector<double>& A, const std::vector<double>& B, int n) {
  std::vector<double> C(A.size(), 0.0);
  for (int i = 0; i < n; ++i) {
    for (int l = 0; l < n; ++l) {
      for (int j = 0; j < n; ++j) C[i * n + j] += A[i * n + l] * B[l * n + j];
    }
  }
  return C;
}

TEST(Matrix, InverseTimesMatrixIsTheIdentity) {
  for (const int n : {1, 2, 7, 33, 128}) {
    const std::vector<double> A = random_matrix(n, 1);
    std::vector<double> inverse(A.size());
    ASSERT_TRUE(invert(A, n, inverse)) << n;
    const std::vector<double> I = product(A, inverse, n);
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) ASSERT_NEAR(I[i * n + j], i == j ? 1 : 0, 1e-9) << n;
    }
  }
}

TEST(Matrix, PivotsAndRefusesWhatHasNoInverse) {
  std::vector<double> out(4);
  ASSERT_TRUE(invert(std::vector<double>{0, 2, 4, 0}, 2, out));  // a zero on the diagonal
  EXPECT_EQ(out, (std::vector<double>{0, 0.25, 0.5, 0}));
  EXPECT_FALSE(invert(std::vector<double>{1, 2, 2, 4}, 2, out));
  EXPECT_FALSE(invert(std::vector<double>{0, 0, 0, 0}, 2, out));
  EXPECT_FALSE(invert(std::vector<double>{1, NAN, 0, 1}, 2, out));
}

TEST(Matrix, EigenvectorsDiagonalise) {
  for (const int n : {1, 2, 5, 64, 128}) {
    const std::vector<double> B = random_matrix(n, 2);
    std::vector<double> A(B.size(), 0.0);  // B^T B, of eigenvalues between 1e-4 and 500
    for (int i = 0; i < n; ++i) {
      for (int l = 0; l < n; ++l) {
        for (int j = 0; j < n; ++j) A[i * n + j] += B[l * n + i] * B[l * n + j];
      }
    }
    std::vector<double> used = A, values(static_cast<std::size_t>(n)), U(A.size());
    symmetric_eigen(used, n, values, U);
    double scale = values[0];
    for (int i = 0; i < n; ++i) {
      EXPECT_LE(values[i], values[std::max(i - 1, 0)]);
      for (int j = 0; j < n; ++j) {
        double dot = 0, image = 0;
        for (int l = 0; l < n; ++l) {
          dot += U[i * n + l] * U[j * n + l];
          image += A[j * n + l] * U[i * n + l];
        }
        ASSERT_NEAR(dot, i == j ? 1 : 0, 1e-12) << n;
        ASSERT_NEAR(image, values[i] * U[i * n + j], 1e-12 * scale) << n;
      }
    }
  }
  // Equal values, and a matrix that is diagonal already.
  std::vector<double> A = {2, 0, 0, 0, 5, 0, 0, 0, 2}, values(3), U(9);
  symmetric_eigen(A, 3, values, U);
  EXPECT_EQ(values, (std::vector<double>{5, 2, 2}));
  EXPECT_EQ(U, (std::vector<double>{0, 1, 0, 1, 0, 0, 0, 0, 1}));
}

}  // namespace
}  // namespace statepack
