// The kernels against the CPU, which test/delta holds to the recurrence in double.
//
// Every step starts from the same bytes on both sides, so that what is compared is one step: the
// output, the record or page it leaves, and nothing else changed.
#include "delta/cuda/device.hpp"

#include <gmock/gmock.h>

#include "../codec/states.hpp"
#include "device_layer.hpp"

namespace statepack::test {
namespace {

constexpr LayerShape kScalar{2, 4, 64, 64, Gate::kScalar};
constexpr LayerShape kChannel{4, 4, 64, 64, Gate::kChannel};
constexpr LayerShape kScalarFull{2, 4, 128, 128, Gate::kScalar};
constexpr LayerShape kChannelFull{4, 4, 128, 128, Gate::kChannel};
constexpr LayerShape kOdd{1, 3, 48, 80, Gate::kScalar};
constexpr LayerShape kOddChannel{1, 2, 80, 48, Gate::kChannel};
constexpr LayerShape kSmall{1, 2, 16, 32, Gate::kScalar};

/// Widths by head or row; 2 bits among them, which scalar gates keep as signed levels.
LayerPlan plan_of(const LayerShape& s, const CodecConfig& config) {
  constexpr std::uint8_t kWidths[] = {4, 2, 6, 16, 8};
  LayerPlan plan = any_plan(s, config);
  for (int h = 0; h < s.n_value_heads; ++h) {
    for (int i = 0; i < s.K; ++i) {
      plan.bits[static_cast<std::size_t>(h * s.K + i)] =
          kWidths[(s.gate == Gate::kScalar ? h : h + i) % 5];
    }
  }
  return plan;
}

OneLayer layer_of(std::string_view name, const LayerShape& s, std::int64_t n_slots) {
  const Scheme scheme = parse(name);
  const auto config = codec_config(scheme);
  const LayerPlan plan = plan_of(s, *config);
  return OneLayer(scheme, s, n_slots, expect_value(config->info->make(*config, s, &plan)));
}

/// The same windows before pages that round nothing.
OneLayer exact_twin(OneLayer& of) {
  const auto config = codec_config(parse("fp32"));
  return OneLayer(of.scheme, of.layer.shape, of.n_slots,
                  expect_value(config->info->make(*config, of.layer.shape, nullptr)));
}

void copy_to_twin(OneLayer& from, OneLayer& twin) {
  const LayerShape& s = from.layer.shape;
  std::vector<std::byte> memory(from.layer.codec->scratch_bytes());
  const LayerState a = from.state(), b = twin.state();
  for (std::int64_t slot = 0; slot < from.n_slots; ++slot) {
    for (int h = 0; h < s.n_value_heads; ++h) {
      from.layer.codec->decode(
          h, a.pages + slot * a.page_stride,
          reinterpret_cast<float*>(b.pages + slot * b.page_stride) + h * s.K * s.V, {memory});
    }
  }
  twin.windows = from.windows;
  twin.cursors = from.cursors;
  twin.faults = from.faults;
  // Vectors start where their memory does; the bytes that count start at a multiple of 16.
  std::memcpy(b.windows, a.windows, static_cast<std::size_t>(from.n_slots * from.window_stride));
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    sum += d * d;
  }
  return std::sqrt(sum);
}
double length(const std::vector<float>& a) { return distance(a, std::vector<float>(a.size())); }

struct Case {
  std::string scheme;
  LayerShape shape;
};
std::string print(const Case& c) {
  return c.scheme + " H" + std::to_string(c.shape.n_key_heads) + "x" +
         std::to_string(c.shape.n_value_heads) + " K" + std::to_string(c.shape.K) + " V" +
         std::to_string(c.shape.V) + (c.shape.gate == Gate::kScalar ? " scalar" : " channel");
}
void PrintTo(const Case& c, std::ostream* out) { *out << print(c); }

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const std::vector<std::string> codecs = {"fp32",
                                           "bf16",
                                           "fp16",
                                           "int8",
                                           "int4",
                                           "leapquant:8",
                                           "leapquant:6",
                                           "leapquant:4",
                                           "pace:4,group=32",
                                           "pace:4/8,group=16",
                                           "stepquant:4"};
  for (const std::string& codec : codecs) {
    for (const LayerShape& shape : {kScalar, kChannel}) {
      for (const std::string window :
           {",period=1", ",period=5,records=f32", ",period=5,records=bf16,phase=absolute",
            ",period=5,records=int8", ",period=5,records=mixed"}) {
        cases.push_back({codec + window, shape});
      }
    }
    for (const LayerShape& shape : {kScalarFull, kChannelFull}) {
      cases.push_back({codec + ",period=1", shape});
      cases.push_back({codec + ",period=3,records=bf16", shape});
    }
    // Narrow shapes: tiles, groups and planes that end inside a warp.
    if (!codec.starts_with("pace")) {
      for (const LayerShape& shape : {kOdd, kOddChannel, kSmall}) {
        cases.push_back({codec + ",period=1", shape});
        cases.push_back({codec + ",period=3,records=int8", shape});
      }
    }
  }
  cases.push_back({"pace:4/8,group=32,period=3,records=int8", kScalarFull});
  cases.push_back({"pace:4,period=3,records=int8", kScalarFull});
  cases.push_back({"leapquant:8,rank=0,period=3", kScalar});
  cases.push_back({"leapquant:4,rank=7,rounds=2,scales=f16,period=3", kScalar});
  return cases;
}

