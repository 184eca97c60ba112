// The kernels, over any page type of *_page.cuh.
//
//   step_kernel     rows whose window has room: read page and window, append a record
//   rewrite_kernel  rows whose page changes: period 1, a complete window, flush, hand-over; and the
//                   restore of a dense state
//   dense_kernel    period 1 where pages are plain values: columns are independent, so a block
//                   takes kDenseColumns of a head and a small batch still fills the machine
//
// A block works on one value head of one row (dense_kernel: on its columns), in one fixed order.
// Where there are windows, a row's heads meet in a ticket: the last to arrive moves the cursor on,
// unless a head has failed. A failed head (or its columns) writes nothing but NaN output; heads of
// the row that were done before may have written theirs. The fault word keeps such a slot from
// being read until it is freed.
#pragma once

#include <type_traits>

#include "delta/cuda/block.cuh"
#include "delta/cuda/launch.cuh"
#include "delta/cuda/window.cuh"

namespace statepack::cuda {

/// Warps of step_kernel. Row blocks are summed in as many groups, whatever kernel reads a page.
inline constexpr int kReadGroups = 4;

/// Which of its uses a rewrite_kernel is compiled for: less code misses the instruction cache less.
enum class Use { kAny, kPerStep, kWindow };

/// What a kernel is compiled for besides page type and gate: K = V = 128 or any shape, one format
/// of records or any, one use or any.
template <bool kFull_, int kRecords_ = -1, Use kUse_ = Use::kAny>
struct Fixed {
  static constexpr bool kFull = kFull_;
  static constexpr int kRecords = kRecords_;
  static constexpr Use kUse = kUse_;

  /// The layer with what is known written in as constants.
  static __device__ LayerView layer(const LayerView& any) {
    LayerView known = any;
    if constexpr (kFull) known.K = known.V = kMaxWidth;
    if constexpr (kRecords >= 0) known.window.records = static_cast<Records>(kRecords);
    if constexpr (kUse == Use::kPerStep) known.period = 1;
    return known;
  }
};

__device__ inline float nan_value() { return __uint_as_float(0x7fc00000u); }

__device__ inline std::int64_t load_slot(const TokenView& token, const void* slots, int row) {
  return token.wide_slots ? static_cast<const std::int64_t*>(slots)[row]
                          : static_cast<const std::int32_t*>(slots)[row];
}

/// A row as every block of it sees it.
struct RowPlace {
  std::int64_t read = 0, write = 0;
  bool padding = false, outside = false;
  bool faulty = false;  // as this thread saw it: a block asks all of its threads before it acts
  int fill = 0, limit = 0;

  __device__ RowPlace(const LaunchArgs& a, int row) {
    read = a.token.read_slots == nullptr ? a.slot : load_slot(a.token, a.token.read_slots, row);
    write = a.token.write_slots == nullptr ? read : load_slot(a.token, a.token.write_slots, row);
    padding = read < a.token.first_valid_slot || write < a.token.first_valid_slot;
    outside = read < 0 || read >= a.pool.n_slots || write < 0 || write >= a.pool.n_slots;
    if (padding || outside) return;
    if (a.layer.period > 1) {
      const Cursor cursor = cursor_at(a.pool, read);
      fill = cursor.fill;
      limit = cursor.limit;
    }
    const std::uint32_t of_read = *fault_at(a.pool, read);
    faulty = (of_read | (write == read ? 0u : *fault_at(a.pool, write))) != 0;
  }
  static __device__ Cursor& cursor_at(const PoolView& pool, std::int64_t slot) {
    return *reinterpret_cast<Cursor*>(reinterpret_cast<std::uint8_t*>(pool.cursors) +
                                      slot * pool.cursor_stride);
  }
  // Volatile: another head of the row may set it in this launch.
  static __device__ volatile std::uint32_t* fault_at(const PoolView& pool, std::int64_t slot) {
    return reinterpret_cast<volatile std::uint32_t*>(reinterpret_cast<std::uint8_t*>(pool.faults) +
                                                     slot * pool.fault_stride);
  }
  __device__ int whole_limit(const LayerView& layer) const {
    return limit == 0 ? layer.period : limit;
  }
  __device__ bool due(const LayerView& layer) const { return fill + 1 >= whole_limit(layer); }
};

/// One value head of one row.
struct Task {
  int row, head, key_head;
  bool with_key;  // the head that stores its key head's records

  __device__ Task(const LayerView& layer, int row_, int head_) : row(row_), head(head_) {
    key_head = layer.heads_per_key == 1
                   ? head
                   : static_cast<int>(
                         __umulhi(static_cast<std::uint32_t>(head), layer.heads_per_key_inverse));
    with_key = head == key_head * layer.heads_per_key;
  }
  __device__ float* out(const LaunchArgs& a, int V) const {
    return a.token.out + row * a.token.out_stride + static_cast<std::int64_t>(head) * V;
  }
};

/// Shared memory of a block, by name. Vectors have room for kMaxWidth floats.
struct Shared {
  float *q, *k;            // of the token, finished
  float *read_q, *read_k;  // decayed by the token's gate: what records are read with
  float *page_q, *page_k;  // decayed by the window too, times row factors: for the page's codes
  float* decay;            // [gate_width] of the token, as computed
  float* log;              // [gate_width] its logarithm
  float* gamma;            // [gate_width] of the page up to the last record
  float* u;                // correction
  float* partial;          // [groups or row blocks][2][kMaxWidth] sums along page_k and page_q
  float* keys;             // [n_keys][kMaxWidth]
  float* values;           // [n_values][kMaxWidth]
  float* weight;           // [kMaxRecords] decay of each record, scalar gate
  float* dots;             // [kMaxRecords + kMaxRank][2] records, then compensators; at k and q
  float* scalars;
  std::uint8_t* page;

  static constexpr int kBeta = 0, kKeyQuery = 1, kScalars = 4;

