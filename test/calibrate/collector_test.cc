#include "calibrate/collector.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>

#include "calibrate/draw.hpp"
#include "synthetic.hpp"

namespace statepack {
namespace {

using ::statepack::testing::random_tokens;
using ::statepack::testing::SyntheticModel;
using ::testing::ElementsAre;

LayerShape shape_of(int H, int HV, int K, int V, Gate gate) { return {H, HV, K, V, gate}; }

const std::vector<LayerShape> kShapes = {
    shape_of(1, 1, 16, 32, Gate::kScalar), shape_of(2, 4, 32, 16, Gate::kScalar),
    shape_of(1, 2, 24, 8, Gate::kChannel), shape_of(2, 2, 8, 24, Gate::kChannel)};

using Key = std::tuple<int, int, std::int64_t>;  // layer, head, index

struct Visits {
  std::mutex mutex;
  std::map<Key, std::vector<float>> states;
  std::vector<Key> order;
  const std::vector<LayerShape>* shapes = nullptr;

  Collector::StateVisitor visitor() {
    return [this](int layer, int head, std::int64_t index, const float* X) {
      const LayerShape& shape = (*shapes)[layer];
      const std::lock_guard lock(mutex);
      order.emplace_back(layer, head, index);
      states[order.back()].assign(X, X + shape.K * shape.V);
    };
  }
};

// Everything the collector reports, against a token loop in double that knows no chunks.
void check_against_token_loop(const std::vector<int>& chunks,
                              const std::vector<std::vector<std::int32_t>>& segments) {
  SyntheticModel model{kShapes, chunks};
  std::int64_t n_updates = 0;
  for (const auto& segment : segments) n_updates += static_cast<std::int64_t>(segment.size());
  std::vector<std::int64_t> every(static_cast<std::size_t>(n_updates));
  std::iota(every.begin(), every.end(), 1);

  Visits visits;
  visits.shapes = &kShapes;
  Collector collector(kShapes, 2, std::vector(kShapes.size(), every), visits.visitor(), true);
  ThreadPool threads(2);
  std::int64_t first = 1;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    collector.begin_segment(static_cast<int>(s % 2), first);
    model.prefill(segments[s], collector, threads);
    first += static_cast<std::int64_t>(segments[s].size());
  }
  ASSERT_TRUE(collector.end_segment().ok());

