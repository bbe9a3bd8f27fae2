// What the machine does for the instructions of this back end: every function that the files beside
// this one call, on bytes, addresses and pointers to functions. The machine itself, in machine/, is
// behind them. By default it follows in the same translation unit, so that one file with a kernel
// is a program. A library of many files defines KITTENS_EMULATOR_APART instead and compiles the
// machine once, in a file of its own, which includes machine/machine.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "platform.h"

#if defined(KITTENS_EMULATOR_APART)
#define KITTENS_CALL
#else
#define KITTENS_CALL inline
#endif

namespace kittens::inline on_cpu {
namespace emulated {

// As the hardware has it: 1 KiB of every block's shared memory is the system's, the kernel's own
// begins after it.
constexpr uint32_t SHARED_BASE = 1024;

// Ends the launch.
[[noreturn]] KITTENS_CALL void fail(const char* sentence);

// ---- threads, blocks and clusters ----

KITTENS_CALL uint8_t* own_shared_memory();  // from address 0
KITTENS_CALL uint32_t dynamic_shared_bytes();
KITTENS_CALL uint32_t shared_address(const void* pointer);
// Of a variable, which the key stands for, behind the dynamic shared memory.
KITTENS_CALL void* static_shared(const void* key, size_t bytes, size_t alignment);

KITTENS_CALL void synchronize_warp();
KITTENS_CALL bool elect_one();
KITTENS_CALL void yield_turn();
KITTENS_CALL void wait_for_dependencies();
KITTENS_CALL void reallocate_registers(int count, bool increases);

KITTENS_CALL uint32_t cluster_rank();
KITTENS_CALL uint32_t cluster_size();
KITTENS_CALL uint32_t map_shared_rank(uint32_t address, uint32_t rank);
KITTENS_CALL void arrive_at_cluster(bool releases);
KITTENS_CALL void wait_for_cluster();

// ---- operations of all lanes of a warp ----

// Each lane leaves its words; the last to come does the work.
struct Lane {
    uint32_t words[16];
};
KITTENS_CALL Lane& own_lane();
KITTENS_CALL void warp_operation(const char* name, void (*compute)(Lane* lanes));
// `value`, of up to 8 bytes, becomes that of the lane which `source` names.
KITTENS_CALL void shuffle(const char* name, void* value, uint32_t bytes, int argument,
                          int (*source)(int lane, int argument));

KITTENS_CALL void load_matrices(uint32_t (&out)[4], uint32_t address, bool transposed);
KITTENS_CALL void store_matrices(uint32_t address, const uint32_t (&in)[4], bool transposed);

// The elements of the tensor cores' operands.
enum class Element : uint8_t { bf16, half, e4m3, e5m2 };

template <class T>
constexpr Element element_of() {
    if constexpr (std::is_same_v<T, __nv_bfloat16>)
        return Element::bf16;
    else if constexpr (std::is_same_v<T, __half>)
        return Element::half;
    else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>)
        return Element::e4m3;
    else
        return Element::e5m2;
}

// d = a b + c, fragments of m16n8k16 or m16n8k32. C and D are floats or, two to a word, halves.
KITTENS_CALL void multiply_fragments(uint32_t* d, const uint32_t* a, const uint32_t* b,
                                     const uint32_t* c, Element a_type, Element b_type,
                                     bool in_half);

// ---- products of a warpgroup ----

struct ProductShape {
    int n;
    Element a, b;
    bool half_accumulator, a_in_registers, transpose_a, transpose_b;
    bool operator==(const ProductShape&) const = default;
};
KITTENS_CALL uint64_t describe_operand(uint32_t shared_address, int leading_bytes, int stride_bytes,
                                       int swizzle_bytes);
KITTENS_CALL void fence_products();
KITTENS_CALL void issue_product(const ProductShape& shape, uint32_t* d, const uint32_t* a,
                                uint64_t a_descriptor, uint64_t b_descriptor, bool accumulate);
KITTENS_CALL void commit_products();
KITTENS_CALL void wait_for_products(uint64_t pending);

// ---- memory ----

// By one thread; `what` names the instruction in messages.
KITTENS_CALL void read_shared(uint32_t address, void* to, uint32_t bytes, const char* what);
KITTENS_CALL void write_shared(uint32_t address, const void* from, uint32_t bytes,
                               const char* what);
KITTENS_CALL void read_global(const void* pointer, void* to, uint32_t bytes);
KITTENS_CALL void write_global(void* pointer, const void* from, uint32_t bytes);
KITTENS_CALL void add_to_global(float* pointer, const float (&values)[4]);
KITTENS_CALL int fetch_add_global(int* pointer, int value);
KITTENS_CALL void raise_global(uint32_t* pointer, uint32_t value);
KITTENS_CALL int load_flag(const int* pointer, bool relaxed, const char* what);
KITTENS_CALL uint64_t load_flag(const uint64_t* pointer, bool relaxed, const char* what);
KITTENS_CALL void store_flag(int* pointer, int value, const char* what);
KITTENS_CALL void store_flag(uint64_t* pointer, uint64_t value, const char* what);

KITTENS_CALL void fence_proxy_shared();
KITTENS_CALL void fence_proxy_global();
KITTENS_CALL void fence_release();
KITTENS_CALL void fence_acquire();

// ---- barriers ----

KITTENS_CALL void initialize_barrier(uint32_t address, uint32_t arrivals);
KITTENS_CALL void invalidate_barrier(uint32_t address);
KITTENS_CALL void fence_initialized_barriers();
KITTENS_CALL void arrive_at_barrier(uint32_t address, uint32_t count);
KITTENS_CALL void arrive_relaxed(uint32_t address, uint32_t count);
KITTENS_CALL void arrive_expecting(uint32_t address, uint32_t bytes);
KITTENS_CALL void expect_bytes(uint32_t address, uint32_t bytes);
KITTENS_CALL bool poll_barrier(uint32_t address, uint32_t parity, const char* what);
KITTENS_CALL void wait_for_barrier(uint32_t address, uint32_t parity);

KITTENS_CALL void use_named_barrier(int id, int threads, bool waits);
KITTENS_CALL void use_block_barrier(int id);

// ---- copies ----

KITTENS_CALL void issue_small_copy(uint32_t destination, const void* source, uint32_t bytes,
                                   int read_bytes);
KITTENS_CALL void commit_small_copies();
KITTENS_CALL void wait_for_small_copies(size_t pending);
KITTENS_CALL void arrive_after_small_copies(uint32_t barrier);

struct BoxOrigin {
    int rank;
    int at[5];  // elements, innermost first; 0 beyond the rank
};
enum class Combine { copy, add, min, max };

KITTENS_CALL CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                        void* data, const cuuint64_t* dims,
                                        const cuuint64_t* stride_bytes, const cuuint32_t* box,
                                        const cuuint32_t* element_strides,
                                        CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                        CUtensorMapFloatOOBfill fill);
