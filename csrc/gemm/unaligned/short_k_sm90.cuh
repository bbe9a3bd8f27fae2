// Matrix product on Hopper for a short k, which reads its operands wherever they lie: any address,
// any pitch, rows or columns adjacent. No roles: all threads load and store, and two warpgroups
// multiply, each half of a tile's columns. A block has one tile, of 64 rows.
//
// TMA and its tensor maps want rows that begin at multiples of 16 bytes. Where k is short, a copy
// into such rows costs a launch, which is more than the product. Here a thread reads the aligned
// vectors of 16 bytes around the ones that it wants, shifts them into place, and writes them to
// shared memory in the order that wgmma reads. All of its loads are on their way before the first
// is used, because such a kernel is one latency of memory long, and instructions: it lives from
// being short. Rows of the output may begin anywhere as well: they are staged such that what is
// aligned in memory is aligned in shared memory, and leave in vectors with ragged ends.
#pragma once

#include <algorithm>

#include "csrc/gemm/common/activation_sm90.cuh"
#include "csrc/gemm/common/launch_sm90.cuh"
#include "csrc/gemm/common/vec4_sm90.cuh"
#include "csrc/gemm/dense/gemm.h"

namespace thunderkittens::gemm {
namespace sm90 {

using namespace kittens;

// An operand: rows of adjacent elements, in bytes, of fewer than 2^31. Nothing is read but what
// lies between its first byte and its last: one vector from offsets below `one_below`, two from
// those below `two_below`.
struct ShortKSource {
    const uint8_t* begin;
    uint32_t pitch, batch_pitch, one_below, two_below;
};

template <Config C>
struct ShortKTraits {
    static constexpr Config config = C;
    static_assert(has_short_k(C));
    using T = std::conditional_t<C.dtype == DType::bf16, bf16, half>;
    static constexpr int threads = SHORT_K_THREADS, block_k = short_k_block_k(C);
    static_assert(C.block_m == 64 && threads == 2 * WARPGROUP_THREADS);
    using Sums = rt_fl<16, C.block_n / 2>;
    using a_tile =
        std::conditional_t<C.a_m_major, st<T, block_k, C.block_m>, st<T, C.block_m, block_k>>;
    // In stripes that are the columns of a warpgroup.
    using b_tile = std::conditional_t<C.b_n_major, st<T, block_k, C.block_n, true, C.block_n>,
                                      st<T, C.block_n, block_k>>;

    struct Shared {
        a_tile a;
        b_tile b;
        // The rows of the output, each with room for a shift by less than a vector.
        float4 staging[C.block_m * (C.block_n / 4 + 1)];
        sv_fl<C.block_n> bias;
    };
    static_assert(sizeof(a_tile) % 1024 == 0 && sizeof(b_tile) % 1024 == 0);
    static_assert((sizeof(Shared) + 127) / 128 * 128 == short_k_shared_bytes(C),
                  "gemm.h knows another size");

    struct Globals {
        ShortKSource a, b;
        int m, n, k;
        Epilogue epilogue;
        bool fused;  // the epilogue does more than to scale and to add a bias
        void* out;
        int64_t out_batch_stride;
        uint32_t out_stride;
        DType out_dtype;
    };
};

// Where k is adjacent, which elements of a thread's vectors are before its end: masks of words.
template <int block_k>
struct ShortKMasks {
    uint32_t words[block_k / 64][4];

    __device__ __forceinline__ explicit ShortKMasks(int k_left) {
#pragma unroll
        for (int i = 0; i < block_k / 64 * 4; ++i) {
            const int left = k_left - int(threadIdx.x % 8 * 8) - i / 4 * 64 - i % 4 * 2;
            words[i / 4][i % 4] = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0;
            arch::pin_register(words[i / 4][i % 4]);  // else it is computed for every vector
        }
    }
};

// What a thread reads of a tile of an operand: the vector of one column of vectors in every 32nd
// row, in each stripe of 64 columns. The rows of a warp are multiples of 8 apart, so that all of
// them begin equally far behind multiples of 16 bytes, whatever the pitch.
template <class Tile, bool k_adjacent>
struct ShortKLoads {
    using T = typename Tile::T;
    static constexpr int ROW_STEP = SHORT_K_THREADS / 8, VECTOR = 8;
    static constexpr int rows = Tile::rows / ROW_STEP, stripes = Tile::cols / 64;
    static constexpr int count = rows * stripes;
    static_assert(64 % Tile::stripe_cols == 0 && Tile::rows % ROW_STEP == 0);

