// Which part of a call a block works on, and the operands of all kernels: a head of a batch, up to
// 64 columns of its values, and a segment of its chunks. A segment begins with the state that the
// ones before it leave.
#pragma once

#include "csrc/linear_attention/based/running_state.cuh"

namespace thunderkittens::linear_attention {

struct Segments {
    int heads, batch_heads, length, value_dim;  // batch_heads: heads of all batches
    int slices, segments, segment_chunks;

    Segments(const BasedProblem& p, int _segments)
        : heads(int(p.heads)),
          batch_heads(int(p.batch * p.heads)),
          length(int(p.length)),
          value_dim(int(p.value_dim)),
          slices(int((p.value_dim + VALUES - 1) / VALUES)),
          segments(_segments),
          segment_chunks(int((chunks_of(p) + _segments - 1) / _segments)) {}

    struct WorkTile {
        int b, head, batch_head, segment, slice;
        int begin, end;  // chunks

        __device__ __forceinline__ int first_column() const { return slice * VALUES; }
        __device__ __forceinline__ int chunks() const { return end - begin; }
    };
    __device__ __forceinline__ WorkTile work_tile() const {
        int index = static_cast<int>(blockIdx.x);
        WorkTile work;
        work.slice = index % slices;
        index /= slices;
        work.segment = index % segments;
        work.batch_head = index / segments;
        work.head = work.batch_head % heads;
        work.b = work.batch_head / heads;
        const int chunks = (length + CHUNK - 1) / CHUNK;
        work.begin = ::min(work.segment * segment_chunks, chunks);
        work.end = ::min(work.begin + segment_chunks, chunks);
        return work;
    }
    int64_t blocks(int64_t batch) const { return batch * heads * segments * slices; }
    // Of states of segments, which lie together for each head.
    __device__ __forceinline__ int64_t state(const WorkTile& work) const {
        return int64_t(work.batch_head) * segments + work.segment;
    }
    __device__ __forceinline__ int tokens(int chunk) const {
        return ::min(length - chunk * CHUNK, CHUNK);
    }
};

// Rows that threads read or write themselves.
template <class T>
struct StridedRows {
    T* data;
    int64_t batch_stride, head_stride, row_stride;

    StridedRows(const Operand& x)
        : data(static_cast<T*>(const_cast<void*>(x.data))),
          batch_stride(x.batch_stride),
          head_stride(x.head_stride),
          row_stride(x.row_stride) {}
    __device__ __forceinline__ T* at(int b, int head, int row, int column) const {
        return data + (b * batch_stride + head * head_stride + row * row_stride + column);
    }
};

template <class T>
using ElementLayout = gl<T, -1, -1, -1, ELEMENTS, element_tile<T>>;
template <class T>
using ValueLayout = gl<T, -1, -1, -1, -1, value_tile<T>>;
// (values and denominator, batch * heads, padded length)
using WeightLayout = gl<float, 1, 2, -1, -1, sv<float, CHUNK>>;

template <class Layout>
Layout layout_of(const Operand& x, const BasedProblem& p, int64_t columns) {
    using T = typename Layout::T;
    const gl_strides strides{x.batch_stride, x.head_stride, x.row_stride};
    T* data = static_cast<T*>(const_cast<void*>(x.data));
    if constexpr (std::is_same_v<Layout, ElementLayout<T>>)
        return Layout(data, p.batch, p.heads, p.length, nullptr, strides);
    else
        return Layout(data, p.batch, p.heads, p.length, columns, strides);
}

inline WeightLayout weight_layout(float* data, const BasedProblem& p) {
    return WeightLayout(data, nullptr, nullptr, p.batch * p.heads, padded_length(p));
}

template <DType dtype>
using type_of = std::conditional_t<dtype == DType::bf16, bf16, half>;

}  // namespace thunderkittens::linear_attention
