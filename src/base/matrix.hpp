// Dense square matrices in double, row-major: for constants that are computed once.
#pragma once

#include <span>

namespace statepack {

/// `inverse` = A^-1 by Gauss-Jordan elimination with row pivoting; both [n][n], not overlapping.
/// False, with `inverse` unspecified, when A is singular to working precision or not finite.
bool invert(std::span<const double> A, int n, std::span<double> inverse);

/// A = U diag(values) U^T of a symmetric A [n][n] by cyclic Jacobi rotations: `values` [n] falling,
/// row i of `vectors` [n][n] the unit eigenvector of value i, its largest component positive.
/// Errors are a few n 2^-52 |A|. `A` is used up.
void symmetric_eigen(std::span<double> A, int n, std::span<double> values,
                     std::span<double> vectors);

}  // namespace statepack
