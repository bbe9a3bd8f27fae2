// What forward_sm90.cuh computes, for every GPU from compute capability 8.0 on, by cp.async,
// ldmatrix and mma.sync. A block has four warps without roles, one segment of a sequence and one
// slice of 64 columns of the values of a head. All but the scores is transposed: a warp has 16
// columns of the values as rows, of the state S (16 values, keys) and of the outputs (16 values, 64
// tokens). So the state goes from its fp32 accumulators to an operand of S q^T within registers,
// and no copy of it is kept anywhere. A chunk:
//   within the chunk   a warp makes P = (q k^T) o e^(c_i - c_j) w_j of 16 queries, which all read
//   the output         e^(c_i) S q^T + v^T P^T, scaled, with skip and gate, transposed in registers
//   the state          S = e^(c_last) S + (v w e^(c_last - c))^T k
// Queries of the next chunk are on their way from the second product on, keys and values from the
// last one on. The tiles of one chunk take 49 KB, so that two blocks share a multiprocessor of any
// GPU, and with 64 keys three on one of 163 KB.
#pragma once

#include "csrc/recurrent/common/products_sm80.cuh"
#include "csrc/recurrent/common/running_state.cuh"

namespace thunderkittens::recurrent {
namespace sm80 {

using linear_attention::largest_magnitude;
using linear_attention::warp_maximum;

template <class T, int _keys>
struct PortableTypes {
    using element = T;
    static constexpr int keys = _keys, blocks_per_sm = portable_blocks_per_sm(_keys);
    using key_tile = st<T, CHUNK, keys>;
    using value_tile = st<T, CHUNK, VALUES>;
    using weight_tile = st<T, CHUNK, CHUNK>;  // queries are rows
    using State = RunningState<T, keys>;
};

struct PortableGlobals {
    Operand q, k, v, z, out;
    GateOperands gates;
    HeadOperand skip;
    float scale;
    WorkTiles tiles;
    StateOperand initial, final;
    float* segment_states;  // null: there is one segment
    bool states_only;
    int key_dim, value_dim;

    __device__ __forceinline__ WorkTile work_tile() const {
        return tiles.tile(states_only ? tiles.segments - 1 : tiles.segments);
    }
};

// Sums of log decays, and these without the weight: as ChunkGates, of which the rest follows.
struct PortableGates {
    sv<float, CHUNK> sum, key;
};

template <class K>
struct PortableShared {
    typename K::key_tile q, k;
    typename K::value_tile v;
    typename K::weight_tile weights;
    PortableGates gates[2];  // of this chunk and the next
};

// Of two neighbouring tokens of a lane, what their gates are made of.
template <class T>
struct GateReader {
    const GateOperands& operands;
    const Sequence& sequence;
    int head;
    HeadGates own;

    __device__ __forceinline__ GateReader(const GateOperands& g, const Sequence& s, int _head)
        : operands(g), sequence(s), head(_head), own(head_gates<T>(g, _head)) {}

