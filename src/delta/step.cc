#include "delta/step.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/aligned.hpp"
#include "base/check.hpp"
#include "base/exp.hpp"
#include "base/half.hpp"
#include "delta/kernels.hpp"
#include "delta/small_gemm.hpp"

namespace statepack {
namespace {

using kernel::kInfBits;

// ---------------------------------------------------------------------------------------------
// Places in a pool

std::uint8_t* page_of(const LayerState& state, std::int64_t slot) {
  return state.pages + slot * state.page_stride;
}
std::uint8_t* window_of(const LayerState& state, std::int64_t slot) {
  return state.windows == nullptr ? nullptr : state.windows + slot * state.window_stride;
}
Cursor& cursor_of(const LayerState& state, std::int64_t slot) {
  return *reinterpret_cast<Cursor*>(reinterpret_cast<std::uint8_t*>(state.cursors) +
                                    slot * state.cursor_stride);
}
std::atomic_ref<std::uint32_t> fault_of(const LayerState& state, std::int64_t slot) {
  return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(
      reinterpret_cast<std::uint8_t*>(state.faults) + slot * state.fault_stride));
}
bool is_faulty(const LayerState& state, std::int64_t slot) {
  return fault_of(state, slot).load(std::memory_order_relaxed) != 0;
}
void mark_faulty(const LayerState& state, std::int64_t slot) {
  fault_of(state, slot).store(1, std::memory_order_relaxed);
}

/// A flush out of turn has no position of its own; no token has this one.
constexpr std::int64_t kNoPosition = std::numeric_limits<std::int64_t>::max();

/// Of a rounding behind the token at `position`: never by slot or row.
RoundingContext rounding_at(const LayerState& state, std::int64_t position,
                            const std::uint8_t* before) {
  RoundingContext at;
  at.seed = state.scheme->seed;
  at.layer = state.index;
  at.step = static_cast<std::uint64_t>(position);
  at.before = before;
  return at;
}

/// Records until the first boundary after `n_tokens`: 0 stands for a whole period.
std::int32_t first_limit(const Scheme& scheme, std::int64_t n_tokens) {
  if (scheme.phase != Phase::kAbsolute || scheme.period == 1) return 0;
  return static_cast<std::int32_t>(scheme.period - n_tokens % scheme.period) % scheme.period;
}

// ---------------------------------------------------------------------------------------------
// One worker's memory: grows to the largest head that it has seen and stays

struct Scratch {
  float* S = nullptr;              // [K][V]
  float* rows = nullptr;           // [RowSource::kMaxRows][V]
  float* keys = nullptr;           // [capacity][K]
  float* values = nullptr;         // [capacity][V]
  float* gates = nullptr;          // [capacity][gate_width]: log decays, or factors
  float* betas = nullptr;          // [capacity]
  float* decays = nullptr;         // [capacity + 1]: of each record, then of the page
  float* with_k = nullptr;         // [capacity]: share of each record in the read at k
  float* with_q = nullptr;         // [capacity]: and at q
  float* p = nullptr;              // [V] state read at k
  float* r = nullptr;              // [V] state read at q
  float* u = nullptr;              // [V]
  float* a = nullptr;              // [K] read key of the page
  float* b = nullptr;              // [K] read query of the page
  float* w = nullptr;              // [K] write key
  float* written = nullptr;        // [capacity][K] write keys of records
  float* gamma = nullptr;          // [gate_width] decay of the page
  float* sum = nullptr;            // [gate_width]
  std::uint8_t* record = nullptr;  // one record in storage format
  CodecScratch codec;

  void prepare(const CompiledLayer& layer, const WindowLayout& one) {
    const std::int64_t K = layer.shape.K, V = layer.shape.V, n = layer.window.capacity();
    const std::int64_t width = layer.shape.gate_width();
    const auto floats = [](std::int64_t count) { return (count * 4 + 63) / 64 * 64; };
    const std::size_t n_bytes = static_cast<std::size_t>(
        floats(K * V) + floats(RowSource::kMaxRows * V) + 2 * floats(n * K) + floats(n * V) +
        floats(n * width) + 4 * floats(n + 1) + 3 * floats(V) + 3 * floats(K) + 2 * floats(width) +
        (one.n_bytes() + 63) / 64 * 64 + static_cast<std::int64_t>(layer.codec->scratch_bytes()));
    memory_.grow(n_bytes);
    std::byte* at = memory_.data();
    const auto take = [&](std::int64_t count) {
      float* array = reinterpret_cast<float*>(at);
      at += floats(count);
      return array;
    };
    S = take(K * V);
    rows = take(RowSource::kMaxRows * V);
    keys = take(n * K);
    written = take(n * K);
    values = take(n * V);
    gates = take(n * width);
    betas = take(n + 1), decays = take(n + 1), with_k = take(n + 1), with_q = take(n + 1);
    p = take(V), r = take(V), u = take(V);
    a = take(K), b = take(K), w = take(K);
    gamma = take(width), sum = take(width);
    record = reinterpret_cast<std::uint8_t*>(at);
    at += (one.n_bytes() + 63) / 64 * 64;
    codec.bytes = {at, layer.codec->scratch_bytes()};
  }

 private:
  AlignedBytes memory_;
};

Scratch& thread_scratch() {
  thread_local Scratch scratch;
  return scratch;
}

// ---------------------------------------------------------------------------------------------
// One head

/// The token of one head, as the step received it.
struct Token {
  const float* q = nullptr;  // [K]
  const float* k = nullptr;  // [K]
  const float* v = nullptr;  // [V]
  const float* g = nullptr;  // [gate_width]
  float beta = 0;
  // [K] what the page is read at where the codec keeps Z = M S: M^-T q and M^-T k
  const float* read_q = nullptr;
  const float* read_k = nullptr;
  // [records][K] M k of the window's records and then of this token, before any decay, where a
  // flush is due
  const float* written = nullptr;
};

/// An updated state, made a few rows at a time.
class UpdatedRows final : public RowSource {
 public:
  /// `buffer` [kMaxRows][V]. Without S its rows come from the page, by `codec`.decode_rows().
  UpdatedRows(const float* S, const LayerCodec& codec, int head, const std::uint8_t* page,
              const kernel::Update& by, float* buffer)
      : S_(S),
        codec_(codec),
        head_(head),
        page_(page),
        V_(codec.shape().V),
        by_(by),
        buffer_(buffer) {}

  const float* rows(int begin, int n) override {
    kernel::Update by = by_;
    by.d += std::int64_t{begin} * by.d_stride;
    by.keys += begin;
    const float* from = buffer_;
    if (S_ != nullptr) {
      from = S_ + std::int64_t{begin} * V_;
    } else {
      SP_CHECK(codec_.decode_rows(head_, page_, begin, n, buffer_), "rows that were read before");
    }
    peak_ = std::max(peak_, kernel::update(from, n, V_, by, buffer_));
    return buffer_;
  }
  std::int32_t peak() const { return peak_; }  ///< of the rows so far

