// The kernels of K = V = 128, over any page type of full_pages.cuh: the same steps as kernels.cuh
// has for any shape, on tensor cores.
//
//   full_step_kernel     two warps a head; the codes of a page go from global memory into the
//                        registers that multiply them. Every row appends its record, and a row
//                        whose window is then complete is listed
//   full_rewrite_kernel  eight warps a head, which hold its state in registers, add the records and
//                        round it: for listed rows, flush and hand-over
//
// They run one after the other for every batch, so a row's bits do not depend on its size. At
// period 1 the kernels of kernels.cuh are used.
#pragma once

#include "delta/cuda/kernels.cuh"
#include "delta/cuda/mma.cuh"

namespace statepack::cuda {

// Threads that read a token: each has two key rows, 2 i and 2 i + 1, and two neighbouring columns.
inline constexpr int kTokenThreads = 64;

/// Shared memory of a token, by name.
template <Gate gate>
struct TokenSpace {
  static constexpr int kGates = gate_room(gate);
  static constexpr int kPartials = 2 * 2 * kMaxWidth;
  static constexpr int kFloats = 4 * kMaxWidth + 3 * kGates + kMaxRecords +
                                 2 * (kMaxRecords + kMaxRank) + 8 + 4 + 4 + kDigitBytes / 4 +
                                 kPartials;
  float *k, *u;            // of the token: normalised key, correction
  float *read_k, *read_q;  // key and query decayed by the token's gate
  float *decay, *log;      // [kGates] of the token, as computed
  float* gamma;            // [kGates] of the page up to the last record
  float* weight;           // [kMaxRecords] scalar gate: decay of each record
  float* dots;             // [kMaxRecords + kMaxRank][2] records, then compensators; at k and q
  float* sums;             // [2][4] of each warp: squares of q and of k, their product
  std::uint32_t* peaks;    // [2][2] of each warp, bits
  float* beta;
  std::uint8_t* digits;
  float* partial;  // [2][2][kMaxWidth] sums of each warp, where warps share columns
  float* keys;     // [period][kMaxWidth] channel gate: decayed keys of the records

