#include "delta/ref.hpp"

#include <cmath>
#include <cstdint>

namespace statepack::ref {

void delta_step(int K, int V, Gate gate, double* S, const double* q, const double* k,
                const double* v, const double* g, double beta, double* o, double* u) {
  const auto at = [&](int i, int j) -> double& { return S[std::int64_t{i} * V + j]; };
  // R = D S: decay first.
  for (int i = 0; i < K; ++i) {
    const double d = std::exp(g[gate == Gate::kScalar ? 0 : i]);
    for (int j = 0; j < V; ++j) at(i, j) *= d;
  }
  // u = beta (v - R^T k)
  for (int j = 0; j < V; ++j) {
    double retained = 0;
    for (int i = 0; i < K; ++i) retained += k[i] * at(i, j);
    u[j] = beta * (v[j] - retained);
  }
  // X = R + k u^T
  for (int i = 0; i < K; ++i) {
    for (int j = 0; j < V; ++j) at(i, j) += k[i] * u[j];
  }
  // o = X^T q, from X before anything is rounded
  for (int j = 0; j < V; ++j) {
    o[j] = 0;
    for (int i = 0; i < K; ++i) o[j] += q[i] * at(i, j);
  }
}

}  // namespace statepack::ref