 private:
  const float* S_;
  const LayerCodec& codec_;
  int head_;
  const std::uint8_t* page_;
  int V_;
  kernel::Update by_;
  float* buffer_;
  std::int32_t peak_ = 0;
};

/// The arithmetic of one value head of one layer, over a worker's scratch. Everything here reads
/// slots; only commit functions below write them.
template <Gate gate>
class Head {
 public:
  Head(const CompiledLayer& layer, int head)
      : codec_(*layer.codec),
        window_(layer.window),
        K_(layer.shape.K),
        V_(layer.shape.V),
        head_(head),
        key_head_(layer.shape.key_head(head)),
        one_(LayerShape{1, 1, K_, V_, gate}, window_.records(), window_.mode(), 1),
        x_(thread_scratch()) {
    x_.prepare(layer, one_);
  }

  /// The page's state: where it lies as f32 already, or decoded into scratch.
  const float* load(const std::uint8_t* page) {
    // in_place() only computes an address; nothing is written through it here.
    if (const float* S = codec_.in_place(head_, const_cast<std::uint8_t*>(page))) return S;
    codec_.decode(head_, page, x_.S, x_.codec);
    return x_.S;
  }

  /// o and u of a token behind the page and n records. `u` [V] and `o` [V] may not overlap inputs.
  /// `decode`: read the state as f32 even where packed codes could be read; the choice is a
  /// scheme's, because the two round differently. False when u or o is not finite.
  bool read(const std::uint8_t* page, const std::uint8_t* block, int n, const Token& token,
            bool decode, float* u, float* o) {
    page_ = page;
    state_ = nullptr;
    decode_ = decode;
    if (window_.mode() == RecordMode::kV && n > 0) {
      state_ = replay(load(page), block, n);
      n = 0;
    }
    load_records(block, n);
    decay_records(block, n, token.g);
    read_page(token.k, token.q, token.read_k, token.read_q);
    read_records(n, token);
    // u = beta (v - S'^T k);  o = S'^T q + (k . q) u, with k and u not yet rounded
    const float kq = kernel::dot(token.k, token.q, K_);
    return kernel::correct(x_.p, x_.r, token.v, token.beta, kq, V_, u, o) < kInfBits;
  }

  /// X = D S + k u^T from `S` to `X` (which may be the same place).
  void write(const float* S, const Token& token, const float* u, float* X) {
    kernel::update(S, K_, V_, one_update(token, u), X);
  }

  /// After read() with `decode`: packs X = D S + k u^T, where nothing is buffered (period 1). False
  /// when it is not finite; the page is then unspecified.
  bool rewrite(const Token& token, const float* u, std::uint8_t* page, const RoundingContext& at) {
    return store(state_, one_update(token, u), page, at);
  }

  /// An upper bound of |X| from the parts, in double: X is finite when the bound fits f32. After
  /// read() of a page that is f32 itself.
  bool write_stays_finite(const Token& token, const float* u) const {
    const auto value = [](std::int32_t bits) {
      return static_cast<double>(std::bit_cast<float>(bits));
    };
    const double bound = value(kernel::peak_bits(x_.gamma, gate_width())) * value(state_peak_) +
                         value(kernel::peak_bits(token.k, K_)) * value(kernel::peak_bits(u, V_));
    return bound <= static_cast<double>(std::numeric_limits<float>::max());
  }

  /// After read(): packs the state behind page, n records and this token as its record will be
  /// stored. False when it is not finite; the page is then unspecified.
  bool rebuild(const std::uint8_t* block, int n, const Token& token, const float* u,
               std::uint8_t* page, const RoundingContext& at) {
    one_.store_key(x_.record, 0, 0, token.k);
    one_.store_value(x_.record, 0, 0, window_.mode() == RecordMode::kV ? token.v : u, token.g,
                     token.beta);
    if (window_.mode() == RecordMode::kV) {  // read() left the state behind n records
      load_record(one_, x_.record, 0, 0, 0, 0);
      replay_record(state(), 0);
      if (kernel::peak_bits(x_.S, std::int64_t{K_} * V_) >= kInfBits) return false;
      encode(page, at);
      return true;
    }
    load_records(block, n);
    load_record(one_, x_.record, 0, 0, 0, n);
    if (window_.keeps_total()) {
      one_.load_total(x_.record, 0, x_.sum);
      if (n > 0) {
        window_.load_total(block, head_, x_.gamma);
        for (int i = 0; i < gate_width(); ++i) x_.sum[i] += x_.gamma[i];
      }
    }
    return store(state(), all_updates(n + 1, token.written), page, at);
  }

  /// The state behind page and n records, into scratch. `written`: M k of the records, made here
  /// where null. False when it is not finite.
  bool materialise(const std::uint8_t* page, const std::uint8_t* block, int n,
                   const float* written) {
    const float* S = load(page);
    if (n == 0) {
      if (S != x_.S) std::memcpy(x_.S, S, sizeof(float) * static_cast<std::size_t>(K_) * V_);
    } else if (window_.mode() == RecordMode::kV) {
      replay(S, block, n);
    } else {
      load_records(block, n);
      if (window_.keeps_total()) window_.load_total(block, head_, x_.sum);
      return kernel::update(S, K_, V_, all_updates(n, written), x_.S) < kInfBits;
    }
    return kernel::peak_bits(x_.S, std::int64_t{K_} * V_) < kInfBits;
  }

  /// Rounds and packs the state in scratch.
  void encode(std::uint8_t* page, const RoundingContext& at) {
    codec_.encode(head_, x_.S, page, at, x_.codec);
  }

  float* scratch_state() { return x_.S; }

 private:
  /// The state that read() reads, decoded when first asked for.
  const float* state() {
    if (state_ == nullptr) state_ = load(page_);
    return state_;
  }

  static constexpr int kStride = gate == Gate::kScalar ? 0 : 1;
  int gate_width() const { return gate == Gate::kScalar ? 1 : K_; }

  /// Record `m` of a window becomes record `to` in scratch.
  void load_record(const WindowLayout& layout, const std::uint8_t* block, int m, int key_head,
                   int value_head, int to) {
    float* gates = x_.gates + std::int64_t{to} * gate_width();
    layout.load_key(block, m, key_head, x_.keys + std::int64_t{to} * K_);
    layout.load_value(block, m, value_head, x_.values + std::int64_t{to} * V_);
    if (layout.keeps_factors()) {
      layout.load_factor(block, m, value_head, gates);
    } else {
      layout.load_gate(block, m, value_head, gates);
    }
    x_.betas[to] = layout.load_beta(block, m, value_head);
  }

  void load_records(const std::uint8_t* block, int n) {
    for (int m = 0; m < n; ++m) load_record(window_, block, m, key_head_, head_, m);
  }

