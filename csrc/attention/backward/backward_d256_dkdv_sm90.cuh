// The warpgroups of backward_d256_sm90.cuh that compute dV and dK, and the kernel.
#pragma once

#include "csrc/attention/backward/backward_d256_dq_sm90.cuh"

namespace thunderkittens::attention {

template <class Kernel>
struct DvRole : BackwardD256Role<Kernel> {
    using T = typename Kernel::T;
    using scores = rt_fl<16, Kernel::block_m>;  // transposed: rows are keys
    using weights = rt<T, 16, Kernel::block_m>;
    using gradient = rt_fl<16, Kernel::part_cols>;
    using Base = BackwardD256Role<Kernel>;
    using Base::g, Base::shared, Base::q_at, Base::value_at, Base::ds_at;
    Weights<Kernel, BackwardD256Globals<Kernel>> weighing{g};

    __device__ __forceinline__ void start_scores(scores& s) {
        wait(shared.q_full[q_at.stage], q_at.phase);
        warpgroup::mm_ABt(s, shared.k, shared.q[q_at.stage]);
    }

    // Each part of dO as soon as dV has read it; `pending` products were started since.
    template <int pending>
    __device__ __forceinline__ void release_values() {
        if constexpr (Kernel::value_parts == 2) {
            warpgroup::mma_async_wait<pending + 1>();
            this->release_value();
        }
        warpgroup::mma_async_wait<pending>();
        this->release_value();
    }

    __device__ __forceinline__ void process(const BackwardWorkTile& work) {
        gradient dv[Kernel::value_parts];
#pragma unroll
        for (auto& part : dv) zero_tile(part);
        wait(shared.k_full, this->phase(work));
        scores s;
        weights p;
        Steps at(g, work);
        weighing.find_slope(work, 0);
        if (at.more()) start_scores(s);
        while (at.more()) {
            const int m = at.j, stage = q_at.stage;
            warpgroup::mma_async_wait<0>(s);
            wait(shared.ds_empty[ds_at.stage], ds_at.phase ^ 1);
            const bool masked =
                arch::warp_uniform(m < read(work.unmasked_begin) || m >= read(work.unmasked_end));
            auto& own = shared.own[ds_at.stage];
            weighing.weigh(s, p, work, m, masked, shared.lse[stage],
                           [this](const BackwardWorkTile& of) { return this->first_key(of); });
            // What dP is multiplied with.
            if constexpr (Kernel::score_mod) {
                warpgroup::store(own, s);
            } else {
                convert_scores(p, s);
                warpgroup::store(own, p);
            }
            this->signal_by_warp(shared.weights_full[ds_at.stage]);
            arrive(shared.q_empty[stage]);  // LSE has been read
            ds_at.advance();
            RingPosition<Kernel::value_slots> value = value_at;
#pragma unroll
            for (int part = 0; part < Kernel::value_parts; ++part) {
                wait(shared.value_full[value.stage], value.phase);
                warpgroup::mma_AB(dv[part], p, shared.grad_out[value.stage]);
                value.advance();
            }
            q_at.advance();
            const bool next_head = at.advance();
            if (at.more()) {
                if (next_head) weighing.find_slope(work, at.head);
                start_scores(s);
                release_values<1>();
            } else {
                release_values<0>();
            }
            this->release(shared.q_empty[stage]);
        }
        this->signal_by_warp(shared.k_done);
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (auto& part : dv) pin(part);
        // All of dP has read V.
        wait(shared.v_done, this->phase(work));
        this->send(g.dv, g.partial_dv, g.need_dv, shared.v, dv, shared.v_empty, work, 1);
    }
};

template <class Kernel>
struct DkRole : BackwardD256Role<Kernel> {
    using T = typename Kernel::T;
    using scores = rt_fl<16, Kernel::block_m>;  // transposed: rows are keys
    using weights = rt<T, 16, Kernel::block_m>;
    // In parts, because ptxas holds one instruction to the registers of an even share.
    static constexpr int parts = Kernel::head_dim > 192 ? 2 : 1;
    static constexpr int part_cols = Kernel::head_dim / parts;
    using gradient = rt_fl<16, part_cols>;
    using Base = BackwardD256Role<Kernel>;
    using Base::g, Base::shared, Base::q_at, Base::value_at, Base::ds_at;
    RingPosition<Kernel::value_slots> value_next;

    __device__ __forceinline__ void start_products(scores& dp) {
#pragma unroll
        for (int part = 0; part < Kernel::value_parts; ++part) {
            wait(shared.value_full[value_next.stage], value_next.phase);
            warpgroup::mma_fence(dp);
            kittens::detail::wgmma_product<false, true>(
                dp, shared.v.template subtile<Kernel::block_keys, Kernel::part_cols>({0, part}),
                shared.grad_out[value_next.stage], part > 0);
            value_next.advance();
        }
        warpgroup::mma_commit_group();
    }