  static __host__ __device__ int bytes(int n_keys) { return 4 * (kFloats + n_keys * kMaxWidth); }
  __device__ explicit TokenSpace(unsigned char* memory) {
    float* from = reinterpret_cast<float*>(memory);
    const auto take = [&](int n) {
      float* array = from;
      from += n;
      return array;
    };
    k = take(kMaxWidth), u = take(kMaxWidth);
    read_k = take(kMaxWidth), read_q = take(kMaxWidth);
    decay = take(kGates), log = take(kGates), gamma = take(kGates);
    weight = take(kMaxRecords);
    dots = take(2 * (kMaxRecords + kMaxRank));
    sums = take(8);
    peaks = reinterpret_cast<std::uint32_t*>(take(4));
    beta = take(4);
    digits = reinterpret_cast<std::uint8_t*>(take(kDigitBytes / 4));
    partial = take(kPartials);
    keys = from;
  }
};

__device__ inline float2 load_two(const float* at) { return *reinterpret_cast<const float2*>(at); }
__device__ inline void store_two(float* at, float x, float y) {
  *reinterpret_cast<float2*>(at) = make_float2(x, y);
}
__device__ inline float2 two_halves(std::uint32_t word) {
  return make_float2(half_bits_to_float(static_cast<std::uint16_t>(word)),
                     half_bits_to_float(static_cast<std::uint16_t>(word >> 16)));
}

/// N elements of a stored vector as they lie there, from element i on; N is 2 or 4 and divides i.
/// No kernel here is made for records in f32.
template <int N>
struct StoredPart {
  std::uint32_t words[N == 4 ? 2 : 1];
  float scale;
};
template <int N>
__device__ inline StoredPart<N> load_part(VectorFormat format, const std::uint8_t* at, int i) {
  StoredPart<N> part;
  part.scale = 1;
  switch (format) {
    case VectorFormat::kBf16:
      if constexpr (N == 4) {
        const uint2 two = *reinterpret_cast<const uint2*>(at + 2 * i);
        part.words[0] = two.x, part.words[1] = two.y;
      } else {
        part.words[0] = *reinterpret_cast<const std::uint32_t*>(at + 2 * i);
      }
      break;
    case VectorFormat::kInt8:  // a scale behind them leaves vectors at even bytes
#pragma unroll
      for (int w = 0; w < N / 2; ++w) {
        part.words[w] = *reinterpret_cast<const std::uint16_t*>(at + i + 2 * w);
      }
      part.scale = load_half(at + kMaxWidth);
      break;
    default:
      if constexpr (N == 4) {
        part.words[0] = *reinterpret_cast<const std::uint16_t*>(at + i / 2);
      } else {
        part.words[0] = at[i / 2];
      }
      part.scale = load_half(at + kMaxWidth / 2);
  }
  return part;
}
template <int N>
__device__ inline void restore_part(VectorFormat format, const StoredPart<N>& part, float (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const std::uint32_t word = part.words[N == 4 && format != VectorFormat::kInt4 ? e / 2 : 0];
    if (format == VectorFormat::kBf16) {
      x[e] = e % 2 == 0 ? __uint_as_float(word << 16) : __uint_as_float(word & 0xffff0000u);
    } else if (format == VectorFormat::kInt8) {
      x[e] = part.scale * static_cast<float>(static_cast<std::int8_t>(word >> (8 * (e % 2))));
    } else {
      x[e] = part.scale * static_cast<float>(static_cast<int>((word >> (4 * e) & 0xfu) ^ 8u) - 8);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Reading a token

/// What a thread fetches of one token of one head before it knows the slot.
struct FullParts {
  float q[2], k[2], v[2];  // rows and columns of the thread
  float g[2], bias[2], A_log, beta;
};

template <class Page, Gate gate>
__device__ inline FullParts fetch_full(const Block& b, const TokenView& token, const Task& task) {
  FullParts parts{};
  const int i = 2 * b.thread;
  const float* q = token.q + task.row * token.q_stride + task.key_head * kMaxWidth + i;
  const float* k = token.k + task.row * token.k_stride + task.key_head * kMaxWidth + i;
  const float* v = token.v + task.row * token.v_stride + task.head * kMaxWidth + Page::column(b);
#pragma unroll
  for (int e = 0; e < 2; ++e) parts.q[e] = q[e], parts.k[e] = k[e], parts.v[e] = v[e];
  const int gate_at = gate == Gate::kScalar ? task.head : task.head * kMaxWidth + i;
  if (gate == Gate::kChannel || b.warp == 1) {
    const float* g = token.g + task.row * token.g_stride + gate_at;
#pragma unroll
    for (int e = 0; e < (gate == Gate::kScalar ? 1 : 2); ++e) {
      parts.g[e] = g[e];
      if (token.raw_gates) parts.bias[e] = token.dt_bias[gate_at + e];
    }
    if (token.raw_gates) parts.A_log = token.A_log[task.head];
  }
  if (b.warp == 1) parts.beta = token.beta[task.row * token.beta_stride + task.head];
  return parts;
}

__device__ inline float log_decay(const TokenView& token, const FullParts& parts, int e) {
  if (!token.raw_gates) return parts.g[e];
  const float rate = expf(parts.A_log), x = parts.g[e] + parts.bias[e];
  return token.lower_bound != 0 ? __fdividef(token.lower_bound, 1.0f + expf(-rate * x))
                                : -rate * (x > 20 ? x : log1pf(expf(x)));
}
__device__ inline float write_strength(const TokenView& token, const LayerView& layer,
                                       float given) {
  float beta = token.raw_gates ? __fdividef(1.0f, 1.0f + expf(-given)) : given;
  if (layer.beta_bf16) beta = bf16_bits_to_float(float_to_bf16_bits(beta));
  return beta;
}

/// Scalar gate, one warp: the decay of every record, and of the page, as of the last record. Suffix
/// sums of logs, never differences.
template <Gate gate, class Space>
__device__ inline void decay_scalar(const RecordsOf<gate>& records, int n, int lane,
                                    const Space& s) {
  float sum = lane < n ? records.gate_value(lane, 0) : 0.0f;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float later = __shfl_down_sync(kAllLanes, sum, step);
    if (lane + step < 32) sum += later;
  }
  const float after = __shfl_down_sync(kAllLanes, sum, 1);
  s.weight[lane] = expf(lane == 31 ? 0.0f : after);
  if (lane == 0) s.gamma[0] = expf(sum);
}
/// Gates of record m at rows i and i + 1, as stored.
template <Gate gate>
__device__ inline float2 gate_two(const RecordsOf<gate>& records, int m, int i) {
  if (records.wide_gates()) {
    return load_two(reinterpret_cast<const float*>(records.gate_of(m)) + i);
  }
  return two_halves(*reinterpret_cast<const std::uint32_t*>(records.gate_of(m) + 2 * i));
}

/// Asks for all records, a thread for each: they are read two barriers later.
template <Gate gate>
__device__ inline void prefetch_records(const Block& b, const RecordsOf<gate>& records, int n) {
  if (b.lane >= n) return;
  const WindowMap& map = records.window.map;
  if (b.warp == 0) {
    prefetch_bytes(records.key(b.lane), static_cast<int>(map.key_bytes));
    if (gate == Gate::kChannel) {
      prefetch_bytes(records.gate_of(b.lane), static_cast<int>(map.gate_bytes));
    }
  } else {
    prefetch_bytes(records.value(b.lane), static_cast<int>(map.value_bytes));
  }
}

/// Dots with read_k and read_q of the vectors m = warp, warp + 2, ... below n, of which part(m)
/// loads four elements of the lane and values(m, part, x) restores them.
template <class Space, class Part, class Values>
__device__ inline void dot_vectors(const Block& b, int n, const Space& s, float* dots, Part&& part,
                                   Values&& values) {
  const float4 k = *reinterpret_cast<const float4*>(s.read_k + 4 * b.lane);
  const float4 q = *reinterpret_cast<const float4*>(s.read_q + 4 * b.lane);
  constexpr int kAtOnce = 4;  // loads under way together
#pragma unroll 1
  for (int first = b.warp; first < n; first += 2 * kAtOnce) {
    decltype(part(0)) raw[kAtOnce];
#pragma unroll
    for (int step = 0; step < kAtOnce; ++step) {
      if (first + 2 * step < n) raw[step] = part(first + 2 * step);
    }
#pragma unroll
    for (int step = 0; step < kAtOnce; ++step) {
      const int m = first + 2 * step;
      if (m >= n) break;
      float x[4];
      values(m, raw[step], x);
      const float along_k =
          __fmaf_rn(x[3], k.w, __fmaf_rn(x[2], k.z, __fmaf_rn(x[1], k.y, x[0] * k.x)));
      const float along_q =
          __fmaf_rn(x[3], q.w, __fmaf_rn(x[2], q.z, __fmaf_rn(x[1], q.y, x[0] * q.x)));
      const float sum = warp_sum_two(along_k, along_q, b.lane);
      if (b.lane % 16 == 0) dots[2 * m + b.lane / 16] = sum;
    }
  }
}

/// What a thread needs first of a page: under way as soon as the slot is known.
template <class Page>
struct FirstOfPage {
  typename Page::Raw raw;
  float2 row_factor;
  __device__ FirstOfPage(const Block& b, const Page& page, const std::uint8_t* head_page) {
    page.prefetch(b, head_page);
    raw = page.fetch(b, head_page);
    row_factor = page.row_factors(head_page, 2 * b.thread);
  }
};

/// Reads page and window at the token's key and query: u goes to s.u, the thread's output to `o`.
/// True when a value is not finite. The two warps meet; afterwards all of `s` may be read.
template <class Page, Gate gate>
__device__ inline bool read_token(const Block& b, const TokenView& token, const LayerView& layer,
                                  const Page& page, const std::uint8_t* head_page,
                                  const FirstOfPage<Page>& first_of_page,
                                  const RecordsOf<gate>& records, int n, const FullParts& parts,
                                  TokenSpace<gate>& s, float (&o)[2]) {
  const int i = 2 * b.thread, j = Page::column(b);
  prefetch_records(b, records, n);
  const float2 row_factor = first_of_page.row_factor;

  {
    const float squares_q = parts.q[0] * parts.q[0] + parts.q[1] * parts.q[1];
    const float squares_k = parts.k[0] * parts.k[0] + parts.k[1] * parts.k[1];
    const float sum = warp_sum_two(squares_q, squares_k, b.lane);
    const float product = warp_sum(parts.q[0] * parts.k[0] + parts.q[1] * parts.k[1]);
    if (b.lane % 16 == 0) s.sums[4 * b.warp + b.lane / 16] = sum;
    if (b.lane == 0) s.sums[4 * b.warp + 2] = product;
  }
  float decay[2], gamma[2];
  if constexpr (gate == Gate::kScalar) {
    if (b.warp == 0) {
      decay_scalar(records, n, b.lane, s);
    } else {
      const float g = log_decay(token, parts, 0);
      if (b.lane == 0) {
        s.log[0] = g;
        s.decay[0] = expf(g);
      }
    }
  } else {
    const float log[2] = {log_decay(token, parts, 0), log_decay(token, parts, 1)};
    decay[0] = expf(log[0]), decay[1] = expf(log[1]);
    store_two(s.log + i, log[0], log[1]);
    store_two(s.decay + i, decay[0], decay[1]);
    const VectorFormat format = key_format(records.window.records);
    // Backward products of factors, or suffix sums of logs.
    float after[2] = {records.factors() ? 1.0f : 0.0f, records.factors() ? 1.0f : 0.0f};
#pragma unroll 4
    for (int m = n - 1; m >= 0; --m) {
      const float2 of_gate = gate_two(records, m, i);
      float key[2];
      restore_part<2>(format, load_part<2>(format, records.key(m), i), key);
      if (records.factors()) {
        store_two(s.keys + m * kMaxWidth + i, key[0] * after[0], key[1] * after[1]);
        after[0] *= of_gate.x, after[1] *= of_gate.y;
      } else {
        store_two(s.keys + m * kMaxWidth + i, key[0] * expf(after[0]), key[1] * expf(after[1]));
        after[0] += of_gate.x, after[1] += of_gate.y;
      }
    }
    if (records.factors()) {  // a total of the gates as computed is kept beside factors
      const float2 total = n > 0 ? load_two(records.total() + i) : make_float2(0, 0);
      gamma[0] = expf(total.x), gamma[1] = expf(total.y);
    } else {
      gamma[0] = expf(after[0]), gamma[1] = expf(after[1]);
    }
    store_two(s.gamma + i, gamma[0], gamma[1]);
  }
  if (b.warp == 1 && b.lane == 0) *s.beta = write_strength(token, layer, parts.beta);
  __syncthreads();

  float of_q = 1, of_k = 1, key_query = s.sums[2] + s.sums[6];
  if (token.normalise) {
    of_q = rsqrtf(s.sums[0] + s.sums[4] + 1e-6f) * rsqrtf(static_cast<float>(kMaxWidth));
    of_k = rsqrtf(s.sums[1] + s.sums[5] + 1e-6f);
    key_query *= of_q * of_k;
  }
  if constexpr (gate == Gate::kScalar) {
    decay[0] = decay[1] = s.decay[0];
    gamma[0] = gamma[1] = s.gamma[0];
  }
  float page_k[2], page_q[2];
  {
    const float k[2] = {parts.k[0] * of_k, parts.k[1] * of_k};
    const float read_k[2] = {decay[0] * k[0], decay[1] * k[1]};
    const float read_q[2] = {decay[0] * (parts.q[0] * of_q), decay[1] * (parts.q[1] * of_q)};
    store_two(s.k + i, k[0], k[1]);
    store_two(s.read_k + i, read_k[0], read_k[1]);
    store_two(s.read_q + i, read_q[0], read_q[1]);
    const float factor[2] = {gamma[0] * row_factor.x, gamma[1] * row_factor.y};
#pragma unroll
    for (int e = 0; e < 2; ++e)
      page_k[e] = factor[e] * read_k[e], page_q[e] = factor[e] * read_q[e];
  }
  // Magnitudes order as their bits do, those that are not finite above all others.
  const auto peak_of = [](const float(&x)[2]) {
    return __reduce_max_sync(kAllLanes,
                             max(__float_as_uint(fabsf(x[0])), __float_as_uint(fabsf(x[1]))));
  };
  const std::uint32_t peak_k = peak_of(page_k), peak_q = peak_of(page_q);
  if (b.lane == 0) s.peaks[2 * b.warp] = peak_k, s.peaks[2 * b.warp + 1] = peak_q;
  __syncthreads();

  const FixedPoint fixed_k(max(s.peaks[0], s.peaks[2])), fixed_q(max(s.peaks[1], s.peaks[3]));
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int place = page.place(i + e);
    store_digits(s.digits, place, 0, page_k[e] * fixed_k.scale);
    store_digits(s.digits, place, 1, page_q[e] * fixed_q.scale);
  }
  // Loads before the dots, so that both are under way together.
  constexpr int kAtOnce = 8;
  const VectorFormat format = value_format(records.window.records);
  const std::uint8_t* at_value = records.value(0);
  const int value_step = records.n_value_heads * static_cast<int>(records.window.map.value_bytes);
  StoredPart<2> value[kAtOnce];
#pragma unroll
  for (int m = 0; m < kAtOnce; ++m) {
    if (m < n) value[m] = load_part<2>(format, at_value, j);
    at_value += value_step;
  }
  std::uint32_t factors[kMaxRank];
#pragma unroll
  for (int p = 0; p < kMaxRank; ++p) {
    if (p < page.rank()) {
      factors[p] =
          *reinterpret_cast<const std::uint32_t*>(page.factors(head_page, p) + kMaxWidth + j);
    }
  }
  if constexpr (gate == Gate::kChannel) {
    dot_vectors(
        b, n, s, s.dots,
        [&](int m) {
          return *reinterpret_cast<const float4*>(s.keys + m * kMaxWidth + 4 * b.lane);
        },
        [&](int, const float4& raw, float(&x)[4]) {
          x[0] = raw.x, x[1] = raw.y, x[2] = raw.z, x[3] = raw.w;
        });
  } else {
    const VectorFormat keys_as = key_format(records.window.records);
    dot_vectors(
        b, n, s, s.dots, [&](int m) { return load_part<4>(keys_as, records.key(m), 4 * b.lane); },
        [&](int m, const StoredPart<4>& raw, float(&x)[4]) {
          restore_part<4>(keys_as, raw, x);
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] *= s.weight[m];
        });
  }
  if (page.rank() > 0) {
    const float4 of_page = gate == Gate::kScalar
                               ? make_float4(gamma[0], gamma[0], gamma[0], gamma[0])
                               : *reinterpret_cast<const float4*>(s.gamma + 4 * b.lane);
    dot_vectors(
        b, page.rank(), s, s.dots + 2 * kMaxRecords,
        [&](int p) {
          return *reinterpret_cast<const uint2*>(page.factors(head_page, p) + 4 * b.lane);
        },
        [&](int, const uint2& raw, float(&x)[4]) {
          const float2 first = two_halves(raw.x), second = two_halves(raw.y);
          x[0] = of_page.x * first.x, x[1] = of_page.y * first.y;
          x[2] = of_page.z * second.x, x[3] = of_page.w * second.y;
        });
  }
  __syncthreads();

  float4 along = page.read(b, first_of_page.raw, head_page, s, fixed_k.inverse, fixed_q.inverse);
#pragma unroll
  for (int p = 0; p < kMaxRank; ++p) {
    if (p >= page.rank()) break;
    const float2 x = two_halves(factors[p]), dot = load_two(s.dots + 2 * (kMaxRecords + p));
    along.x = __fmaf_rn(dot.x, x.x, along.x), along.y = __fmaf_rn(dot.y, x.x, along.y);
    along.z = __fmaf_rn(dot.x, x.y, along.z), along.w = __fmaf_rn(dot.y, x.y, along.w);
  }
  const auto add_record = [&](int m, const StoredPart<2>& part) {
    float x[2];
    restore_part<2>(format, part, x);
    const float2 dot = load_two(s.dots + 2 * m);
    along.x = __fmaf_rn(dot.x, x[0], along.x), along.y = __fmaf_rn(dot.y, x[0], along.y);
    along.z = __fmaf_rn(dot.x, x[1], along.z), along.w = __fmaf_rn(dot.y, x[1], along.w);
  };
#pragma unroll
  for (int m = 0; m < kAtOnce; ++m) {
    if (m >= n) break;
    add_record(m, value[m]);
  }
#pragma unroll 1
  for (int first = kAtOnce; first < n; first += kAtOnce) {
#pragma unroll
    for (int m = 0; m < kAtOnce; ++m) {
      if (first + m < n) value[m] = load_part<2>(format, at_value, j);
      at_value += value_step;
    }
#pragma unroll
    for (int m = 0; m < kAtOnce; ++m) {
      if (first + m >= n) break;
      add_record(first + m, value[m]);
    }
  }
  const float beta = *s.beta;
  const float u[2] = {beta * (parts.v[0] - along.x), beta * (parts.v[1] - along.z)};
  o[0] = __fmaf_rn(key_query, u[0], along.y);
  o[1] = __fmaf_rn(key_query, u[1], along.w);
  store_two(s.u + j, u[0], u[1]);
  float zero = 0;  // stays 0 unless a value is not finite
#pragma unroll
  for (int e = 0; e < 2; ++e) zero = __fmaf_rn(u[e], 0.0f, __fmaf_rn(o[e], 0.0f, zero));
  return __syncthreads_or(zero != 0.0f) != 0;
}

template <Gate gate>
__device__ inline RecordsOf<gate> records_of(const LaunchArgs& a, const LayerView& layer,
                                             const Task& task, std::int64_t slot) {
  return {
      layer.window,      layer.period > 1 ? a.pool.windows + slot * a.pool.window_stride : nullptr,
      layer.n_key_heads, layer.n_value_heads,
      task.key_head,     task.head,
      kMaxWidth};
}

/// The token of a row with a window: output, record, the row's cursor. False when it failed.
template <class Page, Gate gate>
__device__ inline bool take_full_token(const Block& b, const LaunchArgs& a, const LayerView& layer,
                                       const RowPlace& place, const Task& task,
                                       const FullParts& parts, const Page& page,
                                       const FirstOfPage<Page>& first, unsigned char* memory) {
  TokenSpace<gate> s(memory);
  const RecordsOf<gate> records = records_of<gate>(a, layer, task, place.read);
  float o[2];
  const bool failed = read_token<Page, gate>(b, a.token, layer, page,
                                             a.pool.pages + place.read * a.pool.page_stride, first,
                                             records, place.fill, parts, s, o);
  float* out = task.out(a, kMaxWidth) + Page::column(b);
  out[0] = failed ? nan_value() : o[0];
  out[1] = failed ? nan_value() : o[1];
  if (failed) return false;
  if (place.read != place.write) {
    const typename Page::General general(layer, task.head, nullptr);
    copy_head<typename Page::General, gate>(b, a, place, task, general, records, place.fill);
  }
  append_record<gate>(b, task, records, a.pool.windows + place.write * a.pool.window_stride,
                      place.fill, s);
  return true;
}

template <class Page, Gate gate, class Known>
__global__ void __launch_bounds__(kTokenThreads, Page::kStepBlocks)
    full_step_kernel(const __grid_constant__ LaunchArgs a) {
  extern __shared__ unsigned char shared_memory[];
  const LayerView layer = Known::layer(a.layer);
  const Block b(kMaxWidth, kMaxWidth, kTokenThreads / 32);
  const Task task(layer, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x));
  const FullParts parts = fetch_full<Page, gate>(b, a.token, task);
  const Page page(layer, task.head);
  const RowPlace place(a, task.row);
  if (place.padding || place.outside) {
    return fill_output(b, task.out(a, kMaxWidth), place.padding ? 0.0f : nan_value());
  }
  const Cursor next{place.fill + 1, place.limit};
  const FirstOfPage<Page> first(b, page, a.pool.pages + place.read * a.pool.page_stride);
  if (__syncthreads_or(place.faulty)) {  // see RowPlace::faulty
    fill_output(b, task.out(a, kMaxWidth), nan_value());
    return settle(b, a, place, task.row, true, next);
  }
  const bool taken =
      take_full_token<Page, gate>(b, a, layer, place, task, parts, page, first, shared_memory);
  settle(b, a, place, task.row, !taken, next);
  // Whether any head failed is known to the next kernel.
  if (task.head == 0 && b.thread == 0 && place.due(layer)) {
    a.work.due_rows[atomicAdd(a.work.n_due, 1)] = task.row;
  }
}

