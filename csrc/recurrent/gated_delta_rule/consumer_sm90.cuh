// A consumer of chunks: a warpgroup with 64 columns of the state of a value head, and the chain of
// their products, K S, T R, K^T U, and the outputs. The state is an accumulator in registers,
// transposed, 64 columns of values x K: as an operand of the next product it stays in the registers
// of the lanes that have it, and so do R and U. Nothing of the chain goes through shared memory or
// to other warps.
#pragma once

#include "csrc/recurrent/gated_delta_rule/types_sm90.cuh"

namespace thunderkittens::recurrent::delta {

constexpr int PREPARE_BARRIER = 1, CONSUME_BARRIER = 3;  // and that of the next warpgroup

template <class K>
class Consumer {
  public:
    using T = typename K::T;

    __device__ __forceinline__ Consumer(const DeltaGlobals<K>& _g, DeltaShared<K>& _shared,
                                        const DeltaWork<K>& _work, int _id)
        : g(_g),
          shared(_shared),
          work(_work),
          id(_id),
          first_column(_work.first_column + _id * VALUES) {}

    // No product is in flight where the loop begins again: ptxas would wait for all of them there.
    __device__ __forceinline__ void run() {
        const int chunks = work.sequence.chunks();
        if (warpgroup::laneid() == 0 && !work.transition) {
            for (int i = 0; i < K::value_slots && i < chunks; ++i) load_values(i);
        }
        load_state();
        if constexpr (K::summary)
            summarise(chunks);
        else if constexpr (K::spacious)
            overlap_outputs(chunks);
        else
            run_in_turn(chunks);
        store_state();
        if (warpgroup::laneid() == 0) tma::store_async_wait();
        if (g.cu_seqlens != nullptr && !K::summary && work.n == g.sequences - 1 &&
            work.segment == g.segments - 1)
            clear_rest();
    }

