// What the load-compute-finish and load-compute-store-finish templates have in common: the
// constants and types that they read from the user's struct by name, the arguments of the user's
// functions, and the plan of the block's shared memory.
#pragma once

#include <type_traits>

#include "../ops/group/group.cuh"
#include "../ops/shared_allocator.cuh"
#include "ring.cuh"

namespace kittens::inline KITTENS_BACKEND {
namespace prototype {
namespace detail {

// A constant of the user's struct, or its default: detail::NAME_v<T>.
#define KITTENS_TEMPLATE_CONSTANT(NAME, DEFAULT)      \
    template <class T>                                \
    __host__ __device__ constexpr int read_##NAME() { \
        if constexpr (requires { T::NAME; })          \
            return T::NAME;                           \
        else                                          \
            return DEFAULT;                           \
    }                                                 \
    template <class T>                                \
    constexpr int NAME##_v = read_##NAME<T>();

KITTENS_TEMPLATE_CONSTANT(NUM_CONSUMER_WARPS, 8)
KITTENS_TEMPLATE_CONSTANT(NUM_PRODUCER_WARPS, 4)
KITTENS_TEMPLATE_CONSTANT(INPUT_PIPE_STAGES, 1)
KITTENS_TEMPLATE_CONSTANT(OUTPUT_PIPE_STAGES, 1)
// Arrivals per stage that the user's load (or store), and compute (or finish), make.
KITTENS_TEMPLATE_CONSTANT(PRODUCER_BARRIER_ARRIVALS, NUM_PRODUCER_WARPS_v<T>)
KITTENS_TEMPLATE_CONSTANT(CONSUMER_BARRIER_ARRIVALS, NUM_CONSUMER_WARPS_v<T>)
KITTENS_TEMPLATE_CONSTANT(NUM_BLOCKS, 1)  // that share a multiprocessor
KITTENS_TEMPLATE_CONSTANT(CLUSTER_BLOCKS, 1)
// Alignment of every block in shared memory; tiles with a swizzle of 128 bytes need 1024.
KITTENS_TEMPLATE_CONSTANT(FORCE_ALIGN, 1024)
// A multiprocessor has 1 KiB more than one block can have, and every block costs 1 KiB.
KITTENS_TEMPLATE_CONSTANT(MAX_SHARED_MEMORY,
                          (kittens::MAX_SHARED_MEMORY + 1024) / NUM_BLOCKS_v<T> / 1024 * 1024 -
                              1024)
#undef KITTENS_TEMPLATE_CONSTANT

template <class T>
constexpr int NUM_WARPS_v = NUM_CONSUMER_WARPS_v<T> + NUM_PRODUCER_WARPS_v<T>;
template <class T>
constexpr int NUM_THREADS_v = NUM_WARPS_v<T> * WARP_THREADS;

struct empty {};

// A type of the user's layout that may be absent: detail::NAME_of<L>.
#define KITTENS_TEMPLATE_OPTIONAL(NAME)         \
    template <class L>                          \
    struct find_##NAME {                        \
        using type = empty;                     \
    };                                          \
    template <class L>                          \
        requires requires { typename L::NAME; } \
    struct find_##NAME<L> {                     \
        using type = typename L::NAME;          \
    };                                          \
    template <class L>                          \
    using NAME##_of = typename find_##NAME<L>::type;

KITTENS_TEMPLATE_OPTIONAL(globals)
KITTENS_TEMPLATE_OPTIONAL(input_block)
KITTENS_TEMPLATE_OPTIONAL(output_block)
KITTENS_TEMPLATE_OPTIONAL(scratch_block)
KITTENS_TEMPLATE_OPTIONAL(finish_block)
KITTENS_TEMPLATE_OPTIONAL(common_state)
KITTENS_TEMPLATE_OPTIONAL(producer_state)
KITTENS_TEMPLATE_OPTIONAL(consumer_state)
#undef KITTENS_TEMPLATE_OPTIONAL

