/* The C API from C: a small decode through every call, and what wrong calls are told. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "statepack/statepack.h"

static int n_failed = 0;

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      ++n_failed;                                                                          \
      printf("%s:%d: failed: %s (%s)\n", __FILE__, __LINE__, #condition, sp_last_error()); \
    }                                                                                      \
  } while (0)

/* The call fails with this code, and its message contains this text. */
#define CHECK_ERROR(call, expected, text)                                              \
  do {                                                                                 \
    const sp_code code = (call);                                                       \
    if (code != (expected) || strstr(sp_last_error(), (text)) == NULL) {               \
      ++n_failed;                                                                      \
      printf("%s:%d: %s gave %s: %s\n", __FILE__, __LINE__, #call, sp_code_name(code), \
             sp_last_error());                                                         \
    }                                                                                  \
  } while (0)

enum { H = 2, HV = 4, K = 16, V = 24, B = 3 };

static const sp_layer_shape kLayers[2] = {{H, HV, K, V, SP_GATE_SCALAR},
                                          {H, HV, K, V, SP_GATE_CHANNEL}};

static float uniform(void) { return (float)rand() / (float)RAND_MAX; }

static void fill(float* x, size_t n, float lo, float hi) {
  for (size_t i = 0; i < n; ++i) x[i] = lo + (hi - lo) * uniform();
}

static sp_scheme* compile(const char* name) {
  sp_scheme* scheme = NULL;
  CHECK(sp_scheme_compile(name, kLayers, 2, NULL, "model", &scheme) == SP_OK);
  return scheme;
}

static sp_pool* make_pool(const char* name, int64_t n_slots) {
  sp_scheme* scheme = compile(name);
  sp_pool_config config = {
      .struct_size = sizeof config, .n_threads = 2, .n_slots = n_slots, .conv_floats = 5};
  sp_pool* pool = NULL;
  CHECK(sp_pool_create(scheme, &config, &pool) == SP_OK);
  sp_scheme_destroy(scheme); /* the pool keeps what it needs */
  return pool;
}

/* Buffers of one batch: raw inputs. */
typedef struct Batch {
  float q[B * H * K], k[B * H * K], v[B * HV * V], a[B * HV * K], b[B * HV];
  float A_log[HV], dt_bias[HV * K], out[B * HV * V];
} Batch;

static void fill_batch(Batch* batch) {
  fill(batch->q, B * H * K, -1, 1), fill(batch->k, B * H * K, -1, 1);
  fill(batch->v, B * HV * V, -1, 1), fill(batch->a, B * HV * K, -3, 3);
  fill(batch->b, B * HV, -2, 2), fill(batch->A_log, HV, -2, 0);
  fill(batch->dt_bias, HV * K, -1, 1), fill(batch->out, B * HV * V, 5, 6);
}

static sp_step_args step_args(Batch* batch, int32_t layer, const void* slots) {
  const int width = kLayers[layer].gate == SP_GATE_SCALAR ? 1 : K;
  sp_step_args args = {.struct_size = sizeof args,
                       .layer = layer,
                       .n_rows = B,
                       .read_slots = slots,
                       .slot_type = SP_SLOTS_I64,
                       .normalise = 1,
                       .first_valid_slot = 1,
                       .q = batch->q,
                       .k = batch->k,
                       .v = batch->v,
                       .q_stride = H * K,
                       .k_stride = H * K,
                       .v_stride = HV * V,
                       .gates = SP_GATES_RAW,
                       .g = batch->a,
                       .beta = batch->b,
                       .A_log = batch->A_log,
                       .dt_bias = batch->dt_bias,
                       .g_stride = HV * width,
                       .beta_stride = HV,
                       .out = batch->out,
                       .out_stride = HV * V};
  return args;
}

