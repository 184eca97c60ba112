#include "model/linear.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <oneapi/dnnl/dnnl.h>
#include <signal.h>

#include "base/check.hpp"
#include "base/half.hpp"
#include "base/simd_clones.hpp"
#include "model/dot_kernel.hpp"

// Of libgomp, on which Debian builds oneDNN. omp.h is not declared to every compiler that links it.
extern "C" int omp_get_max_threads(void);
extern "C" void omp_set_num_threads(int);

namespace statepack {
namespace {

// Outputs of one task of the invariant kernel: enough work to outweigh handing it out, few enough
// that a layer of 384 outputs still feeds several threads.
constexpr std::int64_t kDotOutputs = 64;
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

bool uses_gemm(const LinearJob& job, GemmPath path) {
  return path == GemmPath::kPrefill && job.n_rows >= LinearRunner::kMinGemmRows;
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
          std::int64_t n_rows, std::vector<float>& panel) {
  const std::int64_t K = job.w->n_in();
  panel.resize(static_cast<std::size_t>(n_out * std::min(K, kPanelColumns)));
  // The loop around is the parallel one. The setting is this thread's and may be the host
  // program's.
  const int n_outer = omp_get_max_threads();
  omp_set_num_threads(1);
  for (std::int64_t k = 0; k < K; k += kPanelColumns) {
    const std::int64_t n = std::min(K - k, kPanelColumns);
    for (std::int64_t o = 0; o < n_out; ++o) {
      job.w->widen(out_begin + o, k, n, panel.data() + o * n);
    }
    const SignalsHeld held;
    const dnnl_status_t status =
        dnnl_sgemm('N', 'T', n_rows, n_out, n, 1.0F, job.x + row_begin * job.x_stride + k,
                   job.x_stride, panel.data(), n, k == 0 ? 0.0F : 1.0F,
                   job.y + row_begin * job.y_stride + out_begin, job.y_stride);
    SP_CHECK(status == dnnl_success, "dnnl_sgemm");
  }
  omp_set_num_threads(n_outer);
}

}  // namespace

Linear Linear::rows(std::int64_t begin, std::int64_t n) const {
  SP_CHECK(!order_ && begin >= 0 && n >= 0 && begin + n <= n_out_, "rows of a matrix");
  return {dtype_, row(begin), n, n_in_};
}

Linear Linear::permuted(std::vector<std::int32_t> order) const {
  SP_CHECK(!order_, "permuted once");
  Linear out = *this;
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

LinearRunner::LinearRunner(ThreadPool& threads)
    : threads_(threads), panels_(static_cast<std::size_t>(threads.n_threads())) {}

// Brings the rows of the jobs that need it into the kernel's order, once for jobs that follow one
// another with the same input.
void LinearRunner::pack_inputs(std::span<const LinearJob> jobs, GemmPath path) {
  std::int64_t n_floats = 0;
  packed_at_.resize(jobs.size());
  const LinearJob* last = nullptr;
  std::vector<std::pair<std::size_t, std::int64_t>> rows;  // (job, row)
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    const LinearJob& job = jobs[j];
    if (uses_gemm(job, path)) continue;
    if (last != nullptr && same_input(*last, job)) {
      packed_at_[j] = packed_at_[static_cast<std::size_t>(last - jobs.data())];
      continue;
    }
    packed_at_[j] = n_floats;
    n_floats += job.n_rows * packed_width(job.w->n_in());
    for (std::int64_t r = 0; r < job.n_rows; ++r) rows.emplace_back(j, r);
    last = &job;
  }
  if (static_cast<std::size_t>(n_floats) > packed_.size()) {
    packed_.resize(static_cast<std::size_t>(n_floats));
  }
  threads_.parallel_for(static_cast<std::int64_t>(rows.size()), [&](std::int64_t i, int) {
    const auto [j, r] = rows[static_cast<std::size_t>(i)];
    const LinearJob& job = jobs[j];
    const std::int64_t K = job.w->n_in();
    pack_row(job.w->dtype(), job.x + r * job.x_stride, K,
             packed_.data() + packed_at_[j] + r * packed_width(K));
  });
}

void LinearRunner::run(std::span<const LinearJob> jobs, GemmPath path) {
  pack_inputs(jobs, path);
  tasks_.clear();
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    const LinearJob& job = jobs[j];
    const std::int64_t N = job.w->n_out();
    if (job.n_rows == 0) continue;
    if (!uses_gemm(job, path)) {
      for (std::int64_t o = 0; o < N; o += kDotOutputs) {
        tasks_.push_back({j, o, std::min(kDotOutputs, N - o), 0, job.n_rows, false});
      }
      continue;
    }
    // Equal panels, an even number of them where there are several, so that two threads share a
    // small layer evenly. The cut depends on the shape alone.
    std::int64_t n_panels = (N + kPanelOutputs - 1) / kPanelOutputs;
    if (n_panels > 1) n_panels += n_panels % 2;
    const std::int64_t width = ((N + n_panels - 1) / n_panels + 15) / 16 * 16;
    for (std::int64_t r = 0; r < job.n_rows; r += kPanelRows) {
      const std::int64_t n_rows = std::min(kPanelRows, job.n_rows - r);
      for (std::int64_t o = 0; o < N; o += width) {
        tasks_.push_back({j, o, std::min(width, N - o), r, n_rows, true});
      }
    }
  }
  threads_.parallel_for(static_cast<std::int64_t>(tasks_.size()), [&](std::int64_t i, int worker) {
    const Task& task = tasks_[static_cast<std::size_t>(i)];
    const LinearJob& job = jobs[task.job];
    if (task.gemm) {
      gemm(job, task.out_begin, task.n_out, task.row_begin, task.n_rows,
           panels_[static_cast<std::size_t>(worker)]);
      return;
    }
    std::array<const std::byte*, kDotOutputs> w;
    for (std::int64_t o = 0; o < task.n_out; ++o) {
      w[static_cast<std::size_t>(o)] = job.w->row(task.out_begin + o);
    }
    dot_rows(job.w->dtype(), packed_.data() + packed_at_[task.job], job.n_rows, w.data(),
             task.n_out, job.w->n_in(), job.y + task.out_begin, job.y_stride);
  });
}

}  // namespace statepack
