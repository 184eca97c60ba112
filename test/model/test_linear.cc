// Linear layers of both paths against sums in double precision; and the bits of a row against the
// company it is in.
#include "model/linear.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "../simd_targets.hpp"
#include "base/half.hpp"
#include "model/tile_kernel.hpp"

namespace statepack {
namespace {

struct Matrix {
  std::vector<std::byte> bytes;
  std::vector<float> values;  ///< what is stored, widened
  Linear linear;
};

Matrix make(DType dtype, std::int64_t N, std::int64_t K, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  Matrix m;
  const std::size_t size = dtype_bytes(dtype);
  m.bytes.resize(std::size_t(N * K) * size);
  for (std::int64_t i = 0; i < N * K; ++i) {
    const float x = normal(rng);
    std::byte* at = m.bytes.data() + std::size_t(i) * size;
    if (dtype == DType::kF32) {
      std::memcpy(at, &x, 4);
      m.values.push_back(x);
      continue;
    }
    const std::uint16_t h = dtype == DType::kBF16 ? f32_to_bf16(x) : f32_to_f16(x);
    std::memcpy(at, &h, 2);
    m.values.push_back(dtype == DType::kBF16 ? bf16_to_f32(h) : f16_to_f32(h));
  }
  m.linear = Linear(dtype, m.bytes.data(), N, K);
  return m;
}

std::vector<float> random_rows(std::int64_t n, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = normal(rng);
  return x;
}

std::vector<float> run(const Linear& w, const float* x, std::int64_t x_stride, std::int64_t n_rows,
                       GemmPath path, int n_threads, TileUse tiles = TileUse::kWhereAvailable) {
  ThreadPool threads(n_threads);
  LinearRunner runner(threads, tiles);
  std::vector<float> y(std::size_t(n_rows * w.n_out()), NAN);
  const LinearJob job{&w, x, x_stride, n_rows, y.data(), w.n_out()};
  runner.run({&job, 1}, path);
  return y;
}

// Any order of K products and additions errs by at most K 2^-24 sum|terms|. The chains of additions
// used here are shorter: K / 8 in the vector kernel; in the matrix unit two for each 32 terms
// begun, over sums of chains of 17. The matrix unit adds the 2^-17 that two bf16 numbers lose of x.
constexpr double kTwoPieces = 0x1p-17;
double lost_of_x(const Matrix& m, TileUse tiles) {
  const bool unit = tiles == TileUse::kWhereAvailable && tile_kernel::available();
  return unit && m.linear.dtype() == DType::kBF16 ? kTwoPieces : 0;
}
void expect_product(const Matrix& m, const std::vector<float>& x, std::int64_t x_stride,
                    std::int64_t n_rows, const std::vector<float>& y,
                    TileUse tiles = TileUse::kWhereAvailable) {
  const std::int64_t N = m.linear.n_out(), K = m.linear.n_in();
  for (std::int64_t r = 0; r < n_rows; ++r) {
    for (std::int64_t n = 0; n < N; ++n) {
      double sum = 0, magnitude = 0;
      for (std::int64_t k = 0; k < K; ++k) {
        const double term =
            double{x[std::size_t(r * x_stride + k)]} * m.values[std::size_t(n * K + k)];
        sum += term;
        magnitude += std::fabs(term);
      }
      const double bound = (double(K + 20) * 0x1p-24 + lost_of_x(m, tiles)) * magnitude;
      ASSERT_NEAR(y[std::size_t(r * N + n)], sum, bound)
          << "row " << r << " output " << n << " of " << N << " K " << K;
    }
  }
}

constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

void check_invariant_path(TileUse tiles) {
  for (DType dtype : kTypes) {
    for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                               {3, 5},
                               {4, 31},
                               {5, 32},
                               {7, 33},
                               {64, 48},
                               {65, 63},
                               {130, 100},
                               {66, 384},
                               {50, 1050}}) {
      const Matrix m = make(dtype, N, K, 1);
      for (std::int64_t n_rows : {1, 2, 3, 4, 5, 7, 16, 19, 33, 49}) {
        const auto x = random_rows(n_rows * (K + 3), 2);
        expect_product(m, x, K + 3, n_rows,
                       run(m.linear, x.data(), K + 3, n_rows, GemmPath::kInvariant, 1, tiles),
                       tiles);
      }
    }
  }
}

TEST(Linear, InvariantPathIsTheProductOnEveryInstructionSet) {
  testing::for_each_simd_target([] { check_invariant_path(TileUse::kNever); });
}