/// Steps `n_tokens` tokens, of n_rows(t) rows each, on both sides from the same bytes.
template <class Rows>
void expect_steps_of_the_cpu(OneLayer& cpu, const Case& of, int n_tokens, Rows&& rows_of) {
  const LayerShape& s = of.shape;
  const int n_slots = static_cast<int>(cpu.n_slots);
  OneLayer twin = exact_twin(cpu);
  OneLayer after = layer_of(of.scheme, s, n_slots);
  DeviceSlots gpu(cpu);
  ThreadPool threads(1);
  Stream stream(7);
  double worst_out = 0, worst_open = 0, worst_page = 0;
  for (int t = 0; t < n_tokens; ++t) {
    const int n_rows = rows_of(t);
    Batch batch(s, n_rows);
    stream.fill(batch);
    copy_to_twin(cpu, twin);
    gpu.push(cpu);
    Batch on_gpu = batch, on_twin = batch;
    expect_ok(step(cpu.state(), batch.input(), threads));
    expect_ok(step(twin.state(), on_twin.input(), threads));
    gpu.step(on_gpu);
    gpu.pull(after);
    EXPECT_EQ(after.faults, cpu.faults);
    worst_out = std::max(worst_out, relative_error(on_gpu.out, batch.out));
    for (int slot = 0; slot < n_slots; ++slot) {
      const auto i = static_cast<std::size_t>(slot);
      EXPECT_EQ(after.cursors[i].fill, cpu.cursors[i].fill) << "slot " << slot << ", token " << t;
      EXPECT_EQ(after.cursors[i].limit, cpu.cursors[i].limit) << "slot " << slot;
      const std::vector<float> exact = dense(twin, slot, threads);
      const std::vector<float> ours = dense(after, slot, threads),
                               theirs = dense(cpu, slot, threads);
      const double scale = length(exact) + 1e-20;
      if (slot > 0 && slot <= n_rows && (cpu.cursors[i].fill == 0 || cpu.scheme.period == 1)) {
        const double error = distance(theirs, exact);
        worst_page = std::max(worst_page, (distance(ours, exact) - 1.02 * error) / scale);
      } else {
        worst_open = std::max(worst_open, distance(ours, theirs) / scale);
      }
    }
    // What no row owns stays: other slots whole, and what lies between slots.
    const LayerState is = after.state(), was = cpu.state();
    const std::int64_t page_bytes = cpu.layer.codec->page_bytes();
    for (int slot = 0; slot < n_slots; ++slot) {
      const bool touched = slot > 0 && slot <= n_rows;
      const std::int64_t from = touched ? page_bytes : 0;
      EXPECT_EQ(std::memcmp(is.pages + slot * is.page_stride + from,
                            was.pages + slot * was.page_stride + from,
                            static_cast<std::size_t>(is.page_stride - from)),
                0);
      const std::int64_t window = touched ? cpu.layer.window.n_bytes() : 0;
      EXPECT_EQ(std::memcmp(is.windows + slot * is.window_stride + window,
                            was.windows + slot * was.window_stride + window,
                            static_cast<std::size_t>(is.window_stride - window)),
                0);
    }
  }
  EXPECT_LT(worst_out, 1e-5);
  // A record's value or code near a midpoint may round the other way.
  EXPECT_LT(worst_open, 1e-3);
  EXPECT_LT(worst_page, 2e-4);
}

class EveryScheme : public testing::TestWithParam<Case> {};

// Rows at different phases of their windows, all heads resident at once.
TEST_P(EveryScheme, StepsLikeTheCpu) {
  OneLayer cpu = layer_of(GetParam().scheme, GetParam().shape, 7);
  expect_steps_of_the_cpu(cpu, GetParam(), 9, [](int t) {
    return t < 2 ? 1 + t : t % 3 == 2 ? 2 : 5;
  });
}

