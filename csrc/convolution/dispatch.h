// From what is chosen at run time to the kernel compiled for it. Host C++ only; the ops and the
// emulator share it.
#pragma once

#include "csrc/common/check.h"
#include "csrc/convolution/convolution.h"
#include "csrc/gemm/common/listed.h"

namespace thunderkittens::convolution {

// What a kernel is a template over.
struct Kind {
    DType dtype = DType::bf16;
    Layout layout = Layout::any;
    int width = 0;
    bool portable = false;

    bool operator==(const Kind&) const = default;
};
constexpr DType DTYPE_AT[] = {DType::bf16, DType::fp16, DType::fp32};
constexpr std::size_t CONV_KINDS = 54, UPDATE_KINDS = 18, SUM_KINDS = 6;
constexpr Kind sum_kind_at(std::size_t i) {
    return {DTYPE_AT[i % 3], Layout::any, MIN_WIDTH, i / 3 != 0};
}
constexpr Kind update_kind_at(std::size_t i) {
    Kind kind = sum_kind_at(i % 6);
    kind.width = MIN_WIDTH + static_cast<int>(i / 6);
    return kind;
}
constexpr Kind conv_kind_at(std::size_t i) {
    Kind kind = update_kind_at(i % 18);
    kind.layout = static_cast<Layout>(i / 18);
    return kind;
}

template <auto at, std::size_t count, class Launch>
void launch_kind(const char* op, const Kind& wanted, Launch launch) {
    const bool found = gemm::launch_listed<at, count>(wanted, [&]<Kind k>() {
        if constexpr (!k.portable || BUILDS_PORTABLE) launch.template operator()<k>();
        return true;
    });
    TK_CHECK(found, op, ": no kernel of width ", wanted.width);
}

inline void launch(const ConvChoice& c, const Params& params, Stream stream) {
    launch_kind<conv_kind_at, CONV_KINDS>(
        "tk.causal_conv1d", {c.dtype, c.layout, c.width, c.portable},
        [&]<Kind k>() { convolve<k.dtype, k.layout, k.width, k.portable>(params, stream); });
}
inline void launch(const ConvBackwardChoice& c, const BackwardParams& params, Stream stream) {
    launch_kind<conv_kind_at, CONV_KINDS>(
        "tk.causal_conv1d", {c.dtype, c.layout, c.width, c.portable},
        [&]<Kind k>() { gradient<k.dtype, k.layout, k.width, k.portable>(params, stream); });
    if (params.sums == nullptr) return;
    launch_kind<sum_kind_at, SUM_KINDS>(
        "tk.causal_conv1d", {c.dtype, Layout::any, MIN_WIDTH, c.portable},
        [&]<Kind k>() { sum_partials<k.dtype, k.portable>(params, c.width, stream); });
}
inline void launch(const UpdateChoice& c, const UpdateParams& params, Stream stream) {
    launch_kind<update_kind_at, UPDATE_KINDS>(
        "tk.causal_conv1d_update", {c.dtype, Layout::any, c.width, c.portable},
        [&]<Kind k>() { update<k.dtype, k.width, k.portable>(params, stream); });
}

}  // namespace thunderkittens::convolution