// The layout of a user's struct, with a sentence for what is missing.
template <class T>
struct checked_layout {
    static_assert(
        requires { typename T::layout; },
        "a template struct needs a type layout, which holds globals and the blocks of shared "
        "memory");
    static_assert(
        requires { typename T::layout::globals; },
        "the layout needs a struct globals: the kernel's only argument");
    static_assert(
        requires { typename T::layout::input_block; },
        "the layout needs a struct input_block: what a producer loads for one iteration");
    static_assert(requires { typename T::producer; }, "a template struct needs a struct producer");
    static_assert(requires { typename T::consumer; }, "a template struct needs a struct consumer");
    static_assert(
        NUM_CONSUMER_WARPS_v<T> >= 1 && NUM_PRODUCER_WARPS_v<T> >= 1 && NUM_WARPS_v<T> <= 32,
        "a template's block has at least one consumer and one producer warp, and at most 32 warps");
    static_assert(INPUT_PIPE_STAGES_v<T> >= 1 && OUTPUT_PIPE_STAGES_v<T> >= 1,
                  "INPUT_PIPE_STAGES and OUTPUT_PIPE_STAGES are at least 1");
    static_assert(FORCE_ALIGN_v<T> >= 128 && (FORCE_ALIGN_v<T> & (FORCE_ALIGN_v<T> - 1)) == 0,
                  "FORCE_ALIGN is a power of two of at least 128");
    using type = typename T::layout;
};
template <class T>
using layout_of = typename checked_layout<T>::type;

// Named barriers of the template; 1 to 13 are the user's.
constexpr int producer_barrier = 14, consumer_barrier = 15;

}  // namespace detail

// What every function but common_setup sees of its task.
template <class L>
struct task_args {
    const detail::globals_of<L>& globals;
    detail::scratch_block_of<L>& scratch;      // shared by the block, the same in all tasks
    const detail::common_state_of<L>& common;  // as common_setup left it
    const int task_iter;                       // tasks that this block has done
    const int num_iters;                       // of this task
};

// common_setup: sets common and num_iters from task_iter, the same in every thread of the block. A
// negative num_iters ends the block's work.
template <class L>
struct common_setup_args {
    detail::common_state_of<L>& common;
    const int task_iter;
    int& num_iters;
    const detail::globals_of<L>& globals;
    detail::scratch_block_of<L>& scratch;
};
template <class L>
struct producer_setup_args : task_args<L> {
    detail::producer_state_of<L>& state;
};
// producer::load fills `input` and arrives at inputs_arrived.
template <class L>
struct producer_load_args : task_args<L> {
    detail::producer_state_of<L>& state;
    detail::input_block_of<L>& input;
    semaphore& inputs_arrived;
    const int iter;
};
template <class L>
struct consumer_setup_args : task_args<L> {
    detail::consumer_state_of<L>& state;
};
// consumer::finish ends a task; with a finish_block it arrives at finish_finished when it is done
// with it.
template <class L>
struct consumer_finish_args : task_args<L> {
    detail::consumer_state_of<L>& state;
    detail::finish_block_of<L>& finish;
    semaphore& finish_finished;
};

namespace detail {

__host__ __device__ constexpr int round_up(int value, int unit) {
    return (value + unit - 1) / unit * unit;
}
template <class Block, int alignment>
constexpr int block_bytes = std::is_empty_v<Block> ? 0 : round_up(int(sizeof(Block)), alignment);

// The block's shared memory, from its aligned start:
//   semaphores | scratch | output stages | input stages | free
// The finish block lies at the very end, over the free space and as few of the last input stages as
// possible: what is loaded into the stages before it need not wait until the previous task has
// finished.
template <class T, class Semaphores, bool has_outputs>
struct shared_plan {
    using L = layout_of<T>;
    using input_block = input_block_of<L>;
    using output_block = std::conditional_t<has_outputs, output_block_of<L>, empty>;
    using scratch_block = scratch_block_of<L>;
    using finish_block = finish_block_of<L>;
    static constexpr int alignment = FORCE_ALIGN_v<T>;
    static constexpr int stages = INPUT_PIPE_STAGES_v<T>;
    static constexpr int input_bytes = block_bytes<input_block, alignment>;
    static constexpr int output_bytes = block_bytes<output_block, alignment>;
    static constexpr int finish_bytes = block_bytes<finish_block, alignment>;
    static constexpr bool has_finish_block = finish_bytes > 0;

