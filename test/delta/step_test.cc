// The step against the reference recurrence, and the contracts that hold for every scheme.
#include <limits>
#include <numeric>

#include "base/exp.hpp"
#include "base/half.hpp"
#include "harness.hpp"

namespace statepack {
namespace {

using namespace test;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<LayerShape> shapes() {
  return {shape(2, 4, 32, 64), shape(1, 3, 64, 32), shape(2, 2, 24, 40, Gate::kChannel),
          shape(1, 2, 40, 24), shape(2, 4, 32, 64, Gate::kChannel)};
}

std::string label(const LayerShape& s) {
  return std::to_string(s.K) + "x" + std::to_string(s.V) + " H " + std::to_string(s.n_key_heads) +
         "/" + std::to_string(s.n_value_heads) + (s.gate == Gate::kScalar ? "" : " channel");
}

Status run(OneLayer& layer, Batch& batch, ThreadPool& threads) {
  return step(layer.state(), batch.input(), threads);
}

// ---------------------------------------------------------------------------------------------
// Numbers

// Worked by hand, also for a gate per channel.
TEST(Reference, GoldenStep) {
  const double q[] = {1, 0}, k[] = {0.6, 0.8}, v[] = {1, 1};
  double o[2], u[2];
  {
    double S[] = {1, 2, 3, 4};
    const double g[] = {std::log(0.5)};
    ref::delta_step(2, 2, Gate::kScalar, S, q, k, v, g, 0.5, o, u);
    const double X[] = {0.35, 0.64, 1.3, 1.52};
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(S[i], X[i], 1e-14);
    EXPECT_NEAR(u[0], -0.25, 1e-14);
    EXPECT_NEAR(u[1], -0.6, 1e-14);
    EXPECT_NEAR(o[0], 0.35, 1e-14);
    EXPECT_NEAR(o[1], 0.64, 1e-14);
  }
  {
    double S[] = {1, 2, 3, 4};
    const double g[] = {std::log(0.5), std::log(0.25)};
    ref::delta_step(2, 2, Gate::kChannel, S, q, k, v, g, 0.5, o, u);
    const double X[] = {0.53, 0.88, 0.79, 0.84};
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(S[i], X[i], 1e-14);
    EXPECT_NEAR(u[0], 0.05, 1e-14);
    EXPECT_NEAR(u[1], -0.2, 1e-14);
    EXPECT_NEAR(o[0], 0.53, 1e-14);
    EXPECT_NEAR(o[1], 0.88, 1e-14);
  }
}

// With an exact codec and exact records every cadence is the recurrence, of LeapQuant and of
// PACE alike. f32 against double: K terms of f32 rounding a token, contracted by the rule itself,
// stay below 1e-5.
TEST(Step, ExactRecordsReproduceTheRecurrence) {
  ThreadPool threads(2);
  for (const LayerShape& s : shapes()) {
    for (const char* name :
         {"fp32", "fp32,period=7,records=f32", "fp32,period=64,records=f32",
          "fp32,period=7,records=f32,mode=v", "fp32,period=7,records=f32,phase=absolute"}) {
      OneLayer layer(name, s, 4);
      Reference reference(s, 2);
      Stream stream(7);
      Batch batch(s, 2);
      for (int t = 0; t < 40; ++t) {
        stream.fill(batch);
        ASSERT_TRUE(run(layer, batch, threads).ok());
        const auto expected = reference.step(batch);
        EXPECT_LT(relative_error(batch.out, expected), 1e-5) << name << " " << label(s) << " " << t;
      }
      std::vector<float> S = dense(layer, 1, threads);
      const std::vector<float> second = dense(layer, 2, threads);
      S.insert(S.end(), second.begin(), second.end());
      EXPECT_LT(relative_error(S, reference.S), 1e-5) << name << " " << label(s);
    }
  }
}

/// The recurrence in double over a window whose records are rounded as the layout stores them: what
/// step() must compute in every format. One row, boundary state kept apart, because bf16 records of
/// per-channel gates round the decay of records but not that of the boundary.
class RecordModel {
 public:
  RecordModel(const WindowLayout& window, const std::vector<float>& boundary)
      : layout_(window),
        s_(window.shape()),
        B_(boundary.begin(), boundary.end()),
        W_(boundary.size(), 0.0) {}

  std::vector<double> step(const Batch& token) {
    std::vector<double> out(token.out.size());
    for (int h = 0; h < s_.n_value_heads; ++h)
      head(token, h, &out[static_cast<std::size_t>(h * s_.V)]);
    return out;
  }

  std::vector<double> state() const {
    std::vector<double> S = B_;
    for (std::size_t i = 0; i < S.size(); ++i) S[i] += W_[i];
    return S;
  }

 private:
  void head(const Batch& token, int h, double* o) {
    const int K = s_.K, V = s_.V, width = s_.gate_width();
    const float* k = &token.k[static_cast<std::size_t>(s_.key_head(h) * K)];
    const float* q = &token.q[static_cast<std::size_t>(s_.key_head(h) * K)];
    const float* v = &token.v[static_cast<std::size_t>(h * V)];
    const float* g = &token.g[static_cast<std::size_t>(h * width)];
    const float beta = token.beta[static_cast<std::size_t>(h)];
    double* B = &B_[static_cast<std::size_t>(h * K * V)];
    double* W = &W_[static_cast<std::size_t>(h * K * V)];
    const auto gate = [&](int i) { return static_cast<double>(g[width == 1 ? 0 : i]); };

    // The output: exact gate, k, v, beta of this token.
    std::vector<float> u(static_cast<std::size_t>(V));
    for (int j = 0; j < V; ++j) {
      double p = 0, r = 0, kq = 0;
      for (int i = 0; i < K; ++i) {
        const double x = std::exp(gate(i)) * (B[i * V + j] + W[i * V + j]);
        p += k[i] * x, r += q[i] * x;
        kq += static_cast<double>(k[i]) * q[i];
      }
      const double exact_u = beta * (v[j] - p);
      o[j] = r + kq * exact_u;
      u[static_cast<std::size_t>(j)] = static_cast<float>(exact_u);
    }

    // The record: what storing does to it.
    const WindowLayout one({1, 1, K, V, s_.gate}, layout_.records(), layout_.mode(), 1);
    std::vector<std::uint8_t> block(static_cast<std::size_t>(one.n_bytes()), 0xff);
    const bool replay = layout_.mode() == RecordMode::kV;
    std::vector<float> rk(static_cast<std::size_t>(K)), rv(static_cast<std::size_t>(V)),
        a(static_cast<std::size_t>(width));
    one.store_key(block.data(), 0, 0, k);
    one.store_value(block.data(), 0, 0, replay ? v : u.data(), g, beta);
    one.load_key(block.data(), 0, 0, rk.data());
    one.load_value(block.data(), 0, 0, rv.data());
    std::vector<double> decay(static_cast<std::size_t>(K));
    if (one.keeps_factors()) {
      one.load_factor(block.data(), 0, 0, a.data());
      for (int i = 0; i < K; ++i) decay[i] = a[i];
    } else {
      one.load_gate(block.data(), 0, 0, a.data());
      for (int i = 0; i < K; ++i) decay[i] = std::exp(static_cast<double>(a[width == 1 ? 0 : i]));
    }
    for (int j = 0; j < V; ++j) {
      for (int i = 0; i < K; ++i) {
        B[i * V + j] *= one.keeps_total() ? std::exp(gate(i)) : decay[i];
        W[i * V + j] *= decay[i];
      }
      double value = rv[j];
      if (replay) {
        double p = 0;
        for (int i = 0; i < K; ++i) p += rk[i] * (B[i * V + j] + W[i * V + j]);
        value = one.load_beta(block.data(), 0, 0) * (value - p);
      }
      for (int i = 0; i < K; ++i) W[i * V + j] += rk[i] * value;
    }
  }