  /// Prepares a read by a token with log decay g: gamma becomes the decay of the page and, with a
  /// scalar gate, decays[m] that of record m; with a gate per channel keys become D_m o k_m. Suffix
  /// sums of logs, or backward products of factors; never differences.
  void decay_records(const std::uint8_t* block, int n, const float* g) {
    if (window_.keeps_total()) {
      for (int i = 0; i < gate_width(); ++i) x_.sum[i] = g[i];
      if (n > 0) {
        window_.load_total(block, head_, x_.gamma);
        for (int i = 0; i < gate_width(); ++i) x_.sum[i] += x_.gamma[i];
      }
    }
    if constexpr (gate == Gate::kScalar) {
      x_.decays[n] = g[0];
      for (int m = n - 1; m >= 0; --m) x_.decays[m] = x_.decays[m + 1] + x_.gates[m];
      // decays[m + 1] holds what record m has seen since, decays[0] what the page has
      kernel::exp_all(x_.decays, n + 1, x_.decays);
      x_.gamma[0] = x_.decays[0];
    } else {
      decay_keys(n, g);
    }
  }

  /// Adds the records' share (k_m . (D_m o x)) u_m to both reads.
  void read_records(int n, const Token& token) {
    if (n == 0) return;
    kernel::dot_records(x_.keys, n, K_, token.k, token.q, x_.with_k, x_.with_q);
    if constexpr (gate == Gate::kScalar) {
      for (int m = 0; m < n; ++m) x_.with_k[m] *= x_.decays[m + 1];
      for (int m = 0; m < n; ++m) x_.with_q[m] *= x_.decays[m + 1];
    }
    kernel::read_records(x_.values, n, V_, x_.with_k, x_.with_q, x_.p, x_.r);
  }

  /// Keys become decayed keys as seen by a token with log decay `g`, or with `g` null as of the
  /// last record; gamma becomes the decay of the page. Where a total is kept, x_.sum holds it.
  void decay_keys(int n, const float* g) {
    if (window_.keeps_factors()) {
      float* d = x_.w;  // D_m, growing backwards
      if (g == nullptr) {
        std::fill_n(d, K_, 1.0f);
      } else {
        kernel::exp_all(g, K_, d);
      }
      for (int m = n - 1; m >= 0; --m) {
        float* key = x_.keys + std::int64_t{m} * K_;
        const float* factor = x_.gates + std::int64_t{m} * K_;
        for (int i = 0; i < K_; ++i) key[i] *= d[i];
        for (int i = 0; i < K_; ++i) d[i] *= factor[i];
      }
      if (window_.keeps_total()) {
        kernel::exp_all(x_.sum, K_, x_.gamma);
      } else {
        std::copy_n(d, K_, x_.gamma);
      }
      return;
    }
    float* sum = x_.sum;
    for (int i = 0; i < gate_width(); ++i) sum[i] = g == nullptr ? 0.0f : g[i];
    for (int m = n - 1; m >= 0; --m) {
      float* key = x_.keys + std::int64_t{m} * K_;
      const float* log = x_.gates + std::int64_t{m} * gate_width();
      kernel::exp_all(sum, gate_width(), x_.gamma);
      for (int i = 0; i < K_; ++i) key[i] *= x_.gamma[i * kStride];
      for (int i = 0; i < gate_width(); ++i) sum[i] += log[i];
    }
    kernel::exp_all(sum, gate_width(), x_.gamma);
  }

  /// Both reads of the page as f32, a few rows at a time, which stay in the first-level cache; the
  /// sums are those of read_two() over all of it. False where the codec has no rows.
  bool read_by_rows(const float* a, const float* b) {
    for (int i = 0; i < K_; i += RowSource::kMaxRows) {
      const int n = std::min(RowSource::kMaxRows, K_ - i);
      if (!codec_.decode_rows(head_, page_, i, n, x_.rows)) return false;
      kernel::read_two(x_.rows, n, V_, a + i, b + i, x_.p, x_.r, i > 0);
    }
    return true;
  }

  /// p = S'^T k and r = S'^T q of the state, S' = Gamma o S: of state_ where it is there, else of
  /// the page if the codec can, packed or row by row. A codec that keeps Z = M S is read at M^-T k
  /// and M^-T q, which are made here unless given.
  void read_page(const float* k, const float* q, const float* read_k, const float* read_q) {
    const float* a = k;
    const float* b = q;
    if (const float* T = codec_.read_transform(head_)) {
      a = read_k != nullptr ? read_k : transformed(T, k, x_.a);
      b = read_q != nullptr ? read_q : transformed(T, q, x_.b);
    }
    if constexpr (gate == Gate::kChannel) {  // M is diagonal then
      for (int i = 0; i < K_; ++i) x_.a[i] = x_.gamma[i] * a[i];
      for (int i = 0; i < K_; ++i) x_.b[i] = x_.gamma[i] * b[i];
      a = x_.a;
      b = x_.b;
    }
    const auto read_here = [&] {
      return decode_ ? read_by_rows(a, b)
                     : codec_.read_two(head_, page_, a, b, x_.p, x_.r, x_.codec);
    };
    if (state_ != nullptr || !read_here()) {
      const float* const S = state();
      if (S == x_.S) {
        kernel::read_two(S, K_, V_, a, b, x_.p, x_.r);
      } else {
        state_peak_ = kernel::read_two_and_peak(S, K_, V_, a, b, x_.p, x_.r);
      }
    }
    if constexpr (gate == Gate::kScalar) {
      for (int j = 0; j < V_; ++j) x_.p[j] *= x_.gamma[0];
      for (int j = 0; j < V_; ++j) x_.r[j] *= x_.gamma[0];
    }
  }

  /// x T into `to` [K], which is returned.
  const float* transformed(const float* T, const float* x, float* to) const {
    small_gemm(1, K_, K_, x, K_, 1, T, K_, to, K_, false);
    return to;
  }

  /// M k, or k where the codec keeps S itself.
  const float* write_key(const float* k) {
    const float* T = codec_.write_transform(head_);
    return T == nullptr ? k : transformed(T, k, x_.w);
  }

  /// D S + k u^T.
  kernel::Update one_update(const Token& token, const float* u) {
    kernel::exp_all(token.g, gate_width(), x_.gamma);
    return {x_.gamma, kStride, 1, write_key(token.k), K_, u};
  }

  /// Gamma S + sum_m (D_m o k_m) u_m^T over the n records in scratch; with a transform, keys are
  /// `written` [n][K] where that is given.
  kernel::Update all_updates(int n, const float* written) {
    const float* const T = codec_.write_transform(head_);
    if (T == nullptr) {
      decay_keys(n, nullptr);
      return {x_.gamma, kStride, n, x_.keys, K_, x_.values};
    }
    if (gate == Gate::kScalar && written != nullptr) {  // a scalar decay may come after M
      float sum = 0;
      for (int m = n - 1; m >= 0; --m) {
        const float decay = exp_f32(sum);
        for (int i = 0; i < K_; ++i) {
          x_.written[std::int64_t{m} * K_ + i] = decay * written[std::int64_t{m} * K_ + i];
        }
        sum += x_.gates[m];
      }
      x_.gamma[0] = exp_f32(sum);
    } else {
      decay_keys(n, nullptr);
      small_gemm(n, K_, K_, x_.keys, K_, 1, T, K_, x_.written, K_, false);
    }
    return {x_.gamma, kStride, n, x_.written, K_, x_.values, true};
  }

