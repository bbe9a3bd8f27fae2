// The portable kernel, portable/multistage_sm80.cuh, for every GPU from compute capability 8.0 on:
// what is compiled of it, its resources, and its choice. Host C++ only.
#pragma once

#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {

// A block computes block_m x block_n tiles, BLOCK_K of k at a time, with warps_m x warps_n warps,
// each of which has an equal rectangle of the tile.
struct PortableConfig {
    int block_m = 128, block_n = 128;
    int stages = 3;
    int warps_m = 2, warps_n = 2;
    DType dtype = DType::bf16;
    bool a_m_major = false;
    bool b_n_major = true;

    bool operator==(const PortableConfig&) const = default;
    constexpr int warps() const { return warps_m * warps_n; }
    constexpr int threads() const { return warps() * 32; }
    constexpr int warp_m() const { return block_m / warps_m; }
    constexpr int warp_n() const { return block_n / warps_n; }
};
TK_FIELDS(PortableConfig, block_m, block_n, stages, warps_m, warps_n, dtype, a_m_major, b_n_major)

// What is compiled, for both dtypes and the four layouts. All but the first fit the 99 KB of shared
// memory that GPUs of 8.6, 8.9 and 12.x have. `full` is the rate at which a multiprocessor
// multiplies with as many blocks as fit it, relative to the first, `alone` that of one block.
struct PortableShape {
    int block_m, block_n, stages, warps_m, warps_n;
    double full, alone;
};
constexpr PortableShape PORTABLE_SHAPES[] = {
    {128, 256, 3, 2, 4, 1.0, 1.0},
    {128, 128, 3, 2, 2, 1.0, 0.75},
    {64, 128, 3, 2, 2, 0.8, 0.5},
    {64, 64, 4, 2, 2, 0.55, 0.3},
};
constexpr std::size_t PORTABLE_CONFIGS = std::size(PORTABLE_SHAPES) * 8;
constexpr PortableConfig portable_config_at(std::size_t i) {
    const PortableShape& s = PORTABLE_SHAPES[i / 8];
    return {.block_m = s.block_m,
            .block_n = s.block_n,
            .stages = s.stages,
            .warps_m = s.warps_m,
            .warps_n = s.warps_n,
            .dtype = i / 4 % 2 == 0 ? DType::bf16 : DType::fp16,
            .a_m_major = i / 2 % 2 != 0,
            .b_n_major = i % 2 != 0};
}

// A configuration as instances.txt names it.
struct PortableName {
    int block_m, block_n;
    DType dtype = DType::bf16;
    Layout layout = Layout::nn;

    constexpr bool is_of(const PortableConfig& c) const {
        return block_m == c.block_m && block_n == c.block_n && dtype == c.dtype &&
               c.a_m_major == (layout == Layout::tn || layout == Layout::tt) &&
               c.b_n_major == (layout == Layout::nn || layout == Layout::tn);
    }
};
consteval PortableConfig portable_config_of(const PortableName& name) {
    return named<portable_config_at, PORTABLE_CONFIGS>(name);
}

// The same in a choice, whose consumers are its warps by four.
constexpr Config choice_config(const PortableConfig& p) {
    return {.block_m = p.block_m,
            .block_n = p.block_n,
            .stages = p.stages,
            .consumers = p.warps() / 4,
            .dtype = p.dtype,
            .a_m_major = p.a_m_major,
            .b_n_major = p.b_n_major};
}
// The listed one of a choice, or one that is not listed.
constexpr PortableConfig portable_config(const Config& c) {
    for (std::size_t i = 0; i < PORTABLE_CONFIGS; ++i) {
        if (choice_config(portable_config_at(i)) == c) return portable_config_at(i);
    }
    return {.block_m = 0};
}

// Whether the warps of a block hand stages over by semaphores, so that none waits for one that is
// less than a stage behind. With few warps, and several blocks on a multiprocessor, a barrier of
// the block costs less.
constexpr bool has_semaphores(const PortableConfig& c) { return c.warps() > 4; }

// The ring of stages, whose memory the sums then go through, and its semaphores.
constexpr int portable_shared_bytes(const PortableConfig& c) {
    return c.stages * (c.block_m + c.block_n) * BLOCK_K * 2 +
           (has_semaphores(c) ? 2 * c.stages * 8 + 1023 : 0) / 1024 * 1024;
}

// Empty, or why there is no portable kernel for a problem.
std::string unsupported_portable(const Problem& problem, const DeviceProperties& device);
Choice choose_portable(const Problem& problem, const DeviceProperties& device);
std::vector<Choice> portable_candidates(const Problem& problem, const DeviceProperties& device);

template <PortableConfig config>
void launch_portable(const Params& params, Stream stream);

}  // namespace thunderkittens::gemm
