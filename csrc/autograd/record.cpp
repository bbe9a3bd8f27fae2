// What the ops do for autograd: calls are recorded by a node, and gradients that cannot be
// differentiated themselves by one that says so.
#include "csrc/autograd/node.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <utility>

#include "csrc/autograd/fp8_linear.h"

namespace thunderkittens::autograd {

namespace {

constexpr auto ABOVE =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

// What a gradient that was differentiated raises.
struct Refusal : Node {
    std::string op;
    bool reference;
    Refusal(std::string op, edge_list&& edges, bool reference)
        : Node(std::move(edges)), op(std::move(op)), reference(reference) {}
    std::string name() const override { return "thunderkittens_" + op + "BackwardBackward"; }
    variable_list apply(variable_list&&) override {
        TORCH_CHECK(false, "tk.", op,
                    ": the gradient cannot be differentiated again (double backward)",
                    reference ? "; tk.reference." + op + " can" : "");
    }
};

void call_implementation(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

void save_arguments(OpNode& node, const c10::IValue* arguments) {
    const Formula& formula = node.formula;
    edge_list edges(formula.edge_count);
    node.arguments.reserve(formula.edges.size());
    for (std::size_t i = 0; i < formula.edges.size(); ++i) {
        const c10::IValue& x = arguments[i];
        node.arguments.emplace_back(x.isTensor() ? c10::IValue() : x);
        if (!x.isTensor() || formula.edges[i] < 0) continue;
        edges[formula.edges[i]] = torch::autograd::impl::gradient_edge(x.toTensor());
    }
    node.set_next_edges(std::move(edges));
    node.saved.reserve(formula.saved_inputs.size() + formula.saved_outputs.size());
    for (const int i : formula.saved_inputs) {
        const c10::IValue& x = arguments[i];
        const bool kept = x.isTensor() && (!formula.keeps || formula.keeps(arguments, i));
        node.saved.emplace_back(kept ? x.toTensor() : Tensor(), false);
    }
}

struct Recorder : c10::OperatorKernel {
    const Formula& formula;
    explicit Recorder(const Formula& formula) : formula(formula) {}

    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
        const std::size_t count = formula.edges.size(), first = stack->size() - count;
        if (!recording(stack->data() + first, count)) {
            call_implementation(op, keys, stack);
            return;
        }
        const auto node = make_node<OpNode>(formula);
        save_arguments(*node, stack->data() + first);
        call_implementation(op, keys, stack);
        for (std::size_t i = first; i < stack->size(); ++i) {
            const Tensor& output = (*stack)[i].toTensor();
            if (torch::autograd::isDifferentiableType(output.scalar_type())) {
                torch::autograd::set_history(output, node);
            } else {
                node->add_input_metadata(Node::undefined_input());
            }
        }
        for (const int i : formula.saved_outputs) {
            node->saved.emplace_back((*stack)[first + i].toTensor(), true);
        }
    }
};

// A gradient that cannot be differentiated itself.
struct Refuser : c10::OperatorKernel {
    const std::string op;
    explicit Refuser(std::string op) : op(std::move(op)) {}

    void operator()(const c10::OperatorHandle& gradient, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
        const std::size_t count = gradient.schema().arguments().size();
        const std::size_t first = stack->size() - count;
        variable_list operands, results;
        if (recording(stack->data() + first, count)) {
            for (std::size_t i = first; i < stack->size(); ++i) {
                if ((*stack)[i].isTensor()) operands.push_back((*stack)[i].toTensor());
            }
        }
        call_implementation(gradient, keys, stack);
        if (operands.empty()) return;
        for (std::size_t i = first; i < stack->size(); ++i) {
            results.push_back((*stack)[i].toTensor());
        }
        refuse_double_backward(op, results, operands);
    }
};

}  // namespace

bool recording(const c10::IValue* arguments, std::size_t count) {
    if (!c10::GradMode::is_enabled()) return false;
    for (std::size_t i = 0; i < count; ++i) {
        if (arguments[i].isTensor() && arguments[i].toTensor().requires_grad()) return true;
    }
    return false;
}

variable_list OpNode::apply(variable_list&& gradients) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return formula.gradient(*this, gradients);
}

void OpNode::release_variables() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& x : saved) x.reset_data();
}

void OpNode::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
    for (std::size_t i = 0; i < saved.size(); ++i) {
        args.collect(saved[i], i >= formula.saved_inputs.size());
    }
    for (const c10::IValue& x : arguments) args.collect(x, true);
}