  static __host__ __device__ int floats(int n_partial, int n_keys, int n_values, int n_gates) {
    return (7 + 2 * n_partial + n_keys + n_values) * kMaxWidth + 3 * n_gates + kMaxRecords +
           2 * (kMaxRecords + kMaxRank) + kScalars;
  }
  /// `n_gates`: room for decay, log and gamma, a multiple of 4.
  __device__ Shared(unsigned char* memory, int n_partial, int n_keys, int n_values, int n_gates) {
    float* at = reinterpret_cast<float*>(memory);
    const auto take = [&](int n) {
      float* array = at;
      at += n;
      return array;
    };
    q = take(kMaxWidth), k = take(kMaxWidth);
    read_q = take(kMaxWidth), read_k = take(kMaxWidth);
    page_q = take(kMaxWidth), page_k = take(kMaxWidth);
    u = take(kMaxWidth);
    decay = take(n_gates), log = take(n_gates), gamma = take(n_gates);
    weight = take(kMaxRecords);
    dots = take(2 * (kMaxRecords + kMaxRank));
    scalars = take(kScalars);
    partial = take(2 * n_partial * kMaxWidth);
    keys = take(n_keys * kMaxWidth);
    values = take(n_values * kMaxWidth);
    page = reinterpret_cast<std::uint8_t*>(at);
  }
};

__host__ __device__ constexpr int gate_room(Gate gate) {
  return gate == Gate::kScalar ? 4 : kMaxWidth;
}
/// Rows of `keys` and `values` that a kernel needs.
__host__ __device__ inline int step_keys(const LayerView& layer, Gate gate) {
  return gate == Gate::kChannel ? layer.period : 0;
}
__host__ __device__ inline int rewrite_vectors(const LayerView& layer) {
  const int all = layer.period + layer.codec.rank + 1;
  return all > kMaxRank ? all : kMaxRank;
}

// ---------------------------------------------------------------------------------------------
// Reading

/// What a thread fetches of one token of one head before it knows the slot.
struct TokenParts {
  float x[kMaxWidth / 32];           // the first warps: of q or k
  float g = 0, A_log = 0, bias = 0;  // threads from the last on: gates
  float beta = 0;
  float v = 0;  // column b.thread
};

/// Gates are dealt to threads from the last on: the first warps are at q and k.
__device__ inline int gate_index(const Block& b) { return b.n_threads - 1 - b.thread; }

template <Gate gate>
__device__ inline TokenParts fetch_token(const Block& b, const LaunchArgs& a, const Task& task) {
  const TokenView& token = a.token;
  TokenParts parts;
  if (b.warp < 2) {
    const float* from =
        (b.warp == 0 ? token.q + task.row * token.q_stride : token.k + task.row * token.k_stride) +
        task.key_head * b.K;
#pragma unroll
    for (int e = 0; e < kMaxWidth / 32; ++e) {
      const int i = b.lane + 32 * e;
      parts.x[e] = i < b.K ? from[i] : 0.0f;
    }
  }
  const int width = gate == Gate::kScalar ? 1 : b.K;
  const int i = gate_index(b);
  if (i < width) {
    const int at = task.head * width + i;
    parts.g = token.g[task.row * token.g_stride + at];
    if (token.raw_gates) {
      parts.A_log = token.A_log[task.head];
      parts.bias = token.dt_bias[at];
    }
    if (i == 0) parts.beta = token.beta[task.row * token.beta_stride + task.head];
  }
  if (b.thread < b.V) {
    parts.v = token.v[task.row * token.v_stride + task.head * b.V + b.thread];
  }
  return parts;
}

/// One token of one head into shared memory: q, k, decay, beta. The block meets afterwards.
template <Gate gate>
__device__ inline void store_token(const Block& b, const LaunchArgs& a, const LayerView& layer,
                                   const Task& task, const TokenParts& parts, Shared& s) {
  const TokenView& token = a.token;
  const auto store_key = [&](const float(&x)[kMaxWidth / 32], bool is_query) {
    float squares = 0;
#pragma unroll
    for (int e = 0; e < kMaxWidth / 32; ++e) squares += x[e] * x[e];
    float factor = 1;
    if (token.normalise) {
      factor = rsqrtf(warp_sum(squares) + 1e-6f);
      if (is_query) factor *= rsqrtf(static_cast<float>(b.K));
    }
    float* to = is_query ? s.q : s.k;
#pragma unroll
    for (int e = 0; e < kMaxWidth / 32; ++e) to[b.lane + 32 * e] = x[e] * factor;
  };
  if (b.warp < 2) store_key(parts.x, b.warp == 0);
  if (b.n_warps == 1) {  // K = 16: its one warp has fetched q alone
    float x[kMaxWidth / 32];
#pragma unroll
    for (int e = 0; e < kMaxWidth / 32; ++e) {
      const int i = b.lane + 32 * e;
      x[e] = i < b.K ? token.k[task.row * token.k_stride + task.key_head * b.K + i] : 0.0f;
    }
    store_key(x, false);
  }
  const int width = gate == Gate::kScalar ? 1 : b.K;
  const int i = gate_index(b);
  if (i >= width) return;
  float g = parts.g;
  if (token.raw_gates) {
    const float rate = expf(parts.A_log), x = g + parts.bias;
    g = token.lower_bound != 0 ? __fdividef(token.lower_bound, 1.0f + expf(-rate * x))
                               : -rate * (x > 20 ? x : log1pf(expf(x)));
  }
  s.log[i] = g;
  s.decay[i] = expf(g);
  if (i > 0) return;
  float beta = parts.beta;
  if (token.raw_gates) beta = __fdividef(1.0f, 1.0f + expf(-beta));
  if (layer.beta_bf16) beta = bf16_bits_to_float(float_to_bf16_bits(beta));
  s.scalars[Shared::kBeta] = beta;
}

/// Decay of every record and of the page as of the last record, before the token's own gate.
/// Suffix sums of logs or backward products of factors, never differences. With a channel gate, and
/// where `stage_keys`, decayed keys go to s.keys. The block meets before and afterwards.
template <Gate gate>
__device__ inline void decay_records(const Block& b, const RecordsOf<gate>& records, int n,
                                     bool stage_keys, Shared& s) {
  const VectorFormat format = key_format(records.window.records);
  if constexpr (gate == Gate::kScalar) {
    if (b.warp == 0) {
      float sum = b.lane < n ? records.gate_value(b.lane, 0) : 0.0f;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float later = __shfl_down_sync(kAllLanes, sum, step);
        if (b.lane + step < 32) sum += later;
      }
      const float after = __shfl_down_sync(kAllLanes, sum, 1);
      s.weight[b.lane] = expf(b.lane == 31 ? 0.0f : after);
      if (b.lane == 0) s.gamma[0] = expf(sum);
    }
    if (!stage_keys) return;
    __syncthreads();
#pragma unroll 1
    for (int at = b.thread; at < n * kMaxWidth; at += b.n_threads) {
      const int m = at / kMaxWidth, i = at % kMaxWidth;
      if (i < b.K)
        s.keys[at] = __fmul_rn(s.weight[m], load_element(format, records.key(m), b.K, i));
    }
  } else {
    for (int i = b.thread; i < b.K; i += b.n_threads) {
      float sum = 0, product = 1;
#pragma unroll 2
      for (int m = n - 1; m >= 0; --m) {
        const float gate_value = records.gate_value(m, i);
        const float key = load_element(format, records.key(m), b.K, i);
        if (records.factors()) {
          s.keys[m * kMaxWidth + i] = __fmul_rn(key, product);
          product *= gate_value;
        } else {
          s.keys[m * kMaxWidth + i] = __fmul_rn(key, expf(sum));
          sum += gate_value;
        }
      }
      if (!records.factors()) {
        s.gamma[i] = expf(sum);
      } else {  // a total of the gates as computed is kept beside factors
        s.gamma[i] = n > 0 ? expf(records.total()[i]) : 1.0f;
      }
    }
  }
}