    // As they lie in memory.
    __device__ __forceinline__ uint2 read(int chunk) const {
        const TokenOperand& given = operands.dt.data != nullptr ? operands.dt : operands.g;
        uint2 raw = {0, 0};
        if (given.data == nullptr) return raw;
        const int row = chunk * CHUNK + 2 * laneid();
        const int64_t first = sequence.begin + row;
        if (row < sequence.length) raw.x = element_bits(given, sequence.b, head, first);
        if (row + 1 < sequence.length) raw.y = element_bits(given, sequence.b, head, first + 1);
        return raw;
    }
    // Tokens behind the end decay nothing and weigh nothing.
    __device__ __forceinline__ void store(PortableGates& to, int chunk, uint2 raw) const {
        const int lane = laneid(), left = sequence.length - chunk * CHUNK - 2 * lane;
        TokenGate first, second;
        const DType dtype = (operands.dt.data != nullptr ? operands.dt : operands.g).dtype;
        if (left > 0) first = token_gate(operands, own, element_of_bits<T>(dtype, raw.x));
        if (left > 1) second = token_gate(operands, own, element_of_bits<T>(dtype, raw.y));
        float sum = first.decay + second.decay;
#pragma unroll
        for (int distance = 1; distance < WARP_THREADS; distance *= 2) {
            const float other = arch::shuffle(sum, (lane - distance) % WARP_THREADS);
            if (lane >= distance) sum += other;
        }
        const float2 sums = {sum - second.decay, sum};
        arch::store_shared(to.sum.address_of(2 * lane), sums);
        arch::store_shared(to.key.address_of(2 * lane),
                           float2{sums.x - arch::log2_approx(first.weight),
                                  sums.y - arch::log2_approx(second.weight)});
    }
};

// The power of two by which a warp's part of a state in half is multiplied so that its operand does
// not overflow.
template <class T, any_register_tile Tile>
__device__ __forceinline__ float operand_unit(const Tile& tile) {
    if constexpr (std::is_same_v<T, bf16>) {
        return 1.0f;
    } else {
        const float most = warp_maximum(largest_magnitude(tile));
        const int exponent = int(arch::bit_cast<uint32_t>(most) >> 23) - 127;
        if (exponent < 14 || exponent > 127) return 1.0f;
        return arch::bit_cast<float>(uint32_t(127 + 13 - exponent) << 23);
    }
}

// 16 values of 16 tokens, values as rows as in an accumulator, and the place in memory where a lane
// has eight values of a token.
__device__ __forceinline__ int token_of_lane() { return laneid() / 4 + 8 * (laneid() % 4 / 2); }
__device__ __forceinline__ int value_of_lane() { return 8 * (laneid() % 2); }
__device__ __forceinline__ void transpose_matrices(uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = arch::transpose_matrix(words[i]);
}

template <class K>
struct PortableBlock {
    using T = typename K::element;
    using outputs = rt_fl<16, CHUNK>;  // of 16 values
    const PortableGlobals& g;
    PortableShared<K>& shared;
    WorkTile work;
    Slice slice;

    __device__ __forceinline__ PortableBlock(const PortableGlobals& _g, PortableShared<K>& _shared)
        : g(_g), shared(_shared), work(_g.work_tile()), slice(_g.tiles, work, 0) {}

    __device__ __forceinline__ int tokens(int chunk) const {
        return work.sequence.length - chunk * CHUNK;
    }
    __device__ __forceinline__ void load_queries(int chunk) const {
        tile_copy<typename K::key_tile>::load(
            shared.q, address_in<T>(g.q, work.sequence, work.group, chunk * CHUNK, 0),
            g.q.row_stride, tokens(chunk), g.key_dim);
        arch::cp_async_commit();
    }
    __device__ __forceinline__ void load_keys(int chunk) const {
        tile_copy<typename K::key_tile>::load(
            shared.k, address_in<T>(g.k, work.sequence, work.group, chunk * CHUNK, 0),
            g.k.row_stride, tokens(chunk), g.key_dim);
        tile_copy<typename K::value_tile>::load(
            shared.v, address_in<T>(g.v, work.sequence, slice.head, chunk * CHUNK, slice.column),
            g.v.row_stride, tokens(chunk), g.value_dim - slice.column);
        arch::cp_async_commit();
    }

    // The weights of the keys for this warp's 16 queries; keys behind all of these are left out.
    __device__ __forceinline__ void make_weights(const PortableGates& gates) const {
        const int warp = own_warp(), row = 16 * warp + laneid() / 4;
        operand_a<T> queries[K::keys / 16];
        const a_walker<typename K::key_tile> query(shared.q, 16 * warp, 0);
        const b_walker<typename K::key_tile> key(shared.k, 0, 0);
#pragma unroll
        for (int s = 0; s < K::keys / 16; ++s) query.load(queries[s], 0, 16 * s, 0);
        const float upper = gates.sum.get(row), lower = gates.sum.get(row + 8);
        packed_type<T> words[CHUNK_BLOCKS][4];
#pragma unroll
        for (int j = 0; j < CHUNK_BLOCKS; ++j) {
            if (j > warp) {
#pragma unroll
                for (int i = 0; i < 4; ++i) words[j][i] = pack_pair<T>(0.0f, 0.0f);
                continue;
            }
            rt_fl<16, 16> scores;
            zero(scores);
#pragma unroll
            for (int s = 0; s < K::keys / 16; ++s) {
                operand_b<T> b;
                key.load(b, 16 * j, 16 * s, 0);
                mma_operands(scores, queries[s], b);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int first = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
                const auto sums = arch::load_shared<float2>(gates.key.address_of(first));
                const float sum = i % 2 ? lower : upper;
                const int left = j == warp ? row + 8 * (i % 2) - first : 1;
                const float x = left >= 0 ? sum - sums.x : -INFINITY;
                const float y = left >= 1 ? sum - sums.y : -INFINITY;
                const float2 pair = scores.tiles[0][0].data[i];
                words[j][i] =
                    pack_pair<T>(pair.x * arch::exp2_approx(x), pair.y * arch::exp2_approx(y));
            }
        }
        store_pairs<CHUNK_BLOCKS>(shared.weights, 16 * warp,
                                  [&](int j, int i) { return words[j][i]; });
    }

