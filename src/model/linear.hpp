// Linear layers: Y = X W^T, W [n_out, n_in] bf16, f16 or f32 as the checkpoint stores it, X and Y
// f32 rows. No widened copy of a weight is kept; for the matrix unit weights may be copied into its
// order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/aligned.hpp"
#include "base/safetensors.hpp"
#include "base/thread_pool.hpp"

namespace statepack {

/// A weight matrix, or some rows of one. Refers to the mapped checkpoint; cheap to copy.
class Linear {
 public:
  Linear() = default;
  /// `data` [n_out, n_in] row-major, aligned to its elements; dtype F32, F16 or BF16.
  Linear(DType dtype, const std::byte* data, std::int64_t n_out, std::int64_t n_in)
      : dtype_(dtype), data_(data), n_out_(n_out), n_in_(n_in) {}

  /// The same matrix with a copy of its weights in the order of the matrix unit, which rows() of it
  /// share. Without a unit, without memory, and of other dtypes: the same matrix.
  Linear in_tiles(ThreadPool& threads) const;
  /// Rows [begin, begin + n) as a matrix of their own; not of a permuted matrix.
  Linear rows(std::int64_t begin, std::int64_t n) const;
  /// Row i of the result is row order[i] of this matrix: a change of order without moving weights.
  Linear permuted(std::vector<std::int32_t> order) const;

  DType dtype() const { return dtype_; }
  std::int64_t n_out() const { return n_out_; }
  std::int64_t n_in() const { return n_in_; }
  const std::byte* row(std::int64_t i) const {
    const std::int64_t stored = order_ ? (*order_)[static_cast<std::size_t>(i)] : i;
    return data_ + stored * n_in_ * static_cast<std::int64_t>(dtype_bytes(dtype_));
  }
  /// Blocks of weights in the order of the matrix unit (tile_kernel.hpp), or null.
  const std::byte* tiles() const { return tiles_.get(); }
  /// Row i from column `begin` on, widened: out[n].
  void widen(std::int64_t i, std::int64_t begin, std::int64_t n, float* out) const;

 private:
  DType dtype_ = DType::kF32;
  const std::byte* data_ = nullptr;
  std::int64_t n_out_ = 0, n_in_ = 0;
  std::shared_ptr<const std::vector<std::int32_t>> order_;
  std::shared_ptr<const std::byte> tiles_;
};

/// y[r] = W x[r] for n_rows rows at their strides (floats).
struct LinearJob {
  const Linear* w = nullptr;
  const float* x = nullptr;
  std::int64_t x_stride = 0;
  std::int64_t n_rows = 0;
  float* y = nullptr;
  std::int64_t y_stride = 0;
};

/// Writes row r of x.
using RowMaker = std::function<void(std::int64_t r)>;

/// Which arithmetic a forward pass uses.
enum class GemmPath : std::uint8_t {
  kInvariant,  ///< decode: a row's bits depend on nothing but that row and W
  kPrefill,    ///< jobs of kMinGemmRows rows and more may go to the GEMM library; there bits depend
               ///< on n_rows
};

/// Whether bf16 weights go to the matrix unit (tile_kernel.hpp), for prompts and batches alike;
/// without it to the vector kernel (dot_kernel.hpp) or the library.
enum class TileUse : std::uint8_t { kWhereAvailable, kNever };

/// Runs linear layers over a thread pool; owns their scratch. One caller at a time.
class LinearRunner {
 public:
  /// Measured on Zen 4: with fewer rows our kernel on the stored weights is ahead of the library
  /// and its widened panels (64 rows of K = 1024: 100 against 66 of 106 GFLOP/s), from here on
  /// behind.
  static constexpr std::int64_t kMinGemmRows = 256;

  explicit LinearRunner(ThreadPool& threads, TileUse tiles = TileUse::kWhereAvailable);
  /// All jobs, which must not depend on one another, as one parallel loop. Results do not depend on
  /// the number of threads. `make`, where given, is called once for every row, by several threads
  /// at a time and before the row is read: what a row takes to make is then done by the thread that
  /// converts it, while it is in its cache. All jobs have the same number of rows then.
  void run(std::span<const LinearJob> jobs, GemmPath path, const RowMaker& make = {});
  /// y = down (combine(gate x, up x)), with the bits of three run()s and combine() over whole rows
  /// between them, where the matrix unit does all of it: what lies between is then converted by the
  /// thread that computed it and never leaves its cache. `gate` gives the input x, the rows and the
  /// matrix; its y is not used. False, with nothing done, elsewhere.
  bool run_gated(const LinearJob& gate, const Linear& up, const LinearJob& down,
                 const RowMaker& make,
                 void (*combine)(float* gate, const float* up, std::int64_t n));

 private:
  enum class Kernel : std::uint8_t { kVector, kTiles, kLibrary };
  struct Input {
    const LinearJob* job;
    Kernel kernel;
    std::int64_t at;  // bytes into packed_
  };
  struct Task {
    std::size_t job;
    std::int64_t out_begin, n_out, row_begin, n_rows;
    Kernel kernel;
  };
  Kernel kernel_of(const LinearJob& job, GemmPath path) const;
  void place_inputs(std::span<const LinearJob> jobs, GemmPath path);
  void pack_row_of(const Input& input, std::int64_t r) const;
  void pack_inputs(std::span<const LinearJob> jobs, GemmPath path, const RowMaker& make);
  void make_tasks(std::span<const LinearJob> jobs, GemmPath path);

  ThreadPool& threads_;
  bool tiles_;
  std::vector<Task> tasks_;
  std::vector<Input> inputs_;            ///< that are packed
  AlignedBytes between_;                 ///< packed rows in the middle of run_gated()
  AlignedBytes packed_;                  ///< rows of f32 or groups of the matrix unit
  std::vector<std::int64_t> packed_at_;  ///< of each job, bytes into packed_
  std::vector<AlignedBytes> scratch_;    ///< of each worker
};

}  // namespace statepack
