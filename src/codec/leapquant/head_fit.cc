#include "codec/leapquant/head_fit.hpp"

// Vectors of SVE and RVV have no compile-time size and cannot stand in the arrays below; SSSE3 and
// the second AVX-512 dialect would do what their neighbours do.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/leapquant/head_fit.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first.
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "codec/run_vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace {

// Runs body(R) for a rank as a constant: sums then stay in registers.
template <class Body>
HWY_INLINE void with_rank(int R, Body&& body) {
  switch (R) {
    case 0:
      return body(std::integral_constant<int, 0>());
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    case 3:
      return body(std::integral_constant<int, 3>());
    case 4:
      return body(std::integral_constant<int, 4>());
    case 5:
      return body(std::integral_constant<int, 5>());
    case 6:
      return body(std::integral_constant<int, 6>());
    case 7:
      return body(std::integral_constant<int, 7>());
    default:
      return body(std::integral_constant<int, 8>());
  }
}

void times_kernel(const float* X, int K, int V_, const float* Q, int R, float* out) {
  const D d;
  with_rank(R, [&](auto rank) HWY_ATTR {
    constexpr int kRank = decltype(rank)::value;
    for (int i = 0; i < K; ++i) {
      const float* const x = X + std::int64_t{i} * V_;
      V lanes[std::max(kRank, 1)][kParts];
      for (int p = 0; p < kRank; ++p) {
        for (V& lane : lanes[p]) lane = hn::Zero(d);
      }
      for (int j = 0; j < V_; j += kRun) {
        for (int h = 0; h < kParts; ++h) {
          const V value = hn::LoadU(d, x + j + h * kLanes);
          for (int p = 0; p < kRank; ++p) {
            const V q = hn::LoadU(d, Q + std::int64_t{p} * V_ + j + h * kLanes);
            lanes[p][h] = hn::Add(lanes[p][h], hn::Mul(value, q));
          }
        }
      }
      for (int p = 0; p < kRank; ++p) out[std::int64_t{p} * K + i] = sum_of_run(lanes[p]);
    }
  });
}

void transposed_times_kernel(const float* X, int K, int V_, const float* A, int R, float* out) {
  const D d;
  with_rank(R, [&](auto rank) HWY_ATTR {
    constexpr int kRank = decltype(rank)::value;
    constexpr int kRuns = kParts == 1 && kRank <= 4 ? 4 : kParts == 1 ? 2 : 1;  // at a time
    const auto block = [&](auto n_runs, int begin) HWY_ATTR {
      constexpr int kBlock = decltype(n_runs)::value;
      V sum[std::max(kRank, 1)][kBlock][kParts];
      for (int p = 0; p < kRank; ++p) {
        for (int c = 0; c < kBlock; ++c) {
          for (V& part : sum[p][c]) part = hn::Zero(d);
        }
      }
      for (int i = 0; i < K; ++i) {
        const float* const x = X + std::int64_t{i} * V_ + begin;
        for (int c = 0; c < kBlock; ++c) {
          for (int h = 0; h < kParts; ++h) {
            const V value = hn::LoadU(d, x + c * kRun + h * kLanes);
            for (int p = 0; p < kRank; ++p) {
              const V a = hn::Set(d, A[std::int64_t{p} * K + i]);
              sum[p][c][h] = hn::Add(sum[p][c][h], hn::Mul(a, value));
            }
          }
        }
      }
      for (int p = 0; p < kRank; ++p) {
        for (int c = 0; c < kBlock; ++c) {
          for (int h = 0; h < kParts; ++h) {
            hn::StoreU(sum[p][c][h], d, out + std::int64_t{p} * V_ + begin + c * kRun + h * kLanes);
          }
        }
      }
    };
    int j = 0;
    for (; j + kRuns * kRun <= V_; j += kRuns * kRun)
      block(std::integral_constant<int, kRuns>(), j);
    for (; j < V_; j += kRun) block(std::integral_constant<int, 1>(), j);
  });
}

