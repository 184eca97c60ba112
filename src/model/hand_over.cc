// Between a prompt's dense state and a slot of the pool.
#include <algorithm>
#include <string>

#include "delta/step.hpp"
#include "model/model.hpp"

namespace statepack {
namespace {

Status check_sizes(StatePool& pool, std::int64_t slot, const DenseState& state) {
  std::int64_t n_floats = 0;
  for (const CompiledLayer& layer : pool.scheme().layers()) n_floats += layer.shape.n_values();
  if (static_cast<std::int64_t>(state.S.size()) != n_floats ||
      static_cast<std::int64_t>(state.conv.size()) != pool.conv_floats()) {
    return Status(Code::kMismatch, "the dense state does not have the sizes of the pool's slots");
  }
  if (slot < StatePool::kFirstValidSlot || slot > pool.n_slots()) {
    return Status(Code::kInvalidArgument, "slot " + std::to_string(slot) +
                                              " is not one of the pool's 1.." +
                                              std::to_string(pool.n_slots()));
  }
  return {};
}

}  // namespace

Status hand_over(StatePool& pool, std::int64_t slot, const DenseState& state, std::int64_t n_tokens,
                 ThreadPool& threads) {
  SP_RETURN_IF_ERROR(check_sizes(pool, slot, state));
  const float* S = state.S.data();
  for (std::size_t i = 0; i < pool.scheme().layers().size(); ++i) {
    const LayerState layer = pool.layer(static_cast<int>(i));
    SP_RETURN_IF_ERROR(hand_over(layer, slot, S, n_tokens, threads));
    S += layer.layer->shape.n_values();
  }
  pool.store_conv(slot, state.conv.data());
  pool.set_n_tokens(slot, n_tokens);
  return {};
}

Status restore_dense(StatePool& pool, std::int64_t slot, DenseState& state, ThreadPool& threads) {
  SP_RETURN_IF_ERROR(check_sizes(pool, slot, state));
  float* S = state.S.data();
  for (std::size_t i = 0; i < pool.scheme().layers().size(); ++i) {
    const LayerState layer = pool.layer(static_cast<int>(i));
    SP_RETURN_IF_ERROR(restore_dense(layer, slot, S, threads));
    S += layer.layer->shape.n_values();
  }
  pool.load_conv(slot, state.conv.data());
  return {};
}

Status round_dense(StatePool& pool, std::int64_t slot, DenseState& state, ThreadPool& threads) {
  SP_RETURN_IF_ERROR(check_sizes(pool, slot, state));
  float* S = state.S.data();
  for (std::size_t i = 0; i < pool.scheme().layers().size(); ++i) {
    const LayerState layer = pool.layer(static_cast<int>(i));
    SP_RETURN_IF_ERROR(hand_over(layer, slot, S, 0, threads));
    SP_RETURN_IF_ERROR(restore_dense(layer, slot, S, threads));
    S += layer.layer->shape.n_values();
  }
  return {};
}

}  // namespace statepack
