#include "codec/klt/klt.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.hpp"
#include "base/matrix.hpp"
#include "codec/options.hpp"
#include "codec/pack.hpp"
#include "codec/quantise.hpp"
#include "codec/scratch.hpp"

namespace statepack {
namespace {

static_assert(std::endian::native == std::endian::little, "pages hold little-endian halves");

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

constexpr float kMaxScaleRatio = 0x1p40f;  // of a row to all rows; its square stays an f32

const klt::Width* find_width(int bits) {
  for (const klt::Width& width : klt::kWidths) {
    if (width.bits == bits) return &width;
  }
  return nullptr;
}

RunCodes run_codes(int bits) {
  switch (bits) {
    case 2:
      return RunCodes::kLevels2;
    case 3:
      return RunCodes::kMidrise3;
    case 4:
      return RunCodes::kMidrise4;
    case 5:
      return RunCodes::kMidrise5;
    case 6:
      return RunCodes::kMidrise6;
    default:
      return RunCodes::kMidrise8;
  }
}

class DenseRows final : public RowSource {
 public:
  DenseRows(const float* X, int V) : X_(X), V_(V) {}
  const float* rows(int begin, int /*n*/) override { return X_ + std::int64_t{begin} * V_; }

 private:
  const float* X_;
  int V_;
};

Status check_plan(const LayerShape& shape, const LayerPlan* plan) {
  const auto K = static_cast<std::size_t>(shape.K);
  const auto HV = static_cast<std::size_t>(shape.n_value_heads);
  const auto H = static_cast<std::size_t>(shape.n_key_heads);
  if (plan == nullptr) {
    return {Code::kMismatch,
            "klt needs a plan; make one with `statepack calibrate` and name it with --plan"};
  }
  if (plan->bits.size() != HV * K || plan->row_scale.size() != HV * K) {
    return {Code::kMismatch, "the klt plan has " + std::to_string(plan->bits.size()) +
                                 " widths and " + std::to_string(plan->row_scale.size()) +
                                 " row scales for a layer of " + std::to_string(HV) + " heads x " +
                                 std::to_string(K) + " rows; calibrate this model"};
  }
  if (!plan->feedback.empty() &&
      (plan->feedback.size() != HV * K * K || plan->row_weight.size() != HV * K)) {
    return {Code::kMismatch, "the klt plan's feedback has " +
                                 std::to_string(plan->feedback.size()) + " values and " +
                                 std::to_string(plan->row_weight.size()) +
                                 " weights for a layer of " + std::to_string(HV) + " heads x " +
                                 std::to_string(K) + " rows; calibrate this model"};
  }
  if (!plan->guard.empty() && plan->guard.size() != HV) {
    return {Code::kMismatch, "the klt plan guards " + std::to_string(plan->guard.size()) +
                                 " heads of a layer of " + std::to_string(HV) +
                                 "; calibrate this model"};
  }
  const std::size_t n = plan->transform.size();
  if (n != 0 && n != H * K * K && n != HV * K * K) {
    return {Code::kMismatch, "the klt plan's transform has " + std::to_string(n) + " values; a " +
                                 std::to_string(K) + " x " + std::to_string(K) +
                                 " matrix is needed for each of " + std::to_string(H) +
                                 " key heads or of " + std::to_string(HV) +
                                 " value heads; calibrate this model"};
  }
  for (std::size_t i = 0; i < HV * K; ++i) {
    const std::string where = "row " + std::to_string(i % K) + " of head " + std::to_string(i / K);
    if (find_width(plan->bits[i]) == nullptr) {
      return {Code::kCorrupt, "the klt plan gives " + where + " " + std::to_string(plan->bits[i]) +
                                  " bits; klt knows 0, 2, 3, 4, 5, 6 and 8"};
    }
    const float r = plan->row_scale[i];
    if (!(r >= 1 / kMaxScaleRatio && r <= kMaxScaleRatio)) {
      return {Code::kCorrupt, "the klt plan gives " + where + " the scale " + std::to_string(r) +
                                  "; scales lie between 2^-40 and 2^40"};
    }
  }
  return {};
}

/// M^T and M^-1 of each M [K][K], row-major. False when one has no inverse.
bool prepare_transforms(const std::vector<float>& M, int K, std::vector<float>& transposed,
                        std::vector<float>& inverses) {
  const auto size = static_cast<std::size_t>(K);
  transposed.resize(M.size());
  inverses.resize(M.size());
  std::vector<double> A(size * size), inverse(size * size);
  for (std::size_t begin = 0; begin < M.size(); begin += size * size) {
    const auto at = static_cast<std::ptrdiff_t>(begin);
    std::copy_n(M.begin() + at, A.size(), A.begin());
    if (!invert(A, K, inverse)) return false;
    std::copy(inverse.begin(), inverse.end(), inverses.begin() + at);
    for (std::size_t i = 0; i < size; ++i) {
      for (std::size_t j = 0; j < size; ++j) {
        transposed[begin + j * size + i] = M[begin + i * size + j];
      }
    }
  }
  return true;
}

// Row factors lie four in a byte and are looked up together.
constexpr auto kFactorsOfByte = [] {
  std::array<std::array<float, 4>, 256> table = {};
  for (std::size_t byte = 0; byte < table.size(); ++byte) {
    for (std::size_t e = 0; e < 4; ++e) table[byte][e] = klt::kRowFactors[byte >> (2 * e) & 3];
  }
  return table;
}();

}  // namespace

// What encode, decode and reads work in.
struct KltCodec::Arrays {
  float* y;              // [n][V] rows with bits; or two vectors of a read in the order of groups
  float* sum;            // [V], then the inverse of c0; or p and r of one group
  float* most;           // [V]
  float* c0;             // [V]
  float* inverse;        // [V]
  float* num;            // [V]
  float* den;            // [V]
  float* energy;         // [V]
  float* error;          // [K][V] of rounded rows, where there is feedback
  float* target;         // [V], likewise
  float* c;              // [V]
  float* f;              // [K] row factors in the order of groups
  std::uint8_t* factor;  // [K] their codes, of kept rows, then of rows in the order of groups
  std::uint8_t* u;       // [n][V] by tiles, or [V] where 16 does not divide V
  std::uint8_t* run;     // all runs of a row, and what unpacking may read
  std::uint16_t* half;   // [V]

