#include "codec/leapquant/leapquant.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/check.hpp"
#include "codec/leapquant/fit.hpp"
#include "codec/leapquant/head_fit.hpp"
#include "codec/options.hpp"
#include "codec/pack.hpp"
#include "codec/packed_read.hpp"
#include "codec/quantise.hpp"
#include "codec/scale.hpp"
#include "codec/scratch.hpp"
#include "codec/transpose.hpp"

namespace statepack {
namespace {

static_assert(std::endian::native == std::endian::little, "checkpoints hold little-endian numbers");

constexpr std::int64_t kSection = 128;  // bytes to which sections are aligned
constexpr float kMinScaleF32 = 1e-12f;
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr int kFitRows = 16;    // whose residual stays in the first-level cache
constexpr int kClipSteps = 10;  // factors 1, 0.95, ..., 0.5

constexpr std::int64_t to_section(std::int64_t n) {
  return (n + kSection - 1) / kSection * kSection;
}

}  // namespace

struct LeapquantCodec::Arrays {
  float* y;             // [K][V] residual over s_k
  float* row;           // [V]
  float* residual;      // [kFitRows][V]
  float* sums;          // [kFitRows]
  float* one_over;      // [kFitRows]
  float* packed;        // [4][K] vectors of a read
  float* key;           // [rank][K]
  float* value;         // [rank][V]
  float* s_k;           // [K]
  float* s_v;           // [V]
  float* step;          // [V] s_v / qmax
  float* inverse;       // [V] qmax / s_v
  float* error;         // [V]
  float* best_error;    // [V]
  float* best;          // [V]
  std::uint8_t* z;      // [K][V]
  std::uint8_t* zt;     // [V][K]
  std::uint16_t* half;  // [max(K, V)]

  template <class Take>
  Arrays(const LeapquantCodec& codec, Take&& take) {
    const std::int64_t K = codec.shape_.K, V = codec.shape_.V, rank = codec.settings_.rank;
    take(y, K * V);
    take(row, V);
    take(residual, kFitRows * V);
    take(sums, kFitRows);
    take(one_over, kFitRows);
    take(packed, 4 * K);
    take(key, rank * K);
    take(value, rank * V);
    take(s_k, K);
    take(s_v, V);
    take(step, V);
    take(inverse, V);
    take(error, V);
    take(best_error, V);
    take(best, V);
    take(z, K * V);
    take(zt, K * V);
    take(half, std::max(K, V));
  }
  Arrays(const LeapquantCodec& codec, CodecScratch scratch)
      : Arrays(codec, [cursor = ScratchCursor(scratch)]<class T>(
                          T*& array, std::int64_t n) mutable { array = cursor.take<T>(n); }) {}
};

LeapquantCodec::LeapquantCodec(const LayerShape& shape, const Settings& settings)
    : shape_(shape), settings_(settings), start_(start_matrix(shape.V, settings.rank)) {
  const std::int64_t K = shape.K, V = shape.V;
  const int low_bits = settings.bits == 6 ? 4 : settings.bits;
  const std::int64_t scale_bytes = settings.f16_scales ? 2 : 4;
  layout_.high_bits = to_section(V * packed_bytes(K, low_bits));
  layout_.row_scales =
      to_section(layout_.high_bits + (settings.bits == 6 ? V * packed_bytes(K, 2) : 0));
  layout_.column_scales = to_section(layout_.row_scales + (settings.smooth ? scale_bytes * K : 0));
  layout_.compensators = to_section(layout_.column_scales + scale_bytes * V);
  layout_.n_bytes = to_section(layout_.compensators + 2 * settings.rank * (K + V));
}

PayloadBytes LeapquantCodec::payload() const {
  const std::int64_t K = shape_.K, V = shape_.V, heads = shape_.n_value_heads;
  PayloadBytes bytes;
  bytes.codes = heads * V *
                (settings_.bits == 6 ? packed_bytes(K, 4) + packed_bytes(K, 2)
                                     : packed_bytes(K, settings_.bits));
  bytes.scales = heads * (settings_.f16_scales ? 2 : 4) * ((settings_.smooth ? K : 0) + V);
  bytes.compensators = heads * 2 * settings_.rank * (K + V);
  bytes.padding = heads * layout_.n_bytes - bytes.total();
  return bytes;
}

std::size_t LeapquantCodec::scratch_bytes() const {
  ScratchSize size;
  Arrays(*this, [&]<class T>(T*&, std::int64_t n) { size.add<T>(n); });
  return size.n_bytes();
}

// From and to value-major codes a byte each, a.zt. The codes of a column are one run, padded to
// whole bytes; where they fill bytes, so do all columns.
void LeapquantCodec::pack(const Arrays& a, std::uint8_t* checkpoint) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  const int bits = settings_.bits;
  const std::int64_t n_runs = K % 4 == 0 ? 1 : V;
  const std::int64_t n = K * V / n_runs;
  std::uint8_t* codes = checkpoint + layout_.codes;
  std::uint8_t* high = checkpoint + layout_.high_bits;
  for (std::int64_t run = 0; run < n_runs; ++run) {
    const std::uint8_t* z = a.zt + run * n;
    if (bits == 6) {
      leapquant::pack_planes(z, n, codes + run * packed_bytes(n, 4),
                             high + run * packed_bytes(n, 2));
    } else {
      pack_codes(z, n, bits, codes + run * packed_bytes(n, bits));
    }
  }
}