TEST(Linear, TheMatrixUnitGivesTheProduct) {
  if (!tile_kernel::available()) GTEST_SKIP() << "this machine has no matrix unit";
  check_invariant_path(TileUse::kWhereAvailable);
}

TEST(Linear, PrefillPathIsTheProduct) {
  for (DType dtype : kTypes) {
    for (const auto& [N, K] :
         {std::pair<std::int64_t, std::int64_t>{5, 7}, {300, 33}, {48, 2100}}) {
      const Matrix m = make(dtype, N, K, 3);
      for (std::int64_t n_rows : {1, 17, 256, 300}) {
        const auto x = random_rows(n_rows * (K + 1), 4);
        for (TileUse tiles : {TileUse::kNever, TileUse::kWhereAvailable}) {
          expect_product(m, x, K + 1, n_rows,
                         run(m.linear, x.data(), K + 1, n_rows, GemmPath::kPrefill, 2, tiles),
                         tiles);
        }
      }
    }
  }
}

void check_company(TileUse tiles) {
  constexpr std::int64_t kRows = 33;  // two whole groups of the matrix unit and one row
  for (DType dtype : kTypes) {
    for (std::int64_t K : {40, 384}) {
      const Matrix m = make(dtype, 150, K, 5);
      const auto x = random_rows(kRows * K, 6);
      const auto all = run(m.linear, x.data(), K, kRows, GemmPath::kInvariant, 1, tiles);
      for (int n_threads : {2, 3}) {
        EXPECT_EQ(all, run(m.linear, x.data(), K, kRows, GemmPath::kInvariant, n_threads, tiles));
      }
      for (std::int64_t first = 0; first < kRows; ++first) {
        for (std::int64_t n : {1, 2, 3, 6}) {
          if (first + n > kRows) continue;
          const auto some =
              run(m.linear, x.data() + first * K, K, n, GemmPath::kInvariant, 1, tiles);
          ASSERT_EQ(0, std::memcmp(some.data(), all.data() + first * 150,
                                   std::size_t(n * 150) * sizeof(float)));
        }
      }
    }
  }
}

TEST(Linear, ARowHasTheSameBitsInAnyCompany) {
  testing::for_each_simd_target([] { check_company(TileUse::kNever); });
}

TEST(Linear, ARowOfTheMatrixUnitHasTheSameBitsInAnyCompany) {
  if (!tile_kernel::available()) GTEST_SKIP() << "this machine has no matrix unit";
  check_company(TileUse::kWhereAvailable);
}

// Many rows are cut into tasks, and long rows of weights into stretches.
TEST(Linear, LargeBatchesHaveTheBitsOfSmallOnes) {
  constexpr std::int64_t kRows = 300;
  for (std::int64_t K : {96, 1100}) {
    const Matrix m = make(DType::kBF16, 66, K, 21);
    const auto x = random_rows(kRows * K, 22);
    const auto all = run(m.linear, x.data(), K, kRows, GemmPath::kInvariant, 2);
    for (std::int64_t r = 0; r < kRows; r += 7) {
      const auto one = run(m.linear, x.data() + r * K, K, 1, GemmPath::kInvariant, 1);
      ASSERT_EQ(0, std::memcmp(one.data(), all.data() + r * 66, 66 * sizeof(float))) << r;
    }
  }
}

// Weights copied once, weights copied by every task, and rows of a copy.
TEST(Linear, CopiedWeightsGiveTheBitsOfStoredOnes) {
  ThreadPool threads(2);
  for (DType dtype : kTypes) {
    for (const auto& [N, K] : {std::pair<std::int64_t, std::int64_t>{150, 100}, {64, 544}}) {
      const Matrix m = make(dtype, N, K, 23);
      const auto x = random_rows(40 * K, 24);
      const Linear copied = m.linear.in_tiles(threads);
      EXPECT_EQ(copied.tiles() != nullptr, dtype == DType::kBF16 && tile_kernel::available());
      for (const auto& [begin, n] :
           {std::pair<std::int64_t, std::int64_t>{0, N}, {16, 33}, {32, 16}, {5, 20}}) {
        EXPECT_EQ(run(copied.rows(begin, n), x.data(), K, 40, GemmPath::kInvariant, 2),
                  run(m.linear.rows(begin, n), x.data(), K, 40, GemmPath::kInvariant, 1))
            << N << " x " << K << " from " << begin;
      }
    }
  }
}