    static constexpr int scratch_at = round_up(int(sizeof(Semaphores)), alignment);
    static constexpr int outputs_at = scratch_at + block_bytes<scratch_block, alignment>;
    static constexpr int inputs_at =
        outputs_at + (has_outputs ? OUTPUT_PIPE_STAGES_v<T> * output_bytes : 0);
    static constexpr int inputs_end = inputs_at + stages * input_bytes;
    // With less than `needed` the kernel traps; more than `useful` is of no use.
    static constexpr int needed =
        inputs_end > inputs_at + finish_bytes ? inputs_end : inputs_at + finish_bytes;
    static constexpr int useful = inputs_end + finish_bytes;
    static_assert(
        needed <= MAX_SHARED_MEMORY_v<T>,
        "the blocks of the layout do not fit into shared memory: fewer stages or smaller tiles are "
        "needed (MAX_SHARED_MEMORY is the limit, shared by NUM_BLOCKS blocks)");

    char* start;
    int finish_at;
    int first_shared_stage;  // input stages from here on share memory with the finish block

    __device__ __forceinline__ shared_plan() {
        char* const memory = reinterpret_cast<char*>(kittens::shared_memory());
        const uint32_t skipped = -arch::shared_address(memory) & (alignment - 1);
        const int bytes = int(arch::dynamic_shared_bytes()) - int(skipped);
        if (bytes < needed) arch::trap();
        start = memory + skipped;
        finish_at = (bytes - finish_bytes) & -alignment;
        first_shared_stage = finish_at >= inputs_end || !has_finish_block
                                 ? stages
                                 : (finish_at - inputs_at) / input_bytes;
    }
    // Whether producers must wait for the previous task's finish.
    __device__ __forceinline__ bool shares_stages() const {
        return has_finish_block && first_shared_stage < stages;
    }
    __device__ __forceinline__ Semaphores& semaphores() const { return at<Semaphores>(0); }
    __device__ __forceinline__ scratch_block& scratch() const {
        return at<scratch_block>(scratch_at);
    }
    __device__ __forceinline__ input_block& input(int stage) const {
        return at<input_block>(inputs_at + stage * input_bytes);
    }
    __device__ __forceinline__ output_block& output(int stage) const {
        return at<output_block>(outputs_at + stage * output_bytes);
    }
    __device__ __forceinline__ finish_block& finish() const { return at<finish_block>(finish_at); }

  private:
    template <class Block>
    __device__ __forceinline__ Block& at(int offset) const {
        return *reinterpret_cast<Block*>(start + offset);
    }
};

template <class T>
using producers = group<NUM_PRODUCER_WARPS_v<T>>;
template <class T>
using consumers = group<NUM_CONSUMER_WARPS_v<T>>;

// The warps of a side may share the work so that only some of them arrive at a semaphore. A warp
// that does not must not fall a whole phase behind, or it would take the next phase for the one
// before.
template <class T>
__device__ __forceinline__ void sync_producers() {
    arch::sync_warp();
    producers<T>::sync(producer_barrier);
}
template <class T>
__device__ __forceinline__ void sync_consumers() {
    arch::sync_warp();
    consumers<T>::sync(consumer_barrier);
}
template <class T>
__device__ __forceinline__ void wait_phase(semaphore& s, int phase) {
    if constexpr (CLUSTER_BLOCKS_v<T> > 1)
        wait_cluster(s, phase);
    else
        wait(s, phase);
}

// Before a block ends: shared memory stays until stores have read it, and until no other block of
// the cluster will arrive here.
template <class T>
__device__ __forceinline__ void leave() {
    arch::tma_store_read_wait<0>();
    if constexpr (CLUSTER_BLOCKS_v<T> > 1) {
        arch::sync_warp();
        arch::cluster_arrive();
        arch::cluster_wait();
    }
}

}  // namespace detail
}  // namespace prototype
}  // namespace kittens::inline KITTENS_BACKEND
