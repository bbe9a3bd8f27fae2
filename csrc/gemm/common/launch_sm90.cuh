// What the launchers of products share: matrices as kernels take them, with their tensor maps, and
// the launch itself.
#pragma once

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/math.h"
#include "kittens/kittens.cuh"

namespace thunderkittens::gemm {

// Matrices of adjacent elements of a row, as a global layout of `batch` times 1 times rows times
// columns.
template <class GL>
GL matrix_of(const void* data, int64_t rows, int64_t cols, int64_t stride, int64_t batch = 1,
             int64_t batch_stride = 0) {
    return GL(static_cast<typename GL::T*>(const_cast<void*>(data)), batch, nullptr, rows, cols,
              kittens::gl_strides{batch_stride, 0, stride});
}

// The same where one matrix may be all of the batch's, whose batch stride is 0 then.
template <class GL>
GL matrices_of(const void* data, int64_t rows, int64_t cols, int64_t stride, int64_t batch,
               int64_t batch_stride) {
    return matrix_of<GL>(data, rows, cols, stride, batch_stride != 0 ? batch : 1, batch_stride);
}

// The same for an output of 16 bits; where TMA does not store, a stand-in that nobody uses, at any
// address that a tensor map may have.
template <class GL>
GL output_of(bool by_tma, const void* out, int64_t rows, int64_t cols, int64_t stride,
             const void* stand_in) {
    return by_tma ? matrix_of<GL>(out, rows, cols, stride) : matrix_of<GL>(stand_in, 1, 64, 64);
}

// The tensor map of a matrix of rows of adjacent elements, in boxes of so many rows of 128 bytes.
template <class T>
CUtensorMap map_of_lines(const void* data, int64_t rows, int64_t cols, int64_t stride,
                         int64_t box_rows) {
    return kittens::host::encode_tensor_map(
        {.data = data,
         .type = kittens::detail::tensor_map_type<T>(),
         .element_bytes = sizeof(T),
         .dims = {static_cast<uint64_t>(cols), static_cast<uint64_t>(rows), 1, 1},
         .strides = {stride, 0, 0},
         .box = {128 / sizeof(T), static_cast<uint32_t>(box_rows), 1, 1},
         .swizzle_bytes = 128});
}

// Whether rows of a dtype, `stride` elements apart, can be read and written four elements at a
// time.
inline bool is_vec4_aligned(const void* data, int64_t stride, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % (4 * size_in_bytes(dtype)) == 0 && stride % 4 == 0;
}

// Launches a kernel that waits for the one before it by itself, with the threads and the shared
// memory of its traits.
template <class Traits, class Kernel, class... Arguments>
void launch_dependent(Kernel kernel, dim3 grid, dim3 cluster, Stream stream,
                      const Arguments&... arguments) {
    kittens::launch(kittens::LaunchOptions{.dependent = true}, kernel, grid, dim3(Traits::threads),
                    cluster, sizeof(typename Traits::Shared), stream, arguments...);
}

}  // namespace thunderkittens::gemm