  for (int l = 0; l < static_cast<int>(kShapes.size()); ++l) {
    const LayerShape& shape = kShapes[l];
    const int K = shape.K, V = shape.V, width = shape.gate_width();
    for (int head = 0; head < shape.n_value_heads; ++head) {
      std::vector<std::vector<double>> omega(2, std::vector<double>(K)), ell = omega;
      std::vector<std::int64_t> n_tokens(2);
      std::int64_t update = 0;
      for (std::size_t s = 0; s < segments.size(); ++s) {
        const auto in = model.inputs(l, segments[s]);
        const auto n = static_cast<std::int64_t>(segments[s].size());
        const auto run = model.trace(l, head, in, n);
        n_tokens[s % 2] += n;
        std::vector<double> magnitude(static_cast<std::size_t>(K * V), 0.0);
        for (std::int64_t t = 0; t < n; ++t, ++update) {
          const float* q = in.q.data() + t * in.qk_stride + shape.key_head(head) * K;
          const float* k = in.k.data() + t * in.qk_stride + shape.key_head(head) * K;
          const float* g = in.g.data() + t * in.g_stride + head * width;
          const double beta = in.beta[t * in.beta_stride + head];
          const auto decay = [&](int i) { return std::exp(double{g[width == 1 ? 0 : i]}); };
          double kq = 0;
          for (int i = 0; i < K; ++i) kq += double{k[i]} * q[i];
          for (int i = 0; i < K; ++i) {
            const double read = decay(i) * (q[i] - beta * k[i] * kq);
            omega[s % 2][i] += read * read;
          }
          for (int i = 0; i < width; ++i) ell[s % 2][i] += g[i];

          // f32 sums of at most 64 products and one carried state: each term is rounded a few
          // times.
          const auto& X = visits.states.at({l, head, update});
          for (int i = 0; i < K; ++i) {
            for (int j = 0; j < V; ++j) {
              double& m = magnitude[i * V + j];
              m = decay(i) * m + std::abs(double{k[i]} * run.u[t * V + j]);
              ASSERT_NEAR(X[i * V + j], run.S[t + 1][i * V + j], 72 * 0x1p-23 * m + 1e-30)
                  << "layer " << l << " head " << head << " update " << update + 1;
            }
          }
        }
      }
      for (int d = 0; d < 2; ++d) {
        const ReadStatistics& sums = collector.statistics(l, d);
        EXPECT_EQ(sums.n_tokens[head], n_tokens[d]);
        for (int i = 0; i < K; ++i) {
          EXPECT_NEAR(sums.omega[head * K + i], omega[d][i], 1e-12 * omega[d][i]);
        }
        for (int i = 0; i < width; ++i) {
          EXPECT_NEAR(sums.log_decay[head * width + i], ell[d][i], -1e-12 * ell[d][i]);
        }
      }
    }
  }
}

TEST(Collector, EqualsATokenLoopAtEveryUpdate) {
  check_against_token_loop({64}, {random_tokens(150, 1), random_tokens(64, 2)});
}

TEST(Collector, AnyChunksAndSegments) {
  check_against_token_loop({1, 64, 7, 2, 33}, {random_tokens(130, 3), random_tokens(1, 4),
                                               random_tokens(40, 5), random_tokens(9, 6)});
  check_against_token_loop({1}, {random_tokens(20, 7)});
}

TEST(Collector, VisitsOnlyWhatWasAskedInOrderForEachHead) {
  SyntheticModel model{kShapes, {64}};
  std::vector<std::vector<std::int64_t>> updates = {{8, 64, 65, 200}, {}, {1, 128}, {129}};
  Visits visits;
  visits.shapes = &kShapes;
  Collector collector(kShapes, 1, updates, visits.visitor(), true);
  ThreadPool threads(2);
  collector.begin_segment(0, 1);
  model.prefill(random_tokens(128, 1), collector, threads);
  collector.begin_segment(0, 129);
  model.prefill(random_tokens(100, 2), collector, threads);

  std::map<std::pair<int, int>, std::vector<std::int64_t>> seen;
  for (const auto& [layer, head, index] : visits.order) seen[{layer, head}].push_back(index);
  EXPECT_EQ(seen.size(), 1u + 2u + 2u);
  EXPECT_THAT((seen[{0, 0}]), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT((seen[{2, 1}]), ElementsAre(0, 1));
  EXPECT_THAT((seen[{3, 0}]), ElementsAre(0));
  // Update 129 is the first of the second segment: one write into a zero state.
  const auto run = model.trace(3, 0, model.inputs(3, random_tokens(100, 2)), 1);
  for (std::size_t i = 0; i < run.S[1].size(); ++i) {
    EXPECT_NEAR((visits.states[{3, 0, 0}][i]), run.S[1][i], 1e-6 * std::abs(run.S[1][i]) + 1e-30);
  }
}

TEST(Collector, ASecondRunWithoutStatisticsSeesTheSameStates) {
  SyntheticModel model{kShapes, {64}};
  const std::vector<std::vector<std::int64_t>> updates(kShapes.size(), {8, 24, 72, 120});
  Visits with, without;
  with.shapes = without.shapes = &kShapes;
  Collector first(kShapes, 1, updates, with.visitor(), true);
  Collector second(kShapes, 1, updates, without.visitor(), false);
  ThreadPool one(1), two(2);
  model.prefill(random_tokens(128, 9), first, two);
  model.prefill(random_tokens(128, 9), second, one);
  EXPECT_EQ(with.states, without.states);
  EXPECT_EQ(second.statistics(0, 0).n_tokens[0], 0);
}

// Gates so strong that exp(G) underflows: differences of totals would give Inf - Inf or lose all.
TEST(Collector, VeryFastDecay) {
  const LayerShape shape = shape_of(1, 1, 2, 3, Gate::kChannel);
  const std::vector<float> k = {1, 0.5f, 0.5f, -1, 0.25f, 1}, q(6, 0.1f), beta(3, 0.5f);
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> g = {-80, -1e-3f, -80, -inf, -0.5f, -1e-3f};
  const std::vector<float> d = {1, 2, 3, 4, 5, 6, 7, 8, 9}, before(6, 1e30f), after(6, 0);
  ChunkView chunk;
  chunk.n_tokens = 3;
  chunk.q = q.data(), chunk.k = k.data(), chunk.qk_stride = 2;
  chunk.g = g.data(), chunk.g_stride = 2;
  chunk.beta = beta.data(), chunk.beta_stride = 1;
  chunk.d = d.data(), chunk.S_before = before.data(), chunk.S_after = after.data();
  std::vector<float> X(6);
  state_inside_chunk(chunk, shape, 1, X.data());
  // Row 0: 1e30 e^-160 is nothing beside k d. Row 1: the -inf gate forgets all but the last write.
  EXPECT_THAT(X, ElementsAre(2, 2.5f, 3, -4, -5, -6));
}

TEST(Collector, ReportsAStateThatIsNotFinite) {
  const LayerShape shape = shape_of(1, 1, 1, 2, Gate::kScalar);
  const std::vector<float> one(2, 1.0f);
  const std::vector<float> bad = {1, std::numeric_limits<float>::quiet_NaN()};
  const float g = -1;
  ChunkView chunk;
  chunk.n_tokens = 1;
  chunk.q = chunk.k = chunk.beta = chunk.d = chunk.S_before = one.data();
  chunk.g = &g;
  chunk.S_after = bad.data();
  int n_visits = 0;
  const auto count = [&](int, int, std::int64_t, const float*) { ++n_visits; };
  Collector unseen({shape}, 1, {{2}}, count, true);
  unseen.on_chunk(chunk);
  EXPECT_TRUE(unseen.end_segment().ok());
  Collector seen({shape}, 1, {{1}}, count, true);
  seen.on_chunk(chunk);
  EXPECT_EQ(seen.end_segment().code(), Code::kNotFinite);
  EXPECT_EQ(n_visits, 0);
}

TEST(Draw, MultiplesAreDistinctAscendingAndInRange) {
  const auto drawn = draw_multiples(1, 65'536, 8, 64, 0);
  ASSERT_EQ(drawn.size(), 64u);
  EXPECT_TRUE(std::is_sorted(drawn.begin(), drawn.end()));
  EXPECT_EQ(std::adjacent_find(drawn.begin(), drawn.end()), drawn.end());
  for (auto update : drawn) {
    EXPECT_EQ(update % 8, 0);
    EXPECT_TRUE(update >= 8 && update <= 65'536);
  }
  EXPECT_EQ(drawn, draw_multiples(1, 65'536, 8, 64, 0));
  EXPECT_NE(drawn, draw_multiples(1, 65'536, 8, 64, 1));
  EXPECT_THAT(draw_multiples(9, 40, 8, 64, 0), ElementsAre(16, 24, 32, 40));
  EXPECT_THAT(draw_multiples(9, 15, 8, 64, 0), ElementsAre());
}

// Each of 20 candidates is drawn with chance 5/20: 4000 draws give 1000 +- 6 sigma (27.4 each).
TEST(Draw, MultiplesAreUniform) {
  std::vector<int> count(20);
  for (std::uint64_t seed = 0; seed < 4000; ++seed) {
    const auto drawn = draw_multiples(1, 20, 1, 5, derive_seed(7, seed));
    EXPECT_EQ(drawn.size(), 5u);
    for (auto update : drawn) ++count[update - 1];
  }
  for (int n : count) EXPECT_NEAR(n, 1000, 165);
}

TEST(Draw, StartsCoverTheWholeText) {
  const auto starts = draw_starts(110, 100, 2000, 0);
  EXPECT_EQ(*std::min_element(starts.begin(), starts.end()), 0);
  EXPECT_EQ(*std::max_element(starts.begin(), starts.end()), 10);
  EXPECT_THAT(draw_starts(100, 100, 3, 5), ElementsAre(0, 0, 0));
}

}  // namespace
}  // namespace statepack
