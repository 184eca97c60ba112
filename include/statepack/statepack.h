/* StatePack in C: packed recurrent states of gated delta-rule layers (Gated DeltaNet, Kimi Delta
 * Attention) for any runtime that can call C.
 *
 *   sp_scheme   how states are kept, compiled for the layers of one model; immutable
 *   sp_pool     the slots of one device, allocated once; one slot a sequence
 *   sp_step     one token of a batch of slots through one layer
 *
 * Letters: B rows of a batch, H key heads, HV value heads (a multiple of H; value head h reads key
 * head h / (HV / H)), K key width, V value width. Every number is f32 unless said otherwise.
 *
 * Every function that can fail returns an sp_code; sp_last_error() then holds one sentence that
 * says what was wrong, where, and how to mend it. Nothing prints, exits or throws. Handles may be
 * shared by threads; a slot belongs to whoever allocated it, and two threads must not use one slot
 * at the same time. Structs start with their own size, which the caller sets: `.struct_size =
 * sizeof s`. Whatever takes a value of an enum is an int32_t, so that a wrong one can be refused.
 */
#ifndef STATEPACK_STATEPACK_H
#define STATEPACK_STATEPACK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. A library serves callers of its own version only: compare with
 * sp_api_version(). */
#define SP_API_VERSION 1
int sp_api_version(void);

/* What kind of failure. Numbers are never reused. */
typedef enum sp_code {
  SP_OK = 0,
  SP_INVALID_ARGUMENT = 1, /* a flag, shape or pointer of the caller is wrong */
  SP_NOT_FOUND = 2,        /* a file does not exist */
  SP_CORRUPT = 3,          /* bytes from outside break their own format */
  SP_UNSUPPORTED = 4,      /* well formed, but not something this build can do */
  SP_MISMATCH = 5,         /* two well-formed things do not belong together */
  SP_EXHAUSTED = 6,        /* no slot or memory is left */
  SP_NOT_FINITE = 7,       /* NaN or Inf in a state */
  SP_IO = 8,               /* the operating system refused a read or write */
  SP_INTERRUPTED = 9
} sp_code;

/* "invalid_argument" and so on. */
const char* sp_code_name(int code);
/* Why this thread's last call failed; "" when it succeeded. Valid until its next call. */
const char* sp_last_error(void);

/* ---------------------------------------------------------------------------------------------
 * Schemes: "int8", "stepquant:4,period=16,records=int8", "leapquant:8", ...
 */

typedef enum sp_gate {
  SP_GATE_SCALAR = 0, /* one decay a head (Gated DeltaNet) */
  SP_GATE_CHANNEL = 1 /* one decay a key channel (Kimi Delta Attention) */
} sp_gate;

/* The recurrent heads of one layer. */
typedef struct sp_layer_shape {
  int32_t n_key_heads;   /* H */
  int32_t n_value_heads; /* HV */
  int32_t K;
  int32_t V;
  int32_t gate; /* an sp_gate */
} sp_layer_shape;

/* Bytes of one slot, all layers, and bits per state value. */
typedef struct sp_bits {
  size_t struct_size;
  double payload_bits;  /* packed pages: what a cached prefix costs */
  double resident_bits; /* pages, windows and cursors: what a running sequence costs */
  int64_t page_bytes;
  int64_t window_bytes;
  int64_t cursor_bytes;
  int64_t n_values;
} sp_bits;

typedef struct sp_scheme sp_scheme;

/* Checks a scheme name and prints it: the shortest form, or every option when `full` is not 0.
 * `text` may be NULL to ask for the size alone; `n_needed` (may be NULL) receives it, the final 0
 * included. SP_INVALID_ARGUMENT also when `capacity` is too small; nothing is written then. */
sp_code sp_scheme_print(const char* name, int full, char* text, size_t capacity, size_t* n_needed);

/* Compiles a scheme for the recurrent layers of a model, in their order. `plan_path` names a
 * calibrated plan, or is NULL for schemes that need none; `model_fingerprint` identifies the
 * checkpoint, or is NULL to skip that check. */
