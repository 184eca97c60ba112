// Times one token of a batch through one layer on the device, scheme by scheme.
//
//   bench_gpu [--quick] [--only SCHEME] [--out FILE.json]
//
// State is read cold: every launch works on another set of slots, and all sets together exceed the
// L2 cache several times. Slots are permuted. A whole window is timed, token by token, its rounding
// included: "open" is the mean of the tokens that append, "due" the one at which every row rounds
// its window, "window" the mean of all, and "spread" the mean when rows are at different phases.
// Launches are replayed from a CUDA graph, as engines do.
#include <cuda_runtime.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "ceilings.hpp"
#include "delta/cuda/device.hpp"
#include "scheme/config.hpp"

namespace {

using namespace statepack;
using nlohmann::json;

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "bench_gpu: %s\n", what.c_str());
  std::exit(1);
}
void expect(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(error));
}
void expect(const Status& status) {
  if (!status.ok()) fail(status.message());
}
template <class T>
T expect_value(Result<T> result) {
  if (!result.ok()) fail(result.status().message());
  return std::move(result).value();
}

cuda::DeviceBytes bytes(std::int64_t n) {
  return expect_value(cuda::DeviceBytes::make(static_cast<std::size_t>(n)));
}
template <class T>
cuda::DeviceBytes copy(const std::vector<T>& values) {
  return expect_value(cuda::upload(std::span(values)));
}

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}
double mean(const std::vector<double>& x, std::size_t begin, std::size_t end) {
  double sum = 0;
  for (std::size_t i = begin; i < end; ++i) sum += x[i];
  return end > begin ? sum / static_cast<double>(end - begin) : 0;
}

