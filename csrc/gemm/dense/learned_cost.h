// What the model of cost.h leaves out, learned from timings: a multilayer perceptron, whose inputs
// are what a product and a choice are made of, tells the factor between a choice's time and the
// model's. tools/fit_gemm_cost.py times choices of drawn products and fits it. Pure functions of
// the problem and the device; host C++ only.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "csrc/gemm/dense/cost.h"
#include "csrc/gemm/dense/learned_cost_weights.h"

namespace thunderkittens::gemm {

// The inputs, in the order of the weights: sizes as logarithms to base 2, others as they are, and a
// place for each kernel.
using LearnedInputs = std::array<float, COST_INPUTS>;

inline LearnedInputs learned_inputs(const Choice& choice, const Problem& p, int sm_count,
                                    double cycles) {
    const Config& c = choice.config;
    const Schedule& s = choice.schedule;
    const Tiling t = tiling_of(choice, p);
    const double steps = double(k_steps(p)), m = double(p.m), n = double(p.n);
    const double rows = std::ceil(m / t.block_m), columns = std::ceil(n / t.block_n);
    const double sms = sms_for(t.cluster, sm_count);
    const bool persistent_clusters = choice.kernel == Kernel::runtime_tile;
    const double waves = t.blocks / (persistent_clusters ? double(s.blocks) : sms),
                 whole_waves = std::ceil(waves);
    const double steps_of_block =
        choice.kernel == Kernel::split_k ? steps * t.tiles / t.blocks : steps / t.splits;
    const double off_a = off_lines(p.a_alignment), off_b = off_lines(p.b_alignment);
    const double products = t.size() / 32,
                 loads = t.block_m / t.share_n * (1 + off_a) + t.block_n / t.share_m * (1 + off_b);
    const double at_a_time = std::min(t.blocks, sms) / t.splits;
    const auto log = [](double x) { return std::log2(static_cast<float>(x)); };
    LearnedInputs x = {
        log(cycles),
        log(whole_waves * steps_of_block * products),
        log(whole_waves * steps_of_block * loads),
        log(products / loads),
        log(bytes_of(p)),
        log(whole_waves),
        log(whole_waves / waves),
        static_cast<float>(std::min(waves, 4.0)),
        log(t.tiles),
        log(steps),
        log(steps_of_block),
        log(t.block_m),
        log(t.block_n),
        log(m),
        log(n),
        log(std::max(1.0, double(p.k))),
        log(double(p.batch)),
        log(t.tiles * t.size() / (double(p.batch) * m * n)),
        log(std::max(1.0, at_a_time / (columns * t.share_m))),
        log(std::max(1.0, at_a_time / (rows * t.share_n))),
        log(whole_waves * t.size()),
        static_cast<float>(off_a),
        static_cast<float>(off_b),
        log(t.share_m),
        log(t.share_n),
        log(t.splits),
        float(t.per_sm > 1),
        float(s.columns > 0),
        float(s.store_interval > 0),
        float(c.swap_ab),
        float(p.a_m_major),
        float(p.b_n_major),
        float(p.dtype == DType::fp16),
        float(p.fused),
        float(p.gate != Gate::none),
        float(p.n % 64 != 0),
        float(p.n % 8 != 0),
        float(p.a_needs_copy),
        float(p.b_needs_copy),
    };
    x[COST_INPUTS - KERNELS + static_cast<int>(choice.kernel)] = 1;
    return x;
}

// Whether products such as this were timed: not batches, and not few rows with an epilogue.
inline bool is_learned(const Problem& p) { return p.batch == 1 && !(p.fused && p.m <= 64); }

// The factor, within what the timings that it was learned from have shown.
inline double learned_factor(LearnedInputs x) {
    const LearnedCost& net = LEARNED_COST;
    std::array<float, COST_HIDDEN_1> first = net.bias_1;
    for (int i = 0; i < COST_INPUTS; ++i) {
        x[i] = std::clamp(x[i], net.least[i], net.most[i]);
        for (int j = 0; j < COST_HIDDEN_1; ++j) first[j] += x[i] * net.weight_1[i][j];
    }
    std::array<float, COST_HIDDEN_2> second = net.bias_2;
    for (int i = 0; i < COST_HIDDEN_1; ++i) {
        for (int j = 0; j < COST_HIDDEN_2; ++j)
            second[j] += std::max(first[i], 0.0f) * net.weight_2[i][j];
    }
    float result = net.bias_3;
    for (int j = 0; j < COST_HIDDEN_2; ++j) result += std::max(second[j], 0.0f) * net.weight_3[j];
    return std::exp2(std::clamp(result, -1.5f, 1.5f));
}

inline double expected_cycles(const Choice& choice, const Problem& p, int sm_count, double cycles) {
    if (!is_learned(p)) return cycles;
    return cycles * learned_factor(learned_inputs(choice, p, sm_count, cycles));
}

}  // namespace thunderkittens::gemm
