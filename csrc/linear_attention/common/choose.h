// What the choices of all ops of the family share. Host C++ only.
#pragma once

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/linear_attention/common/linear_attention.h"

namespace thunderkittens::linear_attention {

constexpr int64_t MAX_VALUE_DIM = 256, MAX_SEGMENTS = 256;

// What kernels take, in any unit: per chunk of 64 tokens with `blocks_per_sm` blocks on a
// multiprocessor, and of one block alone in relation to that; per chunk of the pass that makes the
// segments' states; for its launches and those of the scan, and for each segment in the scan.
struct Costs {
    double chunk, sum, launches, segment;
    double alone = 1.0;
    int blocks_per_sm = 1;
};
// Into how many segments the chunks of a head are cut, of `heads` in the whole call.
int choose_segments(int64_t heads, int64_t chunks, const Costs& costs,
                    const DeviceProperties& device);

// The kernels of Based, or of its gradient, by what native and portable ones take.
BasedChoice choose_by(const BasedProblem& p, const DeviceProperties& device, const Costs& native,
                      const Costs& portable);

// What all ops refuse whose kernels take so much shared memory; empty, or the reason.
std::string unsupported_problem(DType dtype, int64_t batch, int64_t heads, int64_t length,
                                int64_t value_dim, int shared_bytes,
                                const DeviceProperties& device);

}  // namespace thunderkittens::linear_attention
