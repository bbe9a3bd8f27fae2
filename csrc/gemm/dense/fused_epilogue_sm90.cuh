// The fused epilogue of a consumer: what it does to a finished tile, in fp32 and in the registers
// of the accumulators, before the tile is rounded and stored like any other. It stores z as the aux
// output, applies activation and gate, and adds the residual. It lies between the main loops of two
// tiles, where the tensor cores wait; all of it is unrolled, with one branch on the kind of
// activation.
#pragma once

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/dense/deferred_store_sm90.cuh"

namespace thunderkittens::gemm {
namespace sm90 {

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

// Short formulas of activations whose result is rounded to T, a 16-bit type, with one special
// function each, which takes as long as eight other instructions. The highest coefficient of a
// polynomial is 1, and no step has two constants, which would need registers.
template <class T>
struct ShortFormulas {
    // x / (1 + 2^-power), power having the sign of x. Of e, the smaller of 2^power and 2^-power
    // times a constant, e / (e + 1) is a polynomial. The relative error is below 2^-11.5 for bf16,
    // 2^-16 for fp16.
    static __device__ __forceinline__ float times_sigmoid(float x, float power) {
        if constexpr (std::is_same_v<T, bf16>) {
            // The constant, 2^SHIFT, keeps e from the subnormal numbers, which the instruction
            // flushes, as long as the product with x is none.
            constexpr float SHIFT = 8.f, FACTOR = 1.3846605e-13f;
            constexpr float c[] = {2.8202498e+10f, -1.0852761e+08f, 372735.97f, -896.f};
            const float e = arch::exp2_approx(SHIFT - fabsf(power));
            return x * share_of(x, arch::multiply_rounded(e, FACTOR * monic(e, c)));
        } else {
            constexpr float SHIFT = -0.5431066f;
            constexpr float c[] = {1.4570941f, -2.1213202f, 3.0485291f,
                                   -4.070811f, 4.3861504f,  -3.0883117f};
            const float e = arch::exp2_approx(SHIFT - fabsf(power));
            return x * share_of(x, arch::multiply_rounded(e, monic(e, c)));
        }
    }
    // x times the normal distribution, computed as in normal() from -|x| times a factor. The
    // relative error is below 2^-11 down to x = -5 and 2^-10 beyond for bf16, below 2^-16 for fp16
    // where its steps are not wider.
    static __device__ __forceinline__ float times_normal(float x) {
        if constexpr (std::is_same_v<T, bf16>) {
            constexpr float c[] = {-1.0005989f, 9.560053f, -32.842533f, 26.511461f,
                                   27.75091f,   18.1425f,  6.5722585f};
            return x * share_of(x, arch::exp2_approx(monic(-fabsf(0.11972123f * x), c)));
        } else {
            constexpr float c[] = {-0.9999962f, 7.7360044f, -20.706167f, 16.335928f,
                                   17.186502f,  12.405804f, 5.3204036f};
            return x * share_of(x, arch::exp2_approx(monic(-fabsf(0.14881434f * x), c)));
        }
    }
};

// Serial formulas, for warps that take one value after the other, as epilogue warps do: each
// instruction costs its latency, and special functions are not what limits, so there are two of
// these and few others.
template <class T>
struct SerialFormulas {
    // x / (1 + 2^-power), with a relative error of about 2^-22 on either side.
    static __device__ __forceinline__ float times_sigmoid(float x, float power) {
        return x * arch::reciprocal_approx(1.f + arch::exp2_approx(-power));
    }
    static __device__ __forceinline__ float times_normal(float x) {
        if constexpr (std::is_same_v<T, bf16>) {
            // log2(Phi(x) / Phi(-x)) is nearly a polynomial of degree 7, here without the factor of
            // the highest power. The relative error of Phi is below 2^-9.8 to x = -4.8, where
            // PyTorch's formula has as much, and a few percent at -6; beyond, the result falls
            // faster than Phi.
            constexpr float c[] = {174300.39f, 8309.456f, -108.62424f};
            return times_sigmoid(x, x * (1.3179569e-05f * monic(x * x, c)));
        } else {
            return ShortFormulas<T>::times_normal(x);
        }
    }
};

// Passes the formula of an activation to `use`. Comparisons are used because the table of a switch
// would have to come from memory.
template <class Formulas, class Use>
__device__ __forceinline__ void with_formula(Activation activation, Use use) {
    if (activation == Activation::silu) {
        use([](float x) { return Formulas::times_sigmoid(x, 1.44269504f * x); });
    } else if (activation == Activation::gelu_tanh) {  // gelu_tanh_argument(x) in base 2
        use([](float x) {
            const float y = 0.32084769f * x;
            return Formulas::times_sigmoid(x, x * (2.3022082f + y * y));
        });
    } else if (activation == Activation::gelu) {
        use([](float x) { return Formulas::times_normal(x); });
    } else {
        use([](float x) { return x; });
    }
}

// The bias of a tile's columns in kernels with epilogue warps, where registers are few. The
// producer thread brings it into shared memory with the tile's first step. When the deferred values
// of the last tile have been stored, their registers take the bias as fp32: shared memory is busy
// as long as products run, and where they end the tensor cores wait. What bulk copies cannot bring,
// the consumers fetch there.
template <Config C>
struct RegisterBias {
    using Traits = KernelTraits<C>;
    using T = typename Traits::T;
    using Row = sv<T, C.block_n>;
    using Registers = rt_bf<16, C.block_n>;

