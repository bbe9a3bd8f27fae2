// Rotary embedding: what a call is (Problem), what is compiled (Config), what a kernel is given
// (Params), and the functions that choose. Host C++ only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/common/device.h"
#include "csrc/common/dtype.h"
#include "csrc/common/fields.h"
#include "csrc/common/math.h"
#include "csrc/gemm/common/raster.h"

namespace thunderkittens::rotary {

constexpr int THREADS = 128;
constexpr int BLOCKS_PER_SM = 7;
constexpr int PAIRS = 8;  // of a head
// Heads of a thread, which share cosines and sines: 128 bytes of x.
constexpr int heads_of_thread(DType dtype) { return dtype == DType::fp32 ? 2 : 4; }

struct Problem {
    int64_t batch = 1, heads = 1, length = 0;
    int64_t dim = 0, rotated = 0;  // elements of a head, and those that are rotated
    DType dtype = DType::bf16;
    bool in_place = false;
};

struct Config {
    DType dtype = DType::bf16;
    bool portable = false;
    bool operator==(const Config&) const = default;
};

TK_FIELDS(Problem, batch, heads, length, dim, rotated, dtype, in_place)
TK_FIELDS(Config, dtype, portable)

constexpr DType DTYPES[] = {DType::bf16, DType::fp16, DType::fp32};
constexpr std::size_t CONFIGS = 2 * std::size(DTYPES);
constexpr Config config_at(std::size_t i) {
    return {DTYPES[i % std::size(DTYPES)], i >= std::size(DTYPES)};
}

// Integers of 32 or 64 bits, adjacent.
struct Integers {
    const void* data = nullptr;
    bool wide = false;
};

struct Params {
    const void* x = nullptr;
    void* out = nullptr;  // x itself, in place
    // In elements, of sequence, head and token.
    int64_t x_stride[3] = {}, out_stride[3] = {};
    int64_t batch = 1, length = 0;
    int heads = 0, rotated_heads = 0;
    int dim = 0, half = 0;  // elements of a head, and half of those that are rotated
    const void *cos = nullptr, *sin = nullptr;
    int64_t table_stride = 0, table_batch_stride = 0;  // in elements, of both
    int64_t table_rows = 0;
    bool table_of_tokens = false;  // a row for each token, not for each position
    bool wide_table = false;       // fp32
    Integers positions, offsets;
    int64_t positions_stride = 0;  // between sequences
    const int* cu_seqlens = nullptr;
    int64_t sequences = 0;
    bool interleaved = false, inverse = false, in_place = false;
    bool aligned = false;  // whole units that begin at multiples of 16 bytes
    int rotating = 0;      // slots with pairs
    // How threads are counted: slots of a head, neighbouring tokens, chunks of heads, groups of
    // such tokens, sequences. The divisors are right where the threads are below 2^31.
    bool narrow = false;
    gemm::Divisor slots, tokens, chunks, groups;
    int64_t group_count = 0;
    int64_t threads() const {
        return int64_t{slots.value} * tokens.value * chunks.value * group_count * batch;
    }
};

std::string unsupported(const Problem& problem, const DeviceProperties& device);
Config choose(const Problem& problem, const DeviceProperties& device);
std::string kernel_name(const Config& config);
std::vector<KernelInfo> kernels();

template <Config config>
void launch(const Params& params, Stream stream);

}  // namespace thunderkittens::rotary
