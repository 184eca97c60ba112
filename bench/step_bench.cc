// Step and flush of one recurrent layer by scheme, gate and batch. Batches run on pools larger than
// the last-level cache, one sequence alone on a pool of one. Every benchmark reports
//
// - ns_per_head: wall time of one head of one sequence, all threads at work together
// - median_cpu_ns, best_cpu_ns: processor time of a head in the median and in the fastest
// iteration,
//   threads added up: what a machine that other programs use shows best
// - bytes: what a head must move, its page and the records of its window and what is written
// - GB/s: bytes over wall time
// - of_ceiling: GB/s over what this machine reaches on the same threads, the read stream for packed
//   states, the read-and-write stream for states that every step rewrites
//
// and, as its label, a digest of the outputs. encode/, decode/ and read/ time the codec alone on
// one head in cache. compare.py sets two JSON files side by side.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.hpp"
#include "base/thread_pool.hpp"
#include "delta/step.hpp"
#include "pool/pool.hpp"
#include "scheme/config.hpp"
#include "scheme/layers.hpp"

namespace statepack {
namespace {

constexpr int kLayers = 6;                                  // of the demo model
constexpr std::int64_t kMinCold = std::int64_t{640} << 20;  // bytes of state that no cache holds

LayerShape layer_shape(Gate gate) { return {2, 4, 128, 128, gate}; }

template <class T>
T take(Result<T> result) {
  if (result.ok()) return std::move(result).value();
  std::fprintf(stderr, "%s\n", result.status().message().c_str());
  std::exit(1);
}

ThreadPool& threads() {
  static ThreadPool pool;
  return pool;
}

// ---------------------------------------------------------------------------------------------
// Ceilings

struct Ceilings {
  double read = 0, update = 0;  // bytes a second
};

float sum_stream(const float* x, std::int64_t n) {
  float lanes[64] = {};
  for (std::int64_t i = 0; i < n; i += 64) {
    for (int l = 0; l < 64; ++l) lanes[l] += x[i + l];
  }
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

void scale_stream(float* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] *= 0.999f;
}

/// Median rates over passes that go through memory in pieces of a head's size, as a step does.
const Ceilings& ceilings() {
  static const Ceilings measured = [] {
    constexpr std::int64_t kPiece = 128 * 128, kPieces = kMinCold / (4 * kPiece);
    constexpr int kPasses = 7;
    std::vector<float> memory(static_cast<std::size_t>(kPieces * kPiece), 1.0f);
    const auto rate = [&](auto&& fn, double bytes) {
      std::vector<double> seconds;
      for (int pass = 0; pass < kPasses; ++pass) {
        const auto start = std::chrono::steady_clock::now();
        threads().parallel_for(kPieces, [&](std::int64_t i, int) { fn(&memory[i * kPiece]); });
        seconds.push_back(
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      }
      std::nth_element(seconds.begin(), seconds.begin() + kPasses / 2, seconds.end());
      return bytes / seconds[kPasses / 2];
    };
    const double n_bytes = 4.0 * static_cast<double>(kPieces * kPiece);
    Ceilings c;
    c.read = rate([](float* x) { benchmark::DoNotOptimize(sum_stream(x, kPiece)); }, n_bytes);
    c.update = rate([](float* x) { scale_stream(x, kPiece); }, 2 * n_bytes);
    return c;
  }();
  return measured;
}

// ---------------------------------------------------------------------------------------------
// A pool in the middle of decoding

/// The demo model's plan where one fits; else widths 4, 6 and 8 spread over rows, mean 6.
std::unique_ptr<Plan> plan_for(const Scheme& scheme, const std::vector<LayerShape>& shapes) {
  if (!scheme.needs_plan()) return nullptr;
  if (shapes[0].gate == Gate::kScalar) {
    std::string arg = scheme.codec_arg;
    std::replace(arg.begin(), arg.end(), '/', '-');
    return std::make_unique<Plan>(take(Plan::load(SP_SOURCE_DIR "/models/statepack-gdn/plans/" +
                                                  scheme.codec + "-" + arg + ".safetensors")));
  }
  auto plan = std::make_unique<Plan>();
  plan->kind = std::string(take(codec_config(scheme)).info->plan_kind(take(codec_config(scheme))));
  plan->scheme = scheme.codec + ":" + scheme.codec_arg;
  plan->shapes = shapes;
  for (const LayerShape& shape : shapes) {
    LayerPlan layer;
    for (int i = 0; i < shape.n_value_heads * shape.K; ++i) {
      layer.bits.push_back(static_cast<std::uint8_t>(4 + 2 * (i % 3)));
      layer.row_weight.push_back(1.0f);
      layer.row_scale.push_back(1.0f);
    }
    for (int h = 0; h < shape.n_value_heads; ++h) layer.high.push_back(h % 4 == 0);
    plan->layers.push_back(std::move(layer));
  }
  return plan;
}

/// Random tokens with unit keys and gates of half-lives from 7 to 700 tokens.
struct Tokens {
  Tokens(const LayerShape& s, std::int64_t n_rows) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& x, std::int64_t n, auto&& next) {
      x.resize(static_cast<std::size_t>(n));
      for (float& value : x) value = next();
    };
    const float unit = 1 / std::sqrt(static_cast<float>(s.K));
    fill(q, n_rows * s.n_key_heads * s.K, [&] { return normal(random) * unit * unit; });
    fill(k, n_rows * s.n_key_heads * s.K, [&] { return normal(random) * unit; });
    fill(v, n_rows * s.n_value_heads * s.V, [&] { return normal(random); });
    fill(g, n_rows * s.n_value_heads * s.gate_width(),
         [&] { return -0.1f * std::exp(-2.3f * std::fabs(normal(random))); });
    fill(beta, n_rows * s.n_value_heads, [&] { return 0.5f; });
    out.resize(v.size());
  }
  std::vector<float> q, k, v, g, beta, out;
};

class Decoding {
 public:
  Decoding(const Scheme& scheme, Gate gate, std::int64_t n_rows)
      : shape_(layer_shape(gate)), n_rows_(n_rows), tokens_(shape_, n_rows) {
    const std::vector<LayerShape> shapes(kLayers, shape_);
    const auto plan = plan_for(scheme, shapes);
    auto compiled = take(CompiledScheme::make(scheme, shapes, plan.get(), ""));
    const SchemeBits bits = compiled->bits();
    page_bytes_ = static_cast<double>(bits.page_bytes) / kLayers / shape_.n_value_heads;
    window_bytes_ = static_cast<double>(bits.window_bytes) / kLayers / shape_.n_value_heads;
    period_ = scheme.period;

    const std::int64_t per_slot = StatePool::bytes_per_slot(*compiled, 0);
    // One sequence keeps what caches it has; batches never meet a state that is still warm.
    if (n_rows > 1) n_groups_ = (kMinCold + n_rows * per_slot - 1) / (n_rows * per_slot);
    pool_ = take(StatePool::create(compiled, {.n_slots = n_groups_ * n_rows}));
    fill_slots();
    stagger();
    for (int token = 0; token < std::max(2, period_); ++token) {
      for (std::int64_t group = 0; group < n_groups_; ++group) {
        for (int layer = 0; layer < kLayers; ++layer) step_once(layer, group);
        if (group == 0) digest_ = to_hex(xxh3_128(std::as_bytes(std::span(tokens_.out))));
      }
    }
  }

