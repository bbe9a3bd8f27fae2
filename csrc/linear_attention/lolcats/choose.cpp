// Which kernels run a problem of LoLCATS, and in how many segments. Pure functions.
#include "csrc/linear_attention/common/choose.h"
#include "csrc/linear_attention/lolcats/portable.h"

namespace thunderkittens::linear_attention {
namespace {

std::string unsupported_shape(DType dtype, int64_t batch, int64_t heads, int64_t kv_heads,
                              int64_t length, int64_t head_dim, int64_t features, int shared_bytes,
                              const DeviceProperties& device) {
    std::string reason =
        unsupported_problem(dtype, batch, heads, length, head_dim, shared_bytes, device);
    if (!reason.empty()) return reason;
    if (head_dim != 64 && head_dim != 128)
        return concat("the head dimension must be 64 or 128, got ", head_dim);
    if (features != 32 && features != 64)
        return concat("the features must be 32 or 64 of each sign, got ", features);
    if (kv_heads < 0 || (kv_heads > 0 ? heads % kv_heads : heads) != 0 ||
        (kv_heads > 0 && heads == 0))
        return concat("q's heads must be a multiple of k's, got ", heads, " and ", kv_heads);
    return "";
}

// Cycles, of an H200; of portable kernels as expected, for 64 columns of the values.
constexpr Costs COSTS{.chunk = 4000, .sum = 1200, .launches = 8000, .segment = 150};
constexpr Costs PORTABLE_COSTS{.chunk = 6000,
                               .sum = 1500,
                               .launches = 12000,
                               .segment = 150,
                               .alone = 0.65,
                               .blocks_per_sm = 2};

template <typename Choice>
std::string name_of_kernel(const char* kind, const Choice& c) {
    return concat(kind, "_", name_of(c.dtype), "_d", c.head_dim, "_f", c.features,
                  c.portable ? "_portable" : "");
}

// Calls add(dtype, head_dim, features) for all that there are.
template <typename F>
void for_each_kernel(F add) {
    for (const DType dtype : {DType::bf16, DType::fp16})
        for (const int head_dim : {64, 128})
            for (const int features : {32, 64}) add(dtype, head_dim, features);
}

KernelInfo kernel_info(const char* kind, const char* text, DType dtype, int head_dim,
                       int features) {
    KernelInfo info;
    info.name = concat(kind, "_", name_of(dtype), "_d", head_dim, "_f", features);
    info.config = concat(text, ", head dimension ", head_dim, ", ", features, " features twice");
    info.symbol =
        concat("LolcatsKernelILNS_5DTypeE", int(dtype), "ELi", head_dim, "ELi", features, "E");
    return info;
}

}  // namespace

std::string unsupported(const LolcatsProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    const int bytes = runs_native(device) ? LOLCATS_FORWARD_BYTES : PORTABLE_LOLCATS_BYTES;
    return unsupported_shape(p.dtype, p.batch, p.heads, p.kv_heads, p.length, p.head_dim,
                             p.features, bytes, device);
}
std::string unsupported(const LolcatsDecodeProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    return unsupported_shape(p.dtype, p.batch, p.heads, p.kv_heads, 1, p.head_dim, p.features, 0,
                             device);
}

LolcatsChoice choose(const LolcatsProblem& p, const DeviceProperties& device) {
    const bool portable = !runs_native(device);
    const int64_t blocks = p.batch * p.heads * (portable ? p.head_dim / VALUES : 1);
    const int segments =
        choose_segments(blocks, chunks_of(p), portable ? PORTABLE_COSTS : COSTS, device);
    return {p.dtype, int(p.head_dim), int(p.features), portable, segments};
}
LolcatsDecodeChoice choose_decode(const LolcatsDecodeProblem& p, const DeviceProperties& device) {
    return {p.dtype, int(p.head_dim), int(p.features), !runs_native(device)};
}

std::string kernel_name(const LolcatsChoice& c) { return name_of_kernel("forward", c); }
std::string kernel_name(const LolcatsDecodeChoice& c) { return name_of_kernel("decode", c); }

std::vector<KernelInfo> lolcats_kernels() {
    std::vector<KernelInfo> list;
    for_each_kernel([&](DType dtype, int head_dim, int features) {
        for (const bool states : {false, true}) {
            KernelInfo info =
                kernel_info(states ? "segment_states" : "forward",
                            states ? "state of a segment" : "output", dtype, head_dim, features);
            info.symbol = concat("lolcats_", states ? "segment_states" : "forward",
                                 "_kernelINS0_13", info.symbol);
            info.threads = states ? 384 : 512;
            info.shared_bytes = states ? LOLCATS_SEGMENT_STATES_BYTES : LOLCATS_FORWARD_BYTES;
            list.push_back(info);
        }
    });
    for (const bool scan : {false, true}) {
        KernelInfo info;
        info.name = scan ? "scan" : "kv_cache";
        info.config = scan ? "prefix sums of the segments' states"
                           : "rows between caches and the order of tokens";
        info.symbol = scan ? "based_scan_kernelI6float4" : "lolcats_kv_cache_kernelILb0E";
        info.threads = 128;
        list.push_back(info);
    }
    const auto enter = [&](const char* kind, const char* text, DType dtype, int head_dim,
                           int features, const std::string& suffix, int threads, int bytes) {
        KernelInfo info = kernel_info(kind, text, dtype, head_dim, features);
        info.name += "_portable";
        info.symbol =
            concat("lolcats_portable_", kind, "_kernelINS0_13", info.symbol, "EE", suffix);
        info.arch = PORTABLE;
        info.threads = threads;
        info.shared_bytes = bytes;
        list.push_back(info);
    };
    for_each_kernel([&](DType dtype, int dim, int features) {
        enter("features", "features of the tokens", dtype, dim, features, "", 128,
              PORTABLE_FEATURES_BYTES);
        enter("forward", "output", dtype, dim, features, "", 128,
              portable_lolcats_forward_bytes(dim, features));
        enter("segment_states", "state of a segment", dtype, dim, features, "Lb0E", 128,
              PORTABLE_LOLCATS_SEGMENTS_BYTES);
    });
    KernelInfo caches;
    caches.name = "kv_cache_portable";
    caches.config = "rows between caches and the order of tokens";
    caches.symbol = "lolcats_kv_cache_kernelILb1E";
    caches.arch = PORTABLE;
    caches.threads = 128;
    list.push_back(caches);
    return list;
}

std::vector<KernelInfo> lolcats_decode_kernels() {
    std::vector<KernelInfo> list;
    for (const bool portable : {false, true}) {
        const auto enter = [&](KernelInfo info, DType dtype, const std::string& symbol) {
            info.name += portable ? "_portable" : "";
            info.symbol = concat("lolcats_", symbol, "Lb", int(portable), 'E');
            info.arch = portable ? PORTABLE : NATIVE;
            list.push_back(info);
        };
        for_each_kernel([&](DType dtype, int head_dim, int features) {
            for (const bool slide : {false, true}) {
                const char* kind = slide ? "slide" : "decode";
                const char* text = slide ? "the token that leaves a head's sliding window"
                                         : "one token of one head";
                KernelInfo info = kernel_info(kind, text, dtype, head_dim, features);
                info.threads = 256;
                enter(info, dtype, concat(kind, "_kernelINS0_13", info.symbol, "EE"));
            }
        });
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            KernelInfo info;
            info.name = concat("lengths_", name_of(dtype));
            info.config = "counts the tokens";
            info.threads = 128;
            enter(info, dtype, concat("lengths_kernelI", symbol_of(dtype)));
        }
    }
    return list;
}

static const bool registered_decode = register_op<LolcatsDecodeProblem, LolcatsDecodeChoice>(
    "lolcats_decode", "linear_attention", &lolcats_decode_kernels, &unsupported, &choose_decode);

static const bool registered = register_op<LolcatsProblem, LolcatsChoice>(
    "lolcats", "linear_attention", &lolcats_kernels, &unsupported, &choose);

}  // namespace thunderkittens::linear_attention
