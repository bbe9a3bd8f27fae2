// The gradient of chunks of 64 tokens, on Hopper, from the states before them and the gradients of
// the states behind them. A persistent block goes over tiles of a chunk and the heads of a group,
// and sums the gradients of q and k over these heads in registers, in their order. Its warpgroups:
// one for what meets the states, which has these sums (state_role_sm90.cuh), one for pairs of
// tokens and the gradient of v (pair_role_sm90.cuh), and one whose warps load, sum the gradients of
// the decays, and that of the skip (decay_role_sm90.cuh). q k^T is made once for all heads of a
// tile.
#pragma once

#include "csrc/recurrent/gradient/decay_role_sm90.cuh"
#include "csrc/recurrent/gradient/pair_role_sm90.cuh"
#include "csrc/recurrent/gradient/state_role_sm90.cuh"

namespace thunderkittens::recurrent {

template <class K>
__global__ __launch_bounds__(GRADIENT_CHUNK_THREADS, 1) void gradient_chunk_kernel(
    const __grid_constant__ ChunkGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<ChunkShared<K>>();
    if (first_thread()) shared.init();
    arch::launch_dependents();
    arch::wait_for_dependencies();
    arch::sync_block();
    const int role = arch::warp_uniform(warpgroup::groupid());
    if (role == LOADER_ROLE) {
        warpgroup::decrease_registers<LOADER_REGISTERS>();
        const int warp = arch::warp_uniform(warpgroup::warpid());
        if (warp == 0) {
            if (laneid() == 0) load_chunks(g, shared);
        } else if (warp == 3) {
            make_skip_gradient(g, shared);
        } else {
            make_token_gradients(g, shared, warp - 1);
        }
    } else if (role == STATE_ROLE) {
        warpgroup::increase_registers<STATE_REGISTERS>();
        StateRole<K>{g, shared}.run();
    } else {
        warpgroup::increase_registers<PAIR_REGISTERS>();
        PairRole<K>{g, shared}.run();
    }
}

template <DType dtype, int key_dim>
void launch_gradient_chunks(const GradientParams& params, const GradientWorkspace& w, int sms,
                            Stream stream) {
    using K = GradientTypes<dtype, key_dim>;
    static_assert(sizeof(ChunkShared<K>) + 1024 <= gradient_chunk_bytes(key_dim));
    const RecurrentParams& call = params.forward;
    const RecurrentProblem& p = call.problem;
    using Keys = typename K::key_tile;
    using Values = typename K::value_tile;
    const int64_t tiles = slots_of(p) * p.groups * params.splits;
    const ChunkGlobals<K> globals{
        .q = rows_of<Keys>(call.q, p, p.groups, p.key_dim),
        .k = rows_of<Keys>(call.k, p, p.groups, p.key_dim),
        .dq = rows_of<Keys>(params.dq, p, p.groups, p.key_dim),
        .dk = rows_of<Keys>(params.dk, p, p.groups, p.key_dim),
        .v = rows_of<Values>(call.v, p, p.heads, p.value_dim),
        .grad_out = rows_of<Values>(params.grad_out, p, p.heads, p.value_dim),
        .dv = rows_of<Values>(params.dv, p, p.heads, p.value_dim),
        .gates = token_numbers_of(w.gates, p),
        .before = state_layout_of<K>(w.before, p),
        .after = state_layout_of<K>(w.after, p),
        .table = w.table,
        .skip = call.skip,
        .units = w.units,
        .tokens = w.tokens,
        .skip_partials = w.skip,
        .partial = w.partial,
        .slots = int(slots_of(p)),
        .heads = int(p.heads),
        .groups = int(p.groups),
        .slices = int(slices_of(p)),
        .splits = params.splits,
        .value_dim = int(p.value_dim),
        .tiles = int(tiles),
        .scale = call.scale};
    kittens::launch({.dependent = true}, gradient_chunk_kernel<K>,
                    dim3(unsigned(tiles < sms ? tiles : sms)), dim3(GRADIENT_CHUNK_THREADS),
                    dim3(1), gradient_chunk_bytes(key_dim), stream, globals);
}

}  // namespace thunderkittens::recurrent
