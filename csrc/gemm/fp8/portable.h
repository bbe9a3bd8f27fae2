// The kernel of fp8_gemm for every GPU from compute capability 8.0 on, fp8/multistage_sm80.cuh:
// what is compiled of it, its resources, and its choice. Host C++ only.
//
// In a Config, `sums` are promoted where scales are block-wise, 1D2D or 1D1D, else fast, which says
// no more here than that all of k is added up at once, in fp32. Each warp has 32 x 64 of a tile, or
// 32 x 32 where totals take as many registers as sums.
#pragma once

#include <vector>

#include "csrc/gemm/dense/portable.h"
#include "csrc/gemm/fp8/fp8_gemm.h"

namespace thunderkittens::fp8_gemm {

// `rate` is that of products, relative to the first.
struct PortableShape {
    int block_m, block_n, stages;
    Sums sums;
    double rate;
};
constexpr PortableShape PORTABLE_SHAPES[] = {{128, 128, 3, Sums::fast, 1.0},
                                             {64, 128, 3, Sums::fast, 0.9},
                                             {64, 128, 3, Sums::promoted, 0.7}};
constexpr std::size_t PORTABLE_CONFIGS = std::size(PORTABLE_SHAPES) * std::size(DTYPES);
constexpr Config portable_config_at(std::size_t i) {
    const PortableShape& s = PORTABLE_SHAPES[i / 3];
    return {.block_m = s.block_m,
            .block_n = s.block_n,
            .stages = s.stages,
            .consumers = 1,
            .buffers = 0,
            .sums = s.sums,
            .a_dtype = DTYPES[i % 3].a,
            .b_dtype = DTYPES[i % 3].b};
}
// As instances.txt names it.
struct PortableName {
    int block_m, block_n;
    Sums sums = Sums::fast;
    DType a = DType::e4m3, b = DType::e4m3;

    constexpr bool is_of(const Config& c) const {
        return block_m == c.block_m && block_n == c.block_n && sums == c.sums && a == c.a_dtype &&
               b == c.b_dtype;
    }
};
consteval Config portable_config_of(const PortableName& name) {
    return gemm::named<portable_config_at, PORTABLE_CONFIGS>(name);
}

// The loop of gemm's kernel, to which two elements of 8 bits are one of 16.
constexpr gemm::PortableConfig loop_config(const Config& c) {
    return {.block_m = c.block_m,
            .block_n = c.block_n,
            .stages = c.stages,
            .warps_m = c.block_m / 32,
            .warps_n = c.sums == Sums::promoted ? 4 : 2,
            .dtype = DType::fp16,
            .b_n_major = false};
}
constexpr int portable_bytes(const Config& c) {
    return gemm::portable_shared_bytes(loop_config(c));
}

std::string unsupported_portable(const Problem& problem, const DeviceProperties& device);
Choice choose_portable(const Problem& problem, const DeviceProperties& device);
std::string portable_name(const Config& config);
std::vector<KernelInfo> portable_kernels();

template <Config config>
void launch_portable(const Params& params, Stream stream);

}  // namespace thunderkittens::fp8_gemm