// ---------------------------------------------------------------------------------------------
// Rewriting a page

inline constexpr int kRewriteThreads = 256;

/// Pairs of products that a rewrite adds at most: records or the token, compensators.
__host__ __device__ inline int most_pairs(const LayerView& layer) {
  return ((layer.period + 1) / 2 + (layer.codec.rank + 1) / 2 + 7) / 8 * 8;
}
/// Shared memory behind the token's: factors of rows and of columns, then what products and, after
/// them, the encoder need.
template <class Page>
__host__ __device__ int rewrite_room(const LayerView& layer) {
  const int pairs = 2 * most_pairs(layer) * kPairPitch * static_cast<int>(sizeof(Split));
  const int encoder = Page::encoder_bytes(layer);
  return 8 * kMinorRoom + (pairs > encoder ? pairs : encoder);
}

/// Four elements from 4 lane on of two records, decayed, as pairs of the key or the value side.
template <class Page>
__device__ inline void store_pair(const LayerView& layer, int lane, bool keys, int p,
                                  const float (&a)[4], const float (&b)[4], Split* pairs) {
  const bool minor = keys == Page::kKeysMinor;
  const int i = 4 * lane;
  Split* to = pairs + p * kPairPitch +
              (minor ? most_pairs(layer) * kPairPitch + pair_place(i) : major_place(i));
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const Split first = split_bf16(a[e], b[e]), second = split_bf16(a[e + 1], b[e + 1]);
    *reinterpret_cast<uint4*>(to + (minor ? pair_place(e) : e)) =
        make_uint4(first.high, first.low, second.high, second.low);
  }
}

