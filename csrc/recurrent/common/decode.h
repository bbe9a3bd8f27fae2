// A few tokens per sequence of tk.ssd or tk.linear_attention: what a call is, what is chosen for
// it, and what the ops and the kernels share. Host C++ only.
#pragma once

#include "csrc/common/view.h"
#include "csrc/recurrent/common/recurrent.h"

namespace thunderkittens::recurrent {

constexpr int MAX_DECODE_TOKENS = 8;

struct DecodeProblem {
    DType dtype = DType::bf16, state_dtype = DType::fp32;
    int64_t batch = 0, heads = 0, groups = 1, tokens = 1;
    int64_t key_dim = 128, value_dim = 64;
    bool keys_first = false;  // a state is (K, V), not (V, K)
};

// A block works on 64 columns of the values of one head.
struct DecodeConfig {
    DType dtype = DType::bf16;
    bool wide_state = true;  // of fp32, not of dtype
    bool keys_first = false;
    int columns = 128;      // of a row of the state in memory, or of the part that a block works on
    bool portable = false;  // the kernel for every GPU from compute capability 8.0 on
};
TK_FIELDS(DecodeProblem, dtype, state_dtype, batch, heads, groups, tokens, key_dim, value_dim,
          keys_first)
TK_FIELDS(DecodeConfig, dtype, wide_state, keys_first, columns, portable)

// (batch, heads or groups, tokens, columns), any strides, in elements.
struct DecodeOperand {
    const void* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;
};
// (slots, heads, rows, columns), columns adjacent; all else at multiples of 16 bytes.
struct DecodeState {
    void* data = nullptr;
    int64_t slot_stride = 0, head_stride = 0, row_stride = 0;
    int64_t slots = 0;
};

struct DecodeParams {
    DecodeProblem problem;
    DecodeOperand q, k, v, z;
    DecodeState state;
    GateOperands gates;
    HeadOperand skip;
    float scale = 1.0f;
    const int* indices = nullptr;  // (batch,); null: slot i for sequence i
    void* out = nullptr;           // (batch, heads, tokens, value_dim), packed
};

inline DecodeOperand decode_operand(const View& x) {
    return {x.data, x.stride[0], x.stride[1], x.stride[2], x.stride[3]};
}
// Whether the kernel can change states where they are.
inline bool decodes_in_place(const View& state, int element_bytes) {
    bool fits = state.stride[3] == 1 && reinterpret_cast<uintptr_t>(state.data) % 16 == 0;
    for (int i = 0; i < 3; ++i) {
        fits = fits && (state.size[i] == 1 ||
                        (state.stride[i] != 0 && state.stride[i] * element_bytes % 16 == 0));
    }
    return fits;
}

constexpr int64_t decode_blocks(const DecodeProblem& p) {
    return p.batch * p.heads * ceil_div(p.value_dim, VALUES);
}
// Of a block whose part of a state has so many keys.
constexpr int decode_threads(int keys) { return 2 * keys; }
// Dynamic shared memory of a block.
constexpr int decode_bytes(bool keys_first, int keys) {
    return 14 * 1024 + (keys_first ? keys / 16 : 1) * 2048;
}

std::string unsupported(const DecodeProblem& problem, const DeviceProperties& device);
DecodeConfig choose_decode(const DecodeProblem& problem, const DeviceProperties& device);
std::string kernel_name(const DecodeConfig& config);
std::vector<KernelInfo> decode_kernels();

template <DType dtype, bool wide_state, bool keys_first, int columns>
void launch_recurrent_decode(const DecodeParams& params, Stream stream);
template <DType dtype, bool wide_state, bool keys_first, int columns>
void launch_portable_recurrent_decode(const DecodeParams& params, Stream stream);

}  // namespace thunderkittens::recurrent
