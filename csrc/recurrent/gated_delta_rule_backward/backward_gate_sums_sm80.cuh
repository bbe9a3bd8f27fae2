// The sums of backward_gate_sums_sm90.cuh for every GPU from compute capability 8.0 on.
#pragma once

#include "csrc/recurrent/gated_delta_rule_backward/backward_gate_sums_sm90.cuh"
