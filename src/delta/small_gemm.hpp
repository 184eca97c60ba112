// C = A B for the small f32 matrices of a chunk and of an attention block, all in cache.
#pragma once

#include <cstdint>

namespace statepack {

/// C[m][n] (+)= sum_k A[m * a_row + k * a_col] B[k * b_row + n], C at c_row; free strides make A
/// transposed or a sub-block. C must not overlap A or B. f32; every element is one chain of
/// multiply-adds in the order of k, whatever M and N are: a row's bits do not depend on the others.
void small_gemm(int M, int N, int K, const float* A, std::int64_t a_row, std::int64_t a_col,
                const float* B, std::int64_t b_row, float* C, std::int64_t c_row, bool accumulate);

}  // namespace statepack
