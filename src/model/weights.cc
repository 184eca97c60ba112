#include "model/weights.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <span>
#include <utility>

#include "base/hash.hpp"
#include "base/memory.hpp"
#include "base/simd_clones.hpp"
#include "model/tile_kernel.hpp"

namespace statepack {
namespace {

constexpr std::size_t kEndRun = 64 << 10, kMiddleRun = 4 << 10, kMiddleRuns = 16;
// Checkpoints up to this size are read once as a whole in search of NaN and Inf, at the speed of
// memory; of larger ones only the sample runs are, because reading 160 GB takes minutes.
constexpr std::size_t kFullScanBytes = std::size_t{32} << 30;
constexpr std::size_t kScanPiece = 4 << 20;

// Largest exponent field among the values: all ones means NaN or Inf.
SP_CLONES std::uint32_t largest_exponent16(const std::uint16_t* x, std::size_t n,
                                           std::uint16_t mask) {
  std::uint16_t top = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto e = static_cast<std::uint16_t>(x[i] & mask);
    top = e > top ? e : top;
  }
  return top;
}
SP_CLONES std::uint32_t largest_exponent32(const std::uint32_t* x, std::size_t n) {
  std::uint32_t top = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t e = x[i] & 0x7f800000U;
    top = e > top ? e : top;
  }
  return top;
}

bool finite(DType dtype, const std::byte* bytes, std::size_t n_bytes) {
  if (dtype == DType::kF32) {
    const auto* x = reinterpret_cast<const std::uint32_t*>(bytes);
    return largest_exponent32(x, n_bytes / 4) != 0x7f800000U;
  }
  const std::uint16_t mask = dtype == DType::kBF16 ? 0x7f80 : 0x7c00;
  return largest_exponent16(reinterpret_cast<const std::uint16_t*>(bytes), n_bytes / 2, mask) !=
         mask;
}

std::size_t total_bytes(const Checkpoint& checkpoint) {
  std::size_t total = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) total += tensor.n_bytes;
  return total;
}

}  // namespace

Weights::Weights(Checkpoint checkpoint, std::string label, ThreadPool& threads,
                 std::int64_t spare_bytes)
    : checkpoint_(std::move(checkpoint)),
      label_(std::move(label)),
      threads_(threads),
      scan_all_(total_bytes(checkpoint_) <= kFullScanBytes),
      copy_all_(static_cast<std::int64_t>(total_bytes(checkpoint_)) <=
                (available_bytes() - spare_bytes) / 2) {}

Result<TensorView> Weights::get(const std::string& name, const std::vector<std::int64_t>& shape) {
  SP_ASSIGN_OR_RETURN(TensorView tensor, checkpoint_.get(name, shape));
  if (tensor.dtype != DType::kF32 && tensor.dtype != DType::kBF16 && tensor.dtype != DType::kF16) {
    return Status(Code::kUnsupported, label_ + ": tensor '" + name + "' has dtype " +
                                          std::string(dtype_name(tensor.dtype)) +
                                          "; weights must be BF16, F16 or F32");
  }
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % dtype_bytes(tensor.dtype) != 0) {
    aligned_copies_.emplace_back(new std::byte[tensor.n_bytes]);
    std::memcpy(aligned_copies_.back().get(), tensor.data, tensor.n_bytes);
    tensor.data = aligned_copies_.back().get();
  }
  SP_RETURN_IF_ERROR(check_finite(tensor));
  bytes_used_ += static_cast<std::int64_t>(tensor.n_bytes);
  return tensor;
}

