// Linear attention with a decay per head and token, for Hopper: the kernel of tk.ssd and
// tk.linear_attention. A block walks over the chunks of 64 tokens of a segment of a sequence, for a
// few slices of 64 columns of the values that share a head of q and k (a group). Its warps:
//   producers     one warp brings q, k and the values by TMA; one for each slice makes of dt or g
//                 the cumulative decays and the weights of a chunk's tokens; a chunk or more ahead
//   warpgroups    one for each slice, with the state S (64 values, keys) in fp32 registers
// A warpgroup's chunk, where c are the sums of log decays within it:
//   within the chunk   P = (q k^T) o e^(c_i - c_j) w_j, masked, then P v
//   before the chunk   e^(c_i) q S^T, whose operand is a copy of S in shared memory, in 16 bits
//   the state          S = e^(c_last) S + (v w e^(c_last - c))^T k; v comes by transposing loads
// No product depends on the one before, but for the state, to which each chunk adds: the products
// of several warpgroups fill the tensor cores. Where there are too few blocks for the GPU, the
// sequences are cut into segments. Then the same kernel runs twice: it first makes what each
// segment adds to the state, and a block of the second run begins with the sum of those before it.
#pragma once

#include "csrc/recurrent/common/running_state.cuh"

namespace thunderkittens::recurrent {

template <class T, int _keys, int _warpgroups>
struct RecurrentTypes {
    using element = T;
    static constexpr int keys = _keys, warpgroups = _warpgroups;
    static constexpr int stages = stages_of(keys, warpgroups);
    static constexpr int threads = (warpgroups + 1) * WARPGROUP_THREADS;
    // Of a thread of a warpgroup with a state, and of a producer: as many together as the launch
    // bounds give to a block.
    static constexpr int consumer_registers = warpgroups == 1 ? 208 : warpgroups == 2 ? 216 : 152;
    static constexpr int producer_registers = warpgroups == 1 ? 48 : warpgroups == 2 ? 72 : 56;
    static constexpr int bytes = shared_bytes_of(keys, warpgroups);
    using key_tile = st<T, CHUNK, keys>;
    using value_tile = st<T, CHUNK, VALUES>;
    using key_layout = TokenLayout<T, key_tile>;
    using value_layout = TokenLayout<T, value_tile>;
    using State = RunningState<T, keys>;
};

template <class K>
struct RecurrentGlobals {
    typename K::key_layout q, k;
    typename K::value_layout v, z, out;
    GateOperands gates;
    HeadOperand skip;
    float scale;
    WorkTiles tiles;
    StateOperand initial, final;
    float* segment_states;  // null: there is one segment
    bool states_only, has_gate;
    int key_dim, value_dim;
    typename K::element* out_data;
    int64_t out_head_stride, out_row_stride;