    // Expects `more` bytes beside those of the bias.
    static __device__ __forceinline__ void bring(const typename Traits::Globals& g, Row& row,
                                                 semaphore& full, uint32_t col, int more) {
        const bool halves = g.epilogue.gate == Gate::blocked;
        const int width = halves ? C.block_n / 2 : C.block_n;
        // Behind the last gate lie values; a tile that reaches over it computes those as well.
        const int first = min(static_cast<int>(g.n - col), width) * 2;
        const int second = halves ? min(static_cast<int>(g.out_n - col), width) * 2 : 0;
        tma::expect_bytes(full, more + first + second);
        const T* from = static_cast<const T*>(g.epilogue.bias) + col;
        arch::bulk_load(row.address(), from, first, full.address());
        if (halves) arch::bulk_load(row.address_of(width), from + g.out_n, second, full.address());
    }
    // Fetches the bias without bulk copies; called by a consumer.
    static __device__ __forceinline__ void fetch(const typename Traits::Globals& g, Row& row,
                                                 uint32_t col) {
        warpgroup::sync(READY + 1 + warpgroup::groupid());  // the last tile's readers are done
#pragma unroll
        for (int i = 0; i < C.block_n; i += WARPGROUP_THREADS) {
            const int offset = i + warpgroup::laneid();
            const uint32_t from = Traits::column(g, col, offset);
            T value{};
            if (from < g.n)
                value = arch::load_global(static_cast<const T*>(g.epilogue.bias) + from);
            row.set(offset, value);
        }
        warpgroup::sync(READY + 1 + warpgroup::groupid());
    }
    // A thread's values of the columns from 16 j on, twice two, are stored in data[0] to data[3]
    // there.
    static __device__ __forceinline__ void load(const Row& row, Registers& registers) {
        // All rows of a matrix are the same eight columns.
        const uint32_t from = row.address_of(laneid() / 8 * 8);
#pragma unroll
        for (int j = 0; j < C.block_n / 16; j += 2) {
            uint32_t words[4];
            arch::load_matrix_x4(words[0], words[1], words[2], words[3], from + j * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack_pair<T>(arch::bit_cast<packed_type<T>>(words[i]));
                auto& data = registers.tiles[0][j + i / 2].data;
                data[i % 2 * 2] = arch::bit_cast<bf16_2>(pair.x);
                data[i % 2 * 2 + 1] = arch::bit_cast<bf16_2>(pair.y);
            }
        }
    }
    static __device__ __forceinline__ void add(const Registers& registers,
                                               rt_fl<16, C.block_n>& d) {
#pragma unroll
        for (int j = 0; j < C.block_n / 16; ++j) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const auto& data = registers.tiles[0][j].data;
                d.tiles[0][j].data[r].x += arch::bit_cast<float>(data[r / 2 * 2]);
                d.tiles[0][j].data[r].y += arch::bit_cast<float>(data[r / 2 * 2 + 1]);
            }
        }
    }
};

template <Config C>
struct FusedEpilogue {
    using Traits = KernelTraits<C>;
    using Tile = rt_fl<16, C.block_n>;
    static constexpr int half = C.block_n / 4;  // values of a thread in half of the tile's columns

    static __device__ __forceinline__ void apply(const typename Traits::Globals& g, Tile& d,
                                                 const WarpRows at) {
        const Epilogue& e = g.epilogue;
        if (e.aux != nullptr) store_aux(g, d, at);
        if (g.packed) return;
        auto& values = reinterpret_cast<float(&)[2 * half]>(d);
        auto& x = reinterpret_cast<float(&)[half]>(values[0]);
        auto& y = reinterpret_cast<float(&)[half]>(values[half]);
        if (e.gate == Gate::interleaved) {
            activate_for<half>(g, [&](int i) -> float& { return values[2 * i]; });
            join(values);
        } else {
            activate_for<half>(g, [&](int i) -> float& { return x[i]; });
            if (e.gate == Gate::none) {
                activate_for<half>(g, [&](int i) -> float& { return y[i]; });
            } else {
#pragma unroll
                for (int i = 0; i < half; ++i) x[i] *= y[i];
            }
        }
    }