/* One row and head in double, from raw inputs, in place on S [K][V]. */
static void reference(const Batch* batch, int32_t layer, int row, int head, double lower_bound,
                      double* S, double* out) {
  const int scalar = kLayers[layer].gate == SP_GATE_SCALAR, kh = head / (HV / H);
  const float *q = batch->q + (row * H + kh) * K, *k = batch->k + (row * H + kh) * K;
  const float* v = batch->v + (row * HV + head) * V;
  double qq = 1e-6, kk = 1e-6;
  for (int i = 0; i < K; ++i) qq += q[i] * (double)q[i], kk += k[i] * (double)k[i];
  const double beta = 1 / (1 + exp(-(double)batch->b[row * HV + head]));
  for (int i = 0; i < K; ++i) {
    const int at = scalar ? head : head * K + i;
    const double x = batch->a[row * HV * (scalar ? 1 : K) + at] + (double)batch->dt_bias[at];
    const double rate = exp((double)batch->A_log[head]);
    const double g = lower_bound != 0 ? lower_bound / (1 + exp(-rate * x)) : -rate * log1p(exp(x));
    for (int j = 0; j < V; ++j) S[i * V + j] *= exp(g);
  }
  for (int j = 0; j < V; ++j) {
    double p = 0, o = 0;
    for (int i = 0; i < K; ++i) p += k[i] / sqrt(kk) * S[i * V + j];
    const double u = beta * (v[j] - p);
    for (int i = 0; i < K; ++i) {
      S[i * V + j] += k[i] / sqrt(kk) * u;
      o += q[i] / sqrt(qq) / sqrt((double)K) * S[i * V + j];
    }
    out[j] = o;
  }
}

static void test_schemes(void) {
  CHECK(sp_api_version() == SP_API_VERSION);
  CHECK(strcmp(sp_code_name(SP_MISMATCH), "mismatch") == 0);
  CHECK(strcmp(sp_code_name(99), "unknown") == 0);
  char text[256];
  size_t n = 0;
  CHECK(sp_scheme_print("int8,records=int8,period=4", 0, text, sizeof text, &n) == SP_OK);
  CHECK(strcmp(text, "int8,period=4,records=int8") == 0 && n == strlen(text) + 1);
  CHECK(strcmp(sp_last_error(), "") == 0);
  CHECK(sp_scheme_print("fp32", 1, NULL, 0, &n) == SP_OK && n > 20);
  CHECK_ERROR(sp_scheme_print("fp32", 1, text, 3, &n), SP_INVALID_ARGUMENT, "capacity is 3");
  CHECK_ERROR(sp_scheme_print("int9", 0, text, sizeof text, &n), SP_INVALID_ARGUMENT,
              "did you mean 'int8'?");
  CHECK_ERROR(sp_scheme_print(NULL, 0, text, sizeof text, &n), SP_INVALID_ARGUMENT, "name is NULL");
  CHECK_ERROR(sp_scheme_print("leapquant:8,rounding=feedback", 0, NULL, 0, NULL), SP_UNSUPPORTED,
              "leapquant cannot round by rounding=feedback");

  sp_scheme* scheme = compile("int8,period=4");
  CHECK(strcmp(sp_last_error(), "") == 0); /* a success clears what went wrong before */
  sp_bits bits = {.struct_size = sizeof bits};
  CHECK(sp_scheme_bits(scheme, &bits) == SP_OK);
  CHECK(bits.n_values == 2 * HV * K * V && bits.cursor_bytes == 16);
  CHECK(fabs(bits.payload_bits - 8.0 * (double)bits.page_bytes / (double)bits.n_values) < 1e-12);
  CHECK(bits.resident_bits > bits.payload_bits);
  bits.struct_size = 3;
  CHECK_ERROR(sp_scheme_bits(scheme, &bits), SP_INVALID_ARGUMENT, "bits.struct_size is 3");
  int64_t n_bytes = 0;
  CHECK(sp_scheme_bytes_per_slot(scheme, 5, &n_bytes) == SP_OK);
  CHECK(n_bytes > bits.page_bytes + bits.window_bytes);
  CHECK_ERROR(sp_scheme_bytes_per_slot(scheme, -1, &n_bytes), SP_INVALID_ARGUMENT, "conv_floats");

  sp_pool_config config = {
      .struct_size = sizeof config, .n_threads = 1, .n_slots = 1000000, .max_bytes = 100 * n_bytes};
  sp_pool* pool = NULL;
  CHECK_ERROR(sp_pool_create(scheme, &config, &pool), SP_EXHAUSTED, "slots would");
  config.device = 1;
  CHECK_ERROR(sp_pool_create(scheme, &config, &pool), SP_UNSUPPORTED, "use SP_DEVICE_CPU");
  config.struct_size = 0;
  CHECK_ERROR(sp_pool_create(scheme, &config, &pool), SP_INVALID_ARGUMENT, "config.struct_size");
  CHECK_ERROR(sp_pool_create(NULL, &config, &pool), SP_INVALID_ARGUMENT, "scheme is NULL");
  CHECK(pool == NULL);
  sp_scheme_destroy(scheme);
  sp_scheme_destroy(NULL);

  sp_layer_shape wrong = kLayers[0];
  wrong.gate = 7;
  CHECK_ERROR(sp_scheme_compile("int8", &wrong, 1, NULL, NULL, &scheme), SP_INVALID_ARGUMENT,
              "layers[0].gate 7");
  CHECK_ERROR(sp_scheme_compile("int8", kLayers, 0, NULL, NULL, &scheme), SP_INVALID_ARGUMENT,
              "0 recurrent layers");
  CHECK_ERROR(sp_scheme_compile("stepquant:6", kLayers, 2, NULL, NULL, &scheme),
              SP_INVALID_ARGUMENT, "needs a calibrated plan");
  CHECK_ERROR(sp_scheme_compile("stepquant:6", kLayers, 2, "/nonexistent.plan", NULL, &scheme),
              SP_NOT_FOUND, "/nonexistent.plan");
}