  /// Packs the updated S, or without it the updated state of the page that was read by rows: a few
  /// rows at a time where the codec takes them so, else out of scratch. False when it is not
  /// finite.
  bool store(const float* S, const kernel::Update& by, std::uint8_t* page,
             const RoundingContext& at) {
    UpdatedRows rows(S, codec_, head_, page_, by, x_.rows);
    if (codec_.encode_rows(head_, rows, page, x_.codec)) return rows.peak() < kInfBits;
    if (kernel::update(S == nullptr ? state() : S, K_, V_, by, x_.S) >= kInfBits) return false;
    encode(page, at);
    return true;
  }

  /// One step of the delta rule with record m in scratch (mode V), from S into scratch.
  void replay_record(const float* S, int m) {
    const float* k = x_.keys + std::int64_t{m} * K_;
    const float* v = x_.values + std::int64_t{m} * V_;
    const float* gates = x_.gates + std::int64_t{m} * gate_width();
    if (window_.keeps_factors()) {
      std::copy_n(gates, gate_width(), x_.gamma);
    } else {
      kernel::exp_all(gates, gate_width(), x_.gamma);
    }
    state_ = S;
    read_page(k, k, nullptr, nullptr);
    for (int j = 0; j < V_; ++j) x_.u[j] = x_.betas[m] * (v[j] - x_.p[j]);
    kernel::update(S, K_, V_, {x_.gamma, kStride, 1, write_key(k), K_, x_.u}, x_.S);
  }

  const float* replay(const float* S, const std::uint8_t* block, int n) {
    load_records(block, n);
    for (int m = 0; m < n; ++m) {
      replay_record(S, m);
      S = x_.S;
    }
    return S;
  }

  const LayerCodec& codec_;
  const WindowLayout& window_;
  const int K_, V_, head_, key_head_;
  const WindowLayout one_;  // a window of one record and one head, for what storing does to numbers
  Scratch& x_;
  const std::uint8_t* page_ = nullptr;  // what read() reads
  const float* state_ = nullptr;        // its state as f32, where that exists
  bool decode_ = false;                 // read it as f32
  std::int32_t state_peak_ = 0;         // of a state that lies in the page, once read
};

// ---------------------------------------------------------------------------------------------
// Rows and waves

/// What happens to one slot in this call.
struct Row {
  std::int64_t index = 0;  // in the batch
  std::int64_t read = 0;
  std::int64_t write = 0;
  int fill = 0;                    // records in the window that is read
  int limit = 0;                   // records that complete it
  bool due = false;                // the page is rewritten
  std::uint8_t* staged = nullptr;  // the new page until every head is known to be finite
  float* written = nullptr;        // [unit][capacity][K] where due, see TransformedVectors
  RoundingContext rounding;
  std::uint32_t failed = 0;  // by any head; accessed atomically while heads run
  GuardCounts guard;         // likewise

  void fail() { std::atomic_ref<std::uint32_t>(failed).store(1, std::memory_order_relaxed); }
};

/// The calling thread's memory.
struct Workspace {
  std::vector<Row> rows;
  std::vector<float> u;                   // [rows of a wave][HV][V]
  std::vector<float> reads;               // of a wave, see TransformedVectors
  std::vector<float> written;             // likewise
  std::vector<Row*> due;                  // likewise
  AlignedBytes pages;                     // staged pages of a wave
  std::vector<std::uint64_t> written_in;  // [n_slots] the last call that named the slot as written
  std::uint64_t call = 0;
};

Workspace& thread_workspace() {
  thread_local Workspace workspace;
  return workspace;
}

Status bad_slot(std::int64_t row, std::int64_t slot, std::int64_t n_slots) {
  return {Code::kInvalidArgument, "row " + std::to_string(row) + " names slot " +
                                      std::to_string(slot) + ", but the pool has slots 0 to " +
                                      std::to_string(n_slots - 1)};
}

/// Marks the slots that rows write and refuses what would make a result depend on the order of
/// rows.
Status claim_slots(Workspace& space, std::int64_t n_slots) {
  if (static_cast<std::int64_t>(space.written_in.size()) < n_slots) {
    space.written_in.resize(static_cast<std::size_t>(n_slots), 0);
  }
  const std::uint64_t call = ++space.call;
  for (const Row& row : space.rows) {
    std::uint64_t& mark = space.written_in[static_cast<std::size_t>(row.write)];
    if (mark == call) {
      return {Code::kInvalidArgument,
              "slot " + std::to_string(row.write) + " is written by two rows of one batch, row " +
                  std::to_string(row.index) + " among them; give every row its own slot"};
    }
    mark = call;
  }
  for (const Row& row : space.rows) {
    if (row.read == row.write) continue;
    if (space.written_in[static_cast<std::size_t>(row.read)] == call) {
      return {Code::kInvalidArgument,
              "row " + std::to_string(row.index) + " reads slot " + std::to_string(row.read) +
                  ", which another row of the batch writes; read it in an earlier batch"};
    }
  }
  return {};
}

/// Whether a batch is divided by rows: one thread then does all of a row, whose page and records
/// are still in its cache when they are written. Few rows are divided by heads.
bool by_rows(std::size_t n_rows, const ThreadPool& threads) {
  constexpr int kRowsPerThread = 16;  // enough for flushes to even out
  return n_rows >=
         static_cast<std::size_t>(kRowsPerThread) * static_cast<std::size_t>(threads.n_threads());
}

/// Rows of one wave: enough work to keep every thread busy between two barriers, few enough that
/// corrections and (by heads) staged pages stay small beside the pool.
std::int64_t wave_rows(const LayerState& state, const ThreadPool& threads, bool divide_rows) {
  constexpr std::int64_t kRowsPerThread = 64, kHeadsPerThread = 64;
  if (divide_rows) return kRowsPerThread * threads.n_threads();
  return std::max<std::int64_t>(
      1, kHeadsPerThread * threads.n_threads() / state.layer->shape.n_value_heads);
}

/// Zeroes a page to encode into, where there are bytes that no head owns.
void clear_page(const LayerCodec& codec, std::uint8_t* page) {
  const PayloadBytes payload = codec.payload();
  if (payload.padding > 0) std::memset(page, 0, static_cast<std::size_t>(payload.total()));
}

/// Gives every due row of a wave a page to encode into.
void stage_pages(const LayerState& state, std::span<Row> wave) {
  const LayerCodec& codec = *state.layer->codec;
  const std::int64_t stride = (codec.page_bytes() + 63) / 64 * 64;
  Workspace& space = thread_workspace();
  std::int64_t n_due = 0;
  for (const Row& row : wave) n_due += row.due;
  if (n_due == 0) return;
  space.pages.grow(static_cast<std::size_t>(n_due * stride));
  std::int64_t at = 0;
  for (Row& row : wave) {
    if (!row.due) continue;
    row.staged = reinterpret_cast<std::uint8_t*>(space.pages.data()) + at;
    clear_page(codec, row.staged);
    at += stride;
  }
}

Token token_of(const LayerState& state, const StepInput& input, const Row& row, int head) {
  const LayerShape& shape = state.layer->shape;
  const int key_head = shape.key_head(head);
  Token token;
  token.q = input.q + row.index * input.q_stride + std::int64_t{key_head} * shape.K;
  token.k = input.k + row.index * input.k_stride + std::int64_t{key_head} * shape.K;
  token.v = input.v + row.index * input.v_stride + std::int64_t{head} * shape.V;
  token.g = input.g + row.index * input.g_stride + std::int64_t{head} * shape.gate_width();
  token.beta = input.beta[row.index * input.beta_stride + head];
  if (state.scheme->beta_bf16) token.beta = bf16_to_f32(f32_to_bf16(token.beta));
  return token;
}

void fill_output(const LayerState& state, const StepInput& input, std::int64_t row, float value) {
  const LayerShape& shape = state.layer->shape;
  std::fill_n(input.out + row * input.out_stride, std::int64_t{shape.n_value_heads} * shape.V,
              value);
}

/// The key vectors of a wave as a codec that keeps Z = M S wants them: M^-T k and M^-T q of every
/// token, which its page is read at, and M k of all records of a window that is due. Made for the
/// whole wave beforehand, so that M and M^-1 stay in cache from row to row, and once for all value
/// heads that share them and the key.
class TransformedVectors {
 public:
  explicit TransformedVectors(const LayerState& state)
      : state_(state), codec_(*state.layer->codec), shape_(state.layer->shape) {
    if (codec_.read_transform(0) == nullptr) return;
    n_units_ = shape_.n_key_heads;
    for (int head = 0; head < shape_.n_value_heads; ++head) {
      const int first = shape_.key_head(head) * shape_.group();
      if (codec_.read_transform(head) != codec_.read_transform(first)) {
        n_units_ = shape_.n_value_heads;
      }
    }
  }

