// fp8_quantize and fp8_gemm on the emulator, as quantize/fp8_quantize.cpp and fp8_gemm.cpp do them
// on CUDA tensors.
#include "csrc/common/emulated.h"
#include "csrc/gemm/fp8/split_k.h"
#include "csrc/gemm/quantize/fp8_quantize.h"

namespace thunderkittens {
namespace {

using emulated::Array;

namespace q = fp8_quantize;

constexpr DType WIDE[] = {DType::bf16, DType::fp16, DType::fp32};
constexpr q::Config pass_at(std::size_t i) { return {WIDE[i / 8], q::PASSES[i % 8]}; }
template <std::size_t... indices>
void launch_pass(const q::Config& config, const q::Params& params,
                 std::index_sequence<indices...>) {
    const bool found =
        ((config == pass_at(indices) ? (q::launch<pass_at(indices)>(params, nullptr), true)
                                     : false) ||
         ...);
    TK_CHECK(found, "tk.fp8_quantize: no kernel ", kernel_name(config));
}

Array allocate_scales(int granularity, int64_t m, int64_t k) {
    const q::ScaleShape shape = q::scale_shape(granularity, m, k);
    if (granularity == 0) return emulated::allocate({}, DType::fp32);
    if (!shape.rows_adjacent) return emulated::allocate({shape.rows, shape.cols}, DType::fp32);
    Array a = emulated::allocate({shape.cols, shape.rows}, DType::fp32, 4);
    std::swap(a.size[0], a.size[1]);
    a.stride = {1, std::max<int64_t>(scale_pitch(shape), 1)};
    return a;
}

emulated::Result run_quantize(const emulated::Call& call) {
    const Array& input = call.array("x");
    const Array* given = call.optional("scale");
    TK_CHECK(input.dims() == 2, "tk.fp8_quantize: x must have 2 dimensions");
    const int64_t m = input.size[0], k = input.size[1];
    const Array x = k > 1 && input.stride[1] != 1 ? emulated::copy_for_tensor_map(input) : input;
    const q::Problem problem{.m = m,
                             .k = k,
                             .dtype = x.dtype,
                             .out_dtype = call.scalar("dtype", DType::e4m3),
                             .granularity = call.scalar("granularity", 1),
                             .given_scale = given != nullptr,
                             .transposed = call.scalar("transposed", false)};
    if (const std::string reason = unsupported(problem, call.device); !reason.empty()) {
        throw std::runtime_error(concat("tk.fp8_quantize: ", reason));
    }
    emulated::Result result;
    auto& arrays = result.arrays;
    arrays["out"] = emulated::allocate({m, k}, problem.out_dtype);
    arrays["scale"] = allocate_scales(problem.granularity, m, k);
    if (problem.transposed) {
        arrays["out_t"] = emulated::allocate({k, m}, problem.out_dtype);
        arrays["scale_t"] = allocate_scales(problem.granularity, k, m);
    }
    const Array amax = emulated::allocate({q::amax_words(problem)}, DType::int32);
    std::memset(amax.data, 0, static_cast<std::size_t>(amax.extent()));
    const auto floats = [&](const char* name) {
        const auto found = arrays.find(name);
        return found == arrays.end() ? nullptr : reinterpret_cast<float*>(found->second.data);
    };
    const int64_t bytes = size_in_bytes(x.dtype);
    const q::Params params{
        .x = x.data,
        .m = m,
        .k = k,
        .stride = m > 1 ? x.stride[0] : k,
        .out = arrays["out"].data,
        .out_t = problem.transposed ? arrays["out_t"].data : nullptr,
        .scales = floats("scale"),
        .scales_t = floats("scale_t"),
        .scale_stride = scale_pitch(q::scale_shape(problem.granularity, m, k)),
        .scale_stride_t = scale_pitch(q::scale_shape(problem.granularity, k, m)),
        .amax = reinterpret_cast<uint32_t*>(amax.data),
        .given = given ? reinterpret_cast<const float*>(given->data) : nullptr,
        .out_dtype = problem.out_dtype,
        .aligned = k % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
                   (m <= 1 || x.stride[0] * bytes % 16 == 0),
        .pitch_t = m,
    };
    // Few blocks of the pass over all of x: the emulator runs them one after the other.
    run_passes(problem, params, 1, [&](const q::Config& config, const q::Params& pass) {
        emulated::Launch scope("fp8_quantize " + kernel_name(config));
        scope.may_read("x", x);
        if (given) scope.may_read("scale", *given);
        scope.may_write("amax", amax);
        for (const auto& [name, array] : arrays) scope.may_write(name.c_str(), array);
        launch_pass(config, pass, std::make_index_sequence<24>());
    });
    q::Config choice = choose(problem, call.device);
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", kernel_name(choice));
    return result;
}

namespace g = fp8_gemm;

struct Operand {
    Array array;
    int64_t stride = 0, group_stride = 0;
};
// The operand of an array (groups, rows, k), see fp8_gemm.cpp.
Operand operand(const Array& array, bool swap) {
    const View view = swap ? transposed(array.view()) : array.view();
    if (fits_tensor_map(view, 1)) {
        return {array, view.stride[2], view.size[1] > 1 ? view.stride[1] : 0};
    }
    const int64_t groups = view.size[1], rows = view.size[2], k = view.size[3];
    const int64_t pitch = (k + 15) / 16 * 16;
    Array copy = emulated::allocate({groups, rows, k}, array.dtype, 16);
    const View columns = transposed(view);
    if (columns.stride[3] == 1) {
        emulated::Launch scope("transpose");
        scope.may_read("operand", array);
        Array whole = copy;
        whole.size[2] = pitch;
        scope.may_write("copy", whole);
        q::launch<q::TRANSPOSE>(
            {.x = view.data,
             .m = k,
             .k = rows,
             .stride = columns.stride[2],
             .out_t = copy.data,
             .aligned = reinterpret_cast<uintptr_t>(view.data) % 8 == 0 && rows % 8 == 0 &&
                        columns.stride[2] % 8 == 0 && columns.stride[1] % 8 == 0,
             .pitch_t = pitch,
             .batch_stride = columns.stride[1],
             .batches = static_cast<int>(groups),
             .blocks = static_cast<int>(q::blocks_of(q::Pass::transpose, k, rows, 0))},
            nullptr);
    } else {
        Array source = array;
        source.size = {groups, rows, k};
        source.stride = {view.stride[1], view.stride[2], view.stride[3]};
        emulated::copy_elements(copy, source);
    }
    return {copy, pitch, rows * pitch};
}

emulated::Result run_gemm(const emulated::Call& call) {
    const Array &a = call.array("a"), &b = call.array("b");
    const Array &scale_a = call.array("scale_a"), &scale_b = call.array("scale_b");
    const Array *bias = call.optional("bias"), *offs = call.optional("offs");
    const int64_t m = a.size[0], k = a.size[1], n = b.size.back(), groups = offs ? b.size[0] : 1;
    const auto last = [](const auto& list, std::size_t back) { return list[list.size() - back]; };
    const g::ScaleKind kind = g::scale_kind(
        {scale_a.size[0], scale_a.size[1], last(scale_b.size, 2), last(scale_b.size, 1)}, m, n, k);
    TK_CHECK(kind.valid, "tk.fp8_gemm: the shapes of the scales do not fit");
    const DType out_dtype = call.scalar("out_dtype", DType::bf16);
    Array out = emulated::allocate({m, n}, out_dtype);
    emulated::Result result;
    result.arrays["out"] = out;
    if (out.elements() == 0) return result;
    if (groups == 0) {
        std::memset(out.data, 0, static_cast<std::size_t>(out.extent()));
        return result;
    }
    const g::Problem problem{.m = m,
                             .n = n,
                             .k = k,
                             .groups = groups,
                             .a_dtype = a.dtype,
                             .b_dtype = b.dtype,
                             .out_dtype = out_dtype,
                             .accurate = call.scalar("accurate", true) || k == 0,
                             .blockwise = kind.blockwise,
                             .blockwise_1d1d = kind.is_1d1d,
                             .grouped = offs != nullptr,
                             .activated = call.scalar("activation", 0) != 0};
    if (const std::string reason = unsupported(problem, call.device); !reason.empty()) {
        throw std::runtime_error(concat("tk.fp8_gemm: ", reason));
    }
    Operand left{.array = out, .stride = 16}, right = left;
    if (k > 0) left = operand(a, false), right = operand(b, true);
    std::optional<Array> row;
    if (bias) row = n > 1 && bias->stride[0] != 1 ? emulated::copy_for_tensor_map(*bias) : *bias;
    g::Choice choice = choose(problem, call.device);
    emulated::force(choice, call);
    const bool row_scales = kind.blockwise || scale_a.size[0] > 1;
    const bool column_scales = kind.blockwise || scale_b.size.back() > 1;
    const g::Params params{
        .a = left.array.data,
        .b = right.array.data,
        .bias = row ? row->data : nullptr,
        .offs = offs ? reinterpret_cast<const int32_t*>(offs->data) : nullptr,
        .out = out.data,
        .m = m,
        .n = n,
        .k = k,
        .groups = groups,
        .a_stride = left.stride,
        .b_stride = right.stride,
        .b_group_stride = right.group_stride,
        .scale_a = {reinterpret_cast<const float*>(scale_a.data),
                    row_scales ? scale_a.stride[0] : 0, scale_a.stride[1]},
        .scale_b = {reinterpret_cast<const float*>(scale_b.data),
                    column_scales ? last(scale_b.stride, 1) : 0, last(scale_b.stride, 2),
                    scale_b.dims() == 3 && scale_b.size[0] > 1 ? scale_b.stride[0] : 0},
        .blockwise = kind.blockwise,
        .is_1d1d = kind.is_1d1d,
        .out_dtype = out_dtype,
        .bias_dtype = bias ? bias->dtype : DType::bf16,
        .activation = call.scalar("activation", 0),
        .schedule = choice.schedule};
    const std::string name = kernel_name(choice.config, params);
    emulated::Launch scope("fp8_gemm " + name);
    if (k > 0) scope.may_read("a", left.array), scope.may_read("b", right.array);
    scope.may_read("scale_a", scale_a);
    scope.may_read("scale_b", scale_b);
    if (row) scope.may_read("bias", *row);
    if (offs) scope.may_read("offs", *offs);
    scope.may_write("out", out);
    TK_CHECK(g::launch_choice(choice.config, params, nullptr), "tk.fp8_gemm: no kernel ", name);
    result.choice = detail::fields_of(choice);
    result.choice.emplace("kernel", name);
    return result;
}

const bool registered = emulated::register_run("fp8_quantize", &run_quantize) &&
                        emulated::register_run("fp8_gemm", &run_gemm);

}  // namespace
}  // namespace thunderkittens