// One state, every kind of head: the error of the page may not exceed the CPU's.
TEST_P(EveryScheme, PacksLikeTheCpu) {
  const LayerShape& s = GetParam().shape;
  if (parse(GetParam().scheme).period != 1 && s.K == 64) GTEST_SKIP() << "pages of period 1";
  OneLayer cpu = layer_of(GetParam().scheme, s, 3), back = layer_of(GetParam().scheme, s, 3);
  DeviceSlots gpu(cpu);
  ThreadPool threads(1);
  const std::size_t n = static_cast<std::size_t>(s.n_values());
  std::vector<std::pair<std::string, std::vector<float>>> states;
  states.emplace_back("random", normal_state(static_cast<int>(n), 3));
  states.emplace_back("zero", std::vector<float>(n));
  states.emplace_back("tiny", normal_state(static_cast<int>(n), 4, 1e-4f));
  states.emplace_back("huge", normal_state(static_cast<int>(n), 5, 3e2f));
  std::vector<float> low_rank(n), hot_row = normal_state(static_cast<int>(n), 6);
  for (int h = 0; h < s.n_value_heads; ++h) {
    for (int i = 0; i < s.K; ++i) {
      for (int j = 0; j < s.V; ++j) {
        const auto at = static_cast<std::size_t>((h * s.K + i) * s.V + j);
        low_rank[at] =
            std::sin(static_cast<float>(i + h)) * std::cos(static_cast<float>(3 * j)) +
            (h % 2 == 0 ? 0.0f : 0.1f * static_cast<float>(i % 5) * static_cast<float>(j % 3));
        if (i == 7) hot_row[at] *= 100;
      }
    }
  }
  states.emplace_back("low rank", low_rank);
  states.emplace_back("hot row", hot_row);
  if (s.K == 128 && s.V == 128 && s.n_value_heads == 4)
    states.emplace_back("trained", trained_states());
  for (const auto& [name, S] : states) {
    gpu.push(cpu);
    expect_ok(hand_over(cpu.state(), 1, S.data(), 7, threads));
    gpu.hand_over(1, S, 7);
    gpu.pull(back);
    EXPECT_EQ(back.cursors[1].limit, cpu.cursors[1].limit);
    const std::vector<float> theirs = dense(cpu, 1, threads), ours = dense(back, 1, threads);
    const double error = distance(theirs, S);
    EXPECT_LE(distance(ours, S), 1.02 * error + 1e-3 * length(S) * (name == "low rank" ? 1 : 0.01))
        << name << ": the CPU's error is " << error;
    // Scales from peaks alone need no sum, so every byte is the CPU's.
    const std::string& codec = cpu.scheme.codec;
    if (codec == "pace" || codec == "int8" || codec == "int4" || codec == "fp32" ||
        codec == "bf16" || codec == "fp16") {
      EXPECT_EQ(std::memcmp(back.page(1), cpu.page(1),
                            static_cast<std::size_t>(cpu.layer.codec->page_bytes())),
                0)
          << name;
    }
    gpu.push(cpu);
    EXPECT_LE(distance(gpu.restore(1), theirs), 1e-6 * length(theirs)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Device, EveryScheme, testing::ValuesIn(all_cases()));

// More heads than are resident at once: a kernel for all rows, then one for those that are due.
class LargeBatch : public testing::TestWithParam<Case> {};

TEST_P(LargeBatch, StepsLikeTheCpu) {
  constexpr int kRows = 17;  // of 32 heads; a device of 132 multiprocessors has room for 528
  OneLayer cpu = layer_of(GetParam().scheme, GetParam().shape, kRows + 2);
  for (int slot = 1; slot < kRows + 2; ++slot) {
    cpu.cursors[static_cast<std::size_t>(slot)].limit = 1 + slot % cpu.scheme.period;
  }
  expect_steps_of_the_cpu(cpu, GetParam(), 5, [](int) { return kRows; });
}

constexpr LayerShape kManyScalar{16, 32, 128, 128, Gate::kScalar};
constexpr LayerShape kManyChannel{32, 32, 128, 128, Gate::kChannel};

INSTANTIATE_TEST_SUITE_P(Device, LargeBatch,
                         testing::Values(Case{"leapquant:8,period=4", kManyScalar},
                                         Case{"leapquant:8,period=4", kManyChannel},
                                         Case{"leapquant:6,period=3", kManyScalar},
                                         Case{"leapquant:4,period=3", kManyChannel},
                                         Case{"pace:4,period=3", kManyScalar},
                                         Case{"pace:4/8,period=2,records=mixed", kManyChannel},
                                         Case{"stepquant:4,period=3", kManyScalar},
                                         Case{"stepquant:4,period=3,records=int8", kManyChannel},
                                         Case{"int8,period=3", kManyScalar},
                                         Case{"int4,period=3,records=int8", kManyChannel},
                                         Case{"bf16,period=2", kManyScalar}));

// ---------------------------------------------------------------------------------------------

const std::vector<Case> kSome = {
    {"fp32", kScalar},
    {"leapquant:8,period=4", kScalarFull},
    {"leapquant:8,period=4", kChannel},
    {"pace:4,group=32,period=4", kScalar},
    {"stepquant:4", kChannel},
    {"stepquant:4,period=4", kScalar},
};

class SomeSchemes : public testing::TestWithParam<Case> {};

// A sequence alone and the same sequence among others: the same bits, over whole windows.
TEST_P(SomeSchemes, DoNotDependOnTheBatch) {
  const LayerShape& s = GetParam().shape;
  constexpr int kRows = 40;
  OneLayer host = layer_of(GetParam().scheme, s, kRows + 1);
  DeviceSlots alone(host), together(host);
  alone.push(host);
  together.push(host);
  Stream stream(11);
  for (int t = 0; t < 9; ++t) {
    Batch batch(s, kRows);
    stream.fill(batch);
    Batch one = batch.row(17);
    together.step(batch);
    alone.step(one);
    const std::size_t n = one.out.size();
    const std::vector<float> row(batch.out.begin() + static_cast<std::ptrdiff_t>(17 * n),
                                 batch.out.begin() + static_cast<std::ptrdiff_t>(18 * n));
    ASSERT_TRUE(same_bits(row, one.out)) << "token " << t;
  }
  OneLayer a = layer_of(GetParam().scheme, s, kRows + 1),
           b = layer_of(GetParam().scheme, s, kRows + 1);
  alone.pull(a);
  together.pull(b);
  EXPECT_TRUE(same_bits(a.slot_bytes(18), b.slot_bytes(18)));
}

TEST_P(SomeSchemes, QuarantineWhatIsNotFinite) {
  const LayerShape& s = GetParam().shape;
  OneLayer host = layer_of(GetParam().scheme, s, 8), after = layer_of(GetParam().scheme, s, 8);
  DeviceSlots gpu(host);
  Stream stream(3);
  gpu.push(host);
  for (int t = 0; t < 2; ++t) {
    Batch batch(s, 6);
    stream.fill(batch);
    gpu.step(batch);
  }
  gpu.pull(host);
  Batch batch(s, 6);
  stream.fill(batch);
  const std::size_t width = static_cast<std::size_t>(s.n_value_heads * s.V);
  batch.v[2 * width + width - 1] = std::nanf("");
  Batch clean = batch;
  clean.v[2 * width + width - 1] = 0;
  gpu.step(batch);
  gpu.pull(after);
  EXPECT_EQ(after.faults[3], 1u);
  EXPECT_EQ(std::count(after.faults.begin(), after.faults.end(), 0u), 7);
  // The head that failed, and no other row.
  const std::size_t head_begin = 3 * width - static_cast<std::size_t>(s.V);
  for (std::size_t i = 0; i < batch.out.size(); ++i) {
    if (i >= head_begin && i < 3 * width) {
      EXPECT_TRUE(std::isnan(batch.out[i]) || host.scheme.name() == "fp32") << i;
    } else if (i / width != 2) {
      EXPECT_FALSE(std::isnan(batch.out[i])) << i;
    }
  }
  EXPECT_TRUE(std::isnan(batch.out[3 * width - 1]));
  EXPECT_EQ(after.cursors[3].fill, host.cursors[3].fill);
  if (host.scheme.period > 1) {
    EXPECT_EQ(std::memcmp(after.page(3), host.page(3),
                          static_cast<std::size_t>(host.layer.codec->page_bytes())),
              0);
  }
  // It stays out, and its neighbours are what they would have been.
  gpu.push(host);
  gpu.step(clean);
  for (std::size_t i = 0; i < clean.out.size(); ++i) {
    if (i / width != 2) {
      EXPECT_EQ(clean.out[i], batch.out[i]) << i;
    }
  }
  gpu.push(after);
  gpu.step(clean);
  for (std::size_t i = 2 * width; i < 3 * width; ++i) EXPECT_TRUE(std::isnan(clean.out[i])) << i;
  EXPECT_THAT(gpu.restore(3), testing::Each(testing::IsNan()));
}

// Padding, slots that do not exist, slots of 32 bits, and a write to another slot than was read.
TEST_P(SomeSchemes, FollowSlotNumbers) {
  const LayerShape& s = GetParam().shape;
  OneLayer cpu = layer_of(GetParam().scheme, s, 9), after = layer_of(GetParam().scheme, s, 9);
  DeviceSlots gpu(cpu);
  ThreadPool threads(1);
  Stream stream(5);
  for (int t = 0; t < 2; ++t) {
    Batch batch(s, 3);
    stream.fill(batch);
    expect_ok(step(cpu.state(), batch.input(), threads));
  }
  gpu.push(cpu);
  Batch batch(s, 3);
  stream.fill(batch);
  batch.slots = {2, 0, 1};
  std::vector<std::int64_t> writes = {7, 0, 1};
  Batch on_cpu = batch, narrow = batch;
  StepInput input = on_cpu.input();
  input.write_slots = writes.data();
  expect_ok(step(cpu.state(), input, threads));
  gpu.step(batch, &writes);
  EXPECT_LT(relative_error(batch.out, on_cpu.out), 1e-5);
  const std::size_t width = static_cast<std::size_t>(s.n_value_heads * s.V);
  for (std::size_t i = width; i < 2 * width; ++i) EXPECT_EQ(batch.out[i], 0.0f);
  gpu.pull(after);
  for (const std::int64_t slot : {1, 2, 7}) {
    EXPECT_LT(relative_error(dense(after, slot, threads), dense(cpu, slot, threads)), 0.2)
        << "slot " << slot;
  }
  EXPECT_EQ(after.cursors[7].fill, cpu.cursors[7].fill);
  EXPECT_TRUE(same_bits(after.slot_bytes(2), cpu.slot_bytes(2)));

  gpu.push(cpu);
  Batch wide = narrow;
  narrow.slots = wide.slots = {4, 99, -1};
  gpu.step(narrow, nullptr, true);
  gpu.push(cpu);
  gpu.step(wide);
  EXPECT_TRUE(same_bits(narrow.out, wide.out));
  for (std::size_t i = 0; i < narrow.out.size(); ++i) {
    EXPECT_EQ(std::isnan(narrow.out[i]), i / width == 1);
    if (i / width == 2) {
      EXPECT_EQ(narrow.out[i], 0.0f);
    }
  }
}

TEST_P(SomeSchemes, FlushLikeTheCpu) {
  const LayerShape& s = GetParam().shape;
  OneLayer cpu = layer_of(GetParam().scheme, s, 5), after = layer_of(GetParam().scheme, s, 5);
  DeviceSlots gpu(cpu);
  ThreadPool threads(1);
  Stream stream(9);
  for (int t = 0; t < 2; ++t) {
    Batch batch(s, 2 - t);
    stream.fill(batch);
    expect_ok(step(cpu.state(), batch.input(), threads));
  }
  gpu.push(cpu);
  const std::vector<float> before = dense(cpu, 1, threads);
  expect_ok(flush(cpu.state(), std::vector<std::int64_t>{1, 2, 3}, threads));
  gpu.flush({1, 2, 3});
  gpu.pull(after);
  for (std::size_t slot = 1; slot < 4; ++slot) {
    EXPECT_EQ(after.cursors[slot].fill, 0);
    EXPECT_EQ(after.cursors[slot].limit, cpu.cursors[slot].limit);
  }
  EXPECT_LE(distance(dense(after, 1, threads), before),
            1.02 * distance(dense(cpu, 1, threads), before) + 1e-4 * length(before));
}

INSTANTIATE_TEST_SUITE_P(Device, SomeSchemes, testing::ValuesIn(kSome));

TEST(DeviceLayer, RefusesWhatItHasNoKernelFor) {
  const auto refused = [](std::string_view name, const LayerShape& s) {
    OneLayer host = layer_of(name, s, 2);
    const auto made = cuda::DeviceLayer::make(host.layer, host.scheme);
    EXPECT_FALSE(made.ok()) << name;
    return made.status().code();
  };
  EXPECT_EQ(refused("fp32", {1, 1, 24, 32, Gate::kScalar}), Code::kUnsupported);
  EXPECT_EQ(refused("fp32", {1, 1, 256, 128, Gate::kScalar}), Code::kUnsupported);
  EXPECT_EQ(refused("int8,layout=column", kScalar), Code::kUnsupported);
  EXPECT_EQ(refused("leapquant:4,clip=on", kScalar), Code::kUnsupported);
  EXPECT_EQ(refused("int8,period=4,mode=v", kScalar), Code::kUnsupported);
  EXPECT_EQ(refused("int8,period=64", kScalar), Code::kUnsupported);
}

}  // namespace
}  // namespace statepack::test