  WindowLayout layout_;
  LayerShape s_;
  std::vector<double> B_, W_;
};

// LeapQuant: outputs and states are those of the records as stored. A u that
// f32 puts on the other side of a rounding boundary moves one code: 1e-4 of a vector at 8 bits, so
// the bound is that of the format, and of f32 for f32.
TEST(Step, RecordsRoundOnlyWhatTheyStore) {
  ThreadPool threads(2);
  for (const LayerShape& s : shapes()) {
    for (const std::string mode : {"", ",mode=v"}) {
      for (const std::string records : {"f32", "bf16", "int8", "mixed"}) {
        OneLayer layer("fp32,period=16,records=" + records + mode, s, 2);
        Stream stream(11);
        std::vector<float> S0(static_cast<std::size_t>(s.n_values()));
        for (float& x : S0) x = stream.normal();
        ASSERT_TRUE(hand_over(layer.state(), 1, S0.data(), 0, threads).ok());
        RecordModel model(layer.layer.window, S0);
        const double tolerance = records == "f32" ? 1e-5 : records == "int8" ? 3e-4 : 1e-4;
        Batch batch(s, 1);
        for (int t = 0; t < 40; ++t) {  // two flushes: the fp32 codec adds no rounding
          if (t % 16 == 0) {
            const std::vector<float> S = dense(layer, 1, threads);
            EXPECT_LT(relative_error(S, model.state()), tolerance) << records << mode << label(s);
            model = RecordModel(layer.layer.window, S);
          }
          stream.fill(batch);
          ASSERT_TRUE(run(layer, batch, threads).ok());
          EXPECT_LT(relative_error(batch.out, model.step(batch)), tolerance)
              << records << mode << " " << label(s) << " token " << t;
        }
      }
    }
  }
}

// PACE: replaying records in order, and solving (I + Lo) U = diag(beta)(V - diag(exp G) K
// S) once, are the same. The triangular form is computed here in double.
TEST(Step, ReplayEqualsTheTriangularSolution) {
  ThreadPool threads(1);
  const LayerShape s = shape(1, 1, 32, 24);
  constexpr int n = 8;
  OneLayer layer("fp32,period=32,records=f32,mode=v", s, 2);
  Stream stream(3);
  std::vector<float> S0(static_cast<std::size_t>(s.n_values()));
  for (float& x : S0) x = stream.normal();
  ASSERT_TRUE(hand_over(layer.state(), 1, S0.data(), 0, threads).ok());
  std::vector<Batch> tokens;
  for (int t = 0; t < n; ++t) {
    Batch batch(s, 1);
    stream.fill(batch);
    ASSERT_TRUE(run(layer, batch, threads).ok());
    tokens.push_back(batch);
  }
  std::vector<double> G(n + 1, 0.0);
  for (int m = 0; m < n; ++m) G[m + 1] = G[m] + tokens[m].g[0];
  std::vector<std::vector<double>> U(n, std::vector<double>(s.V));
  for (int m = 0; m < n; ++m) {
    for (int j = 0; j < s.V; ++j) {
      double right = tokens[m].v[j];
      for (int i = 0; i < s.K; ++i) {
        right -= std::exp(G[m + 1]) * tokens[m].k[i] * S0[i * s.V + j];
      }
      right *= tokens[m].beta[0];
      for (int l = 0; l < m; ++l) {
        double kk = 0;
        for (int i = 0; i < s.K; ++i) {
          kk += static_cast<double>(tokens[m].k[i]) * tokens[l].k[i];
        }
        right -= tokens[m].beta[0] * std::exp(G[m + 1] - G[l + 1]) * kk * U[l][j];
      }
      U[m][j] = right;
    }
  }
  std::vector<double> X(S0.size());
  for (int i = 0; i < s.K; ++i) {
    for (int j = 0; j < s.V; ++j) {
      double x = std::exp(G[n]) * S0[i * s.V + j];
      for (int m = 0; m < n; ++m) x += std::exp(G[n] - G[m + 1]) * tokens[m].k[i] * U[m][j];
      X[i * s.V + j] = x;
    }
  }
  EXPECT_LT(relative_error(dense(layer, 1, threads), X), 1e-5);
}

// PACE: period 1 is a per-token quantiser, bit for bit, in the order that step.hpp states.
TEST(Step, PeriodOneIsAPerTokenQuantiser) {
  ThreadPool threads(2);
  for (const LayerShape& s : shapes()) {
    for (const std::string& name : all_schemes(s)) {
      if (name.find("period=1") == std::string::npos) continue;
      OneLayer layer(name, s, 2);
      const LayerCodec& codec = *layer.layer.codec;
      std::vector<std::uint8_t> page(static_cast<std::size_t>(codec.page_bytes()) + 16, 0);
      std::uint8_t* expected = OneLayer::aligned(page);
      std::vector<std::byte> scratch(codec.scratch_bytes());
      std::vector<float> S(static_cast<std::size_t>(s.K * s.V));
      Stream stream(5);
      Batch batch(s, 1);
      for (int t = 0; t < 6; ++t) {
        stream.fill(batch);
        ASSERT_TRUE(run(layer, batch, threads).ok());
        for (int h = 0; h < s.n_value_heads; ++h) {
          codec.decode(h, expected, S.data(), {scratch});
          const float* k = &batch.k[static_cast<std::size_t>(s.key_head(h) * s.K)];
          const float* q = &batch.q[static_cast<std::size_t>(s.key_head(h) * s.K)];
          (void)q;
          std::vector<float> decay(static_cast<std::size_t>(s.K));
          for (int i = 0; i < s.K; ++i) {
            const int at = s.gate == Gate::kScalar ? h : h * s.K + i;
            decay[i] = exp_f32(batch.g[static_cast<std::size_t>(at)]);
          }
          for (int j = 0; j < s.V; ++j) {
            float p = 0;
            for (int i = 0; i < s.K; ++i) {
              p += (s.gate == Gate::kScalar ? k[i] : decay[i] * k[i]) * S[i * s.V + j];
            }
            if (s.gate == Gate::kScalar) p *= decay[0];
            const float u = batch.beta[h] * (batch.v[h * s.V + j] - p);
            for (int i = 0; i < s.K; ++i) {
              float& x = S[i * s.V + j];
              x = decay[i] * x + k[i] * u;
            }
          }
          codec.encode(h, S.data(), expected, {}, {scratch});
        }
        ASSERT_EQ(
            std::memcmp(expected, layer.page(1), static_cast<std::size_t>(codec.page_bytes())), 0)
            << name << " " << label(s) << " token " << t;
      }
    }
  }
}

// Decays at their limits: a state forgotten at once, one never forgotten, running totals far below
// what exp can hold.
TEST(Step, ExtremeDecays) {
  ThreadPool threads(1);
  for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
    const LayerShape s = shape(1, 1, 16, 16, gate);
    const std::pair<const char*, double> cases[] = {{"fp32", 3e-5},
                                                    {"fp32,period=8,records=f32", 3e-5},
                                                    {"fp32,period=8,records=bf16", 0.02},
                                                    {"fp32,period=8,records=int8", 0.15},
                                                    {"fp32,period=8,records=int8,mode=v", 0.15}};
    for (const auto& [name, tolerance] : cases) {
      OneLayer layer(name, s, 2);
      Reference reference(s, 1);
      Stream stream(2);
      Batch batch(s, 1);
      for (int t = 0; t < 30; ++t) {
        stream.fill(batch);
        for (float& g : batch.g) g = 0;
        if (t % 11 == 4) std::fill(batch.g.begin(), batch.g.end(), -kInf);
        if (t % 11 == 6) std::fill(batch.g.begin(), batch.g.end(), -1300.0f);
        if (t % 11 == 9) batch.g[0] = -80;
        ASSERT_TRUE(run(layer, batch, threads).ok());
        EXPECT_EQ(layer.faults[1], 0u) << name;
        EXPECT_LT(relative_error(batch.out, reference.step(batch)), tolerance) << name << " " << t;
      }
    }
  }
}

TEST(Step, BetaCanBeRoundedToBf16) {
  ThreadPool threads(1);
  const LayerShape s = kGrouped;
  OneLayer rounding("fp32,beta=bf16", s, 2), exact("fp32", s, 2);
  Stream stream(4);
  Batch batch(s, 1);
  for (int t = 0; t < 5; ++t) {
    stream.fill(batch);
    Batch rounded = batch;
    for (float& b : rounded.beta) b = bf16_to_f32(f32_to_bf16(b));
    ASSERT_TRUE(run(rounding, batch, threads).ok());
    ASSERT_TRUE(run(exact, rounded, threads).ok());
    EXPECT_TRUE(same_bits(batch.out, rounded.out));
  }
  EXPECT_TRUE(same_bits(rounding.pages, exact.pages));
}

// ---------------------------------------------------------------------------------------------
// Contracts, for every scheme

TEST(Contract, ARowDoesNotDependOnOthersNorOnThreads) {
  for (const LayerShape& s : {shape(2, 4, 32, 64), shape(1, 2, 32, 16, Gate::kChannel)}) {
    for (const std::string& name : all_schemes(s)) {
      constexpr int kRows = 33, kTokens = 7;
      std::vector<std::vector<float>> alone;  // by token: row 17's output
      std::vector<std::uint8_t> alone_slot;
      for (const int n_threads : {1, 2, 5}) {
        ThreadPool threads(n_threads);
        OneLayer together(name, s, kRows + 1), single(name, s, 60);
        Stream stream(9);
        Batch batch(s, kRows);
        for (int t = 0; t < kTokens; ++t) {
          stream.fill(batch);
          ASSERT_TRUE(run(together, batch, threads).ok());
          Batch one = batch.row(17);
          one.slots[0] = 41;  // another slot number, too
          ASSERT_TRUE(run(single, one, threads).ok());
          const std::ptrdiff_t width = s.n_value_heads * s.V;
          EXPECT_TRUE(std::equal(one.out.begin(), one.out.end(), batch.out.begin() + 17 * width))
              << name << " token " << t;
          if (n_threads == 1) {
            alone.push_back(one.out);
          } else {
            EXPECT_TRUE(same_bits(one.out, alone[static_cast<std::size_t>(t)])) << name;
          }
        }
        EXPECT_TRUE(same_bits(together.slot_bytes(18), single.slot_bytes(41))) << name;
      }
    }
  }
}

TEST(Contract, PaddingGivesZeroAndTouchesNothing) {
  ThreadPool threads(2);
  for (const std::string& name : all_schemes(kGrouped)) {
    OneLayer layer(name, kGrouped, 6);
    Stream stream(1);
    Batch batch(kGrouped, 5);
    stream.fill(batch);
    ASSERT_TRUE(run(layer, batch, threads).ok());
    const auto untouched = layer.slot_bytes(2);
    const auto sentinel = layer.slot_bytes(0);
    Batch padded = batch;
    padded.slots = {-1, 0, 3, -1, 1};  // -1 twice: padding may repeat
    for (const int row : {0, 1, 3}) {
      const auto poison = [&](std::vector<float>& x, int width) {
        std::fill_n(x.begin() + row * width, width, kNaN);
      };
      poison(padded.q, 64), poison(padded.k, 64), poison(padded.v, 256);
      poison(padded.g, 4), poison(padded.beta, 4);
    }
    ASSERT_TRUE(run(layer, padded, threads).ok());
    for (const int row : {0, 1, 3}) {
      for (int j = 0; j < 256; ++j) {
        const float o = padded.out[static_cast<std::size_t>(row * 256 + j)];
        ASSERT_EQ(std::bit_cast<std::uint32_t>(o), 0u) << name;
      }
    }
    EXPECT_TRUE(same_bits(layer.slot_bytes(2), untouched)) << name;
    EXPECT_TRUE(same_bits(layer.slot_bytes(0), sentinel)) << name;
    EXPECT_EQ(layer.faults, std::vector<std::uint32_t>(6, 0u));
  }
}

// Two forks are divided by heads over two threads, sixteen by rows on one.
class Forks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Contract, Forks, testing::Values(2, 16));

