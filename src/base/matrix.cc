#include "base/matrix.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include "base/check.hpp"
#include "base/simd_clones.hpp"

namespace statepack {
namespace {

SP_CLONES void subtract_scaled(double* __restrict y, double c, const double* __restrict x, int n) {
  for (int i = 0; i < n; ++i) y[i] -= c * x[i];
}

// Rows x and y turn into c x - s y and s x + c y.
SP_CLONES void rotate(double* __restrict x, double* __restrict y, double c, double s, int n) {
  for (int i = 0; i < n; ++i) {
    const double a = x[i], b = y[i];
    x[i] = c * a - s * b;
    y[i] = s * a + c * b;
  }
}

}  // namespace

bool invert(std::span<const double> A, int n, std::span<double> inverse) {
  const auto size = static_cast<std::size_t>(n);
  SP_CHECK(A.size() == size * size && inverse.size() == size * size, "square matrices");
  std::vector<double> left(A.begin(), A.end());
  std::fill(inverse.begin(), inverse.end(), 0.0);
  for (std::size_t i = 0; i < size; ++i) inverse[i * size + i] = 1;
  double peak = 0;
  for (const double a : A) {
    if (!std::isfinite(a)) return false;
    peak = std::max(peak, std::fabs(a));
  }
  for (std::size_t c = 0; c < size; ++c) {
    std::size_t pivot = c;
    for (std::size_t i = c + 1; i < size; ++i) {
      if (std::fabs(left[i * size + c]) > std::fabs(left[pivot * size + c])) pivot = i;
    }
    const double value = left[pivot * size + c];
    if (!(std::fabs(value) > 1e-13 * peak)) return false;
    const auto row = [&](std::span<double> of, std::size_t i) { return of.data() + i * size; };
    for (const std::span<double> of : {std::span<double>(left), inverse}) {
      if (pivot != c) std::swap_ranges(row(of, c), row(of, c) + n, row(of, pivot));
      for (std::size_t j = 0; j < size; ++j) of[c * size + j] /= value;
    }
    for (std::size_t i = 0; i < size; ++i) {
      if (i == c) continue;
      const double factor = left[i * size + c];
      subtract_scaled(row(left, i), factor, row(left, c), n);
      subtract_scaled(row(inverse, i), factor, row(inverse, c), n);
    }
  }
  return std::all_of(inverse.begin(), inverse.end(), [](double x) { return std::isfinite(x); });
}

void symmetric_eigen(std::span<double> A, int n, std::span<double> values,
                     std::span<double> vectors) {
  const auto size = static_cast<std::size_t>(n);
  SP_CHECK(A.size() == size * size && values.size() == size && vectors.size() == size * size,
           "square matrices");
  // Row i of V converges to an eigenvector.
  std::vector<double> V(size * size, 0.0);
  for (std::size_t i = 0; i < size; ++i) V[i * size + i] = 1;
  constexpr int kMaxSweeps = 60;  // convergence is quadratic; ten are usual
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    double off = 0, diagonal = 0;
    for (std::size_t i = 0; i < size; ++i) {
      diagonal += A[i * size + i] * A[i * size + i];
      for (std::size_t j = 0; j < i; ++j) off += A[i * size + j] * A[i * size + j];
    }
    if (off <= 1e-32 * diagonal) break;
    for (std::size_t p = 0; p < size; ++p) {
      for (std::size_t q = p + 1; q < size; ++q) {
        const double apq = A[p * size + q];
        if (apq == 0) continue;
        const double app = A[p * size + p], aqq = A[q * size + q];
        const double theta = (aqq - app) / (2 * apq);
        const double t = std::copysign(1.0, theta) / (std::fabs(theta) + std::hypot(theta, 1.0));
        const double c = 1 / std::hypot(t, 1.0), s = t * c;
        // J A J^T: rows by one pass each, columns mirrored from the rows.
        rotate(A.data() + p * size, A.data() + q * size, c, s, n);
        A[p * size + p] = app - t * apq;
        A[q * size + q] = aqq + t * apq;
        A[p * size + q] = A[q * size + p] = 0;
        for (std::size_t i = 0; i < size; ++i) {
          if (i == p || i == q) continue;
          A[i * size + p] = A[p * size + i];
          A[i * size + q] = A[q * size + i];
        }
        rotate(V.data() + p * size, V.data() + q * size, c, s, n);
      }
    }
  }
  std::vector<std::size_t> order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return A[a * size + a] > A[b * size + b]; });
  for (std::size_t i = 0; i < size; ++i) {
    values[i] = A[order[i] * size + order[i]];
    const double* const from = V.data() + order[i] * size;
    const double* const largest = std::max_element(
        from, from + n, [](double a, double b) { return std::fabs(a) < std::fabs(b); });
    const double sign = *largest < 0 ? -1 : 1;
    for (std::size_t j = 0; j < size; ++j) vectors[i * size + j] = sign * from[j];
  }
}

}  // namespace statepack
