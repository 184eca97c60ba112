// One layer of slots without a pool, and streams of random tokens.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "delta/ref.hpp"
#include "delta/step.hpp"
#include "scheme/config.hpp"

namespace statepack::test {

inline constexpr LayerShape kGrouped{2, 4, 32, 64, Gate::kScalar};

inline LayerShape shape(int H, int HV, int K, int V, Gate gate = Gate::kScalar) {
  return {H, HV, K, V, gate};
}

/// A well-conditioned M for each key head, of halves.
inline std::vector<float> any_transform(const LayerShape& s) {
  std::vector<float> M;
  std::mt19937 random(1);
  std::uniform_int_distribution<int> eighths(-8, 8);
  for (int h = 0; h < s.n_key_heads; ++h) {
    for (int i = 0; i < s.K; ++i) {
      for (int j = 0; j < s.K; ++j) {
        M.push_back(0.125f * static_cast<float>(eighths(random)) + (i == j ? 8.0f : 0.0f));
      }
    }
  }
  return M;
}

/// A plan entry for a codec: widths by head, a quarter of the heads high, no transform.
inline LayerPlan any_plan(const LayerShape& s, const CodecConfig& config) {
  constexpr std::uint8_t kWidths[] = {6, 4, 8, 16};
  constexpr std::uint8_t kRowWidths[] = {4, 6, 8, 5, 8};
  const bool by_row = config.info->plan_kind(config) == "klt";
  LayerPlan plan;
  for (int h = 0; h < s.n_value_heads; ++h) {
    for (int i = 0; i < s.K; ++i) {
      const int unit = s.gate == Gate::kScalar ? h : h + i;
      plan.bits.push_back(by_row ? kRowWidths[(h + i) % 5] : kWidths[unit % 4]);
      plan.row_weight.push_back(0.5f + 0.125f * static_cast<float>(i % 9));
      plan.row_scale.push_back(0.5f + 0.125f * static_cast<float>(i % 9));
    }
    plan.high.push_back(h % 4 == 1);
  }
  return plan;
}

inline Scheme parse(std::string_view name) {
  auto scheme = Scheme::parse(name);
  EXPECT_TRUE(scheme.ok()) << scheme.status().message();
  return *scheme;
}

/// Memory starts full of 0xFF bytes (NaN in every float format) except pages, which a pool zeroes.
struct OneLayer {
  OneLayer(const Scheme& s, const LayerShape& layer_shape, std::int64_t slots,
           std::unique_ptr<LayerCodec> codec = nullptr)
      : scheme(s), n_slots(slots) {
    layer.shape = layer_shape;
    if (codec == nullptr) {
      const auto config = codec_config(scheme);
      const LayerPlan plan = any_plan(layer_shape, *config);
      auto made = config->info->make(*config, layer_shape, &plan);
      EXPECT_TRUE(made.ok()) << s.name() << ": " << made.status().message();
      codec = std::move(*made);
    }
    layer.codec = std::move(codec);
    layer.window = WindowLayout(layer_shape, scheme.records, scheme.mode,
                                scheme.period > 1 ? scheme.period : 0);
    page_stride = (layer.codec->page_bytes() + 15) / 16 * 16 + 48;
    window_stride = layer.window.n_bytes() + 32;
    pages.resize(static_cast<std::size_t>(slots * page_stride) + 16, 0);
    windows.resize(static_cast<std::size_t>(slots * window_stride) + 16, 0xff);
    cursors.resize(static_cast<std::size_t>(slots));
    faults.resize(static_cast<std::size_t>(slots), 0);
  }
  OneLayer(std::string_view name, const LayerShape& layer_shape, std::int64_t slots)
      : OneLayer(parse(name), layer_shape, slots) {}