    // Activates and rounds at once, so that the conversions overlap the special functions.
    template <class Values>
    static __device__ __forceinline__ void pack(Activation activation, Values& values,
                                                const Tile& d) {
        const auto each = [&](auto function) {
#pragma unroll
            for (int j = 0; j < d.width; ++j) {
#pragma unroll
                for (int r = 0; r < d.packed_per_base; ++r) {
                    values.tiles[0][j].data[r] = function(d.tiles[0][j].data[r]);
                }
            }
        };
        if (activation == Activation::relu) {
            return each([](float2 pair) { return arch::pack_bf16_relu(pair.x, pair.y); });
        }
        with_formula<ShortFormulas<bf16>>(activation, [&](auto function) {
            each([&](float2 pair) { return pack_pair<bf16>(function(pair.x), function(pair.y)); });
        });
    }

    // The subtiles, of 128 bytes a row, of a tile's residual.
    static __device__ __forceinline__ int residual_subtiles(const typename Traits::Globals& g) {
        const int cols = g.epilogue.gate == Gate::none ? C.block_n : C.block_n / 2;
        return g.out_dtype == DType::fp32 ? cols / 32 : cols / 64;
    }
    // Adds the residual of a tile, which follows its last step in the ring of stages.
    template <class Ring, class Release>
    static __device__ __forceinline__ void add_residual(const typename Traits::Globals& g,
                                                        typename Traits::Shared& shared, Tile& d,
                                                        Ring& ring, Release release) {
        if (g.out_dtype == DType::fp32)
            add_subtiles<float>(g, shared, d, ring, release);
        else if (g.out_dtype == DType::bf16)
            add_subtiles<bf16>(g, shared, d, ring, release);
        else
            add_subtiles<kittens::half>(g, shared, d, ring, release);
    }

  private:
    // Replaces each of n values, value(i), by its activation.
    template <int n, class Value>
    static __device__ __forceinline__ void activate_for(const typename Traits::Globals& g,
                                                        Value value) {
        const Activation activation = g.epilogue.activation;
        if (C.masked || g.out_dtype != DType::bf16 || activation <= Activation::relu) {
            return activate<n>(activation, value);
        }
        with_formula<ShortFormulas<bf16>>(activation, [&](auto function) {
#pragma unroll
            for (int i = 0; i < n; ++i) value(i) = function(value(i));
        });
    }

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

    static __device__ __forceinline__ void store_aux(const typename Traits::Globals& g,
                                                     const Tile& d, const WarpRows at) {
        const Epilogue& e = g.epilogue;
#pragma unroll
        for (int t = 0; t < Tile::width; ++t) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int offset = column_of(t, r);
                const uint32_t row = at.row + row_of(r), col = Traits::column(g, at.col, offset);
                const bool gates = e.gate == Gate::blocked && offset < C.block_n / 2;
                const uint32_t limit = gates ? g.out_n : g.n;
                if (row >= g.m || col >= limit) continue;
                store_pair(e.aux, (int64_t(at.batch) * g.m + row) * g.n + col, g.out_dtype,
                           g.aux_vec2_aligned, col + 1 < limit, d.tiles[0][t].data[r]);
            }
        }
    }
    // A thread's values in base tile t of a subtile of the residual.
    template <class T, class ResidualTile>
    static __device__ __forceinline__ void load_residual(float2 (&pairs)[4],
                                                         const ResidualTile& residual_tile, int t) {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                pairs[r] = arch::load_shared<float2>(
                    residual_tile.address_of(row_of(r), 2 * column_of(t, r)));
            }
        } else {
            uint32_t words[4];
            arch::load_matrix_x4(
                words[0], words[1], words[2], words[3],
                residual_tile.address_of(laneid() % 16, t * 16 + laneid() / 16 * 8));
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                pairs[r] = unpack_pair<T>(arch::bit_cast<packed_type<T>>(words[r]));
            }
        }
    }
    // Adds values of type T, 128 bytes a row in a subtile.
    template <class T, class Ring, class Release>
    static __device__ __forceinline__ void add_subtiles(const typename Traits::Globals& g,
                                                        typename Traits::Shared& shared, Tile& d,
                                                        Ring& ring, Release release) {
        using residual_tile = typename Residual<C>::residual_tile;
        constexpr int each = Residual<C>::subtiles_per_stage, cols = 128 / int(sizeof(T));
        const int subtiles = residual_subtiles(g);
#pragma unroll
        for (int first = 0; first < C.block_n / cols; first += each) {
            if (first >= subtiles) break;
            wait(shared.full[ring.stage], ring.phase);
            auto& tiles = reinterpret_cast<residual_tile(&)[each]>(shared.stages[ring.stage]);
#pragma unroll
            for (int i = 0; i < each; ++i) {
                if (first + i >= subtiles) break;
                auto rows = tiles[i].template subtile<16, 64>({kittens::warpid(), 0});
#pragma unroll
                for (int t = 0; t < cols / 16; ++t) {
                    float2 more[4];
                    load_residual<T>(more, rows, t);
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        float2& sum = d.tiles[0][(first + i) * (cols / 16) + t].data[r];
                        sum.x += g.epilogue.beta * more[r].x;
                        sum.y += g.epilogue.beta * more[r].y;
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