void LeapquantCodec::unpack(const std::uint8_t* checkpoint, const Arrays& a) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  const int bits = settings_.bits;
  const std::int64_t n_runs = K % 4 == 0 ? 1 : V;
  const std::int64_t n = K * V / n_runs;
  const std::uint8_t* codes = checkpoint + layout_.codes;
  const std::uint8_t* high = checkpoint + layout_.high_bits;
  for (std::int64_t run = 0; run < n_runs; ++run) {
    std::uint8_t* z = a.zt + run * n;
    if (bits == 6) {
      leapquant::unpack_planes(codes + run * packed_bytes(n, 4), high + run * packed_bytes(n, 2), n,
                               z);
    } else {
      unpack_signed(codes + run * packed_bytes(n, bits), n, bits,
                    reinterpret_cast<std::int8_t*>(z));
    }
  }
}

// Clamps scales to what the format holds and stores them; `scales` becomes what was stored.
void LeapquantCodec::round_scales(float* scales, std::int64_t n) const {
  for (std::int64_t j = 0; j < n; ++j) {
    scales[j] = settings_.f16_scales ? h16(scales[j]) : std::max(scales[j], kMinScaleF32);
  }
}

void LeapquantCodec::store_scales(const float* scales, std::int64_t n, std::uint8_t* to) const {
  if (!settings_.f16_scales) {
    std::memcpy(to, scales, static_cast<std::size_t>(n) * sizeof(*scales));
    return;
  }
  for (std::int64_t j = 0; j < n; ++j) {
    const std::uint16_t half = encode_scale(scales[j]);
    std::memcpy(to + 2 * j, &half, sizeof(half));
  }
}

void LeapquantCodec::read_scales(const std::uint8_t* from, std::int64_t n, std::uint16_t* half,
                                 float* scales) const {
  if (settings_.f16_scales) {
    std::memcpy(half, from, static_cast<std::size_t>(2 * n));
    load_scales(half, n, scales);
  } else {
    std::memcpy(scales, from, static_cast<std::size_t>(n) * sizeof(*scales));
  }
}

void LeapquantCodec::read_row_scales(const std::uint8_t* checkpoint, const Arrays& a) const {
  if (settings_.smooth) {
    read_scales(checkpoint + layout_.row_scales, shape_.K, a.half, a.s_k);
  } else {
    std::fill_n(a.s_k, shape_.K, 1.0f);
  }
}

void LeapquantCodec::read_factors(const std::uint8_t* checkpoint, const Arrays& a) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  const std::uint8_t* from = checkpoint + layout_.compensators;
  for (int p = 0; p < settings_.rank; ++p, from += 2 * (K + V)) {
    std::memcpy(a.half, from, static_cast<std::size_t>(2 * K));
    load_scales(a.half, K, a.key + p * K);
    std::memcpy(a.half, from + 2 * K, static_cast<std::size_t>(2 * V));
    load_scales(a.half, V, a.value + p * V);
  }
}