  template <class Take>
  Arrays(const KltCodec& codec, Take&& take) {
    const std::int64_t K = codec.shape_.K, V = codec.shape_.V;
    take(y, K * std::max<std::int64_t>(V, 2));
    take(sum, V);
    take(most, V);
    take(c0, V);
    take(inverse, V);
    take(num, V);
    take(den, V);
    take(energy, V);
    take(error, codec.feeds_back_ ? K * V : 0);
    take(target, codec.feeds_back_ ? V : 0);
    take(c, V);
    take(f, K + 3);
    take(factor, 2 * K);
    take(u, codec.last_tile_ == 0 ? K * V : V);
    take(run, V);
    take(half, V);
  }
  Arrays(const KltCodec& codec, CodecScratch scratch)
      : Arrays(codec, [cursor = ScratchCursor(scratch)]<class T>(
                          T*& array, std::int64_t n) mutable { array = cursor.take<T>(n); }) {}
};

Result<std::unique_ptr<LayerCodec>> KltCodec::make(const LayerShape& shape, const LayerPlan* plan) {
  SP_RETURN_IF_ERROR(check_plan(shape, plan));
  const int K = shape.K, V = shape.V;
  std::unique_ptr<KltCodec> codec(new KltCodec);
  codec->shape_ = shape;
  codec->n_full_tiles_ = V / kRunLength;
  codec->last_tile_ = V % kRunLength;
  codec->feeds_back_ = !plan->feedback.empty();
  if (!prepare_transforms(plan->transform, K, codec->M_transposed_, codec->M_inverse_)) {
    return Status(Code::kCorrupt,
                  "a transform of the klt plan cannot be inverted; calibrate again");
  }

  std::int64_t cursor = 0;
  for (int h = 0; h < shape.n_value_heads; ++h) {
    Head& head = codec->heads_.emplace_back();
    const std::size_t begin = static_cast<std::size_t>(h) * static_cast<std::size_t>(K);
    head.group.assign(static_cast<std::size_t>(K), -1);
    head.fits.resize(static_cast<std::size_t>(K));
    if (!plan->feedback.empty()) {
      const auto k = static_cast<std::size_t>(K);
      const auto* const B = plan->feedback.data() + at(h) * k * k;
      head.feedback.assign(B, B + k * k);
      head.row_weight.assign(plan->row_weight.begin() + static_cast<std::ptrdiff_t>(begin),
                             plan->row_weight.begin() + static_cast<std::ptrdiff_t>(begin + k));
    }
    if (!plan->guard.empty()) head.guard = klt::kGuardFactor * plan->guard[at(h)];
    for (auto width = klt::kWidths.rbegin(); width->bits != 0; ++width) {  // widest first
      Group group;
      group.quantiser = {width->bits, width->step};
      group.codes = run_codes(width->bits);
      // At 2 bits the reader hands out 2 u - 3, elsewhere u - (2^b - 1) / 2.
      const bool twice = width->bits == 2;
      group.times = twice ? 2 : 1;
      group.offset = static_cast<float>((1 << width->bits) - 1) / (twice ? 1 : 2);
      group.first = static_cast<int>(head.rows.size());
      group.at = cursor;
      for (int i = 0; i < K; ++i) {
        const std::size_t row = static_cast<std::size_t>(i);
        if (plan->bits[begin + row] != width->bits) continue;
        const float r = plan->row_scale[begin + row];
        head.group[row] = static_cast<std::int32_t>(head.groups.size());
        head.fits[row] = klt::RowFit(group.quantiser, r,
                                     r * r * (head.row_weight.empty() ? 1 : head.row_weight[row]),
                                     static_cast<std::int32_t>(head.rows.size()));
        ++group.n_rows;
        head.rows.push_back(i);
        head.factors.push_back(r * width->step / (twice ? 2 : 1));
      }
      if (group.n_rows == 0) continue;
      const std::int64_t row_bytes = codec->n_full_tiles_ * packed_bytes(kRunLength, width->bits) +
                                     packed_bytes(codec->last_tile_, width->bits);
      cursor += group.n_rows * row_bytes;
      codec->payload_.codes += group.n_rows * row_bytes;
      head.groups.push_back(group);
    }
    std::erase_if(head.fits, [](const klt::RowFit& row) { return row.middle == 0; });
    head.kept = head.rows;
    std::sort(head.kept.begin(), head.kept.end());
    head.columns = cursor;
    if (!head.groups.empty()) {
      const std::int64_t n_scale_bytes =
          2 * std::int64_t{V} + packed_bytes(std::ssize(head.rows), klt::kRowFactorBits);
      cursor += n_scale_bytes;
      codec->payload_.scales += n_scale_bytes;
    }
  }
  SP_CHECK(codec->payload_.total() == cursor, "klt counts every byte of its page");
  return std::unique_ptr<LayerCodec>(std::move(codec));
}

std::size_t KltCodec::scratch_bytes() const {
  ScratchSize size;
  Arrays(*this, [&]<class T>(T*&, std::int64_t n) { size.add<T>(n); });
  return size.n_bytes();
}

const float* KltCodec::transform(const std::vector<float>& of, int h) const {
  if (of.empty()) return nullptr;
  const std::size_t n = static_cast<std::size_t>(shape_.K) * static_cast<std::size_t>(shape_.K);
  const bool by_value_head = of.size() == n * static_cast<std::size_t>(shape_.n_value_heads);
  return of.data() + static_cast<std::size_t>(by_value_head ? h : shape_.key_head(h)) * n;
}

CodeTiles KltCodec::tiles(const Group& group, const std::uint8_t* page) const {
  CodeTiles tiles;
  tiles.codes = group.codes;
  tiles.first = page + group.at;
  tiles.stride = group.n_rows * packed_bytes(kRunLength, group.quantiser.bits);
  tiles.K = group.n_rows;
  tiles.n_tiles = n_full_tiles_;
  return tiles;
}

// A row's codes as one run are its runs one behind the other: 16 codes fill whole bytes.
void KltCodec::scatter(const Group& group, int place, const std::uint8_t* run,
                       std::uint8_t* page) const {
  const std::int64_t n_bytes = packed_bytes(kRunLength, group.quantiser.bits);
  const std::int64_t last_bytes = packed_bytes(last_tile_, group.quantiser.bits);
  std::uint8_t* const tile = page + group.at + place * n_bytes;
  for (int t = 0; t < n_full_tiles_; ++t) {
    std::memcpy(tile + t * group.n_rows * n_bytes, run + t * n_bytes,
                static_cast<std::size_t>(n_bytes));
  }
  std::memcpy(page + group.at + n_full_tiles_ * group.n_rows * n_bytes + place * last_bytes,
              run + n_full_tiles_ * n_bytes, static_cast<std::size_t>(last_bytes));
}

void KltCodec::gather(const Group& group, int place, const std::uint8_t* page,
                      std::uint8_t* run) const {
  const std::int64_t n_bytes = packed_bytes(kRunLength, group.quantiser.bits);
  const std::int64_t last_bytes = packed_bytes(last_tile_, group.quantiser.bits);
  const std::uint8_t* const tile = page + group.at + place * n_bytes;
  for (int t = 0; t < n_full_tiles_; ++t) {
    std::memcpy(run + t * n_bytes, tile + t * group.n_rows * n_bytes,
                static_cast<std::size_t>(n_bytes));
  }
  std::memcpy(run + n_full_tiles_ * n_bytes,
              page + group.at + n_full_tiles_ * group.n_rows * n_bytes + place * last_bytes,
              static_cast<std::size_t>(last_bytes));
}

void KltCodec::encode(int h, const float* X, std::uint8_t* page, const RoundingContext& /*at*/,
                      CodecScratch scratch) const {
  DenseRows rows(X, shape_.V);
  fit_rows(h, rows, page, scratch);
  const Head& head = this->head(h);
  if (!head.feedback.empty() && !head.groups.empty()) encode_fed(head, X, page, scratch);
}

/// Column scales are those of rounding without feedback; then row after row is rounded at what the
/// errors before it leave to be wished for. A row without bits passes on all of itself.
void KltCodec::encode_fed(const Head& head, const float* Z, std::uint8_t* page,
                          CodecScratch scratch) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  const Arrays a(*this, scratch);
  load_scales(a.half, V, a.c);
  std::fill_n(a.energy, V, 0.0f);
  for (std::int64_t i = 0, e = 0; i < K; ++i) {
    const float* const z = Z + i * V;
    float* const error = a.error + i * V;
    const float weight = head.row_weight[at(i)];
    klt::feed_back(z, head.feedback.data() + i * K, a.error, static_cast<int>(i), V, a.target);
    if (head.group[at(i)] < 0) {
      for (std::int64_t j = 0; j < V; ++j) {
        error[j] = -z[j];
        a.energy[j] += weight * (a.target[j] * a.target[j]);
      }
      continue;
    }
    const Group& group = head.groups[at(head.group[at(i)])];
    const klt::RowFit& row = head.fits[at(e++)];
    klt::quantise_fed(a.target, z, a.c, V, group.quantiser,
                      klt::kRowFactors[a.factor[e - 1]] / row.inverse_r, weight, a.u, error,
                      a.energy);
    pack_codes(a.u, V, group.quantiser.bits, a.run);
    scatter(group, row.place - group.first, a.run, page);
  }
  std::memcpy(page + head.columns, a.half, static_cast<std::size_t>(2 * V));
  if (scratch.cost == nullptr) return;
  double cost = 0;
  for (std::int64_t j = 0; j < V; ++j) cost += double{a.energy[j]};
  *scratch.cost = static_cast<float>(cost / static_cast<double>(K * V));
}

