// Elementwise functions over one row, f32, the same bits on every instruction set.
#pragma once

#include <cstdint>

namespace statepack {

/// gate = SiLU(gate) up
void silu_times(float* gate, const float* up, std::int64_t n);
/// y = y SiLU(z)
void times_silu(float* y, const float* z, std::int64_t n);
/// y = y sigmoid(z)
void times_sigmoid(float* y, const float* z, std::int64_t n);
/// y = sigmoid(x)
void sigmoid(const float* x, std::int64_t n, float* y);
/// y += x
void add(float* y, const float* x, std::int64_t n);
/// y += a x
void add_scaled(float* y, float a, const float* x, std::int64_t n);
/// Log decay of the delta rule: g = -rate softplus(x + bias), rate = e^{A_log}; softplus(t) = ln(1
/// + e^t), t itself above 20.
void softplus_decay(const float* x, const float* bias, float rate, std::int64_t n, float* g);
/// The bounded variant: g = bound sigmoid(rate (x + bias)), bound < 0.
void bounded_decay(const float* x, const float* bias, float rate, float bound, std::int64_t n,
                   float* g);

}  // namespace statepack