void LeapquantCodec::encode(int head, const float* X, std::uint8_t* page,
                            const RoundingContext& /*at*/, CodecScratch scratch) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  const int rank = settings_.rank;
  const float qmax = static_cast<float>((1 << (settings_.bits - 1)) - 1);
  const Arrays a(*this, scratch);
  std::uint8_t* const checkpoint = page + head * layout_.n_bytes;
  if (payload().padding > 0) std::memset(checkpoint, 0, static_cast<std::size_t>(layout_.n_bytes));

  // A1 = orth(S Q0),  Qv = orth(S^T A1);  again for more rounds
  // U  = S Qv,  Ktil = fp16(U),  Util = fp16(Qv)
  const auto times = whole_runs() ? leapquant::times_head : leapquant::times;
  const auto transposed_times =
      whole_runs() ? leapquant::transposed_times_head : leapquant::transposed_times;
  std::copy(start_.begin(), start_.end(), a.value);
  for (int round = 0; round < settings_.rounds; ++round) {
    times(X, K, V, a.value, rank, a.key);
    leapquant::orthonormalise(a.key, K, rank);
    transposed_times(X, K, V, a.key, rank, a.value);
    leapquant::orthonormalise(a.value, V, rank);
  }
  times(X, K, V, a.value, rank, a.key);
  std::uint8_t* to = checkpoint + layout_.compensators;
  for (int p = 0; p < rank; ++p, to += 2 * (K + V)) {
    leapquant::round_to_halves(a.key + p * K, K, a.half);
    std::memcpy(to, a.half, static_cast<std::size_t>(2 * K));
    leapquant::round_to_halves(a.value + p * V, V, a.half);
    std::memcpy(to + 2 * K, a.half, static_cast<std::size_t>(2 * V));
  }

  if (!smooth(X, a)) {
    std::memset(checkpoint, 0, static_cast<std::size_t>(layout_.n_bytes));
    return;
  }
  round_scales(a.s_v, V);
  if (settings_.clip) shrink_column_scales(a, qmax);
  if (settings_.smooth) store_scales(a.s_k, K, checkpoint + layout_.row_scales);
  store_scales(a.s_v, V, checkpoint + layout_.column_scales);

  // Z[v][c] = clamp( rint( qmax E[c,v] / (s_k[c] s_v[v]) ), -qmax, qmax )
  for (std::int64_t v = 0; v < V; ++v) a.inverse[v] = qmax / a.s_v[v];
  if (whole_runs()) {
    std::uint8_t* const z = settings_.bits == 8 ? checkpoint + layout_.codes : a.zt;
    leapquant::encode_columns(a.y, shape_.K, shape_.V, a.inverse, qmax, z);
    if (settings_.bits != 8) pack(a, checkpoint);
    return;
  }
  for (std::int64_t c = 0; c < K; ++c) {
    leapquant::encode_row(a.y + c * V, a.inverse, V, qmax, a.z + c * V);
  }
  transpose_bytes(a.z, V, K, V, a.zt, K);
  pack(a, checkpoint);
}

// Whether the loops that take whole runs of rows and columns do.
bool LeapquantCodec::whole_runs() const {
  return shape_.K % kRunLength == 0 && shape_.V % kRunLength == 0;
}

// E = S - Ktil Util^T,  s_k[c] = sqrt(mean_v |E[c,v]|),  y = E / s_k,  s_v[v] = max_c |y[c,v]|.
// False when a mean is not finite.
bool LeapquantCodec::smooth(const float* X, const Arrays& a) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  const int rank = settings_.rank, n_columns = shape_.V;
  std::fill_n(a.s_v, V, 0.0f);
  const int n_rows = whole_runs() ? kFitRows : 1;
  for (std::int64_t c = 0; c < K; c += n_rows) {
    float* const s_k = a.s_k + c;
    if (n_rows > 1) {
      leapquant::residual_rows(X + c * V, n_rows, n_columns, a.key + c, shape_.K, a.value, rank,
                               a.residual, a.sums);
    } else {
      leapquant::residual_row(X + c * V, V, a.key + c, K, a.value, rank, a.residual);
      a.sums[0] = sum_of_magnitudes(a.residual, V);
    }
    for (int i = 0; i < n_rows; ++i) {
      const float mean = a.sums[i] / static_cast<float>(V);
      if (!(mean <= kLargest)) return false;
      s_k[i] = settings_.smooth ? std::sqrt(mean) : 1.0f;
      round_scales(s_k + i, 1);
      a.one_over[i] = 1.0f / s_k[i];
    }
    if (n_rows > 1) {
      leapquant::smooth_rows(a.residual, n_rows, n_columns, s_k, a.one_over, a.y + c * V, a.s_v);
    } else {
      leapquant::smooth_row(a.residual, V, s_k[0], a.y + c * V, a.s_v);
    }
  }
  return true;
}

