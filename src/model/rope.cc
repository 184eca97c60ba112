#include "model/rope.hpp"

#include <cmath>

namespace statepack {

RopeTable::RopeTable(int rotary_dim, double theta)
    : half_(rotary_dim / 2), frequency_(static_cast<std::size_t>(half_)) {
  for (std::size_t i = 0; i < frequency_.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / rotary_dim;
    frequency_[i] = static_cast<float>(std::pow(theta, -exponent));
  }
}

void RopeTable::set_positions(const std::vector<std::int64_t>& positions) {
  cos_.resize(positions.size() * frequency_.size());
  sin_.resize(cos_.size());
  std::size_t at = 0;
  for (std::int64_t t : positions) {
    for (float f : frequency_) {
      const float angle = static_cast<float>(t) * f;
      cos_[at] = std::cos(angle);
      sin_[at] = std::sin(angle);
      ++at;
    }
  }
}

void RopeTable::rotate(std::int64_t r, float* x) const {
  const float* c = cos_.data() + r * half_;
  const float* s = sin_.data() + r * half_;
  for (std::int64_t i = 0; i < half_; ++i) {
    const float a = x[i], b = x[i + half_];
    x[i] = a * c[i] - b * s[i];
    x[i + half_] = b * c[i] + a * s[i];
  }
}

}  // namespace statepack