sp_code sp_scheme_compile(const char* name, const sp_layer_shape* layers, int32_t n_layers,
                          const char* plan_path, const char* model_fingerprint, sp_scheme** scheme);
/* Pools keep what they need: a scheme may be destroyed before them. NULL is allowed. */
void sp_scheme_destroy(sp_scheme* scheme);
sp_code sp_scheme_bits(const sp_scheme* scheme, sp_bits* bits);
/* What one slot of a pool takes, bookkeeping included, before a pool is made. */
sp_code sp_scheme_bytes_per_slot(const sp_scheme* scheme, int64_t conv_floats, int64_t* n_bytes);

/* ---------------------------------------------------------------------------------------------
 * Pools
 */

typedef enum sp_device {
  SP_DEVICE_CPU = 0 /* pointers are host pointers; others will come behind the same calls */
} sp_device;

typedef struct sp_pool_config {
  size_t struct_size;
  int32_t device;       /* an sp_device */
  int32_t device_index; /* 0 */
  int32_t n_threads;    /* that work on a step; 0: all cores of the process */
  int64_t n_slots;      /* usable slots, numbered 1 .. n_slots */
  int64_t conv_floats;  /* f32 of short-convolution history a slot carries; 0 when kept elsewhere */
  int64_t max_bytes;    /* most that the pool may take; 0: what the machine has left */
} sp_pool_config;

typedef enum sp_slot_state {
  SP_SLOT_FREE = 0,
  SP_SLOT_USED = 1,
  SP_SLOT_QUARANTINED = 2 /* a value was not finite; free it */
} sp_slot_state;

typedef struct sp_pool sp_pool;

/* Takes all memory at once. SP_EXHAUSTED names the number of slots that would fit. */
sp_code sp_pool_create(const sp_scheme* scheme, const sp_pool_config* config, sp_pool** pool);
void sp_pool_destroy(sp_pool* pool); /* NULL is allowed */
int64_t sp_pool_n_slots(const sp_pool* pool);
int64_t sp_pool_n_free(const sp_pool* pool);
int64_t sp_pool_bytes_allocated(const sp_pool* pool);
int64_t sp_pool_nonfinite_total(const sp_pool* pool); /* slots quarantined so far */

/* A slot with everything zeroed. SP_EXHAUSTED when none is free. */
sp_code sp_slot_alloc(sp_pool* pool, int64_t* slot);
/* SP_INVALID_ARGUMENT for a slot that is free already. */
sp_code sp_slot_free(sp_pool* pool, int64_t slot);
sp_code sp_slot_get_state(const sp_pool* pool, int64_t slot, sp_slot_state* state);
sp_code sp_slot_get_tokens(const sp_pool* pool, int64_t slot, int64_t* n_tokens);
sp_code sp_slot_set_tokens(sp_pool* pool, int64_t slot, int64_t n_tokens);
/* The slot's convolution history [conv_floats], for the caller to read and write. SP_UNSUPPORTED
 * for schemes that do not keep it in f32 (conv=bf16). */
sp_code sp_slot_conv(sp_pool* pool, int64_t slot, float** conv);
/* Everything that `from` owns. */
sp_code sp_slot_copy(sp_pool* pool, int64_t from, int64_t to);

/* An immutable copy of a slot with its open windows, or (`with_windows` 0, after sp_flush) of its
 * pages alone. Restoring it continues bit for bit, in any pool of the same scheme, plan and model.
 */
typedef struct sp_snapshot sp_snapshot;
sp_code sp_slot_snapshot(const sp_pool* pool, int64_t slot, int with_windows,
                         sp_snapshot** snapshot);
const void* sp_snapshot_data(const sp_snapshot* snapshot, size_t* n_bytes);
void sp_snapshot_destroy(sp_snapshot* snapshot); /* NULL is allowed */
/* `data` may come from anywhere: every field is checked before the slot changes. */
sp_code sp_slot_restore(sp_pool* pool, int64_t slot, const void* data, size_t n_bytes);
/* The file appears whole or not at all. */
sp_code sp_slot_save(const sp_pool* pool, int64_t slot, const char* path);
sp_code sp_slot_load(sp_pool* pool, int64_t slot, const char* path);

/* ---------------------------------------------------------------------------------------------
 * States
 */