  /// The next layer of the next sequences, in the order in which a decoder meets them. One sequence
  /// alone: a whole window, so that every iteration flushes as often as the next.
  void step_next() {
    for (int i = 0; i < steps_an_iteration(); ++i, ++at_) {
      step_once(static_cast<int>(at_ % kLayers), at_ / kLayers % n_groups_);
    }
  }
  int steps_an_iteration() const { return n_rows_ == 1 ? kLayers * period_ : 1; }

  /// Rounds windows that lack one record.
  void flush_next() {
    const LayerState state = pool_->layer(static_cast<int>(at_ % kLayers));
    const std::vector<std::int64_t> slots = group_slots(at_ / kLayers % n_groups_);
    for (const std::int64_t slot : slots) cursor(state, slot) = Cursor{period_ - 1, 0};
    check(flush(state, slots, threads()));
    ++at_;
  }

  std::int64_t n_heads() const { return n_rows_ * shape_.n_value_heads; }
  const std::string& digest() const { return digest_; }
  int period() const { return period_; }
  /// Bytes of one head in a step, averaged over the phases of a window.
  double step_bytes() const {
    if (period_ == 1) return 2 * page_bytes_;
    const double record = window_bytes_ / period_;
    return page_bytes_ + record * (period_ - 1) / 2 + record + page_bytes_ / period_;
  }
  double flush_bytes() const { return 2 * page_bytes_ + window_bytes_; }

 private:
  static void check(const Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::exit(1);
  }