  /// Of a step: the reads of all rows of the wave, and what is written by those that are due.
  void make(const StepInput& input, std::span<Row> wave, ThreadPool& threads) {
    if (n_units_ == 0) return;
    Workspace& space = thread_workspace();
    grow(space.reads, std::ssize(wave) * floats_a_row());
    reads_ = space.reads.data();
    n_rows_ = std::ssize(wave);
    const std::vector<Row*>& due = place_written(wave, /*with_token=*/true);
    const std::int64_t n_blocks = (n_rows_ + kBlock - 1) / kBlock;
    const std::int64_t n_reads = n_blocks * n_units_;
    threads.parallel_for(n_reads + std::ssize(due) * n_units_, [&](std::int64_t task, int) {
      const int unit = static_cast<int>(task % n_units_);
      if (task < n_reads) return make_reads(input, wave, task / n_units_, unit);
      make_written(*due[static_cast<std::size_t>((task - n_reads) / n_units_)], unit, &input);
    });
  }

  /// Of a flush out of turn: what is written by the records of every row.
  void make(std::span<Row> wave, ThreadPool& threads) {
    if (n_units_ == 0) return;
    const std::vector<Row*>& due = place_written(wave, /*with_token=*/false);
    threads.parallel_for(std::ssize(due) * n_units_, [&](std::int64_t task, int) {
      make_written(*due[static_cast<std::size_t>(task / n_units_)],
                   static_cast<int>(task % n_units_), nullptr);
    });
  }

  /// Points a token at what row i of the wave reads at and writes.
  void set(const Row& row, std::int64_t i, int head, Token& token) const {
    if (n_units_ == 0) return;
    const std::int64_t K = shape_.K, block = i / kBlock;
    const std::int64_t at = unit_of(head) * rows_in(block) + i % kBlock;
    token.read_k = reads_ + block * kBlock * floats_a_row() + at * 2 * K;
    token.read_q = token.read_k + K;
    token.written = written(row, head);
  }

  /// [records][K] of a row, or null where there is none to share.
  const float* written(const Row& row, int head) const {
    return row.written == nullptr ? nullptr : row.written + unit_of(head) * floats_a_window();
  }

 private:
  static constexpr std::int64_t kBlock = 16;  // rows: their vectors and M^-1 fit the second cache

  static void grow(std::vector<float>& to, std::int64_t n) {
    if (std::ssize(to) < n) to.resize(static_cast<std::size_t>(n));
  }
  std::int64_t floats_a_row() const { return std::int64_t{2} * n_units_ * shape_.K; }
  std::int64_t floats_a_window() const {
    return std::int64_t{state_.layer->window.capacity()} * shape_.K;
  }
  std::int64_t unit_of(int head) const { return head / (shape_.n_value_heads / n_units_); }
  int first_head(int unit) const { return unit * (shape_.n_value_heads / n_units_); }
  std::int64_t rows_in(std::int64_t block) const {
    return std::min(kBlock, n_rows_ - block * kBlock);
  }

  /// Gives every due row of the wave room for M k, and returns these rows.
  const std::vector<Row*>& place_written(std::span<Row> wave, bool with_token) const {
    Workspace& space = thread_workspace();
    space.due.clear();
    // Mode v replays its records one at a time, and channel gates decay keys before M.
    const WindowLayout& window = state_.layer->window;
    if (window.capacity() == 0 || window.mode() != RecordMode::kU || shape_.gate != Gate::kScalar) {
      return space.due;
    }
    for (Row& row : wave) {
      if (row.due && row.fill + (with_token ? 1 : 0) > 0) space.due.push_back(&row);
    }
    grow(space.written, std::ssize(space.due) * n_units_ * floats_a_window());
    float* at = space.written.data();
    for (Row* row : space.due) {
      row->written = at;
      at += n_units_ * floats_a_window();
    }
    return space.due;
  }

  void make_reads(const StepInput& input, std::span<const Row> wave, std::int64_t block,
                  int unit) const {
    const std::int64_t K = shape_.K, n = rows_in(block);
    const std::int64_t key_at = shape_.key_head(first_head(unit)) * K;
    thread_local std::vector<float> inputs;  // [rows][2][K]
    grow(inputs, std::int64_t{2} * kBlock * K);
    float* x = inputs.data();
    for (const Row& row :
         wave.subspan(static_cast<std::size_t>(block * kBlock), static_cast<std::size_t>(n))) {
      std::copy_n(input.k + row.index * input.k_stride + key_at, K, x);
      std::copy_n(input.q + row.index * input.q_stride + key_at, K, x + K);
      x += 2 * K;
    }
    small_gemm(2 * static_cast<int>(n), shape_.K, shape_.K, inputs.data(), K, 1,
               codec_.read_transform(first_head(unit)), K,
               reads_ + block * kBlock * floats_a_row() + unit * 2 * n * K, K, false);
  }