    // In the order of k.
    static __host__ __device__ constexpr uint32_t row_of(int i) {
        return (k_adjacent ? i % rows : i / stripes) * ROW_STEP;
    }
    static __host__ __device__ constexpr uint32_t column_of(int i) {
        return (k_adjacent ? i / rows : i % stripes) * 64;
    }
    static __host__ __device__ constexpr int k_of(int i) {
        return int(k_adjacent ? column_of(i) : row_of(i));
    }
    static __device__ __forceinline__ uint32_t thread_row() {
        return threadIdx.x / WARP_THREADS + threadIdx.x % WARP_THREADS / 8 * 8;
    }
    static __device__ __forceinline__ uint32_t thread_column() { return threadIdx.x % 8 * VECTOR; }

    uint32_t to;  // address in shared memory of the first vector
    uint4 low[count], high[count];
    uint32_t first;    // offset of the first vector that is wanted, in the operand
    uint32_t shift;    // by which that is behind an aligned one: the same in a warp
    uint32_t at_ends;  // of the operand: vectors that are read by elements, as bits
    int rows_left, columns_left;

    __device__ __forceinline__ explicit ShortKLoads(const Tile& tile)
        : to(tile.address_of(int(thread_row()), int(thread_column()))) {
        arch::pin_register(to);  // else it is computed for every vector
    }
    // From the first vector of the thread to another: 32 rows further the swizzle is the same.
    static __host__ __device__ constexpr uint32_t distance_of(int i) {
        return row_of(i) * Tile::swizzle_bytes +
               column_of(i) / Tile::stripe_cols * Tile::stripe_bytes;
    }
    __device__ __forceinline__ uint32_t offset_of(const ShortKSource& g, int i) const {
        return first + row_of(i) * g.pitch + column_of(i) * uint32_t(sizeof(T));
    }

    // Issues the loads of the tile whose first element is (row, column) of `rows_all` rows of
    // `columns_all` elements.
    __device__ __forceinline__ void issue(const ShortKSource& g, uint32_t row, uint32_t column,
                                          int rows_all, int columns_all) {
        const int k_left = k_adjacent ? columns_all - int(column) : rows_all - int(row);
        row += thread_row(), column += thread_column();
        first = blockIdx.z * g.batch_pitch + row * g.pitch + column * uint32_t(sizeof(T));
        shift = (static_cast<uint32_t>(reinterpret_cast<uint64_t>(g.begin)) + first) % 16;
        const bool two = shift != 0;
        const uint32_t below = two ? g.two_below : g.one_below;
        rows_left = rows_all - int(row), columns_left = columns_all - int(column);
        at_ends = 0;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (k_of(i) >= k_left) break;
            const bool wanted = int(row_of(i)) < rows_left && int(column_of(i)) < columns_left;
            const uint32_t offset = offset_of(g, i) - shift;
            const bool inside = offset < below;
            const auto* from = reinterpret_cast<const uint4*>(g.begin + offset);
            low[i] = arch::load_global_readonly_if(wanted && inside, from);
            high[i] = arch::load_global_readonly_if(wanted && inside && two, from + 1);
            at_ends |= wanted && !inside ? 1u << i : 0;
        }
    }

    // The vectors at the ends of the operand, element by element, while the others are on their
    // way.
    __device__ __forceinline__ void copy_ends(const ShortKSource& g) const {
        if (at_ends == 0) return;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            if ((at_ends >> i & 1) == 0) continue;
            const auto* from = reinterpret_cast<const uint16_t*>(g.begin + offset_of(g, i));
            const int elements = columns_left - int(column_of(i));
            uint16_t values[VECTOR];
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                values[e] = e < elements ? arch::load_global_readonly(from + e) : uint16_t{0};
            }
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                arch::store_shared(to + distance_of(i) + e * 2, values[e]);
            }
        }
    }

    // Shifts what has arrived into place; behind the end of k are zeros. Vectors that copy_ends()
    // has written go to `nowhere`.
    __device__ __forceinline__ void store(int k_left, uint32_t nowhere, const auto& masks) const {
        const int words = arch::warp_uniform(static_cast<int>(shift / 4));
        if (words == 0)
            store<0>(k_left, nowhere, masks);
        else if (words == 1)
            store<1>(k_left, nowhere, masks);
        else if (words == 2)
            store<2>(k_left, nowhere, masks);
        else
            store<3>(k_left, nowhere, masks);
    }
    template <int words>
    __device__ __forceinline__ void store(int k_left, uint32_t nowhere, const auto& masks) const {
        const uint32_t bytes = 0x3210 + shift % 4 * 0x1111;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (k_of(i) >= k_left) break;
            const uint32_t w[8] = {low[i].x,  low[i].y,  low[i].z,  low[i].w,
                                   high[i].x, high[i].y, high[i].z, high[i].w};
            uint32_t v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                v[j] = arch::permute_bytes(w[words + j], w[words + j + 1], bytes);
            }
            if constexpr (k_adjacent) {
#pragma unroll
                for (int j = 0; j < 4; ++j) v[j] &= masks.words[column_of(i) / 64][j];
            }
            const bool is_written = (at_ends >> i & 1) != 0;
            arch::store_shared(is_written ? nowhere : to + distance_of(i),
                               uint4{v[0], v[1], v[2], v[3]});
        }
    }
};