/// Four consecutive elements of a record's key for one lane; i is their first.
__device__ inline void load_key_part(VectorFormat format, const std::uint8_t* key, int K, int i,
                                     float (&x)[4]) {
  if (format == VectorFormat::kBf16) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(key) + i / 2;
    const std::uint32_t low = words[0], high = words[1];
    x[0] = __uint_as_float(low << 16), x[1] = __uint_as_float(low & 0xffff0000u);
    x[2] = __uint_as_float(high << 16), x[3] = __uint_as_float(high & 0xffff0000u);
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = load_element(format, key, K, i + e);
}

/// Dots of n vectors with read_k and read_q, a warp each; vector(m, i, x) gives elements i .. i
/// + 3.
template <class Vector>
__device__ inline void dot_all(const Block& b, int n, const Shared& s, float* dots,
                               Vector&& vector) {
  const int i = 4 * b.lane;
  float k[4] = {}, q[4] = {};
  if (i < b.K) {
    const float4 four_k = *reinterpret_cast<const float4*>(s.read_k + i);
    const float4 four_q = *reinterpret_cast<const float4*>(s.read_q + i);
    k[0] = four_k.x, k[1] = four_k.y, k[2] = four_k.z, k[3] = four_k.w;
    q[0] = four_q.x, q[1] = four_q.y, q[2] = four_q.z, q[3] = four_q.w;
  }
  constexpr int kAtOnce = 4;  // loads under way together
#pragma unroll 1
  for (int first = b.warp; first < n; first += kAtOnce * b.n_warps) {
    float x[kAtOnce][4] = {};
#pragma unroll
    for (int step = 0; step < kAtOnce; ++step) {
      const int m = first + step * b.n_warps;
      if (m < n && i < b.K) vector(m, i, x[step]);
    }
#pragma unroll
    for (int step = 0; step < kAtOnce; ++step) {
      const int m = first + step * b.n_warps;
      if (m >= n) break;
      float along_k = 0, along_q = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        along_k = __fmaf_rn(x[step][e], k[e], along_k);
        along_q = __fmaf_rn(x[step][e], q[e], along_q);
      }
      const float sum = warp_sum_two(along_k, along_q, b.lane);
      if (b.lane % 16 == 0) dots[2 * m + b.lane / 16] = sum;
    }
  }
}

/// Decays the token's vectors, then takes their dots with all records. The block meets in it.
template <Gate gate>
__device__ inline void read_records(const Block& b, const RecordsOf<gate>& records, int n,
                                    bool keys_staged, Shared& s) {
  for (int i = b.thread; i < b.K; i += b.n_threads) {
    const float decay = s.decay[gate == Gate::kScalar ? 0 : i];
    s.read_k[i] = decay * s.k[i];
    s.read_q[i] = decay * s.q[i];
  }
  __syncthreads();
  const VectorFormat format = key_format(records.window.records);
  dot_all(b, n, s, s.dots, [&](int m, int i, float(&x)[4]) {
    if (gate == Gate::kChannel || keys_staged) {
      const float4 four = *reinterpret_cast<const float4*>(s.keys + m * kMaxWidth + i);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
      load_key_part(format, records.key(m), b.K, i, x);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = __fmul_rn(s.weight[m], x[e]);
    }
  });
  if (b.warp == b.n_warps - 1) {
    float sum = 0;
    for (int i = b.lane; i < b.K; i += 32) sum += s.k[i] * s.q[i];
    sum = warp_sum(sum);
    if (b.lane == 0) s.scalars[Shared::kKeyQuery] = sum;
  }
}

/// Once the page has arrived: dots of its compensators, and the vectors that its codes are read
/// with. The block meets before and afterwards.
template <Gate gate, class Page>
__device__ inline void prepare_page_read(const Block& b, const Page& page, Shared& s) {
  const auto gamma = [&](int i) { return s.gamma[gate == Gate::kScalar ? 0 : i]; };
  if (page.rank() > 0) {
    dot_all(b, page.rank(), s, s.dots + 2 * kMaxRecords, [&](int p, int i, float(&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = __fmul_rn(gamma(i + e), page.key(p, i + e));
    });
  }
  for (int i = b.thread; i < b.K; i += b.n_threads) {
    const float factor = gamma(i) * page.row_factor(i);
    s.page_k[i] = factor * s.read_k[i];
    s.page_q[i] = factor * s.read_q[i];
  }
}

/// Sums of the page's codes along page_k and page_q over one row block, for a lane's columns.
/// visit(quarter, f) calls f(i, c, z) for a quarter of the rows.
template <class Page, class Visit>
__device__ inline void read_row_block(const Block& b, const Page& page, const Shared& s,
                                      float (&p)[kLaneColumns], float (&r)[kLaneColumns],
                                      Visit&& visit) {
  const auto quarter = [&]<int kQuarter>(std::integral_constant<int, kQuarter>) {
    const float4 k = reinterpret_cast<const float4*>(s.page_k + b.first_row())[kQuarter];
    const float4 q = reinterpret_cast<const float4*>(s.page_q + b.first_row())[kQuarter];
    const float at_k[4] = {k.x, k.y, k.z, k.w}, at_q[4] = {q.x, q.y, q.z, q.w};
    visit(std::integral_constant<int, kQuarter>(), [&](int i, int c, float z) {
      p[c] = __fmaf_rn(at_k[i % 4], z, p[c]);
      r[c] = __fmaf_rn(at_q[i % 4], z, r[c]);
    });
  };
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) p[c] = r[c] = 0;
  quarter(std::integral_constant<int, 0>());
  quarter(std::integral_constant<int, 1>());
  quarter(std::integral_constant<int, 2>());
  quarter(std::integral_constant<int, 3>());
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    const float factor = page.column_factor(b, c);
    p[c] = __fmul_rn(factor, p[c]);
    r[c] = __fmul_rn(factor, r[c]);
  }
}

