// Any text as tokenizer.json: refused, or a tokenizer that survives hostile text and ids.
#include "model/tokenizer.hpp"

#include "base/check.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n_bytes) {
  using namespace statepack;
  const std::string_view json(reinterpret_cast<const char*>(data), n_bytes);
  const auto tokenizer = Tokenizer::parse(json, "fuzz");
  if (!tokenizer.ok()) return 0;
  const Tokenizer& t = **tokenizer;
  // Words, digits, blanks, line ends, a combining mark, Han, an emoji, invalid UTF-8; and the file.
  const std::string_view texts[] = {"", "Hello, world's 12345  \r\n\t x",
                                    "e\xcc\x81 \xe6\xbc\xa2\xe5\xad\x97 \xf0\x9f\x98\x80 \xff\xc3",
                                    json.substr(0, 512)};
  for (const std::string_view text : texts) {
    for (const bool parse_special : {false, true}) {
      const std::vector<std::int32_t> ids = t.encode(text, parse_special);
      for (const std::int32_t id : ids) {
        SP_CHECK(id >= 0 && id < t.n_tokens(), "an id outside the vocabulary");
      }
      (void)t.decode(ids, parse_special);
    }
  }
  const std::int32_t hostile[] = {-1, 0, t.n_tokens() - 1, t.n_tokens(), INT32_MAX, INT32_MIN};
  (void)t.decode(hostile, true);
  for (const std::int32_t id : hostile) {
    (void)t.token_bytes(id);
    (void)t.is_special(id);
  }
  return 0;
}
