#include "codec/pace/nibbles.hpp"

// Vectors of SVE and RVV have no compile-time size and cannot stand in the arrays below; SSSE3 and
// the second AVX-512 dialect would do what their neighbours do.
#define HWY_DISABLED_TARGETS \
  (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | HWY_SSSE3 | HWY_AVX3_DL)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/pace/nibbles.cc"
#include <hwy/foreach_target.h>
// foreach_target.h comes first.
#include <hwy/highway.h>

#include <cstring>

#include "codec/run_vectors-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace statepack::HWY_NAMESPACE {
namespace {

// Blocks of 16 rows and 16 columns. The nibbles of eight rows fill the words of their columns; a
// column's two words are its 8 bytes.
constexpr int kWords = 2, kRowsAWord = 8;

void pack_columns_kernel(const float* X, const float* scale, int n_rows, int V_, std::uint8_t* out,
                         std::int64_t stride) {
  const D d;
  const DU du;
  const V limit = hn::Set(d, 7.0f), minus_limit = hn::Set(d, -7.0f);
  for (int j = 0; j < V_; j += kRun) {
    V s[kParts], inverse[kParts];
    for (int h = 0; h < kParts; ++h) {
      s[h] = hn::LoadU(d, scale + j + h * kLanes);
      inverse[h] = hn::Div(hn::Set(d, 1.0f), s[h]);
    }
    for (int i = 0; i < n_rows; i += kRun) {
      HWY_ALIGN std::uint32_t words[kRun][kWords];
      for (int h = 0; h < kParts; ++h) {
        hn::Vec<DU> word[kWords];
        for (int w = 0; w < kWords; ++w) {
          word[w] = hn::Zero(du);
          for (int row = kRowsAWord - 1; row >= 0; --row) {
            const std::int64_t at = std::int64_t{i + kRowsAWord * w + row} * V_ + j + h * kLanes;
            const V x = divide_by_half(hn::LoadU(d, X + at), s[h], inverse[h]);
            const auto code = hn::BitCast(du, hn::NearestInt(clamp(x, minus_limit, limit)));
            word[w] = hn::OrAnd(hn::ShiftLeft<4>(word[w]), code, hn::Set(du, 15));
          }
        }
        hn::StoreInterleaved2(word[0], word[1], du, words[h * kLanes]);
      }
      for (int c = 0; c < kRun; ++c) {
        std::memcpy(out + (j + c) * stride + i / 2, words[c], sizeof words[c]);
      }
    }
  }
}

void restore_columns_kernel(const std::uint8_t* in, std::int64_t stride, const float* scale,
                            int n_rows, int V_, float* X) {
  const D d;
  const DU du;
  const DI di;
  for (int j = 0; j < V_; j += kRun) {
    V s[kParts];
    for (int h = 0; h < kParts; ++h) s[h] = hn::LoadU(d, scale + j + h * kLanes);
    for (int i = 0; i < n_rows; i += kRun) {
      HWY_ALIGN std::uint32_t words[kRun][kWords];
      for (int c = 0; c < kRun; ++c) {
        std::memcpy(words[c], in + (j + c) * stride + i / 2, sizeof words[c]);
      }
      for (int h = 0; h < kParts; ++h) {
        hn::Vec<DU> word[kWords];
        hn::LoadInterleaved2(du, words[h * kLanes], word[0], word[1]);
        for (int w = 0; w < kWords; ++w) {
          for (int row = 0; row < kRowsAWord; ++row) {
            const int up = 4 * (kRowsAWord - 1 - row);  // the nibble's sign to the word's
            const auto code = hn::ShiftRight<28>(hn::BitCast(di, hn::ShiftLeftSame(word[w], up)));
            const std::int64_t at = std::int64_t{i + kRowsAWord * w + row} * V_ + j + h * kLanes;
            hn::StoreU(hn::Mul(s[h], hn::ConvertTo(d, code)), d, X + at);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace statepack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace statepack::pace {

HWY_EXPORT(pack_columns_kernel);
HWY_EXPORT(restore_columns_kernel);

void pack_columns(const float* X, const float* scale, int n_rows, int V, std::uint8_t* out,
                  std::int64_t stride) {
  HWY_DYNAMIC_DISPATCH(pack_columns_kernel)(X, scale, n_rows, V, out, stride);
}

void restore_columns(const std::uint8_t* in, std::int64_t stride, const float* scale, int n_rows,
                     int V, float* X) {
  HWY_DYNAMIC_DISPATCH(restore_columns_kernel)(in, stride, scale, n_rows, V, X);
}

}  // namespace statepack::pace
#endif