bool KltCodec::encode_rows(int h, RowSource& X, std::uint8_t* page, CodecScratch scratch) const {
  if (feeds_back_) return false;  // rows pass on errors to all that follow
  fit_rows(h, X, page, scratch);
  return true;
}

void KltCodec::fit_rows(int h, RowSource& X, std::uint8_t* page, CodecScratch scratch) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  const Head& head = this->head(h);
  const Arrays a(*this, scratch);
  // (1), and the sums of (2)
  std::fill_n(a.sum, V, 0.0f);
  std::fill_n(a.most, V, 0.0f);
  std::fill_n(a.energy, V, 0.0f);
  std::fill_n(a.num, V, 0.0f);
  std::fill_n(a.den, V, 0.0f);
  std::int64_t e = 0;  // in head.kept
  for (std::int64_t begin = 0; begin < K; begin += RowSource::kMaxRows) {
    const int n = static_cast<int>(std::min<std::int64_t>(K - begin, RowSource::kMaxRows));
    const float* const z = X.rows(static_cast<int>(begin), n);
    if (scratch.cost != nullptr) klt::add_squares(z, n, V, a.energy);
    std::int32_t from[RowSource::kMaxRows];
    const std::int64_t first = e;
    for (; e < std::ssize(head.kept) && head.kept[at(e)] < begin + n; ++e) {
      from[e - first] = head.kept[at(e)] - static_cast<std::int32_t>(begin);
    }
    const int n_here = static_cast<int>(e - first);
    const klt::RowFit* const fits = head.fits.data() + first;
    float* const y = a.y + first * V;
    if (last_tile_ == 0) {
      klt::normalise_rows(z, from, fits, n_here, shape_.V, y, a.sum, a.most);
    } else {
      for (int i = 0; i < n_here; ++i) {
        klt::normalise(z + from[i] * V, V, fits[i].inverse_r, fits[i].inverse_limit, y + i * V,
                       a.sum, a.most);
      }
    }
  }
  const auto report = [&] {
    if (scratch.cost == nullptr) return;
    *scratch.cost = klt::rounding_cost(a.energy, a.num, a.den, a.half, V) /
                    (static_cast<float>(K) * static_cast<float>(V));
  };
  if (head.groups.empty()) {
    std::fill_n(a.half, V, std::uint16_t{0});
    report();
    return;
  }
  const int n_kept = static_cast<int>(e);
  klt::first_column_scales(a.sum, a.most, V, static_cast<float>(n_kept), a.c0, a.inverse);
  const float c_squares = klt::squares(a.c0, V);
  // (3), (4), and the sums of (5)
  if (last_tile_ == 0) {
    klt::choose_factors(a.y, head.fits.data(), a.c0, c_squares, n_kept, shape_.V, a.factor);
    klt::quantise_rows(a.y, head.fits.data(), a.factor, a.inverse, n_kept, shape_.V, a.u, a.num,
                       a.den);
    for (const Group& group : head.groups) {
      const int bits = group.quantiser.bits;
      for (std::int64_t t = 0; t < n_full_tiles_; ++t) {
        klt::pack_tile(a.u + (t * n_kept + group.first) * kRunLength, group.n_rows, bits,
                       page + group.at + t * group.n_rows * packed_bytes(kRunLength, bits));
      }
    }
  } else {
    for (std::int64_t i = 0; i < n_kept; ++i) {
      const klt::RowFit& row = head.fits[at(i)];
      const Group& group = head.groups[at(head.group[at(head.kept[at(i)])])];
      const int f = klt::choose_factor(a.y + i * V, a.c0, V, group.quantiser, c_squares);
      a.factor[i] = static_cast<std::uint8_t>(f);
      klt::quantise(a.y + i * V, a.inverse, V, {group.quantiser.bits, row.step[at(f)]}, row.weight,
                    a.u, a.num, a.den);
      pack_codes(a.u, V, group.quantiser.bits, a.run);
      scatter(group, row.place - group.first, a.run, page);
    }
  }
  // Behind all codes: packing may have written over its place.
  klt::fit_column_scales(a.num, a.den, V, a.half);
  std::memcpy(page + head.columns, a.half, static_cast<std::size_t>(2 * V));
  std::uint8_t* const by_place = a.factor + K;
  for (int i = 0; i < n_kept; ++i) by_place[head.fits[at(i)].place] = a.factor[i];
  pack_codes(by_place, n_kept, klt::kRowFactorBits, page + head.columns + 2 * V);
  report();
}

