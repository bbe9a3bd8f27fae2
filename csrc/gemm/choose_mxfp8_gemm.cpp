// Which kernels multiply MXFP8 matrices: pure functions of the problem and the device.
#include <algorithm>

#include "csrc/common/check.h"
#include "csrc/common/registry.h"
#include "csrc/gemm/mxfp8_gemm.h"

namespace thunderkittens::mxfp8_gemm {
namespace {

gemm::Problem expanded(const Problem& p) {
    return {.m = p.m,
            .n = p.n,
            .k = p.k,
            .dtype = DType::bf16,
            .out_dtype = p.out_dtype,
            .b_n_major = false,
            .fused = p.fused};
}
fp8_gemm::Problem rebased(const Problem& p) {
    return {.m = p.m, .n = p.n, .k = p.k, .out_dtype = p.out_dtype};
}

std::string unsupported_dtype(const char* name, DType dtype) {
    return is_fp8(dtype) ? "" : concat(name, " must be e4m3 or e5m2, got ", name_of(dtype));
}

KernelInfo pass(const std::string& name, const std::string& what) {
    return {.name = name,
            .config = what,
            .source = "mxfp8_passes",
            .symbol = concat("mxfp8_", name, "_kernel"),
            .threads = THREADS};
}
std::vector<KernelInfo> gemm_kernels() {
    return {pass("expand", "tile 128x128, 256 threads, two operands")};
}
std::vector<KernelInfo> prepare_kernels() {
    return {pass("rebase", "16 rows, 256 threads, two operands")};
}
PrepareChoice choose_prepare(const PrepareProblem&, const DeviceProperties&) { return {}; }

}  // namespace

std::string unsupported_operand(const PrepareProblem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    if (std::string reason = unsupported_dtype("data", p.data_dtype); !reason.empty()) {
        return reason;
    }
    const double blocks =
        double(words_of_marks(p.rows)) * double(p.batch) * std::max<double>(MARKS, p.columns / 128);
    if (blocks > 2e9)
        return concat("data needs some ", blocks, " blocks; at most 2e9 are supported");
    return "";
}

std::string unsupported(const Problem& p, const DeviceProperties& device) {
    if (std::string reason = no_code_for(device); !reason.empty()) return reason;
    for (const auto& [name, dtype] : {std::pair{"a", p.a_dtype}, std::pair{"b", p.b_dtype}}) {
        if (std::string reason = unsupported_dtype(name, dtype); !reason.empty()) return reason;
    }
    for (const int64_t rows : {p.m, p.n}) {
        const PrepareProblem operand{.rows = rows, .columns = p.k};
        if (std::string reason = unsupported_operand(operand, device); !reason.empty()) {
            return reason;
        }
    }
    if (std::string reason = gemm::unsupported(expanded(p), device); !reason.empty()) return reason;
    return p.rebased ? fp8_gemm::unsupported(rebased(p), device) : "";
}

Choice choose(const Problem& p, const DeviceProperties& device) {
    Choice choice{.rebased = p.rebased};
    if (!p.rebased) {
        choice.exact = gemm::choose(expanded(p), device);
        return choice;
    }
    choice.product = fp8_gemm::choose(rebased(p), device);
    // Of the tiles that are marked, which are few where re-basing is worth asking for.
    choice.exact = gemm::choose_marked(expanded(p), device);
    return choice;
}

std::string kernel_name(const Choice&) { return "expand"; }
std::string kernel_name(const PrepareChoice&) { return "rebase"; }

static const bool registered =
    register_op("mxfp8_gemm", "gemm", &gemm_kernels, &unsupported, &choose) &&
    register_op("mxfp8_prepare", "gemm", &prepare_kernels, &unsupported_operand, &choose_prepare);

}  // namespace thunderkittens::mxfp8_gemm
