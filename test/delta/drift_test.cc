// Error over long generation: what rounding once a window is for.
#include <limits>

#include "harness.hpp"

namespace statepack {
namespace {

using namespace test;

#if defined(SP_SANITIZED)
#define SKIP_WHEN_SANITIZED() GTEST_SKIP() << "long runs for their numbers; no code of their own"
#else
#define SKIP_WHEN_SANITIZED() (void)0
#endif

struct Drift {
  /// Relative error of the state, mean of every 64th token of the second half: that of one token
  /// wanders by 5 percent between runs that differ in the last bit of a record.
  double state = 0;
  double readout = 0;  ///< relative RMS error of outputs over the second half
};

/// A long-lived head (half-life 300 tokens) with two value channels 10 times louder than the rest.
Drift drift(const std::string& name, int n_tokens = 2000) {
  const LayerShape s = shape(1, 1, 128, 128);
  ThreadPool threads(1);
  OneLayer layer(name, s, 2);
  Reference reference(s, 1);
  Stream stream(17);
  Batch batch(s, 1);
  double error = 0, norm = 0, state_error = 0;
  int n_samples = 0;
  for (int t = 0; t < n_tokens; ++t) {
    stream.fill(batch);
    for (int j = 0; j < s.V; ++j)
      batch.v[j] = stream.normal() * (j == 20 || j == 77 ? 10.0f : 1.0f);
    batch.g[0] = -0.6931f / 300;
    batch.beta[0] = 0.3f + 0.4f * stream.uniform();
    EXPECT_TRUE(step(layer.state(), batch.input(), threads).ok());
    const auto expected = reference.step(batch);
    for (std::size_t j = 0; 2 * t > n_tokens && j < expected.size(); ++j) {
      error += (batch.out[j] - expected[j]) * (batch.out[j] - expected[j]);
      norm += expected[j] * expected[j];
    }
    if (2 * t > n_tokens && t % 64 == 63) {
      state_error += relative_error(dense(layer, 1, threads), reference.S);
      ++n_samples;
    }
  }
  return {state_error / n_samples, std::sqrt(error / norm)};
}

// The papers' claim: error falls as roundings get fewer.
TEST(Drift, FallsWithThePeriod) {
  SKIP_WHEN_SANITIZED();
  const Drift each = drift("pace:4,period=1");
  const Drift eight = drift("pace:4,period=8");
  const Drift long_window = drift("pace:4,period=32");
  EXPECT_LE(eight.state, each.state / 2);
  EXPECT_LT(long_window.state, eight.state);
  EXPECT_LT(eight.readout, each.readout);
  // Groups along the key axis lie inside one loud column; groups along the value axis mix columns.
  const Drift value_axis = drift("int4,layout=group,group=64,period=8,records=int8");
  EXPECT_LT(eight.readout, value_axis.readout);
}

// PACE: an int8 buffer costs little beside 4-bit states.
TEST(Drift, Int8RecordsHardlyMatterAtFourBits) {
  SKIP_WHEN_SANITIZED();
  const double exact = drift("pace:4,period=8,records=f32").state;
  const double int8 = drift("pace:4,period=8").state;
  EXPECT_LT(std::abs(int8 - exact), 0.05 * exact);
  EXPECT_GT(drift("fp32,period=8,records=mixed").state, drift("fp32,period=8,records=int8").state);
}

// A window in f32 over an f32 state is the recurrence, however long it is; per-step rounding to 8
// bits is not, and a window takes most of its error away.
TEST(Drift, WindowsMendPerStepRounding) {
  SKIP_WHEN_SANITIZED();
  EXPECT_LT(drift("fp32,period=500,records=f32", 600).state, 1e-5);
  const Drift each = drift("int8"), window = drift("int8,period=16");
  EXPECT_LT(window.state, each.state / 2);
}

// Error feedback keeps a long-lived state near where plain rounding drifts off, and a window does
// so too; the residual of the sum alone is the control.
TEST(Drift, FeedbackMendsPerStepRounding) {
  SKIP_WHEN_SANITIZED();
  const double plain = drift("int8,layout=column,scale=f32").state;
  EXPECT_LT(drift("int8,rounding=feedback").state, plain / 2);
  EXPECT_LT(drift("int8,rounding=feedback,residual=f32").state, plain / 2);
  EXPECT_LT(drift("int8,rounding=feedback,reads=sum").state, plain);
  EXPECT_LT(drift("int8,rounding=feedback,period=16").state, plain / 2);
}

// LeapQuant: the flush of a window, against the same codec on the state rebuilt in double.
TEST(Flush, AddsNothingToTheCodecsOwnError) {
  ThreadPool threads(1);
  for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
    const LayerShape s = shape(8, 8, 64, 48, gate);
    for (const std::string codec : {"leapquant:8", "leapquant:4", "int8", "pace:4", "bf16"}) {
      OneLayer layer(codec + ",period=16,records=f32", s, 2);
      Reference reference(s, 1);
      Stream stream(23);
      // Heads at the edges: zero, rank one, rank two, tiny, huge, a hot row, decayed away, plain.
      std::vector<float> S0(static_cast<std::size_t>(s.n_values()));
      const std::size_t n = static_cast<std::size_t>(s.K * s.V);
      std::vector<float> a(static_cast<std::size_t>(2 * s.K)), b(static_cast<std::size_t>(2 * s.V));
      for (float& x : a) x = stream.normal();
      for (float& x : b) x = stream.normal();
      for (int h = 0; h < 8; ++h) {
        for (int i = 0; i < s.K; ++i) {
          for (int j = 0; j < s.V; ++j) {
            float x = stream.normal();
            if (h == 0) x = 0;
            if (h == 1) x = a[i] * b[j];
            if (h == 2) x = a[i] * b[j] + a[s.K + i] * b[s.V + j];
            if (h == 3) x *= 1e-4f;
            if (h == 4) x *= 300;
            if (h == 5 && i == 7) x *= 100;
            S0[static_cast<std::size_t>(h) * n + static_cast<std::size_t>(i * s.V + j)] = x;
          }
        }
      }
      ASSERT_TRUE(hand_over(layer.state(), 1, S0.data(), 0, threads).ok());
      std::vector<float> boundary = dense(layer, 1, threads);  // what the first window starts from
      const LayerCodec& c = *layer.layer.codec;
      std::vector<std::byte> scratch(c.scratch_bytes());
      for (int window = 0; window < 2; ++window) {  // the second is chained on the first
        reference.S.assign(boundary.begin(), boundary.end());
        Batch batch(s, 1);
        for (int t = 0; t < 16; ++t) {
          stream.fill(batch);
          for (int i = 0; i < s.gate_width(); ++i) batch.g[6 * s.gate_width() + i] = -90;
          ASSERT_TRUE(step(layer.state(), batch.input(), threads).ok());
          reference.step(batch);
        }
        EXPECT_EQ(layer.cursors[1].fill, 0);
        boundary = dense(layer, 1, threads);
        std::vector<std::uint8_t> page(static_cast<std::size_t>(c.page_bytes()) + 16, 0);
        for (std::size_t h = 0; h < 8; ++h) {
          std::vector<float> X(reference.S.begin() + static_cast<std::ptrdiff_t>(h * n),
                               reference.S.begin() + static_cast<std::ptrdiff_t>((h + 1) * n));
          const std::vector<double> exact(
              reference.S.begin() + static_cast<std::ptrdiff_t>(h * n),
              reference.S.begin() + static_cast<std::ptrdiff_t>((h + 1) * n));
          c.encode(static_cast<int>(h), X.data(), OneLayer::aligned(page), {}, {scratch});
          c.decode(static_cast<int>(h), OneLayer::aligned(page), X.data(), {scratch});
          double error = 0, own = 0, mean = 0;
          for (std::size_t i = 0; i < n; ++i) {
            error += std::abs(boundary[h * n + i] - exact[i]);
            own += std::abs(X[i] - exact[i]);
            mean += std::abs(exact[i]);
          }
          EXPECT_TRUE(std::isfinite(error));
          EXPECT_LE(error, own >= 1e-4 * mean ? 1.01 * own : 1e-3 * mean)
              << codec << " head " << h << " window " << window;
        }
      }
    }
  }
}

}  // namespace
}  // namespace statepack