void KltCodec::load_factors(const Head& head, const std::uint8_t* page, float* f) const {
  const std::uint8_t* const codes = page + head.columns + 2 * std::int64_t{shape_.V};
  for (std::size_t e = 0; e < head.rows.size(); e += 4) {
    std::copy_n(kFactorsOfByte[codes[e / 4]].begin(), 4, f + e);
  }
}

void KltCodec::decode(int h, const std::uint8_t* page, float* X, CodecScratch scratch) const {
  const std::int64_t K = shape_.K, V = shape_.V;
  const Head& head = this->head(h);
  const Arrays a(*this, scratch);
  for (std::int64_t i = 0; i < K; ++i) {
    if (head.group[static_cast<std::size_t>(i)] < 0) std::fill_n(X + i * V, V, 0.0f);
  }
  if (head.groups.empty()) return;
  std::memcpy(a.half, page + head.columns, static_cast<std::size_t>(2 * V));
  load_scales(a.half, V, a.c);
  load_factors(head, page, a.f);
  for (std::size_t e = 0; e < head.rows.size(); ++e) a.f[e] *= head.factors[e];
  for (const Group& group : head.groups) {
    const float* const factors = a.f + group.first;
    const std::int32_t* const rows = head.rows.data() + group.first;
    if (last_tile_ == 0) {
      restore_tiles(tiles(group, page), factors, 1, a.c, X, shape_.V, rows);
      continue;
    }
    for (int place = 0; place < group.n_rows; ++place) {
      gather(group, place, page, a.run);
      unpack_codes(a.run, V, group.quantiser.bits, a.u);
      klt::restore(a.u, a.c, V, factors[place], group.times, group.offset, X + rows[place] * V);
    }
  }
}