/// Writes n records and the compensators as pairs, and leaves the page's own decay in s.gamma.
/// Returns how many steps add_pairs() takes. The block meets in it, and must meet afterwards.
template <class Page, Gate gate>
__device__ inline int store_pairs(const Block& b, const LayerView& layer, const Page& page,
                                  const std::uint8_t* head_page, const RecordsOf<gate>& records,
                                  int n, const TokenSpace<gate>& s, Split* pairs) {
  const VectorFormat keys_as = key_format(layer.window.records),
                     values_as = value_format(layer.window.records);
  StoredPart<4> key[2], value[2];
  const auto fetch = [&](int p) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int m = 2 * p + e;
      if (m >= n) break;
      key[e] = load_part<4>(keys_as, records.key(m), 4 * b.lane);
      value[e] = load_part<4>(values_as, records.value(m), 4 * b.lane);
    }
  };
  fetch(b.warp);  // under way while decays are made
  if constexpr (gate == Gate::kScalar) {
    if (b.warp == 0) decay_scalar(records, n, b.lane, s);
  } else if (b.thread < kMaxWidth) {
    const int i = b.thread;
    float after = records.factors() ? 1.0f : 0.0f;
    constexpr int kAtOnce = 8;
#pragma unroll 1
    for (int last = n - 1; last >= 0; last -= kAtOnce) {
      float of_gate[kAtOnce];
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (last - e >= 0) of_gate[e] = records.gate_value(last - e, i);
      }
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (last - e < 0) break;
        s.keys[(last - e) * kMaxWidth + i] = records.factors() ? after : expf(after);
        after = records.factors() ? after * of_gate[e] : after + of_gate[e];
      }
    }
    s.gamma[i] = expf(records.factors() ? records.total()[i] : after);
  }
  __syncthreads();
  const int first = (n + 1) / 2;
