#include "model/linear.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include <oneapi/dnnl/dnnl.h>
#include <signal.h>

#include "base/check.hpp"
#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "model/dot_kernel.hpp"
#include "model/tile_kernel.hpp"

// Of libgomp, on which Debian builds oneDNN. omp.h is not declared to every compiler that links it.
extern "C" int omp_get_max_threads(void);
extern "C" void omp_set_num_threads(int);

namespace statepack {
namespace {

// Outputs of one task of the invariant kernels: enough work to outweigh handing it out, few enough
// that a layer of 384 outputs still feeds several threads.
constexpr std::int64_t kDotOutputs = 64;
static_assert(kDotOutputs % tile_kernel::kBlock == 0);
// A layer of few outputs is cut finer where the kernel takes that many at a time anyway, so that a
// thread that lost its core for a while does not keep the others waiting.
constexpr std::int64_t kFewOutputs = 512, kPanelOfTiles = 2 * tile_kernel::kBlock;
// Rows of one task of the matrix unit: of 1024 columns they pack to 1 MB, which the tasks of one
// layer pass over while it lies in a core's second-level cache.
constexpr std::int64_t kTileTaskRows = 256;
static_assert(kTileTaskRows % tile_kernel::kGroup == 0);
// Panels for the library: from 192 outputs on its packing is paid for; 2048 columns of 256 outputs
// are 2 MB of f32, about a core's second-level cache.
constexpr std::int64_t kPanelOutputs = 256, kPanelColumns = 2048, kPanelRows = 256;

SP_CLONES void widen_bf16(const std::uint16_t* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = bf16_to_f32(from[i]);
}
SP_CLONES void widen_f16(const std::uint16_t* from, std::int64_t n, float* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = f16_to_f32(from[i]);
}

bool same_input(const LinearJob& a, const LinearJob& b) {
  return a.x == b.x && a.x_stride == b.x_stride && a.n_rows == b.n_rows &&
         a.w->n_in() == b.w->n_in() &&
         (a.w->dtype() == DType::kBF16) == (b.w->dtype() == DType::kBF16);
}

// n floats of memory that grows.
float* floats(AlignedBytes& memory, std::int64_t n) {
  memory.grow(static_cast<std::size_t>(n) * sizeof(float));
  return reinterpret_cast<float*>(memory.data());
}

// Holds back the calling thread's signals. oneDNN before 3.11 points rsp into the heap inside its
// sgemm kernels, so a handler that ran there would write its frame over other people's memory
// (uxlfoundation/oneDNN#4845).
class SignalsHeld {
 public:
  SignalsHeld() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsHeld() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  sigset_t before_;
};

// Y[rows, outputs] = X W^T on a panel widened to f32, a stretch of columns at a time.
void gemm(const LinearJob& job, std::int64_t out_begin, std::int64_t n_out, std::int64_t row_begin,
          std::int64_t n_rows, AlignedBytes& scratch) {
  const std::int64_t K = job.w->n_in();
  float* panel = floats(scratch, n_out * std::min(K, kPanelColumns));
  // The loop around is the parallel one. The setting is this thread's and may be the host
  // program's.
  const int n_outer = omp_get_max_threads();
  omp_set_num_threads(1);
  for (std::int64_t k = 0; k < K; k += kPanelColumns) {
    const std::int64_t n = std::min(K - k, kPanelColumns);
    for (std::int64_t o = 0; o < n_out; ++o) {
      job.w->widen(out_begin + o, k, n, panel + o * n);
    }
    const SignalsHeld held;
    const dnnl_status_t status = dnnl_sgemm(
        'N', 'T', n_rows, n_out, n, 1.0F, job.x + row_begin * job.x_stride + k, job.x_stride, panel,
        n, k == 0 ? 0.0F : 1.0F, job.y + row_begin * job.y_stride + out_begin, job.y_stride);
    SP_CHECK(status == dnnl_success, "dnnl_sgemm");
  }
  omp_set_num_threads(n_outer);
}

}  // namespace

Linear Linear::in_tiles(ThreadPool& threads) const {
  if (dtype_ != DType::kBF16 || !tile_kernel::available() || n_out_ == 0 || n_in_ == 0) {
    return *this;
  }
  constexpr std::align_val_t kLine{AlignedBytes::kAlign};
  auto* const tiles = static_cast<std::byte*>(::operator new(
      static_cast<std::size_t>(tile_kernel::weight_bytes(n_out_, n_in_)), kLine, std::nothrow));
  if (tiles == nullptr) return *this;  // tasks then copy what they need, every time
  Linear out = *this;
  out.tiles_ = {tiles, [](std::byte* memory) { ::operator delete(memory, kLine); }};
  const std::int64_t n_blocks = (n_out_ + tile_kernel::kBlock - 1) / tile_kernel::kBlock;
  threads.parallel_for(n_blocks, [&](std::int64_t i, int) {
    const std::int64_t begin = i * tile_kernel::kBlock;
    const std::int64_t n = std::min(tile_kernel::kBlock, n_out_ - begin);
    std::array<const std::byte*, tile_kernel::kBlock> w;
    for (std::int64_t o = 0; o < n; ++o) w[static_cast<std::size_t>(o)] = row(begin + o);
    tile_kernel::pack_weights(w.data(), n, n_in_, tiles + tile_kernel::weight_bytes(begin, n_in_));
  });
  return out;
}

Linear Linear::rows(std::int64_t begin, std::int64_t n) const {
  SP_CHECK(!order_ && begin >= 0 && n >= 0 && begin + n <= n_out_, "rows of a matrix");
  Linear out(dtype_, row(begin), n, n_in_);
  if (tiles_ && begin % tile_kernel::kBlock == 0) {
    out.tiles_ = {tiles_, tiles_.get() + tile_kernel::weight_bytes(begin, n_in_)};
  }
  return out;
}

Linear Linear::permuted(std::vector<std::int32_t> order) const {
  SP_CHECK(!order_, "permuted once");
  Linear out(dtype_, data_, n_out_, n_in_);
  out.n_out_ = static_cast<std::int64_t>(order.size());
  out.order_ = std::make_shared<const std::vector<std::int32_t>>(std::move(order));
  return out;
}

void Linear::widen(std::int64_t i, std::int64_t begin, std::int64_t n, float* out) const {
  const std::byte* from = row(i) + begin * static_cast<std::int64_t>(dtype_bytes(dtype_));
  switch (dtype_) {
    case DType::kBF16:
      return widen_bf16(reinterpret_cast<const std::uint16_t*>(from), n, out);
    case DType::kF16:
      return widen_f16(reinterpret_cast<const std::uint16_t*>(from), n, out);
    default:
      std::memcpy(out, from, static_cast<std::size_t>(n) * sizeof(float));
  }
}

LinearRunner::LinearRunner(ThreadPool& threads, TileUse tiles)
    : threads_(threads),
      tiles_(tiles == TileUse::kWhereAvailable && tile_kernel::available()),
      scratch_(static_cast<std::size_t>(threads.n_threads())) {}

// Of batches the choice may only look at the weights: a row's bits must not depend on its company.
LinearRunner::Kernel LinearRunner::kernel_of(const LinearJob& job, GemmPath path) const {
  if (tiles_ && job.w->dtype() == DType::kBF16) return Kernel::kTiles;
  return path == GemmPath::kPrefill && job.n_rows >= kMinGemmRows ? Kernel::kLibrary
                                                                  : Kernel::kVector;
}

// Where the packed rows of every job lie: once for jobs that follow one another with the same
// input.
void LinearRunner::place_inputs(std::span<const LinearJob> jobs, GemmPath path) {
  inputs_.clear();
  packed_at_.resize(jobs.size());
  std::int64_t n_bytes = 0;
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    const LinearJob& job = jobs[j];
    const Kernel kernel = kernel_of(job, path);
    if (kernel == Kernel::kLibrary) continue;
    if (!inputs_.empty() && same_input(*inputs_.back().job, job)) {
      packed_at_[j] = inputs_.back().at;
      continue;
    }
    const std::int64_t K = job.w->n_in(), n = job.n_rows;
    inputs_.push_back({&job, kernel, n_bytes});
    packed_at_[j] = n_bytes;
    n_bytes +=
        kernel == Kernel::kTiles
            ? (n + tile_kernel::kGroup - 1) / tile_kernel::kGroup * tile_kernel::group_bytes(K)
            : (n * packed_width(K) * std::int64_t{sizeof(float)} + 63) / 64 * 64;
  }
  packed_.grow(static_cast<std::size_t>(n_bytes));
}

