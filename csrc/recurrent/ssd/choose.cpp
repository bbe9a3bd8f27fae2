// Which kernel runs a problem of tk.ssd or tk.linear_attention, and in how many segments. Pure
// functions.
#include <algorithm>
#include <limits>

#include "csrc/common/check.h"
#include "csrc/common/math.h"
#include "csrc/common/registry.h"
#include "csrc/recurrent/common/recurrent.h"

namespace thunderkittens::recurrent {
namespace {

// What a kernel is compiled for.
struct Shape {
    bool portable;
    int keys, warpgroups;
    // Cycles of a block for a chunk where the multiprocessor is full, as expected from products,
    // loads and instructions (docs/experiments/ssd.md), and of a block alone in relation to that.
    double chunk, alone;
};
constexpr Shape SHAPES[] = {
    {false, 64, 1, 1300, 0.65}, {false, 64, 3, 2300, 1.0}, {false, 128, 1, 3400, 0.65},
    {false, 128, 2, 3000, 1.0}, {true, 64, 1, 3700, 0.5},  {true, 128, 1, 4400, 0.65},
};
// Of the pass that makes the segments' states, in relation to the other; cycles of its launch, and
// of a segment whose state a block adds to its own.
constexpr double SUM = 0.45, LAUNCH = 6000, SEGMENT = 1500;

// Less than registers allow where shared memory does not hold as many.
int resident_blocks(const Shape& shape, const DeviceProperties& device) {
    if (!shape.portable) return blocks_per_sm(shape.warpgroups);
    return std::min(portable_blocks_per_sm(shape.keys),
                    device.shared_bytes_per_block / portable_shared_bytes_of(shape.keys));
}

double cost_of(const RecurrentProblem& p, const RecurrentConfig& c, const Shape& shape,
               const DeviceProperties& device) {
    const int64_t sms = std::max(1, device.sm_count), resident = resident_blocks(shape, device);
    const int64_t length = p.sequences > 0 ? ceil_div(p.length, p.sequences) : p.length;
    const auto chunks = double(ceil_div(ceil_div(length, CHUNK), c.segments));
    const auto pass = [&](int64_t blocks, double chunk) {
        const auto waves = double(ceil_div(blocks, sms * resident));
        return waves * chunks * chunk * (blocks <= sms ? shape.alone : 1.0);
    };
    const int64_t blocks = blocks_of(p, c);
    double cost = pass(blocks, shape.chunk);
    if (c.segments > 1) {
        cost += pass(blocks / c.segments * (c.segments - 1), SUM * shape.chunk) + LAUNCH +
                SEGMENT * (c.segments - 1);
    }
    return cost;
}

}  // namespace

std::string unsupported(const RecurrentProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (p.dtype != DType::bf16 && p.dtype != DType::fp16) {
        return concat("operands must be bf16 or fp16, got ", name_of(p.dtype));
    }
    const auto fits = [](int64_t dim, int64_t most) {
        return dim >= 8 && dim <= most && dim % 8 == 0;
    };
    if (!fits(p.key_dim, MAX_KEY_DIM) || !fits(p.value_dim, MAX_VALUE_DIM)) {
        return concat("the key and the value dimension must be multiples of 8, from 8 to ",
                      MAX_KEY_DIM, " and to ", MAX_VALUE_DIM, ", got ", p.key_dim, " and ",
                      p.value_dim);
    }
    constexpr int64_t limit = int64_t{1} << 30;
    if (std::min({p.batch, p.heads, p.groups, p.length, p.sequences}) < 0 ||
        std::max({p.batch, p.heads, p.length, p.sequences}) > limit) {
        return concat("sizes must be in [0, ", limit, "], got batch ", p.batch, ", heads ", p.heads,
                      ", length ", p.length, ", sequences ", p.sequences);
    }
    if ((p.groups == 0) != (p.heads == 0) || (p.groups > 0 && p.heads % p.groups != 0)) {
        return concat("the heads of the values must be a multiple of those of the keys, got ",
                      p.heads, " and ", p.groups);
    }
    if (double(states_of(p)) * double(p.heads * slices_of(p)) * MAX_SEGMENTS >
        double(std::numeric_limits<int32_t>::max())) {
        return concat(states_of(p), " sequences times ", p.heads, " heads are too many");
    }
    const int bytes = runs_native(device)
                          ? std::max(shared_bytes_of(64, 3), shared_bytes_of(128, 2))
                          : portable_shared_bytes_of(128);
    if (bytes > device.shared_bytes_per_block) {
        return concat("the kernels need ", bytes,
                      " bytes of shared memory per block, this GPU has ",
                      device.shared_bytes_per_block);
    }
    return "";
}

RecurrentConfig choose(const RecurrentProblem& p, const DeviceProperties& device) {
    const int keys = int(padded_keys(p));
    const int64_t length = p.sequences > 0 ? ceil_div(p.length, p.sequences) : p.length;
    const int64_t most = std::clamp<int64_t>(ceil_div(length, CHUNK), 1, MAX_SEGMENTS);
    const bool portable = !runs_native(device);
    RecurrentConfig best{p.dtype, keys, 1, 1, portable};
    double least = std::numeric_limits<double>::infinity();
    for (const Shape& shape : SHAPES) {
        if (shape.keys != keys || shape.portable != portable) continue;
        for (int segments = 1; segments <= most; ++segments) {
            const RecurrentConfig c{p.dtype, keys, shape.warpgroups, segments, portable};
            const double cost = cost_of(p, c, shape, device);
            if (cost < least) best = c, least = cost;
        }
    }
    return best;
}

std::string kernel_name(const RecurrentConfig& c) {
    return concat("forward_", name_of(c.dtype), "_keys", c.keys,
                  c.portable ? "_portable" : concat("_", c.warpgroups, "warpgroups"));
}

std::vector<KernelInfo> recurrent_kernels() {
    std::vector<KernelInfo> list;
    for (const DType dtype : {DType::bf16, DType::fp16}) {
        for (const Shape& shape : SHAPES) {
            const bool portable = shape.portable;
            KernelInfo info;
            info.name = kernel_name({dtype, shape.keys, shape.warpgroups, 1, portable});
            info.config = portable ? concat("chunks of ", CHUNK, " tokens, ", shape.keys,
                                            " keys; 4 warps, ", VALUES, " columns of the values")
                                   : concat("chunks of ", CHUNK, " tokens, ", shape.keys, " keys; ",
                                            shape.warpgroups, " warpgroups with ", VALUES,
                                            " columns of the values each, one of producers");
            const char* const type = symbol_of(dtype);
            info.symbol = portable
                              ? concat("recurrent_portable_forward_kernelINS1_13PortableTypesI",
                                       type, "Li", shape.keys, "E")
                              : concat("recurrent_kernelINS0_14RecurrentTypesI", type, "Li",
                                       shape.keys, "ELi", shape.warpgroups, "E");
            info.arch = portable ? PORTABLE : NATIVE;
            info.threads = portable ? 128 : (shape.warpgroups + 1) * 128;
            info.shared_bytes = portable ? portable_shared_bytes_of(shape.keys)
                                         : shared_bytes_of(shape.keys, shape.warpgroups);
            list.push_back(info);
        }
    }
    return list;
}

static const bool registered =
    register_op("ssd", "recurrent", &recurrent_kernels, &unsupported, &choose);

}  // namespace thunderkittens::recurrent