#pragma unroll 1
  for (int p = b.warp; p < first; p += b.n_warps) {
    float k[2][4] = {}, u[2][4] = {};
    if (p != b.warp) fetch(p);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int m = 2 * p + e;
      if (m >= n) break;
      restore_part<4>(keys_as, key[e], k[e]);
      restore_part<4>(values_as, value[e], u[e]);
      float4 decay;
      if constexpr (gate == Gate::kScalar) {
        decay = make_float4(s.weight[m], s.weight[m], s.weight[m], s.weight[m]);
      } else {
        decay = *reinterpret_cast<const float4*>(s.keys + m * kMaxWidth + 4 * b.lane);
      }
      k[e][0] *= decay.x, k[e][1] *= decay.y, k[e][2] *= decay.z, k[e][3] *= decay.w;
    }
    store_pair<Page>(layer, b.lane, true, p, k[0], k[1], pairs);
    store_pair<Page>(layer, b.lane, false, p, u[0], u[1], pairs);
  }
  const int rank = page.rank(), used = first + (rank + 1) / 2;
#pragma unroll 1
  for (int p = first + b.warp; p < (used + 7) / 8 * 8; p += b.n_warps) {
    float k[2][4] = {}, u[2][4] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = 2 * (p - first) + e;
      if (c >= rank) break;
      const std::uint16_t* factors = page.factors(head_page, c) + 4 * b.lane;
      const uint2 of_key = *reinterpret_cast<const uint2*>(factors),
                  of_value = *reinterpret_cast<const uint2*>(factors + kMaxWidth);
      const float2 k0 = two_halves(of_key.x), k1 = two_halves(of_key.y),
                   u0 = two_halves(of_value.x), u1 = two_halves(of_value.y);
      k[e][0] = k0.x, k[e][1] = k0.y, k[e][2] = k1.x, k[e][3] = k1.y;
      u[e][0] = u0.x, u[e][1] = u0.y, u[e][2] = u1.x, u[e][3] = u1.y;
#pragma unroll
      for (int x = 0; x < 4; ++x) k[e][x] *= s.gamma[gate == Gate::kScalar ? 0 : 4 * b.lane + x];
    }
    store_pair<Page>(layer, b.lane, true, p, k[0], k[1], pairs);
    store_pair<Page>(layer, b.lane, false, p, u[0], u[1], pairs);
  }
  return (used + 7) / 8;
}

