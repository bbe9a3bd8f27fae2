// Grouped products: what a call is (Problem), what is compiled (the tile shapes of dense/gemm.h),
// how it is scheduled, and the functions that choose. Host C++ only.
//
// The groups divide one dimension of a product a @ b, whose ends lie in memory of the device: rows
// of a, each group with a b of its own (2D x 3D); columns of b, each with an a of its own
// (3D x 2D); or k, which gives one product for each group (2D x 2D). Ends outside of the dimension,
// or before the last group's, are moved there. What belongs to no group is zero.
#pragma once

#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::grouped_gemm {

enum class Grouped : int { rows, columns, k };

struct Problem {
    int64_t m = 0, n = 0, k = 0, groups = 1;  // with all groups of the dimension that they divide
    int grouped = 0;                          // Grouped
    DType dtype = DType::bf16;
    bool a_m_major = false;
    bool b_n_major = true;
};

struct Choice {
    gemm::Config config;
    int raster_group = 16;  // rows of tiles in a raster group, within a group
    int blocks = 0;         // of the grid
    // Balanced tiling (common/balanced_tiles.h), if tiles of one width would leave SMs idle in the
    // last wave. The device counts the tiles.
    bool two_widths = false;
    bool portable = false;  // the kernel of portable.h

    bool operator==(const Choice&) const = default;
};

struct Params {
    gemm::Params product;  // its batch is the groups
    const int32_t* offs = nullptr;
    Grouped grouped = Grouped::rows;
    int raster_group = 16;
    bool two_widths = false;
};

TK_FIELDS(Problem, m, n, k, groups, grouped, dtype, a_m_major, b_n_major)

template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit("block_m", c.config.block_m);
    visit("block_n", c.config.block_n);
    visit("stages", c.config.stages);
    visit("consumers", c.config.consumers);
    visit("dtype", c.config.dtype);
    visit("a_m_major", c.config.a_m_major);
    visit("b_n_major", c.config.b_n_major);
    visit("raster_group", c.raster_group);
    visit("blocks", c.blocks);
    visit("two_widths", c.two_widths);
    visit("portable", c.portable);
}

// Every kernel that is compiled, by number: of the first shapes of dense/gemm.h, for both dtypes
// and the four layouts of the operands.
constexpr std::size_t SHAPES = 3;
constexpr std::size_t CONFIGS = SHAPES * 8;
constexpr gemm::Config config_at(std::size_t i) {
    return gemm::make_config(gemm::TILE_SHAPES[i / 8], i / 4 % 2 == 0 ? DType::bf16 : DType::fp16,
                             i / 2 % 2 != 0, i % 2 != 0);
}
// As instances.txt names it.
using gemm::Layout;
consteval gemm::Config config_of(const gemm::ConfigName& name) {
    return gemm::named<config_at, CONFIGS>(name);
}

// The tiles that the scheduling warp may be ahead by: a description of 32 bytes and two semaphores
// for each, behind what the dense kernel has.
constexpr int TILES_AHEAD = 4;
constexpr int shared_bytes(const gemm::Config& c) {
    return (gemm::shared_bytes(c) + TILES_AHEAD * (32 + 2 * 8) + 127) / 128 * 128;
}

// Empty when choose() has a kernel for the problem, else the reason in a sentence.
std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
// The choice and what else could run, for measurements of the choice.
std::vector<Choice> candidates(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const gemm::Config& config);
std::string kernel_name(const Choice& choice);
std::vector<KernelInfo> kernels();

// Runs the kernel of `config` on the stream.
template <gemm::Config config>
void launch(const Params& params, Stream stream);

}  // namespace thunderkittens::grouped_gemm
