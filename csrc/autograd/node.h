// Autograd nodes of the ops: what a `torch.autograd.Function` in Python does, without Python in the
// call and in the engine's thread. PyTorch's stable ABI has no nodes, so this
// library fits only the torch that it was built with; without it, Python's functions serve.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

namespace thunderkittens::autograd {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// std::shared_ptr until torch 2.13 or so, then c10::intrusive_ptr.
using NodePointer = decltype(Edge::function);

// Frees a node that ends a long graph without a recursion over all of it.
template <class Anything>
void free_node(Anything* node) {
    deleteNode(node);  // found by its argument where shared pointers need it
}

template <class T, class... Args>
auto make_node(Args&&... args) {
    if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {
        return std::shared_ptr<T>(new T(std::forward<Args>(args)...), free_node<Node>);
    } else {
        return c10::make_intrusive<T>(std::forward<Args>(args)...);
    }
}

struct OpNode;

// How the gradient of an op is computed: made once for each op.
struct Formula {
    std::string op;            // "attention"
    std::string name;          // of the nodes
    std::vector<int> edges{};  // which edge an argument of the op has; -1: it is no tensor
    int edge_count = 0;
    std::vector<int> saved_inputs{}, saved_outputs{};  // by their places
    // Of the former, which are kept of a call; all, where this is not said.
    std::function<bool(const c10::IValue* arguments, int place)> keeps{};
    std::function<variable_list(OpNode&, variable_list&)> gradient{};
};

struct OpNode : Node {
    const Formula& formula;
    std::vector<SavedVariable> saved;    // inputs, then outputs
    std::vector<c10::IValue> arguments;  // of the op; those that are tensors are left out

    explicit OpNode(const Formula& formula) : formula(formula) {}

    std::string name() const override { return formula.name; }
    variable_list apply(variable_list&& gradients) override;
    void release_variables() override;
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
    variable_list apply_with_saved(const variable_list& gradients,
                                   torch::dynamo::autograd::SwapSavedVariables& saved) override;

    Tensor saved_input(std::size_t i) const { return saved[i].unpack(); }
    Tensor saved_output(std::size_t i) {
        return saved[formula.saved_inputs.size() + i].unpack(getptr());
    }
    bool wanted(int edge) const {
        return computes_.empty() ? task_should_compute_output(edge) : computes_[edge];
    }
    // Zeros like a result of the op.
    Tensor zeros(int result);

  private:
    std::mutex mutex_;
    std::vector<bool> computes_;  // under compiled autograd
};

// While a transform of torch.func is active, ops need their whole dispatch.
bool transform_active();

// Calls an op below autograd and autocast; its arguments are on the stack, then its results.
void call_below(const c10::OperatorHandle& op, torch::jit::Stack& stack);

c10::OperatorHandle find_op(const std::string& name, const std::string& overload = "");

// Calls an op that gives one tensor.
Tensor call_below(const c10::OperatorHandle& op, torch::jit::Stack&& stack);

// Makes results of a gradient raise when they are differentiated themselves; `reference` is whether
// tk.reference.<op> can be.
void refuse_double_backward(const std::string& op, const variable_list& results,
                            const variable_list& operands, bool reference = true);

// Whether one of the arguments of a call requires a gradient.
bool recording(const c10::IValue* arguments, std::size_t count);

// The gradient that the op `<op>_backward` computes. Its schema says what goes where: an argument
// has the name of one of the op, or of a result, or is `grad_<result>`, or `needs`: which of its
// own results, `grad_<argument>`, are wanted; the last entry speaks for all results behind it.
Formula by_backward_op(const std::string& op);

// The gradients of tk.gemm, which are products themselves and can be differentiated any number of
// times.
Formula of_gemm();
Formula of_fused_gemm();
Formula of_grouped_gemm();

// Of the norms, whose residual may have the gradient of what was normalised, and of rotations,
// which are rotations back.
Formula of_rms_norm();
Formula of_layer_norm();
Formula of_rotary();

// Of tk.nvfp4_gemm: dense products of the weight's values.
Formula of_nvfp4_gemm();

// Whether x lies in memory column by column, as the transpose of a weight does. Its gradient has to
// lie so as well: autograd copies one of other strides to accumulate it.
bool column_by_column(const Tensor& x);

// The gradient of what an activation is applied to, by PyTorch's operations.
Tensor through_activation(const Tensor& grad, const Tensor& z, int64_t activation);

}  // namespace thunderkittens::autograd
