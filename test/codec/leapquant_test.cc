#include "codec/leapquant/leapquant.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/half.hpp"
#include "base/hash.hpp"
#include "states.hpp"

namespace statepack {
namespace {

using test::State;
using testing::HasSubstr;

using Settings = LeapquantCodec::Settings;

LayerShape shape_of(int heads, int K, int V, Gate gate = Gate::kScalar) {
  return {heads, heads, K, V, gate};
}

Settings with_bits(int bits) { return {.bits = bits, .rank = bits == 4 ? 8 : 4}; }

int qmax_of(int bits) { return (1 << (bits - 1)) - 1; }

double mean_abs_error(const std::vector<double>& want, const State& got) {
  double sum = 0;
  for (std::size_t e = 0; e < want.size(); ++e) sum += std::fabs(want[e] - got[e]);
  return sum / static_cast<double>(want.size());
}

double mean_abs(const std::vector<double>& X) { return mean_abs_error(X, State(X.size())); }

std::vector<double> widen(const State& X) { return {X.begin(), X.end()}; }
State narrow(const std::vector<double>& X) { return {X.begin(), X.end()}; }

State low_rank_state(int K, int V, int rank, unsigned seed) {
  const State a = test::normal_state(rank * K, seed), b = test::normal_state(rank * V, seed + 1);
  State X(static_cast<std::size_t>(K * V));
  for (int p = 0; p < rank; ++p) {
    for (int i = 0; i < K; ++i) {
      for (int j = 0; j < V; ++j) {
        X[static_cast<std::size_t>(i * V + j)] +=
            a[static_cast<std::size_t>(p * K + i)] * b[static_cast<std::size_t>(p * V + j)];
      }
    }
  }
  return X;
}

// ---- The checkpoint -----------------------------------------------------------------------------

TEST(LeapquantFormat, BytesOfACheckpoint) {
  const auto layout = [](const Settings& settings) {
    return LeapquantCodec(shape_of(1, 128, 128), settings).layout();
  };
  const auto eight = layout(with_bits(8));
  EXPECT_EQ(eight.codes, 0);
  EXPECT_EQ(eight.row_scales, 16384);
  EXPECT_EQ(eight.column_scales, 16896);
  EXPECT_EQ(eight.compensators, 17408);
  EXPECT_EQ(eight.n_bytes, 19456);
  const auto six = layout(with_bits(6));
  EXPECT_EQ(six.high_bits, 8192);
  EXPECT_EQ(six.row_scales, 12288);
  EXPECT_EQ(six.n_bytes, 15360);
  EXPECT_EQ(layout(with_bits(4)).n_bytes, 13312);
  EXPECT_EQ(layout({.f16_scales = true}).n_bytes, 19456 - 512);
  EXPECT_EQ(layout({.rank = 0}).n_bytes, 16384 + 1024);

  const PayloadBytes bytes = LeapquantCodec(shape_of(32, 128, 128), with_bits(6)).payload();
  EXPECT_EQ(bytes.codes, 32 * 12288);
  EXPECT_EQ(bytes.scales, 32 * 1024);
  EXPECT_EQ(bytes.compensators, 32 * 2048);
  EXPECT_EQ(bytes.padding, 0);
  EXPECT_EQ(bytes.total(), 32 * 15360);
}

// Sections stay at multiples of 128 bytes for every shape, and what that costs is counted.
TEST(LeapquantFormat, SectionsAreAligned) {
  for (const auto& [K, V] : {std::pair{96, 192}, {64, 128}, {5, 3}, {1, 1}, {130, 7}}) {
    for (int bits : {8, 6, 4}) {
      const LeapquantCodec codec(shape_of(3, K, V), with_bits(bits));
      const auto& l = codec.layout();
      for (std::int64_t at :
           {l.codes, l.high_bits, l.row_scales, l.column_scales, l.compensators, l.n_bytes}) {
        EXPECT_EQ(at % 128, 0);
      }
      EXPECT_EQ(codec.page_bytes(), 3 * l.n_bytes);
      EXPECT_GE(codec.payload().padding, 0);
      EXPECT_EQ(codec.payload().compensators, 3 * 2 * (bits == 4 ? 8 : 4) * (K + V));
    }
  }
}

class LeapquantShapes : public testing::TestWithParam<std::tuple<std::array<int, 2>, int>> {
 protected:
  int K() const { return std::get<0>(GetParam())[0]; }
  int V() const { return std::get<0>(GetParam())[1]; }
  int bits() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(
    , LeapquantShapes,
    testing::Combine(testing::Values(std::array{128, 128}, std::array{64, 128}, std::array{128, 64},
                                     std::array{96, 192}, std::array{4, 4}, std::array{7, 3},
                                     std::array{5, 1}, std::array{1, 37}, std::array{18, 20}),
                     testing::Values(8, 6, 4)));

// Restored values follow from the bytes by the published addresses and the restoring equation
// alone.
TEST_P(LeapquantShapes, RestoreWhatTheBytesSay) {
  const LayerShape shape = shape_of(2, K(), V());
  for (const bool f16_scales : {false, true}) {
    Settings settings = with_bits(bits());
    settings.f16_scales = f16_scales;
    const LeapquantCodec codec(shape, settings);
    const auto page = test::encode(codec, test::normal_state(2 * K() * V(), 3));
    const State restored = test::decode(codec, page);
    const auto& l = codec.layout();
    for (int h = 0; h < 2; ++h) {
      const std::uint8_t* head = page.data() + h * l.n_bytes;
      const auto code = [&](int j, int i) {
        const std::int64_t at = l.codes + j * ((std::int64_t{K()} * (bits() == 8 ? 8 : 4) + 7) / 8);
        if (bits() == 8) return int{static_cast<std::int8_t>(head[at + i])};
        int u = (head[at + i / 2] >> (i % 2 * 4)) & 15;
        if (bits() == 6) {
          u |= ((head[l.high_bits + j * ((K() + 3) / 4) + i / 4] >> (i % 4 * 2)) & 3) << 4;
        }
        return u < 1 << (bits() - 1) ? u : u - (1 << bits());
      };
      const auto half = [&](std::int64_t at) {
        std::uint16_t value;
        std::memcpy(&value, head + at, 2);
        return double{f16_to_f32(value)};
      };
      const auto scale = [&](std::int64_t section, int at) {
        if (f16_scales) return half(section + 2 * at);
        float value;
        std::memcpy(&value, head + section + 4 * at, 4);
        return double{value};
      };
      const auto dump = codec.dump(h, page);
      for (int i = 0; i < K(); ++i) {
        for (int j = 0; j < V(); ++j) {
          const int z = code(j, i);
          ASSERT_EQ(dump.z[static_cast<std::size_t>(i * V() + j)], z);
          ASSERT_LE(std::abs(z), qmax_of(bits()));
          double want = scale(l.row_scales, i) * z / qmax_of(bits()) * scale(l.column_scales, j);
          double magnitude = std::fabs(want);
          for (int p = 0; p < settings.rank; ++p) {
            const std::int64_t row = l.compensators + p * 2 * (K() + V());
            const double term = half(row + 2 * i) * half(row + 2 * (K() + j));
            want += term;
            magnitude += std::fabs(term);
          }
          ASSERT_NEAR(restored[static_cast<std::size_t>((h * K() + i) * V() + j)], want,
                      (settings.rank + 3) * 0x1p-23 * magnitude);
        }
      }
    }
  }
}

TEST_P(LeapquantShapes, WriteEveryByteOfTheirOwnHeadOnly) {
  const LeapquantCodec codec(shape_of(3, K(), V()), with_bits(bits()));
  const State heads = test::normal_state(3 * K() * V(), 5);
  const auto whole = test::encode(codec, heads, 0);
  auto scratch = test::scratch_for(codec);
  std::vector<std::uint8_t> page(whole.size(), 0x77);
  for (int h : {2, 0, 1}) {
    const std::vector<std::uint8_t> before = page;
    codec.encode(h, heads.data() + h * K() * V(), page.data(), {}, {scratch});
    const auto own = static_cast<std::size_t>(codec.layout().n_bytes);
    for (std::size_t b = 0; b < page.size(); ++b) {
      ASSERT_EQ(page[b], b / own == static_cast<std::size_t>(h) ? whole[b] : before[b]);
    }
  }
}

TEST_P(LeapquantShapes, ZeroStatesAndZeroPagesAreExactlyZero) {
  const LeapquantCodec codec(shape_of(2, K(), V()), with_bits(bits()));
  const auto page = test::encode(codec, State(static_cast<std::size_t>(2 * K() * V())));
  for (const State& got :
       {test::decode(codec, page), test::decode(codec, std::vector<std::uint8_t>(page.size()))}) {
    for (float x : got) ASSERT_EQ(std::bit_cast<std::uint32_t>(x), 0u);
  }
  const auto dump = codec.dump(1, page);
  for (float s : dump.s_k) EXPECT_EQ(s, 1e-12f);
  for (float s : dump.s_v) EXPECT_EQ(s, 1e-12f);
  for (float x : dump.keys) EXPECT_EQ(x, 0.0f);
  for (float x : dump.values) EXPECT_EQ(x, 0.0f);
}

TEST(LeapquantFormat, CheckpointsAreBitIdenticalOnEveryMachine) {
  const auto hash = [](const Settings& settings) {
    const LeapquantCodec codec(shape_of(1, 128, 96), settings);
    const auto page = test::encode(codec, test::large_state(128, 96));
    return to_hex(xxh3_128(std::as_bytes(std::span(page))));
  };
  EXPECT_EQ(hash(with_bits(8)), "8f22514d7eac2ba7df1330cdd587a868");
  EXPECT_EQ(hash(with_bits(6)), "05d071f2c4445dfdbc357c0595918eff");
  EXPECT_EQ(hash(with_bits(4)), "f3ddc76e7033ee0c6d1e11c4ea87b430");
  EXPECT_EQ(hash({.bits = 4, .rank = 3, .rounds = 2, .clip = true, .f16_scales = true}),
            "8d9ad90adaeb341d2fa99bb03ff78bd6");
}

// ---- The start matrix ---------------------------------------------------------------------------

TEST(LeapquantStart, IsTheDocumentedSequence) {
  const std::vector<float> start = LeapquantCodec::start_matrix(128, 8);
  // SplitMix64 from "LeapQ001", Marsaglia's polar method with the C library's logarithm.
  std::uint64_t state = 0x4c65617051303031u;
  const auto uniform = [&] {
    std::uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    return std::ldexp(static_cast<double>(x >> 11) + 0.5, -52) - 1;
  };
  for (std::size_t v = 0; v < 128; ++v) {
    for (std::size_t p = 0; p < 8; p += 2) {
      double x, y, s;
      do {
        x = uniform();
        y = uniform();
        s = x * x + y * y;
      } while (s >= 1);
      const double factor = std::sqrt(-2 * std::log(s) / s);
      EXPECT_FLOAT_EQ(start[p * 128 + v], static_cast<float>(x * factor));
      EXPECT_FLOAT_EQ(start[(p + 1) * 128 + v], static_cast<float>(y * factor));
    }
  }
  EXPECT_EQ(to_hex(xxh3_128(std::as_bytes(std::span(start)))), "adeb27edf44c29ed9838b0a2d7433362");
}

TEST(LeapquantStart, DependsOnNeitherWidthNorRank) {
  const std::vector<float> all = LeapquantCodec::start_matrix(192, 8);
  for (int rank : {0, 1, 4, 7}) {
    const std::vector<float> some = LeapquantCodec::start_matrix(64, rank);
    ASSERT_EQ(some.size(), static_cast<std::size_t>(rank * 64));
    for (std::size_t e = 0; e < some.size(); ++e) EXPECT_EQ(some[e], all[e / 64 * 192 + e % 64]);
  }
}

TEST(LeapquantStart, IsStandardNormal) {
  const std::vector<float> start = LeapquantCodec::start_matrix(1024, 8);
  double m1 = 0, m2 = 0, m4 = 0;
  for (float x : start) {
    m1 += x / 8192.0;
    m2 += std::pow(x, 2) / 8192;
    m4 += std::pow(x, 4) / 8192;
  }
  EXPECT_NEAR(m1, 0, 4 / std::sqrt(8192));  // 4 standard deviations of each moment
  EXPECT_NEAR(m2, 1, 4 * std::sqrt(2.0 / 8192));
  EXPECT_NEAR(m4, 3, 4 * std::sqrt(96.0 / 8192));
}

// ---- The flush against an independent one
// ---------------------------------------------------------

// F2 to F4 as their equations stand, f32, sums in index order, factors and codes as matrices.
State reference_flush(const State& S, int K, int V, const Settings& settings) {
  const int r = settings.rank;
  using Column = std::vector<float>;
  const auto s = [&](int i, int j) { return S[static_cast<std::size_t>(i * V + j)]; };
  const auto orth = [](std::vector<Column>& columns) {
    for (std::size_t p = 0; p < columns.size(); ++p) {
      Column& x = columns[p];
      for (int pass = 0; pass < 2; ++pass) {
        for (std::size_t q = 0; q < p; ++q) {
          const float along = std::inner_product(x.begin(), x.end(), columns[q].begin(), 0.0f);
          for (std::size_t e = 0; e < x.size(); ++e) x[e] -= along * columns[q][e];
        }
      }
      const float norm = std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0f));
      for (float& e : x) e /= std::max(norm, 1e-30f);
    }
  };
  const auto times = [&](const std::vector<Column>& Q) {
    std::vector<Column> out;
    for (const Column& q : Q) {
      Column& c = out.emplace_back(K);
      for (int i = 0; i < K; ++i) {
        for (int j = 0; j < V; ++j)
          c[static_cast<std::size_t>(i)] += s(i, j) * q[static_cast<std::size_t>(j)];
      }
    }
    return out;
  };
  const auto transposed_times = [&](const std::vector<Column>& A) {
    std::vector<Column> out;
    for (const Column& a : A) {
      Column& c = out.emplace_back(V);
      for (int i = 0; i < K; ++i) {
        for (int j = 0; j < V; ++j)
          c[static_cast<std::size_t>(j)] += s(i, j) * a[static_cast<std::size_t>(i)];
      }
    }
    return out;
  };
  const std::vector<float> start = LeapquantCodec::start_matrix(V, r);
  std::vector<Column> Q;
  for (int p = 0; p < r; ++p) Q.emplace_back(start.begin() + p * V, start.begin() + (p + 1) * V);
  for (int round = 0; round < settings.rounds; ++round) {
    std::vector<Column> A = times(Q);
    orth(A);
    Q = transposed_times(A);
    orth(Q);
  }
  std::vector<Column> U = times(Q);
  for (auto* factor : {&U, &Q}) {
    for (Column& c : *factor) {
      for (float& x : c) x = f16_to_f32(f32_to_f16(std::clamp(x, -65504.0f, 65504.0f)));
    }
  }
  State low(S.size()), E(S.size()), out(S.size());
  std::vector<float> s_k(static_cast<std::size_t>(K)), s_v(static_cast<std::size_t>(V), 1e-12f);
  for (int i = 0; i < K; ++i) {
    float sum = 0;
    for (int j = 0; j < V; ++j) {
      const std::size_t e = static_cast<std::size_t>(i * V + j);
      for (std::size_t p = 0; p < U.size(); ++p) {
        low[e] += U[p][static_cast<std::size_t>(i)] * Q[p][static_cast<std::size_t>(j)];
      }
      E[e] = S[e] - low[e];
      sum += std::fabs(E[e]);
    }
    s_k[static_cast<std::size_t>(i)] = std::max(std::sqrt(sum / static_cast<float>(V)), 1e-12f);
  }
  for (std::size_t e = 0; e < S.size(); ++e) {
    float& scale = s_v[e % static_cast<std::size_t>(V)];
    scale = std::max(scale, std::fabs(E[e]) / s_k[e / static_cast<std::size_t>(V)]);
  }
  const float qmax = static_cast<float>(qmax_of(settings.bits));
  for (std::size_t e = 0; e < S.size(); ++e) {
    const float product =
        s_k[e / static_cast<std::size_t>(V)] * s_v[e % static_cast<std::size_t>(V)];
    const float z = std::clamp(std::nearbyint(qmax * E[e] / product), -qmax, qmax);
    out[e] = low[e] + product * (z / qmax);
  }
  return out;
}

// Section 12: at most 1 % above the reference, or below a thousandth where the reference is nearly
// exact.
void expect_accepted(const std::vector<double>& S, const State& got, const State& reference,
                     const char* what) {
  const double error = mean_abs_error(S, got), want = mean_abs_error(S, reference);
  const double size = mean_abs(S);
  ASSERT_TRUE(std::isfinite(error)) << what;
  if (want >= 1e-4 * size) {
    EXPECT_LE(error, 1.01 * want) << what;
  } else {
    EXPECT_LE(error, 1e-3 * size) << what;
  }
}

struct Head {
  const char* name;
  State start;
  double decay;        // of all channels, 0 to 1
  bool writes = true;  // whether the window holds records
};

std::vector<Head> edge_heads(int K, int V) {
  const auto n = K * V;
  State hot = test::normal_state(n, 20);
  for (int j = 0; j < V; ++j) hot[static_cast<std::size_t>(3 * V + j)] *= 100;
  return {{"random", test::normal_state(n, 10), 0.97},
          {"rank 1", low_rank_state(K, V, 1, 11), 1, false},
          {"rank 2", low_rank_state(K, V, 2, 13), 1, false},
          {"rank 2 and a window", low_rank_state(K, V, 2, 15), 0.9},
          {"zero", State(static_cast<std::size_t>(n)), 0.97, false},
          {"zero and a window", State(static_cast<std::size_t>(n)), 0.97},
          {"tiny", test::normal_state(n, 17, 1e-4f), 0.97, false},
          {"huge", test::normal_state(n, 18, 3e2f), 0.97},
          {"hot row", hot, 0.97},
          {"decayed away", test::normal_state(n, 21), 1e-20},
          {"not decaying", test::normal_state(n, 22), 1}};
}

// F1 in double: 16 tokens of the delta rule on the restored state, S = Gamma Shat + sum D k u^T.
std::vector<double> rebuild(const State& restored, int K, int V, Gate gate, const Head& head,
                            unsigned seed) {
  std::vector<double> S = widen(restored);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> spread(0.8, 1.0);
  std::vector<double> a(static_cast<std::size_t>(K)), k(static_cast<std::size_t>(K));
  for (int t = 0; t < 16; ++t) {
    double norm = 1e-6;
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = gate == Gate::kChannel && head.decay < 1 ? head.decay * spread(random) : head.decay;
      k[i] = normal(random);
      norm += k[i] * k[i];
    }
    for (int i = 0; i < K; ++i) {
      for (int j = 0; j < V; ++j)
        S[static_cast<std::size_t>(i * V + j)] *= a[static_cast<std::size_t>(i)];
    }
    if (!head.writes) continue;
    for (int j = 0; j < V; ++j) {
      double u = normal(random);
      for (int i = 0; i < K; ++i)
        u -= S[static_cast<std::size_t>(i * V + j)] * k[static_cast<std::size_t>(i)] /
             std::sqrt(norm);
      for (int i = 0; i < K; ++i) {
        S[static_cast<std::size_t>(i * V + j)] +=
            0.5 * u * k[static_cast<std::size_t>(i)] / std::sqrt(norm);
      }
    }
  }
  return S;
}