TEST_P(Forks, CopyOnWriteLeavesTheReadSlotAndEqualsInPlace) {
  const int n_forks = GetParam();
  ThreadPool threads(n_forks == 2 ? 2 : 1);
  for (const LayerShape& s : {kGrouped, shape(2, 4, 32, 64, Gate::kChannel)}) {
    for (const std::string& name : all_schemes(s)) {
      OneLayer layer(name, s, n_forks + 4);
      Stream stream(6);
      Batch batch(s, 1);
      for (int t = 0; t < 9; ++t) {  // copies at every window phase
        stream.fill(batch);
        const auto before = layer.slot_bytes(1);
        // What was in the slots written to must not matter.
        for (int slot = 3; slot < 3 + n_forks; ++slot) {
          std::memset(const_cast<std::uint8_t*>(layer.page(slot)), 0xff,
                      static_cast<std::size_t>(layer.layer.codec->page_bytes()));
          std::memset(layer.state().windows + slot * layer.window_stride, 0xff,
                      static_cast<std::size_t>(layer.layer.window.n_bytes()));
        }
        Batch forks(s, n_forks);  // of one slot in one batch
        const auto repeated = [&](const std::vector<float>& x) {
          std::vector<float> y;
          for (int i = 0; i < n_forks; ++i) y.insert(y.end(), x.begin(), x.end());
          return y;
        };
        forks.q = repeated(batch.q), forks.k = repeated(batch.k), forks.v = repeated(batch.v);
        forks.g = repeated(batch.g), forks.beta = repeated(batch.beta);
        StepInput input = forks.input();
        const std::vector<std::int64_t> read(static_cast<std::size_t>(n_forks), 1);
        std::vector<std::int64_t> write(read.size());
        std::iota(write.begin(), write.end(), 3);
        input.read_slots = read.data();
        input.write_slots = write.data();
        ASSERT_TRUE(step(layer.state(), input, threads).ok());
        EXPECT_TRUE(same_bits(layer.slot_bytes(1), before)) << name;
        ASSERT_TRUE(run(layer, batch, threads).ok());
        EXPECT_EQ(repeated(batch.out), forks.out) << name;
        const std::vector<float> S = dense(layer, 1, threads);
        for (int slot = 3; slot < 3 + n_forks; ++slot) {
          EXPECT_TRUE(same_bits(dense(layer, slot, threads), S)) << name << " token " << t;
          EXPECT_EQ(layer.cursors[static_cast<std::size_t>(slot)].fill, layer.cursors[1].fill);
        }
      }
    }
  }
}

