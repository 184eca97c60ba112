// Loading: one clear error for each way a checkpoint can be damaged, and what its fingerprint
// tells.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../base/temporary_folder.hpp"
#include "base/file.hpp"
#include "base/safetensors.hpp"
#include "model/model.hpp"
#include "model/weights.hpp"

namespace statepack {
namespace {

const std::string kTiny = SP_SOURCE_DIR "/test/data/tiny/";

struct Tensor {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};
using Tensors = std::map<std::string, Tensor>;

Tensors read(const std::string& dir) {
  const auto checkpoint = Checkpoint::open(dir);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  Tensors out;
  for (const auto& [name, view] : checkpoint->tensors()) {
    out[name] = {view.dtype, view.shape, {view.data, view.data + view.n_bytes}};
  }
  return out;
}

// A copy of a tiny model with other tensors, in one file, and another config.
class Copy {
 public:
  Copy(const std::string& model, const std::function<void(Tensors&)>& change,
       const std::string& config_change = "") {
    std::string config = *read_text_file(kTiny + model + "/config.json", 1 << 20);
    if (!config_change.empty()) config.insert(config.find('{') + 1, config_change + ",");
    folder_.put("config.json", config);
    Tensors tensors = read(kTiny + model);
    change(tensors);
    SafeTensorsWriter writer;
    for (const auto& [name, t] : tensors) writer.add(name, t.dtype, t.shape, t.data);
    EXPECT_TRUE(writer.write(folder_ / "model.safetensors").ok());
  }
  const std::string& dir() const { return folder_.path(); }
  std::string error() const {
    ThreadPool threads(1);
    const auto model = Model::load(dir(), threads);
    EXPECT_FALSE(model.ok());
    return model.ok() ? "" : model.status().message();
  }
  std::string fingerprint() const {
    ThreadPool threads(2);
    const auto model = Model::load(dir(), threads);
    EXPECT_TRUE(model.ok()) << model.status().message();
    return model.ok() ? (*model)->fingerprint() : "";
  }

