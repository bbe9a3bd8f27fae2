// The kernels of nvfp4_gemm for every GPU from compute capability 8.0 on, which take the weights as
// they are prepared for Hopper's: what is compiled, its resources, and its choice. Host C++ only.
//
// In a Config, `tokens` are the rows of a of a tile, `row_groups` its columns by 64 and `stages` as
// ever. Of the kernel for few rows row_groups is 0 and k_groups the warps of a block.
#pragma once

#include <algorithm>
#include <vector>

#include "csrc/gemm/dense/portable.h"
#include "csrc/gemm/nvfp4/nvfp4_gemm.h"

namespace thunderkittens::nvfp4_gemm {

// Many rows: nvfp4/multistage_sm80.cuh, of tiles of so many rows of a and columns of the output.
// `rate` is that of products, relative to the first.
struct PortableShape {
    int tokens, columns, stages;
    double rate;
};
constexpr PortableShape PORTABLE_SHAPES[] = {
    {128, 128, 3, 1.0}, {64, 128, 3, 0.8}, {64, 64, 4, 0.55}};
constexpr std::size_t PORTABLE_CONFIGS = 2 * std::size(PORTABLE_SHAPES);
constexpr gemm::PortableConfig portable_config_at(std::size_t i) {
    const PortableShape& s = PORTABLE_SHAPES[i / 2];
    return {.block_m = s.tokens,
            .block_n = s.columns,
            .stages = s.stages,
            .dtype = i % 2 == 0 ? DType::bf16 : DType::fp16,
            .b_n_major = false};
}
constexpr Config weight_config(const gemm::PortableConfig& c) {
    return {.tokens = c.block_m,
            .row_groups = c.block_n / PIECE,
            .k_groups = 1,
            .pieces = 1,
            .stages = c.stages,
            .dtype = c.dtype};
}
// The listed one of a choice, or one that is not listed.
constexpr gemm::PortableConfig portable_config(const Config& c) {
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        if (weight_config(portable_config_at(i)) == c) return portable_config_at(i);
    }
    return {.block_m = 0};
}
// A configuration as instances.txt names it.
struct PortableName {
    int tokens, columns;
    DType dtype = DType::bf16;

    constexpr bool is_of(const gemm::PortableConfig& c) const {
        return tokens == c.block_m && columns == c.block_n && dtype == c.dtype;
    }
};
consteval gemm::PortableConfig portable_config_of(const PortableName& name) {
    return gemm::named<portable_config_at, PORTABLE_CONFIGS>(name);
}
constexpr int weight_stage_bytes(const gemm::PortableConfig& c) {
    const int bytes = c.block_m * PIECE * 2 + c.block_n / PIECE * PIECE_BYTES;
    return (bytes + 1023) / 1024 * 1024;
}
// The ring of stages, or the sums that go through its memory then.
constexpr int weight_shared_bytes(const gemm::PortableConfig& c) {
    const int sums = c.warps() * c.warp_m() * (c.warp_n() + 8) * 4;
    return std::max(c.stages * weight_stage_bytes(c), (sums + 1023) / 1024 * 1024);
}

// Up to 16 rows: nvfp4/few_rows_sm80.cuh, for 8 and 16 of them. A block has `strips` strips of 16
// rows of the weight, and each of its warps, 8 or 16, a part of k.
constexpr int FEW_ROWS = 16, FEW_ROWS_STRIPS = 7, FEW_ROWS_STAGES = 6;
constexpr int FEW_ROWS_WARPS = 8, FEW_ROWS_MOST_WARPS = 16;  // of a block
// The rings of the warps, whose memory the sums then go through.
constexpr int few_rows_shared_bytes(const Config& c, int strips) {
    return c.k_groups * c.stages * (c.tokens * PIECE * 2 + strips * STRIP_BYTES);
}

constexpr bool is_portable(Kernel kernel) {
    return kernel == Kernel::portable || kernel == Kernel::portable_few_rows;
}
std::string unsupported_portable(const Problem& problem, const DeviceProperties& device);
Choice choose_portable(const Problem& problem, const DeviceProperties& device);
void follow_forced_portable(Choice& choice, bool kernel_is_forced);
std::string portable_name(const Choice& choice);
std::vector<KernelInfo> portable_kernels();

template <gemm::PortableConfig config>
void launch_portable(const Params& params, Stream stream);
template <DType dtype>
void launch_few_rows(const Config& config, const Params& params, Stream stream);

}  // namespace thunderkittens::nvfp4_gemm