// Rows may be made as late as they are read.
TEST(Linear, RowsAreMadeOnceBeforeTheyAreRead) {
  const Matrix a = make(DType::kBF16, 70, 64, 25), b = make(DType::kF32, 9, 64, 26);
  constexpr std::int64_t kRows = 300;
  const auto x = random_rows(kRows * 64, 27);
  for (const GemmPath path : {GemmPath::kInvariant, GemmPath::kPrefill}) {
    ThreadPool threads(2);
    LinearRunner runner(threads);
    std::vector<float> late(x.size(), NAN), ya(kRows * 70), yb(kRows * 9);
    std::vector<int> made(kRows, 0);
    const LinearJob jobs[] = {{&a.linear, late.data(), 64, kRows, ya.data(), 70},
                              {&b.linear, late.data(), 64, kRows, yb.data(), 9}};
    runner.run(jobs, path, [&](std::int64_t r) {
      std::copy_n(x.data() + r * 64, 64, late.data() + r * 64);
      ++made[std::size_t(r)];
    });
    EXPECT_EQ(made, std::vector<int>(kRows, 1));
    EXPECT_EQ(ya, run(a.linear, x.data(), 64, kRows, path, 1));
    EXPECT_EQ(yb, run(b.linear, x.data(), 64, kRows, path, 1));
  }
}

// The gated product on the matrix unit, against its parts one after another.
TEST(Linear, GatedProductsHaveTheBitsOfTheirParts) {
  ThreadPool threads(2);
  LinearRunner runner(threads);
  const auto combine = [](float* a, const float* b, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) a[i] = a[i] * 0.5F + b[i];
  };
  for (const std::int64_t middle : {96, 544, 50}) {  // of the last the unit has no whole steps
    const std::int64_t K = 70, N = 40;
    const Matrix gate = make(DType::kBF16, middle, K, 28), up = make(DType::kBF16, middle, K, 29),
                 down = make(DType::kBF16, N, middle, 30);
    const Linear g = gate.linear.in_tiles(threads), u = up.linear.in_tiles(threads),
                 d = down.linear.in_tiles(threads);
    for (const std::int64_t n : {1, 17, 300}) {
      const auto x = random_rows(n * K, 31);
      std::vector<float> late(x.size(), NAN), y(std::size_t(n * N), NAN);
      const bool done = runner.run_gated(
          {&g, late.data(), K, n, nullptr, 0}, u, {&d, nullptr, 0, n, y.data(), N},
          [&](std::int64_t r) { std::copy_n(x.data() + r * K, K, late.data() + r * K); }, combine);
      ASSERT_EQ(done, tile_kernel::available() && middle != 50);
      if (!done) continue;
      std::vector<float> a = run(gate.linear, x.data(), K, n, GemmPath::kInvariant, 1);
      const std::vector<float> b = run(up.linear, x.data(), K, n, GemmPath::kInvariant, 1);
      combine(a.data(), b.data(), n * middle);
      EXPECT_EQ(y, run(down.linear, a.data(), middle, n, GemmPath::kInvariant, 1));
    }
    EXPECT_FALSE(runner.run_gated({&gate.linear, nullptr, K, 1, nullptr, 0}, up.linear,
                                  {&down.linear, nullptr, 0, 1, nullptr, N}, {}, combine));
  }
}

// The two parts of an f32 are finite, whatever its size, and nothing is lost of what 16 bits hold.
TEST(Linear, LargeAndSmallActivationsKeepTheirValue) {
  std::vector<std::uint16_t> bits(64, 0);
  for (std::size_t n = 0; n < 2; ++n) bits[n * 32 + n] = f32_to_bf16(1);
  const Linear w(DType::kBF16, reinterpret_cast<const std::byte*>(bits.data()), 2, 32);
  for (float value : {3.4027e38F, -3.4027e38F, 3.3895314e38F, -1.17549435e-30F, 16777215.0F,
                      1.0000001F, -0.1F, 65535.0F, 0.0F, -257.0F}) {
    std::vector<float> x(32, 0.0F);
    x[1] = value;
    const auto y = run(w, x.data(), 32, 1, GemmPath::kInvariant, 1);
    EXPECT_EQ(y[0], 0);
    EXPECT_NEAR(y[1], value, kTwoPieces * std::fabs(value));
    if (value == 65535.0F || value == -257.0F) {
      EXPECT_EQ(y[1], value);
    }
  }
}

TEST(Linear, AnOutputHasTheSameBitsInAnyMatrix) {
  const Matrix m = make(DType::kBF16, 150, 96, 7);
  const auto x = random_rows(5 * 96, 8);
  const auto all = run(m.linear, x.data(), 96, 5, GemmPath::kInvariant, 1);
  for (std::int64_t begin : {1, 2, 63, 149}) {
    const auto some = run(m.linear.rows(begin, 1), x.data(), 96, 5, GemmPath::kInvariant, 1);
    for (std::int64_t r = 0; r < 5; ++r)
      EXPECT_EQ(some[std::size_t(r)], all[std::size_t(r * 150 + begin)]);
  }
}