/* Raw inputs against double precision, for both gates and for bounded decays. */
static void test_step(void) {
  for (int32_t layer = 0; layer < 2; ++layer) {
    for (int bounded = 0; bounded < 2; ++bounded) {
      sp_pool* pool = make_pool("fp32,period=4,records=f32", B);
      int64_t slots[B];
      for (int i = 0; i < B; ++i) CHECK(sp_slot_alloc(pool, &slots[i]) == SP_OK);
      static Batch batch;
      static double S[B * HV][K * V];
      memset(S, 0, sizeof S);
      for (int t = 0; t < 10; ++t) {
        fill_batch(&batch);
        sp_step_args args = step_args(&batch, layer, slots);
        args.lower_bound = bounded ? -5.0f : 0.0f;
        CHECK(sp_step(pool, &args) == SP_OK);
        for (int row = 0; row < B; ++row) {
          for (int head = 0; head < HV; ++head) {
            double out[V];
            reference(&batch, layer, row, head, args.lower_bound, S[row * HV + head], out);
            for (int j = 0; j < V; ++j) {
              CHECK(fabs(batch.out[(row * HV + head) * V + j] - out[j]) < 1e-5);
            }
          }
        }
      }
      /* Both layouts of the dense state, tight and strided. */
      static float by_key[HV * K * V], by_value[HV * (K * V + 7)];
      CHECK(sp_restore_dense(pool, layer, slots[1], by_key, SP_LAYOUT_KEY_MAJOR, 0) == SP_OK);
      CHECK(sp_restore_dense(pool, layer, slots[1], by_value, SP_LAYOUT_VALUE_MAJOR, K * V + 7) ==
            SP_OK);
      for (int head = 0; head < HV; ++head) {
        for (int i = 0; i < K; ++i) {
          for (int j = 0; j < V; ++j) {
            const float x = by_key[(head * K + i) * V + j];
            CHECK(fabs(x - S[HV + head][i * V + j]) < 1e-5);
            CHECK(x == by_value[head * (K * V + 7) + j * K + i]);
          }
        }
      }
      /* Handing them over to another slot gives the same next token. */
      CHECK(sp_hand_over(pool, layer, slots[0], by_key, SP_LAYOUT_KEY_MAJOR, 0, 10) == SP_OK);
      CHECK(sp_hand_over(pool, layer, slots[2], by_value, SP_LAYOUT_VALUE_MAJOR, K * V + 7, 10) ==
            SP_OK);
      static float again[HV * K * V];
      for (int i = 0; i < 2; ++i) {
        CHECK(sp_restore_dense(pool, layer, slots[2 * i], again, SP_LAYOUT_KEY_MAJOR, 0) == SP_OK);
        CHECK(memcmp(again, by_key, sizeof again) == 0);
      }
      CHECK_ERROR(sp_hand_over(pool, layer, slots[0], by_key, 5, 0, 0), SP_INVALID_ARGUMENT,
                  "layout 5");
      CHECK_ERROR(sp_hand_over(pool, layer, slots[0], by_key, SP_LAYOUT_KEY_MAJOR, 3, 0),
                  SP_INVALID_ARGUMENT, "head_stride 3");
      by_key[9] = NAN;
      CHECK_ERROR(sp_hand_over(pool, layer, slots[0], by_key, SP_LAYOUT_KEY_MAJOR, 0, 0),
                  SP_NOT_FINITE, "value head 0");
      sp_pool_destroy(pool);
    }
  }
}