  /// `input` null: of the records alone.
  void make_written(const Row& row, int unit, const StepInput* input) const {
    const std::int64_t K = shape_.K;
    const int head = first_head(unit), key_head = shape_.key_head(head);
    const WindowLayout& window = state_.layer->window;
    thread_local std::vector<float> keys;  // [capacity][K]
    grow(keys, floats_a_window());
    for (int m = 0; m < row.fill; ++m) {
      window.load_key(window_of(state_, row.read), m, key_head, keys.data() + m * K);
    }
    int n = row.fill;
    if (input != nullptr) {  // as its record would be stored
      const WindowLayout one(LayerShape{1, 1, shape_.K, shape_.V, shape_.gate}, window.records(),
                             window.mode(), 1);
      thread_local std::vector<std::uint8_t> record;
      record.resize(static_cast<std::size_t>(one.n_bytes()));
      one.store_key(record.data(), 0, 0, input->k + row.index * input->k_stride + key_head * K);
      one.load_key(record.data(), 0, 0, keys.data() + n++ * K);
    }
    small_gemm(n, shape_.K, shape_.K, keys.data(), K, 1, codec_.write_transform(head), K,
               row.written + unit * floats_a_window(), K, false);
  }

  const LayerState& state_;
  const LayerCodec& codec_;
  const LayerShape& shape_;
  int n_units_ = 0;          // transforms of a row: none, one a key head, one a value head
  float* reads_ = nullptr;   // [block][unit][row of the block][2][K]
  std::int64_t n_rows_ = 0;  // of the wave
};

/// Asks a head's encoder what its rounding costs, and counts it against the head's guard.
class GuardedRounding {
 public:
  GuardedRounding(const LayerState& state, int head, CodecScratch& scratch)
      : limit_(state.guard == nullptr ? 0 : state.layer->codec->guard(head)), scratch_(scratch) {
    scratch_.cost = limit_ > 0 ? &cost_ : nullptr;
  }
  GuardedRounding(const GuardedRounding&) = delete;
  GuardedRounding& operator=(const GuardedRounding&) = delete;
  ~GuardedRounding() { scratch_.cost = nullptr; }

  /// After encoding.
  void count(GuardCounts* to) const {
    if (limit_ > 0) add(to, {1, cost_ > limit_ ? 1 : 0});
  }
  static void add(GuardCounts* to, const GuardCounts& counts) {
    if (counts.roundings == 0) return;
    std::atomic_ref<std::int64_t>(to->roundings)
        .fetch_add(counts.roundings, std::memory_order_relaxed);
    std::atomic_ref<std::int64_t>(to->over).fetch_add(counts.over, std::memory_order_relaxed);
  }

