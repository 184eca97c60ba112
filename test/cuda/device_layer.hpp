// A layer of slots on the CPU and its copy on the device.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "../delta/harness.hpp"
#include "delta/cuda/device.hpp"

namespace statepack::test {

/// The value of a Result that must have one.
template <class T>
T expect_value(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().message());
  return std::move(result).value();
}
inline void expect_ok(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

inline constexpr std::uint8_t kCanary = 0xa7;

/// Slots in device memory with the strides of a OneLayer, and the kernels of its layer.
class DeviceSlots {
 public:
  explicit DeviceSlots(OneLayer& host, int max_rows = 64)
      : host_(host),
        layer_(expect_value(cuda::DeviceLayer::make(host.layer, host.scheme))),
        work_(expect_value(cuda::Workspace::make(max_rows))),
        pages_(bytes(host.n_slots * host.page_stride)),
        windows_(bytes(host.n_slots * host.window_stride)),
        cursors_(bytes(host.n_slots * static_cast<std::int64_t>(sizeof(Cursor)))),
        faults_(bytes(host.n_slots * 4)) {}

  static cuda::DeviceBytes bytes(std::int64_t n) {
    return expect_value(cuda::DeviceBytes::make(static_cast<std::size_t>(n)));
  }
  template <class T>
  static cuda::DeviceBytes copy(const std::vector<T>& values) {
    return expect_value(cuda::upload(std::span(values)));
  }

  const cuda::DeviceLayer& layer() const { return *layer_; }
  const cuda::Workspace& work() const { return work_; }
  cuda::PoolView pool() const {
    return {.pages = pages_.data(),
            .windows = windows_.data(),
            .cursors = reinterpret_cast<Cursor*>(cursors_.data()),
            .faults = reinterpret_cast<std::uint32_t*>(faults_.data()),
            .page_stride = host_.page_stride,
            .window_stride = host_.window_stride,
            .cursor_stride = sizeof(Cursor),
            .fault_stride = 4,
            .n_slots = host_.n_slots};
  }

  /// Everything of the host's layer to the device ...
  void push(OneLayer& from) {
    const LayerState s = from.state();
    expect_ok(cuda::copy_to_device(pages_.data(), s.pages, pages_.size()));
    expect_ok(cuda::copy_to_device(windows_.data(), s.windows, windows_.size()));
    expect_ok(cuda::copy_to_device(cursors_.data(), s.cursors, cursors_.size()));
    expect_ok(cuda::copy_to_device(faults_.data(), s.faults, faults_.size()));
  }
  /// ... and back.
  void pull(OneLayer& to) const {
    const LayerState s = to.state();
    expect_ok(cuda::copy_to_host(s.pages, pages_.data(), pages_.size()));
    expect_ok(cuda::copy_to_host(s.windows, windows_.data(), windows_.size()));
    expect_ok(cuda::copy_to_host(s.cursors, cursors_.data(), cursors_.size()));
    expect_ok(cuda::copy_to_host(s.faults, faults_.data(), faults_.size()));
  }

  /// One token of every row of `batch` through the device; fills batch.out.
  void step(Batch& batch, const std::vector<std::int64_t>* write_slots = nullptr,
            bool narrow = false) {
    const auto q = copy(batch.q), k = copy(batch.k), v = copy(batch.v), g = copy(batch.g),
               beta = copy(batch.beta);
    const auto out = copy(batch.out);
    const std::vector<std::int32_t> narrow_slots(batch.slots.begin(), batch.slots.end());
    const auto slots = narrow ? copy(narrow_slots) : copy(batch.slots);
    cuda::DeviceBytes writes;
    if (write_slots != nullptr) writes = copy(*write_slots);
    const LayerShape& s = batch.shape;
    const auto floats = [](const cuda::DeviceBytes& from) {
      return reinterpret_cast<const float*>(from.data());
    };
    cuda::TokenView token;
    token.n_rows = batch.n_rows;
    token.read_slots = slots.data();
    token.write_slots = writes.data();
    token.wide_slots = !narrow;
    token.q = floats(q), token.k = floats(k), token.v = floats(v);
    token.g = floats(g), token.beta = floats(beta);
    token.q_stride = token.k_stride = std::int64_t{s.n_key_heads} * s.K;
    token.v_stride = token.out_stride = std::int64_t{s.n_value_heads} * s.V;
    token.g_stride = std::int64_t{s.n_value_heads} * s.gate_width();
    token.beta_stride = s.n_value_heads;
    token.out = reinterpret_cast<float*>(out.data());
    expect_ok(layer_->step(pool(), token, work_, nullptr));
    expect_ok(cuda::copy_to_host(batch.out.data(), out.data(), out.size()));
  }
  void flush(const std::vector<std::int64_t>& slots) {
    const auto list = copy(slots);
    expect_ok(layer_->flush(pool(), reinterpret_cast<const std::int64_t*>(list.data()),
                            static_cast<int>(slots.size()), work_, nullptr));
  }
  void hand_over(std::int64_t slot, const std::vector<float>& S, std::int64_t n_tokens) {
    const auto dense = copy(S);
    expect_ok(layer_->hand_over(pool(), slot, reinterpret_cast<const float*>(dense.data()),
                                n_tokens, work_, nullptr));
    std::vector<float> wait(1);
    expect_ok(cuda::copy_to_host(wait.data(), dense.data(), 4));
  }
  std::vector<float> restore(std::int64_t slot) {
    std::vector<float> S(static_cast<std::size_t>(host_.layer.shape.n_values()));
    const auto dense = bytes(static_cast<std::int64_t>(S.size()) * 4);
    expect_ok(layer_->restore_dense(pool(), slot, reinterpret_cast<float*>(dense.data()), work_,
                                    nullptr));
    expect_ok(cuda::copy_to_host(S.data(), dense.data(), dense.size()));
    return S;
  }

 private:
  OneLayer& host_;
  std::unique_ptr<cuda::DeviceLayer> layer_;
  cuda::Workspace work_;
  cuda::DeviceBytes pages_, windows_, cursors_, faults_;
};

/// The token of a batch in device memory, for launches that a graph repeats.
struct DeviceToken {
  explicit DeviceToken(const Batch& batch)
      : q(DeviceSlots::copy(batch.q)),
        k(DeviceSlots::copy(batch.k)),
        v(DeviceSlots::copy(batch.v)),
        g(DeviceSlots::copy(batch.g)),
        beta(DeviceSlots::copy(batch.beta)),
        out(DeviceSlots::copy(batch.out)),
        slots(DeviceSlots::copy(batch.slots)) {
    const auto floats = [](const cuda::DeviceBytes& from) {
      return reinterpret_cast<float*>(from.data());
    };
    const LayerShape& s = batch.shape;
    view.n_rows = batch.n_rows;
    view.read_slots = slots.data();
    view.q = floats(q), view.k = floats(k), view.v = floats(v), view.g = floats(g);
    view.beta = floats(beta), view.out = floats(out);
    view.q_stride = view.k_stride = std::int64_t{s.n_key_heads} * s.K;
    view.v_stride = view.out_stride = std::int64_t{s.n_value_heads} * s.V;
    view.g_stride = std::int64_t{s.n_value_heads} * s.gate_width();
    view.beta_stride = s.n_value_heads;
  }
  void write(const Batch& batch) {
    const auto put = [](const cuda::DeviceBytes& to, const std::vector<float>& from) {
      expect_ok(cuda::copy_to_device(to.data(), from.data(), to.size()));
    };
    put(q, batch.q), put(k, batch.k), put(v, batch.v), put(g, batch.g), put(beta, batch.beta);
  }
  std::vector<float> read() const {
    std::vector<float> x(out.size() / 4);
    expect_ok(cuda::copy_to_host(x.data(), out.data(), out.size()));
    return x;
  }
  cuda::DeviceBytes q, k, v, g, beta, out, slots;
  cuda::TokenView view;
};

}  // namespace statepack::test
