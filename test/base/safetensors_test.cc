#include "base/safetensors.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/half.hpp"
#include "temporary_folder.hpp"

namespace statepack {
namespace {

/// A file around a hand-written header.
std::string file_of(const std::string& header, const std::string& data = "") {
  const std::uint64_t n_header = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &n_header, 8);
  return file + header + data;
}

/// One F32 tensor "x" whose fields are given.
std::string one(const std::string& fields, std::size_t n_data = 8) {
  return file_of("{\"x\":{" + fields + "}}", std::string(n_data, '\0'));
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

constexpr const char* kDamaged = "; the file is damaged: download or convert it again";

struct Refused {
  const char* what;
  std::string file;
  std::string message;  ///< without "t: " before and the advice behind
  Code code = Code::kCorrupt;
  const char* advice = kDamaged;
};

std::vector<Refused> refused_files() {
  const std::string header = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  const std::string good = file_of(header, std::string(8, '\0'));
  std::string huge_header = good;
  huge_header[7] = '\x7f';
  std::string past_limit = good;
  const std::uint64_t limit = 100'000'001;
  std::memcpy(past_limit.data(), &limit, 8);
  std::string deep = R"({"x":{"extra":)" + std::string(100000, '[');
  return {
      {"empty", "", "0 bytes are too few for a safetensors file"},
      {"seven bytes", good.substr(0, 7), "7 bytes are too few for a safetensors file"},
      {"header past the end", huge_header,
       "the header claims 9151314442816847926 bytes; at most 62 are possible"},
      {"header past the limit", past_limit,
       "the header claims 100000001 bytes; at most 62 are possible"},
      {"header cut", good.substr(0, 30), "the header claims 54 bytes; at most 22 are possible"},
      {"data cut", good.substr(0, good.size() - 1),
       "tensor 'x' takes bytes 0 to 8 of a data section of 7 bytes"},
      {"bytes behind", good + "z", "the last 1 bytes belong to no tensor"},
      {"no JSON", file_of("{\"x\":"), "the header is refused: it is not valid JSON at byte 6"},
      {"two values", file_of("{} {}"), "the header is refused: it is not valid JSON at byte 4"},
      {"invalid UTF-8", file_of("{\"\xff\":1}"),
       "the header is refused: it is not valid JSON at byte 3"},
      {"an array", file_of("[]"), "the header is refused: it is not a JSON object"},
      {"a number", file_of("7"), "the header is refused: it is not a JSON object"},
      {"too deep", file_of(deep), "the header is refused: it is nested deeper than 16 levels"},
      {"tensor is a string", file_of(R"({"x":"F32"})"),
       "the header is refused: tensor 'x' is not described by an object"},
      {"tensor is an array", file_of(R"({"x":[]})"),
       "the header is refused: tensor 'x' is not described by an object"},
      {"metadata not a string", file_of(R"({"__metadata__":{"a":1}})"),
       "the header is refused: 'a' holds a number"},
      {"metadata nested", file_of(R"({"__metadata__":{"a":{}}})"),
       "the header is refused: 'a' holds something that is not a string"},
      {"repeated tensor",
       file_of(R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"x":{}})", "12345678"),
       "the header is refused: the name 'x' is repeated"},
      {"repeated field", one(R"("dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8])"),
       "the header is refused: the name 'dtype' is repeated"},
      {"no dtype", one(R"("shape":[2],"data_offsets":[0,8])"), "tensor 'x': 'dtype' is missing"},
      {"no shape", one(R"("dtype":"F32","data_offsets":[0,8])"), "tensor 'x': 'shape' is missing"},
      {"no offsets", one(R"("dtype":"F32","shape":[2])"),
       "tensor 'x': 'data_offsets' is not a pair of numbers"},
      {"one offset", one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"),
       "tensor 'x': 'data_offsets' is not a pair of numbers"},
      {"three offsets", one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4,8])"),
       "the header is refused: tensor 'x': 'data_offsets' holds more than two numbers"},
      {"shape is a number", one(R"("dtype":"F32","shape":2,"data_offsets":[0,8])"),
       "the header is refused: tensor 'x': 'shape' holds a number"},
      {"shape is an object", one(R"("dtype":"F32","shape":{},"data_offsets":[0,8])"),
       "the header is refused: tensor 'x': 'shape' holds an object"},
      {"shape nested", one(R"("dtype":"F32","shape":[[2]],"data_offsets":[0,8])"),
       "the header is refused: tensor 'x': 'shape' holds a nested value"},
      {"negative dimension", one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
       "the header is refused: tensor 'x': 'shape' holds a negative number"},
      {"fractional dimension", one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"),
       "the header is refused: tensor 'x': 'shape' holds a fraction or a number past 64 bits"},
      {"64-bit dimension",
       one(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8])"),
       "the header is refused: tensor 'x': 'shape' holds a number past 63 bits"},
      {"too many dimensions",
       one(R"("dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2],"data_offsets":[0,8])"),
       "the header is refused: tensor 'x': 'shape' holds more than 16 dimensions"},
      {"text dimension", one(R"("dtype":"F32","shape":["2"],"data_offsets":[0,8])"),
       "the header is refused: tensor 'x': 'shape' holds a string"},
      {"dtype is a number", one(R"("dtype":7,"shape":[2],"data_offsets":[0,8])"),
       "the header is refused: tensor 'x': 'dtype' holds a number"},
      {"unknown dtype", one(R"("dtype":"F8_E4M3","shape":[2],"data_offsets":[0,8])"),
       "tensor 'x': dtype 'F8_E4M3' is not supported", Code::kUnsupported,
       "; convert it to F32, F16 or BF16"},
      {"lower-case dtype", one(R"("dtype":"f32","shape":[2],"data_offsets":[0,8])"),
       "tensor 'x': dtype 'f32' is not supported", Code::kUnsupported,
       "; convert it to F32, F16 or BF16"},
      {"product overflows",
       one(R"("dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,8])"),
       "tensor 'x': shape [4294967296, 4294967296, 2] overflows 63 bits"},
      {"bytes overflow", one(R"("dtype":"F32","shape":[4611686018427387906],"data_offsets":[0,8])"),
       "tensor 'x': shape [4611686018427387906] overflows 63 bits"},
      {"backwards", one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
       "tensor 'x' ends before it begins: bytes 8 to 0"},
      {"outside", one(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])"),
       "tensor 'x' takes bytes 4 to 12 of a data section of 8 bytes"},
      {"offsets at the border of 64 bits",
       one(R"("dtype":"F32","shape":[2],"data_offsets":[18446744073709551608,18446744073709551615])"),
       "tensor 'x' takes bytes 18446744073709551608 to 18446744073709551615 of a data section of "
       "8 bytes"},
      {"shape too small", one(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"),
       "tensor 'x': shape [1] of F32 needs 4 bytes but has 8"},
      {"shape too large", one(R"("dtype":"F64","shape":[2],"data_offsets":[0,8])"),
       "tensor 'x': shape [2] of F64 needs 16 bytes but has 8"},
      {"overlap",
       file_of(R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
               R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
               "12345678"),
       "tensors 'a' and 'b' overlap"},
      {"same range twice",
       file_of(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
               R"("b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
               "12345678"),
       "tensors 'a' and 'b' overlap"},
      {"gap",
       file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
               R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
               "12345678"),
       "2 bytes before tensor 'b' belong to no tensor"},
      {"gap at the front", one(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"),
       "4 bytes before tensor 'x' belong to no tensor"},
      {"control characters in a name",
       file_of(R"({"a\n\u001b[31m":{"dtype":"U8","shape":[9],"data_offsets":[0,8]}})", "12345678"),
       "tensor 'a??[31m': shape [9] of U8 needs 9 bytes but has 8"},
      {"long name",
       file_of("{\"" + std::string(5000, 'n') + R"(":{"shape":[8],"data_offsets":[0,8]}})",
               "12345678"),
       "tensor '" + std::string(96, 'n') + "...': 'dtype' is missing"},
  };
}