    // e^c S q^T, in units of one.
    __device__ __forceinline__ void start_out(outputs& out, const typename K::State& state,
                                              const PortableGates& gates) const {
        const float unit = operand_unit<T>(state.sums);
        const b_walker<typename K::key_tile> query(shared.q, 0, 0);
        zero(out);
#pragma unroll
        for (int s = 0; s < K::keys / 16; ++s) {
            operand_a<T> a;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = state.sums.tiles[0][s].data[i];
                a.words[i] = std::is_same_v<T, bf16> ? pack_word<T>(pair)
                                                     : pack_word<T>({unit * pair.x, unit * pair.y});
            }
#pragma unroll
            for (int n = 0; n < CHUNK_BLOCKS; ++n) {
                operand_b<T> b;
                query.load(b, 16 * n, 16 * s, 0);
                mma_operands(block_of(out, n), a, b);
            }
        }
        const auto exponent = float(int(arch::bit_cast<uint32_t>(unit) >> 23) - 127);
#pragma unroll
        for (int n = 0; n < CHUNK_BLOCKS; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 sum = arch::load_shared<float2>(
                    gates.sum.address_of(16 * n + 8 * half + 2 * (laneid() % 4)));
                const float2 before = {arch::exp2_approx(sum.x - exponent),
                                       arch::exp2_approx(sum.y - exponent)};
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    float2& pair = out.tiles[0][n].data[i];
                    pair = {before.x * pair.x, before.y * pair.y};
                }
            }
        }
    }

    // The values of this warp, transposed.
    __device__ __forceinline__ void load_values(operand_a<T> (&values)[CHUNK_BLOCKS]) const {
        const a_walker_of_columns<typename K::value_tile> walker(shared.v, 0, 16 * own_warp());
#pragma unroll
        for (int j = 0; j < CHUNK_BLOCKS; ++j) walker.load(values[j], 16 * j, 0, 0);
    }
    // Adds v^T P^T, and makes it the output before the gate.
    __device__ __forceinline__ void finish_out(outputs& out,
                                               const operand_a<T> (&values)[CHUNK_BLOCKS],
                                               float2 skip) const {
        const b_walker<typename K::weight_tile> weights(shared.weights, 0, 0);
#pragma unroll
        for (int n = 0; n < CHUNK_BLOCKS; ++n) {
#pragma unroll
            for (int j = 0; j <= n; ++j) {
                operand_b<T> b;
                weights.load(b, 16 * n, 16 * j, 0);
                mma_operands(block_of(out, n), values[j], b);
            }
        }
#pragma unroll
        for (int n = 0; n < CHUNK_BLOCKS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2& pair = out.tiles[0][n].data[i];
                pair = {g.scale * pair.x, g.scale * pair.y};
                if (g.skip.data == nullptr) continue;
                const float2 v = unpack_word<T>(values[n].words[i]);
                const float factor = i % 2 ? skip.y : skip.x;
                pair = {fmaf(factor, v.x, pair.x), fmaf(factor, v.y, pair.y)};
            }
        }
    }
    // Adds a chunk's tokens.
    __device__ __forceinline__ void grow(typename K::State& state,
                                         operand_a<T> (&values)[CHUNK_BLOCKS],
                                         const PortableGates& gates) const {
        const float last = gates.sum.get(CHUNK - 1);
        const b_walker_of_rows<typename K::key_tile> keys(shared.k, 0, 0);
        state.scale(arch::exp2_approx(last));
#pragma unroll
        for (int j = 0; j < CHUNK_BLOCKS; ++j) {
            scale_columns(values[j], [&](int token) -> float2 {
                const float2 key = arch::load_shared<float2>(gates.key.address_of(16 * j + token));
                return {arch::exp2_approx(last - key.x), arch::exp2_approx(last - key.y)};
            });
            add_tokens(state.sums, values[j], keys, j);
        }
    }

    // Where a lane has eight values of a token of a block of 16; whether they exist.
    __device__ __forceinline__ bool place(int chunk, int block, int& row, int& column) const {
        row = chunk * CHUNK + 16 * block + token_of_lane();
        column = slice.column + 16 * own_warp() + value_of_lane();
        return row < work.sequence.length && column < g.value_dim;
    }
    __device__ __forceinline__ void load_gate(uint4 (&z)[CHUNK_BLOCKS], int chunk) const {
#pragma unroll
        for (int n = 0; n < CHUNK_BLOCKS; ++n) {
            int row, column;
            z[n] = uint4{};
            if (g.z.data == nullptr || !place(chunk, n, row, column)) continue;
            z[n] = arch::load_global(reinterpret_cast<const uint4*>(
                address_in<T>(g.z, work.sequence, slice.head, row, column)));
        }
    }
    __device__ __forceinline__ void store_out(const outputs& out, const uint4 (&z)[CHUNK_BLOCKS],
                                              int chunk) const {
#pragma unroll
        for (int n = 0; n < CHUNK_BLOCKS; ++n) {
            uint32_t words[4];
            const auto& pairs = out.tiles[0][n].data;
            if (g.z.data != nullptr) {
                uint32_t gate[4] = {z[n].x, z[n].y, z[n].z, z[n].w};
                attention::transpose_quad(gate);
                transpose_matrices(gate);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 x = unpack_word<T>(gate[i]);
                    words[i] = pack_word<T>({pairs[i].x * silu(x.x), pairs[i].y * silu(x.y)});
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) words[i] = pack_word<T>(pairs[i]);
            }
            transpose_matrices(words);
            attention::transpose_quad(words);
            int row, column;
            if (!place(chunk, n, row, column)) continue;
            arch::store_global(reinterpret_cast<uint4*>(
                                   address_in<T>(g.out, work.sequence, slice.head, row, column)),
                               make_uint4(words[0], words[1], words[2], words[3]));
        }
    }

    // What the segment adds to the state, from nothing.
    __device__ __forceinline__ void sum_segment(typename K::State& state, float* to) {
        const GateReader<T> reader(g.gates, work.sequence, slice.head);
        float log_decay = 0.0f;
        if (work.chunks() > 0) load_keys(work.begin);
        uint2 raw = reader.read(work.begin);
#pragma unroll 1
        for (int chunk = work.begin; chunk < work.end; ++chunk) {
            const PortableGates& gates = shared.gates[0];
            if (own_warp() == 0) reader.store(shared.gates[0], chunk, raw);
            if (chunk + 1 < work.end) raw = reader.read(chunk + 1);
            arch::cp_async_wait<0>();
            arch::sync_block();
            log_decay += gates.sum.get(CHUNK - 1);
            operand_a<T> values[CHUNK_BLOCKS];
            load_values(values);
            grow(state, values, gates);
            arch::sync_block();
            if (chunk + 1 < work.end) load_keys(chunk + 1);
        }
        state.store_segment(to, log_decay);
    }

    __device__ __forceinline__ void run(typename K::State& state) {
        const GateReader<T> reader(g.gates, work.sequence, slice.head);
        const bool makes_gates = own_warp() == 0;  // it has the fewest scores
        const int value = slice.column + 16 * own_warp() + laneid() / 4;
        const auto skip_of = [&](int column) {
            return column < g.value_dim ? element<T>(g.skip, slice.head, column, 0.0f) : 0.0f;
        };
        const float2 skip = {skip_of(value), skip_of(value + 8)};
        uint2 raw = reader.read(work.begin);
        if (makes_gates && work.chunks() > 0) {
            reader.store(shared.gates[work.begin % 2], work.begin, raw);
            raw = reader.read(work.begin + 1);
        }
#pragma unroll 1
        for (int chunk = work.begin; chunk < work.end; ++chunk) {
            const bool more = chunk + 1 < work.end;
            const PortableGates& gates = shared.gates[chunk % 2];
            arch::cp_async_wait<0>();
            arch::sync_block();  // the chunk and its gates are there
            make_weights(gates);
            if (makes_gates && more) {
                reader.store(shared.gates[(chunk + 1) % 2], chunk + 1, raw);
                raw = reader.read(chunk + 2);
            }
            outputs out;
            start_out(out, state, gates);
            arch::sync_block();  // the weights are there, and all are done with the queries
            if (more) load_queries(chunk + 1);
            operand_a<T> values[CHUNK_BLOCKS];
            load_values(values);
            finish_out(out, values, skip);
            uint4 z[CHUNK_BLOCKS];
            load_gate(z, chunk);
            grow(state, values, gates);
            arch::sync_block();  // all are done with keys, values and weights
            if (more) load_keys(chunk + 1);
            store_out(out, z, chunk);
        }
    }

    // Tokens of no sequence, before the first or behind the last.
    __device__ __forceinline__ void clear_rows(int begin, int end) const {
        constexpr int lanes = VALUES / 8;
        const int thread = int(threadIdx.x), column = slice.column + 8 * (thread % lanes);
        if (column >= g.value_dim) return;
        T* to = address_in<T>(g.out, {0, 0, 0, 0}, slice.head, 0, column);
        for (int row = begin + thread / lanes; row < end; row += PORTABLE_THREADS / lanes)
            arch::store_global(reinterpret_cast<uint4*>(to + row * g.out.row_stride), uint4{});
    }
    __device__ __forceinline__ void clear_others() const {
        if (g.tiles.cu_seqlens == nullptr || work.segment > 0) return;
        const Sequence& s = work.sequence;
        const int last = int(gridDim.x) / (g.tiles.bundles * g.tiles.segments) / g.tiles.groups - 1;
        if (s.index == 0) clear_rows(0, s.begin);
        if (s.index == last) clear_rows(s.begin + s.length, g.tiles.length);
    }
};

