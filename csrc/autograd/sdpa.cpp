// The plain calls behind `scaled_dot_product_attention`, which `tk.sdpa` takes, without Python.
// Everything else goes to what was registered before, which is Python's kernel for the same op: it
// takes more, and says why it leaves the rest to PyTorch (integrations/_sdpa_ops.py). Both give the
// same results.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "csrc/attention/common/attention.h"
#include "csrc/autograd/node.h"

namespace thunderkittens::sdpa {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr int64_t MOST_ROWS = int64_t(1) << 28;
constexpr int64_t MOST_HEAD_DIM = 256;

// The ops of aten whose calls are taken, in the order in which they are counted.
constexpr std::array OPS = {
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"};
std::array<std::atomic<int64_t>, OPS.size()> calls{};

// A bit for each GPU that there is code for. It is set when Python has looked at its properties,
// which must not happen before a GPU is used.
std::atomic<uint64_t> devices{};

// An op of this package, called with some of its arguments by name; others have their defaults.
class Callee {
  public:
    explicit Callee(const std::string& name) : op_(autograd::find_op(name)) {
        for (const auto& argument : op_.schema().arguments()) {
            defaults_.push_back(argument.default_value().value_or(IValue()));
        }
    }

    int place(const std::string& argument) const {
        return op_.schema().argumentIndexWithName(argument).value();
    }
    Stack arguments() const { return defaults_; }
    void call(Stack& stack) const { autograd::call_below(op_, stack); }

  private:
    c10::OperatorHandle op_;
    Stack defaults_;
};

// Where an op of aten has its arguments; -1: nowhere.
struct Places {
    explicit Places(const c10::FunctionSchema& schema)
        : count(schema.arguments().size()),
          query(of(schema, "query")),
          key(of(schema, "key")),
          value(of(schema, "value")),
          attn_bias(of(schema, "attn_bias")),
          dropout(of(schema, "dropout_p")),
          causal(of(schema, "is_causal")),
          scale(of(schema, "scale")),
          debug_mask(of(schema, "return_debug_mask")),
          lse_wanted(of(schema, "compute_log_sumexp")),
          grad_out(of(schema, "grad_out")),
          out(of(schema, "out")),
          lse(of(schema, "logsumexp")) {}

    static int of(const c10::FunctionSchema& schema, const char* name) {
        return schema.argumentIndexWithName(name).value_or(-1);
    }

    std::size_t count;
    int query, key, value, attn_bias, dropout, causal, scale, debug_mask, lse_wanted, grad_out, out,
        lse;
};

struct Problem {
    const Tensor &query, &key, &value;
    bool causal;
    const IValue& scale;
};

bool plain(const Problem& x, double dropout) {
    const auto type = x.query.scalar_type();
    if (dropout != 0.0 || (type != at::kBFloat16 && type != at::kHalf)) return false;
    if (x.key.scalar_type() != type || x.value.scalar_type() != type) return false;
    if (x.query.dim() != 4 || x.key.dim() != 4 || x.value.dim() != 4) return false;
    const auto q = x.query.sizes(), k = x.key.sizes(), v = x.value.sizes();
    if (q[0] != k[0] || k.slice(0, 3) != v.slice(0, 3)) return false;
    if (q[3] != k[3] || q[3] != v[3] || q[3] % 8 != 0 || q[3] < 8 || q[3] > MOST_HEAD_DIM) {
        return false;
    }
    if (x.query.numel() == 0 || x.key.numel() == 0 || q[1] % k[1] != 0) return false;
    if (q[0] * q[1] * q[2] > MOST_ROWS || k[2] > MOST_ROWS) return false;
    if (!x.scale.isNone() && !(std::abs(x.scale.toDouble()) <= std::numeric_limits<float>::max())) {
        return false;
    }
    if (x.key.device() != x.query.device() || x.value.device() != x.query.device()) return false;
    return !x.query.is_cuda() || ((devices.load() >> x.query.get_device()) & 1) != 0;
}

struct Setup {
    Callee forward{"attention_forward"}, with_lse{"attention"}, backward{"attention_backward"};
    int causal = forward.place("causal"), scale = forward.place("scale");
    int causal_back = backward.place("causal"), scale_back = backward.place("scale");
    int deterministic_back = backward.place("deterministic");
};

struct Kernel : c10::OperatorKernel {
    std::shared_ptr<const Setup> setup;
    std::size_t index;
    Places places;
    c10::SafeKernelFunction rest;
    bool flash = index < 2;

    Kernel(std::shared_ptr<const Setup> setup, std::size_t index, const c10::OperatorHandle& op,
           c10::SafeKernelFunction rest)
        : setup(std::move(setup)), index(index), places(op.schema()), rest(std::move(rest)) {}

    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
        Stack results;
        const IValue* given = stack->data() + stack->size() - places.count;
        if (!(index % 2 == 0 ? forward(given, results) : backward(given, results))) {
            rest.callBoxed(op, keys, stack);
            return;
        }
        calls[index].fetch_add(1, std::memory_order_relaxed);
        torch::jit::drop(*stack, places.count);
        for (IValue& x : results) stack->push_back(std::move(x));
    }

    std::optional<Problem> taken(const IValue* given) const {
        const Problem x{given[places.query].toTensor(), given[places.key].toTensor(),
                        given[places.value].toTensor(), given[places.causal].toBool(),
                        given[places.scale]};
        if (!plain(x, given[places.dropout].toDouble())) return std::nullopt;
        if (flash) {
            // Rows that see no key have another LSE with PyTorch.
            if (x.causal && x.query.size(2) > x.key.size(2)) return std::nullopt;
        } else {
            const IValue& bias = given[places.attn_bias];
            if (bias.isTensor() && bias.toTensor().defined()) return std::nullopt;
        }
        return x;
    }

    int64_t mask(bool causal) const {
        using attention::Causal;
        return int64_t(!causal ? Causal::none : flash ? Causal::lower_right : Causal::upper_left);
    }

    bool forward(const IValue* given, Stack& results) const {
        const auto x = taken(given);
        if (!x || given[places.debug_mask].toBool()) return false;
        const bool lse = flash || given[places.lse_wanted].toBool();
        const Callee& callee = lse ? setup->with_lse : setup->forward;
        Stack stack = callee.arguments();
        stack[0] = x->query, stack[1] = x->key, stack[2] = x->value;
        stack[setup->causal] = mask(x->causal), stack[setup->scale] = x->scale;
        callee.call(stack);
        const int64_t queries = x->query.size(2), keys = x->key.size(2);
        const auto device = x->query.options();
        results.reserve(9);
        results.push_back(std::move(stack[0]));
        // The state of the random numbers, which nothing reads: without dropout there are none.
        if (flash) {
            results.insert(results.end(),
                           {std::move(stack[1]), Tensor(), Tensor(), queries, keys,
                            at::empty({2}, device.dtype(at::kUInt64)),
                            at::empty({}, device.dtype(at::kUInt64)), at::empty({0}, device)});
        } else if (lse) {
            results.insert(results.end(), {stack[1].toTensor().unsqueeze(3), Tensor(), Tensor(),
                                           queries, keys, at::empty({}, device.dtype(at::kLong)),
                                           at::empty({}, device.dtype(at::kLong)), Tensor()});
        } else {
            results.insert(results.end(), {Tensor(), Tensor(), Tensor(), queries, keys, Tensor(),
                                           Tensor(), Tensor()});
        }
        return true;
    }

    bool backward(const IValue* given, Stack& results) const {
        const auto x = taken(given);
        if (!x) return false;
        const Callee& callee = setup->backward;
        Tensor lse = given[places.lse].toTensor();
        if (lse.dim() == 4) lse = lse.squeeze(3);
        Stack stack = callee.arguments();
        // grad_out, grad_lse, q, k, v, out, lse
        stack[0] = given[places.grad_out], stack[2] = x->query, stack[3] = x->key,
        stack[4] = x->value;
        stack[5] = given[places.out], stack[6] = lse;
        stack[setup->causal_back] = mask(x->causal), stack[setup->scale_back] = x->scale;
        if (at::globalContext().deterministicAlgorithms()) {
            stack[setup->deterministic_back] = true;
        }
        callee.call(stack);
        for (int i = 0; i < 3; ++i) results.push_back(std::move(stack[i]));
        return true;
    }
};

std::mutex mutex;
std::map<std::string, std::unique_ptr<torch::Library>> installed;  // by the dispatch key

// Registers the kernels for a dispatch key, over what is registered now.
void install(const std::string& key_name) {
    const auto key = c10::parseDispatchKey(key_name);
    const auto setup = std::make_shared<const Setup>();
    auto library =
        std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    for (std::size_t i = 0; i < OPS.size(); ++i) {
        const std::string name = std::string("aten::") + OPS[i];
        const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
        if (!op.hasKernelForDispatchKey(key)) continue;
        library->impl(OPS[i], torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(
                                  setup, i, op, op.getComputedKernelForDispatchKey(key))));
    }
    const std::lock_guard lock(mutex);
    installed[key_name] = std::move(library);
}

void remove(const std::string& key_name) {
    const std::lock_guard lock(mutex);
    installed.erase(key_name);
}

void allow(int64_t device) {
    if (device < 64) devices.fetch_or(uint64_t(1) << device);
}

// How many calls of each of OPS have been taken.
std::vector<int64_t> counts() { return {calls.begin(), calls.end()}; }

}  // namespace

TORCH_LIBRARY(thunderkittens_sdpa, library) {
    library.def("install(str key) -> ()", install);
    library.def("remove(str key) -> ()", remove);
    library.def("allow(int device) -> ()", allow);
    library.def("counts() -> int[]", counts);
}

}  // namespace thunderkittens::sdpa