  static Cursor& cursor(const LayerState& state, std::int64_t slot) {
    return *reinterpret_cast<Cursor*>(reinterpret_cast<std::uint8_t*>(state.cursors) +
                                      slot * state.cursor_stride);
  }

  std::vector<std::int64_t> group_slots(std::int64_t group) const {
    std::vector<std::int64_t> slots;
    for (std::int64_t i = 0; i < n_rows_; ++i) slots.push_back(1 + group * n_rows_ + i);
    return slots;
  }

  // One random state in every slot: memory that was never written would all be one page of zeros.
  void fill_slots() {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    std::vector<float> S(static_cast<std::size_t>(shape_.n_values()));
    for (float& x : S) x = normal(random);
    for (std::int64_t i = 0; i < pool_->n_slots(); ++i) {
      const std::int64_t slot = take(pool_->alloc());
      for (int layer = 0; i == 0 && layer < kLayers; ++layer) {
        check(hand_over(pool_->layer(layer), slot, S.data(), 0, threads()));
      }
      if (i > 0) check(pool_->copy(1, slot));
    }
  }

  // Windows end at different tokens, as those of independent sequences do.
  void stagger() {
    if (period_ == 1) return;
    for (int layer = 0; layer < kLayers; ++layer) {
      const LayerState state = pool_->layer(layer);
      for (std::int64_t slot = 1; slot <= pool_->n_slots(); ++slot) {
        cursor(state, slot) = Cursor{0, static_cast<std::int32_t>(1 + slot % period_)};
      }
    }
  }

  void step_once(int layer, std::int64_t group) {
    const std::vector<std::int64_t> slots = group_slots(group);
    StepInput in;
    in.n_rows = static_cast<int>(n_rows_);
    in.read_slots = slots.data();
    in.q = tokens_.q.data(), in.k = tokens_.k.data(), in.v = tokens_.v.data();
    in.g = tokens_.g.data(), in.beta = tokens_.beta.data(), in.out = tokens_.out.data();
    in.q_stride = in.k_stride = std::int64_t{shape_.n_key_heads} * shape_.K;
    in.v_stride = in.out_stride = std::int64_t{shape_.n_value_heads} * shape_.V;
    in.g_stride = std::int64_t{shape_.n_value_heads} * shape_.gate_width();
    in.beta_stride = shape_.n_value_heads;
    check(step(pool_->layer(layer), in, threads()));
  }