TEST(LeapquantFlush, IsAsGoodAsTheReference) {
  for (const auto& [K, V] : {std::pair{128, 128}, {64, 128}, {128, 64}, {96, 192}}) {
    for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
      for (int bits : {8, 6, 4}) {
        const Settings settings = with_bits(bits);
        const LeapquantCodec codec(shape_of(1, K, V, gate), settings);
        for (const Head& head : edge_heads(K, V)) {
          State restored = test::round_trip(codec, head.start);
          for (unsigned window = 0; window < 2; ++window) {  // the second is chained on the first
            const std::vector<double> S = rebuild(restored, K, V, gate, head, 100 + window);
            const auto page = test::encode(codec, narrow(S));
            restored = test::decode(codec, page);
            expect_accepted(S, restored, reference_flush(narrow(S), K, V, settings), head.name);
            for (int z : codec.dump(0, page).z) ASSERT_LE(std::abs(z), qmax_of(bits));
          }
        }
      }
    }
  }
}

TEST(LeapquantFlush, IsAsGoodAsTheReferenceOnTrainedStates) {
  const State heads = test::trained_states();
  for (int h = 0; h < 4; ++h) {
    const State X(heads.begin() + h * 128 * 128, heads.begin() + (h + 1) * 128 * 128);
    for (Settings settings : {with_bits(8), with_bits(6), with_bits(4), Settings{.rank = 1},
                              Settings{.rank = 0}, Settings{.bits = 6, .rank = 5, .rounds = 3}}) {
      const LeapquantCodec codec(shape_of(1, 128, 128), settings);
      expect_accepted(widen(X), test::round_trip(codec, X), reference_flush(X, 128, 128, settings),
                      "trained");
    }
  }
}

