#include "model/tile_kernel.hpp"

#include "base/check.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#define SP_TILES __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl")))

namespace statepack::tile_kernel {
namespace {

constexpr std::int64_t kPlanes = 3;        // bf16 numbers of one f32
constexpr std::int64_t kTileColumns = 32;  // bf16 values of k in one row of a tile
constexpr std::int64_t kTileFloats = 256;  // a tile is 16 rows of 64 bytes
constexpr std::int64_t kTileOutputs = 16;
constexpr std::int64_t kManyRows = 64;

std::int64_t n_steps(std::int64_t K) { return (K + kTileColumns - 1) / kTileColumns; }

bool has_unit() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl")) {
    return false;
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h, of newer kernels
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

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

// Tiles 0-3: sums [16 outputs][n_rows]; 4: weights [16 outputs][32]; 5-7: x [16 pairs][n_rows][2].
SP_TILES void configure(std::int64_t n_rows) {
  struct alignas(64) {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t n_rows[16] = {};
  } config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = static_cast<std::uint16_t>(t == 4 ? 64 : 4 * n_rows);
    config.n_rows[t] = 16;
  }
  _tile_loadconfig(&config);
}

// Up to four tiles of outputs against one group of rows. Tile t of outputs starts at w[t], its rows
// w_stride[t] bytes apart.
SP_TILES void multiply(const float* x, std::int64_t n_rows, const std::byte* const (&w)[4],
                       const std::int64_t (&w_stride)[4], std::int64_t n_tiles, std::int64_t steps,
                       float* sums) {
  const std::int64_t x_stride = 4 * n_rows;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t s = 0; s < steps; ++s, x += kPlanes * kTileFloats) {
    _tile_loadd(5, x, x_stride);
    _tile_loadd(6, x + kTileFloats, x_stride);
    _tile_loadd(7, x + 2 * kTileFloats, x_stride);
    _tile_loadd(4, w[0] + s * 64, w_stride[0]);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 4, 7);
    if (n_tiles == 1) continue;
    _tile_loadd(4, w[1] + s * 64, w_stride[1]);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (n_tiles == 2) continue;
    _tile_loadd(4, w[2] + s * 64, w_stride[2]);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(2, 4, 6);
    _tile_dpbf16ps(2, 4, 7);
    if (n_tiles == 3) continue;
    _tile_loadd(4, w[3] + s * 64, w_stride[3]);
    _tile_dpbf16ps(3, 4, 5);
    _tile_dpbf16ps(3, 4, 6);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, x_stride);
  _tile_stored(1, sums + kTileFloats, x_stride);
  _tile_stored(2, sums + 2 * kTileFloats, x_stride);
  _tile_stored(3, sums + 3 * kTileFloats, x_stride);
}

[[gnu::always_inline]] SP_TILES inline void write_rows(const float* sums, std::int64_t n_rows,
                                                       std::int64_t n_out, float* y,
                                                       std::int64_t y_stride) {
  Words v[16];  // behind the rows of a narrow tile lies what nobody stores
  for (std::int64_t o = 0; o < 16; ++o) std::memcpy(&v[o], sums + o * n_rows, sizeof v[o]);
  transpose(v);
  const auto mask = static_cast<__mmask16>((1U << n_out) - 1U);
  for (std::int64_t r = 0; r < n_rows; ++r) {
    _mm512_mask_storeu_epi32(y + r * y_stride, mask, reinterpret_cast<__m512i>(v[r]));
  }
}

// y[r][o] = sums[o][r] for n_rows rows and n_out outputs of one tile, sums [16][n_rows].
SP_TILES void write_out(const float* sums, std::int64_t n_rows, std::int64_t n_out, float* y,
                        std::int64_t y_stride) {
  if (n_rows == 1) {
    std::memcpy(y, sums, static_cast<std::size_t>(n_out) * sizeof(float));
  } else if (n_rows == kGroup) {  // a known number of rows stays in registers
    write_rows(sums, kGroup, n_out, y, y_stride);
  } else {
    write_rows(sums, n_rows, n_out, y, y_stride);
  }
}

}  // namespace

bool available() {
  static const bool yes = has_unit();
  return yes;
}

std::int64_t packed_floats(std::int64_t K) { return n_steps(K) * kPlanes * kTileFloats; }

std::int64_t scratch_floats(std::int64_t K) {
  return 4 * kTileFloats + kMaxOutputs * n_steps(K) * kTileColumns / 2;
}

