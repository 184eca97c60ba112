// What only a device can show: graphs and far slots.
#include <cuda_runtime.h>

#include "device_layer.hpp"

namespace statepack::test {
namespace {

void expect_cuda(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

class Captured : public testing::TestWithParam<const char*> {};

// One captured step, replayed over several windows with rows at every phase: which rows are due
// changes from replay to replay, and only the device knows.
TEST_P(Captured, StepsAreThoseOfPlainCalls) {
  const LayerShape s{16, 32, 128, 128, Gate::kScalar};
  constexpr int kRows = 24;
  const Scheme scheme = parse(GetParam());
  const auto config = codec_config(scheme);
  const LayerPlan plan = any_plan(s, *config);
  OneLayer host(scheme, s, kRows + 1, expect_value(config->info->make(*config, s, &plan)));
  for (int slot = 1; slot <= kRows; ++slot) {
    host.cursors[static_cast<std::size_t>(slot)].limit = 1 + slot % scheme.period;
  }
  DeviceSlots plain(host), captured(host);
  plain.push(host);
  captured.push(host);
  Batch batch(s, kRows);
  Stream random(21);
  random.fill(batch);
  DeviceToken token(batch);
  cudaStream_t stream = nullptr;
  expect_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  expect_ok(captured.layer().step(captured.pool(), token.view, captured.work(), stream));
  expect_cuda(cudaStreamEndCapture(stream, &graph));
  expect_cuda(cudaGraphInstantiate(&executable, graph, 0));
  for (int t = 0; t < 3 * scheme.period + 2; ++t) {
    random.fill(batch);
    token.write(batch);
    expect_cuda(cudaGraphLaunch(executable, stream));
    expect_cuda(cudaStreamSynchronize(stream));
    plain.step(batch);
    ASSERT_TRUE(same_bits(token.read(), batch.out)) << "token " << t;
  }
  OneLayer a(scheme, s, kRows + 1, expect_value(config->info->make(*config, s, &plan)));
  OneLayer b(scheme, s, kRows + 1, expect_value(config->info->make(*config, s, &plan)));
  plain.pull(a);
  captured.pull(b);
  for (int slot = 0; slot <= kRows; ++slot) {
    EXPECT_TRUE(same_bits(a.slot_bytes(slot), b.slot_bytes(slot))) << "slot " << slot;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

INSTANTIATE_TEST_SUITE_P(Device, Captured,
                         testing::Values("fp32", "leapquant:8", "pace:4", "stepquant:4,period=16",
                                         "stepquant:6"));

// Offsets beyond 32 bits: slot 5,000 of a pool whose slots are a megabyte apart.
TEST(Device, ReachesFarSlots) {
  const LayerShape s{16, 32, 128, 128, Gate::kScalar};
  OneLayer host("leapquant:8", s, 3);
  DeviceSlots near(host);
  near.push(host);
  constexpr std::int64_t kSlots = 5001, kStride = std::int64_t{1} << 20;
  const cuda::DeviceBytes memory = DeviceSlots::bytes(kSlots * kStride);
  const cuda::DeviceBytes cursors = DeviceSlots::bytes(kSlots * 8);
  const cuda::DeviceBytes faults = DeviceSlots::bytes(kSlots * 4);
  cuda::PoolView pool = near.pool();
  pool.pages = memory.data();
  pool.windows = memory.data() + (host.layer.codec->page_bytes() + 15) / 16 * 16;
  pool.page_stride = pool.window_stride = kStride;
  pool.cursors = reinterpret_cast<Cursor*>(cursors.data());
  pool.faults = reinterpret_cast<std::uint32_t*>(faults.data());
  pool.n_slots = kSlots;
  Stream random(2);
  for (int t = 0; t < 18; ++t) {
    Batch batch(s, 1);
    random.fill(batch);
    near.step(batch);
    batch.slots[0] = 5000;
    DeviceToken token(batch);
    expect_ok(near.layer().step(pool, token.view, near.work(), nullptr));
    ASSERT_TRUE(same_bits(token.read(), batch.out)) << "token " << t;
  }
  std::vector<std::uint8_t> page(static_cast<std::size_t>(host.layer.codec->page_bytes()));
  std::vector<std::uint8_t> far(page.size());
  expect_ok(cuda::copy_to_host(page.data(), near.pool().pages + host.page_stride, page.size()));
  expect_ok(cuda::copy_to_host(far.data(), memory.data() + 5000 * kStride, far.size()));
  EXPECT_TRUE(same_bits(page, far));
}

}  // namespace
}  // namespace statepack::test