TEST(SafeTensors, RefusesEveryBrokenFileWithOneClearSentence) {
  for (const Refused& c : refused_files()) {
    const auto result = SafeTensors::parse(bytes_of(c.file), "t");
    ASSERT_FALSE(result.ok()) << c.what;
    EXPECT_EQ(result.status().code(), c.code) << c.what;
    EXPECT_EQ(result.status().message(), "t: " + c.message + c.advice) << c.what;
  }
}

TEST(SafeTensors, HeaderIsBoundedWhateverTheFileHolds) {
  const TemporaryFolder folder;
  const std::uint64_t n_header = 100'000'001;
  std::string start(8, '\0');
  std::memcpy(start.data(), &n_header, 8);
  folder.put("big", start);
  std::filesystem::resize_file(folder / "big", n_header + 8);  // sparse
  EXPECT_EQ(SafeTensors::open(folder / "big").status().message(),
            folder / "big" + ": the header claims 100000001 bytes; at most 100000000 are possible" +
                kDamaged);
}

TEST(SafeTensors, EveryTruncationIsRefused) {
  SafeTensorsWriter writer;
  writer.set_metadata("format", "pt");
  writer.add("a", DType::kU8, {3}, bytes_of("abc"));
  writer.add("b", DType::kF32, {2}, bytes_of("12345678"));
  const std::string good = writer.serialize();
  ASSERT_TRUE(SafeTensors::parse(bytes_of(good), "t").ok());
  for (std::size_t n = 0; n < good.size(); ++n) {
    const std::string cut = good.substr(0, n);
    EXPECT_EQ(SafeTensors::parse(bytes_of(cut), "t").status().code(), Code::kCorrupt) << n;
  }
}

