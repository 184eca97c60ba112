// Any text: refused with a reason, or a scheme whose printed names parse back to it.
#include "statepack/scheme.hpp"

#include "base/check.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n_bytes) {
  using namespace statepack;
  const std::string_view text(reinterpret_cast<const char*>(data), n_bytes);
  const auto scheme = Scheme::parse(text);
  if (!scheme.ok()) {
    SP_CHECK(!scheme.status().message().empty(), "an error says why");
    return 0;
  }
  for (const std::string& name : {scheme->name(), scheme->full_name()}) {
    const auto again = Scheme::parse(name);
    SP_CHECK(again.ok() && *again == *scheme, "a printed name is another scheme");
    SP_CHECK(again->name() == scheme->name(), "a name is not stable");
  }
  return 0;
}
