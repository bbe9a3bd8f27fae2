// Load-compute-finish: a persistent kernel from a user's struct T. Producer warps load input blocks
// into a ring of stages, consumer warps compute on them, and finish the task when all its
// iterations are done. While they finish, producers load the next task ahead.
//
//   producers                              consumers (the first warps of the block)
//   for each task:                         for each task:
//     common_setup, producer::setup          common_setup, consumer::setup
//     for each iteration:                    for each iteration:
//       wait for a free stage                  wait for the stage's inputs
//       producer::load                         consumer::compute
//                                            consumer::finish
#pragma once

#include "../host/launch.h"
#include "template.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace prototype {
namespace lcf {

using prototype::common_setup_args;
using prototype::consumer_finish_args;
using prototype::consumer_setup_args;
using prototype::producer_load_args;
using prototype::producer_setup_args;

// consumer::compute uses `input` and arrives at inputs_finished when it is done with it.
template <class L>
struct consumer_compute_args : task_args<L> {
    detail::consumer_state_of<L>& state;
    detail::input_block_of<L>& input;
    semaphore& inputs_finished;
    const int iter;
};

namespace detail {
using namespace prototype::detail;

template <class T>
struct semaphores {
    ring<INPUT_PIPE_STAGES_v<T>> inputs;
    semaphore finish_finished;
};

template <class T>
using plan = shared_plan<T, semaphores<T>, false>;

template <class T>
__host__ __device__ constexpr void check_functions() {
    using L = layout_of<T>;
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
        requires(consumer_setup_args<L> a) { T::consumer::setup(a); },
        "the consumer needs setup(consumer_setup_args<layout>)");
    static_assert(
        requires(consumer_compute_args<L> a) { T::consumer::compute(a); },
        "the consumer needs compute(consumer_compute_args<layout>)");
    static_assert(
        requires(consumer_finish_args<L> a) { T::consumer::finish(a); },
        "the consumer needs finish(consumer_finish_args<layout>)");
}

template <class T>
__device__ __forceinline__ void produce(const globals_of<layout_of<T>>& globals,
                                        const plan<T>& shared) {
    using L = layout_of<T>;
    semaphores<T>& sems = shared.semaphores();
    typename ring<INPUT_PIPE_STAGES_v<T>>::position at;
    common_state_of<L> common;
    producer_state_of<L> state;
    for (int task_iter = 0;; ++task_iter) {
        int num_iters = -1;
        T::common_setup({common, task_iter, num_iters, globals, shared.scratch()});
        if (num_iters < 0) break;
        const task_args<L> task{globals, shared.scratch(), common, task_iter, num_iters};
        T::producer::setup({task, state});
        // A task without iterations sends one empty stage through the ring, so that consumers
        // cannot finish two tasks between two looks at finish_finished.
        const int slots = num_iters == 0 && shared.shares_stages() ? 1 : num_iters;
        bool finish_awaited = task_iter == 0 || !shared.shares_stages();
        for (int iter = 0; iter < slots; ++iter) {
            wait_phase<T>(sems.inputs.finished[at.stage], at.phase ^ 1);
            if constexpr (plan<T>::has_finish_block) {
                if (!finish_awaited &&
                    (at.stage >= shared.first_shared_stage || iter == slots - 1)) {
                    wait_phase<T>(sems.finish_finished, (task_iter - 1) & 1);
                    finish_awaited = true;
                }
            }
            sync_producers<T>();
            semaphore& arrived = sems.inputs.arrived[at.stage];
            if (num_iters > 0) {
                T::producer::load({task, state, shared.input(at.stage), arrived, iter});
            } else if (producers<T>::warpid() == 0 && kittens::laneid() == 0) {
                arrive(arrived, PRODUCER_BARRIER_ARRIVALS_v<T>);
            }
            at.advance();
        }
    }
}

template <class T>
__device__ __forceinline__ void consume(const globals_of<layout_of<T>>& globals,
                                        const plan<T>& shared) {
    using L = layout_of<T>;
    semaphores<T>& sems = shared.semaphores();
    typename ring<INPUT_PIPE_STAGES_v<T>>::position at;
    common_state_of<L> common;
    consumer_state_of<L> state;
    for (int task_iter = 0;; ++task_iter) {
        int num_iters = -1;
        T::common_setup({common, task_iter, num_iters, globals, shared.scratch()});
        if (num_iters < 0) break;
        const task_args<L> task{globals, shared.scratch(), common, task_iter, num_iters};
        T::consumer::setup({task, state});
        for (int iter = 0; iter < num_iters; ++iter) {
            wait_phase<T>(sems.inputs.arrived[at.stage], at.phase);
            T::consumer::compute(
                {task, state, shared.input(at.stage), sems.inputs.finished[at.stage], iter});
            at.advance();
        }
        if constexpr (plan<T>::has_finish_block) {
            const bool is_empty_stage = num_iters == 0 && shared.shares_stages();
            if (is_empty_stage) wait_phase<T>(sems.inputs.arrived[at.stage], at.phase);
            // The finish block holds the previous task's until all have arrived, and may lie over
            // stages that other warps are still reading.
            if (task_iter > 0) wait_phase<T>(sems.finish_finished, (task_iter - 1) & 1);
            sync_consumers<T>();
            if (is_empty_stage) {
                if (kittens::warpid() == 0 && kittens::laneid() == 0) {
                    arrive(sems.inputs.finished[at.stage], CONSUMER_BARRIER_ARRIVALS_v<T>);
                }
                at.advance();
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
        detail::semaphores<T>& sems = shared.semaphores();
        sems.inputs.init(detail::PRODUCER_BARRIER_ARRIVALS_v<T>,
                         detail::CONSUMER_BARRIER_ARRIVALS_v<T>);
        init_semaphore(sems.finish_finished, detail::CONSUMER_BARRIER_ARRIVALS_v<T>);
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

}  // namespace lcf
}  // namespace prototype
}  // namespace kittens::inline KITTENS_BACKEND