TEST(Linear, PrefillBitsDoNotDependOnThreads) {
  const Matrix m = make(DType::kBF16, 600, 200, 9);
  const auto x = random_rows(512 * 200, 10);
  const auto one = run(m.linear, x.data(), 200, 512, GemmPath::kPrefill, 1);
  for (int n : {2, 3}) EXPECT_EQ(one, run(m.linear, x.data(), 200, 512, GemmPath::kPrefill, n));
}

TEST(Linear, PermutedRowsMoveOutputs) {
  const Matrix m = make(DType::kBF16, 6, 40, 11);
  const auto x = random_rows(300 * 40, 12);
  const Linear turned = m.linear.permuted({5, 0, 3, 3});
  for (GemmPath path : {GemmPath::kInvariant, GemmPath::kPrefill}) {
    const auto plain = run(m.linear, x.data(), 40, 300, path, 1);
    const auto moved = run(turned, x.data(), 40, 300, path, 1);
    for (std::size_t r = 0; r < 300; ++r) {
      EXPECT_NEAR(moved[r * 4 + 0], plain[r * 6 + 5], 1e-4);
      EXPECT_NEAR(moved[r * 4 + 1], plain[r * 6 + 0], 1e-4);
      EXPECT_NEAR(moved[r * 4 + 2], plain[r * 6 + 3], 1e-4);
      EXPECT_EQ(moved[r * 4 + 2], moved[r * 4 + 3]);
    }
  }
}

// Jobs of one run may share an input or not, differ in dtype, and be empty.
TEST(Linear, JobsOfOneRunDoNotDisturbOneAnother) {
  const Matrix a = make(DType::kBF16, 70, 64, 13), b = make(DType::kF32, 9, 64, 14),
               c = make(DType::kBF16, 33, 48, 15);
  const auto x = random_rows(7 * 64, 16), z = random_rows(3 * 48, 17);
  ThreadPool threads(2);
  LinearRunner runner(threads);
  std::vector<float> ya(7 * 70), yb(7 * 9), yc(3 * 33), ya2(7 * 70);
  const LinearJob jobs[] = {{&a.linear, x.data(), 64, 7, ya.data(), 70},
                            {&b.linear, x.data(), 64, 7, yb.data(), 9},
                            {&c.linear, z.data(), 48, 3, yc.data(), 33},
                            {&c.linear, z.data(), 48, 0, nullptr, 33},
                            {&a.linear, x.data(), 64, 7, ya2.data(), 70}};
  runner.run(jobs, GemmPath::kInvariant);
  EXPECT_EQ(ya, run(a.linear, x.data(), 64, 7, GemmPath::kInvariant, 1));
  EXPECT_EQ(yb, run(b.linear, x.data(), 64, 7, GemmPath::kInvariant, 1));
  EXPECT_EQ(yc, run(c.linear, z.data(), 48, 3, GemmPath::kInvariant, 1));
  EXPECT_EQ(ya, ya2);
}

// One row's NaN or Inf stays in that row.
TEST(Linear, NonFiniteRowsDoNotSpread) {
  const Matrix m = make(DType::kBF16, 20, 50, 18);
  auto x = random_rows(6 * 50, 19);
  const auto clean = run(m.linear, x.data(), 50, 6, GemmPath::kInvariant, 1);
  x[2 * 50 + 7] = NAN;
  x[4 * 50 + 49] = INFINITY;
  const auto got = run(m.linear, x.data(), 50, 6, GemmPath::kInvariant, 1);
  for (std::size_t r = 0; r < 6; ++r) {
    for (std::size_t n = 0; n < 20; ++n) {
      if (r == 2) {
        EXPECT_TRUE(std::isnan(got[r * 20 + n]));
      } else if (r == 4) {
        EXPECT_FALSE(std::isfinite(got[r * 20 + n]));
      } else {
        EXPECT_EQ(got[r * 20 + n], clean[r * 20 + n]);
      }
    }
  }
}

TEST(Linear, WidenGivesStoredValues) {
  for (DType dtype : kTypes) {
    const Matrix m = make(dtype, 3, 40, 20);
    std::vector<float> out(17);
    m.linear.widen(2, 5, 17, out.data());
    for (std::size_t i = 0; i < 17; ++i) EXPECT_EQ(out[i], m.values[2 * 40 + 5 + i]);
  }
}

}  // namespace
}  // namespace statepack