void LinearRunner::pack_row_of(const Input& input, std::int64_t r) const {
  const LinearJob& job = *input.job;
  const std::int64_t K = job.w->n_in();
  const float* x = job.x + r * job.x_stride;
  std::byte* to = packed_.data() + input.at;
  if (input.kernel == Kernel::kTiles) {
    tile_kernel::pack_row(x, K, r % tile_kernel::kGroup,
                          to + r / tile_kernel::kGroup * tile_kernel::group_bytes(K));
  } else {
    pack_row(job.w->dtype(), x, K, reinterpret_cast<float*>(to) + r * packed_width(K));
  }
}

// Brings rows into their kernel's order.
void LinearRunner::pack_inputs(std::span<const LinearJob> jobs, GemmPath path,
                               const RowMaker& make) {
  place_inputs(jobs, path);
  if (make) {
    threads_.parallel_for(jobs[0].n_rows, [&](std::int64_t r, int) {
      make(r);
      for (const Input& input : inputs_) pack_row_of(input, r);
    });
    return;
  }
  std::vector<std::pair<const Input*, std::int64_t>> rows;
  for (const Input& input : inputs_) {
    for (std::int64_t r = 0; r < input.job->n_rows; ++r) rows.emplace_back(&input, r);
  }
  threads_.parallel_for(std::ssize(rows), [&](std::int64_t i, int) {
    const auto& [input, r] = rows[static_cast<std::size_t>(i)];
    pack_row_of(*input, r);
  });
}