TEST(Contract, WindowPhasesMayDifferInABatch) {
  ThreadPool threads(2);
  for (const std::string& name : all_schemes(kGrouped)) {
    OneLayer mixed(name, kGrouped, 8), alone(name, kGrouped, 8);
    Stream stream(8);
    for (int t = 0; t < 12; ++t) {  // row r joins at token r
      const int n_rows = std::min(t + 1, 7);
      Batch batch(kGrouped, n_rows);
      stream.fill(batch);
      ASSERT_TRUE(run(mixed, batch, threads).ok());
      for (int row = 0; row < n_rows; ++row) {
        Batch one = batch.row(row);
        ASSERT_TRUE(run(alone, one, threads).ok());
        EXPECT_TRUE(std::equal(one.out.begin(), one.out.end(), batch.out.begin() + row * 256))
            << name << " token " << t << " row " << row;
      }
    }
    EXPECT_TRUE(same_bits(mixed.pages, alone.pages)) << name;
    EXPECT_TRUE(same_bits(mixed.windows, alone.windows)) << name;
  }
}

// A value that is not finite, anywhere, ends its row and nothing else.
TEST(Contract, NonFiniteValuesAreQuarantined) {
  ThreadPool two(2), one(1);
  for (const LayerShape& s : {kGrouped, shape(2, 4, 32, 64, Gate::kChannel)}) {
    for (const std::string& name : all_schemes(s)) {
      for (int kind = 0; kind < 6; ++kind) {
        // Three rows are divided by heads over two threads, seventeen by rows on one.
        const int n_rows = kind < 5 ? 3 : 17;
        ThreadPool& threads = kind < 5 ? two : one;
        OneLayer layer(name, s, n_rows + 1), clean(name, s, n_rows + 1);
        Stream stream(12);
        Batch batch(s, n_rows);
        for (int t = 0; t < 8; ++t) {
          stream.fill(batch);
          Batch good = batch;
          const auto before = layer.slot_bytes(2);
          if (t == 4) {  // with period 5, the token that completes the window
            const std::size_t head = static_cast<std::size_t>(s.n_value_heads);  // of row 1
            if (kind == 0 || kind == 5) batch.v[head * static_cast<std::size_t>(s.V) + 70] = kNaN;
            if (kind == 1) batch.v[head * static_cast<std::size_t>(s.V) + 3] = kInf;
            if (kind == 2) batch.k[static_cast<std::size_t>(s.n_key_heads * s.K) + 5] = kNaN;
            if (kind == 3) batch.g[head * static_cast<std::size_t>(s.gate_width())] = kNaN;
            if (kind == 4) batch.q[static_cast<std::size_t>(s.n_key_heads * s.K) + 1] = -kInf;
          }
          ASSERT_TRUE(run(layer, batch, threads).ok());
          ASSERT_TRUE(run(clean, good, threads).ok());
          const std::size_t width = static_cast<std::size_t>(s.n_value_heads * s.V);
          for (std::size_t j = 0; j < static_cast<std::size_t>(n_rows) * width; ++j) {
            if (j / width == 1 && t >= 4) {
              ASSERT_TRUE(std::isnan(batch.out[j])) << name << " kind " << kind;
            } else {
              ASSERT_EQ(batch.out[j], good.out[j]) << name << " kind " << kind << " token " << t;
            }
          }
          EXPECT_EQ(layer.faults[2], t >= 4 ? 1u : 0u) << name << " kind " << kind;
          if (t >= 4) {
            EXPECT_TRUE(same_bits(layer.slot_bytes(2), before)) << name;
          }
          EXPECT_TRUE(same_bits(layer.slot_bytes(1), clean.slot_bytes(1)));
          EXPECT_TRUE(same_bits(layer.slot_bytes(3), clean.slot_bytes(3)));
        }
        std::vector<float> S(static_cast<std::size_t>(s.n_values()));
        EXPECT_EQ(restore_dense(layer.state(), 2, S.data(), threads).code(), Code::kNotFinite);
      }
    }
  }
}

// A finite token whose product k u^T overflows the state.
TEST(Contract, AnOverflowingStateIsQuarantined) {
  ThreadPool threads(1);
  const std::pair<const char*, int> cases[] = {{"fp32", 1},
                                               {"bf16", 1},
                                               {"fp32,period=2,records=f32", 2},
                                               {"fp32,period=2,records=f32,mode=v", 2}};
  for (const auto& [name, n_tokens] : cases) {  // the token at which the state is rebuilt
    OneLayer layer(name, shape(1, 1, 16, 16), 2);
    Batch batch(layer.layer.shape, 1);
    std::fill(batch.v.begin(), batch.v.end(), 3e30f);
    batch.k[0] = 3e30f;
    batch.beta[0] = 1;
    for (int t = 0; t < n_tokens; ++t) {
      EXPECT_EQ(layer.faults[1], 0u) << name;
      const auto before = layer.slot_bytes(1);
      ASSERT_TRUE(run(layer, batch, threads).ok());
      EXPECT_EQ(same_bits(layer.slot_bytes(1), before), t == n_tokens - 1) << name;
      batch.k[0] = 0;
      batch.k[1] = 3e30f;  // does not read what the first one wrote
    }
    EXPECT_EQ(layer.faults[1], 1u) << name;
    EXPECT_TRUE(std::isnan(batch.out[0])) << name;
  }
}