    __device__ __forceinline__ WorkTile work_tile() const {
        return tiles.tile(states_only ? tiles.segments - 1 : tiles.segments);
    }
};

template <class K>
struct RecurrentShared {
    struct Stage {
        typename K::key_tile q, k;
        typename K::value_tile v[K::warpgroups];
    } stage[K::stages];
    typename K::State::tile state[K::warpgroups];
    typename K::value_tile out[K::warpgroups];  // before, z
    ChunkGates gates[K::stages][K::warpgroups];
    sv<float, 8> scratch[K::warpgroups];
    sv<float, VALUES> skip[K::warpgroups];
    semaphore full[K::stages], empty[K::stages], z_full[K::warpgroups];
};

// One thread, which brings the operands.
template <class K>
__device__ __forceinline__ void produce_operands(const RecurrentGlobals<K>& g,
                                                 RecurrentShared<K>& shared, const WorkTile& work,
                                                 int active) {
    const auto tile = uint32_t(tma::transfer_bytes<typename K::key_tile>());
    const auto values = uint32_t(tma::transfer_bytes<typename K::value_tile>());
    const uint32_t bytes = (g.states_only ? 1 : 2) * tile + uint32_t(active) * values;
    pipeline_state<K::stages> at;
#pragma unroll 1
    for (int chunk = work.begin; chunk < work.end; ++chunk) {
        wait(shared.empty[at.stage], at.phase ^ 1);
        auto& stage = shared.stage[at.stage];
        semaphore& full = shared.full[at.stage];
        const int row = chunk * CHUNK;
        tma::expect_bytes(full, bytes);
        g.k.load(stage.k, work.sequence, work.group, row, 0, full);
        if (!g.states_only) g.q.load(stage.q, work.sequence, work.group, row, 0, full);
#pragma unroll 1
        for (int w = 0; w < active; ++w) {
            const Slice slice(g.tiles, work, w);
            g.v.load(stage.v[w], work.sequence, slice.head, row, slice.column, full);
        }
        at.advance();
    }
}

// One warp, which makes the gates of a slice. A lane has two neighbouring tokens of a chunk; what
// they are given is read a chunk ahead.
template <class K>
__device__ __forceinline__ void produce_gates(const RecurrentGlobals<K>& g,
                                              RecurrentShared<K>& shared, const WorkTile& work,
                                              int index) {
    using T = typename K::element;
    const Sequence& sequence = work.sequence;
    const int head = Slice(g.tiles, work, index).head;
    const HeadGates own = head_gates<T>(g.gates, head);
    const TokenOperand& given = g.gates.dt.data != nullptr ? g.gates.dt : g.gates.g;
    const auto read = [&](int chunk) -> uint2 {
        uint2 raw = {0, 0};
        if (given.data == nullptr) return raw;
        const int row = chunk * CHUNK + 2 * laneid();
        const int64_t first = sequence.begin + row;
        if (row < sequence.length) raw.x = element_bits(given, sequence.b, head, first);
        if (row + 1 < sequence.length) raw.y = element_bits(given, sequence.b, head, first + 1);
        return raw;
    };
    pipeline_state<K::stages> at;
    uint2 raw = work.chunks() > 0 ? read(work.begin) : uint2{0, 0};
#pragma unroll 1
    for (int chunk = work.begin; chunk < work.end; ++chunk) {
        // Tokens behind the end decay nothing and weigh nothing.
        const int left = sequence.length - chunk * CHUNK - 2 * laneid();
        TokenGate first, second;
        const auto value = [&](uint32_t bits) { return element_of_bits<T>(given.dtype, bits); };
        if (left > 0) first = token_gate(g.gates, own, value(raw.x));
        if (left > 1) second = token_gate(g.gates, own, value(raw.y));
        if (chunk + 1 < work.end) raw = read(chunk + 1);
        wait(shared.empty[at.stage], at.phase ^ 1);
        store_gates(shared.gates[at.stage][index], first, second);
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.full[at.stage]);
        at.advance();
    }
}

template <class K>
struct RecurrentWarpgroup {
    using T = typename K::element;
    using Shared = RecurrentShared<K>;
    using operand = rt<T, 16, CHUNK>;
    const RecurrentGlobals<K>& g;
    Shared& shared;
    const WorkTile& work;
    int index;
    Slice slice;

    __device__ __forceinline__ RecurrentWarpgroup(const RecurrentGlobals<K>& _g, Shared& _shared,
                                                  const WorkTile& _work, int _index)
        : g(_g), shared(_shared), work(_work), index(_index), slice(_g.tiles, _work, _index) {}

    // Seen by all after the next barrier.
    __device__ __forceinline__ void load_skip() const {
        const int lane = warpgroup::laneid(), column = slice.column + lane;
        if (lane >= VALUES) return;
        const float x = column < g.value_dim ? element<T>(g.skip, slice.head, column, 0.0f) : 0.0f;
        shared.skip[index].set(lane, x);
    }
    __device__ __forceinline__ void sync() const { warpgroup::sync(1 + index); }