void LinearRunner::make_tasks(std::span<const LinearJob> jobs, GemmPath path) {
  tasks_.clear();
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    const LinearJob& job = jobs[j];
    const Kernel kernel = kernel_of(job, path);
    const std::int64_t N = job.w->n_out();
    std::int64_t width = kDotOutputs, height = job.n_rows;
    if (kernel == Kernel::kTiles) {
      height = kTileTaskRows;
      if (N <= kFewOutputs) width = kPanelOfTiles;
    }
    if (kernel == Kernel::kLibrary) {
      // Equal panels, an even number of them where there are several, so that two threads share a
      // small layer evenly. The cut depends on the shape alone.
      std::int64_t n_panels = (N + kPanelOutputs - 1) / kPanelOutputs;
      if (n_panels > 1) n_panels += n_panels % 2;
      width = ((N + n_panels - 1) / n_panels + 15) / 16 * 16;
      height = kPanelRows;
    }
    for (std::int64_t r = 0; r < job.n_rows; r += height) {
      const std::int64_t n_rows = std::min(height, job.n_rows - r);
      for (std::int64_t o = 0; o < N; o += width) {
        tasks_.push_back({j, o, std::min(width, N - o), r, n_rows, kernel});
      }
    }
  }
}

bool LinearRunner::run_gated(const LinearJob& gate, const Linear& up, const LinearJob& down,
                             const RowMaker& make,
                             void (*combine)(float* gate, const float* up, std::int64_t n)) {
  const std::int64_t n = gate.n_rows, K = gate.w->n_in(), middle = gate.w->n_out();
  if (!tiles_ || gate.w->tiles() == nullptr || up.tiles() == nullptr ||
      down.w->tiles() == nullptr || middle % kPanelOfTiles != 0) {
    return false;
  }
  pack_inputs({&gate, 1}, GemmPath::kInvariant, make);
  const std::int64_t group = tile_kernel::group_bytes(K);
  const std::int64_t group_between = tile_kernel::group_bytes(middle);
  const std::int64_t n_groups = (n + tile_kernel::kGroup - 1) / tile_kernel::kGroup;
  between_.grow(static_cast<std::size_t>(n_groups * group_between));
  const std::int64_t across = (middle + kDotOutputs - 1) / kDotOutputs;
  const std::int64_t bands = (n + kTileTaskRows - 1) / kTileTaskRows;
  threads_.parallel_for(across * bands, [&](std::int64_t task, int worker) {
    const std::int64_t first_row = task / across * kTileTaskRows;
    const std::int64_t n_rows = std::min(kTileTaskRows, n - first_row);
    const std::int64_t begin = task % across * kDotOutputs;
    const std::int64_t width = std::min(kDotOutputs, middle - begin);
    float* const a = floats(scratch_[static_cast<std::size_t>(worker)], 2 * n_rows * kDotOutputs);
    float* const b = a + n_rows * kDotOutputs;
    const std::int64_t first_group = first_row / tile_kernel::kGroup;
    const std::byte* const x = packed_.data() + first_group * group;
    const std::int64_t at = tile_kernel::weight_bytes(begin, K);
    tile_kernel::dot_rows(x, n_rows, gate.w->tiles() + at, width, K, a, kDotOutputs);
    tile_kernel::dot_rows(x, n_rows, up.tiles() + at, width, K, b, kDotOutputs);
    std::byte* const to =
        between_.data() + first_group * group_between + tile_kernel::group_bytes(begin);
    for (std::int64_t r = 0; r < n_rows; ++r) {
      combine(a + r * kDotOutputs, b + r * kDotOutputs, width);
      tile_kernel::pack_row(a + r * kDotOutputs, width, r % tile_kernel::kGroup,
                            to + r / tile_kernel::kGroup * group_between);
    }
  });
  make_tasks({&down, 1}, GemmPath::kInvariant);
  threads_.parallel_for(std::ssize(tasks_), [&](std::int64_t i, int) {
    const Task& task = tasks_[static_cast<std::size_t>(i)];
    tile_kernel::dot_rows(
        between_.data() + task.row_begin / tile_kernel::kGroup * group_between, task.n_rows,
        down.w->tiles() + tile_kernel::weight_bytes(task.out_begin, middle), task.n_out, middle,
        down.y + task.row_begin * down.y_stride + task.out_begin, down.y_stride);
  });
  return true;
}