TEST(Contract, AQuarantinedSlotDoesNotSpreadByCopyOnWrite) {
  ThreadPool threads(1);
  OneLayer layer("int8,period=4", kGrouped, 4);
  layer.faults[1] = 1;
  Stream stream(1);
  Batch batch(kGrouped, 1);
  stream.fill(batch);
  StepInput input = batch.input();
  const std::int64_t read[] = {1}, write[] = {2};
  input.read_slots = read;
  input.write_slots = write;
  const auto before = layer.slot_bytes(2);
  ASSERT_TRUE(step(layer.state(), input, threads).ok());
  EXPECT_EQ(layer.faults[2], 1u);
  EXPECT_TRUE(std::isnan(batch.out[0]));
  EXPECT_TRUE(same_bits(layer.slot_bytes(2), before));
}

// Random roundings belong to positions: the same token at another position, or under another seed,
// is rounded otherwise, and a run repeats.
TEST(Step, StochasticRoundingFollowsPositionsAndSeed) {
  ThreadPool threads(2);
  const auto page_after = [&](const char* name, std::int64_t position) {
    OneLayer layer(name, kGrouped, 3);
    Stream stream(4);
    Batch batch(kGrouped, 2);
    for (std::int64_t t = 0; t < 3; ++t) {
      stream.fill(batch);
      StepInput input = batch.input();
      const std::int64_t positions[] = {position + t, position + t};
      input.positions = positions;
      EXPECT_TRUE(step(layer.state(), input, threads).ok());
    }
    return layer.slot_bytes(1);
  };
  const auto first = page_after("int8,rounding=stochastic", 5);
  EXPECT_TRUE(same_bits(page_after("int8,rounding=stochastic", 5), first));
  EXPECT_FALSE(same_bits(page_after("int8,rounding=stochastic", 6), first));
  EXPECT_FALSE(same_bits(page_after("int8,rounding=stochastic,seed=1", 5), first));
  EXPECT_FALSE(same_bits(page_after("int8", 5), first));

  OneLayer layer("fp16,rounding=stochastic", kGrouped, 3);
  Batch batch(kGrouped, 1);
  Stream(4).fill(batch);
  EXPECT_EQ(step(layer.state(), batch.input(), threads).message(),
            "stochastic rounding draws by position; give the step the positions of its tokens");
}

// The residual comes from the slot that is read, whatever the one that is written held.
TEST(Step, FeedbackCarriesTheResidualOfTheSlotThatIsRead) {
  ThreadPool threads(1);
  const LayerShape s = kGrouped;
  for (const char* name : {"int8,rounding=feedback,residual=f32", "int8,rounding=feedback",
                           "int8,rounding=feedback,period=2,records=f32"}) {
    OneLayer layer(name, s, 4), forked(name, s, 4);
    Stream stream(6), again(6);
    Batch batch(s, 1), twin(s, 1);
    for (int t = 0; t < 7; ++t) {
      stream.fill(batch);
      again.fill(twin);
      ASSERT_TRUE(run(layer, batch, threads).ok());
      // Ping-pong between two slots, the other full of another residual.
      StepInput input = twin.input();
      const std::int64_t read[] = {1 + t % 2}, write[] = {2 - t % 2};
      input.read_slots = read;
      input.write_slots = write;
      ASSERT_TRUE(step(forked.state(), input, threads).ok());
      // Of windows, what lies behind the cursor may differ.
      EXPECT_EQ(std::memcmp(forked.page(write[0]), layer.page(1),
                            static_cast<std::size_t>(layer.layer.codec->page_bytes())),
                0)
          << name << t;
    }
  }
}