    // Factors of the scores, which become an operand: tokens after a query get zero.
    static __device__ __forceinline__ void weigh(operand& weights, rt_fl<16, CHUNK>& scores,
                                                 const ChunkGates& gates) {
        const int band = arch::warp_uniform(warpgroup::warpid());
        const int row = 16 * band + laneid() / 4, column = 2 * (laneid() % 4);
        const float upper = gates.sum.get(row), lower = gates.sum.get(row + 8);
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            auto& block = scores.tiles[0][j].data;
            auto& to = weights.tiles[0][j].data;
            if (j > band) {
#pragma unroll
                for (int i = 0; i < 4; ++i) to[i] = pack_pair<T>(0.0f, 0.0f);
                continue;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = 16 * j + 8 * half + column;
                const auto key = arch::load_shared<float2>(gates.key.address_of(first));
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    const float sum = i % 2 ? lower : upper;
                    const int left = j == band ? row + 8 * (i % 2) - first : 1;
                    const float x = left >= 0 ? sum - key.x : -INFINITY;
                    const float y = left >= 1 ? sum - key.y : -INFINITY;
                    to[i] = pack_pair<T>(block[i].x * arch::exp2_approx(x),
                                         block[i].y * arch::exp2_approx(y));
                }
            }
        }
    }
    // The values, transposed, times what they leave behind the chunk.
    static __device__ __forceinline__ void load_values(operand& values,
                                                       const typename K::value_tile& tile,
                                                       const ChunkGates& gates) {
        using columns = typename rt<T, 16, 16, col_l>::base;
        const int first = 16 * warpgroup::warpid(), token = 2 * (laneid() % 4);
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            auto& data = values.tiles[0][j].data;
            uint32_t(&words)[4] = reinterpret_cast<uint32_t(&)[4]>(data);
            arch::load_matrix_x4_transposed(
                words[0], words[1], words[2], words[3],
                kittens::detail::matrix_row_address<columns>(tile, 16 * j, first));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto weight =
                    arch::load_shared<float2>(gates.after.address_of(16 * j + 8 * i + token));
#pragma unroll
                for (int n = 2 * i; n < 2 * i + 2; ++n) {
                    const float2 pair = unpack_pair<T>(data[n]);
                    data[n] = pack_pair<T>(pair.x * weight.x, pair.y * weight.y);
                }
            }
        }
    }

    // scale out + skip v, gated, into the tile of the output.
    __device__ __forceinline__ void store_out(const rt_fl<16, CHUNK>& out,
                                              const typename K::value_tile& values) const {
        typename K::value_tile& tile = shared.out[index];
        const sv<float, VALUES>& skip = shared.skip[index];
        using rows = typename rt<T, 16, 16>::base;
#pragma unroll
        for (int j = 0; j < VALUES / 16; ++j) {
            float2 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = out.tiles[0][j].data[i];
                pairs[i] = {g.scale * pair.x, g.scale * pair.y};
            }
            const uint32_t place =
                kittens::detail::matrix_row_address<rows>(tile, 16 * warpgroup::warpid(), 16 * j);
            if (g.skip.data != nullptr) {
                packed_type<T> x[4];
                auto& words = reinterpret_cast<uint32_t(&)[4]>(x);
                arch::load_matrix_x4(words[0], words[1], words[2], words[3],
                                     kittens::detail::matrix_row_address<rows>(
                                         values, 16 * warpgroup::warpid(), 16 * j));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int column = 16 * j + 8 * (i / 2) + 2 * (laneid() % 4);
                    const auto factor = arch::load_shared<float2>(skip.address_of(column));
                    const float2 pair = unpack_pair<T>(x[i]);
                    pairs[i].x = fmaf(factor.x, pair.x, pairs[i].x);
                    pairs[i].y = fmaf(factor.y, pair.y, pairs[i].y);
                }
            }
            if (g.has_gate) {
                packed_type<T> z[4];
                auto& words = reinterpret_cast<uint32_t(&)[4]>(z);
                arch::load_matrix_x4(words[0], words[1], words[2], words[3], place);
                arch::sync_warp();
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 pair = unpack_pair<T>(z[i]);
                    pairs[i] = {pairs[i].x * silu(pair.x), pairs[i].y * silu(pair.y)};
                }
            }
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = arch::bit_cast<uint32_t>(pack_pair<T>(pairs[i].x, pairs[i].y));
            arch::store_matrix_x4(place, words[0], words[1], words[2], words[3]);
        }
    }

    // What the segment adds to the state, from nothing.
    __device__ __forceinline__ void sum_segment(typename K::State& state, float* to) {
        float log_decay = 0.0f;
        pipeline_state<K::stages> at;
#pragma unroll 1
        for (int chunk = work.begin; chunk < work.end; ++chunk) {
            auto& stage = shared.stage[at.stage];
            const ChunkGates& gates = shared.gates[at.stage][index];
            wait(shared.full[at.stage], at.phase);
            operand values;
            load_values(values, stage.v[index], gates);
            const auto total = arch::load_shared<float2>(gates.total.address());
            log_decay += total.x;
            state.scale(total.y);
            warpgroup::mma_AB(state.sums, values, stage.k);
            warpgroup::mma_async_wait<0>(state.sums);
            release(at.stage);
            at.advance();
        }
        state.store_segment(to, log_decay);
    }
    // By each warp, which has read the stage for itself.
    __device__ __forceinline__ void release(int stage) const {
        arch::sync_warp();
        if (laneid() == 0) arrive(shared.empty[stage]);
    }

    __device__ __forceinline__ void run(typename K::State& state) {
        const bool first_thread = warpgroup::laneid() == 0;
        load_skip();
        float unit = state.operand_scale(shared.scratch[index], 1 + index);
        state.store_operand(shared.state[index], unit);
        arch::fence_async_shared();
        sync();
        pipeline_state<K::stages> at;
        int z_phase = 0;
#pragma unroll 1
        for (int chunk = work.begin; chunk < work.end; ++chunk) {
            auto& shared = rematerialized(this->shared);
            auto& stage = shared.stage[at.stage];
            auto& operand_tile = shared.state[index];
            const ChunkGates& gates = shared.gates[at.stage][index];
            const int row = chunk * CHUNK;
            wait(shared.full[at.stage], at.phase);
            rt_fl<16, CHUNK> scores, out;
            discard(scores, out);
            warpgroup::mm_ABt(scores, stage.q, stage.k);
            warpgroup::mm_ABt(out, stage.q, operand_tile);
            if (first_thread) {
                tma::store_async_read_wait();
                if (g.has_gate) {
                    tma::expect(shared.z_full[index], shared.out[index]);
                    g.z.load(shared.out[index], work.sequence, slice.head, row, slice.column,
                             shared.z_full[index]);
                }
            }
            warpgroup::mma_async_wait<1>(scores);
            operand weights;
            weigh(weights, scores, gates);
            warpgroup::mma_async_wait<0>(out);
            scale_before(out, gates, 1.0f / unit);
            warpgroup::mma_AB(out, weights, stage.v[index]);
            operand values;
            load_values(values, stage.v[index], gates);
            state.scale(gates.total.get(1));
            warpgroup::mma_AB(state.sums, values, stage.k);
            warpgroup::mma_async_wait<1>(out);
            sync();  // all are done with the state's copy, and the output's tile is free
            if (g.has_gate) wait(shared.z_full[index], z_phase);
            store_out(out, stage.v[index]);
            warpgroup::mma_async_wait<0>(state.sums);
            release(at.stage);
            unit = state.operand_scale(shared.scratch[index], 1 + index);
            state.store_operand(operand_tile, unit);
            arch::fence_async_shared();
            sync();
            if (first_thread) {
                g.out.store(shared.out[index], work.sequence, slice.head, row, slice.column);
            }
            z_phase ^= 1;
            at.advance();
        }
        if (first_thread) tma::store_async_wait();
    }
    static __device__ __forceinline__ void scale_before(rt_fl<16, CHUNK>& out,
                                                        const ChunkGates& gates, float unit) {
        const int row = 16 * warpgroup::warpid() + laneid() / 4;
        const float upper = unit * gates.before.get(row), lower = unit * gates.before.get(row + 8);
#pragma unroll
        for (int j = 0; j < VALUES / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float factor = i % 2 ? lower : upper;
                float2& pair = out.tiles[0][j].data[i];
                pair = {factor * pair.x, factor * pair.y};
            }
        }
    }

    // Tokens of no sequence, before the first or behind the last.
    __device__ __forceinline__ void clear_rows(int begin, int end) const {
        constexpr int lanes = VALUES / 8;
        const int column = slice.column + 8 * (warpgroup::laneid() % lanes);
        if (column >= g.value_dim) return;
        typename K::element* to = g.out_data + slice.head * g.out_head_stride + column;
        for (int row = begin + warpgroup::laneid() / lanes; row < end;
             row += WARPGROUP_THREADS / lanes)
            arch::store_global(reinterpret_cast<uint4*>(to + row * g.out_row_stride), uint4{});
    }
    __device__ __forceinline__ void clear_others() const {
        if (g.tiles.cu_seqlens == nullptr || work.segment > 0) return;
        const Sequence& s = work.sequence;
        const int last =
            static_cast<int>(gridDim.x) / (g.tiles.bundles * g.tiles.segments) / g.tiles.groups - 1;
        if (s.index == 0) clear_rows(0, s.begin);
        if (s.index == last) clear_rows(s.begin + s.length, g.tiles.length);
    }
};