 private:
  const float limit_;
  float cost_ = 0;
  CodecScratch& scratch_;
};

/// Whether pages are the f32 states themselves and every step rewrites them where they lie.
bool works_in_place(const LayerState& state) {
  return state.scheme->period == 1 && state.layer->codec->in_place(0, state.pages) != nullptr;
}

/// First half: outputs, corrections and new pages of one head; no slot is written.
template <Gate gate>
void compute_head(const LayerState& state, const StepInput& input, Row& row, int head,
                  const Token& token, float* u) {
  const LayerShape& shape = state.layer->shape;
  const std::uint8_t* page = page_of(state, row.read);
  const std::uint8_t* block = window_of(state, row.read);
  float* o = input.out + row.index * input.out_stride + std::int64_t{head} * shape.V;
  Head<gate> arithmetic(*state.layer, head);
  const bool decode = state.scheme->period == 1;  // every step rewrites the state: it is needed
  bool finite = arithmetic.read(page, block, row.fill, token, decode, u, o);
  if (finite && row.due) {
    const GuardedRounding guarded(state, head, thread_scratch().codec);
    finite = state.scheme->period > 1
                 ? arithmetic.rebuild(block, row.fill, token, u, row.staged, row.rounding)
                 : arithmetic.rewrite(token, u, row.staged, row.rounding);
    guarded.count(&row.guard);
  } else if (finite && works_in_place(state)) {
    finite = arithmetic.write_stays_finite(token, u);
  }
  if (!finite) row.fail();
}

/// Second half where pages are dense: S <- D S + k u^T for one head.
template <Gate gate>
void write_head(const LayerState& state, const StepInput& input, const Row& row, int head,
                const float* u) {
  if (row.failed != 0) return;
  const LayerCodec& codec = *state.layer->codec;
  const Token token = token_of(state, input, row, head);
  Head<gate> arithmetic(*state.layer, head);
  arithmetic.write(codec.in_place(head, page_of(state, row.read)), token, u,
                   codec.in_place(head, page_of(state, row.write)));
}

/// Second half otherwise: the row's page and window.
void write_row(const LayerState& state, const StepInput& input, const Row& row, const float* u) {
  if (row.failed != 0) return;
  const LayerShape& shape = state.layer->shape;
  const std::size_t page_bytes = static_cast<std::size_t>(state.layer->codec->page_bytes());
  if (row.due) {
    std::memcpy(page_of(state, row.write), row.staged, page_bytes);
    return;
  }
  std::uint8_t* block = window_of(state, row.write);
  if (row.read != row.write) {
    std::memcpy(page_of(state, row.write), page_of(state, row.read), page_bytes);
    std::memcpy(block, window_of(state, row.read),
                static_cast<std::size_t>(state.layer->window.n_bytes()));
  }
  const WindowLayout& window = state.layer->window;
  for (int head = 0; head < shape.n_value_heads; ++head) {
    const Token token = token_of(state, input, row, head);
    // The key only once, from its key head's first value head.
    if (head % shape.group() == 0) {
      window.store_key(block, row.fill, shape.key_head(head), token.k);
    }
    const float* value =
        window.mode() == RecordMode::kV ? token.v : u + std::int64_t{head} * shape.V;
    window.store_value(block, row.fill, head, value, token.g, token.beta);
  }
}

/// Ends a wave: cursors move on, failed rows are quarantined.
void settle(const LayerState& state, std::span<const Row> wave) {
  for (const Row& row : wave) {
    if (row.failed != 0) {
      mark_faulty(state, row.write);
      continue;
    }
    GuardedRounding::add(state.guard, row.guard);
    if (state.scheme->period == 1) continue;
    Cursor& cursor = cursor_of(state, row.write);
    cursor = row.due ? Cursor{} : Cursor{row.fill + 1, row.limit};
  }
}

/// Asks memory for a share of what the next row will read first: its records, which lie too
/// scattered for the machine's own prefetcher, and the start of its page.
void prefetch_share(const LayerState& state, const Row& row, int head) {
  const int HV = state.layer->shape.n_value_heads;
  for (int m = head; m < row.fill; m += HV) {
    state.layer->window.prefetch(window_of(state, row.read), m);
  }
  constexpr std::int64_t kStart = 4096, kLine = 64;  // kernels ask for what follows themselves
  const std::uint8_t* const page = page_of(state, row.read);
  for (std::int64_t e = kStart / kLine * head / HV; e < kStart / kLine * (head + 1) / HV; ++e) {
    __builtin_prefetch(page + e * kLine);
  }
}

template <Gate gate>
void step_wave(const LayerState& state, const StepInput& input, std::span<Row> wave,
               bool divide_rows, ThreadPool& threads) {
  const LayerShape& shape = state.layer->shape;
  const std::int64_t HV = shape.n_value_heads;
  const std::int64_t n_rows = static_cast<std::int64_t>(wave.size());
  float* const u = thread_workspace().u.data();
  const bool in_place = works_in_place(state);
  const auto row_at = [&](std::int64_t i) -> Row& { return wave[static_cast<std::size_t>(i)]; };
  const auto u_of = [&](std::int64_t i, std::int64_t head) {
    return u + (i * HV + head) * shape.V;
  };
  TransformedVectors vectors(state);
  vectors.make(input, wave, threads);
  const auto compute = [&](std::int64_t i, std::int64_t head) {
    const int h = static_cast<int>(head);
    Token token = token_of(state, input, row_at(i), h);
    vectors.set(row_at(i), i, h, token);
    compute_head<gate>(state, input, row_at(i), h, token, u_of(i, head));
  };
  const auto write = [&](std::int64_t i, std::int64_t head) {
    write_head<gate>(state, input, row_at(i), static_cast<int>(head), u_of(i, head));
  };

  const auto finish_row = [&](std::int64_t i) {
    if (!in_place) return write_row(state, input, row_at(i), u_of(i, 0));
    for (std::int64_t head = 0; head < HV; ++head) write(i, head);
  };
  if (divide_rows) {
    constexpr std::int64_t kRowsPerTask = 4;
    const auto run_rows = [&](std::int64_t task, int) {
      const std::int64_t end = std::min(n_rows, (task + 1) * kRowsPerTask);
      for (std::int64_t i = task * kRowsPerTask; i < end; ++i) {
        if (row_at(i).due) stage_pages(state, wave.subspan(static_cast<std::size_t>(i), 1));
        for (std::int64_t head = 0; head < HV; ++head) {
          if (i + 1 < end) prefetch_share(state, row_at(i + 1), static_cast<int>(head));
          compute(i, head);
        }
        finish_row(i);
      }
    };
    threads.parallel_for((n_rows + kRowsPerTask - 1) / kRowsPerTask, run_rows);
  } else {
    stage_pages(state, wave);
    threads.parallel_for(n_rows * HV, [&](std::int64_t i, int) { compute(i / HV, i % HV); });
    if (in_place) {
      threads.parallel_for(n_rows * HV, [&](std::int64_t i, int) { write(i / HV, i % HV); });
    } else {
      threads.parallel_for(n_rows, [&](std::int64_t i, int) { finish_row(i); });
    }
  }
  settle(state, wave);
  for (const Row& row : wave) {
    if (row.failed != 0) {
      fill_output(state, input, row.index, std::numeric_limits<float>::quiet_NaN());
    }
  }
}

template <Gate gate>
void flush_wave(const LayerState& state, std::span<Row> wave, ThreadPool& threads) {
  const std::int64_t HV = state.layer->shape.n_value_heads;
  stage_pages(state, wave);
  TransformedVectors vectors(state);
  vectors.make(wave, threads);
  const auto compute = [&](std::int64_t i, int) {
    Row& row = wave[static_cast<std::size_t>(i / HV)];
    const int head = static_cast<int>(i % HV);
    Head<gate> arithmetic(*state.layer, head);
    if (arithmetic.materialise(page_of(state, row.read), window_of(state, row.read), row.fill,
                               vectors.written(row, head))) {
      const GuardedRounding guarded(state, head, thread_scratch().codec);
      arithmetic.encode(row.staged, row.rounding);
      guarded.count(&row.guard);
    } else {
      row.fail();
    }
  };
  threads.parallel_for(static_cast<std::int64_t>(wave.size()) * HV, compute);
  for (const Row& row : wave) {
    if (row.failed != 0) continue;
    GuardedRounding::add(state.guard, row.guard);
    std::memcpy(page_of(state, row.write), row.staged,
                static_cast<std::size_t>(state.layer->codec->page_bytes()));
  }
}

template <class Fn>
void for_each_wave(std::span<Row> rows, std::int64_t rows_a_wave, Fn&& fn) {
  const std::size_t n = static_cast<std::size_t>(rows_a_wave);
  for (std::size_t at = 0; at < rows.size(); at += n) {
    fn(rows.subspan(at, std::min(n, rows.size() - at)));
  }
}

Row row_of(const LayerState& state, std::int64_t index, std::int64_t read, std::int64_t write) {
  Row row;
  row.index = index;
  row.read = read;
  row.write = write;
  const int period = state.scheme->period;
  if (period > 1) {
    const Cursor& cursor = cursor_of(state, read);
    row.fill = cursor.fill;
    row.limit = cursor.limit;
    SP_CHECK(row.fill >= 0 && row.fill < period && row.limit >= 0 && row.limit <= period,
             "a cursor outside its window");
  }
  return row;
}

Status check_slot(const LayerState& state, std::int64_t slot) {
  if (slot >= 0 && slot < state.n_slots) return {};
  return {Code::kInvalidArgument, "slot " + std::to_string(slot) +
                                      " does not exist; the pool has slots 0 to " +
                                      std::to_string(state.n_slots - 1)};
}

Status quarantined_slot(std::int64_t slot) {
  return {Code::kNotFinite, "slot " + std::to_string(slot) +
                                " is quarantined because a value in it was not finite; free it"};
}

}  // namespace

