#include "model/delta_block.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/half.hpp"
#include "delta/prefill.hpp"
#include "delta/step.hpp"
#include "model/activations.hpp"
#include "model/norms.hpp"
#include "model/short_conv.hpp"

namespace statepack {
namespace {

/// One matrix, or two of low rank one after the other.
struct Chain {
  Linear first, second;
  bool low_rank() const { return second.n_out() > 0; }
};

struct Parts {
  LayerShape shape;
  std::vector<Linear> qkv;  ///< one after another: q of all key heads, k of all key heads, v
  ShortConv conv;
  Linear beta;
  Chain decay, out_gate;
  std::vector<float> rate;      ///< e^{A_log} [HV]
  std::vector<float> dt_bias;   ///< [HV * gate_width]
  float lower_bound = 0;        ///< < 0: the bounded gate
  std::vector<float> out_norm;  ///< [V]
  float eps = 0;
  bool sigmoid_gate = false;
  Linear out;
};

class DeltaBlock final : public Mixer {
 public:
  DeltaBlock(Parts parts, int recurrent_layer)
      : p_(std::move(parts)),
        layer_(recurrent_layer),
        key_width_(std::int64_t{p_.shape.n_key_heads} * p_.shape.K),
        value_width_(std::int64_t{p_.shape.n_value_heads} * p_.shape.V),
        gate_width_(std::int64_t{p_.shape.n_value_heads} * p_.shape.gate_width()) {}

  void prefill(const Pass& pass, const Segment& segment, const BlockInput& in, float* y) override;
  Status decode(const Pass& pass, const Batch& batch, const BlockInput& in, float* y) override;

 private:
  // Everything that a row's step needs; strides are the widths.
  struct Rows {
    float* u;     ///< convolution inputs [n, channels]
    float* c;     ///< q|k|v after convolution and head norms [n, channels]
    float* g;     ///< log decay [n, gate_width]
    float* beta;  ///< [n, HV]
    float* z;     ///< output gate [n, HV * V]
    float* o;     ///< readout [n, HV * V]
  };
  Rows project(const Pass& pass, const BlockInput& in, std::int64_t n_history) const;
  void prepare(const Rows& rows, std::int64_t r) const;
  template <class StepRows>
  Status step_runs(const Pass& pass, const Batch& batch, const StepRows& step_rows) const;
  void finish(const Pass& pass, const Rows& rows, float* y) const;
  void show_readouts(const Pass& pass, const Segment& segment, const Rows& rows) const;

