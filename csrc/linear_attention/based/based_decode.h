// One token of Based per sequence: what a call is, what is chosen for it, and what the op and the
// kernel share. Host C++ only.
#pragma once

#include "csrc/common/fields.h"
#include "csrc/common/view.h"
#include "csrc/linear_attention/common/linear_attention.h"

namespace thunderkittens::linear_attention {

struct BasedDecodeProblem {
    DType dtype = DType::bf16;
    int64_t batch = 0, heads = 0;
    int64_t value_dim = 64;
    bool normalize = false;
};

// A block works on the state of one head.
struct BasedDecodeChoice {
    DType dtype = DType::bf16;
    bool portable = false;  // the kernel for every GPU from compute capability 8.0 on
    int threads = 256;      // of a block
};

TK_FIELDS(BasedDecodeProblem, dtype, batch, heads, value_dim, normalize)
TK_FIELDS(BasedDecodeChoice, dtype, portable, threads)

// (batch, heads, 1, columns); strides in elements.
struct Token {
    const void* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, column_stride = 0;
};
// (batch, heads, 153, value_dim) or (batch, heads, 153); a head's part is packed. Numerators are
// multiples of 16 bytes apart.
struct StateOperand {
    float* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0;
};

struct BasedDecodeParams {
    BasedDecodeProblem problem;
    bool portable = false;
    int threads = 256;
    Token q, k, v;
    StateOperand numerator, denominator;
    void* out = nullptr;  // (batch, heads, 1, value_dim), packed
    float eps = 0.0f;
};

// Dynamic shared memory of a block.
constexpr int BASED_DECODE_BYTES = 11 * 1024;

// Whether the kernel can change a state where it is.
inline bool decodes_in_place(const View& numerator, const View& denominator) {
    const auto& n = numerator;
    const auto& d = denominator;  // (1, batch, heads, 153)
    bool fits = n.stride[3] == 1 && n.stride[2] == n.size[3] && d.stride[3] == 1 &&
                reinterpret_cast<uintptr_t>(n.data) % 16 == 0;
    for (int i = 0; i < 2; ++i) {
        fits = fits && n.stride[i] % 4 == 0 && (n.size[i] == 1 || n.stride[i] != 0) &&
               (d.size[i + 1] == 1 || d.stride[i + 1] != 0);
    }
    return fits;
}
inline StateOperand numerator_operand(const View& x) {
    return {static_cast<float*>(const_cast<void*>(x.data)), x.stride[0], x.stride[1]};
}
inline StateOperand denominator_operand(const View& x) {
    return {static_cast<float*>(const_cast<void*>(x.data)), x.stride[1], x.stride[2]};
}
inline Token token(const View& x) { return {x.data, x.stride[0], x.stride[1], x.stride[3]}; }

std::string unsupported(const BasedDecodeProblem& problem, const DeviceProperties& device);
BasedDecodeChoice choose_decode(const BasedDecodeProblem& problem, const DeviceProperties& device);
std::string kernel_name(const BasedDecodeChoice& choice);
std::vector<KernelInfo> based_decode_kernels();

template <DType dtype>
void launch_based_decode(const BasedDecodeParams& params, Stream stream);
template <DType dtype>
void launch_portable_based_decode(const BasedDecodeParams& params, Stream stream);

}  // namespace thunderkittens::linear_attention