template <class Page>
__device__ inline void read_row_block(const Block& b, const Page& page, const Shared& s,
                                      float (&p)[kLaneColumns], float (&r)[kLaneColumns]) {
  const auto raw = page.fetch(b);
  read_row_block(b, page, s, p, r, [&](auto quarter, auto&& f) {
    page.template visit<decltype(quarter)::value>(b, raw, f);
  });
}

template <class Page>
__device__ inline void store_partial(const Block& b, int at, const float (&p)[kLaneColumns],
                                     const float (&r)[kLaneColumns], Shared& s) {
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    const int j = Page::Columns::column(b, c);
    s.partial[2 * at * kMaxWidth + j] = p[c];
    s.partial[(2 * at + 1) * kMaxWidth + j] = r[c];
  }
}

/// u and o of column j. `along_k` and `along_q` come from the page's codes; u goes to s.u. True
/// when both are finite.
template <class Page>
__device__ inline bool finish_column(const Page& page, int j, float v, float along_k, float along_q,
                                     float record_k, float record_q, Shared& s, float& o) {
  for (int c = 0; c < page.rank(); ++c) {
    const float value = page.value(c, j);
    along_k = __fmaf_rn(s.dots[2 * (kMaxRecords + c)], value, along_k);
    along_q = __fmaf_rn(s.dots[2 * (kMaxRecords + c) + 1], value, along_q);
  }
  along_k = __fadd_rn(along_k, record_k);
  along_q = __fadd_rn(along_q, record_q);
  const float u = s.scalars[Shared::kBeta] * (v - along_k);
  o = __fmaf_rn(s.scalars[Shared::kKeyQuery], u, along_q);
  s.u[j] = u;
  return is_finite(u) && is_finite(o);
}

// ---------------------------------------------------------------------------------------------
// Writing

/// Stores record m: key (once a key head), correction, gate, as computed.
template <Gate gate, class Space>
__device__ inline void append_record(const Block& b, const Task& task,
                                     const RecordsOf<gate>& records, std::uint8_t* block, int m,
                                     Space& s) {
  const WindowView& window = records.window;
  RecordsOf<gate> to = records;
  to.block = block;
  const auto writable = [&](const void* at) {
    return block + (static_cast<const std::uint8_t*>(at) - block);
  };
  if (b.warp == 0) {
    store_vector(value_format(window.records), s.u, b.V, b.lane, writable(to.value(m)), nullptr);
  }
  if (b.warp == b.n_warps - 1 && task.with_key) {
    store_vector(key_format(window.records), s.k, b.K, b.lane, writable(to.key(m)), nullptr);
  }
  const int width = gate == Gate::kScalar ? 1 : b.K;
  for (int i = b.thread; i < width; i += b.n_threads) {
    std::uint8_t* gate_at = writable(to.gate_of(m));
    const float g = s.log[i];
    if (to.factors()) {
      reinterpret_cast<std::uint16_t*>(gate_at)[i] = float_to_half_bits(expf(g));
      // The total of the window that was read: where it is copied, its total is not.
      const float before = m > 0 ? records.total()[i] : 0.0f;
      reinterpret_cast<float*>(writable(to.total()))[i] = clamp_log(before + g);
    } else if (to.wide_gates()) {
      reinterpret_cast<float*>(gate_at)[i] = clamp_log(g);
    } else {
      reinterpret_cast<std::uint16_t*>(gate_at)[i] = float_to_half_bits(clamp_log(g));
    }
  }
}

/// Copies a head's page and its first n records to another slot, totals excluded.
template <class Page, Gate gate>
__device__ inline void copy_head(const Block& b, const LaunchArgs& a, const RowPlace& place,
                                 const Task& task, const Page& page, const RecordsOf<gate>& records,
                                 int n) {
  const std::uint8_t* from = a.pool.pages + place.read * a.pool.page_stride;
  std::uint8_t* to = a.pool.pages + place.write * a.pool.page_stride;
  page.for_each_region(
      [&](std::int64_t offset, int bytes) { copy_out(b, to + offset, from + offset, bytes); });
  std::uint8_t* block = a.pool.windows + place.write * a.pool.window_stride;
  const auto copy = [&](const std::uint8_t* at, std::int64_t bytes) {
    for (int i = b.thread; i < static_cast<int>(bytes); i += b.n_threads) {
      block[(at - records.block) + i] = at[i];
    }
  };
  const WindowMap& map = records.window.map;
  for (int m = 0; m < n; ++m) {
    if (task.with_key) copy(records.key(m), map.key_bytes);
    copy(records.value(m), map.value_bytes);
    copy(records.gate_of(m), map.gate_bytes);
  }
}

__device__ inline void fill_output(const Block& b, float* out, float value) {
  for (int j = b.thread; j < b.V; j += b.n_threads) out[j] = value;
}

/// Counts this head off, once it has read the row's cursor: the last of the row moves the cursor on
/// to `next` unless one has failed. No fence is needed: whoever reads what heads have written is in
/// a later launch.
__device__ inline void settle(const Block& b, const LaunchArgs& a, const RowPlace& place, int row,
                              bool failed, Cursor next) {
  constexpr std::uint32_t kFailed = 1u << 16;  // failures are counted above the heads
  if (b.thread != 0) return;
  if (failed) *RowPlace::fault_at(a.pool, place.write) = 1;
  if (a.layer.period == 1) return;
  const std::uint32_t before = atomicAdd(&a.work.tickets[row], failed ? kFailed + 1 : 1u);
  if ((before % kFailed) + 1 != static_cast<std::uint32_t>(a.layer.n_value_heads)) return;
  a.work.tickets[row] = 0;
  if (before < kFailed && !failed) RowPlace::cursor_at(a.pool, place.write) = next;
}