template <class K>
__global__
__launch_bounds__(PORTABLE_THREADS, K::blocks_per_sm) void recurrent_portable_forward_kernel(
    const __grid_constant__ PortableGlobals g) {
    auto& shared = *reinterpret_cast<PortableShared<K>*>(shared_memory());
    PortableBlock<K> own(g, shared);
    const WorkTile& work = own.work;
    typename K::State state;
    constexpr int64_t floats = SEGMENT_STATE_FLOATS<K::keys>;
    float* states =
        g.segment_states + (work.sequence.index * g.tiles.all_slices() + own.slice.index) *
                               (g.tiles.segments - 1) * floats;
    if (g.states_only) {
        state.for_each_pair([](float2& pair, int, int) { pair = {0.0f, 0.0f}; });
        own.sum_segment(state, states + work.segment * floats);
        return;
    }
    if (work.chunks() > 0) {
        own.load_queries(work.begin);
        own.load_keys(work.begin);
    }
    state.load(g.initial, work.sequence.index, own.slice.head, own.slice.column, g.value_dim,
               g.key_dim);
    if (work.segment > 0) state.add_segments(states, work.segment);
    own.run(state);
    if (work.segment == g.tiles.segments - 1) {
        // What follows from it was made for the initial state, and would be kept all the while.
        auto sequence = uint32_t(work.sequence.index);
        arch::pin_register(sequence);
        state.store(g.final, int(sequence), own.slice.head, own.slice.column, g.value_dim,
                    g.key_dim);
    }
    own.clear_others();
}

}  // namespace sm80