// ---- Edge cases
// ------------------------------------------------------------------------------------

TEST(LeapquantEdges, RankDeficientStatesLoseLessThanAThousandth) {
  for (const auto& [K, V] : {std::pair{128, 128}, {96, 192}, {4, 128}, {128, 4}, {3, 2}}) {
    for (int rank : {1, 2, 4}) {
      for (float scale : {1e-4f, 1.0f, 3e2f}) {
        State X = low_rank_state(K, V, std::min({rank, K, V}), 31);
        for (float& x : X) x *= scale;
        for (int bits : {8, 6, 4}) {
          const LeapquantCodec codec(shape_of(1, K, V), with_bits(bits));
          EXPECT_LT(mean_abs_error(widen(X), test::round_trip(codec, X)), 1e-3 * mean_abs(widen(X)))
              << K << "x" << V << " rank " << rank << " scale " << scale << " bits " << bits;
        }
      }
    }
  }
}

// More compensators than the state has rows must not count a direction twice.
TEST(LeapquantEdges, SurplusCompensatorsAreZeroOrOrthogonal) {
  const LeapquantCodec codec(shape_of(1, 4, 64), with_bits(4));
  const auto dump = codec.dump(0, test::encode(codec, test::normal_state(4 * 64, 3)));
  for (std::size_t p = 0; p < 8; ++p) {
    for (std::size_t q = 0; q <= p; ++q) {
      double dot = 0;
      for (std::size_t j = 0; j < 64; ++j)
        dot += double{dump.values[p * 64 + j]} * dump.values[q * 64 + j];
      EXPECT_NEAR(dot, p == q && p < 4 ? 1 : 0, 64 * 0x1p-12);
    }
  }
}