  static std::uint8_t* aligned(std::vector<std::uint8_t>& bytes) {
    return bytes.data() + (16 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 16) % 16;
  }
  LayerState state() {
    LayerState s;
    s.layer = &layer;
    s.scheme = &scheme;
    s.n_slots = n_slots;
    s.pages = aligned(pages);
    s.page_stride = page_stride;
    s.windows = aligned(windows);
    s.window_stride = window_stride;
    s.cursors = cursors.data();
    s.cursor_stride = sizeof(Cursor);
    s.faults = faults.data();
    s.fault_stride = sizeof(std::uint32_t);
    return s;
  }
  /// All that a slot owns, for comparing; without the stale end of its window.
  std::vector<std::uint8_t> slot_bytes(std::int64_t slot) {
    std::vector<std::uint8_t> bytes;
    const std::uint8_t* page = aligned(pages) + slot * page_stride;
    const std::uint8_t* window = aligned(windows) + slot * window_stride;
    bytes.insert(bytes.end(), page, page + layer.codec->page_bytes());
    bytes.insert(bytes.end(), window, window + layer.window.n_bytes());
    const auto* cursor =
        reinterpret_cast<const std::uint8_t*>(&cursors[static_cast<std::size_t>(slot)]);
    bytes.insert(bytes.end(), cursor, cursor + sizeof(Cursor));
    return bytes;
  }
  const std::uint8_t* page(std::int64_t slot) { return aligned(pages) + slot * page_stride; }

  Scheme scheme;
  CompiledLayer layer;
  std::int64_t n_slots, page_stride = 0, window_stride = 0;
  std::vector<std::uint8_t> pages, windows;
  std::vector<Cursor> cursors;
  std::vector<std::uint32_t> faults;
};

/// One token of `n_rows` rows.
struct Batch {
  LayerShape shape;
  int n_rows = 0;
  std::vector<float> q, k, v, g, beta, out;
  std::vector<std::int64_t> slots;

  Batch(const LayerShape& s, int rows) : shape(s), n_rows(rows) {
    const auto sized = [&](int per_row) {
      return std::vector<float>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(per_row));
    };
    q = sized(s.n_key_heads * s.K), k = sized(s.n_key_heads * s.K);
    v = sized(s.n_value_heads * s.V), out = sized(s.n_value_heads * s.V);
    g = sized(s.n_value_heads * s.gate_width()), beta = sized(s.n_value_heads);
    std::fill(out.begin(), out.end(), std::nanf(""));
    for (int i = 0; i < rows; ++i) slots.push_back(i + 1);
  }
  StepInput input() {
    StepInput in;
    in.n_rows = n_rows;
    in.read_slots = slots.data();
    in.q = q.data(), in.k = k.data(), in.v = v.data(), in.g = g.data(), in.beta = beta.data();
    in.q_stride = in.k_stride = shape.n_key_heads * shape.K;
    in.v_stride = in.out_stride = shape.n_value_heads * shape.V;
    in.g_stride = shape.n_value_heads * shape.gate_width();
    in.beta_stride = shape.n_value_heads;
    in.out = out.data();
    return in;
  }
  /// Row `row` of this batch as a batch of one.
  Batch row(int index) const {
    Batch one(shape, 1);
    const auto cut = [&](const std::vector<float>& from, std::vector<float>& to) {
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(to.size()) * index, to.size(),
                  to.begin());
    };
    cut(q, one.q), cut(k, one.k), cut(v, one.v), cut(g, one.g), cut(beta, one.beta);
    one.slots[0] = slots[static_cast<std::size_t>(index)];
    return one;
  }
};

/// Tokens like a trained layer's: unit keys, queries scaled by K^-1/2, a few loud value channels,
/// and decays of very different speed (head 0 never decays, head 1 forgets at once now and then).
class Stream {
 public:
  explicit Stream(unsigned seed) : random_(seed) {}

  float normal() { return normal_(random_); }
  float uniform() { return uniform_(random_); }

  void fill(Batch& batch) {
    const LayerShape& s = batch.shape;
    for (int row = 0; row < batch.n_rows; ++row) {
      for (int h = 0; h < s.n_key_heads; ++h) {
        const std::size_t at = static_cast<std::size_t>((row * s.n_key_heads + h) * s.K);
        unit(&batch.k[at], s.K, 1.0f);
        unit(&batch.q[at], s.K, 1.0f / std::sqrt(static_cast<float>(s.K)));
      }
      for (int h = 0; h < s.n_value_heads; ++h) {
        const std::size_t at = static_cast<std::size_t>(row * s.n_value_heads + h);
        for (int j = 0; j < s.V; ++j) {
          batch.v[at * static_cast<std::size_t>(s.V) + static_cast<std::size_t>(j)] =
              normal() * (j % 29 == 3 ? 9.0f : 1.0f);
        }
        for (int i = 0; i < s.gate_width(); ++i) {
          float g = -0.02f * uniform() * static_cast<float>(1 + (h + i) % 5);
          if (h % 4 == 0 && i % 3 == 0) g = 0;
          if (h % 4 == 1 && uniform() < 0.05f) g = -30;
          batch.g[at * static_cast<std::size_t>(s.gate_width()) + static_cast<std::size_t>(i)] = g;
        }
        batch.beta[at] = uniform();
      }
    }
  }