template <class K>
__device__ __forceinline__ void run_producers(const RecurrentGlobals<K>& g,
                                              RecurrentShared<K>& shared) {
    const WorkTile work = g.work_tile();
    const int active = g.tiles.active(work), warp = arch::warp_uniform(warpgroup::warpid());
    if (warp == 0) {
        if (laneid() == 0) produce_operands(g, shared, work, active);
    } else if (warp <= active) {
        produce_gates(g, shared, work, warp - 1);
    }
}

template <class K>
__device__ __forceinline__ void run_warpgroup(const RecurrentGlobals<K>& g,
                                              RecurrentShared<K>& shared, int index) {
    const WorkTile work = g.work_tile();
    if (index >= g.tiles.active(work)) return;
    RecurrentWarpgroup<K> own(g, shared, work, index);
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
    state.load(g.initial, work.sequence.index, own.slice.head, own.slice.column, g.value_dim,
               g.key_dim);
    if (work.segment > 0) state.add_segments(states, work.segment);
    own.run(state);
    if (work.segment == g.tiles.segments - 1) {
        state.store(g.final, work.sequence.index, own.slice.head, own.slice.column, g.value_dim,
                    g.key_dim);
    }
    own.clear_others();
}

template <class K>
__global__ __launch_bounds__(K::threads, blocks_per_sm(K::warpgroups)) void recurrent_kernel(
    const __grid_constant__ RecurrentGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<RecurrentShared<K>>();
    arch::wait_for_dependencies();
    if (threadIdx.x == 0) {
        const int active = g.tiles.active(g.work_tile());
        for (int s = 0; s < K::stages; ++s) {
            init_semaphore(shared.full[s], 1 + active);
            init_semaphore(shared.empty[s], WARPGROUP_WARPS * active);
        }
        for (int w = 0; w < K::warpgroups; ++w) init_semaphore(shared.z_full[w], 1);
        arch::mbarrier_init_fence();
    }
    arch::sync_block();
    // The roles find their work themselves: kept from here on, it would take registers that
    // producers do not have.
    const int index = arch::warp_uniform(warpid() / WARPGROUP_WARPS);
    if (index == K::warpgroups) {
        arch::decrease_registers<K::producer_registers>();
        run_producers(g, shared);
    } else {
        arch::increase_registers<K::consumer_registers>();
        run_warpgroup(g, shared, index);
    }
}