TEST(LeapquantEdges, NonFiniteStatesAreStoredAsZero) {
  const float inf = std::numeric_limits<float>::infinity();
  for (int bits : {8, 6, 4}) {
    const LeapquantCodec codec(shape_of(2, 32, 64), with_bits(bits));
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), inf, -inf}) {
      for (std::size_t at : {std::size_t{0}, std::size_t{777}, std::size_t{32 * 64 - 1}}) {
        State X = test::normal_state(2 * 32 * 64, 8);
        const State clean = test::round_trip(codec, X);
        X[at] = bad;
        const State got = test::round_trip(codec, X);
        EXPECT_TRUE(
            std::all_of(got.begin(), got.begin() + 32 * 64, [](float x) { return x == 0; }));
        EXPECT_TRUE(std::equal(got.begin() + 32 * 64, got.end(), clean.begin() + 32 * 64));
      }
    }
  }
}

TEST(LeapquantEdges, FactorsSaturateAndTheCodesTakeTheRest) {
  // Norms far beyond 65504: what the halves cannot hold is left to the codes.
  const LeapquantCodec codec(shape_of(1, 128, 128), with_bits(8));
  for (float scale : {1e4f, 1e6f, 1e12f, 1e30f}) {
    State X = low_rank_state(128, 128, 1, 5);
    for (float& x : X) x *= scale;
    const auto page = test::encode(codec, X);
    for (float x : codec.dump(0, page).keys) EXPECT_LE(std::fabs(x), 65504.0f);
    const State got = test::decode(codec, page);
    EXPECT_LT(mean_abs_error(widen(X), got), 0.01 * mean_abs(widen(X))) << scale;
  }
}