TEST(SafeTensors, ReadsWhatTheFormatAllows) {
  // Scalars, empty tensors, padding behind the header, fields of later versions.
  const std::string file = file_of(
      R"({"__metadata__":{"format":"pt"},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
      R"("e":{"dtype":"BF16","shape":[0,7],"data_offsets":[4,4]},)"
      R"("n":{"dtype":"I8","shape":[2],"data_offsets":[4,6],"later":{"a":[1,-2,null,true,0.5]}}}  )",
      std::string("\x00\x00\x80\x3f\x01\x02", 6));
  const auto result = SafeTensors::parse(bytes_of(file), "t");
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->metadata().at("format"), "pt");
  EXPECT_EQ(result->tensors().size(), 3U);
  const TensorView* scalar = result->find("s");
  ASSERT_NE(scalar, nullptr);
  EXPECT_EQ(scalar->n_elements(), 1);
  EXPECT_EQ(scalar->shape_string(), "[]");
  EXPECT_EQ(to_f32(*scalar)->at(0), 1.0F);
  EXPECT_EQ(result->find("e")->n_elements(), 0);
  EXPECT_TRUE(to_f32(*result->find("e"))->empty());
  EXPECT_EQ(result->find("none"), nullptr);
}

TEST(SafeTensors, GetChecksTheShape) {
  SafeTensorsWriter writer;
  writer.add("w", DType::kU8, {2, 3}, bytes_of("abcdef"));
  const std::string file = writer.serialize();
  const auto result = SafeTensors::parse(bytes_of(file), "t.safetensors");
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result->get("w", {2, 3}).ok());
  EXPECT_TRUE(result->get("w", {-1, 3}).ok());
  const Status shape = result->get("w", {-1, 4}).status();
  EXPECT_EQ(shape.code(), Code::kMismatch);
  EXPECT_EQ(shape.message(),
            "t.safetensors: tensor 'w' has shape [2, 3] where [*, 4] is needed; it does not belong "
            "to this configuration");
  EXPECT_EQ(result->get("w", {6}).status().code(), Code::kMismatch);
  const Status missing = result->get("v", {1}).status();
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_EQ(
      missing.message(),
      "t.safetensors: there is no tensor 'v'; the file belongs to another kind of model or is "
      "incomplete");
}

TEST(SafeTensors, WidensUnalignedHalves) {
  // One byte in front makes every other tensor unaligned.
  const std::uint16_t f16[2] = {0x3c00, 0x8001};
  const std::uint16_t bf16[2] = {0x4049, 0xff80};
  const float f32[1] = {-0.1F};
  std::string data = "z";
  data.append(reinterpret_cast<const char*>(f16), 4);
  data.append(reinterpret_cast<const char*>(bf16), 4);
  data.append(reinterpret_cast<const char*>(f32), 4);
  const std::string file = file_of(R"({"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},)"
                                   R"("b":{"dtype":"F16","shape":[2],"data_offsets":[1,5]},)"
                                   R"("c":{"dtype":"BF16","shape":[2],"data_offsets":[5,9]},)"
                                   R"("d":{"dtype":"F32","shape":[1],"data_offsets":[9,13]}})",
                                   data);
  const auto result = SafeTensors::parse(bytes_of(file), "t");
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(*to_f32(*result->find("b")), (std::vector<float>{1.0F, -0x1p-24F}));
  EXPECT_EQ(*to_f32(*result->find("c")), (std::vector<float>{3.140625F, -INFINITY}));
  EXPECT_EQ(*to_f32(*result->find("d")), (std::vector<float>{-0.1F}));
  const Status status = to_f32(*result->find("a")).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message(), "tensor 'a' is BOOL where F32, F16 or BF16 is needed; convert it");
}