void residual_rows_kernel(const float* X, int n_rows, int V_, const float* key, int stride,
                          const float* value, int R, float* e, float* sums) {
  const D d;
  with_rank(R, [&](auto rank) HWY_ATTR {
    constexpr int kRank = decltype(rank)::value;
    for (int i = 0; i < n_rows; ++i) {
      V k[std::max(kRank, 1)];
      for (int p = 0; p < kRank; ++p) k[p] = hn::Set(d, -key[std::int64_t{p} * stride + i]);
      V lanes[kParts];
      for (V& lane : lanes) lane = hn::Zero(d);
      for (int j = 0; j < V_; j += kRun) {
        for (int h = 0; h < kParts; ++h) {
          const std::int64_t at = std::int64_t{i} * V_ + j + h * kLanes;
          V rest = hn::LoadU(d, X + at);
          for (int p = 0; p < kRank; ++p) {
            const V v = hn::LoadU(d, value + std::int64_t{p} * V_ + j + h * kLanes);
            rest = hn::Add(rest, hn::Mul(k[p], v));
          }
          hn::StoreU(rest, d, e + at);
          lanes[h] = hn::Add(lanes[h], hn::Abs(rest));
        }
      }
      sums[i] = sum_of_run(lanes);
    }
  });
}

void smooth_rows_kernel(const float* e, int n_rows, int V_, const float* scale,
                        const float* inverse, float* y, float* peak) {
  const D d;
  for (int j = 0; j < V_; j += kRun) {
    V top[kParts];
    for (int h = 0; h < kParts; ++h) top[h] = hn::LoadU(d, peak + j + h * kLanes);
    for (int i = 0; i < n_rows; ++i) {
      const V s = hn::Set(d, scale[i]), one_over = hn::Set(d, inverse[i]);
      for (int h = 0; h < kParts; ++h) {
        const std::int64_t at = std::int64_t{i} * V_ + j + h * kLanes;
        const V quotient = divide_by_float(hn::LoadU(d, e + at), s, one_over);
        hn::StoreU(quotient, d, y + at);
        top[h] = hn::Max(top[h], hn::Abs(quotient));
      }
    }
    for (int h = 0; h < kParts; ++h) hn::StoreU(top[h], d, peak + j + h * kLanes);
  }
}

// Blocks of 16 rows and 16 columns: bytes of four rows join in the words of their columns, and
// words of a column then come together in one block of 16 bytes.
void encode_columns_kernel(const float* y, int K, int V_, const float* inv_step, float qmax,
                           std::uint8_t* z) {
  const D d;
  const DU du;
  const V limit = hn::Set(d, qmax), minus_limit = hn::Set(d, -qmax);
  for (int j = 0; j < V_; j += kRun) {
    V inverse[kParts];
    for (int h = 0; h < kParts; ++h) inverse[h] = hn::LoadU(d, inv_step + j + h * kLanes);
    for (int i = 0; i < K; i += kRun) {
      HWY_ALIGN std::uint32_t words[kRun][4];  // [column][rows 4 q .. 4 q + 3]
      for (int h = 0; h < kParts; ++h) {
        hn::Vec<DU> quads[4];
        for (int q = 0; q < 4; ++q) {
          hn::Vec<DU> code[4];
          for (int row = 0; row < 4; ++row) {
            const std::int64_t at = std::int64_t{i + 4 * q + row} * V_ + j + h * kLanes;
            code[row] = hn::BitCast(du, with_magic(clamp(hn::Mul(hn::LoadU(d, y + at), inverse[h]),
                                                         minus_limit, limit)));
          }
          auto word = hn::And(code[0], hn::Set(du, 0xff));
          word = hn::OrAnd(word, hn::ShiftLeft<8>(code[1]), hn::Set(du, 0xff00));
          word = hn::OrAnd(word, hn::ShiftLeft<16>(code[2]), hn::Set(du, 0xff0000));
          quads[q] = hn::Or(word, hn::ShiftLeft<24>(code[3]));
        }
        hn::StoreInterleaved4(quads[0], quads[1], quads[2], quads[3], du, words[h * kLanes]);
      }
      for (int c = 0; c < kRun; ++c) {
        std::memcpy(z + std::int64_t{j + c} * K + i, words[c], sizeof words[c]);
      }
    }
  }
}