variable_list OpNode::apply_with_saved(const variable_list& gradients,
                                       torch::dynamo::autograd::SwapSavedVariables& swapped) {
    namespace compiled = torch::dynamo::autograd;
    for (SavedVariable& x : saved) swapped.before(x);
    std::vector<bool> computes(formula.edge_count), given;
    for (int i = 0; i < formula.edge_count; ++i) computes[i] = task_should_compute_output(i);
    std::vector<c10::IValue> tensors;
    std::vector<at::TypePtr> types;
    for (std::size_t i = 0; i < saved.size(); ++i) {
        const bool output = i >= formula.saved_inputs.size();
        const Tensor x = output ? saved[i].unpack(getptr()) : saved[i].unpack();
        given.push_back(x.defined());
        if (!x.defined()) continue;
        tensors.emplace_back(x);
        types.push_back(at::TensorType::get());
    }
    // What the compiled graph calls, with the tensors of its day.
    const auto call = [&formula = formula, arguments = arguments, computes, given](
                          const variable_list& gradients, const std::vector<c10::IValue>& tensors) {
        const auto node = make_node<OpNode>(formula);
        node->arguments = arguments;
        node->computes_ = computes;
        auto next = tensors.begin();
        for (const bool defined : given) {
            node->saved.emplace_back(defined ? (next++)->toTensor() : Tensor(), false);
        }
        return node->apply(variable_list(gradients));
    };
    const auto metadata =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    const auto& python = compiled::getPyCompilerInterface();
    const std::string function =
        python->bind_function(swapped.get_py_compiler(), name(), call, types, true, true);
    variable_list result = python->call_function(swapped.get_py_compiler(), "apply_functional",
                                                 function, gradients, tensors, metadata);
    for (SavedVariable& x : saved) swapped.after(x);
    return result;
}

Tensor OpNode::zeros(int result) {
    for (std::size_t i = 0; i < formula.saved_outputs.size(); ++i) {
        if (formula.saved_outputs[i] == result) return at::zeros_like(saved_output(i));
    }
    return input_metadata(result).zeros_like();
}

bool transform_active() {
    return c10::impl::tls_is_dispatch_key_included(
        c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

void call_below(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    if (transform_active()) {
        op.callBoxed(stack);
        return;
    }
    const c10::impl::ExcludeDispatchKeyGuard guard(ABOVE);
    op.callBoxed(stack);
}

c10::OperatorHandle find_op(const std::string& name, const std::string& overload) {
    const std::string full = "thunderkittens::" + name;
    return c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), overload.c_str());
}

Tensor call_below(const c10::OperatorHandle& op, torch::jit::Stack&& stack) {
    call_below(op, stack);
    return stack[0].toTensor();
}

void refuse_double_backward(const std::string& op, const variable_list& results,
                            const variable_list& operands, bool reference) {
    if (!c10::GradMode::is_enabled()) return;
    if (!torch::autograd::any_variable_requires_grad(operands)) return;
    const auto node =
        make_node<Refusal>(op, torch::autograd::collect_next_edges(operands), reference);
    for (const Tensor& x : results) {
        if (x.defined()) torch::autograd::set_history(x, node);
    }
}

namespace {

void add(torch::Library& library, const std::string& name, Formula formula) {
    // As long as the process lives, like the op.
    const auto& kept = *new Formula(std::move(formula));
    library.impl(name.c_str(),
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Recorder>(kept)));
}

void add_all(torch::Library& library) {
    for (const std::string op : {"attention", "attention_varlen", "based", "causal_conv1d",
                                 "gated_delta_rule", "lolcats", "ssd", "linear_attention"}) {
        add(library, op, by_backward_op(op));
        library.impl((op + "_backward").c_str(),
                     torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Refuser>(op)));
    }
    add(library, "gemm", of_gemm());
    add(library, "gemm.fused", of_fused_gemm());
    add(library, "grouped_gemm", of_grouped_gemm());
    add(library, "nvfp4_gemm", of_nvfp4_gemm());
    add(library, "rms_norm", of_rms_norm());
    add(library, "layer_norm", of_layer_norm());
    add(library, "rotary", of_rotary());
    for (const std::string op : {"rms_norm", "layer_norm"}) {
        library.impl((op + "_backward").c_str(),
                     torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Refuser>(op)));
    }
    library.impl("gemm_backward",
                 torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Refuser>("gemm")));
}

}  // namespace

// Of these keys, a kernel comes before what Python registers for autograd on all devices.
TORCH_LIBRARY_IMPL(thunderkittens, AutogradCPU, library) { add_all(library); }
TORCH_LIBRARY_IMPL(thunderkittens, AutogradCUDA, library) { add_all(library); }

// Of several ops, whose intermediate tensors Python need not see.
TORCH_LIBRARY_FRAGMENT(thunderkittens, library) {
    library.def(
        "fp8_linear(Tensor x, Tensor weight, Tensor? bias, ScalarType? cast, int granularity_x, "
        "int granularity_weight, ScalarType grad_dtype, bool accurate) -> Tensor",
        fp8_linear);
}

}  // namespace thunderkittens::autograd
