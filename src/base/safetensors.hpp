// The safetensors format: a bounds-checked reader over mapped files, and a writer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.hpp"
#include "statepack/status.hpp"

namespace statepack {

enum class DType : std::uint8_t { kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8, kBool };

std::string_view dtype_name(DType dtype);  ///< as safetensors spells it: "BF16"
std::size_t dtype_bytes(DType dtype);

/// One tensor inside a mapped file; row-major. `data` may be unaligned to the element size in files
/// made elsewhere: copy through memcpy or `to_f32`.
struct TensorView {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  const std::byte* data = nullptr;
  std::size_t n_bytes = 0;

  std::int64_t n_elements() const;
  std::string shape_string() const;  ///< "[2, 128]"
};

/// Widens F32, BF16 and F16 tensors to f32. Errors: kUnsupported for other dtypes.
Result<std::vector<float>> to_f32(const TensorView& tensor);

/// One safetensors file, mapped. Every offset, size, dtype and shape has been checked: overlaps,
/// gaps, overflowing products and ranges outside the file are refused (kCorrupt).
class SafeTensors {
 public:
  static Result<SafeTensors> open(const std::string& path);
  /// The same checks over bytes in memory (fuzzing, snapshots); `bytes` must outlive the result.
  static Result<SafeTensors> parse(std::span<const std::byte> bytes, const std::string& label);

  const std::string& label() const { return label_; }
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const TensorView* find(const std::string& name) const;
  /// Finds a tensor and checks its shape; -1 in `shape` takes any size. Errors: kNotFound,
  /// kMismatch naming file, tensor, found and wanted shape.
  Result<TensorView> get(const std::string& name, const std::vector<std::int64_t>& shape) const;

 private:
  std::string label_;
  std::shared_ptr<const MappedFile> file_;
  std::map<std::string, TensorView> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// A checkpoint: one file, or the shards named by an index (`*.safetensors.index.json`).
class Checkpoint {
 public:
  /// Takes `dir`/model.safetensors, or `dir`/model.safetensors.index.json and its shards (names
  /// with '/' or '..' are refused). Errors name the file and the tensor.
  static Result<Checkpoint> open(const std::string& dir);

  const TensorView* find(const std::string& name) const;
  Result<TensorView> get(const std::string& name, const std::vector<std::int64_t>& shape) const;
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }

 private:
  std::string dir_;
  std::vector<SafeTensors> shards_;
  std::map<std::string, TensorView> tensors_;
};

/// Collects tensors (copied) and writes them atomically. The data stand by falling element size,
/// then by name, so that every tensor is aligned; equal contents give equal bytes.
class SafeTensorsWriter {
 public:
  void set_metadata(const std::string& key, const std::string& value);
  void add(const std::string& name, DType dtype, std::vector<std::int64_t> shape,
           std::span<const std::byte> data);
  Status write(const std::string& path) const;
  std::string serialize() const;  ///< the bytes of the file

 private:
  struct Entry {
    DType dtype;
    std::vector<std::int64_t> shape;
    std::vector<std::byte> data;
  };
  /// Writes length and JSON to `header`; returns the entries in the order of their data.
  std::vector<const Entry*> layout(std::string& header) const;

  std::map<std::string, std::string> metadata_;
  std::map<std::string, Entry> entries_;
};

}  // namespace statepack
