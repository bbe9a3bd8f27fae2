// What the attention backward does per query row, before and after its main kernel: the statistics
// that the main kernel reads and a cleared dQ accumulator; and dQ brought from the accumulator's
// order into rows.
#pragma once

#include "csrc/attention/backward_sm90.cuh"

namespace thunderkittens::attention {

template <class T>
struct PrepareGlobals {
    gl<T, -1, -1, -1, -1> out, grad_out;
    const float* lse;       // (batch, heads, q_length)
    const float* grad_lse;  // likewise, or null
    float* lse_log2;        // (batch, heads, padded_rows)
    float* delta;           // likewise
    float* dq;              // (batch, heads, padded_rows * head_dim of the kernel)
    int q_length, padded_rows;
    int* next_item;
    int* turns;  // per block_m rows
    int block_m;
};

constexpr int PREPARE_ROWS = 64;  // of a block
constexpr int PREPARE_THREADS = 256;

// `lanes` neighbours share a row, 8 elements each.
template <class T, int head_dim>
__global__ __launch_bounds__(PREPARE_THREADS) void prepare_kernel(
    const __grid_constant__ PrepareGlobals<T> g) {
    constexpr int lanes = head_dim / 8;
    const int head = blockIdx.y, b = blockIdx.z;
    const int64_t rows = (int64_t(b) * g.out.depth() + head) * g.padded_rows;
    const int lane = threadIdx.x % lanes;
    for (int r = threadIdx.x / lanes; r < PREPARE_ROWS; r += PREPARE_THREADS / lanes) {
        const int row = blockIdx.x * PREPARE_ROWS + r;
        float sum = 0.0f;
        if (row < g.q_length && 8 * lane < g.out.cols()) {
            using Words = uint4;
            const auto at = elements(b, head, row, 8 * lane);
            const Words x = arch::load_global(reinterpret_cast<const Words*>(g.out.at(at)));
            const Words y = arch::load_global(reinterpret_cast<const Words*>(g.grad_out.at(at)));
            const auto* xs = reinterpret_cast<const packed_type<T>*>(&x);
            const auto* ys = reinterpret_cast<const packed_type<T>*>(&y);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 p = unpack_pair<T>(xs[i]), q = unpack_pair<T>(ys[i]);
                sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
            }
        }
#pragma unroll
        for (int distance = lanes / 2; distance > 0; distance /= 2) {
            sum += arch::shuffle_xor(sum, distance);
        }
        if (lane == 0) {
            float lse = INFINITY, delta = 0.0f;
            if (row < g.q_length) {
                const int64_t i = (int64_t(b) * g.out.depth() + head) * g.q_length + row;
                const float value = arch::load_global(g.lse + i);
                // A row that sees nothing has weights exp(s - inf) = 0.
                if (value != -INFINITY) lse = value * 1.4426950408889634f;
                delta = sum - (g.grad_lse ? arch::load_global(g.grad_lse + i) : 0.0f);
            }
            arch::store_global(g.lse_log2 + rows + row, lse);
            arch::store_global(g.delta + rows + row, delta);
        }
    }
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0 && head == 0 && b == 0) arch::store_global(g.next_item, 0);
        const int64_t tile = (rows + int64_t(blockIdx.x) * PREPARE_ROWS) / g.block_m;
        arch::store_global(g.turns + tile, 0);
    }
    if (g.dq == nullptr) return;
    float* dq = g.dq + (rows + int64_t(blockIdx.x) * PREPARE_ROWS) * head_dim;
    for (int i = threadIdx.x; i < PREPARE_ROWS * head_dim / 4; i += PREPARE_THREADS) {
        arch::store_global(reinterpret_cast<float4*>(dq) + i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
}

template <class Kernel>
struct FinishGlobals {
    using tile = st<typename Kernel::T, 64, 64>;
    gl<typename Kernel::T, -1, -1, -1, -1, tile> dq;
    const float* sums;
    float scale;
};

// A block brings one tile of dQ in order; its two warpgroups hold what the consumers had.
template <class Kernel>
__global__ __launch_bounds__(2 * WARPGROUP_THREADS) void finish_kernel(
    const __grid_constant__ FinishGlobals<Kernel> g) {
    shared_allocator allocator(shared_memory());
    auto& tiles = allocator.template allocate<typename FinishGlobals<Kernel>::tile, 2>();
    const int id = arch::warp_uniform(warpgroup::groupid());
    const int m = blockIdx.x, head = blockIdx.y, b = blockIdx.z;
    const int64_t tile = (int64_t(b) * g.dq.depth() + head) * gridDim.x + m;
    const float* from =
        g.sums + tile * Kernel::dq_tile_floats + id * (64 * 64) + 4 * warpgroup::laneid();
    rt_fl<16, 64> part;
#pragma unroll
    for (int j = 0; j < part.width; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float4 x = arch::load_global(
                reinterpret_cast<const float4*>(from + (2 * j + half) * 4 * WARPGROUP_THREADS));
            part.tiles[0][j].data[2 * half] = make_float2(x.x * g.scale, x.y * g.scale);
            part.tiles[0][j].data[2 * half + 1] = make_float2(x.z * g.scale, x.w * g.scale);
        }
    }
    warpgroup::store(tiles[id], part);
    arch::fence_async_shared();
    warpgroup::sync(1 + id);
    if (warpgroup::laneid() == 0) {
        const int row = m * Kernel::block_m + (Kernel::split_rows ? 64 * id : 0);
        tma::store_async(g.dq, tiles[id], elements(b, head, row, Kernel::split_rows ? 0 : 64 * id));
        tma::store_async_read_wait();
    }
}