template <DType dtype, int keys>
void launch_portable_recurrent(const RecurrentParams& params, int segments, float* workspace,
                               bool states_only, Stream stream) {
    using K = sm80::PortableTypes<type_of<dtype>, keys>;
    static_assert(sizeof(sm80::PortableShared<K>) <= portable_shared_bytes_of(keys));
    const RecurrentProblem& p = params.problem;
    const sm80::PortableGlobals globals{.q = params.q,
                                        .k = params.k,
                                        .v = params.v,
                                        .z = p.gate ? params.z : Operand{},
                                        .out = params.out,
                                        .gates = params.gates,
                                        .skip = params.skip,
                                        .scale = params.scale,
                                        .tiles = WorkTiles(p, params.cu_seqlens, segments, 1),
                                        .initial = params.initial,
                                        .final = params.final,
                                        .segment_states = workspace,
                                        .states_only = states_only,
                                        .key_dim = int(p.key_dim),
                                        .value_dim = int(p.value_dim)};
    RecurrentConfig cut{.warpgroups = 1, .segments = states_only ? segments - 1 : segments};
    kittens::launch({.blocks_per_sm = K::blocks_per_sm}, sm80::recurrent_portable_forward_kernel<K>,
                    dim3(unsigned(blocks_of(p, cut))), dim3(sm80::PORTABLE_THREADS), dim3(1),
                    portable_shared_bytes_of(keys), stream, globals);
}

}  // namespace thunderkittens::recurrent