  private:
    // The outputs of a chunk are made and leave while the next one's K S is computed.
    __device__ __forceinline__ void overlap_outputs(int chunks) {
        if (chunks == 0) return;
        rt_fl<16, CHUNK> added, out;
        rt<T, 16, CHUNK> plain;  // U as an operand, until the product with P is done
        read_state<true>(0, added, out);
#pragma unroll 1
        for (int i = 1; i < chunks; ++i) {
            write_state(i - 1, added, plain, out);
            read_state<false>(i, added, out);
            load_next_values(i - 1 + K::value_slots, chunks);
        }
        write_state(chunks - 1, added, plain, out);
        warpgroup::mma_async_wait<0>(out);
        store_out(chunks - 1, out);
    }
    // The state alone.
    __device__ __forceinline__ void summarise(int chunks) {
#pragma unroll 1
        for (int i = 0; i < chunks; ++i) {
            auto& all = rematerialized(shared);
            auto& stage = all.stages[i % K::stages];
            auto& prepared = all.prepared[i % K::slots];
            rt_fl<16, CHUNK> added;
            rt<T, 16, K::key_dim> before;
            rt<T, 16, CHUNK> rest;
            to_operand(before, state);
            discard(added);
            wait(all.loaded[i % K::stages], i / K::stages % 2);
            warpgroup::mm_ABt(added, before, stage.k);
            wait(all.full[i % K::slots], i / K::slots % 2);
            warpgroup::mma_async_wait<0>(added);
            decay_state(prepared.factors.get(OF_STATE * CHUNK));
            load_rest(rest, i);
            subtract(rest, added, prepared.factors);
            discard(added);
            warpgroup::mm_ABt(added, rest, prepared.t);
            warpgroup::mma_async_wait<0>(added);
            if (!work.transition) {
                sync();
                const int next = i + K::value_slots;
                if (warpgroup::laneid() == 0 && next < chunks) load_values(next);
            }
            scale_columns(added, prepared.factors, OF_NEW);
            to_operand(rest, added);
            warpgroup::mma_AB(state, rest, stage.k);
            warpgroup::mma_async_wait<0>(state);
            signal_by_warp(all.empty[i % K::slots]);
        }
    }
    __device__ __forceinline__ void decay_state(float decay) {
        for_each_pair(state, [&](float2& x, int, int) { x = {x.x * decay, x.y * decay}; });
    }
    // The values of a chunk, transposed; those of a transition are zeros.
    __device__ __forceinline__ void load_rest(rt<T, 16, CHUNK>& rest, int i) const {
        if (work.transition) {
#pragma unroll
            for (int j = 0; j < CHUNK / 16; ++j) {
#pragma unroll
                for (int r = 0; r < 4; ++r) rest.tiles[0][j].data[r] = pack_pair<T>(0.0f, 0.0f);
            }
            return;
        }
        auto& all = rematerialized(shared);
        auto& values = all.values[id][i % K::value_slots];
        wait(all.values_loaded[id][i % K::value_slots], i / K::value_slots % 2);
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) load_transposed(rest, values, j);
    }
    __device__ __forceinline__ static void subtract(rt<T, 16, CHUNK>& rest,
                                                    const rt_fl<16, CHUNK>& x,
                                                    const typename K::factors& factors) {
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) subtract(rest, x, factors, j);
    }
    __device__ __forceinline__ static void subtract(rt<T, 16, CHUNK>& rest,
                                                    const rt_fl<16, CHUNK>& x,
                                                    const typename K::factors& factors, int j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int column = 16 * j + 8 * (r / 2) + 2 * (laneid() % 4);
            const auto factor =
                arch::load_shared<float2>(factors.address_of(OF_KEYS * CHUNK + column));
            const float2 v = unpack_pair<T>(rest.tiles[0][j].data[r]);
            const float2 seen = x.tiles[0][j].data[r];
            rest.tiles[0][j].data[r] =
                pack_pair<T>(fmaf(-factor.x, seen.x, v.x), fmaf(-factor.y, seen.y, v.y));
        }
    }
    // Of two consumers, each fills the other's waits.
    __device__ __forceinline__ void run_in_turn(int chunks) {
#pragma unroll 1
        for (int i = 0; i < chunks; ++i) {
            rt_fl<16, CHUNK> added, out;
            rt<T, 16, CHUNK> plain;
            read_state<true>(i, added, out);
            if (i > 0) load_next_values(i - 1 + K::value_slots, chunks);
            write_state(i, added, plain, out);
        }
    }

    // The part of chunk i before the state changes: U into `added`, Q S with its factors into
    // `out`. The outputs of the chunk before leave while K S is computed.
    template <bool first>
    __device__ __forceinline__ void read_state(int i, rt_fl<16, CHUNK>& added,
                                               rt_fl<16, CHUNK>& out) {
        auto& all = rematerialized(shared);
        auto& stage = all.stages[i % K::stages];
        auto& prepared = all.prepared[i % K::slots];
        wait(all.loaded[i % K::stages], i / K::stages % 2);
        rt<T, 16, K::key_dim> before;
        Part parts[2];
        if constexpr (K::spacious) {
            to_operand(before, state);
            discard(added);
            warpgroup::mm_ABt(added, before, stage.k);
            if constexpr (!first) {
                warpgroup::mma_async_wait<1>(out);
                signal_by_warp(all.empty[(i - 1) % K::slots]);
                store_out(i - 1, out);
            }
            discard(out);
            warpgroup::mm_ABt(out, before, stage.q);
        } else {
            multiply_in_parts(added, out, stage, parts);
        }
        if constexpr (first) {
            warpgroup::mma_async_wait<0>(added);
            warpgroup::mma_async_wait<0>(out);
        }

        wait(all.full[i % K::slots], i / K::slots % 2);
        decay_state(prepared.factors.get(OF_STATE * CHUNK));
        rt<T, 16, CHUNK> rest;
        auto& values = all.values[id][i % K::value_slots];
        wait(all.values_loaded[id][i % K::value_slots], i / K::value_slots % 2);
        // Where there are registers for all of them, before they are needed.
        constexpr bool early = K::spacious;
        if constexpr (early) {
#pragma unroll
            for (int j = 0; j < CHUNK / 16; ++j) load_transposed(rest, values, j);
        }
        warpgroup::mma_async_wait<1>(added);
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            if constexpr (!early) load_transposed(rest, values, j);
            subtract(rest, added, prepared.factors, j);
        }
        discard(added);
        warpgroup::mm_ABt(added, rest, prepared.t);
        warpgroup::mma_async_wait<1>(out);
        scale_columns(out, prepared.factors, OF_QUERIES);
        warpgroup::mma_async_wait<0>(added);
    }
    // K S and Q S, of so many keys of the state at a time that few registers have it as an operand.
    static constexpr int part_keys = 32;
    using Part = rt<T, 16, part_keys>;
    __device__ __forceinline__ void multiply_in_parts(rt_fl<16, CHUNK>& with_keys,
                                                      rt_fl<16, CHUNK>& with_queries,
                                                      typename DeltaShared<K>::Stage& stage,
                                                      Part (&before)[2]) {
        const auto round = [&](int part) {
#pragma unroll
            for (int j = 0; j < part_keys / 16; ++j) {
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const float2 pair = state.tiles[0][part * part_keys / 16 + j].data[r];
                    before[part % 2].tiles[0][j].data[r] = pack_pair<T>(pair.x, pair.y);
                }
            }
        };
        discard(with_keys);
        discard(with_queries);
        round(0);
        round(1);