TEST(LeapquantEdges, StatesBelowEveryFloorVanish) {
  const LeapquantCodec codec(shape_of(1, 64, 64), with_bits(8));
  for (float scale : {1e-30f, 1e-38f, 1e-44f}) {
    for (float x : test::round_trip(codec, test::normal_state(64 * 64, 6, scale))) {
      EXPECT_LT(std::fabs(x), 1e-20f);
    }
  }
}

TEST(LeapquantEdges, HalvesOfCodesRoundToEven) {
  // The second column brings every row's mean to 16, so s_k = 4; the peak of 14 gives steps of 2.
  const LeapquantCodec codec(shape_of(1, 6, 2), {.bits = 4, .rank = 0});
  const State X = {14, 18, 5, 27, 7, 25, -1, 31, -3, 29, 1, 31};
  const auto dump = codec.dump(0, test::encode(codec, X));
  EXPECT_THAT(dump.s_k, testing::Each(4.0f));
  EXPECT_EQ(dump.s_v[0], 3.5f);
  const std::vector<int> want = {7, 2, 4, 0, -2, 0};  // of 7, 2.5, 3.5, -0.5, -1.5, 0.5
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(dump.z[2 * i], want[i]) << i;
}

// ---- What the settings buy
// ---------------------------------------------------------------------------

