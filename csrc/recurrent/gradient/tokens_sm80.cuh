// The kernels of the gradient that need neither wgmma nor TMA, for every GPU from compute
// capability 8.0 on.
#pragma once

#include "csrc/recurrent/gradient/gate_sm90.cuh"
#include "csrc/recurrent/gradient/sum_keys_sm90.cuh"
#include "csrc/recurrent/gradient/tokens_sm90.cuh"