// Zhat^T a = diag(c) sum over widths of N^T (factor o a), N the numbers of the codes.
bool KltCodec::read_two(int h, const std::uint8_t* page, const float* a, const float* b, float* p,
                        float* r, CodecScratch scratch) const {
  if (last_tile_ != 0) return false;
  const std::int64_t V = shape_.V;
  const Head& head = this->head(h);
  const Arrays arrays(*this, scratch);
  std::fill_n(p, V, 0.0f);
  std::fill_n(r, V, 0.0f);
  if (head.groups.empty()) return true;
  float* const scaled_a = arrays.y;
  float* const scaled_b = scaled_a + shape_.K;
  load_factors(head, page, arrays.f);
  for (std::size_t e = 0; e < head.rows.size(); ++e) {
    const std::int32_t row = head.rows[e];
    const float factor = arrays.f[e] * head.factors[e];
    scaled_a[e] = factor * a[row];
    scaled_b[e] = factor * b[row];
  }
  for (const Group& group : head.groups) {
    read_tiles(tiles(group, page), scaled_a + group.first, scaled_b + group.first, arrays.num,
               arrays.den);
    add(arrays.num, V, p);
    add(arrays.den, V, r);
  }
  std::memcpy(arrays.half, page + head.columns, static_cast<std::size_t>(2 * V));
  load_scales(arrays.half, V, arrays.c);
  multiply(p, arrays.c, V, p);
  multiply(r, arrays.c, V, r);
  return true;
}