double error_of(const State& heads, int n_heads, const Settings& settings) {
  const LeapquantCodec codec(shape_of(n_heads, 128, 128), settings);
  return test::mean_square_error(heads, test::round_trip(codec, heads));
}

TEST(Leapquant, MoreBitsAndMoreCompensatorsNeverHurtOnAverage) {
  for (const State& heads : {test::trained_states(), test::normal_state(4 * 128 * 128, 40)}) {
    EXPECT_LT(error_of(heads, 4, with_bits(8)), error_of(heads, 4, with_bits(6)));
    EXPECT_LT(error_of(heads, 4, with_bits(6)), error_of(heads, 4, with_bits(4)));
    for (int bits : {8, 6, 4}) {
      double last = INFINITY;
      for (int rank : {0, 1, 2, 4, 8}) {
        const double error = error_of(heads, 4, {.bits = bits, .rank = rank});
        EXPECT_LE(error, last * 1.02) << bits << " bits, rank " << rank;
        last = error;
      }
    }
  }
}

TEST(Leapquant, BeatsRowAbsmaxOnTrainedStates) {
  const State heads = test::trained_states();
  for (int bits : {8, 6, 4}) {
    for (int h = 0; h < 4; ++h) {
      const State X(heads.begin() + h * 128 * 128, heads.begin() + (h + 1) * 128 * 128);
      EXPECT_LT(error_of(X, 1, with_bits(bits)),
                test::mean_square_error(X, test::absmax_rows(X, 128, bits)));
    }
  }
}