TEST(SafeTensorsWriter, RoundTripsAlignedAndInOneOrder) {
  const auto build = [](bool reversed) {
    SafeTensorsWriter writer;
    const auto add_bytes = [&] { writer.add("a.bits", DType::kU8, {3}, bytes_of("abc")); };
    const auto add_floats = [&] { writer.add("b", DType::kF32, {1, 2}, bytes_of("12345678")); };
    if (reversed) add_floats();
    add_bytes();
    if (!reversed) add_floats();
    writer.add("c", DType::kF16, {0}, {});
    writer.set_metadata("k", "v \"quoted\"");
    return writer.serialize();
  };
  const std::string file = build(false);
  EXPECT_EQ(file, build(true));
  std::uint64_t n_header = 0;
  std::memcpy(&n_header, file.data(), 8);
  EXPECT_EQ(n_header % 8, 0U);
  const auto result = SafeTensors::parse(bytes_of(file), "t");
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->metadata().at("k"), "v \"quoted\"");
  for (const auto& [name, tensor] : result->tensors()) {
    const auto offset = static_cast<std::size_t>(tensor.data - bytes_of(file).data());
    EXPECT_EQ(offset % dtype_bytes(tensor.dtype), 0U) << name;
  }
  EXPECT_EQ(result->get("b", {1, 2})->dtype, DType::kF32);
  EXPECT_EQ(std::memcmp(result->find("a.bits")->data, "abc", 3), 0);

  const TemporaryFolder folder;
  SafeTensorsWriter empty;
  ASSERT_TRUE(empty.write(folder / "empty").ok());
  const auto opened = SafeTensors::open(folder / "empty");
  ASSERT_TRUE(opened.ok());
  EXPECT_EQ(opened->label(), folder / "empty");
  EXPECT_TRUE(opened->tensors().empty());
}

TEST(SafeTensorsWriter, InvalidUtf8DoesNotThrow) {
  SafeTensorsWriter writer;
  writer.set_metadata("k", "\xff");
  EXPECT_TRUE(SafeTensors::parse(bytes_of(writer.serialize()), "t").ok());
}

TEST(DTypes, NamesAndSizes) {
  EXPECT_EQ(dtype_name(DType::kBF16), "BF16");
  EXPECT_EQ(dtype_name(DType::kBool), "BOOL");
  EXPECT_EQ(dtype_bytes(DType::kF64), 8U);
  EXPECT_EQ(dtype_bytes(DType::kI16), 2U);
}

std::string shard(const std::string& name, const std::string& data) {
  SafeTensorsWriter writer;
  writer.add(name, DType::kU8, {static_cast<std::int64_t>(data.size())}, bytes_of(data));
  return writer.serialize();
}

TEST(Checkpoint, ReadsOneFile) {
  const TemporaryFolder folder;
  folder.put("model.safetensors", shard("w", "abc"));
  folder.put("model.safetensors.index.json", "not looked at");
  const auto result = Checkpoint::open(folder.path());
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_TRUE(result->get("w", {3}).ok());
}

TEST(Checkpoint, ReadsShards) {
  const TemporaryFolder folder;
  folder.put("m-1.safetensors", shard("w", "abc"));
  folder.put("m-2.safetensors", shard("v", "de"));
  folder.put("model.safetensors.index.json",
             R"({"metadata":{"total_size":5},)"
             R"("weight_map":{"w":"m-1.safetensors","v":"m-2.safetensors"}})");
  const auto result = Checkpoint::open(folder.path());
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->tensors().size(), 2U);
  EXPECT_EQ(std::memcmp(result->find("w")->data, "abc", 3), 0);
  const Status shape = result->get("v", {3}).status();
  EXPECT_EQ(shape.code(), Code::kMismatch);
  EXPECT_EQ(shape.message(), folder / "m-2.safetensors" +
                                 ": tensor 'v' has shape [2] where [3] is needed; it does not "
                                 "belong to this configuration");
  EXPECT_EQ(result->get("u", {}).status().message(),
            folder.path() +
                ": there is no tensor 'u'; the file belongs to another kind of model "
                "or is incomplete");
}

