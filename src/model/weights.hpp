// The tensors of a checkpoint as layers ask for them: checked for name, shape, dtype and
// finiteness.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/safetensors.hpp"
#include "base/thread_pool.hpp"
#include "model/linear.hpp"
#include "statepack/status.hpp"

namespace statepack {

/// Keeps the checkpoint mapped: layers point into it and must not outlive it.
class Weights {
 public:
  /// `label` names the checkpoint in errors; `spare_bytes` as Model::load() has them.
  Weights(Checkpoint checkpoint, std::string label, ThreadPool& threads, std::int64_t spare_bytes);

  bool has(const std::string& name) const { return checkpoint_.find(name) != nullptr; }
  const Checkpoint& checkpoint() const { return checkpoint_; }
  const std::string& label() const { return label_; }
  /// Of all tensors asked for, and of all copies of them.
  std::int64_t bytes_used() const { return bytes_used_; }

  /// A matrix as stored, whose rows are looked up. Errors: kNotFound, kMismatch (shape),
  /// kUnsupported (dtype), kNotFinite (a NaN or Inf weight), naming the tensor.
  Result<Linear> table(const std::string& name, std::int64_t n_out, std::int64_t n_in);
  /// A matrix to multiply with: table() and for_products(). Errors: as table().
  Result<Linear> matrix(const std::string& name, std::int64_t n_out, std::int64_t n_in);
  /// The same weights in the order that products are fastest in. That is a copy, which is made
  /// where all weights together take at most half of the memory that there is to spare.
  Linear for_products(const Linear& stored);
  /// E matrices stored as one tensor [E, n_out, n_in]. Errors: as table().
  Result<std::vector<Linear>> matrices(const std::string& name, std::int64_t n, std::int64_t n_out,
                                       std::int64_t n_in);
  /// A small tensor, widened. Errors: as table().
  Result<std::vector<float>> values(const std::string& name,
                                    const std::vector<std::int64_t>& shape);
  /// Weights of a norm as factors: 1 + w when the norm is zero-centred, else w.
  Result<std::vector<float>> norm(const std::string& name, std::int64_t n, bool zero_centred);

 private:
  /// The tensor at an address that its elements may be read from.
  Result<TensorView> get(const std::string& name, const std::vector<std::int64_t>& shape);
  Status check_finite(const TensorView& tensor) const;

  Checkpoint checkpoint_;
  std::string label_;
  ThreadPool& threads_;
  bool scan_all_, copy_all_;
  std::int64_t bytes_used_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> aligned_copies_;
};

/// Runs of a tensor's bytes that stand for the whole: its first and last 64 KiB and 16 evenly
/// spaced runs of 4 KiB, or all of it when it is small. Offsets are multiples of 64.
std::vector<std::pair<std::size_t, std::size_t>> sample_runs(std::size_t n_bytes);

/// Identity of a model's content, 64 hex digits: SHA-256 over `config_text` and, for every tensor
/// of the checkpoint in the order of names, its name, dtype, shape and the XXH3-128 of its
/// sample_runs. Independent of how the checkpoint is cut into files.
std::string fingerprint(const Checkpoint& checkpoint, const std::string& config_text);

}  // namespace statepack