template <RecurrentConfig config>
void launch_recurrent(const RecurrentParams& params, int segments, float* workspace,
                      bool states_only, Stream stream) {
    using T = type_of<config.dtype>;
    using K = RecurrentTypes<T, config.keys, config.warpgroups>;
    static_assert(sizeof(RecurrentShared<K>) + 1024 <= K::bytes);
    const RecurrentProblem& p = params.problem;
    const bool packed = params.cu_seqlens != nullptr;
    const auto keys = [&](const Operand& x) {
        return typename K::key_layout(x, p.batch, p.groups, p.length, p.key_dim, packed);
    };
    const auto values = [&](const Operand& x) {
        return typename K::value_layout(x, p.batch, p.heads, p.length, p.value_dim, packed);
    };
    const RecurrentGlobals<K> globals{
        .q = keys(params.q),
        .k = keys(params.k),
        .v = values(params.v),
        .z = values(p.gate ? params.z : params.v),
        .out = values(params.out),
        .gates = params.gates,
        .skip = params.skip,
        .scale = params.scale,
        .tiles = WorkTiles(p, params.cu_seqlens, segments, config.warpgroups),
        .initial = params.initial,
        .final = params.final,
        .segment_states = workspace,
        .states_only = states_only,
        .has_gate = p.gate,
        .key_dim = int(p.key_dim),
        .value_dim = int(p.value_dim),
        .out_data = static_cast<T*>(const_cast<void*>(params.out.data)),
        .out_head_stride = params.out.head_stride,
        .out_row_stride = params.out.row_stride};
    RecurrentConfig cut = config;
    cut.segments = states_only ? segments - 1 : segments;
    const LaunchOptions options{.dependent = segments > 1 && !states_only,
                                .blocks_per_sm = blocks_per_sm(config.warpgroups)};
    kittens::launch(options, recurrent_kernel<K>, dim3(unsigned(blocks_of(p, cut))),
                    dim3(K::threads), dim3(1), K::bytes, stream, globals);
}

}  // namespace thunderkittens::recurrent