void LinearRunner::run(std::span<const LinearJob> jobs, GemmPath path, const RowMaker& make) {
  pack_inputs(jobs, path, make);
  make_tasks(jobs, path);
  threads_.parallel_for(std::ssize(tasks_), [&](std::int64_t i, int worker) {
    const Task& task = tasks_[static_cast<std::size_t>(i)];
    const LinearJob& job = jobs[task.job];
    AlignedBytes& scratch = scratch_[static_cast<std::size_t>(worker)];
    if (task.kernel == Kernel::kLibrary) {
      gemm(job, task.out_begin, task.n_out, task.row_begin, task.n_rows, scratch);
      return;
    }
    const std::int64_t K = job.w->n_in();
    const std::byte* x = packed_.data() + packed_at_[task.job];
    float* y = job.y + task.row_begin * job.y_stride + task.out_begin;
    if (task.kernel == Kernel::kTiles && job.w->tiles() != nullptr) {
      tile_kernel::dot_rows(x + task.row_begin / tile_kernel::kGroup * tile_kernel::group_bytes(K),
                            task.n_rows,
                            job.w->tiles() + tile_kernel::weight_bytes(task.out_begin, K),
                            task.n_out, K, y, job.y_stride);
      return;
    }
    std::array<const std::byte*, kDotOutputs> w;
    for (std::int64_t o = 0; o < task.n_out; ++o) {
      w[static_cast<std::size_t>(o)] = job.w->row(task.out_begin + o);
    }
    if (task.kernel == Kernel::kTiles) {
      scratch.grow(static_cast<std::size_t>(tile_kernel::weight_bytes(task.n_out, K)));
      tile_kernel::pack_weights(w.data(), task.n_out, K, scratch.data());
      tile_kernel::dot_rows(x + task.row_begin / tile_kernel::kGroup * tile_kernel::group_bytes(K),
                            task.n_rows, scratch.data(), task.n_out, K, y, job.y_stride);
    } else {
      dot_rows(job.w->dtype(), reinterpret_cast<const float*>(x), task.n_rows, w.data(), task.n_out,
               K, y, job.y_stride);
    }
  });
}

}  // namespace statepack