/// Adds n records to the page at slot place.write and rounds it.
template <class Page, Gate gate>
__device__ inline void rewrite_page(const Block& b, const LaunchArgs& a, const LayerView& layer,
                                    const RowPlace& place, const Task& task, int n, Cursor next,
                                    unsigned char* memory) {
  const TokenSpace<gate> s(memory);
  const Page page(layer, task.head);
  const std::uint8_t* head_page = a.pool.pages + place.write * a.pool.page_stride;
  const RecordsOf<gate> records = records_of<gate>(a, layer, task, place.write);
  const auto codes = page.load(b, head_page);  // under way meanwhile
  auto* factors =
      reinterpret_cast<float*>(memory + TokenSpace<gate>::bytes(step_keys(layer, gate)));
  unsigned char* room = reinterpret_cast<unsigned char*>(factors + 2 * kMinorRoom);
  auto* pairs = reinterpret_cast<Split*>(room);
  const int i = b.thread % kMaxWidth;
  const bool rows = b.thread < kMaxWidth;
  const float factor = rows ? page.row_factor(head_page, i) : page.column_factor(head_page, i);
  const int n_steps = store_pairs<Page, gate>(b, layer, page, head_page, records, n, s, pairs);
  factors[(rows ? 0 : kMinorRoom) + (rows == Page::kKeysMinor ? minor_place(i) : i)] =
      rows ? s.gamma[gate == Gate::kScalar ? 0 : i] * factor : factor;
  __syncthreads();
  Frags x;
  page.decode(b, codes, head_page, factors, factors + kMinorRoom, x);
  add_pairs(b.warp, b.lane, n_steps, pairs, pairs + most_pairs(layer) * kPairPitch, x);
  float zero[4] = {};  // stay 0 unless a value is not finite
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) zero[e] = __fmaf_rn(x[n][e], 0.0f, zero[e]);
  }
  const bool failed = __syncthreads_or(!((zero[0] + zero[1]) + (zero[2] + zero[3]) == 0.0f)) != 0;
  settle(b, a, place, task.row, failed, next);
  if (failed) {
    // A flush has no output.
    if (a.rewrite == Rewrite::kDueRows) fill_output(b, task.out(a, kMaxWidth), nan_value());
    return;
  }
  page.encode(b, x, room, a.pool.pages + place.write * a.pool.page_stride);
}