// Takes for each column the factor of 1, 0.95, ..., 0.5 with the least squared error, the larger
// one of equals.
void LeapquantCodec::shrink_column_scales(const Arrays& a, float qmax) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  std::fill_n(a.best_error, V, std::numeric_limits<float>::infinity());
  for (int s = 0; s <= kClipSteps; ++s) {
    const float factor =
        static_cast<float>(2 * kClipSteps - s) / static_cast<float>(2 * kClipSteps);
    for (std::int64_t v = 0; v < V; ++v) {
      a.row[v] = factor * a.s_v[v];
      round_scales(a.row + v, 1);
      a.step[v] = a.row[v] / qmax;
      a.inverse[v] = qmax / a.row[v];
      a.error[v] = 0;
    }
    for (std::int64_t c = 0; c < K; ++c) {
      leapquant::add_error_row(a.y + c * V, a.inverse, a.step, V, qmax, a.s_k[c], a.error);
    }
    for (std::int64_t v = 0; v < V; ++v) {
      if (a.error[v] < a.best_error[v]) {
        a.best_error[v] = a.error[v];
        a.best[v] = a.row[v];
      }
    }
  }
  for (std::int64_t v = 0; v < V; ++v) {
    if (a.best_error[v] <= kLargest) a.s_v[v] = a.best[v];
  }
}

void LeapquantCodec::decode(int head, const std::uint8_t* page, float* X,
                            CodecScratch scratch) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  const float qmax = static_cast<float>((1 << (settings_.bits - 1)) - 1);
  const Arrays a(*this, scratch);
  const std::uint8_t* const checkpoint = page + head * layout_.n_bytes;
  read_factors(checkpoint, a);
  read_row_scales(checkpoint, a);
  read_scales(checkpoint + layout_.column_scales, V, a.half, a.s_v);
  for (std::int64_t v = 0; v < V; ++v) a.step[v] = a.s_v[v] / qmax;
  const bool bytes = settings_.bits == 8;
  if (!bytes || !whole_runs()) unpack(checkpoint, a);
  if (whole_runs()) {
    leapquant::restore_rows(bytes ? checkpoint + layout_.codes : a.zt, shape_.K, shape_.V, 0,
                            shape_.K, a.s_k, a.step, a.key, a.value, settings_.rank, X);
    return;
  }
  transpose_bytes(a.zt, K, V, K, a.z, V);
  for (std::int64_t c = 0; c < K; ++c) {
    leapquant::restore_row(a.z + c * V, a.s_k[c], a.step, V, a.key + c, K, a.value, settings_.rank,
                           X + c * V);
  }
}

std::optional<PageMap> LeapquantCodec::page_map() const {
  if (!settings_.smooth) return std::nullopt;  // kernels elsewhere read both scales
  PageMap map{.family = PageFamily::kLeapquant,
              .high_bits = layout_.high_bits,
              .compensators = layout_.compensators,
              .rank = settings_.rank,
              .rounds = settings_.rounds,
              .f16_scales = settings_.f16_scales,
              .clip = settings_.clip,
              .start = start_};
  for (int h = 0; h < shape_.n_value_heads; ++h) {
    const std::int64_t at = h * layout_.n_bytes;
    map.heads.push_back({.codes = at,
                         .code_bytes = layout_.n_bytes,
                         .row_scales = at + layout_.row_scales,
                         .column_scales = at + layout_.column_scales,
                         .n_row_scales = shape_.K,
                         .bits = settings_.bits});
  }
  return map;
}