TEST(Leapquant, ClippingNeverRaisesTheSquaredError) {
  for (const State& heads : {test::trained_states(), test::normal_state(4 * 128 * 128, 41)}) {
    for (int bits : {6, 4}) {
      for (const bool f16_scales : {false, true}) {
        Settings off = with_bits(bits), on = off;
        off.f16_scales = on.f16_scales = f16_scales;
        on.clip = true;
        EXPECT_LT(error_of(heads, 4, on), error_of(heads, 4, off) * (bits == 4 ? 0.9 : 1 + 1e-6));
      }
    }
  }
}

// Uniform numbers under one outlier a column: what the outlier loses, many others gain.
TEST(Leapquant, ClippingTakesTheBestFactorOfEachColumn) {
  constexpr std::size_t K = 640, V = 32;
  State X(K * V);
  std::mt19937 random(42);
  std::uniform_real_distribution<float> uniform(-0.49f, 0.49f);
  for (float& x : X) x = uniform(random);
  for (std::size_t j = 0; j < V; ++j) X[17 * j * V + j] = 0.5f + 0.5f * static_cast<float>(j) / V;
  float shortest = 1;
  for (int bits : {6, 4}) {
    const LeapquantCodec whole(shape_of(1, K, V), {.bits = bits, .rank = 0});
    const LeapquantCodec clipped(shape_of(1, K, V), {.bits = bits, .rank = 0, .clip = true});
    const auto before = whole.dump(0, test::encode(whole, X));
    const auto after = clipped.dump(0, test::encode(clipped, X));
    EXPECT_EQ(before.s_k, after.s_k);
    for (std::size_t j = 0; j < V; ++j) {
      const auto column_error = [&](double s_v) {
        double sum = 0;
        for (std::size_t i = 0; i < K; ++i) {
          const double step = before.s_k[i] * s_v / qmax_of(bits), limit = qmax_of(bits);
          sum += std::pow(
              X[i * V + j] - step * std::clamp(std::nearbyint(X[i * V + j] / step), -limit, limit),
              2);
        }
        return sum;
      };
      double best = INFINITY;
      for (int percent = 50; percent <= 100; percent += 5) {
        best = std::min(best, column_error(double{before.s_v[j]} * percent / 100));
      }
      EXPECT_LE(column_error(after.s_v[j]), best * (1 + 1e-4));
      shortest = std::min(shortest, after.s_v[j] / before.s_v[j]);
    }
  }
  EXPECT_FLOAT_EQ(shortest, 0.5f);
}

