// The portable kernel of grouped_gemm, grouped/multistage_sm80.cuh, for every GPU from compute
// capability 8.0 on: what is compiled of it. Host C++ only.
//
// Copies into shared memory begin at multiples of 16 bytes, groups anywhere. So what the groups
// divide is not adjacent in memory: rows of a have an adjacent k, columns of b too, and a k that is
// divided is adjacent in neither. Operands in other orders are copied.
#pragma once

#include "csrc/gemm/dense/portable.h"
#include "csrc/gemm/grouped/grouped_gemm.h"

namespace thunderkittens::grouped_gemm {

// As gemm's: of its shapes of four warps, for both dtypes and three layouts, nn, nt and tn.
constexpr std::size_t PORTABLE_SHAPES[] = {1, 3};
constexpr std::size_t PORTABLE_CONFIGS = std::size(PORTABLE_SHAPES) * 2 * 3;
constexpr gemm::PortableConfig portable_config_at(std::size_t i) {
    constexpr std::size_t layouts[] = {1, 0, 3};  // of gemm::portable_config_at()
    const std::size_t shape = PORTABLE_SHAPES[i / 6], dtype = i / 3 % 2;
    return gemm::portable_config_at(shape * 8 + dtype * 4 + layouts[i % 3]);
}
consteval gemm::PortableConfig portable_config_of(const gemm::PortableName& name) {
    return gemm::named<portable_config_at, PORTABLE_CONFIGS>(name);
}

// The order of operands that the kernel reads: whether a's m is adjacent, and b's n.
struct Order {
    bool a_m_major, b_n_major;
};
constexpr Order portable_order(Grouped grouped, bool b_n_major) {
    switch (grouped) {
        case Grouped::rows: return {false, b_n_major};
        case Grouped::columns: return {false, false};
        case Grouped::k: return {true, true};
    }
    return {};
}

std::string unsupported_portable(const Problem& problem, const DeviceProperties& device);
Choice choose_portable(const Problem& problem, const DeviceProperties& device);
std::vector<Choice> portable_candidates(const Problem& problem, const DeviceProperties& device);
std::vector<KernelInfo> portable_kernels();

template <gemm::PortableConfig config>
void launch_portable(const Params& params, Stream stream);

}  // namespace thunderkittens::grouped_gemm