// The tile's sums on their way to the output, as elements O: rows of the staging memory are shifted
// as those of the output are, so that a vector that is aligned there is aligned here.
template <class Traits, class O>
struct ShortKStore {
    static constexpr uint32_t columns = Traits::config.block_n, VECTOR = 16 / sizeof(O);
    static constexpr uint32_t PITCH = columns + VECTOR, LANES = columns / VECTOR;  // of a row
    static constexpr uint32_t SIZE = sizeof(O);
    static_assert(PITCH * SIZE * Traits::config.block_m <= sizeof(Traits::Shared::staging));

    static __device__ __forceinline__ void stage(uint32_t to, const float2& v, bool as_pair) {
        if constexpr (SIZE == 4) {
            arch::store_shared(to, v.x);
            arch::store_shared(to + 4, v.y);
        } else {
            uint32_t pair;
            if constexpr (std::same_as<O, bf16>)
                pair = arch::bit_cast<uint32_t>(arch::pack_bf16(v.x, v.y));
            else
                pair = arch::bit_cast<uint32_t>(arch::pack_half(v.x, v.y));
            if (as_pair) {
                arch::store_shared(to, pair);
            } else {
                arch::store_shared(to, static_cast<uint16_t>(pair));
                arch::store_shared(to + 2, static_cast<uint16_t>(pair >> 16));
            }
        }
    }
    // Stores the tile, which begins at the address `out` and has `rows` rows of `count` columns.
    static __device__ __forceinline__ void store(uint8_t* out, uint32_t stride, uint32_t staging,
                                                 const typename Traits::Sums& d,
                                                 uint32_t first_column, uint32_t rows,
                                                 uint32_t count) {
        // How many elements a row begins behind a multiple of 16 bytes.
        const uint32_t shift = static_cast<uint32_t>(reinterpret_cast<uint64_t>(out)) / SIZE;
        const auto shift_of = [&](uint32_t row) { return (shift + row * stride) % VECTOR; };
        const uint32_t lane = threadIdx.x % WARP_THREADS,
                       warp_row = threadIdx.x % WARPGROUP_THREADS / WARP_THREADS * 16;
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t row = warp_row + half * 8 + lane / 4;
            const uint32_t at = shift_of(row) + first_column + lane % 4 * 2;
            const uint32_t to = staging + (row * PITCH + at) * SIZE;
            const bool as_pairs = at % 2 == 0;
#pragma unroll
            for (uint32_t j = 0; j < d.width; ++j) {
                stage(to + j * 16 * SIZE, d.tiles[0][j].data[half], as_pairs);
                stage(to + (j * 16 + 8) * SIZE, d.tiles[0][j].data[2 + half], as_pairs);
            }
        }
        arch::sync_block();
        const uint32_t part = threadIdx.x % LANES;
#pragma unroll
        for (uint32_t first = 0; first < Traits::config.block_m; first += Traits::threads / LANES) {
            const uint32_t row = first + threadIdx.x / LANES;
            if (row >= rows) continue;
            const uint32_t at = shift_of(row), head = (VECTOR - at) % VECTOR;
            const uint32_t whole = max(int(count - head), 0) / VECTOR;
            const uint32_t tail = head + whole * VECTOR + part;
            const uint32_t from = staging + (row * PITCH + at) * SIZE, to = row * stride * SIZE;
            const auto copy = [&]<class Word>(Word, uint32_t column) {
                arch::store_global(reinterpret_cast<Word*>(out + (to + column * SIZE)),
                                   arch::load_shared<Word>(from + column * SIZE));
            };
            if (part < whole) copy(uint4{}, head + part * VECTOR);
            if (part < min(head, count)) copy(O{}, part);
            if (part < VECTOR && tail < count) copy(O{}, tail);
        }
    }
};

