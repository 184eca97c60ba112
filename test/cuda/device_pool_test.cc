// The device pool beside a pool on the CPU: bookkeeping, and snapshots that move between the two.
#include "pool/cuda/device_pool.hpp"

#include "device_layer.hpp"

namespace statepack::test {
namespace {

const LayerShape kShape{2, 4, 64, 64, Gate::kScalar};

std::shared_ptr<const CompiledScheme> compile(const char* name) {
  return expect_value(CompiledScheme::make(parse(name), {kShape, kShape}, nullptr, ""));
}

/// One token of one slot through both layers.
std::vector<float> step_cpu(StatePool& pool, std::int64_t slot, Batch batch, ThreadPool& threads) {
  batch.slots[0] = slot;
  std::vector<float> out;
  for (int layer = 0; layer < 2; ++layer) {
    expect_ok(step(pool.layer(layer), batch.input(), threads));
    out.insert(out.end(), batch.out.begin(), batch.out.end());
  }
  return out;
}
std::vector<float> step_gpu(const cuda::DevicePool& pool, std::int64_t slot, Batch batch) {
  batch.slots[0] = slot;
  std::vector<float> out;
  for (int layer = 0; layer < 2; ++layer) {
    const DeviceToken token(batch);
    expect_ok(pool.kernels(layer).step(pool.layer(layer), token.view, pool.workspace(), nullptr));
    const std::vector<float> some = token.read();
    out.insert(out.end(), some.begin(), some.end());
  }
  return out;
}

TEST(DevicePool, SnapshotsMoveBothWays) {
  for (const char* name : {"leapquant:8,period=4", "pace:4,group=32", "int8", "fp32"}) {
    const auto scheme = compile(name);
    auto cpu = expect_value(StatePool::create(scheme, {.n_slots = 2, .conv_floats = 8}));
    auto gpu = expect_value(
        cuda::DevicePool::create(scheme, {.n_slots = 2, .conv_floats = 8, .max_rows = 4}));
    ThreadPool threads(1);
    const std::int64_t here = expect_value(cpu->alloc()), there = expect_value(gpu->alloc());
    Stream stream(4);
    Batch batch(kShape, 1);
    for (int t = 0; t < 6; ++t) {
      stream.fill(batch);
      step_cpu(*cpu, here, batch, threads);
    }
    cpu->set_n_tokens(here, 6);
    cpu->conv(here)[3] = 2.5f;
    const Snapshot taken = expect_value(cpu->snapshot(here));
    expect_ok(gpu->restore(there, taken.bytes));
    EXPECT_EQ(expect_value(gpu->n_tokens(there)), 6);
    // Untouched it comes back as it went.
    EXPECT_EQ(expect_value(gpu->snapshot(there)).bytes, taken.bytes) << name;
    for (int t = 0; t < 3; ++t) {
      stream.fill(batch);
      const std::vector<float> a = step_gpu(*gpu, there, batch);
      const std::vector<float> b = step_cpu(*cpu, here, batch, threads);
      EXPECT_LT(relative_error(a, b), t == 0 ? 1e-5 : 0.05) << name << ", token " << t;
    }
    expect_ok(cpu->restore(here, expect_value(gpu->snapshot(there)).bytes));
    EXPECT_EQ(cpu->conv(here)[3], 2.5f);
    stream.fill(batch);
    EXPECT_LT(relative_error(step_gpu(*gpu, there, batch), step_cpu(*cpu, here, batch, threads)),
              1e-5)
        << name;
  }
}

TEST(DevicePool, KeepsBooksLikeAPool) {
  auto pool =
      expect_value(cuda::DevicePool::create(compile("int8"), {.n_slots = 2, .max_rows = 2}));
  const std::int64_t a = expect_value(pool->alloc()), b = expect_value(pool->alloc());
  EXPECT_EQ(pool->alloc().status().code(), Code::kExhausted);
  EXPECT_EQ(pool->n_free(), 0);
  Batch batch(kShape, 1);
  Stream stream(4);
  stream.fill(batch);
  batch.v[0] = std::nanf("");
  step_gpu(*pool, a, batch);
  EXPECT_EQ(expect_value(pool->state(a)), SlotState::kQuarantined);
  EXPECT_EQ(expect_value(pool->state(b)), SlotState::kUsed);
  EXPECT_EQ(pool->copy(a, b).code(), Code::kNotFinite);
  EXPECT_EQ(pool->snapshot(a).status().code(), Code::kNotFinite);
  expect_ok(pool->try_free(a));
  EXPECT_EQ(pool->try_free(a).code(), Code::kInvalidArgument);
  EXPECT_EQ(expect_value(pool->state(a)), SlotState::kFree);
  EXPECT_EQ(pool->nonfinite_total(), 1);
  const std::int64_t again = expect_value(pool->alloc());
  EXPECT_EQ(expect_value(pool->state(again)), SlotState::kUsed);
  EXPECT_EQ(pool->state(9).status().code(), Code::kInvalidArgument);
  stream.fill(batch);
  step_gpu(*pool, b, batch);
  expect_ok(pool->copy(b, again));
  EXPECT_EQ(step_gpu(*pool, b, batch), step_gpu(*pool, again, batch));
}

}  // namespace
}  // namespace statepack::test