KITTENS_CALL void prefetch_map(const CUtensorMap* map);
KITTENS_CALL void prefetch_box(const CUtensorMap* map, const BoxOrigin& at);
// To those blocks of the cluster whose bits are set; -1: to the block of the destination.
KITTENS_CALL void load_box(uint32_t destination, const CUtensorMap* map, const BoxOrigin& at,
                           uint32_t barrier, int block_mask);
KITTENS_CALL void store_box(const CUtensorMap* map, uint32_t source, const BoxOrigin& at,
                            Combine how);
KITTENS_CALL void load_range(uint32_t destination, const void* source, uint32_t bytes,
                             uint32_t barrier);
KITTENS_CALL void store_range(void* destination, uint32_t source, uint32_t bytes, Combine how);
KITTENS_CALL void copy_to_cluster(uint32_t destination, uint32_t source, uint32_t bytes,
                                  uint32_t barrier);
KITTENS_CALL void commit_stores();
KITTENS_CALL void wait_for_stores(size_t pending, bool only_read);

// ---- launches ----

// What all threads run: `run(arguments)`. The kernel is there for its name.
struct KernelCall {
    const void* kernel;
    void (*run)(const void* arguments);
    const void* arguments;
};
KITTENS_CALL void launch(const KernelCall& call, bool dependent, int blocks_per_sm, dim3 grid,
                         dim3 block, dim3 cluster, size_t shared_bytes);
[[noreturn]] KITTENS_CALL void throw_cuda_error(cudaError_t error, const char* what);

}  // namespace emulated
}  // namespace kittens::inline on_cpu

#if !defined(KITTENS_EMULATOR_APART)
#include "machine/machine.h"
#endif