// What a fused epilogue does to the sums, behind the bias, in registers. z goes the way of the
// output.
template <class Traits>
__device__ __forceinline__ void fuse_short_k(const typename Traits::Globals& g, uint32_t staging,
                                             typename Traits::Sums& d, int first_column,
                                             const auto& store) {
    constexpr int pairs = Traits::Sums::width * 4;
    const Epilogue& e = g.epilogue;
    if (e.aux != nullptr) {
        store(e.aux, int64_t{g.m} * g.n, static_cast<uint32_t>(g.n));
        arch::sync_block();  // the staging memory is the output's
    }
    activate(e.activation, reinterpret_cast<float(&)[pairs * 2]>(d));
    if (e.residual == nullptr) return;
    const int row = static_cast<int>(blockIdx.y * Traits::config.block_m) +
                    warpgroup::warpid() * 16 + laneid() / 4;
    const int column =
        static_cast<int>(blockIdx.x * Traits::config.block_n) + first_column + laneid() % 4 * 2;
    with_type(const_cast<void*>(e.residual), g.out_dtype, [&](auto* residual) {
        const auto* from = residual + blockIdx.z * e.residual_batch_stride;
        float2 more[pairs] = {};
#pragma unroll
        for (int i = 0; i < pairs; ++i) {
            const int m = row + i % 2 * 8, n = column + i / 4 * 16 + i / 2 % 2 * 8;
            if (m >= g.m || n >= g.n) continue;
            const auto* pair = from + m * e.residual_stride + n;
            more[i].x = convert<float>(arch::load_global(pair));
            if (n + 1 < g.n) more[i].y = convert<float>(arch::load_global(pair + 1));
        }
#pragma unroll
        for (int i = 0; i < pairs; ++i) {
            float2& sum = d.tiles[0][i / 4].data[i % 4];
            sum = {sum.x + e.beta * more[i].x, sum.y + e.beta * more[i].y};
        }
    });
}

// Multiplies what lies in shared memory: the columns of the warpgroup.
template <class Traits>
__device__ __forceinline__ void multiply_short_k(typename Traits::Shared& shared,
                                                 typename Traits::Sums& d, int first_column,
                                                 bool accumulate, int k_left) {
    constexpr bool a_m_major = Traits::config.a_m_major, b_n_major = Traits::config.b_n_major;
    constexpr int STEP = 32, width = Traits::Sums::cols;
    using a_step =
        st_subtile<typename Traits::a_tile, a_m_major ? STEP : 64, a_m_major ? 64 : STEP>;
    using b_step =
        st_subtile<typename Traits::b_tile, b_n_major ? STEP : width, b_n_major ? width : STEP>;
#pragma unroll
    for (int k = 0; k < Traits::block_k; k += STEP) {
        if (k >= k_left) break;
        const a_step a(shared.a, a_m_major ? int2{k, 0} : int2{0, k});
        const b_step b(shared.b, b_n_major ? int2{k, first_column} : int2{first_column, k});
        warpgroup::product<a_m_major, !b_n_major>(d, a, b, accumulate || k > 0);
    }
    warpgroup::mma_async_wait(d);
}