// ---------------------------------------------------------------------------------------------

template <class Page, Gate gate, class Known>
__global__ void __launch_bounds__(32 * kReadGroups, 7)
    step_kernel(const __grid_constant__ LaunchArgs a) {
  extern __shared__ unsigned char shared_memory[];
  const LayerView layer = Known::layer(a.layer);
  const Block b(layer.K, layer.V, kReadGroups);
  const Task task(layer, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x));
  Shared s(shared_memory, kReadGroups, step_keys(layer, gate), 0, gate_room(gate));
  // Before the slot is known: all of these loads are under way together.
  const TokenParts parts = fetch_token<gate>(b, a, task);
  Page page(layer, task.head, s.page);
  const RowPlace place(a, task.row);
  float* const out = task.out(a, b.V);
  if (place.padding || place.outside) {
    return fill_output(b, out, place.padding ? 0.0f : nan_value());
  }
  const Cursor next{place.fill + 1, place.limit};
  if (__syncthreads_or(place.faulty)) {  // see RowPlace::faulty
    fill_output(b, out, nan_value());
    return settle(b, a, place, task.row, true, next);
  }
  if (place.due(layer)) {
    if (task.head == 0 && b.thread == 0) a.work.due_rows[atomicAdd(a.work.n_due, 1)] = task.row;
    return;
  }

  page.load(b, a.pool.pages + place.read * a.pool.page_stride);
  const int n = place.fill;
  const RecordsOf<gate> records{layer.window,
                                a.pool.windows + place.read * a.pool.window_stride,
                                layer.n_key_heads,
                                layer.n_value_heads,
                                task.key_head,
                                task.head,
                                b.K};
  store_token<gate>(b, a, layer, task, parts, s);
  decay_records<gate>(b, records, n, false, s);
  __syncthreads();
  read_records<gate>(b, records, n, false, s);
  wait_for_copies();
  __syncthreads();

  prepare_page_read<gate>(b, page, s);
  const int j = b.thread;
  float record_k = 0, record_q = 0;
  if (j < b.V) {
    const VectorFormat format = value_format(layer.window.records);
    constexpr int kAtOnce = 8;
#pragma unroll 1
    for (int first = 0; first < n; first += kAtOnce) {
      float value[kAtOnce];
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        value[m] = first + m < n ? load_element(format, records.value(first + m), b.V, j) : 0.0f;
      }
#pragma unroll
      for (int m = 0; m < kAtOnce; ++m) {
        if (first + m >= n) break;
        record_k = __fmaf_rn(s.dots[2 * (first + m)], value[m], record_k);
        record_q = __fmaf_rn(s.dots[2 * (first + m) + 1], value[m], record_q);
      }
    }
  }
  __syncthreads();
  {
    Block at = b;
    float p[kLaneColumns] = {}, r[kLaneColumns] = {};
    if (at.row_block < b.n_row_blocks()) read_row_block(at, page, s, p, r);
#pragma unroll 1
    for (at.row_block += kReadGroups; at.row_block < b.n_row_blocks();
         at.row_block += kReadGroups) {
      float more_p[kLaneColumns], more_r[kLaneColumns];
      read_row_block(at, page, s, more_p, more_r);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        p[c] = __fadd_rn(p[c], more_p[c]);
        r[c] = __fadd_rn(r[c], more_r[c]);
      }
    }
    store_partial<Page>(b, b.warp, p, r, s);
  }
  __syncthreads();
  float o = 0;
  bool finite = true;
  if (j < b.V) {
    float along_k = 0, along_q = 0;
#pragma unroll
    for (int group = 0; group < kReadGroups; ++group) {
      along_k = __fadd_rn(along_k, s.partial[2 * group * kMaxWidth + j]);
      along_q = __fadd_rn(along_q, s.partial[(2 * group + 1) * kMaxWidth + j]);
    }
    finite = finish_column(page, j, parts.v, along_k, along_q, record_k, record_q, s, o);
  }
  const bool failed = __syncthreads_or(!finite) != 0;
  settle(b, a, place, task.row, failed, next);
  if (j < b.V) out[j] = failed ? nan_value() : o;
  if (failed) return;
  if (place.read != place.write) copy_head<Page, gate>(b, a, place, task, page, records, n);
  append_record<gate>(b, task, records, a.pool.windows + place.write * a.pool.window_stride, n, s);
}

// ---------------------------------------------------------------------------------------------

/// Adds the first n outer products of s.keys and s.values to a state.
template <class Columns>
__device__ inline void add_products(const Block& b, int n, const Shared& s, Tile& x) {
  for (int m = 0; m < n; ++m) {
    float value[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      const int j = Columns::column(b, c);
      value[c] = j < b.V ? s.values[m * kMaxWidth + j] : 0.0f;
    }
    const auto* keys = reinterpret_cast<const float4*>(s.keys + m * kMaxWidth + b.first_row());
#pragma unroll
    for (int quarter = 0; quarter < kWarpRows / 4; ++quarter) {
      const float4 four = keys[quarter];
      const float key[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) {
          x[4 * quarter + e][c] = __fmaf_rn(key[e], value[c], x[4 * quarter + e][c]);
        }
      }
    }
  }
}

/// Sums over the row blocks of a group, as step_kernel has them, then over groups.
__device__ inline float sum_partial(const Block& b, const float* partial) {
  float sum = 0;
#pragma unroll
  for (int group = 0; group < kReadGroups; ++group) {
    float of_group = group < b.n_row_blocks() ? partial[2 * group * kMaxWidth] : 0.0f;
    for (int block = group + kReadGroups; block < b.n_row_blocks(); block += kReadGroups) {
      of_group = __fadd_rn(of_group, partial[2 * block * kMaxWidth]);
    }
    sum = __fadd_rn(sum, of_group);
  }
  return sum;
}