TEST(Contract, WrongSlotsAreRefused) {
  ThreadPool threads(1);
  OneLayer layer("int8", kGrouped, 4);
  Batch batch(kGrouped, 2);
  Stream(1).fill(batch);
  const auto message = [&](std::vector<std::int64_t> read, std::vector<std::int64_t> write) {
    StepInput input = batch.input();
    input.read_slots = read.data();
    if (!write.empty()) input.write_slots = write.data();
    const Status status = step(layer.state(), input, threads);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  EXPECT_EQ(message({1, 4}, {}), "row 1 names slot 4, but the pool has slots 0 to 3");
  EXPECT_EQ(message({2, 2}, {}),
            "slot 2 is written by two rows of one batch, row 1 among them; give every row its own "
            "slot");
  EXPECT_EQ(message({1, 2}, {3, 3}),
            "slot 3 is written by two rows of one batch, row 1 among them; give every row its own "
            "slot");
  EXPECT_EQ(message({1, 2}, {2, 3}),
            "row 1 reads slot 2, which another row of the batch writes; read it in an earlier "
            "batch");
  EXPECT_EQ(message({1, 0}, {1, 3}),
            "row 1 reads slot 0 and writes slot 3, of which one is padding; both must be, or "
            "neither");
  for (const std::int64_t slot : {std::int64_t{-5}, std::int64_t{4}, std::int64_t{1} << 60}) {
    std::vector<float> S(static_cast<std::size_t>(kGrouped.n_values()));
    const std::int64_t list[] = {slot};
    EXPECT_EQ(flush(layer.state(), list, threads).code(), Code::kInvalidArgument);
    EXPECT_EQ(hand_over(layer.state(), slot, S.data(), 0, threads).code(), Code::kInvalidArgument);
    EXPECT_EQ(restore_dense(layer.state(), slot, S.data(), threads).code(), Code::kInvalidArgument);
  }
}

// first_valid_slot below 0 names every slot, slot 0 included.
TEST(Contract, FirstValidSlotIsTheCallersChoice) {
  ThreadPool threads(1);
  OneLayer layer("int8", kGrouped, 2);
  Batch batch(kGrouped, 1);
  Stream(1).fill(batch);
  batch.slots[0] = 0;
  StepInput input = batch.input();
  input.first_valid_slot = 0;
  ASSERT_TRUE(step(layer.state(), input, threads).ok());
  EXPECT_NE(batch.out[0], 0.0f);
  input.first_valid_slot = -10;
  batch.slots[0] = -3;
  EXPECT_EQ(step(layer.state(), input, threads).code(), Code::kInvalidArgument);
}

// Rows of any stride, outputs that lie inside other memory: nothing beside them is written.
TEST(Contract, StridesAndGuards) {
  ThreadPool threads(2);
  const LayerShape s = kGrouped;
  OneLayer packed("int8,period=3", s, 4), strided("int8,period=3", s, 4);
  Stream stream(3);
  Batch batch(s, 3);
  for (int t = 0; t < 4; ++t) {
    stream.fill(batch);
    // One fused row q | k | v | g | beta | out, as projections leave it, with a gap.
    const int qk = s.n_key_heads * s.K, vo = s.n_value_heads * s.V, h = s.n_value_heads;
    const int width = 2 * qk + 2 * vo + 2 * h + 5;
    std::vector<float> fused(static_cast<std::size_t>(3 * width), -77.0f);
    for (int row = 0; row < 3; ++row) {
      float* at = &fused[static_cast<std::size_t>(row * width)];
      std::copy_n(&batch.q[row * qk], qk, at);
      std::copy_n(&batch.k[row * qk], qk, at + qk);
      std::copy_n(&batch.v[row * vo], vo, at + 2 * qk);
      std::copy_n(&batch.g[row * h], h, at + 2 * qk + vo);
      std::copy_n(&batch.beta[row * h], h, at + 2 * qk + vo + h);
    }
    StepInput input = batch.input();
    input.q = fused.data(), input.k = fused.data() + qk, input.v = fused.data() + 2 * qk;
    input.g = input.v + vo, input.beta = input.g + h,
    input.out = fused.data() + 2 * qk + vo + 2 * h;
    input.q_stride = input.k_stride = input.v_stride = input.g_stride = input.beta_stride =
        input.out_stride = width;
    ASSERT_TRUE(step(strided.state(), input, threads).ok());
    ASSERT_TRUE(run(packed, batch, threads).ok());
    for (int row = 0; row < 3; ++row) {
      const float* at = &fused[static_cast<std::size_t>(row * width)];
      EXPECT_TRUE(std::equal(at + 2 * qk + vo + 2 * h, at + width - 5, &batch.out[row * vo]));
      for (int i = 1; i <= 5; ++i) EXPECT_EQ(at[width - i], -77.0f);
    }
  }
  EXPECT_TRUE(same_bits(packed.pages, strided.pages));
}

// ---------------------------------------------------------------------------------------------
// Windows

TEST(Window, FlushPacksWhatTheStateIs) {
  ThreadPool threads(2);
  for (const LayerShape& s : {kGrouped, shape(2, 4, 32, 64, Gate::kChannel)}) {
    for (const std::string& name : all_schemes(s)) {
      OneLayer layer(name, s, 3);
      Stream stream(21);
      Batch batch(s, 2);
      for (int t = 0; t < 3; ++t) {
        stream.fill(batch);
        ASSERT_TRUE(run(layer, batch, threads).ok());
      }
      const std::vector<float> S = dense(layer, 1, threads);
      const auto other = layer.slot_bytes(2);
      const std::int64_t slots[] = {1};
      ASSERT_TRUE(flush(layer.state(), slots, threads).ok());
      EXPECT_EQ(layer.cursors[1].fill, 0);
      EXPECT_TRUE(same_bits(layer.slot_bytes(2), other)) << name;
      if (layer.scheme.period == 1) continue;
      // The page now is what encoding the state itself gives.
      const LayerCodec& codec = *layer.layer.codec;
      std::vector<std::uint8_t> page(static_cast<std::size_t>(codec.page_bytes()) + 16, 0);
      std::vector<std::byte> scratch(codec.scratch_bytes());
      for (int h = 0; h < s.n_value_heads; ++h) {
        codec.encode(h, &S[static_cast<std::size_t>(h * s.K * s.V)], OneLayer::aligned(page), {},
                     {scratch});
      }
      EXPECT_EQ(std::memcmp(OneLayer::aligned(page), layer.page(1),
                            static_cast<std::size_t>(codec.page_bytes())),
                0)
          << name;
      const auto again = layer.slot_bytes(1);
      ASSERT_TRUE(flush(layer.state(), slots, threads).ok());  // nothing is due
      EXPECT_TRUE(same_bits(layer.slot_bytes(1), again));
    }
  }
}

// The flush inside a step is the flush of the same records.
TEST(Window, AFullWindowFlushesLikeAForcedOne) {
  ThreadPool threads(1);
  for (const LayerShape& s : {kGrouped, shape(2, 4, 32, 64, Gate::kChannel)}) {
    for (const std::string codec : {"int8", "bf16", "leapquant:8"}) {
      for (const std::string records :
           {"f32", "bf16", "int8", "mixed", "f32,mode=v", "bf16,mode=v", "mixed,mode=v"}) {
        for (const int period : {2, 4}) {
          OneLayer due(codec + ",period=" + std::to_string(period) + ",records=" + records, s, 2);
          OneLayer forced(codec + ",period=9,records=" + records, s, 2);
          Stream stream(31);
          std::vector<float> S0(static_cast<std::size_t>(s.n_values()));
          for (float& x : S0) x = stream.normal();
          ASSERT_TRUE(hand_over(due.state(), 1, S0.data(), 0, threads).ok());
          ASSERT_TRUE(hand_over(forced.state(), 1, S0.data(), 0, threads).ok());
          Batch batch(s, 1);
          for (int t = 0; t < period; ++t) {
            stream.fill(batch);
            Batch copy = batch;
            ASSERT_TRUE(run(due, batch, threads).ok());
            ASSERT_TRUE(run(forced, copy, threads).ok());
            EXPECT_TRUE(same_bits(batch.out, copy.out));
          }
          EXPECT_EQ(due.cursors[1].fill, 0);
          EXPECT_EQ(forced.cursors[1].fill, period);
          const std::int64_t slots[] = {1};
          ASSERT_TRUE(flush(forced.state(), slots, threads).ok());
          EXPECT_TRUE(same_bits(due.pages, forced.pages)) << codec << " " << records;
        }
      }
    }
  }
}

// LeapQuant's absolute boundaries: after a hand-over at N tokens the first boundary is the next
// multiple of the period.
TEST(Window, AbsolutePhase) {
  ThreadPool threads(1);
  for (const std::int64_t n_tokens : {0, 1, 5, 7, 8, 1029}) {
    OneLayer absolute("bf16,period=8,phase=absolute", kGrouped, 2);
    OneLayer handover("bf16,period=8", kGrouped, 2);
    std::vector<float> S(static_cast<std::size_t>(kGrouped.n_values()), 0.25f);
    ASSERT_TRUE(hand_over(absolute.state(), 1, S.data(), n_tokens, threads).ok());
    ASSERT_TRUE(hand_over(handover.state(), 1, S.data(), n_tokens, threads).ok());
    Stream stream(1);
    Batch batch(kGrouped, 1);
    for (std::int64_t position = n_tokens; position < n_tokens + 20; ++position) {
      stream.fill(batch);
      ASSERT_TRUE(run(absolute, batch, threads).ok());
      ASSERT_TRUE(run(handover, batch, threads).ok());
      EXPECT_EQ(absolute.cursors[1].fill == 0, (position + 1) % 8 == 0) << position;
      EXPECT_EQ(handover.cursors[1].fill == 0, (position + 1 - n_tokens) % 8 == 0) << position;
      if (position == n_tokens + 9) {  // a forced flush keeps absolute boundaries where they are
        const std::int64_t slots[] = {1};
        ASSERT_TRUE(flush(absolute.state(), slots, threads).ok());
        EXPECT_EQ(absolute.cursors[1].limit, (position + 1) % 8 == 0 ? 0 : 8 - (position + 1) % 8);
        break;
      }
    }
    for (std::int64_t position = n_tokens + 10; position < n_tokens + 30; ++position) {
      stream.fill(batch);
      ASSERT_TRUE(run(absolute, batch, threads).ok());
      EXPECT_EQ(absolute.cursors[1].fill == 0, (position + 1) % 8 == 0) << position;
    }
  }
}

TEST(Window, HandOverRefusesANonFiniteState) {
  ThreadPool threads(2);
  OneLayer layer("int8", kGrouped, 3);
  std::vector<float> S(static_cast<std::size_t>(kGrouped.n_values()), 1.0f);
  S[static_cast<std::size_t>(2 * 32 * 64 + 7)] = kInf;
  const auto before = layer.slot_bytes(1);
  const Status status = hand_over(layer.state(), 1, S.data(), 3, threads);
  EXPECT_EQ(status.code(), Code::kNotFinite);
  EXPECT_EQ(status.message(),
            "the prefilled state of slot 1, value head 2, holds NaN or Inf; the slot is "
            "quarantined, free it");
  EXPECT_TRUE(same_bits(layer.slot_bytes(1), before));
  EXPECT_EQ(layer.faults[1], 1u);
}

// ---------------------------------------------------------------------------------------------
// Codecs that keep something other than S

/// Keeps Z = M S in f32, and only every row whose index is no multiple of `skip` (0: all of them).
class ToyCodec : public LayerCodec {
 public:
  static constexpr std::int64_t kPadding = 16;  // bytes at the end of a page that no head owns

  ToyCodec(const LayerShape& s, bool diagonal, int skip, unsigned seed) : shape_(s), skip_(skip) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    const int K = s.K;
    const std::size_t n = static_cast<std::size_t>(s.n_value_heads * K * K);
    M_.resize(n), R_.resize(n);
    for (int h = 0; h < s.n_value_heads; ++h) {
      // M = I + small random: its inverse by Gauss-Jordan in double.
      std::vector<double> A(static_cast<std::size_t>(K * K)), inverse(A.size());
      for (int i = 0; i < K; ++i) {
        for (int j = 0; j < K; ++j) {
          A[i * K + j] = i == j ? 1 + 0.5 * std::abs(normal(random))
                                : (diagonal ? 0 : 0.3 * normal(random) / std::sqrt(K));
          inverse[i * K + j] = i == j;
          M_[(h * K + j) * K + i] = static_cast<float>(A[i * K + j]);  // M^T
        }
      }
      for (int c = 0; c < K; ++c) {
        const double pivot = A[c * K + c];
        for (int j = 0; j < K; ++j) A[c * K + j] /= pivot, inverse[c * K + j] /= pivot;
        for (int i = 0; i < K; ++i) {
          if (i == c) continue;
          const double f = A[i * K + c];
          for (int j = 0; j < K; ++j) {
            A[i * K + j] -= f * A[c * K + j];
            inverse[i * K + j] -= f * inverse[c * K + j];
          }
        }
      }
      for (int e = 0; e < K * K; ++e) {
        R_[static_cast<std::size_t>(h * K * K + e)] =
            static_cast<float>(inverse[static_cast<std::size_t>(e)]);
      }
    }
  }
  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override {
    return {.codes = 4 * shape_.n_values(), .padding = kPadding};
  }
  std::size_t scratch_bytes() const override { return 0; }
  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext&,
              CodecScratch) const override {
    float* to = reinterpret_cast<float*>(page) + std::int64_t{head} * shape_.K * shape_.V;
    for (int i = 0; i < shape_.K; ++i) {
      for (int j = 0; j < shape_.V; ++j) to[i * shape_.V + j] = kept(i) ? X[i * shape_.V + j] : 0;
    }
  }
  void decode(int head, const std::uint8_t* page, float* X, CodecScratch) const override {
    const float* from =
        reinterpret_cast<const float*>(page) + std::int64_t{head} * shape_.K * shape_.V;
    std::copy_n(from, shape_.K * shape_.V, X);
  }
  const float* write_transform(int head) const override {
    return &M_[static_cast<std::size_t>(head * shape_.K * shape_.K)];
  }
  const float* read_transform(int head) const override {
    return &R_[static_cast<std::size_t>(head * shape_.K * shape_.K)];
  }

 private:
  bool kept(int i) const { return skip_ == 0 || i % skip_ != 0; }
  LayerShape shape_;
  int skip_;
  std::vector<float> M_, R_;
};

