#include "model/tile_kernel.hpp"

#include "base/check.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#define SP_TILES \
  __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

namespace statepack::tile_kernel {
namespace {

constexpr std::int64_t kPieces = 2;        // bf16 numbers of one f32
constexpr std::int64_t kStepValues = 32;   // bf16 values of k in one row of a tile
constexpr std::int64_t kTileBytes = 1024;  // a tile is 16 rows of 64 bytes
constexpr std::int64_t kLine = 64;
// Steps after which sums are put down: weights of two blocks (32 KiB) then stay in the first-level
// cache while all rows pass over them.
constexpr std::int64_t kMaxSteps = 16;

std::int64_t n_steps(std::int64_t K) { return (K + kStepValues - 1) / kStepValues; }
std::int64_t block_bytes(std::int64_t K) { return n_steps(K) * kTileBytes; }

bool has_unit() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512bf16")) {
    return false;
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, of newer kernels
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

typedef std::uint32_t Words __attribute__((vector_size(64)));

// Halves of every 128 bits of two vectors, zipped word by word.
SP_TILES inline Words zip_low(Words x, Words y) {
  return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
SP_TILES inline Words zip_high(Words x, Words y) {
  return __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
// Every other 128 bits of two vectors.
SP_TILES inline Words even_lanes(Words x, Words y) {
  return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
}
SP_TILES inline Words odd_lanes(Words x, Words y) {
  return __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// Exchanges rows and columns of a 16x16 block: 4x4 blocks inside every 128 bits, then those blocks.
[[gnu::always_inline]] SP_TILES inline void transpose(Words (&v)[16]) {
  Words a[16];
  for (int i = 0; i < 16; i += 4) {
    const Words low02 = zip_low(v[i], v[i + 2]), high02 = zip_high(v[i], v[i + 2]);
    const Words low13 = zip_low(v[i + 1], v[i + 3]), high13 = zip_high(v[i + 1], v[i + 3]);
    a[i] = zip_low(low02, low13);
    a[i + 1] = zip_high(low02, low13);
    a[i + 2] = zip_low(high02, high13);
    a[i + 3] = zip_high(high02, high13);
  }
  // 128 bits l of a[4 i + j] hold column 4 l + j of rows 4 i to 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    const Words even_top = even_lanes(a[j], a[j + 4]), odd_top = odd_lanes(a[j], a[j + 4]);
    const Words even_low = even_lanes(a[j + 8], a[j + 12]),
                odd_low = odd_lanes(a[j + 8], a[j + 12]);
    v[j] = even_lanes(even_top, even_low);
    v[j + 4] = even_lanes(odd_top, odd_low);
    v[j + 8] = odd_lanes(even_top, even_low);
    v[j + 12] = odd_lanes(odd_top, odd_low);
  }
}

// Some headers warn of their own uninitialised values where nothing is masked.
constexpr __mmask16 kAll = 0xffff;

// The bf16 number next to the largest f32 would be infinite: the largest bf16 is taken instead.
// What is left of an infinite or undefined x is so, too.
SP_TILES inline __m512 limited(__m512 x) {
  const __m512 top = _mm512_set1_ps(0x1.fep127F), bottom = _mm512_set1_ps(-0x1.fep127F);
  return _mm512_maskz_max_ps(kAll, _mm512_maskz_min_ps(kAll, x, top), bottom);
}
SP_TILES inline __m512 widened(__m256i halves) {
  const __m512i low = _mm512_maskz_cvtepu16_epi32(kAll, halves);
  return reinterpret_cast<__m512>(_mm512_maskz_slli_epi32(kAll, low, 16));
}

// Tiles 0-3: sums [rows of a group][16 outputs] of two groups times two blocks; 4 and 5: weights of
// the blocks [16 pairs of k][16 outputs][2]; 6 and 7: x of the groups [rows][32 of k].
SP_TILES void configure(std::int64_t n_first, std::int64_t n_second) {
  struct alignas(64) {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t n_rows[16] = {};
  } config;
  const std::int64_t n_rows[8] = {n_first, n_first, n_second, n_second, 16, 16, n_first, n_second};
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = n_rows[t] == 0 ? 0 : 64;
    config.n_rows[t] = static_cast<std::uint8_t>(n_rows[t]);
  }
  _tile_loadconfig(&config);
}

/// One group or two of rows against one block or two of weights, a stretch of steps long.
struct Product {
  const std::byte* x[2];  // of the groups
  const std::byte* w[2];  // of the blocks
  std::int64_t steps;
  float* y[2];  // of the groups
  std::int64_t y_stride;
  bool add;                // to what y holds
  const std::byte* ahead;  // what to ask memory for, `ahead_lines` cache lines a step
  std::int64_t ahead_lines;
  std::int64_t next_rows;  // of y behind these, which are asked for, too
};

template <int groups, int blocks>
SP_TILES void multiply(const Product& p) {
  const auto stride = static_cast<std::size_t>(p.y_stride) * sizeof(float);
  if (p.add) {
    _tile_loadd(0, p.y[0], stride);
    if constexpr (blocks == 2) _tile_loadd(1, p.y[0] + kBlock, stride);
    if constexpr (groups == 2) {
      _tile_loadd(2, p.y[1], stride);
      if constexpr (blocks == 2) _tile_loadd(3, p.y[1] + kBlock, stride);
    }
  } else {
    _tile_zero(0);
    if constexpr (blocks == 2) _tile_zero(1);
    if constexpr (groups == 2) {
      _tile_zero(2);
      if constexpr (blocks == 2) _tile_zero(3);
    }
  }
  const std::byte* x0 = p.x[0];
  const std::byte* x1 = p.x[1];
  const std::byte* ahead = p.ahead;
  const float* y_next = p.y[0] + groups * kGroup * p.y_stride;
  std::int64_t next = 0;
  for (std::int64_t s = 0; s < p.steps; ++s) {
    _tile_loadd(4, p.w[0] + s * kTileBytes, kLine);
    _tile_loadd(6, x0, kLine);
    _tile_dpbf16ps(0, 6, 4);
    if constexpr (blocks == 2) {
      _tile_loadd(5, p.w[1] + s * kTileBytes, kLine);
      _tile_dpbf16ps(1, 6, 5);
    }
    if constexpr (groups == 2) {
      _tile_loadd(7, x1, kLine);
      _tile_dpbf16ps(2, 7, 4);
      if constexpr (blocks == 2) _tile_dpbf16ps(3, 7, 5);
    }
    _tile_loadd(6, x0 + kTileBytes, kLine);
    _tile_dpbf16ps(0, 6, 4);
    if constexpr (blocks == 2) _tile_dpbf16ps(1, 6, 5);
    if constexpr (groups == 2) {
      _tile_loadd(7, x1 + kTileBytes, kLine);
      _tile_dpbf16ps(2, 7, 4);
      if constexpr (blocks == 2) _tile_dpbf16ps(3, 7, 5);
      x1 += kPieces * kTileBytes;
    }
    x0 += kPieces * kTileBytes;
    for (std::int64_t i = 0; i < p.ahead_lines; ++i, ahead += kLine)
      __builtin_prefetch(ahead, 0, 2);
    for (; next < p.next_rows * (s + 1) / p.steps; ++next, y_next += p.y_stride) {
      for (int b = 0; b < blocks; ++b) __builtin_prefetch(y_next + b * kBlock, 1, 3);
    }
  }
  _tile_stored(0, p.y[0], stride);
  if constexpr (blocks == 2) _tile_stored(1, p.y[0] + kBlock, stride);
  if constexpr (groups == 2) {
    _tile_stored(2, p.y[1], stride);
    if constexpr (blocks == 2) _tile_stored(3, p.y[1] + kBlock, stride);
  }
}

// y = x w^T for all rows and one block or two, whose whole tiles y has room for. `ahead`: weights
// that will be wanted next, or null.
template <int blocks>
SP_TILES void panel(const std::byte* groups, std::int64_t n_rows, const std::byte* w,
                    std::int64_t K, float* y, std::int64_t y_stride, const std::byte* ahead) {
  const std::int64_t steps = n_steps(K), group = group_bytes(K);
  const std::int64_t n_pairs = (n_rows + 2 * kGroup - 1) / (2 * kGroup);
  const std::int64_t lines = ahead == nullptr ? 0 : blocks * (kTileBytes / kLine);
  for (std::int64_t s = 0; s < steps; s += kMaxSteps) {
    Product p = {};
    p.w[0] = w + s * kTileBytes;
    p.w[1] = p.w[0] + block_bytes(K);
    p.steps = std::min(kMaxSteps, steps - s);
    p.y_stride = y_stride;
    p.add = s > 0;
    p.ahead_lines = (lines + n_pairs - 1) / n_pairs;
    std::int64_t configured = 0;
    for (std::int64_t r = 0; r < n_rows; r += 2 * kGroup) {
      const std::int64_t n = std::min(2 * kGroup, n_rows - r);
      if (n != configured) configure(std::min(kGroup, n), std::max<std::int64_t>(n - kGroup, 0));
      configured = n;
      p.x[0] = groups + r / kGroup * group + s * kPieces * kTileBytes;
      p.x[1] = p.x[0] + group;
      p.y[0] = y + r * y_stride;
      p.y[1] = p.y[0] + kGroup * y_stride;
      p.ahead = ahead;
      p.next_rows = s > 0 ? 0 : std::min(2 * kGroup, n_rows - r - n);
      n > kGroup ? multiply<2, blocks>(p) : multiply<1, blocks>(p);
      if (ahead != nullptr) ahead += p.steps * p.ahead_lines * kLine;
    }
  }
}

}  // namespace

bool available() {
  static const bool yes = has_unit();
  return yes;
}

std::int64_t group_bytes(std::int64_t K) { return n_steps(K) * kPieces * kTileBytes; }

std::int64_t weight_bytes(std::int64_t n_out, std::int64_t K) {
  return (n_out + kBlock - 1) / kBlock * block_bytes(K);
}

SP_TILES void pack_row(const float* x, std::int64_t K, std::int64_t r, std::byte* group) {
  std::byte* to = group + r * kLine;
  for (std::int64_t k = 0; k < K; k += kStepValues, to += kPieces * kTileBytes) {
    const std::int64_t left = std::min(K - k, kStepValues);
    const auto mask = static_cast<std::uint32_t>((std::uint64_t{1} << left) - 1U);
    const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x + k);
    const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + k + 16);
    const auto nearest = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(limited(b), limited(a)));
    _mm512_store_si512(to, nearest);
    const __m512 a_left = a - widened(_mm512_maskz_extracti64x4_epi64(0xff, nearest, 0));
    const __m512 b_left = b - widened(_mm512_maskz_extracti64x4_epi64(0xff, nearest, 1));
    _mm512_store_si512(to + kTileBytes,
                       reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b_left, a_left)));
  }
}