/// The token of a head whose state is about to be rewritten, or whose window still has room. False
/// when it is done: appended, or failed. Otherwise the token's record, gates applied, is the last
/// of s.keys and s.values, and s.page_k holds the decay that it adds to the page's.
template <class Page, Gate gate>
__device__ inline bool take_token(const Block& b, const LaunchArgs& a, const LayerView& layer,
                                  const RowPlace& place, const Task& task, const TokenParts& parts,
                                  const Page& page, const Tile& codes,
                                  const RecordsOf<gate>& records, int n, bool due, Cursor next,
                                  Shared& s) {
  prepare_page_read<gate>(b, page, s);
  __syncthreads();
  {
    float p[kLaneColumns], r[kLaneColumns];
    read_row_block(b, page, s, p, r, [&](auto quarter, auto&& f) {
#pragma unroll
      for (int i = 4 * quarter.value; i < 4 * quarter.value + 4; ++i) {
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) f(i, c, codes[i][c]);
      }
    });
    store_partial<Page>(b, b.row_block, p, r, s);
  }
  __syncthreads();
  float* const out = task.out(a, b.V);
  const int j = b.thread;
  float o = 0;
  bool finite = true;
  if (j < b.V) {
    float record_k = 0, record_q = 0;
#pragma unroll 1
    for (int m = 0; m < n; ++m) {
      const float value = s.values[m * kMaxWidth + j];
      record_k = __fmaf_rn(s.dots[2 * m], value, record_k);
      record_q = __fmaf_rn(s.dots[2 * m + 1], value, record_q);
    }
    finite = finish_column(page, j, parts.v, sum_partial(b, s.partial + j),
                           sum_partial(b, s.partial + kMaxWidth + j), record_k, record_q, s, o);
  }
  const bool failed = __syncthreads_or(!finite) != 0;
  if (j < b.V) out[j] = failed ? nan_value() : o;
  if (failed || !due) settle(b, a, place, task.row, failed, next);
  if (failed) return false;
  if (!due) {
    if (place.read != place.write) copy_head<Page, gate>(b, a, place, task, page, records, n);
    append_record<gate>(b, task, records, a.pool.windows + place.write * a.pool.window_stride, n,
                        s);
    return false;
  }
  if (layer.period == 1) {
    for (int i = b.thread; i < kMaxWidth; i += b.n_threads) {
      s.keys[i] = s.k[i];
      s.values[i] = s.u[i];
      s.page_k[i] = s.decay[gate == Gate::kScalar ? 0 : i];
    }
    return true;
  }
  // As its record would be stored.
  if (b.warp == 0) {
    store_vector(value_format(layer.window.records), s.u, b.V, b.lane, nullptr,
                 s.values + n * kMaxWidth);
  }
  if (b.warp == b.n_warps - 1) {
    store_vector(key_format(layer.window.records), s.k, b.K, b.lane, nullptr,
                 s.keys + n * kMaxWidth);
  }
  for (int i = b.thread; i < kMaxWidth; i += b.n_threads) {
    const int at = gate == Gate::kScalar ? 0 : i;
    const float stored = at < b.K ? records.stored_decay(s.log[at]) : 0.0f;
    // Where a total is kept it sums the gates as computed, and so does the page's own decay.
    s.page_k[i] = records.factors() ? s.decay[at] : stored;
    for (int m = 0; m < n; ++m) s.keys[m * kMaxWidth + i] *= stored;
  }
  return true;
}

/// One head of one row of rewrite_kernel.
template <class Page, Gate gate, Use use>
__device__ inline void rewrite_head(const Block& b, const LaunchArgs& a, const LayerView& layer,
                                    const Task& task, Rewrite what, unsigned char* memory) {
  const int n_vectors = rewrite_vectors(layer);
  Shared s(memory, b.n_row_blocks(), n_vectors, n_vectors, kMaxWidth);
  const bool token = use != Use::kAny || what == Rewrite::kEveryRow || what == Rewrite::kDueRows;
  TokenParts parts;
  if (token) parts = fetch_token<gate>(b, a, task);
  Page page(layer, task.head, s.page);
  const RowPlace place(a, task.row);
  float* const dense = a.dense + static_cast<std::int64_t>(task.head) * b.K * b.V;
  if (place.padding || place.outside) {
    if (token) fill_output(b, task.out(a, b.V), place.padding ? 0.0f : nan_value());
    return;
  }
  const int n = (use == Use::kAny && what == Rewrite::kHandOver) ? 0 : place.fill;
  if ((use == Use::kAny && what == Rewrite::kFlush) && n == 0) return;
  const bool due = !token || layer.period == 1 || place.due(layer);
  Cursor next{0, 0};
  if ((use == Use::kAny && what == Rewrite::kFlush) && layer.absolute_phase) {
    next.limit = place.whole_limit(layer) - n;
  }
  if ((use == Use::kAny && what == Rewrite::kHandOver)) next.limit = a.limit;
  if (!due) next = Cursor{place.fill + 1, place.limit};
  if (__syncthreads_or(place.faulty)) {  // see RowPlace::faulty
    if ((use == Use::kAny && what == Rewrite::kRestore)) {
      for (int at = b.thread; at < b.K * b.V; at += b.n_threads) dense[at] = nan_value();
      return;
    }
    if (token) fill_output(b, task.out(a, b.V), nan_value());
    // Another head of the row may have failed just now, and the row's ticket counts all of them.
    return settle(b, a, place, task.row, true, next);
  }

  page.load(b, a.pool.pages + place.read * a.pool.page_stride);
  Tile x;
  if ((use == Use::kAny && what == Rewrite::kHandOver)) {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int j = Page::Columns::column(b, c);
        x[i][c] = j < b.V ? dense[(b.first_row() + i) * b.V + j] : 0.0f;
      }
    }
    wait_for_copies();  // for the maps that a page type keeps there
    __syncthreads();
  } else {
    const RecordsOf<gate> records{
        layer.window,
        layer.period > 1 ? a.pool.windows + place.read * a.pool.window_stride : nullptr,
        layer.n_key_heads,
        layer.n_value_heads,
        task.key_head,
        task.head,
        b.K};
    if (token) store_token<gate>(b, a, layer, task, parts, s);
    decay_records<gate>(b, records, n, true, s);
    const VectorFormat format = value_format(layer.window.records);
#pragma unroll 1
    for (int at = b.thread; at < n * kMaxWidth; at += b.n_threads) {
      const int m = at / kMaxWidth, j = at % kMaxWidth;
      if (j < b.V) s.values[at] = load_element(format, records.value(m), b.V, j);
    }
    __syncthreads();
    if (token) read_records<gate>(b, records, n, true, s);
    wait_for_copies();
    __syncthreads();
    visit_all(b, page, page.fetch(b), [&](int i, int c, float z) { x[i][c] = z; });
    if (token) {
      if (!take_token<Page, gate>(b, a, layer, place, task, parts, page, x, records, n, due, next,
                                  s)) {
        return;
      }
      __syncthreads();
    }
    // X = Gamma S + sum_m (D_m o k_m) u_m^T: compensators join the records.
    const auto gamma = [&](int i) {
      const int at = gate == Gate::kScalar ? 0 : i;
      return token ? s.gamma[at] * s.page_k[at] : s.gamma[at];
    };
    const int n_records = token ? n + 1 : n;
#pragma unroll 1
    for (int at = b.thread; at < page.rank() * kMaxWidth; at += b.n_threads) {
      const int p = at / kMaxWidth, i = at % kMaxWidth;
      if (i < b.K) s.keys[n_records * kMaxWidth + at] = gamma(i) * page.key(p, i);
      if (i < b.V) s.values[n_records * kMaxWidth + at] = page.value(p, i);
    }
    float column[kLaneColumns];
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      column[c] = Page::Columns::column(b, c) < b.V ? page.column_factor(b, c) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int line = b.first_row() + i;
      const float factor = gamma(line) * page.row_factor(line);
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) x[i][c] *= factor * column[c];
    }
    __syncthreads();
    add_products<typename Page::Columns>(b, n_records + page.rank(), s, x);
  }

  if ((use == Use::kAny && what == Rewrite::kRestore)) {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const int j = Page::Columns::column(b, c);
        if (j < b.V) dense[(b.first_row() + i) * b.V + j] = x[i][c];
      }
    }
    return;
  }
  float zero = 0;  // stays 0 unless a value is not finite
