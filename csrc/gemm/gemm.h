// The GEMM family: what a product is (Problem), what is compiled (Config), how it is scheduled
// (Schedule), and the functions that choose. Host C++ only; the op in gemm.cpp, the kernels of an
// architecture in gemm_sm90.cuh and the registry in choose.cpp meet here.
//
// A product is out = a @ b + bias with a (batch, m, k), b (batch, k, n), out (batch, m, n). Either
// operand may have either of its two dimensions contiguous in memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"

namespace thunderkittens {
struct KernelInfo;  // registry.h
}

namespace thunderkittens::gemm {

struct Problem {
    int64_t m = 0, n = 0, k = 0, batch = 1;
    DType dtype = DType::bf16;
    DType out_dtype = DType::bf16;
    bool a_m_major = false;  // a's rows (m) are adjacent in memory, instead of its columns (k)
    bool b_n_major = true;   // b's columns (n) are adjacent in memory, instead of its rows (k)
    bool bias = false;
};

// What one kernel is compiled for. A block computes block_m x block_n tiles, 64 of k at a time,
// with one warpgroup that loads and `consumers` warpgroups that share the tile's rows.
struct Config {
    int block_m = 128;
    int block_n = 256;
    int stages = 4;
    int consumers = 2;
    DType dtype = DType::bf16;
    bool a_m_major = false;
    bool b_n_major = true;

    bool operator==(const Config&) const = default;
};
constexpr int BLOCK_K = 64;

// How tiles are dealt out. A cluster of cluster_m x cluster_n blocks works on neighbouring tiles
// and loads what they share once. Clusters walk the tiles in bands of `band` cluster tiles, so that
// those at work at a time form a compact rectangle, whose operands fit the L2 cache. A band lies
// along n (its tiles are next to each other in m), or along m when `bands_along_m`.
struct Schedule {
    int cluster_m = 1;
    int cluster_n = 1;
    int band = 8;
    bool bands_along_m = false;
    int blocks = 0;  // of the grid, a multiple of the cluster's
};

struct Choice {
    Config config;
    Schedule schedule;
};

// One call. Strides count elements: a_stride and b_stride lie between neighbours in the dimension
// that is not contiguous. An operand that is the same for the whole batch has batch stride 0. All
// but bias must satisfy TMA: base and strides multiples of 16 bytes. out is contiguous.
struct Params {
    const void* a = nullptr;
    const void* b = nullptr;
    const void* bias = nullptr;  // (n,) of the operands' dtype, or nullptr
    void* out = nullptr;
    int64_t m = 0, n = 0, k = 0, batch = 1;
    int64_t a_stride = 0, a_batch_stride = 0;
    int64_t b_stride = 0, b_batch_stride = 0;
    DType out_dtype = DType::bf16;
    Schedule schedule;
};

template <typename Visitor>
void visit_fields(Problem& p, Visitor&& visit) {
    visit("m", p.m);
    visit("n", p.n);
    visit("k", p.k);
    visit("batch", p.batch);
    visit("dtype", p.dtype);
    visit("out_dtype", p.out_dtype);
    visit("a_m_major", p.a_m_major);
    visit("b_n_major", p.b_n_major);
    visit("bias", p.bias);
}

template <typename Visitor>
void visit_fields(Choice& c, Visitor&& visit) {
    visit("block_m", c.config.block_m);
    visit("block_n", c.config.block_n);
    visit("stages", c.config.stages);
    visit("consumers", c.config.consumers);
    visit("dtype", c.config.dtype);
    visit("a_m_major", c.config.a_m_major);
    visit("b_n_major", c.config.b_n_major);
    visit("cluster_m", c.schedule.cluster_m);
    visit("cluster_n", c.schedule.cluster_n);
    visit("band", c.schedule.band);
    visit("bands_along_m", c.schedule.bands_along_m);
    visit("blocks", c.schedule.blocks);
}

// Tile shapes that are compiled, each for both dtypes and the four layouts of the operands.
struct TileShape {
    int block_m, block_n, stages, consumers;
};
constexpr TileShape TILE_SHAPES[] = {
    {128, 256, 4, 2},
    {128, 128, 6, 2},
    {64, 128, 8, 1},
    {64, 64, 10, 1},
};
constexpr Config make_config(const TileShape& shape, DType dtype, bool a_m_major, bool b_n_major) {
    return {shape.block_m, shape.block_n, shape.stages, shape.consumers,
            dtype,         a_m_major,     b_n_major};
}

// Dynamic shared memory of a block: the ring of stages, two staging buffers of 16 rows of 128 bytes
// per consumer warp, a row of bias per consumer, two semaphores per stage.
constexpr int shared_bytes(const Config& c) {
    const int bytes = c.stages * (c.block_m + c.block_n) * BLOCK_K * 2 +
                      c.consumers * (4 * 2 * 16 * 128 + c.block_n * 4) + c.stages * 16;
    return (bytes + 127) / 128 * 128;
}
constexpr int threads(const Config& c) { return (c.consumers + 1) * 128; }

// Empty when choose() has a kernel for the problem, else the reason in a sentence.
std::string unsupported(const Problem& problem, const DeviceProperties& device);
Choice choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::string kernel_name(const Choice& choice);
std::vector<KernelInfo> kernels();

// Runs the kernel of `config` on the stream.
template <Config config>
void launch(const Params& params, Stream stream);

}  // namespace thunderkittens::gemm