    // dS of this warp's keys in place of the weights, and to the other block.
    __device__ __forceinline__ void exchange_ds(const weights& ds) {
        const int slot = ds_at.stage;
        if (!g.need_dq) {
            this->signal_by_warp(shared.ds_empty[slot]);
            return;
        }
        constexpr uint32_t bytes = 16 * Kernel::block_m * sizeof(T);
        static_assert(Kernel::ds_tile::stripes == 1, "a warp's keys must lie side by side");
        warpgroup::store(shared.own[slot], ds);
        arch::fence_async_shared();
        arch::sync_warp();
        if (laneid() == 0) {
            const uint32_t offset = bytes * uint32_t(warpgroup::warpid());
            const auto other = uint32_t(this->rank ^ 1);
            // What comes from the other block is as much.
            tma::expect_bytes(shared.ds_full[slot], bytes);
            arch::bulk_copy_to_cluster(
                arch::map_shared_rank(shared.peer[slot].address() + offset, other),
                shared.own[slot].address() + offset, bytes,
                arch::map_shared_rank(shared.ds_full[slot].address(), other));
        }
    }

    __device__ __forceinline__ void process(const BackwardWorkTile& work) {
        gradient dk[parts];
#pragma unroll
        for (auto& part : dk) zero_tile(part);
        wait(shared.v_full, this->phase(work));
        scores dp;
        weights ds;
        Steps at(g, work);
        if (at.more()) start_products(dp);
        while (at.more()) {
            const int stage = q_at.stage;
            wait(shared.q_full[stage], q_at.phase);
            warpgroup::mma_async_wait<0>(dp);
#pragma unroll
            for (int part = 0; part < Kernel::value_parts; ++part) this->release_value();
            with_row_statistic(dp, shared.delta[stage], [](float& x, float delta) { x -= delta; });
            wait(shared.weights_full[ds_at.stage], ds_at.phase);
            warpgroup::load(ds, shared.own[ds_at.stage]);
#pragma unroll
            for (int j = 0; j < scores::width; ++j) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    auto& word = ds.tiles[0][j].data[k];
                    const float2 p = unpack_pair<T>(word), x = dp.tiles[0][j].data[k];
                    word = pack_pair<T>(p.x * x.x, p.y * x.y);
                }
            }
            exchange_ds(ds);
            arrive(shared.q_empty[stage]);  // delta has been read
            ds_at.advance();
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                warpgroup::mma_AB(
                    dk[part], ds,
                    shared.q[stage].template subtile<Kernel::block_m, part_cols>({0, part}));
            }
            at.advance();
            if (at.more()) {
                start_products(dp);
                warpgroup::mma_async_wait<1>();
            } else {
                warpgroup::mma_async_wait<0>();
            }
            this->release(shared.q_empty[stage]);
            q_at.advance();
        }
        this->signal_by_warp(shared.v_done);
        warpgroup::mma_async_wait<0>();
#pragma unroll
        for (auto& part : dk) {
            pin(part);
            scale_rows(part, make_float2(g.scale, g.scale));
        }
        // All of S and dQ has read K.
        wait(shared.k_full, this->phase(work));
        wait(shared.k_done, this->phase(work));
        this->send(g.dk, g.partial_dk, g.need_dk, shared.k, dk, shared.k_empty, work, 2);
    }
};

template <class Kernel>
__global__ __launch_bounds__(Kernel::threads, 1) void backward_d256_kernel(
    const __grid_constant__ BackwardD256Globals<Kernel> g) {
    shared_allocator allocator(shared_memory());
    auto& shared = allocator.template allocate<BackwardD256Shared<Kernel>>();
    const int rank = cluster::rank();
    const bool ordered_dq = g.need_dq && g.deterministic;
    if (threadIdx.x == 0) shared.init(g.need_dq, ordered_dq);
    cluster::sync();
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const int role = arch::warp_uniform(warpgroup::groupid());
    const auto work_on = [&](auto&& worker) {
        shared.ring.receive([&](const BackwardWorkTile& work) { worker.process(work); });
        if (warpgroup::laneid() == 0) tma::store_async_wait();
    };
    if (role == 0) {
        warpgroup::decrease_registers<Kernel::producer_registers>();
        const int warp = arch::warp_uniform(warpgroup::warpid());
        if (warp == 0 && arch::elect_one()) BackwardD256Producer<Kernel>{g, shared, rank}.run();
        if (ordered_dq && warp >= 1 && warp <= Kernel::dq_writers && arch::elect_one()) {
            if constexpr (Kernel::dq_shared)
                write_dq_in_order(g, shared, rank, warp - 1);
            else
                await_dq_semaphores(g, shared, rank);
        }
    } else if (role == 1) {
        warpgroup::decrease_registers<Kernel::dq_registers>();
        if (g.need_dq) work_on(DqRole<Kernel>{{g, shared, rank}});
    } else if (role == 2) {
        warpgroup::increase_registers<Kernel::dkv_registers>();
        work_on(DvRole<Kernel>{{g, shared, rank}});
    } else {
        warpgroup::increase_registers<Kernel::dkv_registers>();
        work_on(DkRole<Kernel>{{g, shared, rank}});
    }
    // The other block may still signal this one's semaphores.
    arch::sync_warp();
    cluster::sync();
}

}  // namespace thunderkittens::attention