TEST(Checkpoint, RefusesBrokenIndexes) {
  struct Case {
    std::string index;
    Code code;
    std::string message;  ///< behind the path of the index
  };
  const std::string trust =
      ", which is not a plain file name; do not use this checkpoint unless you trust its source";
  const std::vector<Case> cases = {
      {"{", Code::kCorrupt,
       std::string("the index is refused: it is not valid JSON at byte 2") + kDamaged},
      {"[]", Code::kCorrupt,
       std::string("the index is refused: it is not a JSON object") + kDamaged},
      {"{}", Code::kCorrupt, std::string("'weight_map' is missing") + kDamaged},
      {R"({"weight_map":["w"]})", Code::kCorrupt,
       std::string("the index is refused: 'weight_map' does not map tensor names to file names") +
           kDamaged},
      {R"({"weight_map":{"w":3}})", Code::kCorrupt,
       std::string("the index is refused: 'weight_map' does not map tensor names to file names") +
           kDamaged},
      {R"({"weight_map":{"w":{}}})", Code::kCorrupt,
       std::string("the index is refused: 'weight_map' does not map tensor names to file names") +
           kDamaged},
      {R"({"weight_map":{"w":"m-1.safetensors","w":"m-1.safetensors"}})", Code::kCorrupt,
       std::string("the index is refused: the name 'w' is repeated") + kDamaged},
      {R"({"weight_map":{"w":"../m-1.safetensors"}})", Code::kCorrupt,
       "tensor 'w' is in '../m-1.safetensors'" + trust},
      {R"({"weight_map":{"w":"/etc/passwd"}})", Code::kCorrupt,
       "tensor 'w' is in '/etc/passwd'" + trust},
      {R"({"weight_map":{"w":"sub/m-1.safetensors"}})", Code::kCorrupt,
       "tensor 'w' is in 'sub/m-1.safetensors'" + trust},
      {R"({"weight_map":{"w":".hidden"}})", Code::kCorrupt, "tensor 'w' is in '.hidden'" + trust},
      {R"({"weight_map":{"w":"a..b"}})", Code::kCorrupt, "tensor 'w' is in 'a..b'" + trust},
      {R"({"weight_map":{"w":".."}})", Code::kCorrupt, "tensor 'w' is in '..'" + trust},
      {R"({"weight_map":{"w":""}})", Code::kCorrupt, "tensor 'w' is in ''" + trust},
      {R"({"weight_map":{"w":"m\u0000.safetensors"}})", Code::kCorrupt,
       "tensor 'w' is in 'm?.safetensors'" + trust},
      {R"({"weight_map":{"w":"m-9.safetensors"}})", Code::kNotFound,
       "shard 'm-9.safetensors' is missing from the folder; download it too"},
      {R"({"weight_map":{"v":"m-1.safetensors"}})", Code::kCorrupt,
       "tensor 'v' is listed for shard 'm-1.safetensors' but is not in it; download index and "
       "shards again"},
  };
  const TemporaryFolder folder;
  folder.put("m-1.safetensors", shard("w", "abc"));
  for (const Case& c : cases) {
    const std::string path = folder.put("model.safetensors.index.json", c.index);
    const Status status = Checkpoint::open(folder.path()).status();
    EXPECT_EQ(status.code(), c.code) << c.index;
    EXPECT_EQ(status.message(), path + ": " + c.message);
  }
}

TEST(Checkpoint, MissingAndBrokenFiles) {
  const TemporaryFolder folder;
  const Status none = Checkpoint::open(folder.path()).status();
  EXPECT_EQ(none.code(), Code::kNotFound);
  EXPECT_EQ(none.message(), "'" + folder.path() +
                                "' holds neither model.safetensors nor "
                                "model.safetensors.index.json; give the folder of a downloaded "
                                "checkpoint");
  folder.put("m.safetensors", "short");
  folder.put("model.safetensors.index.json", R"({"weight_map":{"w":"m.safetensors"}})");
  EXPECT_EQ(Checkpoint::open(folder.path()).status().message(),
            folder / "m.safetensors" + ": 5 bytes are too few for a safetensors file" + kDamaged);
}

TEST(Checkpoint, ReadsTheModelOfThisRepository) {
  const auto result = Checkpoint::open(SP_SOURCE_DIR "/models/statepack-gdn");
  ASSERT_TRUE(result.ok()) << result.status().message();
  std::int64_t n_elements = 0;
  for (const auto& [name, tensor] : result->tensors()) n_elements += tensor.n_elements();
  EXPECT_GT(n_elements, 10'000'000);
}

}  // namespace
}  // namespace statepack