// Shat^T a = diag(s_v / qmax) Z (s_k o a) + Util (Ktil^T a)
bool LeapquantCodec::read_two(int head, const std::uint8_t* page, const float* a, const float* b,
                              float* p, float* r, CodecScratch scratch) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  if (K % kRunLength != 0) return false;
  const int bits = settings_.bits;
  const float qmax = static_cast<float>((1 << (bits - 1)) - 1);
  const Arrays arrays(*this, scratch);
  const std::uint8_t* const checkpoint = page + head * layout_.n_bytes;
  read_row_scales(checkpoint, arrays);
  read_scales(checkpoint + layout_.column_scales, V, arrays.half, arrays.s_v);
  float* const scaled_a = arrays.packed + 2 * K;
  float* const scaled_b = scaled_a + K;
  multiply(a, arrays.s_k, K, scaled_a);
  multiply(b, arrays.s_k, K, scaled_b);
  CodeColumns columns;
  columns.codes = bits == 8   ? RunCodes::kSigned8
                  : bits == 6 ? RunCodes::kSigned6
                              : RunCodes::kSigned4;
  columns.first = checkpoint + layout_.codes;
  columns.stride = packed_bytes(K, bits == 6 ? 4 : bits);
  if (bits == 6) {
    columns.high = checkpoint + layout_.high_bits;
    columns.high_stride = packed_bytes(K, 2);
  }
  columns.K = columns.group = shape_.K;
  columns.V = shape_.V;
  read_columns(columns, scaled_a, scaled_b, arrays.packed, p, r);
  for (std::int64_t v = 0; v < V; ++v) arrays.step[v] = arrays.s_v[v] / qmax;
  multiply(p, arrays.step, V, p);
  multiply(r, arrays.step, V, r);
  read_low_rank(checkpoint + layout_.compensators, settings_.rank, shape_.K, shape_.V, a, b, p, r);
  return true;
}

LeapquantCodec::Dump LeapquantCodec::dump(int head,
                                          std::span<const std::uint8_t> bytes_of_page) const {
  SP_CHECK(bytes_of_page.size() >= static_cast<std::size_t>(page_bytes()), "a page is whole");
  const std::uint8_t* const page = bytes_of_page.data();
  const std::int64_t K = shape_.K, V = shape_.V;
  std::vector<std::byte> bytes(scratch_bytes());
  const Arrays a(*this, CodecScratch{bytes});
  const std::uint8_t* const checkpoint = page + head * layout_.n_bytes;
  unpack(checkpoint, a);
  transpose_bytes(a.zt, K, V, K, a.z, V);
  read_factors(checkpoint, a);
  read_row_scales(checkpoint, a);
  read_scales(checkpoint + layout_.column_scales, V, a.half, a.s_v);
  Dump dump;
  dump.z.resize(static_cast<std::size_t>(K * V));
  std::transform(a.z, a.z + K * V, dump.z.begin(),
                 [](std::uint8_t z) { return static_cast<std::int8_t>(z); });
  dump.s_k.assign(a.s_k, a.s_k + K);
  dump.s_v.assign(a.s_v, a.s_v + V);
  dump.keys.assign(a.key, a.key + settings_.rank * K);
  dump.values.assign(a.value, a.value + settings_.rank * V);
  return dump;
}

namespace {

// SplitMix64 (Steele, Lea, Flood 2014).
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t x = state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// ln x for a normal x > 0, to about 1e-16: the C library's may differ in its last bit.
double natural_log(double x) {
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0x000fffffffffffffu) | 0x3ff0000000000000u);  // [1, 2)
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  // ln m = 2 (t + t^3/3 + t^5/5 + ...), t = (m - 1) / (m + 1), |t| < 0.172
  const double t = (m - 1) / (m + 1);
  double sum = 0;
  for (int n = 25; n >= 1; n -= 2) sum = sum * t * t + 1.0 / n;
  return 2 * t * sum + exponent * 0.6931471805599453;
}

}  // namespace

