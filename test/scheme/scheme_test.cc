// Scheme names: what they mean, how they print, and what a wrong one is told.
#include <gmock/gmock.h>

#include <random>

#include "codec/codec.hpp"
#include "scheme/config.hpp"
#include "statepack/scheme.hpp"

namespace statepack {
namespace {

using ::testing::HasSubstr;

Scheme parse(std::string_view name) {
  auto scheme = Scheme::parse(name);
  EXPECT_TRUE(scheme.ok()) << scheme.status().message();
  return *scheme;
}

/// Every codec with every argument.
std::vector<std::string> heads() {
  std::vector<std::string> names;
  for (const CodecInfo* info : all_codecs()) {
    if (info->args.empty()) names.emplace_back(info->name);
    for (const std::string_view arg : info->args) {
      names.push_back(std::string(info->name) + ":" + std::string(arg));
    }
  }
  return names;
}

TEST(SchemeName, DefaultsComeFromTheCodec) {
  const Scheme int8 = parse("int8");
  EXPECT_EQ(int8.codec, "int8");
  EXPECT_EQ(int8.period, 1);
  EXPECT_EQ(int8.prefill_period, 0);
  const Scheme pace = parse("pace:4/8");
  EXPECT_EQ(pace.codec_arg, "4/8");
  EXPECT_EQ(pace.period, 8);
  EXPECT_EQ(pace.records, Records::kInt8);
  EXPECT_EQ(pace.phase, Phase::kHandover);
  EXPECT_EQ(pace.prefill_period, 256);
  const Scheme leap = parse("leapquant:8");
  EXPECT_EQ(leap.period, 16);
  EXPECT_EQ(leap.records, Records::kBf16);
  EXPECT_EQ(leap.phase, Phase::kAbsolute);
  EXPECT_EQ(parse("leapquant").name(), "leapquant:8");
}

TEST(SchemeName, OptionsAreRead) {
  const Scheme s = parse(
      "int8,period=12,records=mixed,mode=v,phase=absolute,prefill=64,beta=bf16,rounding=nearest");
  EXPECT_EQ(s.period, 12);
  EXPECT_EQ(s.records, Records::kMixed);
  EXPECT_EQ(s.mode, RecordMode::kV);
  EXPECT_EQ(s.phase, Phase::kAbsolute);
  EXPECT_EQ(s.prefill_period, 64);
  EXPECT_TRUE(s.beta_bf16);
}

TEST(SchemeName, PrintsTheShortestForm) {
  const std::pair<const char*, const char*> cases[] = {
      {"fp32", "fp32"},
      {"fp32,conv=f32", "fp32"},
      {"pace:4/8,conv=bf16,records=int8", "pace:4/8,conv=bf16"},
      {"int8,period=1", "int8"},
      {"int8,rounding=nearest,beta=f32", "int8"},
      {"stepquant:4,records=int8,period=16", "stepquant:4,period=16,records=int8"},
      {"leapquant:6,rank=2", "leapquant:6,rank=2"},
      {"leapquant:6,clip=on,rank=2,period=8", "leapquant:6,period=8,rank=2,clip=on"},
      {"leapquant:8,rank=4,period=16,records=bf16,phase=absolute", "leapquant:8"},
      {"leapquant:4,rank=4", "leapquant:4,rank=4"},
      {"pace:4/8,prefill=once", "pace:4/8,prefill=once"},
      {"pace:4,period=1", "pace:4,period=1"},
      {"pace:4,prefill=256", "pace:4"},
      {"int8,rounding=feedback,layout=column,scale=f32,residual=int4", "int8,rounding=feedback"},
      {"int8,residual=implied,rounding=feedback", "int8,rounding=feedback,residual=implied"},
      {"int8,rounding=feedback,layout=row", "int8,rounding=feedback,layout=row"},
      {"fp16,seed=7,rounding=stochastic", "fp16,rounding=stochastic,seed=7"},
      {"fp16,rounding=stochastic,seed=0", "fp16,rounding=stochastic"},
      {"fp8,layout=tile,scale=f32,format=e4m3", "fp8"},
      {"fp8,layout=column,scale=f32", "fp8,layout=column,scale=f32"},
      {"fp8,layout=column,scale=f16", "fp8,layout=column"},
      {"mxfp4,group=32", "mxfp4"},
      {"nvfp4,group=32,period=16", "nvfp4,period=16,group=32"},
      {"turboquant", "turboquant:4"},
  };
  for (const auto& [given, printed] : cases) {
    EXPECT_EQ(parse(given).name(), printed);
    EXPECT_EQ(parse(printed), parse(given));
  }
  EXPECT_EQ(parse("leapquant:4").full_name(),
            "leapquant:4,period=16,records=bf16,mode=u,phase=absolute,prefill=once,beta=f32,"
            "rounding=nearest,rank=8,rounds=1,clip=off,scales=f32,smooth=on");
  EXPECT_EQ(parse("fp32").full_name(), "fp32,period=1,prefill=once,beta=f32,rounding=nearest");
  EXPECT_EQ(parse("fp32,conv=bf16").full_name(),
            "fp32,period=1,prefill=once,beta=f32,conv=bf16,rounding=nearest");
}

TEST(SchemeName, EveryPrintedNameParsesBack) {
  for (const std::string& head : heads()) {
    for (const char* options :
         {"", ",period=1", ",period=2", ",period=4096", ",period=16,records=f32", ",prefill=1",
          ",period=16,records=bf16,mode=v", ",period=3,records=int8,phase=absolute",
          ",period=3,records=mixed,phase=handover,beta=bf16", ",prefill=1048576", ",prefill=once",
          ",conv=bf16"}) {
      const Scheme scheme = parse(head + options);
      const std::string name = scheme.name();
      EXPECT_EQ(parse(name).name(), name);
      EXPECT_EQ(parse(name), scheme);
      EXPECT_EQ(parse(scheme.full_name()), scheme) << scheme.full_name();
      EXPECT_EQ(parse(scheme.full_name()).name(), name);
      EXPECT_LE(name.size(), scheme.full_name().size());
    }
  }
}

TEST(SchemeName, KnowsWhetherItNeedsAPlan) {
  EXPECT_TRUE(parse("stepquant:6").needs_plan());
  EXPECT_TRUE(parse("pace:4/8").needs_plan());
  EXPECT_FALSE(parse("pace:4").needs_plan());
  EXPECT_FALSE(parse("leapquant:4").needs_plan());
}

TEST(SchemeName, WrongNamesGetOneClearMessage) {
  struct Case {
    const char* name;
    Code code;
    const char* message;
  };
  const Case cases[] = {
      {"", Code::kInvalidArgument, "scheme '': no codec is called ''; known are fp32, "},
      {"stepqant:4", Code::kInvalidArgument, "did you mean 'stepquant'?"},
      {"int9", Code::kInvalidArgument, "did you mean 'int8'?"},
      {"INT8", Code::kInvalidArgument, "no codec is called 'INT8'"},
      {"int8:4", Code::kInvalidArgument, "scheme 'int8:4': int8 takes no ':4'; leave it out"},
      {"leapquant:7", Code::kInvalidArgument,
       "scheme 'leapquant:7': leapquant:7 is not known; use leapquant: with one of 8, 6, 4"},
      {"leapquant:", Code::kInvalidArgument, "leapquant: is not known"},
      {"int8,", Code::kInvalidArgument,
       "scheme 'int8,': '' is not an option; write key=value between commas"},
      {"int8,period", Code::kInvalidArgument, "'period' is not an option"},
      {"int8,period=", Code::kInvalidArgument, "'period=' is not an option"},
      {"int8,=4", Code::kInvalidArgument, "'=4' is not an option"},
      {"int8,,period=2", Code::kInvalidArgument, "'' is not an option"},
      {"int8,peroid=4", Code::kInvalidArgument,
       "int8 has no option 'peroid'; allowed are period, records, mode, phase, prefill, beta, "
       "conv, rounding"},
      {"int8,peroid=4", Code::kInvalidArgument, "did you mean 'period'?"},
      {"int8,rank=4", Code::kInvalidArgument, "int8 has no option 'rank'"},
      {"int8,period=2,period=2", Code::kInvalidArgument, "option 'period' is given twice"},
      {"int8,period=0", Code::kInvalidArgument,
       "period=0 is not allowed; give a whole number of tokens from 1 to 4096"},
      {"int8,period=4097", Code::kInvalidArgument, "period=4097 is not allowed"},
      {"int8,period=016", Code::kInvalidArgument, "period=016 is not allowed"},
      {"int8,period=+16", Code::kInvalidArgument, "period=+16 is not allowed"},
      {"int8,period=-1", Code::kInvalidArgument, "period=-1 is not allowed"},
      {"int8,period=1e3", Code::kInvalidArgument, "period=1e3 is not allowed"},
      {"int8,period=99999999999999999999999999", Code::kInvalidArgument, "is not allowed"},
      {"int8,prefill=0", Code::kInvalidArgument,
       "prefill=0 is not allowed; give 'once' or a whole number of tokens from 1 to 1048576"},
      {"int8,prefill=1048577", Code::kInvalidArgument, "prefill=1048577 is not allowed"},
      {"int8,period=2,records=fp32", Code::kInvalidArgument,
       "records=fp32 is not known; use one of f32, bf16, int8, mixed; did you mean 'f32'?"},
      {"int8,period=2,mode=w", Code::kInvalidArgument, "mode=w is not known; use one of u, v"},
      {"int8,beta=fp16", Code::kInvalidArgument, "beta=fp16 is not known"},
      {"int8,conv=fp16", Code::kInvalidArgument, "conv=fp16 is not known"},
      {"int8,records=bf16", Code::kInvalidArgument,
       "records= describes the window of updates, and with period=1 there is none"},
      {"leapquant:8,period=1,mode=v", Code::kInvalidArgument, "mode= describes the window"},
      {"int8,phase=absolute", Code::kInvalidArgument, "phase= describes the window"},
      {"fp8,rounding=feedback", Code::kUnsupported,
       "fp8 cannot round by rounding=feedback; leave it out, or use one of int8, int6, int5, int4"},
      {"stepquant:6,rounding=stochastic", Code::kUnsupported,
       "stepquant cannot round by rounding=stochastic"},
      {"int8,rounding=up", Code::kInvalidArgument,
       "rounding=up is not known; use one of nearest, stochastic, feedback"},
      {"int8,seed=4", Code::kInvalidArgument, "seed= feeds stochastic rounding"},
      {"int8,rounding=stochastic,seed=1000000000", Code::kInvalidArgument, "seed=1000000000"},
      {"int8,residual=int4", Code::kInvalidArgument, "add that or drop it"},
      {"damp:6", Code::kInvalidArgument, "damp:6 is not known; use damp: with one of 8, 4, 4-lean"},
      {"leapquant:8,rank=99", Code::kInvalidArgument, "rank=99"},
      {"int8 ", Code::kInvalidArgument,
       "byte 4 of the scheme name (value 32) is not a visible ASCII character"},
      {"\xc3\xafnt8", Code::kInvalidArgument, "byte 0 of the scheme name (value 195)"},
      {"int8\n", Code::kInvalidArgument, "byte 4 of the scheme name (value 10)"},
  };
  for (const Case& c : cases) {
    const auto scheme = Scheme::parse(c.name);
    ASSERT_FALSE(scheme.ok()) << c.name;
    EXPECT_EQ(scheme.status().code(), c.code) << c.name;
    EXPECT_THAT(scheme.status().message(), HasSubstr(c.message)) << c.name;
  }
  EXPECT_THAT(Scheme::parse(std::string_view("int8\0,x=1", 9)).status().message(),
              HasSubstr("byte 4 of the scheme name (value 0)"));
  EXPECT_EQ(Scheme::parse(std::string(100000, 'a')).status().message(),
            "a scheme name of 100000 bytes is too long; at most 256 are allowed");
  EXPECT_FALSE(Scheme::parse(std::string(256, ',')).ok());
}

// Mutations of good names parse to something that prints back, or are refused with a message.
TEST(SchemeName, SurvivesMutations) {
  std::mt19937 random(1);
  const std::vector<std::string> names = heads();
  for (int i = 0; i < 20000; ++i) {
    std::string name = names[random() % names.size()] + ",period=16,records=int8,prefill=once";
    for (unsigned n = random() % 4; n > 0; --n) {
      const std::size_t at = random() % name.size();
      switch (random() % 3) {
        case 0:
          name[at] = static_cast<char>(random());
          break;
        case 1:
          name.erase(at, random() % 5);
          break;
        default:
          name.insert(at, name.substr(random() % name.size(), random() % 12));
      }
      if (name.empty()) name.push_back('x');
    }
    const auto scheme = Scheme::parse(name);
    if (scheme.ok()) {
      EXPECT_EQ(parse(scheme->name()), *scheme);
    } else {
      EXPECT_FALSE(scheme.status().message().empty());
    }
  }
}

TEST(CodecConfig, RefusesASchemeThatParseDidNotMake) {
  Scheme scheme;
  scheme.codec = "nothing";
  EXPECT_EQ(codec_config(scheme).status().message(), "no codec is called 'nothing'");
  scheme = parse("leapquant:8");
  scheme.codec_options = "colour=red";
  EXPECT_EQ(codec_config(scheme).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace statepack
