#include "codec/stepquant/stepquant.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/check.hpp"
#include "codec/options.hpp"
#include "codec/pack.hpp"
#include "codec/packed_read.hpp"
#include "codec/quantise.hpp"
#include "codec/scale.hpp"
#include "codec/scratch.hpp"
#include "codec/stepquant/fit.hpp"
#include "codec/stepquant/tile_fit.hpp"

namespace statepack {
namespace {

static_assert(std::endian::native == std::endian::little, "pages hold little-endian halves");

constexpr int kPivotBits = 16;
// Weights have geometric mean 1 and come from the eighth root of a row impact; beyond this range
// they can only be damage. Within it (w r n)^2 lies in [2^-88, 2^84], so a den that is not zero
// needs no floor (the published one is 1e-30).
constexpr float kMaxWeight = 0x1p20f;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr bool is_width(int bits) {
  return bits == 2 || bits == 4 || bits == 6 || bits == 8 || bits == kPivotBits;
}

// Q of the integer codes.
constexpr float peak_code(int bits) { return static_cast<float>((1 << (bits - 1)) - 1); }

// Codes are laid in whole periods: the fewest that fill whole bytes.
constexpr std::int64_t run_bytes(int bits, std::int64_t n) {
  if (bits == kPivotBits) return 2 * n;
  const std::int64_t period = bits == 8 ? 1 : bits == 4 ? 2 : 4;
  return ceil_div(n, period) * period * bits / 8;
}

// A scalar gate's rows.
RunCodes run_codes(int bits) {
  switch (bits) {
    case 2:
      return RunCodes::kLevels2;
    case 4:
      return RunCodes::kOffset4;
    case 6:
      return RunCodes::kOffset6;
    case 8:
      return RunCodes::kOffset8;
    default:
      return RunCodes::kHalf;
  }
}

constexpr int kFitRows = RowSource::kMaxRows;  // between whose steps 1 and 2 X stays in the cache

class DenseRows final : public RowSource {
 public:
  DenseRows(const float* X, int V) : X_(X), V_(V) {}
  const float* rows(int begin, int /*n*/) override { return X_ + std::int64_t{begin} * V_; }

 private:
  const float* X_;
  int V_;
};

constexpr std::int64_t kRunSlack = 8;  // to fill a run: at most 3 codes of 6 bits

constexpr std::int64_t even(std::int64_t n) { return n + (n & 1); }

void read_halves(const std::uint8_t* stored, std::int64_t n, std::uint16_t* half, float* value) {
  std::memcpy(half, stored, static_cast<std::size_t>(2 * n));
  load_scales(half, n, value);
}

// Runs `body` with the size of a run as a constant, so that its copies become single moves. Tiles
// of 16 or 4 columns have these sizes; a state narrower than a tile has one run a row, of any size.
template <class Body>
void with_run_size(std::int64_t n_bytes, Body&& body) {
  switch (n_bytes) {
    case 1:
      return body(std::integral_constant<std::size_t, 1>());
    case 2:
      return body(std::integral_constant<std::size_t, 2>());
    case 3:
      return body(std::integral_constant<std::size_t, 3>());
    case 4:
      return body(std::integral_constant<std::size_t, 4>());
    case 8:
      return body(std::integral_constant<std::size_t, 8>());
    case 12:
      return body(std::integral_constant<std::size_t, 12>());
    case 16:
      return body(std::integral_constant<std::size_t, 16>());
    case 32:
      return body(std::integral_constant<std::size_t, 32>());
    default:
      return body(static_cast<std::size_t>(n_bytes));
  }
}

std::string row_name(int head, int i) {
  return "row " + std::to_string(i) + " of head " + std::to_string(head);
}

}  // namespace

// What encode and decode work in, and what dump() reads with.
struct StepquantCodec::Arrays {
  float* y;             // [K][V], or two vectors of a read
  float* r;             // [row scales of a head]
  float* peak;          // [4][V], one row for each width
  float* c;             // [V]
  float* num;           // [V]
  float* den;           // [V]
  std::uint8_t* u;      // [V]
  std::uint8_t* run;    // all runs of a row
  std::uint16_t* half;  // [V], or the row scales of a head that is read
  std::uint16_t* rows;  // [row scales of a head] as stored
  float* sums;          // of a few rows: [n][groups], and so
  float* inverse;       // 1 / r