class Stream {
 public:
  Stream() { expect(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const { expect(cudaStreamSynchronize(stream_), "waiting"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Work captured once and replayed; seconds of every replay.
class Graph {
 public:
  template <class Work>
  Graph(const Stream& stream, Work&& work) : stream_(stream) {
    expect(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capturing");
    work();
    expect(cudaStreamEndCapture(stream.get(), &graph_), "capturing");
    expect(cudaGraphInstantiate(&executable_, graph_, 0), "making a graph");
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  std::vector<double> replay(int n) const {
    std::vector<cudaEvent_t> events(static_cast<std::size_t>(n) + 1);
    for (cudaEvent_t& event : events) expect(cudaEventCreate(&event), "an event");
    expect(cudaEventRecord(events[0], stream_.get()), "recording");
    for (int i = 0; i < n; ++i) {
      expect(cudaGraphLaunch(executable_, stream_.get()), "replaying");
      expect(cudaEventRecord(events[static_cast<std::size_t>(i) + 1], stream_.get()), "recording");
    }
    stream_.wait();
    std::vector<double> seconds;
    for (std::size_t i = 0; i + 1 < events.size(); ++i) {
      float ms = 0;
      expect(cudaEventElapsedTime(&ms, events[i], events[i + 1]), "reading the clock");
      seconds.push_back(1e-3 * ms);
    }
    for (cudaEvent_t event : events) cudaEventDestroy(event);
    return seconds;
  }

 private:
  const Stream& stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

struct Ceilings {
  double read = 0, copy = 0;  // bytes a second; a copy counts both ways
};

Ceilings measure_ceilings(const Stream& stream) {
  constexpr std::int64_t kBytes = std::int64_t{4} << 30;
  const cuda::DeviceBytes from = bytes(kBytes), to = bytes(kBytes), sink = bytes(16);
  {  // random contents: zeros may travel faster
    std::mt19937_64 random(1);
    std::vector<std::uint64_t> block(std::size_t{1} << 21);
    for (std::uint64_t& x : block) x = random();
    const std::int64_t n = static_cast<std::int64_t>(block.size() * 8);
    for (std::int64_t at = 0; at < kBytes; at += n) {
      expect(cuda::copy_to_device(from.data() + at, block.data(), static_cast<std::size_t>(n)));
    }
  }
  const Graph read(stream,
                   [&] { bench::read_all(from.data(), from.size(), sink.data(), stream.get()); });
  const Graph copy(stream,
                   [&] { bench::copy_all(to.data(), from.data(), from.size(), stream.get()); });
  read.replay(3), copy.replay(3);
  const double n = static_cast<double>(kBytes);
  return {n / median(read.replay(15)), 2 * n / median(copy.replay(15))};
}

struct Setting {
  std::string scheme;
  LayerShape shape;
  int batch = 0;
};

LayerPlan plan_of(const Setting& setting) {
  const LayerShape& s = setting.shape;
  const Scheme scheme = expect_value(Scheme::parse(setting.scheme));
  const int nominal = scheme.codec_arg == "8" ? 8 : scheme.codec_arg == "4" ? 4 : 6;
  LayerPlan plan;
  for (int h = 0; h < s.n_value_heads; ++h) {
    for (int i = 0; i < s.K; ++i) {
      // Widths around the nominal one in equal shares, as plans spread them.
      const int unit = s.gate == Gate::kScalar ? h : h + i;
      const int bits = nominal + (nominal == 8 ? 0 : unit % 4 == 1 ? 2 : unit % 4 == 3 ? -2 : 0);
      plan.bits.push_back(static_cast<std::uint8_t>(bits));
      plan.row_weight.push_back(0.75f + 0.0625f * static_cast<float>(i % 9));
    }
    plan.high.push_back(h % 4 == 1);
  }
  return plan;
}

/// Bytes that one token must move, all rows: read, written; at a mean fill of an open window.
struct Traffic {
  double open_read = 0, open_write = 0, due_read = 0, due_write = 0;
};

class Case {
 public:
  Case(const Setting& setting, const Stream& stream)
      : setting_(setting),
        stream_(stream),
        scheme_(expect_value(Scheme::parse(setting.scheme))),
        shape_(setting.shape),
        B_(setting.batch) {
    const LayerPlan plan = plan_of(setting);
    const CodecConfig config = expect_value(codec_config(scheme_));
    layer_.shape = shape_;
    layer_.codec = expect_value(config.info->make(config, shape_, &plan));
    layer_.window = WindowLayout(shape_, scheme_.records, scheme_.mode,
                                 scheme_.period > 1 ? scheme_.period : 0);
    device_ = expect_value(cuda::DeviceLayer::make(layer_, scheme_));
    work_ = expect_value(cuda::Workspace::make(B_));

    page_stride_ = (layer_.codec->page_bytes() + 15) / 16 * 16;
    slot_stride_ = page_stride_ + layer_.window.n_bytes();
    // All sets together: several times the 60 MB of L2, and no more than a few gigabytes.
    constexpr std::int64_t kWorkingSet = std::int64_t{512} << 20;
    n_sets_ = static_cast<int>(std::clamp<std::int64_t>(kWorkingSet / (B_ * slot_stride_), 2, 64));
    const std::int64_t n_slots = std::int64_t{n_sets_} * B_ + 1;
    slots_ = bytes(n_slots * slot_stride_);
    cursors_ = bytes(n_slots * static_cast<std::int64_t>(sizeof(Cursor)));
    faults_ = bytes(n_slots * 4);
    pool_ = {.pages = slots_.data(),
             .windows = slots_.data() + page_stride_,
             .cursors = reinterpret_cast<Cursor*>(cursors_.data()),
             .faults = reinterpret_cast<std::uint32_t*>(faults_.data()),
             .page_stride = slot_stride_,
             .window_stride = slot_stride_,
             .cursor_stride = sizeof(Cursor),
             .fault_stride = 4,
             .n_slots = n_slots};
    fill_pages(n_slots);
    make_tokens();
    std::vector<std::int64_t> order(static_cast<std::size_t>(n_slots) - 1);
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i) + 1;
    std::shuffle(order.begin(), order.end(), std::mt19937(7));
    order_ = copy(order);
  }

  /// One token of every set.
  void step_all() const {
    for (int set = 0; set < n_sets_; ++set) {
      cuda::TokenView token = token_;
      token.read_slots = reinterpret_cast<const std::int64_t*>(order_.data()) + set * B_;
      expect(device_->step(pool_, token, work_, stream_.get()));
    }
  }

  /// Rows all at the start of a window, or one at every phase.
  void set_phases(bool spread) const {
    std::vector<Cursor> cursors(static_cast<std::size_t>(pool_.n_slots));
    for (std::size_t i = 0; spread && i < cursors.size(); ++i) {
      cursors[i].limit = 1 + static_cast<std::int32_t>(i) % scheme_.period;
    }
    expect(cuda::copy_to_device(cursors_.data(), cursors.data(), cursors_.size()));
  }

  json run(const Ceilings& ceilings, bool quick) {
    const Graph graph(stream_, [&] { step_all(); });
    const int period = scheme_.period;
    const int windows = quick ? 3 : std::max(3, 24 / period);
    const double scale = 1e6 / n_sets_;
    json result = {
        {"scheme", scheme_.full_name()},
        {"name", setting_.scheme},
        {"gate", shape_.gate == Gate::kScalar ? "scalar" : "channel"},
        {"heads", std::to_string(shape_.n_key_heads) + "/" + std::to_string(shape_.n_value_heads)},
        {"batch", B_},
        {"sets", n_sets_}};
    const Traffic bytes_moved = traffic();
    const auto rate = [&](double us, double n_bytes, double ceiling) {
      return n_bytes / (us * 1e-6) / ceiling;
    };
    set_phases(false);
    graph.replay(period);  // warm; ends where it began
    if (period == 1) {
      std::vector<double> times = graph.replay(8 * windows);
      const double us = median(times) * scale;
      const double n_bytes = bytes_moved.due_read + bytes_moved.due_write;
      result["window_us"] = us;
      result["bytes"] = n_bytes;
      result["gb_per_s"] = n_bytes / us * 1e-3;
      result["of_copy_ceiling"] = rate(us, n_bytes, ceilings.copy);
      return finish(std::move(result));
    }
    std::vector<std::vector<double>> by_token(static_cast<std::size_t>(period));
    for (int w = 0; w < windows; ++w) {
      const std::vector<double> times = graph.replay(period);
      for (std::size_t t = 0; t < times.size(); ++t) by_token[t].push_back(times[t] * scale);
    }
    std::vector<double> us;
    for (const std::vector<double>& samples : by_token) us.push_back(median(samples));
    const double open = mean(us, 0, us.size() - 1), due = us.back();
    set_phases(true);
    graph.replay(period);  // first limits are reached; from here on every token finds some due
    const double spread =
        mean(graph.replay(2 * period), 0, static_cast<std::size_t>(2 * period)) * scale;
    const double open_bytes = bytes_moved.open_read + bytes_moved.open_write;
    const double due_bytes = bytes_moved.due_read + bytes_moved.due_write;
    result["open_us"] = open;
    result["first_us"] = us.front();
    result["last_open_us"] = us[us.size() - 2];
    result["due_us"] = due;
    result["window_us"] = mean(us, 0, us.size());
    result["spread_us"] = spread;
    result["bytes"] = open_bytes;
    result["gb_per_s"] = open_bytes / open * 1e-3;
    result["of_read_ceiling"] = rate(open, open_bytes, ceilings.read);
    result["due_bytes"] = due_bytes;
    result["due_over_bound"] = due * 1e-6 / (due_bytes / ceilings.copy);
    return finish(std::move(result));
  }

 private:
  json finish(json result) const {
    std::vector<float> out(out_.size() / 4);
    expect(cuda::copy_to_host(out.data(), out_.data(), out_.size()));
    for (const float x : out) {
      if (!(x - x == 0)) fail(setting_.scheme + ": an output is not finite");
    }
    char digest[17];
    std::snprintf(digest, sizeof digest, "%016llx",
                  static_cast<unsigned long long>(XXH3_64bits(out.data(), out_.size())));
    result["digest"] = digest;
    return result;
  }

  void fill_pages(std::int64_t n_slots) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> S(static_cast<std::size_t>(shape_.n_values()));
    constexpr std::int64_t kDistinct = 4;
    for (std::int64_t slot = 0; slot < std::min(kDistinct, n_slots); ++slot) {
      for (float& x : S) x = normal(random);
      const cuda::DeviceBytes dense = copy(S);
      expect(device_->hand_over(pool_, slot, reinterpret_cast<const float*>(dense.data()), 0, work_,
                                stream_.get()));
      stream_.wait();
    }
    for (std::int64_t slot = kDistinct; slot < n_slots; ++slot) {
      expect(cudaMemcpyAsync(slots_.data() + slot * slot_stride_,
                             slots_.data() + slot % kDistinct * slot_stride_,
                             static_cast<std::size_t>(page_stride_), cudaMemcpyDeviceToDevice,
                             stream_.get()),
             "copying pages");
    }
    stream_.wait();
  }

  void make_tokens() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const auto draw = [&](std::int64_t n, auto&& value) {
      std::vector<float> x(static_cast<std::size_t>(n));
      for (float& y : x) y = value();
      return copy(x);
    };
    const std::int64_t H = shape_.n_key_heads, HV = shape_.n_value_heads;
    const auto gaussian = [&] { return normal(random); };
    // One row q|k|v, raw gates: what engines hold.
    const std::int64_t row = 2 * H * shape_.K + HV * shape_.V;
    qkv_ = draw(B_ * row, gaussian);
    g_ = draw(B_ * HV * shape_.gate_width(), gaussian);
    beta_ = draw(B_ * HV, gaussian);
    A_log_ = draw(HV, [&] { return -2 + 0.5f * normal(random); });
    dt_bias_ = draw(HV * shape_.gate_width(), [&] { return -2 + normal(random); });
    out_ = bytes(B_ * HV * shape_.V * 4);
    const auto floats = [](const cuda::DeviceBytes& from) {
      return reinterpret_cast<const float*>(from.data());
    };
    token_.n_rows = B_;
    token_.q = floats(qkv_);
    token_.k = token_.q + H * shape_.K;
    token_.v = token_.k + H * shape_.K;
    token_.q_stride = token_.k_stride = token_.v_stride = row;
    token_.g = floats(g_), token_.g_stride = HV * shape_.gate_width();
    token_.beta = floats(beta_), token_.beta_stride = HV;
    token_.normalise = token_.raw_gates = true;
    token_.A_log = floats(A_log_), token_.dt_bias = floats(dt_bias_);
    token_.out = reinterpret_cast<float*>(out_.data());
    token_.out_stride = HV * shape_.V;
  }

  Traffic traffic() const {
    const LayerShape& s = shape_;
    const double B = B_, page = static_cast<double>(layer_.codec->page_bytes());
    const double token =
        4.0 * (2 * s.n_key_heads * s.K + s.n_value_heads * (s.V + s.gate_width() + 1));
    const double out = 4.0 * s.n_value_heads * s.V;
    const WindowBytes parts = layer_.window.parts();
    const double record =
        scheme_.period > 1
            ? static_cast<double>(parts.total() - parts.totals - parts.padding) / scheme_.period
            : 0;
    const double totals = static_cast<double>(parts.totals);
    Traffic t;
    t.open_read = B * (page + token + totals + record * (scheme_.period - 2) / 2.0);
    t.open_write = B * (record + totals + out);
    t.due_read = B * (page + token + totals + record * (scheme_.period - 1));
    t.due_write = B * (page + out);
    return t;
  }

  const Setting setting_;
  const Stream& stream_;
  const Scheme scheme_;
  const LayerShape shape_;
  const int B_;
  int n_sets_ = 0;
  CompiledLayer layer_;
  std::unique_ptr<cuda::DeviceLayer> device_;
  cuda::Workspace work_;
  std::int64_t page_stride_ = 0, slot_stride_ = 0;
  cuda::DeviceBytes slots_, cursors_, faults_, order_, qkv_, g_, beta_, A_log_, dt_bias_, out_;
  cuda::PoolView pool_;
  cuda::TokenView token_;
};

std::vector<Setting> settings(bool quick) {
  const LayerShape gdn{16, 32, 128, 128, Gate::kScalar}, kda{32, 32, 128, 128, Gate::kChannel};
  std::vector<Setting> all;
  const std::vector<int> batches =
      quick ? std::vector{1, 256} : std::vector{1, 8, 32, 64, 128, 256, 512, 1024};
  for (const LayerShape& shape : {gdn, kda}) {
    for (const char* scheme : {"fp32", "leapquant:8"}) {
      for (const int batch : batches) all.push_back({scheme, shape, batch});
    }
    for (const char* scheme :
         {"bf16", "int8", "int4", "int8,period=16", "leapquant:6", "leapquant:4", "pace:4",
          "pace:4,records=mixed", "pace:4/8,records=mixed", "stepquant:8", "stepquant:6",
          "stepquant:4", "stepquant:6,period=16", "stepquant:4,period=16",
          "stepquant:4,period=16,records=int8"}) {
      for (const int batch : quick ? std::vector{256} : std::vector{1, 8, 64, 256, 512}) {
        all.push_back({scheme, shape, batch});
      }
    }
  }
  if (quick) return all;
  for (const LayerShape& shape :
       {LayerShape{16, 48, 128, 128, Gate::kScalar}, LayerShape{32, 32, 128, 128, Gate::kScalar}}) {
    for (const char* scheme : {"fp32", "leapquant:8", "pace:4"})
      all.push_back({scheme, shape, 256});
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  bool quick = false;
  std::string out, only;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--quick") {
      quick = true;
    } else if (flag == "--out" && i + 1 < argc) {
      out = argv[++i];
    } else if (flag == "--only" && i + 1 < argc) {
      only = argv[++i];
    } else {
      fail("usage: bench_gpu [--quick] [--only SCHEME] [--out FILE.json]");
    }
  }
  cudaDeviceProp device;
  expect(cudaGetDeviceProperties(&device, 0), "asking for the device");
  const Stream stream;
  const Ceilings ceilings = measure_ceilings(stream);
  std::printf("%s, %d multiprocessors; read %.0f GB/s, copy %.0f GB/s\n", device.name,
              device.multiProcessorCount, 1e-9 * ceilings.read, 1e-9 * ceilings.copy);
  std::printf("%-36s %-7s %-6s %5s %9s %9s %9s %9s %7s %6s %6s %6s\n", "scheme", "gate", "heads",
              "batch", "open us", "due us", "window us", "spread us", "GB/s", "of rd", "of cp",
              "x f32");
  json report = {{"device", device.name},
                 {"multiprocessors", device.multiProcessorCount},
                 {"read_gb_per_s", 1e-9 * ceilings.read},
                 {"copy_gb_per_s", 1e-9 * ceilings.copy},
                 {"cases", json::array()}};
  std::vector<std::pair<std::string, double>> dense;  // f32 by gate, heads and batch
  for (const Setting& setting : settings(quick)) {
    if (!only.empty() && setting.scheme != "fp32" && setting.scheme != only) continue;
    json result = Case(setting, stream).run(ceilings, quick);
    const std::string key = result["gate"].get<std::string>() + result["heads"].get<std::string>() +
                            std::to_string(setting.batch);
    const double us = result["window_us"];
    if (setting.scheme == "fp32") dense.emplace_back(key, us);
    for (const auto& [same, f32] : dense) {
      if (same == key) result["times_f32"] = f32 / us;
    }
    const auto number = [&](const char* name) { return result.value(name, 0.0); };
    std::printf("%-36s %-7s %-6s %5d %9.2f %9.2f %9.2f %9.2f %7.0f %6.3f %6.3f %6.2f\n",
                setting.scheme.c_str(), result["gate"].get<std::string>().c_str(),
                result["heads"].get<std::string>().c_str(), setting.batch, number("open_us"),
                number("due_us"), us, number("spread_us"), number("gb_per_s"),
                number("of_read_ceiling"), number("of_copy_ceiling"), number("times_f32"));
    std::fflush(stdout);
    report["cases"].push_back(std::move(result));
  }
  if (!out.empty()) std::ofstream(out) << report.dump(1) << '\n';
  return 0;
}
