// What a fused epilogue does to a finished tile, in fp32 and in the registers of the accumulators,
// before it is rounded and leaves as any other: keeps z, applies activation and gate, adds the
// residual. It lies between the main loops of two tiles, where the tensor cores wait; all of it is
// unrolled, with one branch on the kind of activation.
#pragma once

#include "csrc/gemm/epilogue_sm90.cuh"
#include "csrc/gemm/values_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

// A pair of a 16-bit type, which bf16 stands for.
__device__ __forceinline__ float2 unpack(bf16_2 pair, DType dtype) {
    return dtype == DType::bf16 ? unpack_pair<bf16>(pair)
                                : unpack_pair<half>(arch::bit_cast<half_2>(pair));
}

// Stores two neighbouring elements of a tensor of the output's type, or the first alone. `aligned`:
// pairs can be written as one.
__device__ __forceinline__ void store_pair(void* data, int64_t index, DType dtype, bool aligned,
                                           bool both, float2 pair) {
    if (dtype == DType::fp32) {
        float* to = static_cast<float*>(data) + index;
        if (aligned && both) return arch::store_global(reinterpret_cast<float2*>(to), pair);
        arch::store_global(to, pair.x);
        if (both) arch::store_global(to + 1, pair.y);
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(data) + index;
    const uint32_t word = dtype == DType::bf16
                              ? arch::bit_cast<uint32_t>(arch::pack_bf16(pair.x, pair.y))
                              : arch::bit_cast<uint32_t>(arch::pack_half(pair.x, pair.y));
    if (aligned && both) return arch::store_global(reinterpret_cast<uint32_t*>(to), word);
    arch::store_global(to, static_cast<uint16_t>(word));
    if (both) arch::store_global(to + 1, static_cast<uint16_t>(word >> 16));
}

template <Config C>
struct FusedEpilogue {
    using K = Types<C>;
    using Tile = rt_fl<16, C.block_n>;
    static constexpr int half = C.block_n / 4;  // values of a thread in half of the tile's columns

    static __device__ __forceinline__ void apply(const typename K::Globals& g, Tile& d,
                                                 const Place16 at) {
        const Epilogue& e = g.epilogue;
        if (e.preactivation != nullptr) keep(g, d, at);
        auto& values = reinterpret_cast<float(&)[2 * half]>(d);
        auto& x = reinterpret_cast<float(&)[half]>(values[0]);
        auto& y = reinterpret_cast<float(&)[half]>(values[half]);
        if (e.gate == Gate::interleaved) {
            activate<half>(e.activation, [&](int i) -> float& { return values[2 * i]; });
            join(values);
        } else {
            activate(e.activation, x);
            if (e.gate == Gate::none) {
                activate(e.activation, y);
            } else {
#pragma unroll
                for (int i = 0; i < half; ++i) x[i] *= y[i];
            }
        }
    }

    // Parts of 128 bytes a row that the residual of a tile has.
    static __device__ __forceinline__ int residual_parts(const typename K::Globals& g) {
        const int cols = g.epilogue.gate == Gate::none ? C.block_n : C.block_n / 2;
        return g.out_dtype == DType::fp32 ? cols / 32 : cols / 64;
    }
    // Adds the residual of a tile, which is in the stages after its last step.
    template <class Ring, class Release>
    static __device__ __forceinline__ void add_residual(const typename K::Globals& g,
                                                        typename K::Shared& shared, Tile& d,
                                                        Ring& ring, Release release) {
        if (g.out_dtype == DType::fp32)
            add_parts<32>(g, shared, d, ring, release);
        else
            add_parts<64>(g, shared, d, ring, release);
    }

  private:
    // Register r of base tile t: this row and column of the tile, from the warp's first row on.
    static __device__ __forceinline__ int row_of(int r) { return laneid() / 4 + r % 2 * 8; }
    static __device__ __forceinline__ int column_of(int t, int r) {
        return t * 16 + r / 2 * 8 + laneid() % 4 * 2;
    }

    // Multiplies gates and values, which are neighbours, and packs the products: a thread has those
    // for columns c, c + 4, c + 8 and c + 12 of each 16, c = lane % 4; a register tile has
    // 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 there.
    static __device__ __forceinline__ void join(float (&z)[2 * half]) {
        const int lane = laneid(), first = lane / 4 * 4 + lane * 2 % 4;
        const bool later = lane % 4 >= 2;
#pragma unroll
        for (int i = 0; i < half; i += 4) {
            // Product r: row r % 2, column c + r / 2 * 4 of 8.
            float x[4], y[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) x[r] = z[2 * (i + r)] * z[2 * (i + r) + 1];
#pragma unroll
            for (int row = 0; row < 2; ++row) {
#pragma unroll
                for (int next = 0; next < 2; ++next) {
                    const float low = arch::shuffle(x[row], first + next);
                    const float high = arch::shuffle(x[row + 2], first + next);
                    y[2 * row + next] = later ? high : low;
                }
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) z[i + r] = y[r];
        }
    }

    static __device__ __forceinline__ void keep(const typename K::Globals& g, const Tile& d,
                                                const Place16 at) {
        const Epilogue& e = g.epilogue;
#pragma unroll
        for (int t = 0; t < Tile::width; ++t) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int offset = column_of(t, r);
                const uint32_t row = at.row + row_of(r), col = K::column(g, at.col, offset);
                const bool gates = e.gate == Gate::blocked && offset < C.block_n / 2;
                const uint32_t limit = gates ? g.out_n : g.n;
                if (row >= g.m || col >= limit) continue;
                store_pair(e.preactivation, (int64_t(at.batch) * g.m + row) * g.n + col,
                           g.out_dtype, g.aligned_pairs, col + 1 < limit, d.tiles[0][t].data[r]);
            }
        }
    }
    // With parts of `cols` columns.
    template <int cols, class Ring, class Release>
    static __device__ __forceinline__ void add_parts(const typename K::Globals& g,
                                                     typename K::Shared& shared, Tile& d,
                                                     Ring& ring, Release release) {
        using part = typename Residual<C>::part;
        constexpr int each = Residual<C>::parts_per_stage;
        const int parts = residual_parts(g);
#pragma unroll
        for (int first = 0; first < C.block_n / cols; first += each) {
            if (first >= parts) break;
            wait(shared.full[ring.stage], ring.phase);
            auto& tiles = reinterpret_cast<part(&)[each]>(shared.stages[ring.stage]);
#pragma unroll
            for (int i = 0; i < each; ++i) {
                if (first + i >= parts) break;
                auto rows = tiles[i].template subtile<16, 64>({kittens::warpid(), 0});
#pragma unroll
                for (int t = 0; t < cols / 16; ++t) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const int row = row_of(r), col = column_of(t, r);
                        float2 more;
                        if constexpr (cols == 32) {
                            more = arch::load_shared<float2>(rows.address_of(row, 2 * col));
                        } else {
                            const auto word =
                                arch::load_shared<uint32_t>(rows.address_of(row, col));
                            more = unpack(arch::bit_cast<bf16_2>(word), g.out_dtype);
                        }
                        float2& sum = d.tiles[0][(first + i) * (cols / 16) + t].data[r];
                        sum.x += g.epilogue.beta * more.x;
                        sum.y += g.epilogue.beta * more.y;
                    }
                }
            }
            // One arrival stands for the warpgroup.
            warpgroup::sync(READY + 1 + warpgroup::groupid());
            release(ring.stage);
            ring.advance();
        }
    }
};

}  // namespace sm90
}  // namespace thunderkittens::gemm