Status step(const LayerState& state, const StepInput& input, ThreadPool& threads) {
  Workspace& space = thread_workspace();
  space.rows.clear();
  const bool in_place = works_in_place(state);
  if (state.scheme->rounding == Rounding::kStochastic && input.positions == nullptr) {
    return {Code::kInvalidArgument,
            "stochastic rounding draws by position; give the step the positions of its tokens"};
  }
  for (std::int64_t i = 0; i < input.n_rows; ++i) {
    const std::int64_t read = input.read_slots[i];
    const std::int64_t write = input.write_slots == nullptr ? read : input.write_slots[i];
    const bool padding = read < input.first_valid_slot;
    if (padding != (write < input.first_valid_slot)) {
      return {Code::kInvalidArgument, "row " + std::to_string(i) + " reads slot " +
                                          std::to_string(read) + " and writes slot " +
                                          std::to_string(write) +
                                          ", of which one is padding; both must be, or neither"};
    }
    if (padding) continue;
    if (read < 0 || read >= state.n_slots) return bad_slot(i, read, state.n_slots);
    if (write < 0 || write >= state.n_slots) return bad_slot(i, write, state.n_slots);
    Row row = row_of(state, i, read, write);
    const int limit = row.limit == 0 ? state.scheme->period : row.limit;
    row.due = !in_place && row.fill + 1 >= limit;
    row.rounding = rounding_at(state, input.positions == nullptr ? 0 : input.positions[i],
                               page_of(state, read));
    space.rows.push_back(row);
  }
  SP_RETURN_IF_ERROR(claim_slots(space, state.n_slots));

  for (std::int64_t i = 0; i < input.n_rows; ++i) {
    if (input.read_slots[i] < input.first_valid_slot) fill_output(state, input, i, 0.0f);
  }
  // A quarantined slot stays as it is, and so does one that would be made from it.
  std::erase_if(space.rows, [&](const Row& row) {
    if (!is_faulty(state, row.read) && !is_faulty(state, row.write)) return false;
    mark_faulty(state, row.write);
    fill_output(state, input, row.index, std::numeric_limits<float>::quiet_NaN());
    return true;
  });
  const bool divide_rows = by_rows(space.rows.size(), threads);
  const std::int64_t rows_a_wave =
      std::min(wave_rows(state, threads, divide_rows),
               std::max<std::int64_t>(1, static_cast<std::int64_t>(space.rows.size())));
  const std::int64_t u_floats =
      rows_a_wave * state.layer->shape.n_value_heads * std::int64_t{state.layer->shape.V};
  if (static_cast<std::int64_t>(space.u.size()) < u_floats) {
    space.u.resize(static_cast<std::size_t>(u_floats));
  }
  for_each_wave(space.rows, rows_a_wave, [&](std::span<Row> wave) {
    if (state.layer->shape.gate == Gate::kScalar) {
      step_wave<Gate::kScalar>(state, input, wave, divide_rows, threads);
    } else {
      step_wave<Gate::kChannel>(state, input, wave, divide_rows, threads);
    }
  });
  return {};
}

Status flush(const LayerState& state, std::span<const std::int64_t> slots, ThreadPool& threads) {
  Workspace& space = thread_workspace();
  space.rows.clear();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    SP_RETURN_IF_ERROR(check_slot(state, slots[i]));
    Row row = row_of(state, static_cast<std::int64_t>(i), slots[i], slots[i]);
    row.due = true;
    row.rounding = rounding_at(state, kNoPosition, page_of(state, slots[i]));
    space.rows.push_back(row);
  }
  SP_RETURN_IF_ERROR(claim_slots(space, state.n_slots));
  std::erase_if(space.rows,
                [&](const Row& row) { return row.fill == 0 || is_faulty(state, row.write); });
  for_each_wave(space.rows, wave_rows(state, threads, false), [&](std::span<Row> wave) {
    if (state.layer->shape.gate == Gate::kScalar) {
      flush_wave<Gate::kScalar>(state, wave, threads);
    } else {
      flush_wave<Gate::kChannel>(state, wave, threads);
    }
    for (const Row& row : wave) {
      if (row.failed != 0) {
        mark_faulty(state, row.write);
        continue;
      }
      // Absolute boundaries stay where they are: what is left of the window is the next one.
      const int limit = row.limit == 0 ? state.scheme->period : row.limit;
      const bool absolute = state.scheme->phase == Phase::kAbsolute;
      cursor_of(state, row.write) = Cursor{0, absolute ? limit - row.fill : 0};
    }
  });
  return {};
}

Status hand_over(const LayerState& state, std::int64_t slot, const float* S, std::int64_t n_tokens,
                 ThreadPool& threads) {
  SP_RETURN_IF_ERROR(check_slot(state, slot));
  if (n_tokens < 0) {
    return {Code::kInvalidArgument, "a hand-over after " + std::to_string(n_tokens) +
                                        " tokens: the count must not be negative"};
  }
  if (is_faulty(state, slot)) return quarantined_slot(slot);
  const LayerShape& shape = state.layer->shape;
  const std::int64_t K = shape.K, V = shape.V;
  std::atomic<int> bad_head{-1};
  threads.parallel_for(shape.n_value_heads, [&](std::int64_t head, int) {
    if (kernel::peak_bits(S + head * K * V, K * V) >= kInfBits) {
      bad_head.store(static_cast<int>(head), std::memory_order_relaxed);
    }
  });
  if (bad_head.load() >= 0) {
    mark_faulty(state, slot);
    return {Code::kNotFinite, "the prefilled state of slot " + std::to_string(slot) +
                                  ", value head " + std::to_string(bad_head.load()) +
                                  ", holds NaN or Inf; the slot is quarantined, free it"};
  }
  const LayerCodec& codec = *state.layer->codec;
  const RoundingContext at =
      rounding_at(state, std::max<std::int64_t>(n_tokens, 1) - 1, /*before=*/nullptr);
  threads.parallel_for(shape.n_value_heads, [&](std::int64_t i, int) {
    const int head = static_cast<int>(i);
    const float* X = S + i * K * V;
    Scratch& scratch = thread_scratch();
    scratch.prepare(*state.layer, WindowLayout());
    if (const float* Mt = codec.write_transform(head)) {  // Z = M S
      small_gemm(shape.K, shape.V, shape.K, Mt, 1, K, X, V, scratch.S, V, false);
      X = scratch.S;
    }
    const GuardedRounding guarded(state, head, scratch.codec);
    codec.encode(head, X, page_of(state, slot), at, scratch.codec);
    guarded.count(state.guard);
  });
  cursor_of(state, slot) = Cursor{0, first_limit(*state.scheme, n_tokens)};
  return {};
}

namespace {

template <Gate gate>
void restore_head(const LayerState& state, std::int64_t slot, int fill, int head, float* S) {
  const std::int64_t K = state.layer->shape.K, V = state.layer->shape.V;
  Head<gate> arithmetic(*state.layer, head);
  arithmetic.materialise(page_of(state, slot), window_of(state, slot), fill, nullptr);
  const float* Z = arithmetic.scratch_state();
  const float* inverse = state.layer->codec->read_transform(head);
  if (inverse == nullptr) {
    std::memcpy(S, Z, sizeof(float) * static_cast<std::size_t>(K * V));
    return;
  }
  // S = M^-1 Z
  const LayerShape& shape = state.layer->shape;
  small_gemm(shape.K, shape.V, shape.K, inverse, K, 1, Z, V, S, V, false);
}

}  // namespace

Status restore_dense(const LayerState& state, std::int64_t slot, float* S, ThreadPool& threads) {
  SP_RETURN_IF_ERROR(check_slot(state, slot));
  if (is_faulty(state, slot)) return quarantined_slot(slot);
  const LayerShape& shape = state.layer->shape;
  const int fill = row_of(state, 0, slot, slot).fill;
  threads.parallel_for(shape.n_value_heads, [&](std::int64_t i, int) {
    const int head = static_cast<int>(i);
    float* to = S + i * shape.K * shape.V;
    if (shape.gate == Gate::kScalar) {
      restore_head<Gate::kScalar>(state, slot, fill, head, to);
    } else {
      restore_head<Gate::kChannel>(state, slot, fill, head, to);
    }
  });
  return {};
}

}  // namespace statepack
