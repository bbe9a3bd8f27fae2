// What the bodies of rms_norm and layer_norm share: checks, allocation, choice, launch. Host C++
// without torch.
#pragma once

#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/common/backend.h"
#include "csrc/gemm/common/listed.h"
#include "csrc/norm/norm.h"
#include "csrc/norm/rows.h"

namespace thunderkittens::norm {

// A call beside its x and weight.
template <class Tensor>
struct Options {
    std::optional<Tensor> weight, bias, residual, gate, seed;
    double eps = 0, offset = 0, dropout = 0;
    bool layer = false, gate_first = false;
    int64_t group_size = 0;  // 0: the whole row
};

template <class Tensor>
void check_like(const char* op, const char* name, const std::optional<Tensor>& tensor,
                const Tensor& x) {
    if (!tensor) return;
    check_same_device(op, name, *tensor, "x", x);
    bool equal = tensor->dim() == x.dim();
    for (int64_t i = 0; equal && i < x.dim(); ++i) equal = tensor->size(i) == x.size(i);
    TK_CHECK(equal, op, ": ", name, " has shape ", shape_text(*tensor), ", x has ", shape_text(x));
}

// Checks what forward and gradient share, and fills in what both take. T is the dtype of results,
// x's unless x is a sum.
template <class Tensor>
Problem check_call(const char* op, const Tensor& x, DType dtype, const Options<Tensor>& o,
                   Params& params) {
    using On = Backend<Tensor>;
    check_cuda(op, "x", x);
    TK_CHECK(x.dim() >= 1, op, ": x must have 1 dimension or more, got shape ", shape_text(x));
    const int64_t columns = x.size(x.dim() - 1);
    TK_CHECK(columns >= 1, op, ": x has shape ", shape_text(x),
             "; its last dimension must have elements");
    const int64_t width = o.group_size == 0 ? columns : o.group_size;
    TK_CHECK(width >= 1 && columns % width == 0, op, ": group_size is ", o.group_size,
             "; it must divide the ", columns, " elements of a row");
    const int64_t groups = columns / width;
    TK_CHECK(std::isfinite(o.offset), op, ": weight_offset is ", o.offset, "; it must be finite");
    TK_CHECK(groups == 1 || !o.residual, op, ": group_size cannot be given with a residual");
    TK_CHECK(!o.gate || !o.residual, op, ": gate cannot be given with a residual");
    TK_CHECK(!o.gate_first || o.gate, op, ": gate_first needs a gate");
    TK_CHECK(!o.bias || o.weight, op, ": bias needs a weight");
    TK_CHECK(o.eps >= 0 && std::isfinite(o.eps), op, ": eps is ", o.eps,
             "; it must be finite and at least 0");
    TK_CHECK(o.dropout >= 0 && o.dropout < 1, op, ": dropout_p is ", o.dropout,
             "; it must be at least 0 and less than 1");
    for (auto [name, tensor] : {std::pair{"weight", &o.weight}, {"bias", &o.bias}}) {
        if (!*tensor) continue;
        check_same_device(op, name, **tensor, "x", x);
        const DType found = check_dtype(op, name, **tensor, {dtype, DType::fp32});
        params.wide_weight = found == DType::fp32;
        TK_CHECK((*tensor)->dim() == 1 && (*tensor)->numel() == columns, op, ": ", name,
                 " has shape ", shape_text(**tensor), "; it must have the ", columns,
                 " elements of a row");
    }
    if (o.bias) check_same_dtype(op, "bias", *o.bias, "weight", *o.weight);
    if (o.seed) {
        check_same_device(op, "seed", *o.seed, "x", x);
        TK_CHECK(On::is_int64(*o.seed), op, ": seed must be one torch.int64");
    }
    // A probability in steps of 2^-16.
    params.dropped = static_cast<uint32_t>(std::min<long>(std::lround(o.dropout * 65536), 65535));
    params.scale = 65536.0f / static_cast<float>(65536 - params.dropped);
    TK_CHECK(o.dropout == 0 || o.seed, op, ": dropout_p needs a seed");
    params.seed = o.seed ? o.seed->data_ptr() : nullptr;
    params.width = width, params.groups = groups;
    params.eps = static_cast<float>(o.eps), params.offset = static_cast<float>(o.offset);
    params.layer = o.layer, params.gate_first = o.gate_first;
    params.row_units = ceil_div(width, UNIT);
    return {.width = width,
            .groups = groups,
            .dtype = dtype,
            .sum_dtype = dtype,
            .layer = o.layer,
            .gated = o.gate.has_value()};
}
inline bool aligned16(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}
template <class Tensor>
std::span<const int64_t> sizes_of(const Tensor& x) {
    return {x.sizes().data(), static_cast<std::size_t>(x.dim())};
}

// Who shares a row.
inline void set_team(Params& p, const Config& config) {
    p.lanes = lanes_of(config, p.width);
    if (config.units == 4) p.lanes = std::max(p.lanes, WARP);  // also where that was forced
    p.teams = teams_of(p.lanes);
    if (config.path != Path::cluster) return;
    p.slices = slices_of(p.width);
    p.slice = static_cast<int>(slice_of(p.width));
}

template <class Tensor>
struct Normalised {
    Tensor out;
    std::optional<Tensor> sum;  // of x and the residual, where there is one
};
// What an op returns that always has a sum: without a residual it is empty.
template <class Tensor>
std::tuple<Tensor, Tensor> with_sum(Normalised<Tensor> r) {
    if (!r.sum) r.sum = empty({0}, r.out.scalar_type(), r.out);
    return {std::move(r.out), std::move(*r.sum)};
}

template <class Tensor>
Normalised<Tensor> forward_body(const Backend<Tensor>& on, const char* op, const Tensor& x,
                                const Options<Tensor>& o) {
    Params params;
    const DType dtype = check_dtype(op, "x", x, {DType::bf16, DType::fp16, DType::fp32});
    Problem problem = check_call(op, x, dtype, o, params);
    check_like(op, "residual", o.residual, x);
    check_like(op, "gate", o.gate, x);
    if (o.residual) {
        problem.sum_dtype = check_dtype(op, "residual", *o.residual, {dtype, DType::fp32});
    }
    TK_CHECK(o.dropout == 0 || o.residual, op, ": dropout_p needs a residual");
    if (o.gate) check_same_dtype(op, "gate", *o.gate, "x", x);
    const auto guard = on.guard(x);
    const DeviceProperties& device = on.device(x);
    const auto sizes = sizes_of(x);
    Normalised<Tensor> result{empty(sizes, x.scalar_type(), x), {}};
    if (o.residual) result.sum = empty(sizes, o.residual->scalar_type(), x);
    const RowOperands<Tensor> rows(
        x, params.groups, {{&o.residual, &params.residual}, {&o.gate, &params.gate}}, &params.x);
    const std::optional<Tensor> weight = packed(o.weight), bias = packed(o.bias);
    problem.rows = rows.rows.count;
    check_supported(op, unsupported(problem, device));
    if (problem.rows == 0) return result;
    params.rows = rows.rows;
    params.weight = data_as<const void>(weight), params.bias = data_as<const void>(bias);
    params.out = result.out.data_ptr();
    params.sum = result.sum ? result.sum->data_ptr() : nullptr;
    problem.aligned = rows.aligned && aligned16(params.weight) && aligned16(params.bias);
    const Config config = on.chosen("rms_norm", choose(problem, device));
    params.aligned = problem.aligned;
    set_team(params, config);
    auto launch = on.launch("rms_norm", config, x);
    for (const auto& [tensor, place] : rows.all()) launch.may_read("x, residual or gate", tensor);
    launch.may_read("weight", weight);
    launch.may_read("bias", bias);
    launch.may_read("seed", o.seed);
    launch.may_write("out", result.out);
    launch.may_write("sum", result.sum);
    const bool found = gemm::launch_listed<forward_at, FORWARD_CONFIGS>(config, [&]<Config c>() {
        if constexpr (!c.portable || BUILDS_PORTABLE) norm::launch<c>(params, launch.stream);
        return true;
    });
    TK_CHECK(found, op, ": no kernel ", kernel_name(config));
    return result;
}

// Where partial sums of a gradient come from: a row for each block, or for each warp of a block
// whose teams are no larger. Blocks are as many as an SM holds at once, and where rows have weights
// of their own, as many as keep them apart.
inline void plan_gradient(BackwardParams& p, int resident, int sms) {
    const Params& f = p.forward;
    const int64_t partials = f.lanes > WARP ? 1 : BLOCK / WARP;  // of a block
    const int64_t most =
        std::max<int64_t>(1, int64_t{sms} * std::max(1, resident / threads_of(f.lanes)) / f.slices);
    const int64_t together = f.groups / std::gcd(f.groups, partials);
    const int64_t blocks =
        round_up(std::min(ceil_div(f.rows.count, teams_of(f.lanes)), most), together);
    p.blocks = static_cast<int>(blocks * f.slices);
    p.count = blocks * partials;
    p.pitch = round_up(f.width, UNIT);
    p.between = static_cast<uint32_t>(blocks * teams_of(f.lanes));
    p.steps = ceil_div(f.rows.count, int64_t{p.between});
}

template <class Tensor>
struct Gradients {
    Tensor x, residual, weight, last;  // the last: of the gate, or of the bias
};

// x is what was normalised: the sum, where there was a residual. `needs` are x, residual, weight,
// and gate or bias. Where the gradient of the residual is that of x, that of x stands for both.
template <class Tensor>
Gradients<Tensor> backward_body(const Backend<Tensor>& on, const char* op, const Tensor& grad_out,
                                const std::optional<Tensor>& grad_sum, const Tensor& x,
                                const Options<Tensor>& o, const std::vector<bool>& needs) {
    BackwardParams params;
    Params& forward = params.forward;
    check_cuda(op, "grad_out", grad_out);
    const DType dtype =
        check_dtype(op, "grad_out", grad_out, {DType::bf16, DType::fp16, DType::fp32});
    Problem problem = check_call(op, x, dtype, o, forward);
    problem.sum_dtype = check_dtype(op, "x", x, {dtype, DType::fp32});
    check_like(op, "grad_out", std::optional(grad_out), x);
    check_like(op, "grad_sum", grad_sum, x);
    check_like(op, "gate", o.gate, x);
    if (grad_sum) check_same_dtype(op, "grad_sum", *grad_sum, "x", x);
    if (o.gate) check_same_dtype(op, "gate", *o.gate, "grad_out", grad_out);
    TK_CHECK(needs.size() == 4, op, ": needs must have 4 elements, got ", needs.size());
    const auto guard = on.guard(x);
    const DeviceProperties& device = on.device(x);
    const bool separate = problem.sum_dtype != dtype || o.dropout > 0;
    const bool of_x = needs[0] || (needs[1] && !separate), of_residual = needs[1] && separate;
    const bool of_weight = needs[2] && o.weight, of_bias = needs[3] && o.layer && o.weight;
    const bool of_gate = needs[3] && o.gate.has_value();
    const auto sizes = sizes_of(x);
    const auto like = [&](bool wanted, auto type) {
        return wanted ? empty(sizes, type, x) : empty({0}, type, x);
    };
    const int64_t columns = x.size(x.dim() - 1);
    const auto weight_type = o.weight ? o.weight->scalar_type() : grad_out.scalar_type();
    const auto row = [&](bool wanted) { return empty({wanted ? columns : 0}, weight_type, x); };
    Gradients<Tensor> result{like(of_x, grad_out.scalar_type()), like(of_residual, x.scalar_type()),
                             row(of_weight),
                             o.layer ? row(of_bias) : like(of_gate, grad_out.scalar_type())};
    const std::optional<Tensor> grad = grad_out;
    const RowOperands<Tensor> rows(
        x, forward.groups,
        {{&grad, &params.grad_out}, {&o.gate, &forward.gate}, {&grad_sum, &params.grad_sum}},
        &forward.x);
    const std::optional<Tensor> weight = packed(o.weight);
    problem.rows = rows.rows.count;
    check_supported(op, unsupported_backward(problem, device));
    if (problem.rows == 0) {
        if (of_weight) zero_(result.weight);
        if (of_bias) zero_(result.last);
        return result;
    }
    if (!of_x && !of_residual && !of_weight && !of_bias && !of_gate) return result;
    forward.rows = rows.rows;
    forward.weight = data_as<const void>(weight);
    problem.aligned = forward.aligned = rows.aligned && aligned16(forward.weight);
    Config config = on.chosen("rms_norm_backward", choose_backward(problem, device));
    if (config.path == Path::memory) config.units = 0;  // where the path alone was forced
    set_team(forward, config);
    params.grad_x = of_x ? result.x.data_ptr() : nullptr;
    params.grad_residual = of_residual ? result.residual.data_ptr() : nullptr;
    params.grad_gate = of_gate ? result.last.data_ptr() : nullptr;
    plan_gradient(params, resident_threads(config), device.sm_count);
    const int64_t sums = of_weight || of_bias ? params.count * params.pitch : 0;
    const Tensor partials = empty({of_bias ? 2 : 1, sums}, DType::fp32, x);
    params.partials = sums > 0 ? data_as<float>(partials) : nullptr;
    params.partials_bias = of_bias ? params.partials + sums : nullptr;
    {
        auto launch = on.launch("rms_norm_backward", config, x);
        for (const auto& [tensor, place] : rows.all()) launch.may_read("operands", tensor);
        launch.may_read("weight", weight);
        launch.may_read("seed", o.seed);
        launch.may_write("grad_x", result.x);
        launch.may_write("grad_residual", result.residual);
        launch.may_write("grad of the gate", result.last);
        launch.may_write("partial sums", partials);
        const bool found =
            gemm::launch_listed<backward_at, BACKWARD_CONFIGS>(config, [&]<Config c>() {
                if constexpr (!c.portable || BUILDS_PORTABLE) {
                    norm::launch_backward<c>(params, launch.stream);
                }
                return true;
            });
        TK_CHECK(found, op, ": no kernel ", kernel_name(config));
    }
    if (sums == 0) return result;
    params.grad_weight = of_weight ? result.weight.data_ptr() : nullptr;
    params.grad_bias = of_bias ? result.last.data_ptr() : nullptr;
    params.weight_dtype = forward.wide_weight ? DType::fp32 : dtype;
    auto launch = on.launch("norm_reduce", x);
    launch.may_read("partial sums", partials);
    launch.may_write("grad_weight", result.weight);
    if (of_bias) launch.may_write("grad_bias", result.last);
    if (!config.portable) {
        launch_reduce<false>(params, launch.stream);
    } else if constexpr (BUILDS_PORTABLE) {
        launch_reduce<true>(params, launch.stream);
    }
    return result;
}

}  // namespace thunderkittens::norm