TEST(Transform, KeepingMSChangesNoOutput) {
  ThreadPool threads(2);
  for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
    const LayerShape s = shape(2, 4, 32, 48, gate);
    for (const char* name :
         {"fp32", "fp32,period=6,records=f32", "fp32,period=6,records=f32,mode=v"}) {
      OneLayer layer(parse(name), s, 2,
                     std::make_unique<ToyCodec>(s, gate == Gate::kChannel, 0, 5u));
      Reference reference(s, 1);
      Stream stream(14);
      std::vector<float> S0(static_cast<std::size_t>(s.n_values()));
      for (float& x : S0) x = stream.normal();
      ASSERT_TRUE(hand_over(layer.state(), 1, S0.data(), 0, threads).ok());
      reference.S.assign(S0.begin(), S0.end());
      EXPECT_LT(relative_error(dense(layer, 1, threads), S0), 1e-5);
      Batch batch(s, 1);
      for (int t = 0; t < 20; ++t) {
        stream.fill(batch);
        ASSERT_TRUE(run(layer, batch, threads).ok());
        EXPECT_LT(relative_error(batch.out, reference.step(batch)), 1e-5) << name << " " << t;
      }
      EXPECT_LT(relative_error(dense(layer, 1, threads), reference.S), 1e-5) << name;
    }
  }
}

/// klt at 8 bits a row, so that what is left of the transform shows and not the rounding.
OneLayer klt_layer(std::string_view name, const LayerShape& s, std::int64_t slots) {
  const Scheme scheme = parse(name);
  const auto config = codec_config(scheme);
  LayerPlan plan = any_plan(s, *config);
  std::fill(plan.bits.begin(), plan.bits.end(), std::uint8_t{8});
  std::fill(plan.row_scale.begin(), plan.row_scale.end(), 1.0f);
  plan.transform = any_transform(s);
  auto codec = config->info->make(*config, s, &plan);
  EXPECT_TRUE(codec.ok()) << codec.status().message();
  return OneLayer(scheme, s, slots, std::move(*codec));
}