/// Rounds the window of a row that full_step_kernel has listed: in the slot that it wrote, whose
/// cursor it has moved on.
template <class Page, Gate gate>
__device__ inline void close_listed(const Block& b, const LaunchArgs& a, const LayerView& layer,
                                    const Task& task, unsigned char* memory) {
  const RowPlace place(a, task.row);
  const int n = RowPlace::cursor_at(a.pool, place.write).fill;
  if (__syncthreads_or(place.faulty)) return settle(b, a, place, task.row, true, Cursor{});
  rewrite_page<Page, gate>(b, a, layer, place, task, n, Cursor{0, 0}, memory);
}

/// Rounds the open window of a slot.
template <class Page, Gate gate>
__device__ inline void flush_full_head(const Block& b, const LaunchArgs& a, const LayerView& layer,
                                       const Task& task, unsigned char* memory) {
  const RowPlace place(a, task.row);
  const int n = place.fill;
  if (place.padding || place.outside || n == 0) return;
  Cursor next{0, layer.absolute_phase ? place.whole_limit(layer) - n : 0};
  if (__syncthreads_or(place.faulty)) return settle(b, a, place, task.row, true, next);
  rewrite_page<Page, gate>(b, a, layer, place, task, n, next, memory);
}

/// Makes a dense state the page of a slot.
template <class Page>
__device__ inline void hand_over_full_head(const Block& b, const LaunchArgs& a,
                                           const LayerView& layer, const Task& task,
                                           unsigned char* memory) {
  const RowPlace place(a, task.row);
  if (place.padding || place.outside) return;
  const Cursor next{0, a.limit};
  if (__syncthreads_or(place.faulty)) return settle(b, a, place, task.row, true, next);
  const float* dense = a.dense + static_cast<std::int64_t>(task.head) * kMaxWidth * kMaxWidth;
  Frags x;
  float zero = 0;  // stays 0 unless a value is not finite
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int major = b.warp * 16 + h * 8 + b.lane / 4;
#pragma unroll
    for (int f = 0; f < 32; ++f) {
      const int minor = b.lane % 4 * 32 + f;
      at(x, h, f) =
          Page::kKeysMinor ? dense[minor * kMaxWidth + major] : dense[major * kMaxWidth + minor];
      zero = __fmaf_rn(at(x, h, f), 0.0f, zero);
    }
  }
  const bool failed = __syncthreads_or(zero != 0.0f) != 0;
  settle(b, a, place, task.row, failed, next);
  if (failed) return;
  const Page page(layer, task.head);
  page.encode(b, x, memory, a.pool.pages + place.write * a.pool.page_stride);
}

