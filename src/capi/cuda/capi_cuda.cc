// The C API of device pools.
#include "capi/handles.hpp"
#include "pool/cuda/device_pool.hpp"
#include "statepack/cuda.h"

using statepack::Code;
using statepack::Gate;
using statepack::Result;
using statepack::Status;
using statepack::capi::guarded;
using statepack::capi::invalid;
using statepack::capi::need;
using statepack::capi::need_struct;
using statepack::cuda::DevicePool;

struct sp_cuda_pool {
  std::unique_ptr<DevicePool> slots;
};

namespace {

Status need_layer(const sp_cuda_pool* pool, std::int32_t layer) {
  SP_RETURN_IF_ERROR(need(pool, "pool"));
  return statepack::capi::need_layer(pool->slots->scheme(), layer);
}

Status run_step(const sp_cuda_pool* pool, const sp_step_args* args, void* stream) {
  SP_RETURN_IF_ERROR(need(pool, "pool"));
  SP_RETURN_IF_ERROR(statepack::capi::check_step_args(args, pool->slots->scheme()));
  if (args->n_rows == 0) return {};
  if (args->slot_type != SP_SLOTS_I64 && args->slot_type != SP_SLOTS_I32) {
    return invalid("slot_type " + std::to_string(args->slot_type) +
                   " is neither SP_SLOTS_I64 nor SP_SLOTS_I32");
  }
  statepack::cuda::TokenView token;
  token.n_rows = args->n_rows;
  token.read_slots = args->read_slots;
  token.write_slots = args->write_slots;
  token.wide_slots = args->slot_type == SP_SLOTS_I64;
  token.first_valid_slot = args->first_valid_slot;
  token.q = args->q, token.q_stride = args->q_stride;
  token.k = args->k, token.k_stride = args->k_stride;
  token.v = args->v, token.v_stride = args->v_stride;
  token.g = args->g, token.g_stride = args->g_stride;
  token.beta = args->beta, token.beta_stride = args->beta_stride;
  token.normalise = args->normalise != 0;
  token.raw_gates = args->gates == SP_GATES_RAW;
  token.A_log = args->A_log;
  token.dt_bias = args->dt_bias;
  token.lower_bound = token.raw_gates ? args->lower_bound : 0.0f;
  token.out = args->out, token.out_stride = args->out_stride;
  const DevicePool& slots = *pool->slots;
  return slots.kernels(args->layer)
      .step(slots.layer(args->layer), token, slots.workspace(), stream);
}

}  // namespace

extern "C" {

sp_code sp_cuda_pool_create(const sp_scheme* scheme, const sp_cuda_pool_config* config,
                            sp_cuda_pool** pool) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(scheme, "scheme"));
    SP_RETURN_IF_ERROR(need_struct(config, "config"));
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    if (config->reserved != 0) return invalid("the reserved field of config must be 0");
    SP_ASSIGN_OR_RETURN(auto made,
                        DevicePool::create(scheme->compiled, {.n_slots = config->n_slots,
                                                              .conv_floats = config->conv_floats,
                                                              .max_rows = config->max_rows}));
    *pool = new sp_cuda_pool{std::move(made)};
    return {};
  });
}

void sp_cuda_pool_destroy(sp_cuda_pool* pool) { delete pool; }

int64_t sp_cuda_pool_n_free(const sp_cuda_pool* pool) {
  return pool == nullptr ? 0 : pool->slots->n_free();
}

int64_t sp_cuda_pool_bytes_allocated(const sp_cuda_pool* pool) {
  return pool == nullptr ? 0 : pool->slots->bytes_allocated();
}

sp_code sp_cuda_slot_alloc(sp_cuda_pool* pool, int64_t* slot) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(slot, "slot"));
    SP_ASSIGN_OR_RETURN(*slot, pool->slots->alloc());
    return {};
  });
}

sp_code sp_cuda_slot_free(sp_cuda_pool* pool, int64_t slot) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    return pool->slots->try_free(slot);
  });
}

sp_code sp_cuda_slot_get_state(const sp_cuda_pool* pool, int64_t slot, sp_slot_state* state) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(state, "state"));
    SP_ASSIGN_OR_RETURN(const statepack::SlotState found, pool->slots->state(slot));
    *state = static_cast<sp_slot_state>(found);
    return {};
  });
}

sp_code sp_cuda_slot_copy(sp_cuda_pool* pool, int64_t from, int64_t to) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    return pool->slots->copy(from, to);
  });
}

sp_code sp_cuda_slot_snapshot(const sp_cuda_pool* pool, int64_t slot, int with_windows,
                              sp_snapshot** snapshot) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(snapshot, "snapshot"));
    SP_ASSIGN_OR_RETURN(auto taken, pool->slots->snapshot(slot, with_windows != 0));
    *snapshot = new sp_snapshot{std::move(taken)};
    return {};
  });
}

sp_code sp_cuda_slot_restore(sp_cuda_pool* pool, int64_t slot, const void* data, size_t n_bytes) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(data, "data"));
    return pool->slots->restore(slot, {static_cast<const std::byte*>(data), n_bytes});
  });
}

sp_code sp_cuda_slot_conv(sp_cuda_pool* pool, int64_t slot, float** conv) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(conv, "conv"));
    SP_RETURN_IF_ERROR(pool->slots->need_used(slot));
    *conv = pool->slots->conv(slot);
    return {};
  });
}

sp_code sp_cuda_step(sp_cuda_pool* pool, const sp_step_args* args, void* stream) {
  return guarded([&] { return run_step(pool, args, stream); });
}

sp_code sp_cuda_flush(sp_cuda_pool* pool, int32_t layer, const int64_t* slots, int32_t n_slots,
                      void* stream) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need_layer(pool, layer));
    const DevicePool& from = *pool->slots;
    return from.kernels(layer).flush(from.layer(layer), slots, n_slots, from.workspace(), stream);
  });
}

sp_code sp_cuda_hand_over(sp_cuda_pool* pool, int32_t layer, int64_t slot, const float* S,
                          int64_t n_tokens, void* stream) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need_layer(pool, layer));
    const DevicePool& to = *pool->slots;
    SP_RETURN_IF_ERROR(to.need_used(slot));
    return to.kernels(layer).hand_over(to.layer(layer), slot, S, n_tokens, to.workspace(), stream);
  });
}

sp_code sp_cuda_restore_dense(sp_cuda_pool* pool, int32_t layer, int64_t slot, float* S,
                              void* stream) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need_layer(pool, layer));
    const DevicePool& from = *pool->slots;
    SP_RETURN_IF_ERROR(from.need_used(slot));
    return from.kernels(layer).restore_dense(from.layer(layer), slot, S, from.workspace(), stream);
  });
}

}  // extern "C"