template <class Kernel>
void launch_backward_kernels(const BackwardParams& params, Stream stream) {
    constexpr int head_dim = Kernel::head_dim;
    using T = typename Kernel::T;
    const Problem& p = params.problem;
    const auto layout = [&]<class Layout>(const Operand& x, int64_t heads, int64_t length) {
        return Layout(static_cast<T*>(const_cast<void*>(x.data)), p.batch, heads, length,
                      p.head_dim, {x.batch_stride, x.head_stride, x.row_stride});
    };
    using Rows = gl<T, -1, -1, -1, -1>;
    const unsigned heads = unsigned(p.q_heads), batch = unsigned(p.batch);
    const int padded = int(padded_rows(p.q_length));
    const int64_t rows = p.batch * p.q_heads * padded;
    float* lse_log2 = params.workspace;
    float* delta = lse_log2 + rows;
    float* dq_sums = Kernel::need_dq ? delta + rows : nullptr;
    int* next_item = reinterpret_cast<int*>(delta + rows + rows * head_dim);
    int* turns = next_item + 1;
    const PrepareGlobals<T> prepare {
        .out = layout.template operator()<Rows>(params.out, p.q_heads, p.q_length),
        .grad_out = layout.template operator()<Rows>(params.grad_out, p.q_heads, p.q_length),
        .lse = params.lse,
        .grad_lse = params.grad_lse,
        .lse_log2 = lse_log2,
        .delta = delta,
        .dq = dq_sums,
        .q_length = int(p.q_length),
        .padded_rows = padded,
        .next_item = next_item,
        .turns = turns,
        .block_m = Kernel::block_m
    };
    kittens::launch(prepare_kernel<T, head_dim>, dim3(padded / PREPARE_ROWS, heads, batch),
                    dim3(PREPARE_THREADS), dim3(1), 0, stream, prepare);

    using QLayout = typename Kernel::q_layout;
    using KVLayout = typename Kernel::kv_layout;
    const BackwardGlobals<Kernel> globals {
        .q = layout.template operator()<QLayout>(params.q, p.q_heads, p.q_length),
        .grad_out = layout.template operator()<QLayout>(params.grad_out, p.q_heads, p.q_length),
        .k = layout.template operator()<KVLayout>(params.k, p.kv_heads, p.k_length),
        .v = layout.template operator()<KVLayout>(params.v, p.kv_heads, p.k_length),
        .dk = layout.template operator()<KVLayout>(params.dk.data ? params.dk : params.k,
                                                   p.kv_heads, p.k_length),
        .dv = layout.template operator()<KVLayout>(params.dv.data ? params.dv : params.v,
                                                   p.kv_heads, p.k_length),
        .lse_log2 = lse_log2,
        .delta = delta,
        .dq = dq_sums,
        .schedule = {.blocks = int((p.k_length + Kernel::block_n - 1) / Kernel::block_n),
                     .heads = int(p.kv_heads),
                     .batch = int(p.batch),
                     .section_heads = params.section_heads},
        .next_item = next_item,
        .turns = turns,
        .q_length = int(p.q_length),
        .k_length = int(p.k_length),
        .group = int(p.q_heads / p.kv_heads),
        .q_heads = int(p.q_heads),
        .q_blocks = padded / Kernel::block_m,
        .padded_rows = padded,
        .causal_offset = causal_offset(p),
        .scale = params.scale,
        .scale_log2 = params.scale * 1.4426950408889634f,
        .need_dk = params.dk.data != nullptr,
        .need_dv = params.dv.data != nullptr
    };
    const auto blocks = unsigned(std::min(globals.schedule.items(), params.sm_count));
    kittens::launch(backward_kernel<Kernel>, dim3(blocks), dim3(Kernel::threads), dim3(1),
                    sizeof(BackwardShared<Kernel>) + 1024, stream, globals);

    if constexpr (Kernel::need_dq) {
        const FinishGlobals<Kernel> finish {
            .dq = layout.template operator()<decltype(FinishGlobals<Kernel>::dq)>(
                params.dq, p.q_heads, p.q_length),
            .sums = dq_sums,
            .scale = params.scale
        };
        kittens::launch(finish_kernel<Kernel>, dim3(globals.q_blocks, heads, batch),
                        dim3(2 * WARPGROUP_THREADS), dim3(1), 2 * 64 * 64 * sizeof(T) + 1024,
                        stream, finish);
    }
}

template <BackwardConfig config>
void launch_backward(const BackwardParams& params, Stream stream) {
    if (params.dq.data == nullptr) {
        launch_backward_kernels<BackwardKernel<config, false, false>>(params, stream);
    } else if (params.deterministic) {
        launch_backward_kernels<BackwardKernel<config, true, true>>(params, stream);
    } else {
        launch_backward_kernels<BackwardKernel<config, true, false>>(params, stream);
    }
}

}  // namespace thunderkittens::attention
