/* StatePack in C on an NVIDIA GPU: the calls of statepack.h for slots in device memory. In
 * libraries that were built with SP_CUDA.
 *
 * sp_cuda_step, sp_cuda_flush, sp_cuda_hand_over and sp_cuda_restore_dense queue kernels on a
 * stream (a cudaStream_t; NULL is the default stream) of the device on which the pool was made, and
 * return: nothing is allocated, nothing waits, so they can be captured in a graph. Their arrays,
 * slots included, are in device memory. Those of one pool must be ordered, by one stream or by
 * events: they share its bookkeeping. All other calls wait until the device is idle; the pool's
 * device must be the current one.
 */
#ifndef STATEPACK_CUDA_H
#define STATEPACK_CUDA_H

#include "statepack/statepack.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sp_cuda_pool sp_cuda_pool;

typedef struct sp_cuda_pool_config {
  size_t struct_size;
  int32_t max_rows;    /* most rows of a step, and slots of a flush */
  int32_t reserved;    /* 0 */
  int64_t n_slots;     /* usable slots, numbered 1 .. n_slots */
  int64_t conv_floats; /* f32 of short-convolution history a slot carries */
} sp_cuda_pool_config;

/* Takes all memory of the current device at once. SP_EXHAUSTED; SP_UNSUPPORTED for schemes and
 * shapes without kernels: K and V must be multiples of 16 up to 128 and V at most 2 K, windows hold
 * at most 32 records. */
sp_code sp_cuda_pool_create(const sp_scheme* scheme, const sp_cuda_pool_config* config,
                            sp_cuda_pool** pool);
void sp_cuda_pool_destroy(sp_cuda_pool* pool); /* NULL is allowed */
int64_t sp_cuda_pool_n_free(const sp_cuda_pool* pool);
int64_t sp_cuda_pool_bytes_allocated(const sp_cuda_pool* pool);

/* As the calls of the same name in statepack.h. A snapshot may come from either kind of pool. */
sp_code sp_cuda_slot_alloc(sp_cuda_pool* pool, int64_t* slot);
sp_code sp_cuda_slot_free(sp_cuda_pool* pool, int64_t slot);
sp_code sp_cuda_slot_get_state(const sp_cuda_pool* pool, int64_t slot, sp_slot_state* state);
sp_code sp_cuda_slot_copy(sp_cuda_pool* pool, int64_t from, int64_t to);
sp_code sp_cuda_slot_snapshot(const sp_cuda_pool* pool, int64_t slot, int with_windows,
                              sp_snapshot** snapshot);
sp_code sp_cuda_slot_restore(sp_cuda_pool* pool, int64_t slot, const void* data, size_t n_bytes);
/* The slot's convolution history [conv_floats], on the device. */
sp_code sp_cuda_slot_conv(sp_cuda_pool* pool, int64_t slot, float** conv);

/* As sp_step. What a host would have to look at is not refused: a row whose slot does not exist
 * gets NaN output and touches nothing; a slot that two rows write, or one writes and another reads,
 * is left undefined. A value that is not finite quarantines the slot and its head's output is NaN
 * (with plain values at period 1, its 32 columns'); the row's other heads may still give numbers in
 * that step, and may have been written where a page was being rewritten. From the next step on the
 * whole row is NaN. `positions` is not read.
 */
sp_code sp_cuda_step(sp_cuda_pool* pool, const sp_step_args* args, void* stream);

/* Rounds the open windows of n_slots listed slots (int64) of one layer now. A slot listed twice is
 * left undefined. */
sp_code sp_cuda_flush(sp_cuda_pool* pool, int32_t layer, const int64_t* slots, int32_t n_slots,
                      void* stream);

/* Dense states [HV][K][V] of one layer become a slot's page, and the reverse. A state that is not
 * finite quarantines the slot; one that is quarantined restores as NaN. */
sp_code sp_cuda_hand_over(sp_cuda_pool* pool, int32_t layer, int64_t slot, const float* S,
                          int64_t n_tokens, void* stream);
sp_code sp_cuda_restore_dense(sp_cuda_pool* pool, int32_t layer, int64_t slot, float* S,
                              void* stream);

#ifdef __cplusplus
}
#endif

#endif