SP_TILES void pack_weights(const std::byte* const* rows, std::int64_t n_out, std::int64_t K,
                           std::byte* packed) {
  for (std::int64_t n = 0; n < n_out; n += kBlock) {
    for (std::int64_t k = 0; k < K; k += kStepValues, packed += kTileBytes) {
      const auto n_bytes = static_cast<std::size_t>(2 * std::min(K - k, kStepValues));
      Words v[16] = {};
      for (std::int64_t o = 0; o < std::min(kBlock, n_out - n); ++o) {
        std::memcpy(&v[o], rows[n + o] + 2 * k, n_bytes);
      }
      transpose(v);
      std::memcpy(packed, v, sizeof v);
    }
  }
}

SP_TILES void dot_rows(const std::byte* groups, std::int64_t n_rows, const std::byte* weights,
                       std::int64_t n_out, std::int64_t K, float* y, std::int64_t y_stride) {
  // Some compilers do not know that tile loads read memory, nor that tile stores write it.
  asm volatile("" ::: "memory");
  std::int64_t n = 0;
  const std::byte* w = weights;
  for (; n + 2 * kBlock <= n_out; n += 2 * kBlock) {
    const std::byte* next = w + 2 * block_bytes(K);
    panel<2>(groups, n_rows, w, K, y + n, y_stride, n + 2 * kBlock < n_out ? next : nullptr);
    w = next;
  }
  for (; n + kBlock <= n_out; n += kBlock) {
    panel<1>(groups, n_rows, w, K, y + n, y_stride, nullptr);
    w += block_bytes(K);
  }
  // What is left of a block goes the way of scratch memory: y has no room for a whole tile.
  for (std::int64_t r = 0; n < n_out && r < n_rows; r += kGroup) {
    alignas(64) float sums[kGroup * kBlock];
    const std::int64_t n_group = std::min(kGroup, n_rows - r);
    panel<1>(groups + r / kGroup * group_bytes(K), n_group, w, K, sums, kBlock, nullptr);
    asm volatile("" ::: "memory");
    for (std::int64_t i = 0; i < n_group; ++i) {
      std::memcpy(y + (r + i) * y_stride + n, sums + i * kBlock,
                  static_cast<std::size_t>(n_out - n) * sizeof(float));
    }
  }
  asm volatile("" ::: "memory");
  _tile_release();  // else every task switch saves 8 KB of tiles
}

}  // namespace statepack::tile_kernel

#else

namespace statepack::tile_kernel {

bool available() { return false; }
std::int64_t group_bytes(std::int64_t) { return 0; }
std::int64_t weight_bytes(std::int64_t, std::int64_t) { return 0; }
void pack_row(const float*, std::int64_t, std::int64_t, std::byte*) {
  SP_CHECK(false, "no matrix unit");
}
void pack_weights(const std::byte* const*, std::int64_t, std::int64_t, std::byte*) {
  SP_CHECK(false, "no matrix unit");
}
void dot_rows(const std::byte*, std::int64_t, const std::byte*, std::int64_t, std::int64_t, float*,
              std::int64_t) {
  SP_CHECK(false, "no matrix unit");
}

}  // namespace statepack::tile_kernel

#endif