 private:
  void unit(float* x, int n, float length) {
    float sum = 0;
    for (int i = 0; i < n; ++i) {
      x[i] = normal();
      sum += x[i] * x[i];
    }
    for (int i = 0; i < n; ++i) x[i] *= length / std::sqrt(sum + 1e-6f);
  }
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::uniform_real_distribution<float> uniform_;
};

/// The recurrence in double for every row and value head of a batch; states start at zero.
class Reference {
 public:
  Reference(const LayerShape& s, int n_rows)
      : shape_(s), S(static_cast<std::size_t>(n_rows * s.n_values()), 0.0) {}

  /// Advances all rows; returns the outputs [B, HV, V].
  std::vector<double> step(const Batch& batch) {
    const LayerShape& s = shape_;
    std::vector<double> out(batch.out.size());
    std::vector<double> u(static_cast<std::size_t>(s.V));
    const auto wide = [](const std::vector<float>& x, std::int64_t at, int n) {
      return std::vector<double>(x.begin() + at, x.begin() + at + n);
    };
    for (int row = 0; row < batch.n_rows; ++row) {
      for (int h = 0; h < s.n_value_heads; ++h) {
        const std::int64_t head = std::int64_t{row} * s.n_value_heads + h;
        const std::int64_t key = (std::int64_t{row} * s.n_key_heads + s.key_head(h)) * s.K;
        ref::delta_step(s.K, s.V, s.gate, &S[static_cast<std::size_t>(head * s.K * s.V)],
                        wide(batch.q, key, s.K).data(), wide(batch.k, key, s.K).data(),
                        wide(batch.v, head * s.V, s.V).data(),
                        wide(batch.g, head * s.gate_width(), s.gate_width()).data(),
                        batch.beta[static_cast<std::size_t>(head)],
                        &out[static_cast<std::size_t>(head * s.V)], u.data());
      }
    }
    return out;
  }

 private:
  LayerShape shape_;

 public:
  std::vector<double> S;  ///< [B][HV][K][V]
};

/// |a - b| / |b| over everything.
template <class A, class B>
double relative_error(const A& a, const B& b) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    error += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

/// Bit for bit, NaN equal to itself.
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline std::vector<float> dense(OneLayer& layer, std::int64_t slot, ThreadPool& threads) {
  std::vector<float> S(static_cast<std::size_t>(layer.layer.shape.n_values()));
  const Status status = restore_dense(layer.state(), slot, S.data(), threads);
  EXPECT_TRUE(status.ok()) << status.message();
  return S;
}

/// Every scheme that this shape can be kept in: all codecs and arguments, rounding at every token
/// and windows of 5 in every record format, and replayed. Sanitizers, which slow everything
/// twentyfold, get one of them a codec and argument: each record format still appears.
inline std::vector<std::string> all_schemes(const LayerShape& s) {
  const std::vector<std::string> windows = {",period=5,records=f32", ",period=5,records=bf16",
                                            ",period=5,records=int8", ",period=5,records=mixed",
                                            ",period=5,records=int8,mode=v,phase=absolute"};
  std::vector<std::string> names;
  std::size_t n_codecs = 0;
  for (const CodecInfo* info : all_codecs()) {
    std::vector<std::string> heads;
    for (const std::string_view arg : info->args) {
      heads.push_back(std::string(info->name) + ":" + std::string(arg));
    }
    if (heads.empty()) heads.emplace_back(info->name);
    for (const std::string& head : heads) {
      const auto config = codec_config(parse(head));
      const LayerPlan plan = any_plan(s, *config);
      if (!config->info->make(*config, s, &plan).ok()) continue;
#if defined(SP_SANITIZED)
      const bool window = n_codecs % 2 == 0;
      names.push_back(head + (window ? windows[n_codecs / 2 % windows.size()] : ",period=1"));
      ++n_codecs;
#else
      names.push_back(head + ",period=1");
      for (const std::string& window : windows) names.push_back(head + window);
      ++n_codecs;
#endif
    }
  }
  EXPECT_GE(n_codecs, 8u);
  return names;
}

}  // namespace statepack::test