SP_TILES void pack_rows(const float* x, std::int64_t x_stride, std::int64_t n_rows, std::int64_t K,
                        float* packed) {
  const auto row_mask = static_cast<__mmask16>((1U << n_rows) - 1U);
  for (std::int64_t k = 0; k < K; k += kTileColumns, packed += kPlanes * kTileFloats) {
    Words plane[kPlanes][16];  // rows that are not there are not stored
    const std::int64_t left = std::min(K - k, kTileColumns);
    const auto mask = static_cast<std::uint32_t>((std::uint64_t{1} << left) - 1U);
    for (std::int64_t r = 0; r < n_rows; ++r) {
      const float* from = x + r * x_stride + k;
      const auto low =
          reinterpret_cast<Floats>(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from));
      const auto high = reinterpret_cast<Floats>(
          _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16));
      Floats even = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22,
                                            24, 26, 28, 30);
      Floats odd = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25,
                                           27, 29, 31);
      // Cutting, not rounding: a large number must not become infinite, and what is left is exact.
      for (auto& p : plane) {
        const Words even_top = reinterpret_cast<Words>(even) & 0xffff0000U;
        const Words odd_top = reinterpret_cast<Words>(odd) & 0xffff0000U;
        p[r] = even_top >> 16 | odd_top;
        even -= reinterpret_cast<Floats>(even_top);
        odd -= reinterpret_cast<Floats>(odd_top);
      }
    }
    for (std::int64_t p = 0; p < kPlanes; ++p) {
      if (n_rows == 1) {  // its pairs lie one after another as they are
        std::memcpy(packed + p * kTileFloats, &plane[p][0], sizeof(Words));
        continue;
      }
      transpose(plane[p]);
      for (std::int64_t pair = 0; pair < 16; ++pair) {
        _mm512_mask_storeu_epi32(packed + p * kTileFloats + pair * n_rows, row_mask,
                                 reinterpret_cast<__m512i>(plane[p][pair]));
      }
    }
  }
}

SP_TILES void dot_rows(const float* packed, std::int64_t n_rows, const std::byte* const* w_rows,
                       std::int64_t n_out, std::int64_t K, float* y, std::int64_t y_stride,
                       float* scratch) {
  SP_CHECK(n_out <= kMaxOutputs, "outputs of one call");
  const std::int64_t steps = n_steps(K);
  const std::int64_t n_tiles = (n_out + kTileOutputs - 1) / kTileOutputs;
  float* sums = scratch;
  auto* copies = reinterpret_cast<std::byte*>(scratch + 4 * kTileFloats);
  const std::byte* w[4] = {};
  std::int64_t w_stride[4] = {};
  for (std::int64_t t = 0; t < n_tiles; ++t) {
    const std::byte* const* rows = w_rows + t * kTileOutputs;
    const std::int64_t n_valid = std::min(kTileOutputs, n_out - t * kTileOutputs);
    // The unit reads whole tiles of equally spaced rows; others are copied together first. Tiles
    // across cache lines load at half the speed, which many rows of x pay for a copy to escape.
    const auto address = reinterpret_cast<std::uintptr_t>(rows[0]);
    bool direct = n_valid == kTileOutputs && K % kTileColumns == 0 &&
                  (n_rows < kManyRows || address % 64 == 0);
    for (std::int64_t o = 2; direct && o < n_valid; ++o) {
      direct = rows[o] - rows[o - 1] == rows[1] - rows[0];
    }
    if (direct) {
      w[t] = rows[0];
      w_stride[t] = rows[1] - rows[0];
      continue;
    }
    const std::int64_t stride = steps * 64;
    std::byte* copy = copies + t * kTileOutputs * stride;
    w[t] = copy;
    w_stride[t] = stride;
    if (n_valid < kTileOutputs || K % kTileColumns != 0) {
      std::memset(copy, 0, static_cast<std::size_t>(kTileOutputs * stride));
    }
    for (std::int64_t o = 0; o < n_valid; ++o) {
      std::memcpy(copy + o * stride, rows[o], static_cast<std::size_t>(2 * K));
    }
  }
  // Some compilers do not know that tile loads read memory.
  asm volatile("" ::: "memory");
  std::int64_t configured = 0;
  for (std::int64_t r = 0; r < n_rows; r += kGroup) {
    const std::int64_t n = std::min(kGroup, n_rows - r);
    if (n != configured) configure(n);
    configured = n;
    multiply(packed + r / kGroup * packed_floats(K), n, w, w_stride, n_tiles, steps, sums);
    for (std::int64_t t = 0; t < n_tiles; ++t) {
      write_out(sums + t * kTileFloats, n, std::min(kTileOutputs, n_out - t * kTileOutputs),
                y + r * y_stride + t * kTileOutputs, y_stride);
    }
  }
  _tile_release();  // else every task switch saves 8 KB of tiles
}

}  // namespace statepack::tile_kernel

#else

namespace statepack::tile_kernel {

bool available() { return false; }
std::int64_t packed_floats(std::int64_t) { return 0; }
std::int64_t scratch_floats(std::int64_t) { return 0; }
void pack_rows(const float*, std::int64_t, std::int64_t, std::int64_t, float*) {
  SP_CHECK(false, "no matrix unit");
}
void dot_rows(const float*, std::int64_t, const std::byte* const*, std::int64_t, std::int64_t,
              float*, std::int64_t, float*) {
  SP_CHECK(false, "no matrix unit");
}

}  // namespace statepack::tile_kernel

#endif