/* How a dense state lies in memory; V or K contiguous. */
typedef enum sp_layout {
  SP_LAYOUT_KEY_MAJOR = 0,  /* [HV][K][V] */
  SP_LAYOUT_VALUE_MAJOR = 1 /* [HV][V][K], as vLLM and SGLang keep them */
} sp_layout;

/* Dense states of one layer become a slot's page; its window empties. `head_stride` in floats; 0:
 * K * V; `layout` is an sp_layout. `n_tokens` are the tokens read so far. A state that is not
 * finite quarantines the slot and returns SP_NOT_FINITE. */
sp_code sp_hand_over(sp_pool* pool, int32_t layer, int64_t slot, const float* S, int32_t layout,
                     int64_t head_stride, int64_t n_tokens);
/* The reverse: the state that the next token will see, page and window. */
sp_code sp_restore_dense(sp_pool* pool, int32_t layer, int64_t slot, float* S, int32_t layout,
                         int64_t head_stride);

typedef enum sp_slot_type { SP_SLOTS_I64 = 0, SP_SLOTS_I32 = 1 } sp_slot_type;

typedef enum sp_gates {
  SP_GATES_FINISHED = 0, /* g = log decay <= 0, beta in [0, 1] */
  SP_GATES_RAW = 1       /* g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b) */
} sp_gates;

/* One token of every row. Strides are in floats between rows, so that q, k and v may be views of
 * one fused row; the heads of a row are contiguous. */
typedef struct sp_step_args {
  size_t struct_size;
  int32_t layer;  /* recurrent layer, from 0 */
  int32_t n_rows; /* B */
  /* [B] of slot_type. Rows whose slots are below first_valid_slot are padding: their output is
   * exactly 0 whatever their inputs are, and nothing is written. write_slots NULL: where it was
   * read; else the result goes there and the read slot stays as it is (copy on write). */
  const void* read_slots;
  const void* write_slots;
  int32_t slot_type;        /* an sp_slot_type */
  int32_t normalise;        /* not 0: q and k are raw; x rsqrt(sum x^2 + 1e-6), then q K^-1/2 */
  int64_t first_valid_slot; /* at least 1: slot 0 is no slot of this pool */
  const float* q;           /* [B, H, K] */
  const float* k;           /* [B, H, K] */
  const float* v;           /* [B, HV, V] */
  int64_t q_stride, k_stride, v_stride;
  int32_t gates;        /* an sp_gates */
  int32_t reserved;     /* 0 */
  const float* g;       /* finished: [B, HV] or, per channel, [B, HV, K]; raw: a, the same shape */
  const float* beta;    /* finished: [B, HV]; raw: b */
  const float* A_log;   /* raw: [HV] */
  const float* dt_bias; /* raw: [HV] or [HV, K] */
  /* Raw gates of models with a bounded decay: g = lower_bound sigmoid(exp(A_log) (a + dt_bias)), a
   * negative number; 0: unbounded. */
  float lower_bound;
  float reserved_2; /* 0 */
  int64_t g_stride, beta_stride;
  float* out; /* [B, HV, V] */
  int64_t out_stride;
  const int64_t* positions; /* [B] of the tokens; NULL is allowed but for rounding=stochastic */
} sp_step_args;

/* S' = exp(g) S;  u = beta (v - S'^T k);  S = S' + k u^T;  out = S^T q, before S is rounded.
 * Windows that become complete are rounded and packed. A row's result does not depend on the other
 * rows, on B, on threads or on slot numbers, bit for bit. A row whose values are not finite gets
 * NaN output and its slot is quarantined and not written. SP_INVALID_ARGUMENT (nothing is done) for
 * a slot out of range, or one that two rows write, or one row writes and another reads. */
sp_code sp_step(sp_pool* pool, const sp_step_args* args);

/* Rounds and packs the open windows of the listed slots [n_slots] of `slot_type` now, in one layer,
 * or in all when `layer` is -1. */
sp_code sp_flush(sp_pool* pool, int32_t layer, const void* slots, int32_t slot_type,
                 int32_t n_slots);

#ifdef __cplusplus
}
#endif

#endif