void restore_rows_kernel(const std::uint8_t* z, int K, int V_, int begin, int n_rows,
                         const float* s_k, const float* step, const float* key, const float* value,
                         int R, float* X) {
  const D d;
  const DU du;
  const DI di;
  with_rank(R, [&](auto rank) HWY_ATTR {
    constexpr int kRank = decltype(rank)::value;
    for (int j = 0; j < V_; j += kRun) {
      V s[kParts], v[std::max(kRank, 1)][kParts];
      for (int h = 0; h < kParts; ++h) {
        s[h] = hn::LoadU(d, step + j + h * kLanes);
        for (int p = 0; p < kRank; ++p) {
          v[p][h] = hn::LoadU(d, value + std::int64_t{p} * V_ + j + h * kLanes);
        }
      }
      for (int i = 0; i < n_rows; i += kRun) {
        HWY_ALIGN std::uint32_t words[kRun][4];  // [column][rows 4 q .. 4 q + 3]
        for (int c = 0; c < kRun; ++c) {
          std::memcpy(words[c], z + std::int64_t{j + c} * K + begin + i, sizeof words[c]);
        }
        for (int h = 0; h < kParts; ++h) {
          hn::Vec<DU> quads[4];
          hn::LoadInterleaved4(du, words[h * kLanes], quads[0], quads[1], quads[2], quads[3]);
          for (int q = 0; q < 4; ++q) {
            const hn::Vec<DU> bytes[4] = {hn::ShiftLeft<24>(quads[q]), hn::ShiftLeft<16>(quads[q]),
                                          hn::ShiftLeft<8>(quads[q]), quads[q]};
            for (int row = 0; row < 4; ++row) {
              const int at = i + 4 * q + row, channel = begin + at;
              const V code = hn::ConvertTo(d, hn::ShiftRight<24>(hn::BitCast(di, bytes[row])));
              V x = hn::Mul(hn::Mul(hn::Set(d, s_k[channel]), code), s[h]);
              for (int p = 0; p < kRank; ++p) {
                x = hn::Add(x, hn::Mul(hn::Set(d, key[std::int64_t{p} * K + channel]), v[p][h]));
              }
              hn::StoreU(x, d, X + std::int64_t{at} * V_ + j + h * kLanes);
            }
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace statepack::leapquant {

HWY_EXPORT(times_kernel);
HWY_EXPORT(transposed_times_kernel);
HWY_EXPORT(residual_rows_kernel);
HWY_EXPORT(smooth_rows_kernel);
HWY_EXPORT(encode_columns_kernel);
HWY_EXPORT(restore_rows_kernel);

void times_head(const float* X, std::int64_t K, std::int64_t V, const float* Q, int R, float* out) {
  HWY_DYNAMIC_DISPATCH(times_kernel)(X, static_cast<int>(K), static_cast<int>(V), Q, R, out);
}

void transposed_times_head(const float* X, std::int64_t K, std::int64_t V, const float* A, int R,
                           float* out) {
  HWY_DYNAMIC_DISPATCH(transposed_times_kernel)
  (X, static_cast<int>(K), static_cast<int>(V), A, R, out);
}

void residual_rows(const float* X, int n_rows, int V, const float* key, int stride,
                   const float* value, int R, float* e, float* sums) {
  HWY_DYNAMIC_DISPATCH(residual_rows_kernel)(X, n_rows, V, key, stride, value, R, e, sums);
}

void smooth_rows(const float* e, int n_rows, int V, const float* scale, const float* inverse,
                 float* y, float* peak) {
  HWY_DYNAMIC_DISPATCH(smooth_rows_kernel)(e, n_rows, V, scale, inverse, y, peak);
}

void encode_columns(const float* y, int K, int V, const float* inv_step, float qmax,
                    std::uint8_t* z) {
  HWY_DYNAMIC_DISPATCH(encode_columns_kernel)(y, K, V, inv_step, qmax, z);
}

void restore_rows(const std::uint8_t* z, int K, int V, int begin, int n_rows, const float* s_k,
                  const float* step, const float* key, const float* value, int R, float* X) {
  HWY_DYNAMIC_DISPATCH(restore_rows_kernel)(z, K, V, begin, n_rows, s_k, step, key, value, R, X);
}

}  // namespace statepack::leapquant
#endif