#pragma unroll
  for (int i = 0; i < kWarpRows; ++i) {
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) zero = __fmaf_rn(x[i][c], 0.0f, zero);
  }
  const bool failed = __syncthreads_or(zero != 0.0f) != 0;
  settle(b, a, place, task.row, failed, next);
  if (failed) {
    if (token) fill_output(b, task.out(a, b.V), nan_value());
    return;
  }
  page.encode(b, x, s.partial, s.keys, s.values, a.pool.pages + place.write * a.pool.page_stride);
}

template <class Page, Gate gate, class Known>
__global__ void __launch_bounds__(2 * kMaxWidth, 2)
    rewrite_kernel(const __grid_constant__ LaunchArgs a) {
  extern __shared__ unsigned char shared_memory[];
  const LayerView layer = Known::layer(a.layer);
  const Block b(layer.K, layer.V, layer.K / kWarpRows);
  // What one use never does is not compiled.
  const Rewrite what = Known::kUse == Use::kPerStep ? Rewrite::kEveryRow : a.rewrite;
  const bool listed = what == Rewrite::kDueRows;
  const int n_heads = layer.n_value_heads;
  const int n_rows = listed ? *static_cast<volatile std::int32_t*>(a.work.n_due) : a.token.n_rows;
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < n_rows * n_heads;
       item += static_cast<int>(gridDim.x)) {
    const int row = item / n_heads;
    const Task task(layer, listed ? a.work.due_rows[row] : row, item - row * n_heads);
    rewrite_head<Page, gate, Known::kUse>(b, a, layer, task, what, shared_memory);
    __syncthreads();
  }
  if (!listed || b.thread != 0) return;
  // The list is empty again once the last block has read it.
  if (atomicInc(a.work.n_exits, gridDim.x - 1) == gridDim.x - 1) *a.work.n_due = 0;
}

// ---------------------------------------------------------------------------------------------

inline constexpr int kDenseColumns = 32;  // of a block of dense_kernel
inline constexpr int kDenseWarps = 4;
inline constexpr int kDenseRows = kMaxWidth / (4 * kDenseWarps);  // of a thread

/// Eight lanes lie along the columns, four each; sixteen such groups take the rows in turn.
template <class Page, Gate gate, class Known>
__global__ void __launch_bounds__(32 * kDenseWarps, 6)
    dense_kernel(const __grid_constant__ LaunchArgs a) {
  extern __shared__ unsigned char shared_memory[];
  using Stored = typename Page::Stored;
  const LayerView layer = Known::layer(a.layer);
  const Block b(layer.K, layer.V, kDenseWarps);
  const int n_tiles = (b.V + kDenseColumns - 1) / kDenseColumns;
  const int head = static_cast<int>(blockIdx.x) / n_tiles;
  const Task task(layer, static_cast<int>(blockIdx.y), head);
  const int first_column = (static_cast<int>(blockIdx.x) - head * n_tiles) * kDenseColumns;
  const std::int64_t offset = layer.codec.heads[head].codes;
  const RowPlace place(a, task.row);
  float* const out = task.out(a, b.V);
  const int mine = first_column + b.thread;
  const bool owner = b.thread < kDenseColumns && mine < b.V;  // of an output
  if (place.padding || place.outside) {
    if (owner) out[mine] = place.padding ? 0.0f : nan_value();
    return;
  }
  const int column = first_column + b.lane % 8 * 4;
  const int first_row = b.warp * 4 + b.lane / 8;
  const bool inside = column < b.V;
  const auto* from =
      reinterpret_cast<const Stored*>(a.pool.pages + place.read * a.pool.page_stride + offset);
  const TokenParts parts = fetch_token<gate>(b, a, task);
  struct alignas(4 * sizeof(Stored)) Four {
    Stored x[4];
  };
  Four raw[kDenseRows];
#pragma unroll
  for (int i = 0; i < kDenseRows; ++i) {
    const int line = first_row + 16 * i;
    raw[i] =
        line < b.K && inside ? *reinterpret_cast<const Four*>(from + line * b.V + column) : Four{};
  }
  Shared s(shared_memory, 1, 0, 0, kMaxWidth);
  if (__syncthreads_or(place.faulty)) {  // see RowPlace::faulty
    if (owner) out[mine] = nan_value();
    return settle(b, a, place, task.row, true, Cursor{});
  }
  store_token<gate>(b, a, layer, task, parts, s);
  __syncthreads();
  if (b.warp == b.n_warps - 1) {
    float sum = 0;
    for (int i = b.lane; i < b.K; i += 32) sum += s.k[i] * s.q[i];
    sum = warp_sum(sum);
    if (b.lane == 0) s.scalars[Shared::kKeyQuery] = sum;
  }
  float x[kDenseRows][4];
  float p[4] = {}, r[4] = {};
#pragma unroll
  for (int i = 0; i < kDenseRows; ++i) {
    const int line = first_row + 16 * i;
    const bool used = line < b.K;
    const float decay = used ? s.decay[gate == Gate::kScalar ? 0 : line] : 0.0f;
    const float k = used ? s.k[line] : 0.0f, q = used ? s.q[line] : 0.0f;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      x[i][c] = decay * Page::restore(raw[i].x[c]);
      p[c] += k * x[i][c];
      r[c] += q * x[i][c];
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    for (int step = 8; step < 32; step *= 2) {
      p[c] += __shfl_xor_sync(kAllLanes, p[c], step);
      r[c] += __shfl_xor_sync(kAllLanes, r[c], step);
    }
  }
  if (b.lane < 8) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      s.partial[(2 * b.warp) * kDenseColumns + 4 * b.lane + c] = p[c];
      s.partial[(2 * b.warp + 1) * kDenseColumns + 4 * b.lane + c] = r[c];
    }
  }
  __syncthreads();
  float o[4], u[4];
  bool finite = true;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int j = b.lane % 8 * 4 + c;
    float along_k = 0, along_q = 0;
    for (int w = 0; w < kDenseWarps; ++w) {
      along_k += s.partial[2 * w * kDenseColumns + j];
      along_q += s.partial[(2 * w + 1) * kDenseColumns + j];
    }
    const float v =
        inside ? a.token.v[task.row * a.token.v_stride + head * b.V + column + c] : 0.0f;
    u[c] = s.scalars[Shared::kBeta] * (v - along_k);
    o[c] = along_q + s.scalars[Shared::kKeyQuery] * u[c];
    finite = finite && is_finite(u[c]) && is_finite(o[c]);
  }
