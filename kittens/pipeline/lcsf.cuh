// Load-compute-store-finish: as load-compute-finish, with a second ring for what each iteration
// gives out. Consumers turn a stage of inputs into a stage of outputs, producers load the one and
// store the other.
//
//   producers                              consumers (the first warps of the block)
//   for each iteration of each task:       for each iteration of each task:
//     wait for a free input stage            wait for the stage's inputs and a free output stage
//     producer::load                         consumer::compute
//     wait for the outputs of the
//       iteration INPUT_PIPE_STAGES before
//     producer::store
//
// Stores follow loads at that fixed distance, also from one task into the next, so that every
// producer warp does the same things in the same order.
#pragma once

#include "../host/launch.h"
#include "template.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace prototype {
namespace lcsf {

using prototype::common_setup_args;
using prototype::consumer_finish_args;
using prototype::consumer_setup_args;
using prototype::producer_load_args;
using prototype::producer_setup_args;

// producer::store takes `output` away and arrives at outputs_finished when it has been read.
template <class L>
struct producer_store_args : task_args<L> {
    detail::producer_state_of<L>& state;
    detail::output_block_of<L>& output;
    semaphore& outputs_finished;
    const int iter;
};
// consumer::compute makes `output` of `input`; it arrives at inputs_finished and at
// outputs_arrived.
template <class L>
struct consumer_compute_args : task_args<L> {
    detail::consumer_state_of<L>& state;
    detail::input_block_of<L>& input;
    detail::output_block_of<L>& output;
    semaphore& inputs_finished;
    semaphore& outputs_arrived;
    const int iter;
};

namespace detail {
using namespace prototype::detail;

template <class T>
struct semaphores {
    ring<INPUT_PIPE_STAGES_v<T>> inputs;
    ring<OUTPUT_PIPE_STAGES_v<T>> outputs;
    semaphore finish_finished;
};

template <class T>
using plan = shared_plan<T, semaphores<T>, true>;

template <class T>
__host__ __device__ constexpr void check_functions() {
    using L = layout_of<T>;
    static_assert(
        requires { typename L::output_block; },
        "the layout needs a struct output_block: what a producer stores for one iteration");
    static_assert(
        requires(common_setup_args<L> a) { T::common_setup(a); },
        "a template struct needs common_setup(common_setup_args<layout>)");
    static_assert(
        requires(producer_setup_args<L> a) { T::producer::setup(a); },
        "the producer needs setup(producer_setup_args<layout>)");
    static_assert(
        requires(producer_load_args<L> a) { T::producer::load(a); },
        "the producer needs load(producer_load_args<layout>)");
    static_assert(
        requires(producer_store_args<L> a) { T::producer::store(a); },
        "the producer needs store(producer_store_args<layout>)");
    static_assert(
        requires(consumer_setup_args<L> a) { T::consumer::setup(a); },
        "the consumer needs setup(consumer_setup_args<layout>)");
    static_assert(
        requires(consumer_compute_args<L> a) { T::consumer::compute(a); },
        "the consumer needs compute(consumer_compute_args<layout>)");
    static_assert(
        requires(consumer_finish_args<L> a) { T::consumer::finish(a); },
        "the consumer needs finish(consumer_finish_args<layout>)");
}

// Walks the iterations of all tasks of this block.
template <class T>
struct cursor {
    using L = layout_of<T>;
    common_state_of<L> common;
    int task_iter = -1, num_iters = 0, iter = 0;

