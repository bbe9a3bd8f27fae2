// The gated delta rule for Hopper (gated_delta_rule.h has the formulas). A block walks over the
// chunks of 64 tokens of one value head, with 64 columns of values for each consumer. Warpgroups:
//   consumer   one or two, each the chain of its columns (consumer_sm90.cuh)
//   preparer   one for two consumers, two for one: T and P of the next chunks (prepare_sm90.cuh),
//              which no state goes into; one thread of it brings keys and queries by TMA
// In a walk a kernel before has prepared all chunks (prepass_sm90.cuh), and a thread of one
// more warpgroup brings them, keys and queries.
// Values come into the place that the chunk's outputs leave from. Everything is exact whatever the
// gates are, and no block waits for another: columns of values are independent.
#pragma once

#include "csrc/recurrent/gated_delta_rule/consumer_sm90.cuh"
#include "csrc/recurrent/gated_delta_rule/prepare_sm90.cuh"

namespace thunderkittens::recurrent::delta {

template <class K>
__device__ __forceinline__ void clear_prepared(DeltaShared<K>& shared) {
    constexpr int words = CHUNK * CHUNK * int(sizeof(typename K::T)) / 16;
    for (auto& slot : shared.prepared) {
        for (const uint32_t tile : {slot.t.address(), slot.p.address()}) {
            for (int i = int(threadIdx.x); i < words; i += K::threads)
                arch::store_shared(tile + 16 * i, uint4{0, 0, 0, 0});
        }
    }
    arch::fence_async_shared();
}

// One thread, of a walk: all that consumers read of chunks but the values.
template <class K>
__device__ __forceinline__ void load_chunks(const DeltaGlobals<K>& g, DeltaShared<K>& shared,
                                            const DeltaWork<K>& work) {
    const int chunks = work.sequence.chunks(), first = work.first_chunk(g);
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
        const int slot = i % K::slots;
        if (i >= K::slots) wait(shared.empty[slot], (i / K::slots - 1) % 2);
        load_keys(g, shared, work, i);
        auto& to = shared.prepared[slot];
        semaphore& full = shared.full[slot];
        if constexpr (K::summary) {
            tma::expect(full, to.t, to.factors);
        } else {
            tma::expect(full, to.t, to.p, to.factors);
            tma::load_async(to.p, g.prepared.p, {first + i, 0}, full);
        }
        tma::load_async(to.t, g.prepared.t, {first + i, 0}, full);
        tma::load_async(to.factors, g.prepared.factors, {first + i, 0}, full);
    }
}

template <class K>
__global__ __launch_bounds__(K::threads, 1) void gated_delta_rule_kernel(
    const __grid_constant__ DeltaGlobals<K> g) {
    shared_allocator<> allocator(shared_memory());
    auto& shared = allocator.template allocate<DeltaShared<K>>();
    if (threadIdx.x == 0) {
        g.q.prefetch_map();
        g.k.prefetch_map();
        g.v.prefetch_map();
        g.out.prefetch_map();
        shared.init();
    }
    if constexpr (!K::walk) clear_prepared(shared);
    arch::sync_block();
    const int role = arch::warp_uniform(warpgroup::groupid());
    if constexpr (K::walk) {
        const DeltaWork<K> work(g);
        if (role < K::consumers) {
            if constexpr (K::warpgroups == 3)
                warpgroup::increase_registers<K::consumer_registers>();
            Consumer<K>(g, shared, work, role).run();
        } else {
            if constexpr (K::warpgroups == 3)
                warpgroup::decrease_registers<K::producer_registers>();
            if (warpgroup::laneid() == 0) load_chunks(g, shared, work);
        }
    } else if (role < K::preparers) {
        warpgroup::decrease_registers<K::preparer_registers>();
        const DeltaWork<K> work(g);
        if (threadIdx.x == 0) {
            for (int i = 0; i < 2 && i < work.sequence.chunks(); ++i) load_keys(g, shared, work, i);
        }
        Preparer<K>(g, shared, work, role).run();
    } else {
        warpgroup::increase_registers<K::consumer_registers>();
        const DeltaWork<K> work(g);
        Consumer<K>(g, shared, work, role - K::preparers).run();
    }
}

}  // namespace thunderkittens::recurrent::delta