  LayerShape shape_;
  std::int64_t n_rows_, n_groups_ = 1, at_ = 0;
  int period_ = 1;
  double page_bytes_ = 0, window_bytes_ = 0;  // of one head
  std::string digest_;
  Tokens tokens_;
  std::unique_ptr<StatePool> pool_;
};

double process_seconds() {
  std::timespec now;
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Runs the loop of a benchmark; reports the processor time of the median and of the fastest
/// iteration for each of the `heads` that one goes through.
template <class Fn>
void measure(benchmark::State& state, double heads, Fn&& fn) {
  std::vector<double> seconds;
  for (auto _ : state) {
    const double start = process_seconds();
    fn();
    seconds.push_back(process_seconds() - start);
  }
  if (seconds.empty()) return;
  std::sort(seconds.begin(), seconds.end());
  state.counters["median_cpu_ns"] = 1e9 * seconds[seconds.size() / 2] / heads;
  state.counters["best_cpu_ns"] = 1e9 * seconds.front() / heads;
}

void report(benchmark::State& state, const Decoding& decoding, double heads, double bytes,
            double ceiling) {
  using benchmark::Counter;
  const double n = static_cast<double>(state.iterations()) * heads;
  state.counters["ns_per_head"] = Counter(n * 1e-9, Counter::kIsRate | Counter::kInvert);
  state.counters["bytes"] = bytes;
  state.counters["GB/s"] = Counter(n * bytes * 1e-9, Counter::kIsRate);
  state.counters["of_ceiling"] = Counter(n * bytes / ceiling, Counter::kIsRate);
  state.SetLabel(decoding.digest());
}

void step_bench(benchmark::State& state, const Scheme& scheme, Gate gate) {
  Decoding decoding(scheme, gate, state.range(0));
  const Ceilings& limit = ceilings();
  const double heads = static_cast<double>(decoding.n_heads() * decoding.steps_an_iteration());
  measure(state, heads, [&] { decoding.step_next(); });
  report(state, decoding, heads, decoding.step_bytes(),
         decoding.period() == 1 ? limit.update : limit.read);
}

void flush_bench(benchmark::State& state, const Scheme& scheme, Gate gate) {
  Decoding decoding(scheme, gate, state.range(0));
  const Ceilings& limit = ceilings();
  const double heads = static_cast<double>(decoding.n_heads());
  measure(state, heads, [&] { decoding.flush_next(); });
  report(state, decoding, heads, decoding.flush_bytes(), limit.update);
}

/// The codec alone, on one head that stays in the caches of one thread: encode, decode, or both
/// reads of a step out of packed bytes.
void codec_bench(benchmark::State& state, const Scheme& scheme, Gate gate, char what) {
  const LayerShape shape = layer_shape(gate);
  const std::vector<LayerShape> shapes(kLayers, shape);
  const auto plan = plan_for(scheme, shapes);
  const auto compiled = take(CompiledScheme::make(scheme, shapes, plan.get(), ""));
  const LayerCodec& codec = *compiled->layers()[1].codec;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto values = [&](int n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) v = normal(random);
    return x;
  };
  const std::vector<float> X = values(shape.K * shape.V), a = values(shape.K), b = values(shape.K);
  std::vector<float> restored(X.size()), p(static_cast<std::size_t>(shape.V)), r = p;
  std::vector<std::uint8_t> page(static_cast<std::size_t>(codec.page_bytes()));
  std::vector<std::byte> scratch(codec.scratch_bytes());
  codec.encode(0, X.data(), page.data(), {}, {scratch});
  const auto once = [&] {
    switch (what) {
      case 'e':
        codec.encode(0, X.data(), page.data(), {}, {scratch});
        return true;
      case 'd':
        codec.decode(0, page.data(), restored.data(), {scratch});
        return true;
      default:
        return codec.read_two(0, page.data(), a.data(), b.data(), p.data(), r.data(), {scratch});
    }
  };
  if (!once()) return state.SkipWithError("no pass over packed bytes");
  constexpr int kRepeats = 64;  // the clock takes a while, too
  measure(state, kRepeats, [&] {
    for (int i = 0; i < kRepeats; ++i) once();
    benchmark::ClobberMemory();
  });
  state.SetLabel(to_hex(xxh3_128(std::as_bytes(std::span(page)))));
}

/// Every codec and argument as it is kept by default, and once more in windows of 16.
std::vector<std::string> scheme_names() {
  std::vector<std::string> names;
  for (const CodecInfo* info : all_codecs()) {
    std::vector<std::string> heads;
    for (const std::string_view arg : info->args) {
      heads.push_back(std::string(info->name) + ":" + std::string(arg));
    }
    if (heads.empty()) heads.emplace_back(info->name);
    for (const std::string& head : heads) {
      names.push_back(head);
      if (take(Scheme::parse(head)).period == 1) names.push_back(head + ",period=16");
    }
  }
  return names;
}

void register_all() {
  for (const std::string& name : scheme_names()) {
    const Scheme scheme = take(Scheme::parse(name));
    for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
      const std::string suffix = name + (gate == Gate::kScalar ? "/scalar" : "/channel");
      const auto config = [](benchmark::internal::Benchmark* bench) {
        // Processor time of all threads beside wall time: a busy machine disturbs it less.
        bench->ArgName("rows")->MeasureProcessCPUTime()->UseRealTime()->Unit(
            benchmark::kMicrosecond);
      };
      config(benchmark::RegisterBenchmark(("step/" + suffix).c_str(), step_bench, scheme, gate)
                 ->Arg(1)
                 ->Arg(64)
                 ->Arg(512));
      for (const auto& [kind, what] :
           {std::pair{"encode/", 'e'}, {"decode/", 'd'}, {"read/", 'r'}}) {
        benchmark::RegisterBenchmark((kind + suffix).c_str(), codec_bench, scheme, gate, what);
      }
      if (scheme.period == 1) continue;
      config(benchmark::RegisterBenchmark(("flush/" + suffix).c_str(), flush_bench, scheme, gate)
                 ->Arg(64));
    }
  }
}

}  // namespace
}  // namespace statepack

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  const statepack::Ceilings& limit = statepack::ceilings();
  benchmark::AddCustomContext("threads", std::to_string(statepack::threads().n_threads()));
  benchmark::AddCustomContext("read_GB/s", std::to_string(limit.read * 1e-9));
  benchmark::AddCustomContext("update_GB/s", std::to_string(limit.update * 1e-9));
  statepack::register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