Status Weights::check_finite(const TensorView& tensor) const {
  std::vector<std::pair<std::size_t, std::size_t>> runs;  // (begin, bytes)
  if (scan_all_) {
    for (std::size_t at = 0; at < tensor.n_bytes; at += kScanPiece) {
      runs.emplace_back(at, std::min(kScanPiece, tensor.n_bytes - at));
    }
  } else {
    runs = sample_runs(tensor.n_bytes);
  }
  std::atomic<bool> all_finite{true};
  threads_.parallel_for(static_cast<std::int64_t>(runs.size()), [&](std::int64_t i, int) {
    const auto [begin, n] = runs[static_cast<std::size_t>(i)];
    if (!finite(tensor.dtype, tensor.data + begin, n)) all_finite = false;
  });
  if (all_finite) return {};
  return Status(Code::kNotFinite, label_ + ": tensor '" + tensor.name +
                                      "' holds NaN or Inf; the checkpoint is damaged, download it "
                                      "again");
}

Result<Linear> Weights::table(const std::string& name, std::int64_t n_out, std::int64_t n_in) {
  SP_ASSIGN_OR_RETURN(const TensorView tensor, get(name, {n_out, n_in}));
  return Linear(tensor.dtype, tensor.data, n_out, n_in);
}

Result<Linear> Weights::matrix(const std::string& name, std::int64_t n_out, std::int64_t n_in) {
  SP_ASSIGN_OR_RETURN(const Linear stored, table(name, n_out, n_in));
  return for_products(stored);
}

Linear Weights::for_products(const Linear& stored) {
  if (!copy_all_) return stored;
  Linear copied = stored.in_tiles(threads_);
  if (copied.tiles() != nullptr) {
    bytes_used_ += tile_kernel::weight_bytes(copied.n_out(), copied.n_in());
  }
  return copied;
}

Result<std::vector<Linear>> Weights::matrices(const std::string& name, std::int64_t n,
                                              std::int64_t n_out, std::int64_t n_in) {
  SP_ASSIGN_OR_RETURN(const TensorView tensor, get(name, {n, n_out, n_in}));
  const Linear all = for_products(Linear(tensor.dtype, tensor.data, n * n_out, n_in));
  std::vector<Linear> out;
  for (std::int64_t i = 0; i < n; ++i) out.push_back(all.rows(i * n_out, n_out));
  return out;
}

Result<std::vector<float>> Weights::values(const std::string& name,
                                           const std::vector<std::int64_t>& shape) {
  SP_ASSIGN_OR_RETURN(const TensorView tensor, get(name, shape));
  return to_f32(tensor);
}

Result<std::vector<float>> Weights::norm(const std::string& name, std::int64_t n,
                                         bool zero_centred) {
  SP_ASSIGN_OR_RETURN(std::vector<float> w, values(name, {n}));
  if (zero_centred) {
    for (float& x : w) x += 1;
  }
  return w;
}

std::vector<std::pair<std::size_t, std::size_t>> sample_runs(std::size_t n_bytes) {
  if (n_bytes <= 2 * kEndRun + kMiddleRuns * kMiddleRun) return {{0, n_bytes}};
  std::vector<std::pair<std::size_t, std::size_t>> runs{{0, kEndRun}};
  const std::size_t middle = n_bytes - 2 * kEndRun;
  for (std::size_t i = 0; i < kMiddleRuns; ++i) {
    const std::size_t at = kEndRun + middle / kMiddleRuns * i;
    runs.emplace_back(at / 64 * 64, kMiddleRun);
  }
  const std::size_t last = (n_bytes - kEndRun) / 64 * 64;
  runs.emplace_back(last, n_bytes - last);
  return runs;
}

std::string fingerprint(const Checkpoint& checkpoint, const std::string& config_text) {
  Sha256 hash;
  hash.update(config_text);
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    hash.update("\n" + name + " " + std::string(dtype_name(tensor.dtype)) + " " +
                tensor.shape_string());
    for (const auto& [begin, n] : sample_runs(tensor.n_bytes)) {
      const Hash128 run = xxh3_128(std::span(tensor.data + begin, n));
      hash.update(std::as_bytes(std::span(run)));
    }
  }
  return hash.hex();
}

}  // namespace statepack
