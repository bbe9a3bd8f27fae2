// Normalised rows as codes of fp8 or NVFP4 with their scales: what a call is (Problem), what is
// compiled (Config), what a kernel is given (Params), and the functions that choose. Host C++ only.
//
// The row is normalised in fp32 and quantised from there, so that a kernel holds fp32 whatever it
// has read: dtypes are arguments, and there is one kernel for each way to hold a row.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/norm/norm.h"

namespace thunderkittens::norm {

// As the ops' code of an output: its place in ("fp8_tensor", "fp8_row", "fp8_1x128", "nvfp4").
enum class Output : int { tensor, row, row_block, nvfp4 };
constexpr int OUTPUTS = 4;

// Lanes of 128 elements that share a scale. Shorter rows, which fewer lanes hold, are read again
// from memory.
constexpr int GROUP = 128, LANES_OF_GROUP = GROUP / UNIT;
constexpr int NVFP4_BLOCK = 16;  // elements
constexpr bool has_blocks(Output output) {
    return output == Output::row_block || output == Output::nvfp4;
}

struct QuantizeProblem {
    int64_t rows = 0, width = 0;
    DType dtype = DType::bf16;
    DType sum_dtype = DType::bf16;  // of the residual, else of x
    int output = 1;
    bool layer = false;
    bool aligned = true;  // see Problem
};

struct QuantizeConfig {
    Path path = Path::registers;
    bool portable = false;
    bool operator==(const QuantizeConfig&) const = default;
};

TK_FIELDS(QuantizeProblem, rows, width, dtype, sum_dtype, output, layer, aligned)
TK_FIELDS(QuantizeConfig, path, portable)

constexpr std::size_t QUANTIZE_CONFIGS = 5;
constexpr QuantizeConfig quantize_at(std::size_t i) {
    if (i == 4) return {Path::cluster, false};
    return {i % 2 == 0 ? Path::registers : Path::memory, i >= 2};
}
constexpr int most_lanes(const QuantizeConfig& config) {
    return config.path == Path::cluster ? SLICE_LANES : MAX_LANES;
}

struct QuantizeParams {
    Params norm;  // whose `out` are the codes
    DType dtype = DType::bf16, sum_dtype = DType::bf16, weight_dtype = DType::bf16;
    Output output = Output::row;
    void* scale = nullptr;         // fp32, of NVFP4 e4m3
    const float* given = nullptr;  // the scale of all of the result
    int64_t scale_pitch = 0;       // between blocks of 128; of NVFP4 between rows, in blocks
    bool swizzled = false;         // 128x4 layout
    int64_t padded_rows = 0;       // those that have scales
};

std::string unsupported_quantize(const QuantizeProblem& problem, const DeviceProperties& device);
QuantizeConfig choose_quantize(const QuantizeProblem& problem, const DeviceProperties& device);
std::string kernel_name(const QuantizeConfig& config);
std::vector<KernelInfo> quantize_kernels();

template <QuantizeConfig config>
void launch_quantize(const QuantizeParams& params, Stream stream);

}  // namespace thunderkittens::norm