namespace thunderkittens::recurrent {

template <class K>
void launch_delta_kernel(const DeltaRuleParams& params, Stream stream) {
    using T = typename K::T;
    const DeltaRuleProblem& p = params.problem;
    constexpr int bytes = K::walk ? delta_walk_bytes(K::key_dim, K::consumers)
                                  : delta_shared_bytes(K::key_dim, K::consumers);
    static_assert(sizeof(delta::DeltaShared<K>) + 1024 <= bytes);
    const auto slices_of = [](int64_t columns) {
        constexpr int64_t of_block = K::consumers * DELTA_VALUES;
        return (columns + of_block - 1) / of_block;
    };
    const int64_t value_slices = slices_of(p.value_dim);
    const int64_t slices = value_slices + (K::summary ? slices_of(p.key_dim) : 0);
    const int64_t segments = K::summary ? params.segments - 1 : params.segments;
    float* const workspace = params.workspace;
    const int64_t states = delta_segments_kept(p, params.segments) * p.key_dim * p.value_dim;
    const delta::DeltaGlobals<K> globals{
        .q = {params.q, p, p.heads, p.key_dim},
        .k = {params.k, p, p.heads, p.key_dim},
        .v = {params.v, p, p.value_heads, p.value_dim},
        .out = {params.out, p, p.value_heads, p.value_dim},
        .g = {params.g, p.packed},
        .beta = {params.beta, p.packed},
        .gate = {params.gate.A_log, params.gate.dt_bias, params.gate.beta_sigmoid,
                 params.gate.allow_neg_eigval},
        .initial = params.initial,
        .final = params.final,
        .cu_seqlens = p.packed ? params.cu_seqlens : nullptr,
        .out_rows = static_cast<T*>(const_cast<void*>(params.out.data)),
        .sequences = int(p.sequences),
        .length = int(p.length),
        .ratio = int(p.value_heads / p.heads),
        .value_heads = int(p.value_heads),
        .key_dim = int(p.key_dim),
        .value_dim = int(p.value_dim),
        .segments = params.segments,
        .slices = int(slices),
        .value_slices = int(value_slices),
        .states = workspace,
        .transitions = workspace == nullptr ? nullptr : workspace + states,
        .scale = params.scale,
        .l2_norm = params.l2_norm,
        .prepared = {params}};
    kittens::launch(delta::gated_delta_rule_kernel<K>,
                    dim3(unsigned(p.sequences * p.value_heads * slices * segments)),
                    dim3(K::threads), dim3(1), bytes, stream, globals);
}

template <DType dtype, int key_dim, int consumers>
void launch_gated_delta_rule(const DeltaRuleParams& params, Stream stream) {
    launch_delta_kernel<delta::DeltaKernel<dtype, key_dim, consumers, false, false>>(params,
                                                                                     stream);
}
template <DType dtype, int key_dim>
void launch_delta_segments(const DeltaRuleParams& params, Stream stream) {
    launch_delta_kernel<delta::DeltaKernel<dtype, key_dim, 1, true, false>>(params, stream);
}
template <DType dtype, int key_dim, int consumers>
void launch_delta_walk(const DeltaRuleParams& params, Stream stream) {
    launch_delta_kernel<delta::DeltaKernel<dtype, key_dim, consumers, false, true>>(params, stream);
}
template <DType dtype, int key_dim>
void launch_delta_walk_segments(const DeltaRuleParams& params, Stream stream) {
    launch_delta_kernel<delta::DeltaKernel<dtype, key_dim, DELTA_SUMMARY_CONSUMERS, true, true>>(
        params, stream);
}

}  // namespace thunderkittens::recurrent