std::vector<float> LeapquantCodec::start_matrix(int V, int rank) {
  constexpr std::uint64_t kSeed = 0x4c656170'51303031u;  // "LeapQ001"
  std::uint64_t state = kSeed;
  const auto uniform = [&] {  // in (-1, 1)
    return 0x1p-52 * (static_cast<double>(next_random(state) >> 11) + 0.5) - 1;
  };
  std::vector<float> start(static_cast<std::size_t>(rank) * static_cast<std::size_t>(V));
  for (int v = 0; v < V; ++v) {
    for (int p = 0; p < kMaxRank; p += 2) {  // Marsaglia's polar method gives two at a time
      double x, y, s;
      do {
        x = uniform();
        y = uniform();
        s = x * x + y * y;
      } while (s >= 1 || s < 0x1p-100);
      const double factor = std::sqrt(-2 * natural_log(s) / s);
      const auto at = [&](int q) -> float& {
        return start[static_cast<std::size_t>(q) * static_cast<std::size_t>(V) +
                     static_cast<std::size_t>(v)];
      };
      if (p < rank) at(p) = static_cast<float>(x * factor);
      if (p + 1 < rank) at(p + 1) = static_cast<float>(y * factor);
    }
  }
  return start;
}

namespace {

Status validate(const CodecConfig& config) {
  static_assert(LeapquantCodec::kMaxRank == 8, "head_fit.cc has one case a rank");
  SP_RETURN_IF_ERROR(int_option(config, "rank", 0, LeapquantCodec::kMaxRank).status());
  SP_RETURN_IF_ERROR(int_option(config, "rounds", 1, 8).status());
  SP_RETURN_IF_ERROR(check_choice(config, "clip"));
  SP_RETURN_IF_ERROR(check_choice(config, "scales"));
  SP_RETURN_IF_ERROR(check_choice(config, "smooth"));
  if (config.arg == "8" && option(config, "clip") == "on") {
    return {Code::kUnsupported, codec_label(config) +
                                    ": clip=on gains nothing at 8 bits; drop it or use "
                                    "leapquant:6 or leapquant:4"};
  }
  return {};
}

Result<std::unique_ptr<LayerCodec>> make(const CodecConfig& config, const LayerShape& shape,
                                         const LayerPlan*) {
  SP_RETURN_IF_ERROR(check_shape(config, shape));
  SP_RETURN_IF_ERROR(validate(config));
  LeapquantCodec::Settings settings;
  settings.bits = config.arg == "8" ? 8 : config.arg == "6" ? 6 : 4;
  SP_ASSIGN_OR_RETURN(settings.rank, int_option(config, "rank", 0, LeapquantCodec::kMaxRank));
  SP_ASSIGN_OR_RETURN(settings.rounds, int_option(config, "rounds", 1, 8));
  settings.clip = option(config, "clip") == "on";
  settings.f16_scales = option(config, "scales") == "f16";
  settings.smooth = option(config, "smooth") == "on";
  if (settings.f16_scales && shape.gate == Gate::kChannel) {
    return Status(Code::kUnsupported,
                  codec_label(config) +
                      ": scales=f16 costs accuracy where every key channel has its own gate; use "
                      "scales=f32");
  }
  return std::unique_ptr<LayerCodec>(std::make_unique<LeapquantCodec>(shape, settings));
}

}  // namespace

const CodecInfo kLeapquantInfo = {
    .name = "leapquant",
    .id = 11,
    .help = "half-precision compensators, smoothed rows, one scale a value column",
    .args = {"8", "6", "4"},
    .options = {{"rank", "0..8", "compensators taken out before rounding"},
                {"rounds", "1..8", "rounds of subspace iteration that find them"},
                {"clip", "off|on", "shrink column scales where that lowers the squared error"},
                {"scales", "f32|f16", "how scales are stored; f16 with a gate a head only"},
                {"smooth", "on|off", "a scale a key row, too; off for comparison"}},
    .plan_kind = [](const CodecConfig&) -> std::string_view { return ""; },
    .defaults =
        [](const CodecConfig&) {
          return SchemeDefaults{.period = 16, .records = "bf16", .phase = "absolute"};
        },
    .default_option =
        [](const CodecConfig& config, std::string_view key) {
          return std::string(key == "rank"     ? (config.arg == "4" ? "8" : "4")
                             : key == "rounds" ? "1"
                             : key == "clip"   ? "off"
                             : key == "smooth" ? "on"
                                               : "f32");
        },
    .validate = validate,
    .make = make,
};

}  // namespace statepack