/* 32-bit slots, padding, copy on write, finished gates. */
static void test_slots(void) {
  sp_pool* pool = make_pool("int8,period=3", 4);
  CHECK(sp_pool_n_slots(pool) == 4 && sp_pool_n_free(pool) == 4);
  CHECK(sp_pool_bytes_allocated(pool) > 0);
  int64_t slot[4];
  for (int i = 0; i < 4; ++i) CHECK(sp_slot_alloc(pool, &slot[i]) == SP_OK);
  int64_t none;
  CHECK_ERROR(sp_slot_alloc(pool, &none), SP_EXHAUSTED, "all 4 slots are in use");
  static Batch batch, other;
  fill_batch(&batch);
  other = batch;
  const int64_t wide[B] = {slot[0], slot[1], slot[2]};
  sp_step_args args = step_args(&batch, 0, wide);
  CHECK(sp_step(pool, &args) == SP_OK);
  /* Row 1 is padding, row 0 goes on in another slot, in 32 bits; NaN in padding is harmless. */
  const int32_t read[B] = {(int32_t)slot[0], -1, (int32_t)slot[2]};
  const int32_t write[B] = {(int32_t)slot[3], 0, (int32_t)slot[2]};
  other.v[HV * V] = NAN, other.q[H * K] = NAN, other.a[HV] = NAN;
  args = step_args(&other, 0, read);
  args.write_slots = write;
  args.slot_type = SP_SLOTS_I32;
  CHECK(sp_step(pool, &args) == SP_OK);
  for (int j = 0; j < HV * V; ++j) CHECK(other.out[HV * V + j] == 0);
  args = step_args(&batch, 0, wide);
  CHECK(sp_step(pool, &args) == SP_OK);
  CHECK(memcmp(batch.out, other.out, sizeof(float) * HV * V) == 0);
  static float S[2][HV * K * V];
  CHECK(sp_restore_dense(pool, 0, slot[0], S[0], SP_LAYOUT_KEY_MAJOR, 0) == SP_OK);
  CHECK(sp_restore_dense(pool, 0, slot[3], S[1], SP_LAYOUT_KEY_MAJOR, 0) == SP_OK);
  CHECK(memcmp(S[0], S[1], sizeof S[0]) == 0);

  /* Finished gates and keys: a decay of 1 and beta of 0 leave the state alone. */
  float zeros[B * HV * K] = {0};
  args.normalise = 0;
  args.gates = SP_GATES_FINISHED;
  args.g = zeros, args.beta = zeros, args.A_log = NULL, args.dt_bias = NULL;
  CHECK(sp_step(pool, &args) == SP_OK);
  const int64_t flushed[1] = {slot[3]};
  CHECK(sp_flush(pool, -1, flushed, SP_SLOTS_I64, 1) == SP_OK);
  CHECK_ERROR(sp_flush(pool, 2, flushed, SP_SLOTS_I64, 1), SP_INVALID_ARGUMENT, "layer 2");

  /* Wrong calls. */
  const int64_t twice[B] = {slot[0], slot[0], slot[1]};
  args.read_slots = twice;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "written by two rows");
  args.read_slots = wide;
  args.first_valid_slot = 0;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "first_valid_slot 0");
  args.first_valid_slot = 1;
  args.layer = 9;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "layer 9");
  args.layer = 0, args.out_stride = 1;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "out_stride 1");
  args.out_stride = HV * V, args.v = NULL;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "v is NULL");
  args.v = batch.v, args.gates = SP_GATES_RAW;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "A_log is NULL");
  args.gates = 4;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "gates 4");
  args.gates = SP_GATES_FINISHED, args.slot_type = 3;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "slot_type 3");
  args.slot_type = SP_SLOTS_I64, args.reserved = 1;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "reserved");
  args.reserved = 0, args.n_rows = -1;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "n_rows -1");
  args.n_rows = 0;
  CHECK(sp_step(pool, &args) == SP_OK);
  CHECK(sp_slot_free(pool, slot[1]) == SP_OK);
  args.n_rows = B;
  CHECK_ERROR(sp_step(pool, &args), SP_INVALID_ARGUMENT, "is free; allocate");
  CHECK_ERROR(sp_slot_free(pool, slot[1]), SP_INVALID_ARGUMENT, "is free");
  CHECK_ERROR(sp_slot_free(pool, 77), SP_INVALID_ARGUMENT, "slot 77 does not exist");
  CHECK_ERROR(sp_slot_free(NULL, 1), SP_INVALID_ARGUMENT, "pool is NULL");
  sp_slot_state state;
  CHECK(sp_slot_get_state(pool, slot[1], &state) == SP_OK && state == SP_SLOT_FREE);
  CHECK_ERROR(sp_slot_get_state(pool, 0, &state), SP_INVALID_ARGUMENT, "slot 0");
  sp_pool_destroy(pool);
  sp_pool_destroy(NULL);
}

