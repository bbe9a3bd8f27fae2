// How the portable kernel stores a tile. Each warp brings its sums to shared memory, where the ring
// of stages was, and takes them up again by rows: a lane has four neighbouring elements of the
// output, with the gates and the values that they are made of.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/common/vec4_sm90.cuh"
#include "csrc/gemm/portable/types_sm80.cuh"

namespace thunderkittens::gemm {
namespace sm80 {

// Four neighbouring elements of the output's type, from `at` on, or those of them that exist.
__device__ __forceinline__ void store_elements(void* out, DType dtype, int64_t at,
                                               const float (&values)[4], bool aligned, int count) {
    sm90::with_type(out, dtype,
                    [&](auto* to) { sm90::store_four(to + at, values, aligned, count); });
}

// The warp's part of a tile.
template <class Traits>
struct WarpTile {
    static constexpr PortableConfig C = Traits::config;
    using T = typename Traits::T;
    static constexpr int rows = Traits::warp_m, cols = Traits::warp_n, pitch = Traits::pitch;

    const typename Traits::Globals& g;
    uint32_t sums;         // address in shared memory
    uint32_t batch, m, n;  // its first row and column of the output
    uint32_t m_end, n_end;
    Affine affine;

    __device__ __forceinline__ WarpTile(const typename Traits::Globals& globals, uint32_t memory,
                                        const TileOrigin& at)
        : g(globals),
          sums(memory + uint32_t(kittens::warpid() * rows * pitch * 4)),
          batch(at.batch),
          m(at.m + kittens::warpid() / C.warps_n * rows),
          n(at.n + kittens::warpid() % C.warps_n * columns()),
          m_end(at.m_end),
          n_end(at.n_end),
          affine(Traits::affine(globals, at)) {}

    // Of the output.
    __device__ __forceinline__ int columns() const {
        return g.epilogue.gate == Gate::none ? cols : cols / 2;
    }

    __device__ __forceinline__ void share(const rt_fl<16, 16> (&d)[rows / 16][cols / 16]) const {
        const uint32_t to = sums + uint32_t((laneid() / 4 * pitch + laneid() % 4 * 2) * 4);
#pragma unroll
        for (int i = 0; i < rows / 16; ++i) {
#pragma unroll
            for (int j = 0; j < cols / 16; ++j) {
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int at = (i * 16 + r % 2 * 8) * pitch + j * 16 + r / 2 * 8;
                    arch::store_shared(to + uint32_t(at * 4), d[i][j].tiles[0][0].data[r]);
                }
            }
        }
        arch::sync_warp();
    }

    // Preactivations: alpha times four sums, `col` columns behind the row's first, and the bias.
    __device__ __forceinline__ void load_sums(float (&z)[4], int row, int col,
                                              const float (&bias)[4]) const {
        const float4 v = arch::load_shared<float4>(sums + uint32_t((row * pitch + col) * 4));
        const float all[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = all[i] * affine.alpha + bias[i];
    }
    // Of columns of z.
    __device__ __forceinline__ void load_bias(float (&bias)[4], uint32_t column) const {
        const T* from = static_cast<const T*>(affine.bias);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            bias[i] = from != nullptr && column + i < g.n
                          ? convert<float>(arch::load_global(from + column + i))
                          : 0.f;
        }
    }

    // Sums that are only rounded, behind the bias; of several rows at a time.
    __device__ __forceinline__ void store_rounded() const {
        constexpr int lanes = cols / 4, step = WARP_THREADS / lanes, at_a_time = 4;
        static_assert(rows % (step * at_a_time) == 0);
        const int col = laneid() % lanes * 4, count = min(int(n_end - n) - col, 4);
        if (count <= 0) return;
        const bool aligned = g.out_aligned && n % 4 == 0;
        float bias[4];
        load_bias(bias, n + col);
        sm90::with_type(g.out, g.out_dtype, [&](auto* out) {
            auto* to = out + (batch * g.out_batch_stride + n + col);
#pragma unroll 1
            for (int row = laneid() / lanes; row < rows; row += step * at_a_time) {
                float z[at_a_time][4];
#pragma unroll
                for (int i = 0; i < at_a_time; ++i) load_sums(z[i], row + i * step, col, bias);
#pragma unroll
                for (int i = 0; i < at_a_time; ++i) {
                    const uint32_t at = m + row + i * step;
                    if (at >= m_end) break;
                    sm90::store_four(to + at * g.out_stride, z[i], aligned, count);
                }
            }
        });
    }

    __device__ __forceinline__ void store_aux(uint32_t row, uint32_t column, const float (&z)[4],
                                              int count) const {
        if (g.epilogue.aux == nullptr) return;
        const int64_t at = (int64_t(batch) * g.m + row) * g.n + column;
        store_elements(g.epilogue.aux, g.out_dtype, at, z, g.aux_aligned, count);
    }

    // Everything that an epilogue can do.
    __device__ __forceinline__ void store_fused() const {
        const Epilogue& e = g.epilogue;
        const int lanes = columns() / 4;
        const int col = laneid() % lanes * 4, count = min(int(g.out_n - n) - col, 4);
        if (count <= 0) return;
        // Where the two fours of sums are that a lane takes, in the tile and among z's columns.
        // Gates and values side by side are mixed in both.
        const bool side_by_side = e.gate == Gate::interleaved;
        const uint32_t out_col = n + col;
        const int first = side_by_side ? 2 * col : col;
        const int second = side_by_side ? first + 4 : col + cols / 2;
        const uint32_t first_z = side_by_side ? 2 * out_col : out_col;
        const uint32_t second_z = side_by_side ? first_z + 4 : g.out_n + out_col;
        float bias[2][4] = {};
        load_bias(bias[0], first_z);
        if (e.gate != Gate::none) load_bias(bias[1], second_z);
#pragma unroll 1
        for (int row = laneid() / lanes; row < rows && m + row < m_end;
             row += WARP_THREADS / lanes) {
            float x[4], y[4];
            load_sums(x, row, first, bias[0]);
            store_aux(m + row, first_z, x, side_by_side ? min(2 * count, 4) : count);
            if (e.gate != Gate::none) {
                load_sums(y, row, second, bias[1]);
                store_aux(m + row, second_z, y, side_by_side ? 2 * count - 4 : count);
            }
            if (side_by_side) {
                const float gates[4] = {x[0], x[2], y[0], y[2]};
                const float values[4] = {x[1], x[3], y[1], y[3]};
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = gates[i], y[i] = values[i];
            }
            sm90::activate(e.activation, x);
            if (e.gate != Gate::none) {
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] *= y[i];
            }
            if (e.residual != nullptr) {
                const int64_t at = batch * e.residual_batch_stride +
                                   int64_t(m + row) * e.residual_stride + out_col;
                float more[4];
                sm90::with_type(const_cast<void*>(e.residual), g.out_dtype, [&](auto* from) {
                    sm90::load_four(more, from + at, g.residual_aligned, count);
                });
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] += e.beta * more[i];
            }
            const int64_t at =
                batch * g.out_batch_stride + int64_t(m + row) * g.out_stride + out_col;
            store_elements(g.out, g.out_dtype, at, x, g.out_aligned, count);
        }
    }
};

}  // namespace sm80
}  // namespace thunderkittens::gemm