TEST(Leapquant, HalfPrecisionScalesCostLittle) {
  const State heads = test::trained_states();
  for (int bits : {8, 6, 4}) {
    Settings f16 = with_bits(bits);
    f16.f16_scales = true;
    EXPECT_LT(error_of(heads, 4, f16), 1.01 * error_of(heads, 4, with_bits(bits)));
  }
}

TEST(Leapquant, RefusesOptionsThatItCannotHonour) {
  const auto refusal = [](std::string arg, std::map<std::string, std::string> options, Code code,
                          Gate gate = Gate::kScalar) {
    auto codec = kLeapquantInfo.make(test::configure(kLeapquantInfo, std::move(arg), options),
                                     shape_of(1, 8, 8, gate), nullptr);
    EXPECT_FALSE(codec.ok());
    EXPECT_EQ(codec.status().code(), code);
    return codec.status().message();
  };
  for (const char* rank : {"9", "-1", "", "4.0", "04"}) {
    EXPECT_THAT(refusal("8", {{"rank", rank}}, Code::kInvalidArgument), HasSubstr("rank="));
  }
  EXPECT_THAT(refusal("8", {{"rounds", "0"}}, Code::kInvalidArgument), HasSubstr("rounds=0"));
  EXPECT_THAT(refusal("4", {{"clip", "yes"}}, Code::kInvalidArgument), HasSubstr("off|on"));
  EXPECT_THAT(refusal("4", {{"scales", "bf16"}}, Code::kInvalidArgument), HasSubstr("f32|f16"));
  EXPECT_THAT(refusal("8", {{"clip", "on"}}, Code::kUnsupported), HasSubstr("leapquant:6"));
  EXPECT_THAT(refusal("8", {{"scales", "f16"}}, Code::kUnsupported, Gate::kChannel),
              HasSubstr("scales=f32"));
}

TEST(Leapquant, IsListedWithItsDefaults) {
  EXPECT_EQ(find_codec("leapquant"), &kLeapquantInfo);
  for (const char* arg : {"8", "6", "4"}) {
    const CodecConfig config = test::configure(kLeapquantInfo, arg);
    EXPECT_EQ(config.options.at("rank"), config.arg == "4" ? "8" : "4");
    EXPECT_EQ(kLeapquantInfo.plan_kind(config), "");
    const SchemeDefaults defaults = kLeapquantInfo.defaults(config);
    EXPECT_EQ(defaults.period, 16);
    EXPECT_EQ(defaults.records, "bf16");
    EXPECT_EQ(defaults.phase, "absolute");
    EXPECT_EQ(defaults.prefill, "once");
    auto codec = kLeapquantInfo.make(config, shape_of(1, 128, 128), nullptr);
    ASSERT_TRUE(codec.ok());
    EXPECT_EQ((*codec)->page_bytes(), config.arg == "8"   ? 19456
                                      : config.arg == "6" ? 15360
                                                          : 13312);
  }
}

}  // namespace
}  // namespace statepack