#pragma unroll
  for (int i = 0; i < kDenseRows; ++i) {
    const int line = first_row + 16 * i;
    const float k = line < b.K ? s.k[line] : 0.0f;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      x[i][c] += k * u[c];
      finite = finite && is_finite(x[i][c]);
    }
  }
  if (__syncthreads_or(!finite)) {
    if (owner) out[mine] = nan_value();
    return settle(b, a, place, task.row, true, Cursor{});
  }
  auto* to = reinterpret_cast<Stored*>(a.pool.pages + place.write * a.pool.page_stride + offset);
#pragma unroll
  for (int i = 0; i < kDenseRows; ++i) {
    const int line = first_row + 16 * i;
    if (line >= b.K || !inside) continue;
    Four packed;
#pragma unroll
    for (int c = 0; c < 4; ++c) packed.x[c] = Page::round(x[i][c]);
    *reinterpret_cast<Four*>(to + line * b.V + column) = packed;
  }
  if (first_row == 0 && inside) {
#pragma unroll
    for (int c = 0; c < 4; ++c) out[column + c] = o[c];
  }
}

// ---------------------------------------------------------------------------------------------

using Kernel = void (*)(LaunchArgs);

/// The kernels of one layer, for the host.
struct KernelSet {
  Kernel step = nullptr;
  Kernel rewrite = nullptr;       // whatever is asked
  Kernel rewrite_step = nullptr;  // rows of a step: the same or a faster one
  Kernel dense = nullptr;         // null: period 1 goes to `rewrite_step`
  int step_threads = 32 * kReadGroups;
  bool full = false;  // of full.cuh: `rewrite_step` is for listed rows, flush and hand-over alone
  // Dynamic shared memory in bytes.
  int (*step_shared)(const LayerView&) = nullptr;
  int (*rewrite_shared)(const LayerView&) = nullptr;
  int (*rewrite_step_shared)(const LayerView&) = nullptr;
};

template <class Page, Gate gate>
int step_shared(const LayerView& layer) {
  return 4 * Shared::floats(kReadGroups, step_keys(layer, gate), 0, gate_room(gate)) +
         Page::staged_bytes(layer);
}
template <class Page>
int rewrite_shared(const LayerView& layer) {
  const int n_vectors = rewrite_vectors(layer);
  return 4 * Shared::floats(layer.K / kWarpRows, n_vectors, n_vectors, kMaxWidth) +
         Page::staged_bytes(layer);
}

/// What decides among the kernels of a page type.
struct Choice {
  Gate gate = Gate::kScalar;
  bool full = false;      // K = V = 128
  bool per_step = false;  // period 1
  Records records = Records::kBf16;
};

/// For any shape and any format of records.
template <class Page, Gate gate>
KernelSet kernels_for_all() {
  return {.step = step_kernel<Page, gate, Fixed<false>>,
          .rewrite = rewrite_kernel<Page, gate, Fixed<false>>,
          .rewrite_step = rewrite_kernel<Page, gate, Fixed<false>>,
          .dense = nullptr,
          .step_shared = step_shared<Page, gate>,
          .rewrite_shared = rewrite_shared<Page>,
          .rewrite_step_shared = rewrite_shared<Page>};
}
/// The same, and for K = V = 128 with these formats of records kernels of their own.
template <class Page, Gate gate, Records... kFast>
KernelSet kernels_of(const Choice& choice) {
  KernelSet set = kernels_for_all<Page, gate>();
  if (!choice.full) return set;
  set.rewrite_step = choice.per_step ? rewrite_kernel<Page, gate, Fixed<true, -1, Use::kPerStep>>
                                     : rewrite_kernel<Page, gate, Fixed<true, -1, Use::kWindow>>;
  const auto use = [&]<Records kRecords>() {
    if (choice.records == kRecords) {
      set.step = step_kernel<Page, gate, Fixed<true, static_cast<int>(kRecords)>>;
    }
  };
  (use.template operator()<kFast>(), ...);
  return set;
}
template <class Page, Records... kFast>
KernelSet kernels_by_gate(const Choice& choice) {
  return choice.gate == Gate::kScalar ? kernels_of<Page, Gate::kScalar, kFast...>(choice)
                                      : kernels_of<Page, Gate::kChannel, kFast...>(choice);
}

KernelSet dense_kernels(PageFamily family, const Choice& choice);  // kF32, kBf16, kF16
KernelSet int_kernels(int bits, const Choice& choice);             // 8, 4; else none
KernelSet leapquant_kernels(int bits, const Choice& choice);       // 8, 6, 4
KernelSet pace_kernels(bool affine, const Choice& choice);
KernelSet stepquant_kernels(const Choice& choice);

}  // namespace statepack::cuda
