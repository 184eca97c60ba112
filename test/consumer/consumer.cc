// Reads a scheme's name through the installed C++ headers alone.
#include <iostream>

#include "statepack/scheme.hpp"
#include "statepack/types.hpp"

int main() {
  const auto scheme = statepack::Scheme::parse("int8,period=16");
  if (!scheme.ok()) {
    std::cerr << statepack::code_name(scheme.status().code()) << ": " << scheme.status().message()
              << '\n';
    return 1;
  }
  const statepack::LayerShape layer{16, 48, 128, 128, statepack::Gate::kScalar};
  std::cout << scheme->full_name() << ", " << layer.n_values() << " values a layer\n";
}