template <class Page, Gate gate, class Known>
__global__ void __launch_bounds__(kRewriteThreads, 2)
    full_rewrite_kernel(const __grid_constant__ LaunchArgs a) {
  extern __shared__ unsigned char shared_memory[];
  const LayerView layer = Known::layer(a.layer);
  const Block b(kMaxWidth, kMaxWidth, kRewriteThreads / 32);
  const bool listed = a.rewrite == Rewrite::kDueRows;
  const int n_heads = layer.n_value_heads;
  const int n_rows = listed ? *static_cast<volatile std::int32_t*>(a.work.n_due) : a.token.n_rows;
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < n_rows * n_heads;
       item += static_cast<int>(gridDim.x)) {
    const int row = item / n_heads;
    const Task task(layer, listed ? a.work.due_rows[row] : row, item - row * n_heads);
    if (a.rewrite == Rewrite::kHandOver) {
      hand_over_full_head<Page>(b, a, layer, task, shared_memory);
    } else if (listed) {
      close_listed<Page, gate>(b, a, layer, task, shared_memory);
    } else {
      flush_full_head<Page, gate>(b, a, layer, task, shared_memory);
    }
    __syncthreads();
  }
  if (!listed || b.thread != 0) return;
  // The list is empty again once the last block has read it.
  if (atomicInc(a.work.n_exits, gridDim.x - 1) == gridDim.x - 1) *a.work.n_due = 0;
}

template <class Page, Gate gate>
int full_step_shared(const LayerView& layer) {
  return TokenSpace<gate>::bytes(step_keys(layer, gate));
}
template <class Page, Gate gate>
int full_rewrite_shared(const LayerView& layer) {
  return TokenSpace<gate>::bytes(step_keys(layer, gate)) + rewrite_room<Page>(layer);
}

/// The kernels of kernels.cuh, and for windows of these formats of records at K = V = 128 the ones
/// above.
template <class Page, Gate gate, Records... kFast>
KernelSet full_kernels_of(const Choice& choice) {
  KernelSet set = kernels_of<typename Page::General, gate>(choice);
  if (!choice.full || choice.per_step) return set;
  const auto use = [&]<class Known>() {
    set.step = full_step_kernel<Page, gate, Known>;
    set.step_threads = kTokenThreads;
    set.step_shared = full_step_shared<Page, gate>;
    set.rewrite_step = full_rewrite_kernel<Page, gate, Known>;
    set.rewrite_step_shared = full_rewrite_shared<Page, gate>;
    set.full = true;
  };
  const auto match = [&]<Records kRecords>() {
    if (choice.records == kRecords) {
      use.template operator()<Fixed<true, static_cast<int>(kRecords)>>();
    }
  };
  (match.template operator()<kFast>(), ...);
  return set;
}
template <class Page, Records... kFast>
KernelSet full_kernels_by_gate(const Choice& choice) {
  return choice.gate == Gate::kScalar ? full_kernels_of<Page, Gate::kScalar, kFast...>(choice)
                                      : full_kernels_of<Page, Gate::kChannel, kFast...>(choice);
}

}  // namespace statepack::cuda