    // False when there is no task left.
    __device__ __forceinline__ bool next_task(const globals_of<L>& globals,
                                              scratch_block_of<L>& scratch) {
        ++task_iter;
        iter = 0;
        num_iters = -1;
        T::common_setup({common, task_iter, num_iters, globals, scratch});
        return num_iters >= 0;
    }
    __device__ __forceinline__ task_args<L> task(const globals_of<L>& globals,
                                                 scratch_block_of<L>& scratch) const {
        return {globals, scratch, common, task_iter, num_iters};
    }
};

template <class T>
__device__ __forceinline__ void produce(const globals_of<layout_of<T>>& globals,
                                        const plan<T>& shared) {
    using L = layout_of<T>;
    constexpr int lead = INPUT_PIPE_STAGES_v<T>;
    semaphores<T>& sems = shared.semaphores();
    auto& scratch = shared.scratch();
    typename ring<lead>::position in;
    typename ring<OUTPUT_PIPE_STAGES_v<T>>::position out;
    producer_state_of<L> state;
    cursor<T> load, store;
    bool loading = true, entering = true, finish_awaited = true;
    int ahead = 0;  // iterations that are loaded and not yet stored
    while (true) {
        if (loading && entering) {
            loading = load.next_task(globals, scratch);
            if (loading) T::producer::setup({load.task(globals, scratch), state});
            entering = false;
            finish_awaited = load.task_iter == 0 || !shared.shares_stages();
        }
        // As in load-compute-finish: one empty stage for a task without iterations. It does not
        // count as ahead, since it waits until all stores before it are done.
        const int slots = load.num_iters == 0 && shared.shares_stages() ? 1 : load.num_iters;
        if (loading && load.iter == slots) {
            entering = true;
            continue;
        }
        const bool must_await_finish =
            loading && !finish_awaited &&
            (in.stage >= shared.first_shared_stage || load.iter == slots - 1);
        // The previous task finishes only when all of its outputs have found room.
        const bool must_drain = !loading || (must_await_finish && ahead > load.iter);
        if (ahead > lead || (must_drain && ahead > 0)) {
            while (store.iter == store.num_iters) store.next_task(globals, scratch);
            wait_phase<T>(sems.outputs.arrived[out.stage], out.phase);
            sync_producers<T>();
            T::producer::store({store.task(globals, scratch), state, shared.output(out.stage),
                                sems.outputs.finished[out.stage], store.iter});
            ++store.iter;
            out.advance();
            --ahead;
            continue;
        }
        if (!loading) break;
        if (must_await_finish) {
            wait_phase<T>(sems.finish_finished, (load.task_iter - 1) & 1);
            finish_awaited = true;
        }
        wait_phase<T>(sems.inputs.finished[in.stage], in.phase ^ 1);
        sync_producers<T>();
        semaphore& arrived = sems.inputs.arrived[in.stage];
        if (load.num_iters > 0) {
            T::producer::load(
                {load.task(globals, scratch), state, shared.input(in.stage), arrived, load.iter});
            ++ahead;
        } else if (producers<T>::warpid() == 0 && kittens::laneid() == 0) {
            arrive(arrived, PRODUCER_BARRIER_ARRIVALS_v<T>);
        }
        ++load.iter;
        in.advance();
    }
}

template <class T>
__device__ __forceinline__ void consume(const globals_of<layout_of<T>>& globals,
                                        const plan<T>& shared) {
    using L = layout_of<T>;
    semaphores<T>& sems = shared.semaphores();
    typename ring<INPUT_PIPE_STAGES_v<T>>::position in;
    typename ring<OUTPUT_PIPE_STAGES_v<T>>::position out;
    common_state_of<L> common;
    consumer_state_of<L> state;
    for (int task_iter = 0;; ++task_iter) {
        int num_iters = -1;
        T::common_setup({common, task_iter, num_iters, globals, shared.scratch()});
        if (num_iters < 0) break;
        const task_args<L> task{globals, shared.scratch(), common, task_iter, num_iters};
        T::consumer::setup({task, state});
        for (int iter = 0; iter < num_iters; ++iter) {
            wait_phase<T>(sems.inputs.arrived[in.stage], in.phase);
            wait_phase<T>(sems.outputs.finished[out.stage], out.phase ^ 1);
            T::consumer::compute({task, state, shared.input(in.stage), shared.output(out.stage),
                                  sems.inputs.finished[in.stage], sems.outputs.arrived[out.stage],
                                  iter});
            in.advance();
            out.advance();
        }
        if constexpr (plan<T>::has_finish_block) {
            const bool is_empty_stage = num_iters == 0 && shared.shares_stages();
            if (is_empty_stage) wait_phase<T>(sems.inputs.arrived[in.stage], in.phase);
            if (task_iter > 0) wait_phase<T>(sems.finish_finished, (task_iter - 1) & 1);
            sync_consumers<T>();
            if (is_empty_stage) {
                if (kittens::warpid() == 0 && kittens::laneid() == 0) {
                    arrive(sems.inputs.finished[in.stage], CONSUMER_BARRIER_ARRIVALS_v<T>);
                }
                in.advance();
            }
        }
        T::consumer::finish({task, state, shared.finish(), sems.finish_finished});
    }
}

}  // namespace detail

template <class T>
__global__ void __launch_bounds__(detail::NUM_THREADS_v<T>, detail::NUM_BLOCKS_v<T>)
    __cluster_dims__(detail::CLUSTER_BLOCKS_v<T>)
        kernel(const __grid_constant__ detail::globals_of<detail::layout_of<T>> globals) {
    detail::check_functions<T>();
    const detail::plan<T> shared;
    if (threadIdx.x == 0) {
        constexpr int producer_arrivals = detail::PRODUCER_BARRIER_ARRIVALS_v<T>;
        constexpr int consumer_arrivals = detail::CONSUMER_BARRIER_ARRIVALS_v<T>;
        detail::semaphores<T>& sems = shared.semaphores();
        sems.inputs.init(producer_arrivals, consumer_arrivals);
        sems.outputs.init(consumer_arrivals, producer_arrivals);
        init_semaphore(sems.finish_finished, consumer_arrivals);
    }
    publish_semaphores<detail::CLUSTER_BLOCKS_v<T>>();
    arch::wait_for_dependencies();
    if (arch::warp_uniform(kittens::warpid()) >= detail::NUM_CONSUMER_WARPS_v<T>) {
        detail::produce<T>(globals, shared);
    } else {
        detail::consume<T>(globals, shared);
    }
    detail::leave<T>();
}

// Bytes of dynamic shared memory that a launch should ask for.
template <class T>
constexpr int shared_bytes =
    detail::plan<T>::useful < detail::MAX_SHARED_MEMORY_v<T> ? detail::plan<T>::useful
                                                             : detail::MAX_SHARED_MEMORY_v<T>;

// Launches kernel<T> with its own block, cluster and shared memory. Throws when the launch fails.
template <class T>
void launch(dim3 grid, cudaStream_t stream,
            const detail::globals_of<detail::layout_of<T>>& globals) {
    kittens::launch(kernel<T>, grid, dim3(detail::NUM_THREADS_v<T>),
                    dim3(arch::cluster_of_launch(detail::CLUSTER_BLOCKS_v<T>)), shared_bytes<T>,
                    stream, globals);
}

}  // namespace lcsf
}  // namespace prototype
}  // namespace kittens::inline KITTENS_BACKEND
