// The gradient of the gate silu(z) behind the output: of z, and of the output before it, which the
// other kernels begin with. A thread has eight neighbouring elements.
#pragma once

#include "csrc/recurrent/gradient/types_sm90.cuh"

namespace thunderkittens::recurrent {

constexpr int GATE_THREADS = 256;

struct GateGlobals {
    Operand grad_out, out, z, grad_before, grad_z;
    int heads, length, words;  // words: of a row
    int64_t count;             // of all rows
};

template <class T, bool portable>
__global__ __launch_bounds__(GATE_THREADS) void gradient_gate_kernel(
    const __grid_constant__ GateGlobals g) {
    arch::launch_dependents();
    arch::wait_for_dependencies();
    const int64_t index = int64_t(blockIdx.x) * GATE_THREADS + int(threadIdx.x);
    if (index >= g.count) return;
    const int column = 8 * int(index % g.words);
    const int64_t line = index / g.words, row = line % g.length, head = line / g.length % g.heads,
                  batch = line / g.length / g.heads;
    const auto at = [&](const Operand& x) {
        return static_cast<T*>(const_cast<void*>(x.data)) +
               (batch * x.batch_stride + head * x.head_stride + row * x.row_stride + column);
    };
    const auto load = [&](const Operand& x) {
        return arch::load_global(reinterpret_cast<const uint4*>(at(x)));
    };
    const uint4 gradients = load(g.grad_out), outs = load(g.out), gates = load(g.z);
    uint4 before, result;
    const auto differentiate = [](uint32_t gradient, uint32_t out, uint32_t gate, uint32_t& to,
                                  uint32_t& to_gate) {
        const float2 d = unpack_pair<T>(arch::bit_cast<packed_type<T>>(gradient));
        const float2 y = unpack_pair<T>(arch::bit_cast<packed_type<T>>(out));
        const float2 z = unpack_pair<T>(arch::bit_cast<packed_type<T>>(gate));
        const float2 s = {1.0f / (1.0f + ::expf(-z.x)), 1.0f / (1.0f + ::expf(-z.y))};
        to = arch::bit_cast<uint32_t>(pack_pair<T>(d.x * (z.x * s.x), d.y * (z.y * s.y)));
        to_gate =
            arch::bit_cast<uint32_t>(pack_pair<T>(d.x * y.x * (s.x * (1.0f + z.x * (1.0f - s.x))),
                                                  d.y * y.y * (s.y * (1.0f + z.y * (1.0f - s.y)))));
    };
    differentiate(gradients.x, outs.x, gates.x, before.x, result.x);
    differentiate(gradients.y, outs.y, gates.y, before.y, result.y);
    differentiate(gradients.z, outs.z, gates.z, before.z, result.z);
    differentiate(gradients.w, outs.w, gates.w, before.w, result.w);
    arch::store_global(reinterpret_cast<uint4*>(at(g.grad_before)), before);
    arch::store_global(reinterpret_cast<uint4*>(at(g.grad_z)), result);
}

template <DType dtype, bool portable>
void launch_gradient_gate(const RecurrentProblem& p, const GateGradient& call, Stream stream) {
    const int words = int(p.value_dim / 8);
    const GateGlobals globals{.grad_out = call.grad_out,
                              .out = call.out,
                              .z = call.z,
                              .grad_before = call.grad_before,
                              .grad_z = call.grad_z,
                              .heads = int(p.heads),
                              .length = int(p.length),
                              .words = words,
                              .count = p.batch * p.heads * p.length * words};
    kittens::launch({.dependent = !portable}, gradient_gate_kernel<type_of<dtype>, portable>,
                    dim3(unsigned(ceil_div(globals.count, GATE_THREADS))), dim3(GATE_THREADS),
                    dim3(1), 0, stream, globals);
}

}  // namespace thunderkittens::recurrent