  // `take` hands out an array of so many values, or counts it.
  template <class Take>
  Arrays(const StepquantCodec& codec, Take&& take) {
    const std::int64_t K = codec.shape_.K, V = codec.shape_.V;
    const std::int64_t n_row_scales = K * ceil_div(V, codec.group_);
    take(y, K * std::max<std::int64_t>(V, 2));
    take(r, n_row_scales);
    take(peak, 4 * V);
    take(c, V);
    take(num, V);
    take(den, V);
    take(u, V);
    take(run, 2 * V + kRunSlack);
    take(half, std::max(V, n_row_scales));
    take(rows, n_row_scales);
    take(sums, kFitRows * n_row_scales / K);
    take(inverse, kFitRows * n_row_scales / K);
  }
  Arrays(const StepquantCodec& codec, CodecScratch scratch)
      : Arrays(codec, [cursor = ScratchCursor(scratch)]<class T>(
                          T*& array, std::int64_t n) mutable { array = cursor.take<T>(n); }) {}
};

Result<std::unique_ptr<LayerCodec>> StepquantCodec::make(const LayerShape& shape,
                                                         const LayerPlan* plan, int group,
                                                         Fit fit) {
  const int K = shape.K, V = shape.V, HV = shape.n_value_heads;
  if (plan == nullptr) {
    return Status(
        Code::kMismatch,
        "stepquant needs a plan; make one with `statepack calibrate` and name it with --plan");
  }
  const std::size_t n_rows = static_cast<std::size_t>(HV) * static_cast<std::size_t>(K);
  if (plan->bits.size() != n_rows || plan->row_weight.size() != n_rows) {
    return Status(Code::kMismatch, "the stepquant plan has " + std::to_string(plan->bits.size()) +
                                       " widths and " + std::to_string(plan->row_weight.size()) +
                                       " weights for a layer of " + std::to_string(HV) +
                                       " heads x " + std::to_string(K) +
                                       " rows; calibrate this model");
  }

  const bool scalar = shape.gate == Gate::kScalar;
  std::unique_ptr<StepquantCodec> codec(new StepquantCodec);
  codec->shape_ = shape;
  codec->tile_ = std::min(scalar ? 16 : 4, V);
  codec->n_full_tiles_ = V / codec->tile_;
  codec->last_tile_ = V % codec->tile_;
  codec->group_ = group;
  codec->fit_ = fit;
  codec->heads_.resize(static_cast<std::size_t>(HV));
  codec->rows_.resize(n_rows);

  PayloadBytes& payload = codec->payload_;
  std::int64_t cursor = 0;
  for (int h = 0; h < HV; ++h) {
    Head& head = codec->heads_[static_cast<std::size_t>(h)];
    head.codes = cursor;
    head.first_weight = static_cast<std::int64_t>(codec->scale_weights_.size());
    std::int64_t tile_bytes = 0, last_bytes = 0, held_bytes = 0;
    for (int i = 0; i < K; ++i) {
      const std::size_t at =
          static_cast<std::size_t>(h) * static_cast<std::size_t>(K) + static_cast<std::size_t>(i);
      Row& row = codec->rows_[at];
      row.bits = plan->bits[at];
      row.weight = plan->row_weight[at];
      if (!is_width(row.bits)) {
        return Status(Code::kCorrupt, "the stepquant plan gives " + row_name(h, i) + " " +
                                          std::to_string(row.bits) +
                                          " bits; stepquant knows 2, 4, 6, 8 and 16");
      }
      if (!(row.weight >= 1 / kMaxWeight && row.weight <= kMaxWeight)) {
        return Status(Code::kCorrupt, "the stepquant plan gives " + row_name(h, i) +
                                          " the weight " + std::to_string(row.weight) +
                                          "; weights lie between 2^-20 and 2^20, with mean 1");
      }
      if (scalar &&
          row.bits != plan->bits[static_cast<std::size_t>(h) * static_cast<std::size_t>(K)]) {
        return Status(Code::kCorrupt, "the stepquant plan has mixed rows in head " +
                                          std::to_string(h) +
                                          ": with one gate a head all its rows have one width");
      }
      const bool pivot = row.bits == kPivotBits;
      head.signed_magnitude = scalar && row.bits == 2 && fit == Fit::kDual;
      head.uniform_bits = scalar ? row.bits : 0;
      if (pivot) {
        tile_bytes = even(tile_bytes);
        last_bytes = even(last_bytes);
      } else {
        row.scale = head.n_row_scales;
        head.n_row_scales += codec->groups(h);
        codec->scale_weights_.insert(codec->scale_weights_.end(),
                                     static_cast<std::size_t>(codec->groups(h)), row.weight);
      }
      row.offset = static_cast<std::int32_t>(tile_bytes);
      row.last_offset = static_cast<std::int32_t>(last_bytes);
      tile_bytes += run_bytes(row.bits, codec->tile_);
      last_bytes += run_bytes(row.bits, codec->last_tile_);
      const std::int64_t row_bytes = codec->n_full_tiles_ * run_bytes(row.bits, codec->tile_) +
                                     run_bytes(row.bits, codec->last_tile_);
      held_bytes += row_bytes;
      (pivot ? payload.pivots : payload.codes) += row_bytes;
    }
    head.stride = even(tile_bytes);
    head.code_bytes = codec->n_full_tiles_ * head.stride + even(last_bytes);
    head.padded = head.code_bytes != held_bytes;
    payload.padding += head.code_bytes - held_bytes;
    cursor += head.code_bytes;
  }
  for (Head& head : codec->heads_) {
    head.rows = cursor;
    cursor += 2 * head.n_row_scales;
  }
  for (Head& head : codec->heads_) {
    head.columns = cursor;
    cursor += head.n_row_scales > 0 && fit == Fit::kDual ? 2 * std::int64_t{V} : 0;
  }
  payload.scales = cursor - codec->heads_.front().rows;
  SP_CHECK(payload.total() == cursor, "stepquant counts every byte of its page");
  return std::unique_ptr<LayerCodec>(std::move(codec));
}

int StepquantCodec::groups(int head) const {
  const bool grouped = heads_[static_cast<std::size_t>(head)].signed_magnitude;
  return grouped ? static_cast<int>(ceil_div(shape_.V, group_)) : 1;
}

std::int64_t StepquantCodec::run_offset(int head, int i, int tile_begin) const {
  const Head& h = heads_[static_cast<std::size_t>(head)];
  const int t = tile_begin / tile_;
  return h.codes + t * h.stride +
         (t < n_full_tiles_ ? row(head, i).offset : row(head, i).last_offset);
}

std::size_t StepquantCodec::scratch_bytes() const {
  ScratchSize size;
  Arrays(*this, [&]<class T>(T*&, std::int64_t n) { size.add<T>(n); });
  return size.n_bytes();
}

// From the runs of a row, one behind the other, to their places in the tiles.
void StepquantCodec::scatter(const Head& head, const Row& row, const std::uint8_t* run,
                             std::uint8_t* page) const {
  std::uint8_t* const codes = page + head.codes;
  const std::int64_t n_bytes = run_bytes(row.bits, tile_);
  with_run_size(n_bytes, [&](auto size) {
    for (int t = 0; t < n_full_tiles_; ++t) {
      std::memcpy(codes + t * head.stride + row.offset, run + t * n_bytes, size);
    }
  });
  std::memcpy(codes + n_full_tiles_ * head.stride + row.last_offset, run + n_full_tiles_ * n_bytes,
              static_cast<std::size_t>(run_bytes(row.bits, last_tile_)));
}

void StepquantCodec::gather(const Head& head, const Row& row, const std::uint8_t* page,
                            std::uint8_t* run) const {
  const std::uint8_t* const codes = page + head.codes;
  const std::int64_t n_bytes = run_bytes(row.bits, tile_);
  with_run_size(n_bytes, [&](auto size) {
    for (int t = 0; t < n_full_tiles_; ++t) {
      std::memcpy(run + t * n_bytes, codes + t * head.stride + row.offset, size);
    }
  });
  std::memcpy(run + n_full_tiles_ * n_bytes, codes + n_full_tiles_ * head.stride + row.last_offset,
              static_cast<std::size_t>(run_bytes(row.bits, last_tile_)));
}

float StepquantCodec::norm(const Row& row) const {
  return shape_.gate == Gate::kChannel ? static_cast<float>(1 << (8 - row.bits)) : 1.0f;
}

void StepquantCodec::encode(int h, const float* X, std::uint8_t* page,
                            const RoundingContext& /*at*/, CodecScratch scratch) const {
  const int K = shape_.K, V = shape_.V;
  const Head& head = heads_[static_cast<std::size_t>(h)];
  const Arrays a(*this, scratch);
  if (head.padded) {
    std::memset(page + head.codes, 0, static_cast<std::size_t>(head.code_bytes));
  }

  if (fit_ == Fit::kRows) return encode_by_rows(h, X, page, a);
  DenseRows dense(X, V);
  if (whole_tiles(h) && encode_tiles(h, dense, page, a)) return;

  const int n_groups = groups(h);
  const int width = n_groups == 1 ? V : group_;  // columns that share a row scale
  const auto for_each_group = [&](auto&& body) {
    for (int g = 0, begin = 0; g < n_groups; ++g, begin += width) {
      body(g, begin, std::min(width, V - begin));
    }
  };

  // 1  r_i = h16( sqrt( max(m_i, 1e-20) / w_i ) )
  // 2  Y_ij = X_ij / (r_i n_i);  and max |Y_ij| over the rows of each width
  std::fill_n(a.peak, 4 * std::int64_t{V}, 0.0f);
  for (int i = 0; i < K; ++i) {
    const Row& row = this->row(h, i);
    const float* x = X + std::int64_t{i} * V;
    if (row.bits == kPivotBits) {
      write_half(head, row, x, page, a);
      continue;
    }
    float* y = a.y + std::int64_t{i} * V;
    float* peak = a.peak + std::int64_t{row.bits / 2 - 1} * V;
    for_each_group([&](int g, int begin, int n) {
      const float m = stepquant::mean_abs(x + begin, n);
      const std::uint16_t stored =
          encode_scale(std::sqrt(std::max(m, stepquant::kMinMean) / row.weight));
      a.rows[row.scale + g] = stored;
      const float r = f16_to_f32(stored);
      a.r[row.scale + g] = r;
      stepquant::normalise(x + begin, n, r * norm(row), y + begin, peak + begin);
    });
  }
  if (head.n_row_scales == 0) return;
  std::memcpy(page + head.rows, a.rows, static_cast<std::size_t>(2 * head.n_row_scales));

  // 3  c0_j = h16( max_i |Y_ij| / Q_i )
  for (int j = 0; j < V; ++j) {
    float c0 = 0;
    for (int w = 0; w < 4; ++w) {
      const float Q = w == 0 && head.signed_magnitude ? 3.0f : peak_code(2 * w + 2);
      c0 = std::max(c0, a.peak[std::int64_t{w} * V + j] / Q);
    }
    a.c[j] = h16(c0);
  }

  // 4  z_ij = enc(Y_ij / c0_j)
  // 5  num_j = sum_i (w_i r_i n_i)^2 z_ij Y_ij,  den_j = sum_i (w_i r_i n_i)^2 z_ij^2
  std::fill_n(a.num, V, 0.0f);
  std::fill_n(a.den, V, 0.0f);
  for (int i = 0; i < K; ++i) {
    const Row& row = this->row(h, i);
    if (row.bits == kPivotBits) continue;
    const float* y = a.y + std::int64_t{i} * V;
    for_each_group([&](int g, int begin, int n) {
      const float wrn = row.weight * (a.r[row.scale + g] * norm(row));
      if (head.signed_magnitude) {
        stepquant::accumulate_signed(y + begin, a.c + begin, n, wrn * wrn, a.num + begin,
                                     a.den + begin);
      } else {
        stepquant::accumulate(y, a.c, n, peak_code(row.bits), wrn * wrn, a.num, a.den);
      }
    });
  }
  //    c_j = den_j > 0 ? h16( num_j / den_j ) : c0_j
  stepquant::fit_column_scales(a.num, a.den, V, a.half, a.c);
  std::memcpy(page + head.columns, a.half, static_cast<std::size_t>(2 * V));

  // 6  z_ij = enc(Y_ij / c_j)
  for (int i = 0; i < K; ++i) {
    const Row& row = this->row(h, i);
    if (row.bits == kPivotBits) continue;
    const float* y = a.y + std::int64_t{i} * V;
    if (head.signed_magnitude) {
      stepquant::encode_signed(y, a.c, V, a.u);
    } else {
      stepquant::encode(y, a.c, V, peak_code(row.bits), a.u);
    }
    std::memset(a.run + packed_bytes(V, row.bits), 0, kRunSlack);  // fills the last run's period
    pack_codes(a.u, V, row.bits, a.run);
    scatter(head, row, a.run, page);
  }
}

// A pivot row, in half precision.
void StepquantCodec::write_half(const Head& head, const Row& row, const float* x,
                                std::uint8_t* page, const Arrays& a) const {
  stepquant::saturate(x, shape_.V, a.half);
  std::memcpy(a.run, a.half, static_cast<std::size_t>(2 * shape_.V));
  scatter(head, row, a.run, page);
}

// r_i = h16( max_j |X_ij| / (Q_i n_i) ),  z_ij = enc(X_ij / (r_i n_i)). Codes are integers at every
// width: levels without a zero would need the fit to keep a sparse row.
void StepquantCodec::encode_by_rows(int h, const float* X, std::uint8_t* page,
                                    const Arrays& a) const {
  const int V = shape_.V;
  const Head& head = heads_[static_cast<std::size_t>(h)];
  std::fill_n(a.c, V, 1.0f);
  for (int i = 0; i < shape_.K; ++i) {
    const Row& row = this->row(h, i);
    const float* x = X + std::int64_t{i} * V;
    if (row.bits == kPivotBits) {
      write_half(head, row, x, page, a);
      continue;
    }
    const float Q = peak_code(row.bits);
    const std::uint16_t stored = encode_scale(peak_of(x, V) / (Q * norm(row)));
    a.rows[row.scale] = stored;
    stepquant::normalise(x, V, f16_to_f32(stored) * norm(row), a.y, a.peak);
    stepquant::encode(a.y, a.c, V, Q, a.u);
    std::memset(a.run + packed_bytes(V, row.bits), 0, kRunSlack);
    pack_codes(a.u, V, row.bits, a.run);
    scatter(head, row, a.run, page);
  }
  std::memcpy(page + head.rows, a.rows, static_cast<std::size_t>(2 * head.n_row_scales));
}

void StepquantCodec::read_columns_of(const Head& head, const std::uint8_t* page,
                                     std::uint16_t* half, float* c) const {
  if (fit_ == Fit::kDual) {
    read_halves(page + head.columns, shape_.V, half, c);
  } else {
    std::fill_n(c, shape_.V, 1.0f);
  }
}

// Whether a head is made of runs of 16 columns that share a row scale, and fitted.
bool StepquantCodec::whole_tiles(int h) const {
  if (fit_ == Fit::kRows) return false;
  const int width = groups(h) == 1 ? shape_.V : group_;
  return heads_[static_cast<std::size_t>(h)].uniform_bits != 0 && tile_ == kRunLength &&
         last_tile_ == 0 && width % kRunLength == 0;
}

bool StepquantCodec::encode_rows(int h, RowSource& X, std::uint8_t* page,
                                 CodecScratch scratch) const {
  return whole_tiles(h) && encode_tiles(h, X, page, Arrays(*this, scratch));
}

// encode() a head at a time. False where only encode() itself knows what to do: pivots, values that
// are not finite, and tiny ones at 2 bits.
bool StepquantCodec::encode_tiles(int h, RowSource& X, std::uint8_t* page, const Arrays& a) const {
  const int K = shape_.K, V = shape_.V, n_groups = groups(h);
  const int width = n_groups == 1 ? V : group_;
  const Head& head = heads_[static_cast<std::size_t>(h)];
  const int bits = head.uniform_bits;
  if (bits == kPivotBits || V % width != 0) return false;

  // One weight a row scale, as in the plan.
  const float* const weight = scale_weights_.data() + head.first_weight;
  std::fill_n(a.peak, V, 0.0f);
  for (int begin = 0; begin < K; begin += kFitRows) {
    const int n_rows = std::min(kFitRows, K - begin), n = n_rows * n_groups, at = begin * n_groups;
    const float* const x = X.rows(begin, n_rows);
    float* const y = a.y + std::int64_t{begin} * V;
    stepquant::row_sums(x, n_rows, V, width, a.sums);
    if (!(peak_of(a.sums, n) <= std::numeric_limits<float>::max())) return false;
    stepquant::row_scales(a.sums, weight + at, n, static_cast<float>(width), a.rows + at, a.r + at,
                          a.inverse);
    if (!head.signed_magnitude) {
      stepquant::normalise_rows(x, a.r + at, a.inverse, n_rows, V, y, a.peak);
    } else if (!stepquant::normalise_groups(x, a.r + at, a.inverse, n_rows, V, width, y, a.peak)) {
      return false;
    }
  }
  const float Q = head.signed_magnitude ? 3.0f : peak_code(bits);
  stepquant::first_column_scales(a.peak, V, Q, a.c);
  stepquant::squared_weights(weight, a.r, K * n_groups, a.r);
  stepquant::accumulate_columns(a.y, a.c, a.r, K, V, width, head.signed_magnitude ? 0 : Q, a.num,
                                a.den);
  stepquant::fit_column_scales(a.num, a.den, V, a.half, a.c);
  std::memcpy(page + head.rows, a.rows, static_cast<std::size_t>(2 * head.n_row_scales));
  std::memcpy(page + head.columns, a.half, static_cast<std::size_t>(2 * V));
  stepquant::encode_tiles(a.y, a.c, K, V, bits, page + head.codes, head.stride);
  return true;
}

void StepquantCodec::decode(int h, const std::uint8_t* page, float* X, CodecScratch scratch) const {
  const int K = shape_.K, V = shape_.V;
  const Head& head = heads_[static_cast<std::size_t>(h)];
  const Arrays a(*this, scratch);
  if (head.n_row_scales > 0) {
    read_halves(page + head.rows, head.n_row_scales, a.half, a.r);
    read_columns_of(head, page, a.half, a.c);
  }
  const int n_groups = groups(h);
  const int width = n_groups == 1 ? V : group_;
  // encode() stores no scale of 0: only a page that was never written has them, and products with
  // them would be -0.
  if (whole_tiles(h) && head.n_row_scales > 0 && a.r[0] != 0.0f) {
    for (int g = 0, begin = 0; g < n_groups; ++g, begin += width) {
      restore_tiles(tiles(h, page, begin, std::min(width, V - begin)), a.r + g, n_groups,
                    a.c + begin, X + begin, V);
    }
    return;
  }
  for (int i = 0; i < K; ++i) {
    const Row& row = this->row(h, i);
    float* x = X + std::int64_t{i} * V;
    gather(head, row, page, a.run);
    if (row.bits == kPivotBits) {
      read_halves(a.run, V, a.half, x);
      continue;
    }
    // Shat_ij = r_i c_j n_i z_ij
    unpack_codes(a.run, V, row.bits, a.u);
    const float step = head.signed_magnitude ? 2.0f : 1.0f;
    const float offset = head.signed_magnitude ? 3.0f : peak_code(row.bits);
    for (int g = 0, begin = 0; g < n_groups; ++g, begin += width) {
      const int n = std::min(width, V - begin);
      const float r = a.r[row.scale + g];
      if (r == 0.0f) {  // a page of zeros; the product would be -0
        std::fill_n(x + begin, n, 0.0f);
      } else {
        stepquant::restore(a.u + begin, a.c + begin, n, r * norm(row), step, offset, x + begin);
      }
    }
  }
}

// Only the method itself, and only where tiles divide V: kernels elsewhere know no shorter last
// tile.
std::optional<PageMap> StepquantCodec::page_map() const {
  if (last_tile_ != 0 || fit_ == Fit::kRows) return std::nullopt;
  PageMap map{.family = PageFamily::kStepquant, .group = group_, .tile = tile_};
  for (int h = 0; h < shape_.n_value_heads; ++h) {
    const Head& head = heads_[static_cast<std::size_t>(h)];
    map.heads.push_back({.codes = head.codes,
                         .code_bytes = head.code_bytes,
                         .row_scales = head.rows,
                         .column_scales = head.columns,
                         .n_row_scales = static_cast<std::int32_t>(head.n_row_scales),
                         .stride = static_cast<std::int32_t>(head.stride),
                         .bits = shape_.gate == Gate::kScalar ? row(h, 0).bits : 0,
                         .signed_levels = head.signed_magnitude});
    for (int i = 0; i < shape_.K; ++i) {
      const Row& from = row(h, i);
      map.rows.push_back(
          {from.offset, static_cast<std::int32_t>(from.scale), from.bits, from.weight});
    }
  }
  return map;
}

// The tiles of columns begin to begin + n of a head that is made of whole ones.
CodeTiles StepquantCodec::tiles(int h, const std::uint8_t* page, int begin, int n) const {
  const Head& head = heads_[static_cast<std::size_t>(h)];
  CodeTiles tiles;
  tiles.codes = run_codes(head.uniform_bits);
  tiles.first = page + head.codes + begin / kRunLength * head.stride;
  tiles.stride = head.stride;
  tiles.K = shape_.K;
  tiles.n_tiles = n / kRunLength;
  return tiles;
}

// Shat^T a = diag(c) Z^T (r o a), one group of columns after the other.
bool StepquantCodec::read_two(int h, const std::uint8_t* page, const float* a, const float* b,
                              float* p, float* r, CodecScratch scratch) const {
  if (!whole_tiles(h)) return false;
  const int K = shape_.K, V = shape_.V, n_groups = groups(h);
  const int width = n_groups == 1 ? V : group_;
  const Head& head = heads_[static_cast<std::size_t>(h)];
  if (head.n_row_scales == 0) {  // pivots
    read_tiles(tiles(h, page, 0, V), a, b, p, r);
    return true;
  }
  const Arrays arrays(*this, scratch);
  read_halves(page + head.rows, head.n_row_scales, arrays.half, arrays.r);
  read_halves(page + head.columns, V, arrays.half, arrays.c);
  float* const scaled_a = arrays.y;
  float* const scaled_b = scaled_a + K;
  for (int g = 0, begin = 0; g < n_groups; ++g, begin += width) {
    for (int i = 0; i < K; ++i) {
      const float scale = arrays.r[i * n_groups + g];
      scaled_a[i] = scale * a[i];
      scaled_b[i] = scale * b[i];
    }
    read_tiles(tiles(h, page, begin, std::min(width, V - begin)), scaled_a, scaled_b, p + begin,
               r + begin);
  }
  multiply(p, arrays.c, V, p);
  multiply(r, arrays.c, V, r);
  return true;
}

StepquantCodec::Dump StepquantCodec::dump(int h,
                                          std::span<const std::uint8_t> bytes_of_page) const {
  SP_CHECK(bytes_of_page.size() >= static_cast<std::size_t>(page_bytes()), "a page is whole");
  const std::uint8_t* const page = bytes_of_page.data();
  const int K = shape_.K, V = shape_.V;
  const Head& head = heads_[static_cast<std::size_t>(h)];
  std::vector<std::byte> bytes(scratch_bytes());
  const Arrays a(*this, CodecScratch{bytes});
  Dump dump;
  dump.z.resize(static_cast<std::size_t>(std::int64_t{K} * V));
  dump.r.resize(static_cast<std::size_t>(std::int64_t{K} * groups(h)));
  std::vector<float> r(static_cast<std::size_t>(head.n_row_scales));
  read_halves(page + head.rows, head.n_row_scales, a.half, r.data());
  if (head.n_row_scales > 0) {
    dump.c.resize(static_cast<std::size_t>(V));
    read_columns_of(head, page, a.half, dump.c.data());
  }
  for (int i = 0; i < K; ++i) {
    const Row& row = this->row(h, i);
    if (row.bits == kPivotBits) continue;
    gather(head, row, page, a.run);
    unpack_codes(a.run, V, row.bits, a.u);
    for (int j = 0; j < V; ++j) {
      dump.z[static_cast<std::size_t>(std::int64_t{i} * V + j)] =
          head.signed_magnitude ? 2 * a.u[j] - 3 : a.u[j] - static_cast<int>(peak_code(row.bits));
    }
    std::copy_n(r.begin() + row.scale, groups(h), dump.r.begin() + std::int64_t{i} * groups(h));
  }
  return dump;
}

namespace {

constexpr int kMaxGroup = 65536;

Result<int> group_option(const CodecConfig& config) {
  return int_option(config, "group", 1, kMaxGroup);
}

}  // namespace

const CodecInfo kStepquantInfo = {
    .name = "stepquant",
    .id = 10,
    .help = "planned width and weight a key row, fitted row and column scales",
    .args = {"6", "8", "4"},
    .options = {{"group", "1..65536", "columns that share a row scale in 2-bit heads"},
                {"bits", "planned|no-pivots|uniform",
                 "for comparison: the plan's half-precision rows at 8 bits, or all rows alike"},
                {"fit", "dual|rows", "for comparison: one absmax scale a row, none a column"}},
    .plan_kind = [](const CodecConfig&) -> std::string_view { return "stepquant"; },
    .defaults = [](const CodecConfig&) { return SchemeDefaults{}; },
    .default_option =
        [](const CodecConfig&, std::string_view key) {
          return std::string(key == "group" ? "32" : key == "bits" ? "planned" : "dual");
        },
    .validate =
        [](const CodecConfig& config) {
          SP_RETURN_IF_ERROR(check_choice(config, "bits"));
          SP_RETURN_IF_ERROR(check_choice(config, "fit"));
          return group_option(config).status();
        },
    .make = [](const CodecConfig& config, const LayerShape& shape,
               const LayerPlan* plan) -> Result<std::unique_ptr<LayerCodec>> {
      SP_RETURN_IF_ERROR(check_shape(config, shape));
      SP_ASSIGN_OR_RETURN(const int group, group_option(config));
      const auto fit =
          option(config, "fit") == "rows" ? StepquantCodec::Fit::kRows : StepquantCodec::Fit::kDual;
      const std::string& bits = option(config, "bits");
      if (plan == nullptr || bits == "planned") {
        return StepquantCodec::make(shape, plan, group, fit);
      }
      // A pivot is charged 8 bits of the budget, so that at 8 bits it is spent in full.
      LayerPlan other = *plan;
      for (std::uint8_t& width : other.bits) {
        if (bits == "uniform") width = static_cast<std::uint8_t>(config.arg[0] - '0');
        if (width == kPivotBits) width = 8;
      }
      return StepquantCodec::make(shape, &other, group, fit);
    },
};

}  // namespace statepack
