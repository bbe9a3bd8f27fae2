// The gradient of what a gate is applied to, as gemm's own gradient needs it: what a call is
// (Problem), what is compiled (Config), and the functions that choose. Host C++ only.
//
// Of out = activation(gate) * value and grad, the gradient of out, it is
// grad * value * activation'(gate) where the gates are, and grad * activation(gate) where the
// values are.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/fields.h"
#include "csrc/gemm/common/epilogue.h"

namespace thunderkittens::gemm_backward {

using gemm::Activation;
using gemm::Gate;

struct Problem {
    int64_t rows = 0, columns = 0;  // of grad; gates and values have twice as many columns
    DType dtype = DType::bf16;      // of all
    Activation activation = Activation::silu;
    Gate gate = Gate::blocked;
};

struct Config {
    DType dtype = DType::bf16;
    Gate gate = Gate::blocked;
    bool portable = false;
    bool operator==(const Config&) const = default;
};

constexpr int THREADS = 256;
constexpr int CHUNK = 8;  // gates of a thread

constexpr Config CONFIGS[] = {
    {DType::bf16, Gate::blocked}, {DType::bf16, Gate::interleaved},
    {DType::fp16, Gate::blocked}, {DType::fp16, Gate::interleaved},
    {DType::fp32, Gate::blocked}, {DType::fp32, Gate::interleaved},
};
constexpr std::size_t KERNELS = std::size(CONFIGS) * 2;  // each for Hopper, and portable
constexpr Config config_at(std::size_t i) {
    Config c = CONFIGS[i / 2];
    c.portable = i % 2 != 0;
    return c;
}

struct Params {
    const void* grad = nullptr;  // (rows, columns), rows `grad_stride` elements apart
    const void* z = nullptr;     // (rows, 2 * columns), packed
    void* out = nullptr;         // as z
    int64_t rows = 0, columns = 0, grad_stride = 0;
    int64_t chunks = 0;  // of a row
    Activation activation = Activation::silu;
    bool aligned = false;  // eight gates, values and gradients lie at multiples of 16 bytes
};

TK_FIELDS(Problem, rows, columns, dtype, activation, gate)
TK_FIELDS(Config, dtype, gate, portable)

constexpr int64_t chunks_of(int64_t columns) { return (columns + CHUNK - 1) / CHUNK; }
constexpr int64_t blocks_of(int64_t rows, int64_t columns) {
    return (rows * chunks_of(columns) + THREADS - 1) / THREADS;
}

std::string unsupported(const Problem& problem, const DeviceProperties& device);
Config choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::vector<KernelInfo> kernels();

// The parameters of a call, `grad_stride` elements between the rows of grad.
Params params_of(const Problem& problem, const void* grad, int64_t grad_stride, const void* z,
                 void* out);

// Run the kernel of `config` on the stream, one that is portable or one that is not.
template <Config config>
void launch(const Params& params, Stream stream);
template <Config config>
void launch_portable(const Params& params, Stream stream);

}  // namespace thunderkittens::gemm_backward