template <class Traits>
__global__ __launch_bounds__(Traits::threads, 2) void short_k_kernel(const __grid_constant__
                                                                     typename Traits::Globals g) {
    constexpr Config C = Traits::config;
    using T = typename Traits::T;
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<typename Traits::Shared>();
    const int m = static_cast<int>(blockIdx.y * C.block_m),
              n = static_cast<int>(blockIdx.x * C.block_n);
    const int column = static_cast<int>(threadIdx.x);  // whose bias the thread brings
    const int first_column =
        arch::warp_uniform(kittens::warpid()) / WARPGROUP_WARPS * Traits::Sums::cols;
    const uint32_t staging = arch::shared_address(&shared.staging);
    T bias{};
    ShortKLoads<typename Traits::a_tile, !C.a_m_major> a(shared.a);
    ShortKLoads<typename Traits::b_tile, !C.b_n_major> b(shared.b);
    typename Traits::Sums d;

    arch::wait_for_dependencies();
    arch::launch_dependents();
#pragma unroll 1
    for (int k = 0;; k += Traits::block_k) {
        const int k_left = g.k - k;
        if (k_left > 0) {
            if constexpr (C.a_m_major)
                a.issue(g.a, k, m, g.k, g.m);
            else
                a.issue(g.a, m, k, g.m, g.k);
            if constexpr (C.b_n_major)
                b.issue(g.b, k, n, g.k, g.n);
            else
                b.issue(g.b, n, k, g.n, g.k);
        }
        if (k > 0) {
            // The products of what is in shared memory, while the next loads are on their way.
            multiply_short_k<Traits>(shared, d, first_column, k > Traits::block_k,
                                     k_left + Traits::block_k);
            if (k_left <= 0) break;
            arch::sync_block();
        } else if (g.epilogue.bias != nullptr && column < min(C.block_n, g.n - n)) {
            bias = arch::load_global_readonly(static_cast<const T*>(g.epilogue.bias) + n + column);
        }
        a.copy_ends(g.a);
        b.copy_ends(g.b);
        const ShortKMasks<Traits::block_k> masks(k_left);
        const uint32_t nowhere = staging + threadIdx.x * 16;  // the output's rows come later
        a.store(k_left, nowhere, masks);
        b.store(k_left, nowhere, masks);
        if (k == 0 && column < C.block_n) shared.bias.set(column, convert<float>(bias));
        arch::fence_async_shared();
        arch::sync_block();
    }

    if (g.epilogue.alpha != 1.f || g.epilogue.bias != nullptr) {
#pragma unroll
        for (int j = 0; j < d.width; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 add = arch::load_shared<float2>(
                    shared.bias.address_of(first_column + j * 16 + half * 8 + laneid() % 4 * 2));
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float2& sum = d.tiles[0][j].data[2 * half + r];
                    sum = {sum.x * g.epilogue.alpha + add.x, sum.y * g.epilogue.alpha + add.y};
                }
            }
        }
    }
    const auto store = [&](void* out, int64_t batch_stride, uint32_t stride) {
        with_type(out, g.out_dtype, [&]<class O>(O* to) {
            to += blockIdx.z * batch_stride + m * int64_t{stride} + int64_t{n};
            ShortKStore<Traits, O>::store(reinterpret_cast<uint8_t*>(to), stride, staging, d,
                                          first_column, static_cast<uint32_t>(g.m - m),
                                          static_cast<uint32_t>(min(g.n - n, C.block_n)));
        });
    };
    if (g.fused) [[unlikely]]
        fuse_short_k<Traits>(g, staging, d, first_column, store);
    store(g.out, g.out_batch_stride, g.out_stride);
}

}  // namespace sm90

template <Config C>
void launch_short_k(const Params& p, Stream stream) {
    using Traits = sm90::ShortKTraits<C>;
    constexpr int64_t size = sizeof(typename Traits::T);
    const auto source = [&](const void* data, int64_t rows, int64_t columns, int64_t stride,
                            int64_t batch_stride) {
        const int64_t bytes = size * short_k_extent(batch_stride != 0 ? p.batch : 1, rows, columns,
                                                    stride, batch_stride);
        const auto below = [&](int64_t vectors) {
            return static_cast<uint32_t>(std::max<int64_t>(0, bytes - vectors * 16 + 1));
        };
        return sm90::ShortKSource{.begin = static_cast<const uint8_t*>(data),
                                  .pitch = static_cast<uint32_t>(stride * size),
                                  .batch_pitch = static_cast<uint32_t>(batch_stride * size),
                                  .one_below = below(1),
                                  .two_below = below(2)};
    };
    const dim3 grid(static_cast<unsigned>(ceil_div(p.n, C.block_n)),
                    static_cast<unsigned>(ceil_div(p.m, C.block_m)),
                    static_cast<unsigned>(p.batch));
    const typename Traits::Globals globals{
        .a = C.a_m_major ? source(p.a, p.k, p.m, p.a_stride, p.a_batch_stride)
                         : source(p.a, p.m, p.k, p.a_stride, p.a_batch_stride),
        .b = C.b_n_major ? source(p.b, p.k, p.n, p.b_stride, p.b_batch_stride)
                         : source(p.b, p.n, p.k, p.b_stride, p.b_batch_stride),
        .m = static_cast<int>(p.m),
        .n = static_cast<int>(p.n),
        .k = static_cast<int>(p.k),
        .epilogue = p.epilogue,
        .fused = p.epilogue.aux != nullptr || p.epilogue.residual != nullptr ||
                 p.epilogue.activation != Activation::none,
        .out = p.out,
        .out_batch_stride = p.out_batch_stride,
        .out_stride = static_cast<uint32_t>(p.out_stride),
        .out_dtype = p.out_dtype,
    };
    launch_dependent<Traits>(sm90::short_k_kernel<Traits>, grid, dim3(1), stream, globals);
}

}  // namespace thunderkittens::gemm
