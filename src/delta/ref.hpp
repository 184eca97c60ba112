// The delta rule in plain loops: the specification of every other path. Double precision.
#pragma once

#include "statepack/types.hpp"

namespace statepack::ref {

/// One token of one head: S [K][V] in place, o [V]; q scaled, k normalised, g log decay
/// [1 or K], as in docs/models.md 5.4. Literal order: decay, read, write, readout.
void delta_step(int K, int V, Gate gate, double* S, const double* q, const double* k,
                const double* v, const double* g, double beta, double* o, double* u);

}  // namespace statepack::ref