// Hand-over, step, flush and restore of a codec that packs Z = M S: within the rounding of 8 bits,
// whose relative error is the root of D(8), 0.0094, each time; three times that for the condition
// of M, and the root of the number of roundings.
TEST(Transform, KltKeepsTheStateOfTheRecurrence) {
  ThreadPool threads(2);
  for (const LayerShape& s : {shape(2, 4, 32, 64), shape(1, 2, 48, 80), shape(2, 2, 64, 40)}) {
    for (const char* name : {"klt:4,records=f32", "klt:4,period=5,records=f32,mode=v",
                             "klt:4,period=1", "klt:4,period=6,records=bf16"}) {
      OneLayer layer = klt_layer(name, s, 3);
      Reference reference(s, 2);
      Stream stream(31);
      std::vector<float> S0(static_cast<std::size_t>(s.n_values()));
      for (int slot = 1; slot <= 2; ++slot) {
        for (float& x : S0) x = stream.normal();
        ASSERT_TRUE(hand_over(layer.state(), slot, S0.data(), 0, threads).ok());
        EXPECT_LT(relative_error(dense(layer, slot, threads), S0), 0.028) << name;
        std::copy(S0.begin(), S0.end(), reference.S.begin() + (slot - 1) * std::ssize(S0));
      }
      Batch batch(s, 2);
      for (int t = 0; t < 40; ++t) {
        stream.fill(batch);
        ASSERT_TRUE(run(layer, batch, threads).ok());
        const double n_roundings = 2 + t / layer.scheme.period;
        EXPECT_LT(relative_error(batch.out, reference.step(batch)), 0.028 * std::sqrt(n_roundings))
            << name << " " << t;
      }
      const std::int64_t slots[] = {1, 2};
      ASSERT_TRUE(flush(layer.state(), slots, threads).ok());
      std::vector<float> S = dense(layer, 1, threads);
      const std::vector<float> second = dense(layer, 2, threads);
      S.insert(S.end(), second.begin(), second.end());
      EXPECT_LT(relative_error(S, reference.S), 0.028 * std::sqrt(3 + 40 / layer.scheme.period))
          << name;
    }
  }
}

// A row alone, among others, and divided by rows or by heads: the same bits.
TEST(Transform, KltRowsDoNotDependOnTheirBatch) {
  const LayerShape s = shape(2, 4, 32, 64);
  constexpr int kRows = 70;  // divided by rows on one thread, by heads alone
  ThreadPool one(1), three(3);
  OneLayer together = klt_layer("klt:4,period=3", s, kRows + 1);
  OneLayer apart = klt_layer("klt:4,period=3", s, kRows + 1);
  Stream stream(32);
  Batch batch(s, kRows);
  for (int t = 0; t < 7; ++t) {
    stream.fill(batch);
    ASSERT_TRUE(run(together, batch, t % 2 == 0 ? one : three).ok());
    for (const int row : {0, 1, 33, 69}) {
      Batch alone = batch.row(row);
      ASSERT_TRUE(run(apart, alone, three).ok());
      const std::size_t n = alone.out.size();
      ASSERT_EQ(std::memcmp(alone.out.data(), batch.out.data() + static_cast<std::size_t>(row) * n,
                            n * sizeof(float)),
                0)
          << t << " " << row;
      EXPECT_TRUE(same_bits(apart.slot_bytes(row + 1), together.slot_bytes(row + 1)));
    }
  }
}

// Every rounding of a head is counted once, and again where it costs more than its guard.
TEST(Transform, RoundingsAreCountedAgainstTheirGuards) {
  const LayerShape s = shape(2, 4, 32, 64);
  ThreadPool threads(3);
  const Scheme scheme = parse("klt:4,period=3");
  const auto config = codec_config(scheme);
  LayerPlan plan = any_plan(s, *config);
  plan.guard = {0.0f, 1e-9f, 1e9f, 1e-9f};  // unknown, always over, never over, always over
  OneLayer layer(scheme, s, 70, *config->info->make(*config, s, &plan));
  OneLayer silent(scheme, s, 70, *config->info->make(*config, s, &plan));
  GuardCounts counts;
  LayerState state = layer.state();
  state.guard = &counts;
  Stream stream(3);
  std::vector<float> S(static_cast<std::size_t>(s.n_values()));
  for (float& x : S) x = stream.normal();
  for (int slot = 1; slot < 70; ++slot) {
    ASSERT_TRUE(hand_over(state, slot, S.data(), 0, threads).ok());
    ASSERT_TRUE(hand_over(silent.state(), slot, S.data(), 0, threads).ok());
  }
  EXPECT_EQ(counts.roundings, 3 * 69);
  EXPECT_EQ(counts.over, 2 * 69);
  for (const int n_rows : {69, 2}) {  // by rows and by heads
    counts = {};
    Batch batch(s, n_rows);
    for (int t = 0; t < 3; ++t) {
      stream.fill(batch);
      ASSERT_TRUE(step(state, batch.input(), threads).ok());
      EXPECT_EQ(counts.roundings, t < 2 ? 0 : 3 * n_rows);
      ASSERT_TRUE(run(silent, batch, threads).ok());
    }
    EXPECT_EQ(counts.over, 2 * n_rows);
  }
  Batch batch(s, 1);
  stream.fill(batch);
  ASSERT_TRUE(step(state, batch.input(), threads).ok());
  ASSERT_TRUE(run(silent, batch, threads).ok());
  counts = {};
  const std::int64_t slots[] = {1, 2};
  ASSERT_TRUE(flush(state, slots, threads).ok());  // slot 2 has nothing to round
  ASSERT_TRUE(flush(silent.state(), slots, threads).ok());
  EXPECT_EQ(counts.roundings, 3);
  EXPECT_EQ(counts.over, 2);
  for (int slot = 1; slot < 70; ++slot) {  // counting changes no bytes
    EXPECT_TRUE(same_bits(layer.slot_bytes(slot), silent.slot_bytes(slot)));
  }
}

// Bytes of a page that no head owns stay zero, whatever other pages the same threads made before.
TEST(Transform, PaddingOfAPageStaysZero) {
  ThreadPool threads(1);
  const LayerShape s = shape(1, 1, 16, 16);
  OneLayer larger("bf16", kGrouped, 2);
  OneLayer layer(parse("fp32"), s, 2, std::make_unique<ToyCodec>(s, true, 0, 5u));
  Stream stream(2);
  Batch first(kGrouped, 1), batch(s, 1);
  stream.fill(first), stream.fill(batch);
  std::fill(first.v.begin(), first.v.end(), 3.0f);
  ASSERT_TRUE(run(larger, first, threads).ok());
  ASSERT_TRUE(run(layer, batch, threads).ok());
  for (int i = 0; i < ToyCodec::kPadding; ++i) EXPECT_EQ(layer.page(1)[4 * 16 * 16 + i], 0);
}

// A row of 0 bits restores as zero: the step goes on from there.
TEST(Transform, RowsOfNoBits) {
  ThreadPool threads(1);
  const LayerShape s = shape(1, 2, 16, 16);
  OneLayer layer(parse("fp32"), s, 2, std::make_unique<ToyCodec>(s, true, 4, 5u));
  Reference reference(s, 1);
  Stream stream(15);
  Batch batch(s, 1);
  for (int t = 0; t < 10; ++t) {
    stream.fill(batch);
    ASSERT_TRUE(run(layer, batch, threads).ok());
    reference.step(batch);
    for (std::size_t i = 0; i < reference.S.size(); ++i) {
      if (i / 16 % 16 % 4 == 0) reference.S[i] = 0;
    }
    EXPECT_LT(relative_error(dense(layer, 1, threads), reference.S), 1e-5);
  }
}

}  // namespace
}  // namespace statepack