 private:
  TemporaryFolder folder_;
};

void set_f32(Tensors& tensors, const std::string& name, std::size_t at, float x) {
  std::memcpy(tensors.at(name).data.data() + 4 * at, &x, 4);
}
void set_16(Tensors& tensors, const std::string& name, std::size_t at, std::uint16_t bits) {
  std::memcpy(tensors.at(name).data.data() + 2 * at, &bits, 2);
}

struct Damage {
  const char* model;
  std::function<void(Tensors&)> change;
  const char* message;  ///< contained in the error
};

TEST(Checkpoint, EveryDamageGetsOneClearError) {
  const std::string gdn = "model.layers.0.linear_attn.";
  const Damage cases[] = {
      {"dense", [](Tensors& t) { t.erase("model.embed_tokens.weight"); },
       "there is no tensor 'model.embed_tokens.weight'; it is not a complete text model"},
      {"dense", [&](Tensors& t) { t.erase(gdn + "A_log"); },
       "there is no tensor 'model.layers.0.linear_attn.A_log'"},
      {"dense", [](Tensors& t) { t.erase("model.layers.1.mlp.up_proj.weight"); },
       "there is no tensor 'model.layers.1.mlp.up_proj.weight'"},
      {"next", [](Tensors& t) { t.erase("lm_head.weight"); },
       "there is no tensor 'lm_head.weight'"},
      {"next", [](Tensors& t) { t.erase("model.layers.0.mlp.experts.5.down_proj.weight"); },
       "there is no tensor 'model.layers.0.mlp.experts.5.down_proj.weight'"},
      {"kimi", [](Tensors& t) { t.erase("model.layers.1.self_attn.kv_a_layernorm.weight"); },
       "there is no tensor 'model.layers.1.self_attn.kv_a_layernorm.weight'"},
      {"dense",
       [&](Tensors& t) {
         t.at(gdn + "out_proj.weight").shape = {64, 48};
       },
       "tensor 'model.layers.0.linear_attn.out_proj.weight' has shape [64, 48] where [48, 64] is "
       "needed"},
      {"dense",
       [&](Tensors& t) {
         t.at(gdn + "conv1d.weight").shape = {192, 3};
       },
       "tensor 'model.layers.0.linear_attn.conv1d.weight' has shape [192, 3] where [192, 1, 3] is "
       "needed"},
      {"dense", [](Tensors& t) { t.at("model.layers.1.mlp.up_proj.weight").dtype = DType::kI32; },
       "tensor 'model.layers.1.mlp.up_proj.weight' has dtype I32; weights must be BF16, F16 or "
       "F32"},
      {"dense", [](Tensors& t) { set_f32(t, "model.embed_tokens.weight", 3071, NAN); },
       "tensor 'model.embed_tokens.weight' holds NaN or Inf; the checkpoint is damaged, download "
       "it "
       "again"},
      {"dense", [&](Tensors& t) { set_f32(t, gdn + "A_log", 1, INFINITY); },
       "tensor 'model.layers.0.linear_attn.A_log' holds NaN or Inf"},
      {"next", [](Tensors& t) { set_16(t, "lm_head.weight", 7, 0xfe00); },  // f16 NaN
       "tensor 'lm_head.weight' holds NaN or Inf"},
      {"kimi",
       [](Tensors& t) { set_16(t, "model.layers.1.block_sparse_moe.gate.weight", 0, 0x7f80); },
       "tensor 'model.layers.1.block_sparse_moe.gate.weight' holds NaN or Inf"},  // bf16 Inf
  };
  for (const Damage& damage : cases) {
    const Copy copy(damage.model, damage.change);
    const std::string error = copy.error();
    EXPECT_THAT(error, ::testing::HasSubstr(damage.message));
    EXPECT_THAT(error, ::testing::StartsWith(copy.dir()));
    EXPECT_EQ(error.find(copy.dir()), error.rfind(copy.dir())) << error;
  }
}

// 0x7bff and 0x7f7f are the largest finite f16 and bf16: one bit below the ones refused above.
TEST(Checkpoint, LargestFiniteWeightsAreTaken) {
  EXPECT_NE(Copy("next", [](Tensors& t) { set_16(t, "lm_head.weight", 7, 0x7bff); }).fingerprint(),
            "");
  EXPECT_NE(Copy("kimi", [](Tensors& t) { set_16(t, "lm_head.weight", 7, 0xff7f); }).fingerprint(),
            "");
}

TEST(Checkpoint, AFolderWithoutWeightsSaysSo) {
  TemporaryFolder folder;
  folder.put("config.json", *read_text_file(kTiny + "dense/config.json", 1 << 20));
  ThreadPool threads(1);
  const auto model = Model::load(folder.path(), threads);
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.status().code(), Code::kNotFound);
  EXPECT_THAT(model.status().message(), ::testing::HasSubstr("model.safetensors"));
}

// A header of odd length shifts every tensor: reading must not assume alignment.
TEST(Checkpoint, MisalignedTensorsAreRead) {
  const Copy plain("next", [](Tensors&) {});
  const std::string bytes = *read_text_file(plain.dir() + "/model.safetensors", 1 << 24);
  std::uint64_t n = 0;
  std::memcpy(&n, bytes.data(), 8);
  const std::uint64_t longer = n + 1;
  std::string shifted(reinterpret_cast<const char*>(&longer), 8);
  shifted += bytes.substr(8, n) + " " + bytes.substr(8 + n);
  TemporaryFolder folder;
  folder.put("config.json", *read_text_file(plain.dir() + "/config.json", 1 << 20));
  folder.put("model.safetensors", shifted);
  ThreadPool threads(1);
  const auto model = Model::load(folder.path(), threads);
  ASSERT_TRUE(model.ok()) << model.status().message();
  DenseState a = (*model)->new_dense_state();
  const auto kv = (*model)->new_kv_cache();
  std::vector<float> logits(64);
  const std::int32_t tokens[] = {1, 2, 3};
  ASSERT_TRUE((*model)->prefill(tokens, 0, a, *kv, 1, logits.data()).ok());
  const auto reference = Model::load(plain.dir(), threads);
  DenseState b = (*reference)->new_dense_state();
  const auto kv_b = (*reference)->new_kv_cache();
  std::vector<float> want(64);
  ASSERT_TRUE((*reference)->prefill(tokens, 0, b, *kv_b, 1, want.data()).ok());
  EXPECT_EQ(logits, want);
  EXPECT_EQ(a.S, b.S);
}

TEST(Fingerprint, FollowsTheContentOnly) {
  ThreadPool threads(2);
  const std::string moe = (*Model::load(kTiny + "moe", threads))->fingerprint();
  EXPECT_EQ(moe.size(), 64U);
  // The same tensors in one file instead of two.
  EXPECT_EQ(Copy("moe", [](Tensors&) {}).fingerprint(), moe);
  // What the arithmetic does not depend on.
  EXPECT_EQ(Copy(
                "moe", [](Tensors&) {}, R"("transformers_version": "9")")
                .fingerprint(),
            moe);
  // One bit of one weight; a field of the configuration.
  EXPECT_NE(Copy("moe", [](Tensors& t) { t.at("lm_head.weight").data[100] ^= std::byte{1}; })
                .fingerprint(),
            moe);
  const std::string kimi = (*Model::load(kTiny + "kimi", threads))->fingerprint();
  EXPECT_NE(Copy(
                "kimi", [](Tensors&) {}, R"("kv_a_norm_eps": 1e-5)")
                .fingerprint(),
            kimi);
}

TEST(Fingerprint, SampleRunsStayInsideAndCoverTheEnds) {
  for (std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{196608}, std::size_t{196609},
                        std::size_t{1} << 20, (std::size_t{1} << 33) + 7}) {
    const auto runs = sample_runs(n);
    EXPECT_EQ(runs.front().first, 0U);
    EXPECT_EQ(runs.back().first + runs.back().second, n);
    std::size_t end = 0, total = 0;
    for (const auto& [begin, size] : runs) {
      EXPECT_GE(begin, end);
      EXPECT_EQ(begin % 64, 0U);
      end = begin + size;
      total += size;
    }
    EXPECT_LE(total, std::size_t{200} << 10);
  }
}

}  // namespace
}  // namespace statepack