namespace {

// Whole bits, or quarters written as .25, .5 or .75; 1 to 8.
bool allows(std::string_view arg) {
  if (arg.empty() || arg[0] < '1' || arg[0] > '8') return false;
  const std::string_view fraction = arg.substr(1);
  if (fraction.empty()) return true;
  return arg[0] < '8' && (fraction == ".25" || fraction == ".5" || fraction == ".75");
}

}  // namespace

const CodecInfo kKltInfo = {
    .name = "klt",
    .id = 40,
    .help = "rows of a planned transform of the key axis, each with its own width",
    .args = {"4", "3"},
    .options = {},
    .plan_kind = [](const CodecConfig&) -> std::string_view { return "klt"; },
    .defaults = [](const CodecConfig&) { return SchemeDefaults{.period = 16}; },
    .default_option = [](const CodecConfig&, std::string_view) { return std::string(); },
    .validate = [](const CodecConfig&) { return Status(); },
    .make = [](const CodecConfig& config, const LayerShape& shape,
               const LayerPlan* plan) -> Result<std::unique_ptr<LayerCodec>> {
      SP_RETURN_IF_ERROR(check_shape(config, shape));
      return KltCodec::make(shape, plan);
    },
    .arg_rule = CodecInfo::ArgRule{allows, "1 to 8 in steps of 0.25"},
};

}  // namespace statepack
