// Gradients that an op computes: the names in its schema say what it takes and gives.
#include <ATen/Context.h>

#include <algorithm>
#include <utility>

#include "csrc/autograd/node.h"

namespace thunderkittens::autograd {

namespace {

enum class Source { gradient, saved_input, saved_output, argument, needs };

struct Operand {
    Source source;
    int index = 0;  // of a gradient, a saved tensor or an argument
    bool optional = false;
    bool deterministic = false;  // None: what is set for all of PyTorch
};

struct Backward {
    c10::OperatorHandle op;
    std::vector<Operand> operands{};
    std::vector<int> edges{};  // of its results
    std::size_t needs_count = 0;
    std::vector<bool> has_gradient{};  // whether the op's result has a place among the operands
    std::vector<int> states{};         // results of the op that it also takes as arguments
    int return_state = -1;             // the argument that asks for them
    std::vector<std::pair<int, std::string>> without{};  // edges of arguments without gradient
};

int find(const std::vector<c10::Argument>& arguments, const std::string& name) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        if (arguments[i].name() == name) return static_cast<int>(i);
    }
    return -1;
}

bool is_tensor(const c10::Argument& x) {
    const auto& type = x.type();
    return type->isSubtypeOf(*c10::OptionalType::ofTensor());
}

std::string behind(const std::string& name, const std::string& prefix) {
    return name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : "";
}

int place_in(std::vector<int>& list, int value) {
    list.push_back(value);
    return static_cast<int>(list.size()) - 1;
}

Operand operand_of(const c10::Argument& x, const c10::FunctionSchema& forward, Formula& formula) {
    if (x.name() == "needs") return {Source::needs};
    if (const int i = find(forward.arguments(), x.name()); i >= 0) {
        if (formula.edges[i] >= 0) return {Source::saved_input, place_in(formula.saved_inputs, i)};
        return {
            .source = Source::argument, .index = i, .deterministic = x.name() == "deterministic"};
    }
    if (const int i = find(forward.returns(), x.name()); i >= 0) {
        return {Source::saved_output, place_in(formula.saved_outputs, i)};
    }
    const int i = find(forward.returns(), behind(x.name(), "grad_"));
    TORCH_INTERNAL_ASSERT(i >= 0, formula.op, "_backward: nothing is called ", x.name());
    return {Source::gradient, i, x.type()->kind() == c10::TypeKind::OptionalType};
}

variable_list gradient(const Backward& backward, OpNode& node, variable_list& gradients) {
    const Formula& formula = node.formula;
    const bool state = backward.return_state >= 0 && node.arguments[backward.return_state].toBool();
    for (const int i : backward.states) {
        // A state that was not asked for is empty, and so is its gradient.
        if (!state) gradients[i] = Tensor();
        TORCH_CHECK(!gradients[i].defined() || backward.has_gradient[i], "tk.", formula.op,
                    ": there is no gradient through a returned state; detach it");
    }
    for (const auto& [edge, name] : backward.without) {
        TORCH_CHECK(!node.wanted(edge), "tk.", formula.op, ": the gradient of ", name,
                    " is not computed");
    }
    variable_list result(formula.edge_count);
    c10::List<bool> needs;
    for (std::size_t i = 0; i < backward.edges.size(); ++i) {
        const bool wanted = node.wanted(backward.edges[i]);
        if (i < backward.needs_count) {
            needs.push_back(wanted);
        } else if (wanted) {
            needs.set(backward.needs_count - 1, true);
        }
    }
    bool any = false, optional_given = false;
    for (const bool needed : needs) any = any || needed;
    if (!any) return result;
    for (const Operand& x : backward.operands) {
        if (x.source == Source::gradient && x.optional && gradients[x.index].defined()) {
            optional_given = true;
        }
    }

    torch::jit::Stack stack;
    stack.reserve(backward.operands.size());
    variable_list operands;
    const auto push = [&](const Tensor& x) {
        if (!x.defined()) {
            stack.emplace_back();
            return;
        }
        operands.push_back(x);
        stack.emplace_back(x);
    };
    for (const Operand& x : backward.operands) {
        switch (x.source) {
            case Source::gradient: {
                // All that are optional, or none: an op gets no half of a state.
                const bool zeros = !gradients[x.index].defined() && (!x.optional || optional_given);
                push(zeros ? node.zeros(x.index) : gradients[x.index]);
                break;
            }
            case Source::saved_input: push(node.saved_input(x.index)); break;
            case Source::saved_output: push(node.saved_output(x.index)); break;
            case Source::needs: stack.emplace_back(needs); break;
            case Source::argument:
                stack.push_back(node.arguments[x.index]);
                if (x.deterministic && stack.back().isNone() &&
                    at::globalContext().deterministicAlgorithms()) {
                    stack.back() = true;
                }
        }
    }
    call_below(backward.op, stack);
    for (std::size_t i = 0; i < backward.edges.size(); ++i) {
        if (node.wanted(backward.edges[i])) result[backward.edges[i]] = stack[i].toTensor();
    }
    refuse_double_backward(formula.op, result, operands);
    return result;
}

}  // namespace

Formula by_backward_op(const std::string& op) {
    const c10::FunctionSchema& schema = find_op(op).schema();
    Formula formula{.op = op, .name = "thunderkittens_" + op + "Backward"};
    for (const c10::Argument& x : schema.arguments()) {
        formula.edges.push_back(is_tensor(x) ? formula.edge_count++ : -1);
    }
    Backward backward{.op = find_op(op + "_backward")};
    const c10::FunctionSchema& taken = backward.op.schema();
    backward.has_gradient.resize(schema.returns().size());
    backward.return_state = find(schema.arguments(), "return_state");
    for (std::size_t i = 0; i < schema.returns().size(); ++i) {
        if (find(schema.arguments(), schema.returns()[i].name()) >= 0) {
            backward.states.push_back(static_cast<int>(i));
        }
    }
    for (const c10::Argument& x : taken.arguments()) {
        backward.operands.push_back(operand_of(x, schema, formula));
        const Operand& operand = backward.operands.back();
        if (operand.source == Source::gradient) backward.has_gradient[operand.index] = true;
        if (operand.source == Source::needs) backward.needs_count = x.N().value();
    }
    for (const c10::Argument& x : taken.returns()) {
        const int i = find(schema.arguments(), behind(x.name(), "grad_"));
        TORCH_INTERNAL_ASSERT(i >= 0, op, "_backward: no argument for the result ", x.name());
        backward.edges.push_back(formula.edges[i]);
    }
    for (std::size_t i = 0; i < formula.edges.size(); ++i) {
        const int edge = formula.edges[i];
        const auto& given = backward.edges;
        if (edge < 0 || std::find(given.begin(), given.end(), edge) != given.end()) continue;
        backward.without.emplace_back(edge, schema.arguments()[i].name());
    }
    formula.gradient = [backward = std::move(backward)](OpNode& node, variable_list& gradients) {
        return gradient(backward, node, gradients);
    };
    return formula;
}

}  // namespace thunderkittens::autograd
