// Any bytes: refused, or tensors that lie inside them and survive a rewrite.
#include "base/safetensors.hpp"

#include <cstring>

#include "base/check.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n_bytes) {
  using namespace statepack;
  const auto bytes = std::as_bytes(std::span(data, n_bytes));
  const auto file = SafeTensors::parse(bytes, "fuzz");
  if (!file.ok()) return 0;
  SafeTensorsWriter writer;
  for (const auto& [name, tensor] : file->tensors()) {
    SP_CHECK(tensor.data >= bytes.data() && tensor.data + tensor.n_bytes <= bytes.data() + n_bytes,
             "a tensor outside the file");
    writer.add(name, tensor.dtype, tensor.shape, std::span(tensor.data, tensor.n_bytes));
    (void)to_f32(tensor);
  }
  const std::string rewritten = writer.serialize();
  const auto again = SafeTensors::parse(std::as_bytes(std::span(rewritten)), "rewritten");
  SP_CHECK(again.ok() && again->tensors().size() == file->tensors().size(), "a rewrite is refused");
  for (const auto& [name, tensor] : file->tensors()) {
    const TensorView* copy = again->find(name);
    SP_CHECK(copy != nullptr && copy->dtype == tensor.dtype && copy->shape == tensor.shape &&
                 (tensor.n_bytes == 0 || std::memcmp(copy->data, tensor.data, tensor.n_bytes) == 0),
             "a rewrite changed a tensor");
  }
  return 0;
}