  Parts p_;
  int layer_;
  std::int64_t key_width_, value_width_, gate_width_;
};

// Runs the projections of x. Leaves `n_history` rows free in front of u.
DeltaBlock::Rows DeltaBlock::project(const Pass& pass, const BlockInput& in,
                                     std::int64_t n_history) const {
  const std::int64_t n = pass.n_rows, channels = p_.conv.channels();
  const std::int64_t H = p_.beta.n_in();
  Rows rows;
  rows.u = pass.scratch.take((n_history + n) * channels) + n_history * channels;
  rows.c = pass.scratch.take(n * channels);
  rows.g = pass.scratch.take(n * gate_width_);
  rows.beta = pass.scratch.take(n * p_.shape.n_value_heads);
  rows.z = pass.scratch.take(n * value_width_);
  rows.o = pass.scratch.take(n * value_width_);

  std::vector<LinearJob> jobs, low_rank;
  std::int64_t at = 0;
  for (const Linear& w : p_.qkv) {
    jobs.push_back({&w, in.x, H, n, rows.u + at, channels});
    at += w.n_out();
  }
  jobs.push_back({&p_.beta, in.x, H, n, rows.beta, p_.shape.n_value_heads});
  const auto chain = [&](const Chain& w, float* y, std::int64_t width) {
    if (!w.low_rank()) {
      jobs.push_back({&w.first, in.x, H, n, y, width});
      return;
    }
    const std::int64_t rank = w.first.n_out();
    float* middle = pass.scratch.take(n * rank);
    jobs.push_back({&w.first, in.x, H, n, middle, rank});
    low_rank.push_back({&w.second, middle, rank, n, y, width});
  };
  chain(p_.decay, rows.g, gate_width_);
  chain(p_.out_gate, rows.z, value_width_);
  pass.linear.run(jobs, pass.path, in.make);
  if (!low_rank.empty()) pass.linear.run(low_rank, pass.path);
  pass.clock.lap(Part::kProjections);
  return rows;
}

// Head norms of row r of c, its decay and beta (docs/models.md 5.3, 7.2-7.4).
void DeltaBlock::prepare(const Rows& rows, std::int64_t r) const {
  const LayerShape& s = p_.shape;
  float* q = rows.c + r * p_.conv.channels();
  float* k = q + key_width_;
  const float query_scale = 1.0F / std::sqrt(static_cast<float>(s.K));
  for (int h = 0; h < s.n_key_heads; ++h) {
    l2_norm(q + std::int64_t{h} * s.K, s.K, query_scale);
    l2_norm(k + std::int64_t{h} * s.K, s.K, 1.0F);
  }
  float* beta = rows.beta + r * s.n_value_heads;
  sigmoid(beta, s.n_value_heads, beta);
  const int width = s.gate_width();
  for (int h = 0; h < s.n_value_heads; ++h) {
    float* g = rows.g + r * gate_width_ + std::int64_t{h} * width;
    const float* bias = p_.dt_bias.data() + std::int64_t{h} * width;
    const float rate = p_.rate[static_cast<std::size_t>(h)];
    if (p_.lower_bound < 0) {
      bounded_decay(g, bias, rate, p_.lower_bound, width, g);
    } else {
      softplus_decay(g, bias, rate, width, g);
    }
  }
}

// Gated norm of every head, then the output matrix (docs/models.md 5.5, 7.6).
void DeltaBlock::finish(const Pass& pass, const Rows& rows, float* y) const {
  const std::int64_t V = p_.shape.V;
  const LinearJob job{&p_.out, rows.o, value_width_, pass.n_rows, y, p_.out.n_out()};
  pass.linear.run({&job, 1}, pass.path, [&](std::int64_t r) {
    float* o = rows.o + r * value_width_;
    for (std::int64_t h = 0; h < p_.shape.n_value_heads; ++h) {
      rms_norm(o + h * V, p_.out_norm.data(), V, p_.eps, o + h * V);
    }
    const float* z = rows.z + r * value_width_;
    if (p_.sigmoid_gate) {
      times_sigmoid(o, z, value_width_);
    } else {
      times_silu(o, z, value_width_);
    }
  });
  pass.clock.lap(Part::kProjections);
}

void DeltaBlock::show_readouts(const Pass& pass, const Segment& segment, const Rows& rows) const {
  const Scratch::Mark mark(pass.scratch);
  const std::int64_t V = p_.shape.V, n_out = p_.out.n_out();
  float* const gain = pass.scratch.take(pass.n_rows * value_width_);
  pass.threads.parallel_for(pass.n_rows, [&](std::int64_t r, int) {
    float* const row = gain + r * value_width_;
    for (std::int64_t at = 0; at < value_width_; at += V) {
      std::copy_n(p_.out_norm.data(), V, row + at);
    }
    const float* z = rows.z + r * value_width_;
    if (p_.sigmoid_gate) {
      times_sigmoid(row, z, value_width_);
    } else {
      times_silu(row, z, value_width_);
    }
  });
  float* const weights = pass.scratch.take(value_width_);
  float* const power = pass.scratch.take(value_width_);
  std::fill_n(power, value_width_, 0.0F);
  for (std::int64_t i = 0; i < n_out; ++i) {
    p_.out.widen(i, 0, value_width_, weights);
    for (std::int64_t j = 0; j < value_width_; ++j) power[j] += weights[j] * weights[j];
  }
  ReadoutView view;
  view.layer = layer_;
  view.n_tokens = pass.n_rows;
  view.o = rows.o;
  view.gain = gain;
  view.eps = p_.eps;
  view.out_power = power;
  view.residual = segment.residual;
  view.hidden = n_out;
  segment.observer->on_readout(view);
}

void DeltaBlock::prefill(const Pass& pass, const Segment& segment, const BlockInput& in, float* y) {
  const Scratch::Mark mark(pass.scratch);
  const std::int64_t channels = p_.conv.channels(), n_history = p_.conv.n_history();
  const Rows rows = project(pass, in, n_history);

  float* history = segment.state.conv.data() + layer_ * p_.conv.history_floats();
  const float* u = rows.u - n_history * channels;  // history and segment as one run of rows
  std::copy_n(history, p_.conv.history_floats(), rows.u - n_history * channels);
  pass.threads.parallel_for(pass.n_rows, [&](std::int64_t t, int) {
    p_.conv.apply(u + t * channels, rows.c + t * channels);
    prepare(rows, t);
  });
  std::copy_n(u + pass.n_rows * channels, p_.conv.history_floats(), history);
  pass.clock.lap(Part::kConvolution);

  PrefillInput chunk;
  chunk.shape = p_.shape;
  chunk.layer = layer_;
  chunk.position = segment.position;
  chunk.n_tokens = pass.n_rows;
  chunk.q = rows.c;
  chunk.k = rows.c + key_width_;
  chunk.v = rows.c + 2 * key_width_;
  chunk.q_stride = chunk.k_stride = chunk.v_stride = channels;
  chunk.g = rows.g;
  chunk.g_stride = gate_width_;
  chunk.beta = rows.beta;
  chunk.beta_stride = p_.shape.n_value_heads;
  chunk.S = segment.state.S.data() + layer_ * p_.shape.n_values();
  chunk.out = rows.o;
  chunk.out_stride = value_width_;
  statepack::prefill(chunk, pass.threads, segment.observer);
  if (segment.observer != nullptr) show_readouts(pass, segment, rows);
  pass.clock.lap(Part::kState);
  finish(pass, rows, y);
}

// Token after token of every run. Runs are spread over the threads where there are enough of them;
// otherwise each step spreads its heads.
template <class StepRows>
Status DeltaBlock::step_runs(const Pass& pass, const Batch& batch,
                             const StepRows& step_rows) const {
  std::vector<Status> ended(batch.runs.size());
  const auto step_run = [&](std::int64_t i, int) {
    const RowRun& run = batch.runs[static_cast<std::size_t>(i)];
    Status& status = ended[static_cast<std::size_t>(i)];
    for (std::int64_t t = 0; t < run.n && status.ok(); ++t) {
      status = step_rows(run.group, run.first + t, 1);
    }
  };
  if (std::ssize(batch.runs) >= pass.threads.n_threads()) {
    pass.threads.parallel_for(std::ssize(batch.runs), step_run);
  } else {
    for (std::int64_t i = 0; i < std::ssize(batch.runs); ++i) step_run(i, 0);
  }
  for (Status& status : ended) SP_RETURN_IF_ERROR(std::move(status));
  return {};
}

Status DeltaBlock::decode(const Pass& pass, const Batch& batch, const BlockInput& in, float* y) {
  const Scratch::Mark mark(pass.scratch);
  const std::int64_t channels = p_.conv.channels();
  const Rows rows = project(pass, in, 0);
  pass.threads.parallel_for(std::ssize(batch.runs), [&](std::int64_t i, int) {
    const RowRun& run = batch.runs[static_cast<std::size_t>(i)];
    float* history = batch.conv[static_cast<std::size_t>(i)] + layer_ * p_.conv.history_floats();
    // Between two tokens of a run the history is what a slot would keep of it.
    const StatePool& pool = *batch.groups[static_cast<std::size_t>(run.group)].pool;
    const bool rounds =
        run.n > 1 && p_.conv.n_history() > 0 && pool.scheme().scheme().conv == ConvFormat::kBf16;
    for (std::int64_t r = run.first; r < run.first + run.n; ++r) {
      p_.conv.step(history, rows.u + r * channels, rows.c + r * channels);
      prepare(rows, r);
      if (rounds) {
        float* const newest = history + p_.conv.history_floats() - channels;
        for (std::int64_t c = 0; c < channels; ++c) newest[c] = bf16_to_f32(f32_to_bf16(newest[c]));
      }
    }
  });
  pass.clock.lap(Part::kConvolution);

  StepInput token;
  token.first_valid_slot = StatePool::kFirstValidSlot;
  token.q_stride = token.k_stride = token.v_stride = channels;
  token.g_stride = gate_width_;
  token.beta_stride = p_.shape.n_value_heads;
  token.out_stride = value_width_;
  // Steps n rows of a group from row `first` of the batch, each of another slot.
  const auto step_rows = [&](int group, std::int64_t first, std::int64_t n) {
    StepInput t = token;
    t.n_rows = static_cast<int>(n);
    t.read_slots = batch.slots.data() + first;
    t.positions = batch.positions.data() + first;
    t.q = rows.c + first * channels;
    t.k = t.q + key_width_;
    t.v = t.k + key_width_;
    t.g = rows.g + first * gate_width_;
    t.beta = rows.beta + first * p_.shape.n_value_heads;
    t.out = rows.o + first * value_width_;
    return step(batch.groups[static_cast<std::size_t>(group)].pool->layer(layer_), t, pass.threads);
  };
  if (batch.longest_run == 1) {
    std::int64_t first = 0;
    for (std::size_t g = 0; g < batch.groups.size(); ++g) {
      const std::int64_t n = std::ssize(batch.groups[g].rows);
      SP_RETURN_IF_ERROR(step_rows(static_cast<int>(g), first, n));
      first += n;
    }
  } else {
    SP_RETURN_IF_ERROR(step_runs(pass, batch, step_rows));
  }
  pass.clock.lap(Part::kState);
  finish(pass, rows, y);
  return {};
}

// e^{A_log}, one a value head.
Result<std::vector<float>> load_rate(Weights& weights, const std::string& name,
                                     const std::vector<std::int64_t>& shape) {
  SP_ASSIGN_OR_RETURN(std::vector<float> rate, weights.values(name, shape));
  for (float& a : rate) a = std::exp(a);
  return rate;
}

}  // namespace

QkvzOrder qkvz_order(const LayerShape& shape) {
  const int K = shape.K, V = shape.V, r = shape.group();
  const int block = 2 * K + 2 * r * V;  // rows of one key head: q, k, r heads of v, r heads of z
  QkvzOrder order;
  const auto take = [&](std::vector<std::int32_t>& to, int offset, int n) {
    for (int i = 0; i < shape.n_key_heads; ++i) {
      for (int d = 0; d < n; ++d) to.push_back(i * block + offset + d);
    }
  };
  take(order.qkv, 0, K);
  take(order.qkv, K, K);
  take(order.qkv, 2 * K, r * V);
  take(order.z, 2 * K + r * V, r * V);
  for (int i = 0; i < shape.n_key_heads; ++i) {
    for (int j = 0; j < r; ++j) {
      order.b.push_back(i * 2 * r + j);
      order.a.push_back(i * 2 * r + r + j);
    }
  }
  return order;
}

Result<std::unique_ptr<Mixer>> load_gdn(Weights& weights, const ModelConfig& config,
                                        const std::string& prefix, int recurrent_layer) {
  const LayerShape& s = config.recurrent;
  const std::int64_t H = config.hidden, HV = s.n_value_heads, V = HV * s.V;
  const std::int64_t channels = config.conv_channels();
  const std::string at = prefix + "linear_attn.";
  Parts p;
  p.shape = s;
  if (config.interleaved_qkvz) {
    SP_ASSIGN_OR_RETURN(const Linear qkvz,
                        weights.table(at + "in_proj_qkvz.weight", channels + V, H));
    SP_ASSIGN_OR_RETURN(const Linear ba, weights.table(at + "in_proj_ba.weight", 2 * HV, H));
    QkvzOrder order = qkvz_order(s);
    p.qkv = {weights.for_products(qkvz.permuted(std::move(order.qkv)))};
    p.out_gate.first = weights.for_products(qkvz.permuted(std::move(order.z)));
    p.beta = weights.for_products(ba.permuted(std::move(order.b)));
    p.decay.first = weights.for_products(ba.permuted(std::move(order.a)));
  } else {
    SP_ASSIGN_OR_RETURN(const Linear qkv, weights.matrix(at + "in_proj_qkv.weight", channels, H));
    p.qkv = {qkv};
    SP_ASSIGN_OR_RETURN(p.out_gate.first, weights.matrix(at + "in_proj_z.weight", V, H));
    SP_ASSIGN_OR_RETURN(p.beta, weights.matrix(at + "in_proj_b.weight", HV, H));
    SP_ASSIGN_OR_RETURN(p.decay.first, weights.matrix(at + "in_proj_a.weight", HV, H));
  }
  SP_ASSIGN_OR_RETURN(const std::vector<float> conv,
                      weights.values(at + "conv1d.weight", {channels, 1, config.conv_kernel}));
  p.conv = ShortConv(conv, channels, config.conv_kernel);
  SP_ASSIGN_OR_RETURN(p.rate, load_rate(weights, at + "A_log", {HV}));
  SP_ASSIGN_OR_RETURN(p.dt_bias, weights.values(at + "dt_bias", {HV}));
  // The one Qwen norm that is not zero-centred.
  SP_ASSIGN_OR_RETURN(p.out_norm, weights.norm(at + "norm.weight", s.V, false));
  p.eps = config.rms_norm_eps;
  p.sigmoid_gate = config.gdn_sigmoid_gate;
  SP_ASSIGN_OR_RETURN(p.out, weights.matrix(at + "out_proj.weight", H, V));
  return std::unique_ptr<Mixer>(new DeltaBlock(std::move(p), recurrent_layer));
}

Result<std::unique_ptr<Mixer>> load_kda(Weights& weights, const ModelConfig& config,
                                        const std::string& prefix, int recurrent_layer) {
  const LayerShape& s = config.recurrent;
  const std::int64_t H = config.hidden, HV = s.n_value_heads, D = HV * s.K;
  const std::string at = prefix + "self_attn.";
  Parts p;
  p.shape = s;
  std::vector<float> conv;  // [3 D][kernel]
  for (const char* name : {"q", "k", "v"}) {
    SP_ASSIGN_OR_RETURN(const Linear w, weights.matrix(at + name + "_proj.weight", D, H));
    p.qkv.push_back(w);
    SP_ASSIGN_OR_RETURN(const std::vector<float> c,
                        weights.values(at + name + "_conv1d.weight", {D, 1, config.conv_kernel}));
    conv.insert(conv.end(), c.begin(), c.end());
  }
  p.conv = ShortConv(conv, 3 * D, config.conv_kernel);
  SP_ASSIGN_OR_RETURN(p.beta, weights.matrix(at + "b_proj.weight", HV, H));
  for (const auto& [name, chain] : {std::pair{"f", &p.decay}, std::pair{"g", &p.out_gate}}) {
    SP_ASSIGN_OR_RETURN(chain->first, weights.matrix(at + name + "_a_proj.weight", s.K, H));
    SP_ASSIGN_OR_RETURN(chain->second, weights.matrix(at + name + "_b_proj.weight", D, s.K));
  }
  SP_ASSIGN_OR_RETURN(p.rate, load_rate(weights, at + "A_log", {1, 1, HV, 1}));
  SP_ASSIGN_OR_RETURN(p.dt_bias, weights.values(at + "dt_bias", {D}));
  p.lower_bound = config.kda_lower_bound;
  SP_ASSIGN_OR_RETURN(p.out_norm, weights.norm(at + "o_norm.weight", s.V, false));
  p.eps = config.rms_norm_eps;
  p.sigmoid_gate = config.gdn_sigmoid_gate;
  SP_ASSIGN_OR_RETURN(p.out, weights.matrix(at + "o_proj.weight", H, D));
  return std::unique_ptr<Mixer>(new DeltaBlock(std::move(p), recurrent_layer));
}

}  // namespace statepack