#pragma unroll
        for (int part = 0; part < K::key_dim / part_keys; ++part) {
            if (part >= 2) {
                warpgroup::mma_async_wait<2>(state);
                round(part);
            }
            auto k = stage.k.template subtile<CHUNK, part_keys>({0, part});
            auto q = stage.q.template subtile<CHUNK, part_keys>({0, part});
            warpgroup::template product<false, true>(with_keys, before[part % 2], k, part > 0);
            warpgroup::template product<false, true>(with_queries, before[part % 2], q, part > 0);
        }
    }
    // The rest of chunk i: K^T U onto the state, P U onto `out`, which is in flight at the end.
    __device__ __forceinline__ void write_state(int i, rt_fl<16, CHUNK>& added,
                                                rt<T, 16, CHUNK>& plain, rt_fl<16, CHUNK>& out) {
        auto& all = rematerialized(shared);
        auto& prepared = all.prepared[i % K::slots];
        rt<T, 16, CHUNK> decayed;
        to_operand(plain, added);
        scale_columns(added, prepared.factors, OF_NEW);
        to_operand(decayed, added);
        warpgroup::mma_AB(state, decayed, all.stages[i % K::stages].k);
        warpgroup::mma_ABt(out, plain, prepared.p);
        if constexpr (K::spacious) {
            warpgroup::mma_async_wait<1>(state);
        } else {
            warpgroup::mma_async_wait<0>(state);
            warpgroup::mma_async_wait<0>(out);
            signal_by_warp(all.empty[i % K::slots]);
            store_out(i, out);
        }
    }

    __device__ __forceinline__ void sync() const { warpgroup::sync(CONSUME_BARRIER + id); }

    __device__ __forceinline__ void load_values(int chunk) const {
        const int slot = chunk % K::value_slots;
        work.sequence.load(shared.values[id][slot], g.v, work.value_head, chunk * CHUNK,
                           first_column, shared.values_loaded[id][slot]);
    }
    // Into the place that outputs have left.
    __device__ __forceinline__ void load_next_values(int chunk, int chunks) const {
        if (warpgroup::laneid() != 0 || chunk >= chunks) return;
        tma::store_async_read_wait();
        load_values(chunk);
    }

    // Address of the row that this lane names to ldmatrix or stmatrix: 16 tokens from `token` on,
    // and this warp's 16 columns.
    __device__ __forceinline__ uint32_t row_address(const typename K::value_tile& tile,
                                                    int token) const {
        const int lane = laneid();
        return tile.address_of(token + lane % 8 + 8 * (lane / 16),
                               16 * warpgroup::warpid() + 8 * (lane / 8 % 2));
    }
    __device__ __forceinline__ void load_transposed(rt<T, 16, CHUNK>& to,
                                                    const typename K::value_tile& tile,
                                                    int j) const {
        auto& words = reinterpret_cast<uint32_t(&)[4]>(to.tiles[0][j].data);
        arch::load_matrix_x4_transposed(words[0], words[1], words[2], words[3],
                                        row_address(tile, 16 * j));
    }
    // A warp writes where it alone has read values.
    __device__ __forceinline__ void store_out(int chunk, const rt_fl<16, CHUNK>& out) const {
        auto& tile = rematerialized(shared).values[id][chunk % K::value_slots];
#pragma unroll
        for (int j = 0; j < CHUNK / 16; ++j) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = out.tiles[0][j].data[i];
                words[i] = arch::bit_cast<uint32_t>(pack_pair<T>(pair.x, pair.y));
            }
            arch::store_matrix_x4_transposed(row_address(tile, 16 * j), words[0], words[1],
                                             words[2], words[3]);
        }
        arch::fence_async_shared();
        sync();
        if (warpgroup::laneid() == 0)
            work.sequence.store(g.out, tile, work.value_head, chunk * CHUNK, first_column);
    }

    __device__ __forceinline__ static void scale_columns(rt_fl<16, CHUNK>& x,
                                                         const typename K::factors& factors,
                                                         Factor which) {
        for_each_pair(x, [&](float2& pair, int column, int) {
            const auto factor =
                arch::load_shared<float2>(factors.address_of(which * CHUNK + column));
            pair = {pair.x * factor.x, pair.y * factor.y};
        });
    }

    // Calls f(element, place) for those of the state that exist.
    template <class F>
    __device__ __forceinline__ void for_each_of_state(const StateView& view, F f) {
        const int row = first_column + 16 * warpgroup::warpid() + laneid() / 4;
        const int rows = work.transition ? g.key_dim : g.value_dim;
        for_each_pair(state, [&](float2& x, int key, int i) {
            const int value = row + 8 * (i % 2);
            if (value >= rows || key >= g.key_dim) return;
            const int64_t place = key * view.key_stride + value * view.value_stride;
            f(x.x, place);
            f(x.y, place + view.key_stride);
        });
    }
    __device__ __forceinline__ void load_state() {
        const int row = first_column + 16 * warpgroup::warpid() + laneid() / 4;
        for_each_pair(state, [&](float2& x, int key, int i) {
            const int value = row + 8 * (i % 2);
            x = {work.transition && key == value ? 1.0f : 0.0f,
                 work.transition && key + 1 == value ? 1.0f : 0.0f};
        });
        if constexpr (K::summary) return;
        StateView from(g.initial, work.n, work.value_head);
        if (work.segment > 0) from = in_workspace(work.segment - 1);
        if (from.data == nullptr) return;
        from.with_type([&](auto* data) {
            for_each_of_state(from, [&](float& x, int64_t place) {
                x = convert<float>(arch::load_global(data + place));
            });
        });
    }
    __device__ __forceinline__ void store_state() {
        StateView to(g.final, work.n, work.value_head);
        if constexpr (K::summary)
            to = in_workspace(work.segment);
        else if (work.segment < g.segments - 1)
            return;
        if (to.data == nullptr) return;
        to.with_type([&](auto* data) {
            using S = std::remove_pointer_t<decltype(data)>;
            for_each_of_state(to, [&](float& x, int64_t place) {
                arch::store_global(data + place, convert<S>(x));
            });
        });
    }
    // The state behind a segment, or its transition.
    __device__ __forceinline__ StateView in_workspace(int segment) const {
        const int64_t at = work.kept(g, segment) * g.key_dim;
        if (work.transition) return {g.transitions + at * g.key_dim, 1, g.key_dim};
        return {g.states + at * g.value_dim, g.value_dim, 1};
    }
    // Outputs of tokens behind the last sequence.
    __device__ __forceinline__ void clear_rest() const {
        constexpr int words = VALUES / 8;
        const int column = first_column + 8 * (warpgroup::laneid() % words);
        if (column >= g.value_dim) return;
        const int first = work.sequence.end;
        for (int row = first + warpgroup::laneid() / words; row < g.length;
             row += WARPGROUP_THREADS / words) {
            T* to = g.out_rows + (work.value_head * int64_t(g.length) + row) * g.value_dim + column;
            arch::store_global(reinterpret_cast<uint4*>(to), uint4{0, 0, 0, 0});
        }
    }

    const DeltaGlobals<K>& g;
    DeltaShared<K>& shared;
    const DeltaWork<K>& work;
    const int id, first_column;
    rt_fl<16, K::key_dim> state;  // transposed
};

}  // namespace thunderkittens::recurrent::delta