static void test_snapshots(void) {
  sp_pool *pool = make_pool("int4,period=5", 2), *other = make_pool("int4,period=5", 1);
  int64_t a, b, c, n_tokens = 0;
  CHECK(sp_slot_alloc(pool, &a) == SP_OK && sp_slot_alloc(pool, &b) == SP_OK);
  CHECK(sp_slot_alloc(other, &c) == SP_OK);
  static Batch batch;
  for (int t = 0; t < 7; ++t) {
    fill_batch(&batch);
    for (int32_t layer = 0; layer < 2; ++layer) {
      sp_step_args args = step_args(&batch, layer, &a);
      args.n_rows = 1;
      CHECK(sp_step(pool, &args) == SP_OK);
    }
  }
  float* conv = NULL;
  CHECK(sp_slot_conv(pool, a, &conv) == SP_OK);
  conv[4] = 2.5f;
  CHECK(sp_slot_set_tokens(pool, a, 7) == SP_OK);
  CHECK_ERROR(sp_slot_set_tokens(pool, a, -7), SP_INVALID_ARGUMENT, "n_tokens -7");
  sp_snapshot* snapshot = NULL;
  CHECK_ERROR(sp_slot_snapshot(pool, a, 0, &snapshot), SP_INVALID_ARGUMENT, "flush it first");
  CHECK(sp_slot_snapshot(pool, a, 1, &snapshot) == SP_OK);
  size_t n = 0;
  const void* data = sp_snapshot_data(snapshot, &n);
  CHECK(sp_slot_restore(other, c, data, n) == SP_OK);
  CHECK_ERROR(sp_slot_restore(other, c, data, n - 1), SP_CORRUPT, "ends inside");
  CHECK(sp_slot_get_tokens(other, c, &n_tokens) == SP_OK && n_tokens == 7);
  CHECK(sp_slot_conv(other, c, &conv) == SP_OK && conv[4] == 2.5f);
  CHECK(sp_slot_copy(pool, a, b) == SP_OK);
  static Batch from_a, from_b, from_c;
  fill_batch(&from_a);
  from_b = from_c = from_a;
  sp_step_args args = step_args(&from_a, 1, &a);
  args.n_rows = 1;
  CHECK(sp_step(pool, &args) == SP_OK);
  args.read_slots = &b, args.out = from_b.out;
  CHECK(sp_step(pool, &args) == SP_OK);
  args.read_slots = &c, args.out = from_c.out;
  CHECK(sp_step(other, &args) == SP_OK);
  CHECK(memcmp(from_a.out, from_b.out, sizeof(float) * HV * V) == 0);
  CHECK(memcmp(from_a.out, from_c.out, sizeof(float) * HV * V) == 0);
  sp_snapshot_destroy(snapshot);
  sp_snapshot_destroy(NULL);

  const char* path = "capi_test.snapshot";
  CHECK(sp_slot_save(pool, a, path) == SP_OK);
  CHECK(sp_slot_load(other, c, path) == SP_OK);
  remove(path);
  CHECK_ERROR(sp_slot_load(other, c, path), SP_NOT_FOUND, path);

  /* A NaN ends its slot; freeing it starts anew. */
  from_a.v[0] = NAN;
  args = step_args(&from_a, 0, &a);
  args.n_rows = 1;
  CHECK(sp_step(pool, &args) == SP_OK);
  CHECK(isnan(from_a.out[0]));
  sp_slot_state state;
  CHECK(sp_slot_get_state(pool, a, &state) == SP_OK && state == SP_SLOT_QUARANTINED);
  CHECK(sp_pool_nonfinite_total(pool) == 1);
  CHECK_ERROR(sp_slot_snapshot(pool, a, 1, &snapshot), SP_NOT_FINITE, "quarantined");
  CHECK(sp_slot_free(pool, a) == SP_OK && sp_slot_alloc(pool, &a) == SP_OK);
  CHECK(sp_slot_get_state(pool, a, &state) == SP_OK && state == SP_SLOT_USED);
  sp_pool_destroy(pool);
  sp_pool_destroy(other);

  /* History in bf16 cannot be handed out as f32. */
  pool = make_pool("int4,period=5,conv=bf16", 1);
  CHECK(sp_slot_alloc(pool, &a) == SP_OK);
  conv = NULL;
  CHECK_ERROR(sp_slot_conv(pool, a, &conv), SP_UNSUPPORTED, "leave conv= out");
  CHECK(conv == NULL);
  sp_pool_destroy(pool);
}

int main(void) {
  test_schemes();
  test_step();
  test_slots();
  test_snapshots();
  if (n_failed == 0) printf("all C API checks passed\n");
  return n_failed == 0 ? 0 : 1;
}
